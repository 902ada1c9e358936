"""What each operator says about axes: one rule per operator, as a table.

A rule takes the analysis and a node and returns the axes of the result (a tuple of them for an operator with several
results). On the way it unifies what must agree, blocks what may not be divided, and records a contraction, which
becomes a partial sum when its axis is divided. ``rules=`` of `autoptd.compile` adds rows written as text:
``"b s h!, h f -> b s f"``: one letter group per tensor argument, equal names are one axis, ``!`` blocks, a name that
only arguments have is summed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from autoptd.passes import axes as ax
from autoptd.passes.axes import Axes, Axis

if TYPE_CHECKING:
    from autoptd.passes.analysis import Analysis

Rule = Callable[["Analysis", fx.Node], Any]


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of the node's call, by position or by its schema name."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


# Elementwise operators: dimensions align from the right, size 1 spreads.


def broadcast(analysis: Analysis, node: fx.Node) -> Axes:
    """Unify the tensor arguments dimension by dimension; a dimension of size 1 spreads over the others."""
    shape = shape_of(node)
    result = [Axis(1)] * len(shape)
    for source in node.all_input_nodes:
        if source not in analysis.axes:
            continue
        own = analysis.axes[source]
        for back in range(1, len(own) + 1):
            axis = own[-back]
            if ax.find(axis).size == 1:
                continue
            if ax.find(result[-back]).size == 1:
                result[-back] = axis
            else:
                ax.unify(result[-back], axis)
    return tuple(result)


# Shape operators


def view(analysis: Analysis, node: fx.Node) -> Axes:
    """Regroup factors; an axis that cannot be regrouped is blocked."""
    source, shape = analysis.of(node.args[0]), shape_of(node)
    grouped = ax.regroup(source, shape)
    if grouped is not None:
        return tuple(grouped)
    for axis in source:
        ax.block(axis, f"{node.name} regroups it as {list(shape)}")
    return tuple(Axis(size, blocked=f"{node.name} makes it") for size in shape)


def transpose(analysis: Analysis, node: fx.Node) -> Axes:
    own = list(analysis.of(node.args[0]))
    first, second = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    own[first], own[second] = own[second], own[first]
    return tuple(own)


def transpose_two(analysis: Analysis, node: fx.Node) -> Axes:
    return tuple(reversed(analysis.of(node.args[0])))


def permute(analysis: Analysis, node: fx.Node) -> Axes:
    own = analysis.of(node.args[0])
    return tuple(own[d] for d in node.args[1])  # type: ignore[union-attr, index]


def unsqueeze(analysis: Analysis, node: fx.Node) -> Axes:
    own = list(analysis.of(node.args[0]))
    dim = int(node.args[1])  # type: ignore[arg-type]
    own.insert(dim if dim >= 0 else dim + len(own) + 1, Axis(1))
    return tuple(own)


def squeeze(analysis: Analysis, node: fx.Node) -> Axes:
    own = analysis.of(node.args[0])
    dims = argument(node, 1, "dim", list(range(len(own))))
    dropped = {d % len(own) for d in ([dims] if isinstance(dims, int) else dims)}
    return tuple(a for d, a in enumerate(own) if d not in dropped or ax.find(a).size != 1)


def expand(analysis: Analysis, node: fx.Node) -> Axes:
    """A dimension of size 1 becomes a new axis, the same value at each of its indices."""
    own, shape = analysis.of(node.args[0]), shape_of(node)
    lead = len(shape) - len(own)
    return tuple(
        own[d - lead] if d >= lead and ax.find(own[d - lead]).size == size else Axis(size)
        for d, size in enumerate(shape)
    )


def repeat_interleave(analysis: Analysis, node: fx.Node) -> Axes:
    """Each index of one dimension, several times in a row: [kv, group]."""
    own, shape = list(analysis.of(node.args[0])), shape_of(node)
    dim = argument(node, 2, "dim")
    if dim is None or not isinstance(node.args[1], int):
        return opaque(analysis, node)
    dim %= len(own)
    own[dim] = ax.product([own[dim], Axis(shape[dim] // ax.find(own[dim]).size)])
    return tuple(own)


def select(analysis: Analysis, node: fx.Node) -> Axes:
    own = list(analysis.of(node.args[0]))
    ax.block(own.pop(int(node.args[1])), f"{node.name} selects from it")  # type: ignore[arg-type]
    return tuple(own)


def index(analysis: Analysis, node: fx.Node) -> Axes:
    """Rows picked out of one dimension by a list of numbers: that dimension is needed whole."""
    own = list(analysis.of(node.args[0]))
    picks = [(d, i) for d, i in enumerate(node.args[1]) if i is not None]  # type: ignore[arg-type, union-attr]
    if len(picks) != 1 or len(analysis.of(picks[0][1])) != 1:
        return opaque(analysis, node)  # type: ignore[no-any-return]
    dim = picks[0][0]
    reason = f"{node.name} picks from it"
    ax.block(own[dim], reason)
    own[dim] = Axis(shape_of(node)[dim], blocked=reason)
    return tuple(own)


def unbind(analysis: Analysis, node: fx.Node) -> tuple[Axes, ...]:
    own = list(analysis.of(node.args[0]))
    axis = own.pop(int(argument(node, 1, "dim", 0)))
    ax.block(axis, f"{node.name} takes it apart")
    return (tuple(own),) * ax.find(axis).size


def slice_rows(analysis: Analysis, node: fx.Node) -> Axes:
    """A slice makes the axis a sum of segments, of which it takes some."""
    own, shape = list(analysis.of(node.args[0])), shape_of(node)
    dim = int(argument(node, 1, "dim", 0)) % len(own)
    axis = ax.find(own[dim])
    if shape[dim] in (0, axis.size):
        own[dim] = axis if shape[dim] else Axis(0)
        return tuple(own)
    start = int(argument(node, 2, "start") or 0)
    start = start + axis.size if start < 0 else start
    step = argument(node, 4, "step", 1) if str(node.target).startswith("aten.slice") else 1
    pieces = ax.segment(axis, [start, start + shape[dim]]) if step == 1 else None
    if pieces is None:
        ax.block(axis, f"{node.name} slices it")
        own[dim] = Axis(shape[dim], blocked=f"{node.name} makes it")
        return tuple(own)
    position = 0
    for piece in pieces:
        if position == start:
            own[dim] = piece
        position += ax.find(piece).size
    return tuple(own)


def split(analysis: Analysis, node: fx.Node) -> tuple[Axes, ...]:
    """Equal pieces share one axis, counted by a block index outside it; unequal ones are segments."""
    values = node.meta["val"]
    own = analysis.of(node.args[0])
    dim = int(argument(node, 2, "dim", 0)) % len(own)
    sizes = [int(v.shape[dim]) for v in values]
    if len(sizes) == 1:
        return (own,)
    pieces: list[Axis] | None = None
    if len(set(sizes)) == 1:
        pair = ax.split_product(own[dim], [len(sizes), sizes[0]])
        if pair is not None:
            ax.block(pair[0], f"{node.name} takes it apart")
            pieces = [pair[1]] * len(sizes)
    if pieces is None:
        bounds = [sum(sizes[:i]) for i in range(1, len(sizes))]
        pieces = ax.segment(own[dim], bounds)
    if pieces is None:
        ax.block(own[dim], f"{node.name} splits it")
        pieces = [Axis(size, blocked=f"{node.name} makes it") for size in sizes]
    return tuple((*own[:dim], piece, *own[dim + 1 :]) for piece in pieces)


def concatenate(analysis: Analysis, node: fx.Node) -> Axes:
    """The joined dimension is the sum of its arguments'."""
    sources: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    parts = [analysis.of(s) for s in sources]
    dim = int(argument(node, 1, "dim", 0)) % len(parts[0])
    for other in parts[1:]:
        for d, (a, b) in enumerate(zip(parts[0], other, strict=True)):
            if d != dim:
                ax.unify(a, b)
    segments = tuple(p[dim] for p in parts if ax.find(p[dim]).size)
    joined = segments[0] if len(segments) == 1 else Axis(shape_of(node)[dim], "sum", segments)
    return (*parts[0][:dim], joined, *parts[0][dim + 1 :])


def stack(analysis: Analysis, node: fx.Node) -> Axes:
    sources: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    parts = [analysis.of(s) for s in sources]
    for other in parts[1:]:
        for a, b in zip(parts[0], other, strict=True):
            ax.unify(a, b)
    dim = int(argument(node, 1, "dim", 0)) % (len(parts[0]) + 1)
    index = Axis(len(parts), blocked=f"{node.name} makes it")
    return (*parts[0][:dim], index, *parts[0][dim:])


def pad(analysis: Analysis, node: fx.Node) -> Axes:
    """A padded dimension is a new axis; nothing is known of it."""
    own, shape = analysis.of(node.args[0]), shape_of(node)
    result = []
    for axis, size in zip(own, shape, strict=True):
        if ax.find(axis).size == size:
            result.append(axis)
        else:
            ax.block(axis, f"{node.name} pads it")
            result.append(Axis(size, blocked=f"{node.name} makes it"))
    return tuple(result)


def getitem(analysis: Analysis, node: fx.Node) -> Axes:
    axes = analysis.results[node.args[0]]  # type: ignore[index]
    return axes[node.args[1]]  # type: ignore[index, no-any-return]


# Contractions


def linear(analysis: Analysis, node: fx.Node) -> Axes:
    """[.., in] x [out, in] -> [.., out]; `in` is contracted (SC21 §2.3: row-parallel when it is divided)."""
    x, weight = analysis.of(node.args[0]), analysis.of(node.args[1])
    analysis.contract(node, x[-1], weight[1])
    bias = argument(node, 2, "bias")
    if bias is not None:
        ax.unify(analysis.of(bias)[0], weight[0])
    return (*x[:-1], weight[0])


def addmm(analysis: Analysis, node: fx.Node) -> Axes:
    """bias + [n, in] x [in, out]: what a weight stored in x out becomes."""
    bias, x, weight = (analysis.of(a) for a in node.args[:3])
    analysis.contract(node, x[1], weight[0])
    out = (x[0], weight[1])
    for own, axis in zip(reversed(bias), reversed(out), strict=False):
        if ax.find(own).size != 1:
            ax.unify(own, axis)
    return out


def matmul(analysis: Analysis, node: fx.Node) -> Axes:
    """A product with a weight is a ``linear``; one of two activations is attention: heads outside, no contraction."""
    first, second = node.args[0], node.args[1]
    x, y = analysis.of(first), analysis.of(second)
    if len(y) == 1 or len(x) == 1:
        return opaque(analysis, node)
    if len(y) == 2 and len(x) >= 2:
        analysis.contract(node, x[-1], y[0])
        if not (analysis.is_weight(second) or analysis.is_weight(first)):
            ax.block(x[-1], f"{node.name} multiplies two activations over it")
        return (*x[:-1], y[1])
    return _batched_product(analysis, node, first, second)


def baddbmm(analysis: Analysis, node: fx.Node) -> Axes:
    out = _batched_product(analysis, node, node.args[1], node.args[2])
    for own, axis in zip(reversed(analysis.of(node.args[0])), reversed(out), strict=False):
        if ax.find(own).size != 1:
            ax.unify(own, axis)
    return out


def _batched_product(analysis: Analysis, node: fx.Node, first: Any, second: Any) -> Axes:
    x, y = analysis.of(first), analysis.of(second)
    ax.unify(x[-1], y[-2])
    ax.block(x[-1], f"{node.name} multiplies two activations over it")
    lead = analysis.align_leading(node, [(first, x[:-2]), (second, y[:-2])])
    return (*lead, x[-2], y[-1])


def attention(analysis: Analysis, node: fx.Node) -> Axes:
    """Attention ties batch and heads of q, k, v and the mask, and blocks sequence and head size."""
    at = 1 if node.args[0] is analysis.rank else 0
    q, k, v = node.args[at : at + 3]
    mask = argument(node, at + 3, "attn_mask" if at == 0 else "mask")
    sizes = [analysis.of(t) for t in (q, k, v)]
    reason = f"{node.name} is attention over it"
    (length, size), (keys, key_size), (values, value_size) = (s[-2:] for s in sizes)
    ax.unify(keys, values)
    ax.unify(size, key_size)
    for axis in (length, keys, size, value_size):
        ax.block(axis, reason)
    leading = [(t, s[:-2]) for t, s in zip((q, k, v), sizes, strict=True)]
    if mask is not None:
        own = analysis.of(mask)
        leading.append((mask, own[:-2]))
        for axis in own[-2:]:
            ax.block(axis, reason)
    lead = analysis.align_leading(node, leading)
    return (*lead, length, value_size)


def embedding(analysis: Analysis, node: fx.Node) -> Axes:
    """A lookup contracts the vocabulary: one-hot(ids) x weight."""
    weight, ids = analysis.of(node.args[0]), analysis.of(node.args[1])
    analysis.contractions[node] = weight[0]
    if not analysis.reads_batch(node.args[1]):
        ax.block(weight[0], f"{node.name} looks up the same rows in every step")
    return (*ids, weight[1])


def cross_entropy(analysis: Analysis, node: fx.Node) -> Axes:
    """The loss contracts the vocabulary (SC21 §2.3: computed without gathering the logits)."""
    logits, target = analysis.of(node.args[0]), analysis.of(node.args[1])
    weighted = argument(node, 2, "weight") is not None or argument(node, 5, "label_smoothing", 0.0) != 0.0
    plain = len(logits) == 2 and len(target) == 1 and argument(node, 3, "reduction", 1) in (1, 2)
    if plain and not weighted:
        ax.unify(logits[0], target[0])
        analysis.contractions[node] = logits[1]
    else:
        for axis in logits:
            ax.block(axis, f"{node.name} is a loss that is not divided")
    return tuple(Axis(size) for size in shape_of(node))


# Reductions


def reduce_sum(analysis: Analysis, node: fx.Node) -> Axes:
    """A sum over one divided axis is a partial sum; other reductions block what they reduce."""
    own = analysis.of(node.args[0])
    dims = _dims(node, own)
    if len(dims) == 1:
        analysis.contractions[node] = own[dims[0]]
    else:
        for d in dims:
            ax.block(own[d], f"{node.name} sums over it")
    return _reduced(node, own, dims)


def reduce_whole(analysis: Analysis, node: fx.Node) -> Axes:
    """Mean, maximum and the like need the whole dimension."""
    own = analysis.of(node.args[0])
    dims = _dims(node, own)
    for d in dims:
        ax.block(own[d], f"{node.name} reduces over it")
    return _reduced(node, own, dims)


def _dims(node: fx.Node, own: Axes) -> list[int]:
    dims = argument(node, 1, "dim")
    if dims is None or dims == []:
        return list(range(len(own)))
    return [d % len(own) for d in ([dims] if isinstance(dims, int) else dims)]


def _reduced(node: fx.Node, own: Axes, dims: list[int]) -> Axes:
    if len(shape_of(node)) == len(own):
        return tuple(Axis(1) if d in dims else a for d, a in enumerate(own))
    return tuple(a for d, a in enumerate(own) if d not in dims)


def over_dim(analysis: Analysis, node: fx.Node) -> Axes:
    """Softmax, cumulative sums: the shape stays, the dimension is needed whole."""
    own = analysis.of(node.args[0])
    ax.block(own[int(argument(node, 1, "dim", -1))], f"{node.name} runs over it")
    return own


def layer_norm(analysis: Analysis, node: fx.Node) -> Axes:
    own = analysis.of(node.args[0])
    width = len(node.args[1])  # type: ignore[arg-type]
    for axis in own[-width:]:
        ax.block(axis, f"{node.name} normalises over it")
    for extra in node.all_input_nodes:
        if extra is not node.args[0]:
            for mine, axis in zip(analysis.of(extra), own[-width:], strict=True):
                ax.unify(mine, axis)
    return own


def make_new(analysis: Analysis, node: fx.Node) -> Axes:
    """A tensor filled with one value: its dimensions are whatever meets them."""
    return tuple(Axis(size) for size in shape_of(node))


def opaque(analysis: Analysis, node: fx.Node) -> Any:
    """Nothing is known: all dimensions that come in or go out stay whole."""
    reason = f"no rule divides {node.name}"
    for source in node.all_input_nodes:
        for own in analysis.all_of(source):
            for axis in own:
                ax.block(axis, reason)
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return tuple(tuple(Axis(s, blocked=reason) for s in v.shape) for v in value)
    return tuple(Axis(s, blocked=reason) for s in value.shape)  # type: ignore[union-attr]


def text_rule(text: str) -> Rule:
    """The rule that a text such as ``"b s h!, h f -> b s f"`` stands for.

    Raises ValueError where the text is not of that form.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f'a sharding rule is written "b s h!, h f -> b s f"; found {text!r}, without one "->"')
    arguments = [[name.strip() for name in group.split()] for group in sides[0].split(",")]
    results = [[name.strip() for name in group.split()] for group in sides[1].split(",")]

    def rule(analysis: Analysis, node: fx.Node) -> Any:
        return _apply_text(analysis, node, arguments, results, text)

    return rule


def _apply_text(
    analysis: Analysis, node: fx.Node, arguments: list[list[str]], results: list[list[str]], text: str
) -> Any:
    named: dict[str, Axis] = {}
    tensors = [n for n in node.all_input_nodes if n is not analysis.rank]
    values = node.meta["val"]
    many = isinstance(values, (tuple, list))
    found = [shape_of(n) for n in tensors], [tuple(v.shape) for v in (values if many else [values])]
    wanted = [len(group) for group in arguments], [len(group) for group in results]
    if tuple([len(s) for s in side] for side in found) != wanted:
        raise ValueError(
            f"the rule {text!r} for {node.target} does not fit the call at {where(node)}: its tensors are "
            f"{found[0]} -> {found[1]}; write one group of names per tensor, one name per dimension"
        )
    for tensor, group in zip(tensors, arguments, strict=True):
        for axis, mark in zip(analysis.of(tensor), group, strict=True):
            name = mark.rstrip("!")
            if name in named:
                ax.unify(named[name], axis)
            named.setdefault(name, axis)
            if mark.endswith("!"):
                ax.block(axis, f"the rule {text!r} keeps it whole")
    kept = {name.rstrip("!") for group in results for name in group}
    summed = [axis for name, axis in named.items() if name not in kept and ax.find(axis).size != 1]
    if len(summed) == 1 and not many:
        analysis.contractions[node] = summed[0]
    else:
        for axis in summed:
            ax.block(axis, f"the rule {text!r} sums over several axes")
    shapes = [
        tuple(named.setdefault(name.rstrip("!"), Axis(size)) for name, size in zip(group, shape, strict=True))
        for group, shape in zip(results, found[1], strict=True)
    ]
    return tuple(shapes) if many else shapes[0]


def where(node: fx.Node) -> str:
    """The node's place as the user knows it: "h.0.attn.c_attn (gpt.py:52)"."""
    path, line = node.meta.get("path") or node.name, node.meta.get("line")
    return f"{path} ({line})" if line else str(path)


ELEMENTWISE = """abs add sub rsub mul div neg exp exp2 log log2 log1p expm1 sqrt rsqrt reciprocal pow square sin cos tan tanh
sigmoid silu gelu relu relu6 elu leaky_relu mish softplus hardtanh hardswish erf sign floor ceil round clamp clamp_min clamp_max
minimum maximum where masked_fill eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or
bitwise_not to _to_copy type_as clone contiguous detach alias lift_fresh_copy lift_fresh positive float_power
addcmul addcdiv lerp isnan isinf nan_to_num zeros_like ones_like full_like isfinite
__and__ __or__ eq_ fill floor_divide remainder fmod atan2 threshold celu selu hardsigmoid logsigmoid
log_sigmoid softsign trunc frac erfc""".split()

RULES: Mapping[str, Rule] = {
    **{f"aten.{name}": broadcast for name in ELEMENTWISE},
    **dict.fromkeys(["aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten"], view),
    "aten.transpose": transpose,
    "aten.swapaxes": transpose,
    "aten.t": transpose_two,
    "aten.numpy_T": transpose_two,
    "aten.permute": permute,
    "aten.unsqueeze": unsqueeze,
    "aten.squeeze": squeeze,
    **dict.fromkeys(["aten.expand", "aten.expand_as", "aten.broadcast_to"], expand),
    "aten.repeat_interleave": repeat_interleave,
    "aten.select": select,
    "aten.index": index,
    "aten.unbind": unbind,
    **dict.fromkeys(["aten.slice", "aten.narrow"], slice_rows),
    **dict.fromkeys(["aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split"], split),
    **dict.fromkeys(["aten.cat", "aten.concat", "aten.concatenate"], concatenate),
    "aten.stack": stack,
    **dict.fromkeys(["aten.pad", "aten.constant_pad_nd"], pad),
    "_operator.getitem": getitem,
    "aten.linear": linear,
    "aten.addmm": addmm,
    **dict.fromkeys(["aten.matmul", "aten.mm", "aten.bmm"], matmul),
    "aten.baddbmm": baddbmm,
    **dict.fromkeys(["aten.scaled_dot_product_attention", "kernels.attention"], attention),
    "aten.embedding": embedding,
    "aten.cross_entropy_loss": cross_entropy,
    "aten.sum": reduce_sum,
    **dict.fromkeys(["aten.mean", "aten.amax", "aten.amin", "aten.any", "aten.all", "aten.logsumexp"], reduce_whole),
    **dict.fromkeys(["aten.var", "aten.std", "aten.norm", "aten.linalg_vector_norm"], reduce_whole),
    **dict.fromkeys(["aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax"], over_dim),
    **dict.fromkeys(["aten.cumsum", "aten.flip"], over_dim),
    **dict.fromkeys(["aten.layer_norm", "aten.rms_norm"], layer_norm),
    **dict.fromkeys(["aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty"], make_new),
    **dict.fromkeys(["aten.zeros", "aten.ones", "aten.full"], make_new),
    **dict.fromkeys(["aten.arange", "aten.scalar_tensor"], opaque),
    "kernels.dropout": broadcast,
}
