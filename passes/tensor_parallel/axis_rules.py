"""Relate the axes of each operator: one rule per operator, as a table.

A rule takes the axis map and a node and returns the axes of the result (a tuple of them for an operator with several
results). On the way it unifies what must agree, blocks what may not be divided, and records a contraction, which
becomes a partial sum when its axis is divided. Torch's operators that have no row (sorting, pooling, what sends tokens
to experts) every tensor rank does whole. ``rules=`` of `autoptd.compile` adds rows written as text:
``"b s h!, h f -> b s f"``: one letter group per tensor argument, equal names are one axis, ``!`` blocks, a name that
only arguments have is summed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import arguments_of, shape_of, where
from autoptd.passes.tensor_parallel import axes as ax
from autoptd.passes.tensor_parallel import contraction_rules, shape_rules
from autoptd.passes.tensor_parallel.axes import Axis
from autoptd.passes.tensor_parallel.axis_map import AxisMap, Rule


def text_rule(text: str) -> Rule:
    """Return the rule of a text such as ``"b s h!, h f -> b s f"``.

    Raises ValueError if the text does not have that form.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(
            f'a sharding rule is written "b s h!, h f -> b s f"; found {text!r}, without one "->"'
        )
    arguments = [[name.strip() for name in group.split()] for group in sides[0].split(",")]
    results = [[name.strip() for name in group.split()] for group in sides[1].split(",")]

    def rule(axis_map: AxisMap, node: fx.Node) -> Any:
        return _apply_text(axis_map, node, arguments, results, text)

    return rule


def _apply_text(
    axis_map: AxisMap, node: fx.Node, arguments: list[list[str]], results: list[list[str]], text: str
) -> Any:
    named: dict[str, Axis] = {}
    tensors = [n for n in arguments_of(node) if n is not axis_map.rank]
    values = node.meta["val"]
    many = isinstance(values, (tuple, list))
    found = [shape_of(n) for n in tensors], [tuple(v.shape) for v in (values if many else [values])]
    wanted = [len(group) for group in arguments], [len(group) for group in results]
    if tuple([len(s) for s in side] for side in found) != wanted:
        raise ValueError(
            f"the rule {text!r} for {node.target} does not fit the call at {where(node)}: its tensors are "
            f"{found[0]} -> {found[1]}; write one group of names per tensor, one name per dimension"
        )
    sizes: dict[str, int] = {}
    for shape, group in zip((*found[0], *found[1]), (*arguments, *results), strict=True):
        for size, mark in zip(shape, group, strict=True):
            known = sizes.setdefault(mark.rstrip("!"), size)
            if known != size:
                raise ValueError(
                    f"the rule {text!r} for {node.target} calls dimensions of sizes {known} and {size} both "
                    f"{mark.rstrip('!')!r} at {where(node)}; give them different names"
                )
    for tensor, group in zip(tensors, arguments, strict=True):
        for axis, mark in zip(axis_map.of(tensor), group, strict=True):
            name = mark.rstrip("!")
            if name in named:
                ax.unify(named[name], axis)
            named.setdefault(name, axis)
            if mark.endswith("!"):
                ax.block(axis, f"the rule {text!r} keeps it whole")
    kept = {name.rstrip("!") for group in results for name in group}
    summed = [axis for name, axis in named.items() if name not in kept and ax.find(axis).size != 1]
    if len(summed) == 1 and not many:
        axis_map.sum_over(node, summed[0])
    else:
        for axis in summed:
            ax.block(axis, f"the rule {text!r} sums over several axes")
    shapes = [
        tuple(named.setdefault(name.rstrip("!"), Axis(size)) for name, size in zip(group, shape, strict=True))
        for group, shape in zip(results, found[1], strict=True)
    ]
    return tuple(shapes) if many else shapes[0]


ELEMENTWISE = """
    abs add sub rsub mul div neg exp exp2 log log2 log1p expm1 sqrt rsqrt reciprocal pow square sin cos tan tanh
    sigmoid silu gelu relu relu6 elu leaky_relu mish softplus hardtanh hardswish erf erfc sign floor ceil round
    clamp clamp_min clamp_max minimum maximum where masked_fill eq ne lt le gt ge logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not to _to_copy clone contiguous detach alias lift_fresh_copy
    lift_fresh positive float_power addcmul addcdiv lerp isnan isinf isfinite nan_to_num zeros_like ones_like
    full_like fill floor_divide remainder fmod atan2 threshold celu selu hardsigmoid log_sigmoid softsign trunc frac
    polar complex real imag conj _conj _conj_physical resolve_conj asin acos atan sinh cosh asinh acosh atanh sinc sgn
    erfinv logit special_expit hypot copysign logaddexp logaddexp2 xlogy bitwise_xor hardshrink softshrink heaviside
    special_erf fmin fmax isclose lgamma digamma ldexp special_ndtr special_xlogy special_i0e special_log_ndtr
""".split()  # noqa: SIM905  (a list of 100 quoted words is 100 lines)
REDUCTIONS = "mean amax amin max min any all logsumexp var std norm linalg_vector_norm"

# Rule -> torch's operators that it is about.
_ATEN: Mapping[Rule, str] = {
    shape_rules.broadcast: " ".join(ELEMENTWISE),
    shape_rules.view: "view reshape _unsafe_view flatten unflatten",
    shape_rules.transpose: "transpose swapaxes swapdims",
    shape_rules.transpose_two: "t numpy_T",
    shape_rules.permute: "permute",
    shape_rules.unsqueeze: "unsqueeze",
    shape_rules.squeeze: "squeeze",
    shape_rules.expand: "expand broadcast_to",
    shape_rules.repeat_interleave: "repeat_interleave",
    shape_rules.select: "select",
    shape_rules.index: "index",
    shape_rules.unbind: "unbind",
    shape_rules.roll: "roll flip",
    shape_rules.slice_rows: "slice narrow",
    shape_rules.split: "split split_with_sizes chunk tensor_split",
    shape_rules.concatenate: "cat concat concatenate",
    shape_rules.slice_scatter: "slice_scatter",
    shape_rules.select_scatter: "select_scatter",
    shape_rules.stack: "stack",
    shape_rules.view_as_complex: "view_as_complex",
    shape_rules.view_as_real: "view_as_real",
    shape_rules.pad: "pad constant_pad_nd",
    shape_rules.make_new: "new_zeros new_ones new_full new_empty zeros ones full",
    contraction_rules.linear: "linear",
    contraction_rules.addmm: "addmm",
    contraction_rules.matmul: "matmul mm bmm",
    contraction_rules.baddbmm: "baddbmm",
    contraction_rules.attention: "scaled_dot_product_attention",
    contraction_rules.embedding: "embedding",
    contraction_rules.cross_entropy: "cross_entropy_loss",
    contraction_rules.class_loss: "nll_loss nll_loss_nd nll_loss2d",
    contraction_rules.gather: "gather",
    contraction_rules.einsum: "einsum",
    contraction_rules.reduce_sum: "sum",
    contraction_rules.reduce_whole: REDUCTIONS,
    contraction_rules.over_dim: "softmax log_softmax _softmax _log_softmax cumsum",
    contraction_rules.layer_norm: "layer_norm rms_norm",
}
RULES: Mapping[str, Rule] = {
    **{f"aten.{name}": rule for rule, names in _ATEN.items() for name in names.split()},
    "_operator.getitem": shape_rules.getitem,
    "kernels.dropout": shape_rules.broadcast,
    "kernels.scaled_softmax": contraction_rules.scaled_softmax,
    "kernels.split_linear": contraction_rules.split_linear,
    "transformers.grouped_mm_fallback": shape_rules.opaque,
}
