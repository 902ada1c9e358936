"""The operators of a rank program beyond torch's own.

A kernel's file holds, from the top: the functions that rank programs call, which refuse what they cannot compute and
turn a `Rank` into a mask key (`randomness.mask_key`: a list of ints); below them the operators
``torch.ops.autoptd.<name>`` and ``<name>_backward`` with their meaning in plain torch, made by
`registration.define_operator`, each with a fake implementation, and an autograd formula. A function of the same name in
triton/ is the operator's Triton form: where it can run, it takes the operator's arguments and, last, the results that
the fake implementation allocates, and fills these. Autocast has no say: it is off in a step, and a program's casts are
written out. A mask is not saved but drawn again in backward, by `randomness.draw_mask` or inside a Triton kernel by
`triton.philox.drop`. Results have the strides of ``torch.empty_like(x)``, or are contiguous where rows are reduced.
"""

from autoptd.runtime.kernels.activation import bias_gelu, gated_product
from autoptd.runtime.kernels.autograd_function import autograd_function
from autoptd.runtime.kernels.class_scores import clear_padding, maximum, nll_loss, one_hot, pick
from autoptd.runtime.kernels.experts import combine, dispatch, grouped_linear, route
from autoptd.runtime.kernels.fused_attention import grouped_attention, packed_attention
from autoptd.runtime.kernels.keyed_draws import bias_dropout_add, dropout, uniform
from autoptd.runtime.kernels.linear import add_linear, linear
from autoptd.runtime.kernels.masked_softmax import scaled_softmax
from autoptd.runtime.kernels.quantized_linear import quantized_linear
from autoptd.runtime.kernels.residual_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from autoptd.runtime.kernels.rotary_position import rotary_embedding
from autoptd.runtime.kernels.vocabulary import cross_entropy, embedding, logsumexp, lookup

__all__ = ["add_layer_norm", "add_linear", "add_rms_norm", "autograd_function", "bias_dropout_add"]
__all__ += ["bias_gelu", "clear_padding", "combine", "cross_entropy", "dispatch", "dropout", "embedding"]
__all__ += ["gated_product", "grouped_attention", "grouped_linear", "layer_norm", "linear"]
__all__ += ["logsumexp", "lookup", "maximum", "nll_loss", "one_hot", "packed_attention"]
__all__ += ["pick", "quantized_linear", "rms_norm", "rotary_embedding", "route", "scaled_softmax", "uniform"]
