"""Pipeline rank 0 of 1, on each of its 2 tensor x 1 data ranks.
Attention, 13,024 parameters, mesh tensor=2 pipeline=1 data=1
capture Attention: 47 nodes
normalize 47 -> 48 nodes, 0 dropouts
fold_constants 48 -> 48 nodes, 0 constants of 0 bytes
recognize_attention 1 attentions: 1 sdpa causal
rewrite_layout [b, s, h] -> [s, b, h]: 0 -> 0 bytes copied per microbatch
shard_tensors tensor=2: 4 axes divided, 3 all-reduces forward, 3 backward; tokens stay whole, as they are few
    for DGX A100 (Selene)
cut_stages 1 stages on 1 pipeline ranks, the slowest 0.508 ms of forward and backward a microbatch on DGX A100
    (Selene): 1.000 of the mean, 0.0% above the lower bound (dynamic programme, exact)
fuse_operators 2 add_layer_norm, 1 gated_product, 1 layer_norm; 26 -> 22 launches, 203,648 -> 181,120 bytes
    moved a microbatch
overlap_reductions 3 of 3 sums backward beside weight gradients
stage 0: embed - head: 0.000384 GFLOP forward, 26.5 kB of parameters per rank
This text is what runs. Edit it, and autoptd.load(folder) runs the edit; check() and verify() judge it.
"""

from autoptd.runtime import aten, collectives, kernels

SCHEDULE = """
steady: 0F0 0B0 0F1 0B1
"""


def stage_0(
    rank,
    p,
    ids,                                                                    # i64[2, 16]  batch
    labels,                                                                 # i64[2, 16]  batch
):
    # embed, 0, q, out, 1, gate, down, 2, head                                test_overlap.py:N
    ids_sb = aten.transpose(ids, 0, 1)                                      # i64[16, 2]
    embed = kernels.embedding(rank, p["embed.weight"], ids_sb, vocabulary=64)  # f32[16, 2, 32]  partial
    embed_g = collectives.reduce_from_tensor(rank, embed)                   # all-reduce, 4.1 kB over tensor
    norms0 = kernels.layer_norm(embed_g, p["norms.0.weight"], p["norms.0.bias"])  # f32[16, 2, 32]
    q, k, v = collectives.copied_linears(                                   # 3 x f32[16, 2, 32/2]
        rank, norms0, [p["q.weight"], p["k.weight"], p["v.weight"]]
    )                                # backward: all-reduce, 4.1 kB over tensor, beside the weights' gradients
    reshape = aten.reshape(q, [16, 2, 2, 8])                                # f32[16, 2, 4/2, 8]
    transpose = aten.permute(reshape, [1, 2, 0, 3])                         # f32[2, 4/2, 16, 8]
    reshape_1 = aten.reshape(k, [16, 2, 2, 8])                              # f32[16, 2, 4/2, 8]
    transpose_1 = aten.permute(reshape_1, [1, 2, 0, 3])                     # f32[2, 4/2, 16, 8]
    reshape_2 = aten.reshape(v, [16, 2, 2, 8])                              # f32[16, 2, 4/2, 8]
    transpose_2 = aten.permute(reshape_2, [1, 2, 0, 3])                     # f32[2, 4/2, 16, 8]
    sdpa = aten.scaled_dot_product_attention(                               # f32[2, 4/2, 16, 8]
        transpose, transpose_1, transpose_2, is_causal=True
    )
    transpose_3 = aten.permute(sdpa, [2, 0, 1, 3])                          # f32[16, 2, 4/2, 8]
    reshape_3 = aten.reshape(transpose_3, [16, 2, 16])                      # f32[16, 2, 32/2]
    out = aten.linear(reshape_3, p["out.weight"])                           # f32[16, 2, 32]        partial
    out_g = collectives.reduce_from_tensor(rank, out)                       # all-reduce, 4.1 kB over tensor
    add, norms1 = kernels.add_layer_norm(                                   # 2 x f32[16, 2, 32]
        rank, out_g, p["norms.1.weight"], p["norms.1.bias"], bias=p["out.bias"], residual=embed_g
    )
    gate, up = collectives.copied_linears(                                  # 2 x f32[16, 2, 48/2]
        rank, norms1, [p["gate.weight"], p["up.weight"]]
    )                                # backward: all-reduce, 4.1 kB over tensor, beside the weights' gradients
    mul = kernels.gated_product(gate, up)                                   # f32[16, 2, 48/2]
    down = aten.linear(mul, p["down.weight"])                               # f32[16, 2, 32]        partial
    down_g = collectives.reduce_from_tensor(rank, down)                     # all-reduce, 4.1 kB over tensor
    norms2_pair = kernels.add_layer_norm(                                   # 2 x f32[16, 2, 32]
        rank, add, p["norms.2.weight"], p["norms.2.bias"], residual=down_g
    )
    norms2 = norms2_pair[1]                                                 # f32[16, 2, 32]
    head = collectives.copied_linear(                                       # f32[16, 2, 64/2]
        rank, norms2, p["head.weight"]
    )                                 # backward: all-reduce, 4.1 kB over tensor, beside the weight's gradient
    reshape_4 = aten.reshape(head, [32, 32])                                # f32[32, 64/2]
    labels_sb = aten.transpose(labels, 0, 1)                                # i64[16, 2]
    reshape_5 = aten.reshape(labels_sb, [32])                               # i64[32]
    loss = kernels.cross_entropy(                                       # f32[]  all-reduce, 384 B over tensor
        rank, reshape_4, reshape_5, vocabulary=64
    )

    return loss                                                             # f32[]
