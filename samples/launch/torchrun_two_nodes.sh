#!/usr/bin/env bash
# Two nodes of eight GPUs, without a scheduler. Run it on both, with the first one's address:
#
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 samples/launch/torchrun_two_nodes.sh --mesh 8,2,1
#   NODE_RANK=1 MASTER_ADDR=10.0.0.1 samples/launch/torchrun_two_nodes.sh --mesh 8,2,1
#
# Ranks are numbered node by node, and tensor ranks are next to each other: let the tensor size divide GPUS_PER_NODE,
# so that they share a node. Each node's name must resolve, on the node itself, to an address that the other can reach;
# otherwise name the right interface, in GLOO_SOCKET_IFNAME on CPUs, in NCCL_SOCKET_IFNAME on GPUs.
set -euo pipefail

: "${NODE_RANK:?0 on the first node, 1 on the second}"
: "${MASTER_ADDR:?the first node, as the second reaches it}"

exec torchrun \
    --nnodes "${NNODES:-2}" \
    --node-rank "$NODE_RANK" \
    --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --master-addr "$MASTER_ADDR" \
    --master-port "${MASTER_PORT:-29500}" \
    -m "${SCRIPT:-samples.train}" "$@"
