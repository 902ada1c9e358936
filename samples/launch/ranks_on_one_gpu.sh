#!/usr/bin/env bash
# Several ranks on one GPU, over NCCL, to try the messages and collectives of a cluster without one:
#
#   samples/launch/ranks_on_one_gpu.sh 2 --mesh 1,2,1        # how many ranks, and the script's arguments
#
# NCCL refuses two ranks of one host on one device. With different host names they take each other for other hosts and
# talk over sockets: this shows that a mesh works, not how fast it is. Without a GPU they talk over gloo. On an H100 the
# meshes 1,2,1 and 2,1,1 and 2,2,2 gave the same losses, to all printed digits (26 November 2026).
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
