"""Pipeline rank 0 of 2, on each of its 2 tensor x 1 data ranks.     tiny GPT, mesh tensor=2 pipeline=2 data=1
capture 40 nodes
shard_tensors 40 -> 46 nodes
cut_stages 2 stages
stage 0: wte - h.0: 1.09e-05 GFLOP forward, 3.55 kB of parameters per rank
This text is what runs. Edit it, and autoptd.load(folder) runs the edit; check() and verify() judge it.
"""

from autoptd.runtime import aten, collectives, kernels

SCHEDULE = """
warm-up: 0F0 0SEND_F0
steady: (0RECV_B0 0F1 0SEND_F1 0B0) x2 +1 0RECV_B2 0F3 0SEND_F3 0RECV_B3 0B2
cool-down: 0B3
"""


def stage_0(rank, p, ids):                                                  # i64[1, 8]             batch
    # wte, drop                                                               gpt.py:80
    wte = kernels.embedding(rank, p["wte.weight"], ids, vocabulary=30)      # f32[1, 8, 16]         partial
    wte_g = collectives.reduce_from_tensor(rank, wte)                       # all-reduce, 512 B over tensor
    drop = kernels.dropout(rank, wte_g, p=0.1, operator=0)                  # f32[1, 8, 16]

    # h.0                                                                     gpt.py:60
    ln_1 = aten.layer_norm(drop, [16], p["h.0.ln_1.weight"], p["h.0.ln_1.bias"])  # f32[1, 8, 16]
    ln_1_f = collectives.copy_to_tensor(rank, ln_1)                  # backward: all-reduce, 512 B over tensor

    # h.0.attn                                                                gpt.py:30
    c_attn = aten.linear(ln_1_f, p["h.0.attn.c_attn.weight"], p["h.0.attn.c_attn.bias"])  # f32[1, 8, 48/2]
    q, k, v = aten.split(c_attn, 8, dim=2)                                  # 3 x f32[1, 8, 16/2]
    view = aten.view(q, [1, 8, 2, 4])                                       # f32[1, 8, 4/2, 4]
    view_1 = aten.view(k, [1, 8, 2, 4])                                     # f32[1, 8, 4/2, 4]
    view_2 = aten.view(v, [1, 8, 2, 4])                                     # f32[1, 8, 4/2, 4]
    transpose = aten.transpose(view, 1, 2)                                  # f32[1, 4/2, 8, 4]
    transpose_1 = aten.transpose(view_1, 1, 2)                              # f32[1, 4/2, 8, 4]
    transpose_2 = aten.transpose(view_2, 1, 2)                              # f32[1, 4/2, 8, 4]
    attention = aten.scaled_dot_product_attention(                          # f32[1, 4/2, 8, 4]
        transpose, transpose_1, transpose_2, p["constant.bias"]
    )
    transpose_y = aten.transpose(attention, 1, 2)                           # f32[1, 8, 4/2, 4]
    reshape = aten.reshape(transpose_y, [1, 8, 8])                          # f32[1, 8, 16/2]
    c_proj = aten.linear(reshape, p["h.0.attn.c_proj.weight"])              # f32[1, 8, 16]         partial
    c_proj_g = collectives.reduce_from_tensor(rank, c_proj)                 # all-reduce, 512 B over tensor
    c_proj_biased = aten.add(c_proj_g, p["h.0.attn.c_proj.bias"])           # f32[1, 8, 16]

    # h.0                                                                     gpt.py:61
    h_0 = aten.add(drop, c_proj_biased)                                     # f32[1, 8, 16]

    return (
        h_0,                                            # f32[1, 8, 16]  to stage 1, 256 B per rank, scattered
        transpose,                                      # f32[1, 4/2, 8, 4]  to stage 1, 256 B per rank
    )


def constants(p):                                                          # runs once, when weights are bound
    # h.0.attn                                                                gpt.py:40
    zeros = aten.zeros([8, 8])                                              # f32[8, 8]
    hidden = aten.eq(p["h.0.attn.mask"], 0)                                 # bool[8, 8]
    masked_fill = aten.masked_fill(zeros, hidden, float("-inf"))            # f32[8, 8]

    return {
        "constant.bias": masked_fill,
    }
