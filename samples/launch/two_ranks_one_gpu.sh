#!/usr/bin/env bash
# Two ranks on one GPU, over NCCL, to try the messages and collectives of a cluster where there is none:
#
#   samples/launch/two_ranks_one_gpu.sh --mesh 1,2,1        # or 2,1,1 or 1,1,2; without a GPU over gloo
#
# NCCL refuses two ranks of one host on one device. With host names of their own they take each other for two hosts, and
# talk over sockets: it shows that a mesh works, not how fast it is. Not run on a GPU yet.
set -euo pipefail

export WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29500}"
for RANK in 0 1; do
    RANK=$RANK NCCL_HOSTID="host$RANK" "${PYTHON:-python}" -m "${SCRIPT:-samples.train}" "$@" &
done
status=0
for rank in $(jobs -p); do wait "$rank" || status=$?; done
exit $status
