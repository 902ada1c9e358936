"""Pipeline rank 1 of 2, on each of its 2 tensor x 1 data ranks.     tiny GPT, mesh tensor=2 pipeline=2 data=1
capture 40 nodes
shard_tensors 40 -> 46 nodes
cut_stages 2 stages
stage 1: gate - head: 4.15e-06 GFLOP forward, 960 B of parameters per rank
This text is what runs. Edit it, and autoptd.load(folder) runs the edit; check() and verify() judge it.
"""

import torch

from autoptd.runtime import aten, collectives, kernels

SCHEDULE = """
steady: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 (1F1 1RECV_F2 1B1 1SEND_B1) x2 +1 1F3 1B3 1SEND_B3
"""


def stage_1(
    rank,
    p,
    h,                                                 # f32[1, 8, 16]  from stage 0, 256 B per rank, gathered
    q,                                                 # f32[1, 4/2, 8, 4]  from stage 0, 256 B per rank
    targets,                                           # i64[1, 8]  batch
):
    # gate, head                                                              gpt.py:70
    mean = aten.mean(q)                                                     # f32[]                 partial
    mean_g = collectives.reduce_from_tensor(rank, mean)                     # all-reduce, 4 B over tensor
    new = aten.full([], 1.5, dtype=torch.float32, device=rank.device)       # f32[]
    gated = aten.addcmul(h, mean_g, new, value=0.5)                         # f32[1, 8, 16]
    gated_f = collectives.copy_to_tensor(rank, gated)                # backward: all-reduce, 512 B over tensor
    head = aten.linear(gated_f, p["wte.weight"])                            # f32[1, 8, 30/2]
    logits = aten.view(head, [8, 15])                                       # f32[8, 30/2]
    flat = aten.view(targets, [8])                                          # i64[8]
    loss = kernels.cross_entropy(rank, logits, flat, vocabulary=30)      # f32[]  all-reduce, 96 B over tensor

    return loss                                                             # f32[]
