"""The operators of a rank program beyond torch's own.

A kernel <name>.py holds, from the top: the function that rank programs call, which refuses what it cannot compute and
turns a `Rank` into a mask key (`randomness.mask_key`: a list of ints); below it the operators
``torch.ops.autoptd.<name>`` and ``<name>_backward``, made by `registration.define_operator`, with a fake
implementation, an autograd formula and, where promotion of dtypes is not all, an autocast rule; and their meaning in
plain torch. Their Triton form is in triton/<name>.py; where it can run the operator is it, if both take the same
arguments, or asks `selection.find_kernels` for it. A mask is not saved but drawn again in backward, by
`randomness.draw_mask` or inside a Triton kernel by `triton.philox.keep`. What comes out has the strides of
``torch.empty_like(x)``, or is contiguous where rows are reduced.
"""

from autoptd.runtime.kernels.activation import bias_gelu, gated_product, linear_gelu
from autoptd.runtime.kernels.grouped_attention import grouped_attention
from autoptd.runtime.kernels.keyed_dropout import bias_dropout_add, dropout
from autoptd.runtime.kernels.masked_softmax import scaled_softmax
from autoptd.runtime.kernels.packed_linear import split_linear
from autoptd.runtime.kernels.residual_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from autoptd.runtime.kernels.rotary_position import rotary_embedding
from autoptd.runtime.kernels.vocabulary_loss import cross_entropy
from autoptd.runtime.kernels.vocabulary_table import embedding

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "bias_dropout_add",
    "bias_gelu",
    "cross_entropy",
    "dropout",
    "embedding",
    "gated_product",
    "grouped_attention",
    "layer_norm",
    "linear_gelu",
    "rms_norm",
    "rotary_embedding",
    "scaled_softmax",
    "split_linear",
]
