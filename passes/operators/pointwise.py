"""Operators that work element by element, casts and copies among them, and factories of equal elements."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import has_gradients, shape_of
from autoptd.passes.ir.views import contiguous_copies
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axes import Axes, Axis
from autoptd.passes.operators.axis_map import AxisMap, broadcast
from autoptd.passes.operators.layout import LayoutWriter, Written
from autoptd.passes.operators.localizer import Localizer, is_lone_sum, keep_partial, same_call
from autoptd.passes.operators.quantities import Value, Work, differentiable_arguments, differentiate
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.unfamiliar import UNFAMILIAR
from autoptd.passes.operators.views import sized_local
from autoptd.runtime import aten

_OTHERS = """
    hardswish log_sigmoid floor_divide polar complex real imag conj _conj resolve_conj isclose fill zeros_like
    ones_like full_like alias lift_fresh_copy lift_fresh special_expit special_erf special_ndtr special_xlogy
""".split()  # noqa: SIM905  (those that torch does not tag as pointwise)


def add_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Two partial sums add up to one: reduce them together, once."""
    both = [localizer.values[term] for term in node.args if is_lone_sum(localizer, term)]  # type: ignore[index]
    if len(both) == len(node.args) == 2 and not node.kwargs:
        total = localizer.add(node.target, (both[0], both[1]), node, name=node.name, partial=True)
        localizer.biases[total] = [bias for part in both for bias in localizer.biases.get(part, ())]
        return total
    return same_call(localizer, node)


def _scale_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    kept = (keep_partial(localizer, node, factor) for factor in node.args[:2])
    return next(filter(None, kept), None) or same_call(localizer, node)


def _apart(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Keep padding, of which an element may have no value or no slope, away from gradients and what is made of it."""
    own = localizer.axis_map.of(node)
    if not (has_gradients(node.meta["val"]) and any(localizer.divided.get(ax.find(axis)) for axis in own)):
        return same_call(localizer, node)
    for source in differentiable_arguments(node):
        value = localizer.whole(source)
        localizer.values[source] = localizer.clear_padding(value, localizer.axis_map.of(source))
    return localizer.clear_padding(same_call(localizer, node), own)


def elementwise_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Transposed where an argument is; the others are transposed to broadcast against it, a view."""
    out = writer.spread(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: writer.fit(n, out))
    return writer.write(args, kwargs), out.transposed


def _contiguous_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Not written where the value lies in order already."""
    source = node.args[0]
    if writer.value(source).meta["val"].is_contiguous():
        return writer.value(source), source in writer.transposed
    return elementwise_order(writer, node)


def _add_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The gradient of an argument is the result's own, where nothing was broadcast or cast."""
    made = node.meta["val"]
    others = [s for s in wanted if s.meta["val"].shape != made.shape or s.meta["val"].dtype != made.dtype]
    return differentiate(node, value, others, ())


def _scale_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """A product with a number keeps nothing."""
    factors = differentiable_arguments(node)
    return differentiate(node, value, wanted, factors if len(factors) > 1 else ())


def _make_axes(axis_map: AxisMap, node: fx.Node) -> Axes:
    """The dimensions are whatever meets them."""
    return tuple(Axis(size) for size in shape_of(node))


_SAFE = Trait.PADDING_SAFE
POINTWISE = OperatorRules(axes=broadcast, local=_apart, placed=proof.elementwise, order=elementwise_order, traits=_SAFE)
_SAME = replace(POINTWISE, local=same_call, of_partial=proof.keep_partial, traits=_SAFE | Trait.TAKES)
_NEG = replace(_SAME, keeps="nothing", traits=_SAFE | Trait.SCALES)
_LAY_OUT = replace(_NEG, traits=_SAFE | Trait.LAYS_OUT)
_LINEAR = replace(POINTWISE, traits=_SAFE | Trait.LINEAR)
_ADD = replace(_LINEAR, local=add_local, of_partial=proof.add_partial, backward=_add_backward)
_DIV = replace(_NEG, of_partial=proof.linear_in(0), backward=_scale_backward)
_KEEPS_RESULT = replace(POINTWISE, keeps="result")
_LIKE = OperatorRules(axes=_make_axes, local=sized_local(1), placed=lambda *_: proof.WHOLE)
_FILL = OperatorRules(axes=_make_axes, local=sized_local(0), traits=_SAFE | Trait.FILLS)

# Of operators and autograd functions that are not torch's.
FOREIGN = replace(UNFAMILIAR, traits=Trait.OWN_BACKWARD)
ELEMENTWISE_FUNCTION = replace(FOREIGN, axes=broadcast, placed=proof.elementwise, order=elementwise_order)

RULES: Mapping[Any, OperatorRules] = {
    **{getattr(aten, name): POINTWISE for name in _OTHERS},
    aten.add: _ADD,
    aten.sub: replace(_ADD, local=same_call),
    aten.div: _DIV,
    aten.mul: replace(_DIV, local=_scale_local, of_partial=proof.linear_in(0, 1)),
    **dict.fromkeys((aten.to, aten._to_copy), replace(_NEG, traits=_SAFE | Trait.CASTS)),
    aten.clone: _LAY_OUT,
    aten.contiguous: replace(_LAY_OUT, order=_contiguous_order, copies=contiguous_copies),
    **dict.fromkeys((aten.detach, aten.alias), _SAME),
    aten.neg: _NEG,
    aten.masked_fill: replace(POINTWISE, keeps="nothing"),
    **dict.fromkeys((aten.where, aten.rsub), replace(_LINEAR, keeps="nothing")),
    aten.nan_to_num: _LINEAR,
    **dict.fromkeys((aten.exp, aten.sigmoid, aten.relu, aten.sqrt, aten.rsqrt), _KEEPS_RESULT),
    aten.tanh: replace(_KEEPS_RESULT, local=same_call),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), _LIKE),
    **dict.fromkeys((aten.zeros, aten.ones, aten.full), _FILL),
}
