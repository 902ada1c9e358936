"""Pipeline rank 0 of 1, on each of its 2 tensor x 1 data ranks.
GPT, 27,936 parameters, mesh tensor=2 pipeline=1 data=1
capture GPT: 91 nodes
normalize 91 -> 98 nodes, 7 dropouts
fold_constants 98 -> 98 nodes, 1 constants of 128 bytes
recognize_attention 2 attentions: 2 softmax only causal because of dropout
shard_tensors tensor=2: 5 axes divided, 5 all-reduces forward, 5 backward; tokens stay whole, as they are few
    for DGX A100 (Selene)
weight of shape [16, 32] (2,048 bytes) replicated because aten.embedding (gpt.py:108) looks up the same rows
    in every step; aten.layer_norm (gpt.py:75) normalises over it: wpe.weight
an axis of 61 padded by 1 in memory: tensor=2
cut_stages 1 stages on 1 pipeline ranks, the slowest 1.06 ms of forward and backward a microbatch on DGX A100
    (Selene): 1.000 of the mean, 0.0% above the lower bound (dynamic programme, exact)
recompute_activations selective: 2 attentions written out, 2 groups; a microbatch keeps 96,456 of 112,840
    bytes of activations
overlap_reductions 5 of 5 sums backward beside weight gradients
stage 0: wte - lm_head: 0.000943 GFLOP forward, 58 kB of parameters per rank
This text is what runs. Edit it, and autoptd.load(folder) runs the edit; check() and verify() judge it.
"""

from autoptd.runtime import aten, collectives, kernels
from autoptd.runtime.recomputation import recompute

SCHEDULE = """
steady: (0F0 0B0) x8 +1
"""


def stage_0(
    rank,
    p,
    idx,                                                                    # i64[2, 16]  batch
    targets,                                                                # i64[2, 16]  batch
):
    # wte, wpe, drop                                                          gpt.py:108
    wte = kernels.embedding(rank, p["wte.weight"], idx, vocabulary=61)      # f32[2, 16, 32]        partial
    wpe = aten.embedding(p["wpe.weight"], p["constant.arange"])             # f32[16, 32]
    wte_g = collectives.reduce_from_tensor(rank, wte)                       # all-reduce, 4.1 kB over tensor
    add = aten.add(wte_g, wpe)                                              # f32[2, 16, 32]
    drop = kernels.dropout(rank, add, p=0.1, operator=0)                    # f32[2, 16, 32]

    # h.0                                                                     gpt.py:75
    h0_ln1 = aten.layer_norm(drop, [32], p["h.0.ln_1.weight"], p["h.0.ln_1.bias"])  # f32[2, 16, 32]

    # h.0.attn                                                                gpt.py:45
    h0_attn_c_attn = collectives.copied_linear(                             # f32[2, 16, 96/2]
        rank, h0_ln1, p["h.0.attn.c_attn.weight"], p["h.0.attn.c_attn.bias"]
    )                                 # backward: all-reduce, 4.1 kB over tensor, beside the weight's gradient
    h0_attn_split_0, h0_attn_split_1, h0_attn_split_2 = aten.split(         # 3 x f32[2, 16, 32/2]
        h0_attn_c_attn, 16, dim=2
    )
    h0_attn_reshape = aten.reshape(h0_attn_split_0, [2, 16, 2, 8])          # f32[2, 16, 4/2, 8]
    h0_attn_transpose = aten.transpose(h0_attn_reshape, 1, 2)               # f32[2, 4/2, 16, 8]
    h0_attn_reshape_1 = aten.reshape(h0_attn_split_1, [2, 16, 2, 8])        # f32[2, 16, 4/2, 8]
    h0_attn_transpose_1 = aten.transpose(h0_attn_reshape_1, 1, 2)           # f32[2, 4/2, 16, 8]
    h0_attn_reshape_2 = aten.reshape(h0_attn_split_2, [2, 16, 2, 8])        # f32[2, 16, 4/2, 8]
    h0_attn_transpose_2 = aten.transpose(h0_attn_reshape_2, 1, 2)           # f32[2, 4/2, 16, 8]
    h0_attn_transpose_3 = aten.transpose(h0_attn_transpose_1, -2, -1)       # f32[2, 4/2, 8, 16]

    # recomputed in the backward
    def h0_attn_core(rank, h0_attn_transpose, h0_attn_transpose_3, h0_attn_transpose_2):
        # h.0.attn                                                            gpt.py:48
        h0_attn_matmul = aten.matmul(h0_attn_transpose, h0_attn_transpose_3)  # f32[2, 4/2, 16, 16]
        h0_attn_softmax = kernels.scaled_softmax(                           # f32[2, 4/2, 16, 16]
            rank, h0_attn_matmul, is_causal=True, scale=0.35355339059327373, p=0.1, operator=1, divided=1
        )
        h0_attn_matmul_1 = aten.matmul(h0_attn_softmax, h0_attn_transpose_2)  # f32[2, 4/2, 16, 8]

        return h0_attn_matmul_1

    h0_attn_matmul_1 = recompute(                                           # f32[2, 4/2, 16, 8]
        rank, h0_attn_core, h0_attn_transpose, h0_attn_transpose_3, h0_attn_transpose_2
    )

    # h.0.attn                                                                gpt.py:49
    h0_attn_transpose_4 = aten.transpose(h0_attn_matmul_1, 1, 2)            # f32[2, 16, 4/2, 8]
    h0_attn_contiguous = aten.contiguous(h0_attn_transpose_4)               # f32[2, 16, 4/2, 8]
    h0_attn_reshape_3 = aten.reshape(h0_attn_contiguous, [2, 16, 16])       # f32[2, 16, 32/2]
    h0_attn_c_proj = aten.linear(h0_attn_reshape_3, p["h.0.attn.c_proj.weight"])  # f32[2, 16, 32]  partial
    h0_attn_c_proj_g = collectives.reduce_from_tensor(rank, h0_attn_c_proj)  # all-reduce, 4.1 kB over tensor
    h0_attn_c_proj_biased = aten.add(h0_attn_c_proj_g, p["h.0.attn.c_proj.bias"])  # f32[2, 16, 32]
    h0_attn_resid_dropout = kernels.dropout(rank, h0_attn_c_proj_biased, p=0.1, operator=2)  # f32[2, 16, 32]

    # h.0                                                                     gpt.py:75
    h0_add = aten.add(drop, h0_attn_resid_dropout)                          # f32[2, 16, 32]
    h0_ln2 = aten.layer_norm(h0_add, [32], p["h.0.ln_2.weight"], p["h.0.ln_2.bias"])  # f32[2, 16, 32]

    # h.0.mlp                                                                 gpt.py:62
    h0_mlp_c_fc = collectives.copied_linear(                                # f32[2, 16, 128/2]
        rank, h0_ln2, p["h.0.mlp.c_fc.weight"], p["h.0.mlp.c_fc.bias"]
    )                                 # backward: all-reduce, 4.1 kB over tensor, beside the weight's gradient
    h0_mlp_gelu = aten.gelu(h0_mlp_c_fc, approximate="tanh")                # f32[2, 16, 128/2]
    h0_mlp_c_proj = aten.linear(h0_mlp_gelu, p["h.0.mlp.c_proj.weight"])    # f32[2, 16, 32]        partial
    h0_mlp_c_proj_g = collectives.reduce_from_tensor(rank, h0_mlp_c_proj)   # all-reduce, 4.1 kB over tensor
    h0_mlp_c_proj_biased = aten.add(h0_mlp_c_proj_g, p["h.0.mlp.c_proj.bias"])  # f32[2, 16, 32]
    h0_mlp_dropout = kernels.dropout(rank, h0_mlp_c_proj_biased, p=0.1, operator=3)  # f32[2, 16, 32]

    # h.0                                                                     gpt.py:76
    h0_add_1 = aten.add(h0_add, h0_mlp_dropout)                             # f32[2, 16, 32]

    # h.1                                                                     gpt.py:75
    h1_ln1 = aten.layer_norm(h0_add_1, [32], p["h.1.ln_1.weight"], p["h.1.ln_1.bias"])  # f32[2, 16, 32]

    # h.1.attn                                                                gpt.py:45
    h1_attn_c_attn = collectives.copied_linear(                             # f32[2, 16, 96/2]
        rank, h1_ln1, p["h.1.attn.c_attn.weight"], p["h.1.attn.c_attn.bias"]
    )                                 # backward: all-reduce, 4.1 kB over tensor, beside the weight's gradient
    h1_attn_split_0, h1_attn_split_1, h1_attn_split_2 = aten.split(         # 3 x f32[2, 16, 32/2]
        h1_attn_c_attn, 16, dim=2
    )
    h1_attn_reshape = aten.reshape(h1_attn_split_0, [2, 16, 2, 8])          # f32[2, 16, 4/2, 8]
    h1_attn_transpose = aten.transpose(h1_attn_reshape, 1, 2)               # f32[2, 4/2, 16, 8]
    h1_attn_reshape_1 = aten.reshape(h1_attn_split_1, [2, 16, 2, 8])        # f32[2, 16, 4/2, 8]
    h1_attn_transpose_1 = aten.transpose(h1_attn_reshape_1, 1, 2)           # f32[2, 4/2, 16, 8]
    h1_attn_reshape_2 = aten.reshape(h1_attn_split_2, [2, 16, 2, 8])        # f32[2, 16, 4/2, 8]
    h1_attn_transpose_2 = aten.transpose(h1_attn_reshape_2, 1, 2)           # f32[2, 4/2, 16, 8]
    h1_attn_transpose_3 = aten.transpose(h1_attn_transpose_1, -2, -1)       # f32[2, 4/2, 8, 16]

    # recomputed in the backward
    def h1_attn_core(rank, h1_attn_transpose, h1_attn_transpose_3, h1_attn_transpose_2):
        # h.1.attn                                                            gpt.py:48
        h1_attn_matmul = aten.matmul(h1_attn_transpose, h1_attn_transpose_3)  # f32[2, 4/2, 16, 16]
        h1_attn_softmax = kernels.scaled_softmax(                           # f32[2, 4/2, 16, 16]
            rank, h1_attn_matmul, is_causal=True, scale=0.35355339059327373, p=0.1, operator=4, divided=1
        )
        h1_attn_matmul_1 = aten.matmul(h1_attn_softmax, h1_attn_transpose_2)  # f32[2, 4/2, 16, 8]

        return h1_attn_matmul_1

    h1_attn_matmul_1 = recompute(                                           # f32[2, 4/2, 16, 8]
        rank, h1_attn_core, h1_attn_transpose, h1_attn_transpose_3, h1_attn_transpose_2
    )

    # h.1.attn                                                                gpt.py:49
    h1_attn_transpose_4 = aten.transpose(h1_attn_matmul_1, 1, 2)            # f32[2, 16, 4/2, 8]
    h1_attn_contiguous = aten.contiguous(h1_attn_transpose_4)               # f32[2, 16, 4/2, 8]
    h1_attn_reshape_3 = aten.reshape(h1_attn_contiguous, [2, 16, 16])       # f32[2, 16, 32/2]
    h1_attn_c_proj = aten.linear(h1_attn_reshape_3, p["h.1.attn.c_proj.weight"])  # f32[2, 16, 32]  partial
    h1_attn_c_proj_g = collectives.reduce_from_tensor(rank, h1_attn_c_proj)  # all-reduce, 4.1 kB over tensor
    h1_attn_c_proj_biased = aten.add(h1_attn_c_proj_g, p["h.1.attn.c_proj.bias"])  # f32[2, 16, 32]
    h1_attn_resid_dropout = kernels.dropout(rank, h1_attn_c_proj_biased, p=0.1, operator=5)  # f32[2, 16, 32]

    # h.1                                                                     gpt.py:75
    h1_add = aten.add(h0_add_1, h1_attn_resid_dropout)                      # f32[2, 16, 32]
    h1_ln2 = aten.layer_norm(h1_add, [32], p["h.1.ln_2.weight"], p["h.1.ln_2.bias"])  # f32[2, 16, 32]

    # h.1.mlp                                                                 gpt.py:62
    h1_mlp_c_fc = collectives.copied_linear(                                # f32[2, 16, 128/2]
        rank, h1_ln2, p["h.1.mlp.c_fc.weight"], p["h.1.mlp.c_fc.bias"]
    )                                 # backward: all-reduce, 4.1 kB over tensor, beside the weight's gradient
    h1_mlp_gelu = aten.gelu(h1_mlp_c_fc, approximate="tanh")                # f32[2, 16, 128/2]
    h1_mlp_c_proj = aten.linear(h1_mlp_gelu, p["h.1.mlp.c_proj.weight"])    # f32[2, 16, 32]        partial
    h1_mlp_c_proj_g = collectives.reduce_from_tensor(rank, h1_mlp_c_proj)   # all-reduce, 4.1 kB over tensor
    h1_mlp_c_proj_biased = aten.add(h1_mlp_c_proj_g, p["h.1.mlp.c_proj.bias"])  # f32[2, 16, 32]
    h1_mlp_dropout = kernels.dropout(rank, h1_mlp_c_proj_biased, p=0.1, operator=6)  # f32[2, 16, 32]

    # h.1                                                                     gpt.py:76
    h1_add_1 = aten.add(h1_add, h1_mlp_dropout)                             # f32[2, 16, 32]

    # ln_f, lm_head                                                           gpt.py:111
    ln_f = aten.layer_norm(h1_add_1, [32], p["ln_f.weight"], p["ln_f.bias"])  # f32[2, 16, 32]
    lm_head = collectives.copied_linear(                                    # f32[2, 16, 62/2]
        rank, ln_f, p["wte.weight"]
    )                                 # backward: all-reduce, 4.1 kB over tensor, beside the weight's gradient
    reshape = aten.reshape(lm_head, [32, 31])                               # f32[32, 62/2]
    reshape_1 = aten.reshape(targets, [32])                                 # i64[32]
    loss = kernels.cross_entropy(                                       # f32[]  all-reduce, 384 B over tensor
        rank, reshape, reshape_1, vocabulary=61
    )

    return loss                                                             # f32[]


def constants(p):                                                          # runs once, when weights are bound
    # model                                                                   gpt.py:107
    arange = aten.arange(16)                                                # i64[16]

    return {
        "constant.arange": arange,
    }
