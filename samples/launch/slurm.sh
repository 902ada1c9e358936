#!/usr/bin/env bash
#SBATCH --job-name=autoptd
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#
# 64 GPUs: one torchrun a node, which starts a process a GPU.
#
#   sbatch samples/launch/slurm.sh --mesh 8,4,2
#
# The mesh's product is nodes x GPUs of a node. Where the network has more than one interface, name the fast one in
# NCCL_SOCKET_IFNAME.
set -euo pipefail

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}

exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:${MASTER_PORT:-29500}" \
    --rdzv-id "$SLURM_JOB_ID" \
    -m "${SCRIPT:-samples.train}" "$@"
