#!/usr/bin/env bash
# Several ranks on one GPU, over NCCL, to try the messages and collectives of a cluster where there is none:
#
#   samples/launch/ranks_on_one_gpu.sh 2 --mesh 1,2,1        # how many ranks, and the script's arguments
#
# NCCL refuses two ranks of one host on one device. With host names of their own they take each other for other hosts,
# and talk over sockets: it shows that a mesh works, not how fast it is. Not run on a GPU yet; without one, over gloo.
set -euo pipefail

ranks=$1
shift
export NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket GLOO_SOCKET_IFNAME=lo
export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29500}"
for ((rank = 0; rank < ranks; rank++)); do
    RANK=$rank WORLD_SIZE=$ranks NCCL_HOSTID="host$rank" "${PYTHON:-python}" -m "${SCRIPT:-samples.train}" "$@" &
done
status=0
for process in $(jobs -p); do wait "$process" || status=$?; done
exit $status
