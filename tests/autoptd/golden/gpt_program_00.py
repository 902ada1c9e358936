"""Pipeline rank 0 of 2, on each of its 2 tensor x 1 data ranks.
GPT, 29,056 parameters, mesh tensor=2 pipeline=2 data=1
capture GPT: 89 nodes
normalize 89 -> 85 nodes, 0 dropouts
fold_constants 85 -> 85 nodes, 1 constants of 128 bytes
recognize_attention 2 attentions: 2 sdpa causal
rewrite_layout [b, s, h] -> [s, b, h]: 0 -> 0 bytes copied per microbatch
shard_tensors tensor=2: 5 axes divided, 5 all-reduces forward, 5 backward; tokens stay whole, as they are few
    for DGX A100 (Selene)
weight of shape [16, 32] (2,048 bytes) replicated because aten.embedding (gpt.py:108) looks up the same rows
    in every step; aten.layer_norm (gpt.py:75) normalises over it: wpe.weight
cut_stages 2 stages on 2 pipeline ranks, the slowest 0.403 ms of forward and backward a microbatch on DGX A100
    (Selene): 1.009 of the mean, 0.0% above the lower bound (dynamic programme, exact)
fuse_operators 3 add_layer_norm, 1 bias_dropout_add, 2 bias_gelu, 2 layer_norm; 41 -> 34 launches, 401,408 ->
    356,352 bytes moved a microbatch
overlap_reductions 5 of 5 sums backward beside weight gradients
stage 0: wte - h.0: 0.000434 GFLOP forward, 34.1 kB of parameters per rank
This text is what runs. Edit it, and autoptd.load(folder) runs the edit; check() and verify() judge it.
"""

from autoptd.runtime import aten, collectives, kernels

SCHEDULE = """
warm-up: 0F0 0SEND_F0
steady: (0RECV_B0 0F1 0SEND_F1 0B0) x2 +1 0RECV_B2 0F3 0SEND_F3 0RECV_B3 0B2
cool-down: 0B3
"""


def stage_0(rank, p, idx):                                                  # i64[2, 16]            batch
    # wte, wpe                                                                gpt.py:108
    idx_sb = aten.transpose(idx, 0, 1)                                      # i64[16, 2]
    wte = kernels.embedding(rank, p["wte.weight"], idx_sb, vocabulary=96)   # f32[16, 2, 32]        partial
    wpe = aten.embedding(p["wpe.weight"], p["constant.arange"])             # f32[16, 32]
    wpe_sb = aten.unsqueeze(wpe, 1)                                         # f32[16, 1, 32]
    wte_g = collectives.reduce_from_tensor(rank, wte)                       # all-reduce, 4.1 kB over tensor
    add = aten.add(wte_g, wpe_sb)                                           # f32[16, 2, 32]

    # h.0                                                                     gpt.py:75
    h0_ln1 = kernels.layer_norm(add, p["h.0.ln_1.weight"], p["h.0.ln_1.bias"])  # f32[16, 2, 32]

    # h.0.attn                                                                gpt.py:45
    h0_attn_c_attn = collectives.copied_linear(                             # f32[16, 2, 96/2]
        rank, h0_ln1, p["h.0.attn.c_attn.weight"], p["h.0.attn.c_attn.bias"]
    )                                 # backward: all-reduce, 4.1 kB over tensor, beside the weight's gradient
    h0_attn_split_0, h0_attn_split_1, h0_attn_split_2 = aten.split(         # 3 x f32[16, 2, 32/2]
        h0_attn_c_attn, 16, dim=2
    )
    h0_attn_reshape = aten.reshape(h0_attn_split_0, [16, 2, 2, 8])          # f32[16, 2, 4/2, 8]
    h0_attn_transpose = aten.permute(h0_attn_reshape, [1, 2, 0, 3])         # f32[2, 4/2, 16, 8]
    h0_attn_reshape_1 = aten.reshape(h0_attn_split_1, [16, 2, 2, 8])        # f32[16, 2, 4/2, 8]
    h0_attn_transpose_1 = aten.permute(h0_attn_reshape_1, [1, 2, 0, 3])     # f32[2, 4/2, 16, 8]
    h0_attn_reshape_2 = aten.reshape(h0_attn_split_2, [16, 2, 2, 8])        # f32[16, 2, 4/2, 8]
    h0_attn_transpose_2 = aten.permute(h0_attn_reshape_2, [1, 2, 0, 3])     # f32[2, 4/2, 16, 8]
    h0_attn_sdpa = aten.scaled_dot_product_attention(                       # f32[2, 4/2, 16, 8]
        h0_attn_transpose, h0_attn_transpose_1, h0_attn_transpose_2, is_causal=True
    )
    h0_attn_transpose_3 = aten.permute(h0_attn_sdpa, [2, 0, 1, 3])          # f32[16, 2, 4/2, 8]
    h0_attn_reshape_3 = aten.reshape(h0_attn_transpose_3, [16, 2, 16])      # f32[16, 2, 32/2]
    h0_attn_c_proj = aten.linear(h0_attn_reshape_3, p["h.0.attn.c_proj.weight"])  # f32[16, 2, 32]  partial
    h0_attn_c_proj_g = collectives.reduce_from_tensor(rank, h0_attn_c_proj)  # all-reduce, 4.1 kB over tensor

    # h.0                                                                     gpt.py:76
    h0_add, h0_ln2 = kernels.add_layer_norm(                                # 2 x f32[16, 2, 32]
        rank, h0_attn_c_proj_g, p["h.0.ln_2.weight"], p["h.0.ln_2.bias"], bias=p["h.0.attn.c_proj.bias"],
        residual=add
    )

    # h.0.mlp                                                                 gpt.py:62
    h0_mlp_c_fc = collectives.copied_linear(                                # f32[16, 2, 128/2]
        rank, h0_ln2, p["h.0.mlp.c_fc.weight"]
    )                                 # backward: all-reduce, 4.1 kB over tensor, beside the weight's gradient
    h0_mlp_gelu = kernels.bias_gelu(                                        # f32[16, 2, 128/2]
        h0_mlp_c_fc, p["h.0.mlp.c_fc.bias"], approximate="tanh"
    )
    h0_mlp_c_proj = aten.linear(h0_mlp_gelu, p["h.0.mlp.c_proj.weight"])    # f32[16, 2, 32]        partial
    h0_mlp_c_proj_g = collectives.reduce_from_tensor(rank, h0_mlp_c_proj)   # all-reduce, 4.1 kB over tensor

    # h.0                                                                     gpt.py:76
    h0_add_1 = kernels.bias_dropout_add(                                    # f32[16, 2, 32]
        rank, h0_mlp_c_proj_g, p["h.0.mlp.c_proj.bias"], h0_add
    )

    return h0_add_1                                  # f32[16, 2, 32]  to stage 1, 2.05 kB per rank, scattered


def constants(p):                                                          # runs once, when weights are bound
    # model                                                                   gpt.py:107
    arange = aten.arange(16)                                                # i64[16]

    return {
        "constant.arange": arange,
    }
