"""The choice of the axes to divide over the tensor ranks: the exact optimum.

Dividing an axis saves memory on every rank (parameters with their gradients and optimizer state, activations). Two axes
of one tensor exclude each other: those that save most are divided. The all-reduces, where an axis is contracted or a
replicated value enters the divided region, do not decide: models with two ways that save alike are not known. For a GPT
layer the optimum is Megatron's: heads and MLP width (SC21 §2.3).
"""

from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from functools import cache
from itertools import chain, combinations, product
from math import gcd, prod
from operator import attrgetter, itemgetter

import networkx as nx
from torch import fx

from autoptd.passes.cost.work import forward_work
from autoptd.passes.ir.nodes import aten_name, called, operator_name, results_of, shape_of, where
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axes import Axis
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.passes.operators.table import Trait, has_trait

STATE_BYTES = 4  # gradient and two Adam moments beside each parameter, in multiples of its own bytes


def choose_axes(graph: fx.Graph, axis_map: AxisMap) -> tuple[dict[Axis, int], list[str]]:
    """Return the axes to divide, with the padding of each (0 if t divides it), and the log lines.

    Raises ValueError if the heads of an attention cannot be divided.
    """
    if axis_map.tensor == 1:
        return {}, []
    for node in axis_map.inputs:
        for axis in axis_map.of(node):
            if not axis_map.is_soft_label(node, axis):
                ax.block(axis, "it is a dimension of the batch")
    divided = _divide(graph, axis_map)
    while mixed := _mixed_contractions(axis_map, divided):
        for leaf, reason in mixed.items():
            ax.block(leaf, reason)
        divided = _divide(graph, axis_map)  # the axes that they excluded may be divided now
    _require_heads(axis_map, divided)
    return divided, _describe_rest(graph, axis_map, divided)


def _divide(graph: fx.Graph, axis_map: AxisMap) -> dict[Axis, int]:
    """Choose among the axes that are not blocked."""
    rivals, saved = _measure(graph, axis_map)
    rivals.remove_nodes_from([leaf for leaf in rivals if not saved[leaf] or rivals.has_edge(leaf, leaf)])
    divided = {leaf: -leaf.size % axis_map.tensor for leaf in solve(rivals, saved)}
    unread = _unread_segments(graph, axis_map, divided)
    return {leaf: padding for leaf, padding in divided.items() if leaf not in unread}


def _paddable(graph: fx.Graph, axis_map: AxisMap) -> set[Axis]:
    """Return the leaves that t does not divide and that only meet operators which ignore zero rows at the end."""
    found = map(ax.find, axis_map.classes)
    wanted = {leaf for leaf in found if leaf.kind == "leaf" and leaf.size % axis_map.tensor}
    if not wanted:
        return wanted
    for node in graph.nodes:
        contraction = axis_map.contractions.get(node)
        summed = set() if contraction is None else {ax.find(contraction)}
        if not has_trait(node, Trait.KNOWS_SIZE):
            wanted -= summed
        for axes in axis_map.all_of(node):
            wanted -= {leaf for a in axes if ax.find(a).kind != "leaf" for leaf in ax.leaves(a)}
        if node.op == "call_function" and not has_trait(node, Trait.PADDING_SAFE):
            wanted -= summed | axis_map.leaves_of(node)
        if node.op == "call_function" and aten_name(node.target) == "div":
            divisor = [n for n in node.args[1:] if isinstance(n, fx.Node)]
            wanted -= {leaf for n in divisor for axis in axis_map.of(n) for leaf in ax.leaves(axis)}  # 0 / 0
    return wanted


def _measure(graph: fx.Graph, axis_map: AxisMap) -> tuple[nx.Graph, Counter[Axis]]:
    """Walk the graph once: the leaves that may be divided, and the bytes that each saves.

    They are joined where they exclude each other, and to themselves if none may be divided after all: those that one
    tensor has twice, or as a segment that an outer factor repeats. Bytes are per microbatch and rank.
    """
    rivals, saved = nx.Graph(), Counter[Axis]()
    tensor, padded = axis_map.tensor, _paddable(graph, axis_map)

    def fits(leaf: Axis) -> bool:
        return not leaf.blocked and leaf.size > 1 and (leaf.size % tensor == 0 or leaf in padded)

    for node in graph.nodes:
        for axes, value in zip(axis_map.all_of(node), results_of(node), strict=False):
            # Leaves of different groups exclude each other.
            groups = [dict.fromkeys(filter(fits, ax.leaves(f))) for axis in axes for f in ax.factors(axis)]
            size = value.nbytes
            if node.op == "get_attr":
                size *= STATE_BYTES if node in axis_map.weights else 1
            repeated = (f for axis in axes for f in ax.factors(axis)[1:] if f.kind == "sum")
            inner = {leaf for f in repeated for leaf in ax.leaves(f)}
            for leaf in chain.from_iterable(groups):
                saved[leaf] += size - size // tensor
            rivals.add_nodes_from(chain.from_iterable(groups))
            rivals.add_edges_from((leaf, leaf) for leaf in inner.intersection(chain.from_iterable(groups)))
            for one, other in combinations(groups, 2):
                rivals.add_edges_from(product(one, other))
    return rivals, saved


def _unread_segments(graph: fx.Graph, axis_map: AxisMap, divided: Mapping[Axis, int]) -> set[Axis]:
    """Return the divided rows of parameters that no contraction sums over, next to rows that are whole.

    ``(pos * c)[:s]`` has such rows. Dividing them would save little and make the gradient of the whole rows partial.
    """
    mixed: set[Axis] = set()
    read = {leaf for axis in axis_map.contractions.values() for leaf in ax.leaves(axis)}
    for node in graph.nodes:
        for axis in (axis for axes in axis_map.all_of(node) for axis in axes):
            if node.op == "get_attr" and not divided.keys() >= (own := set(ax.leaves(axis))):
                mixed |= own
    return (mixed - read) & divided.keys()


def _mixed_contractions(axis_map: AxisMap, divided: Mapping[Axis, int]) -> dict[Axis, str]:
    """Return the divided segments that an operator sums over together with whole ones, each with the reason.

    Every rank would add the whole ones. Also the parts, but for the outermost, of an axis whose rows it numbers.
    """
    mixed: dict[Axis, str] = {}
    for node, axis in axis_map.contractions.items():
        own = [leaf for leaf in ax.leaves(axis) if leaf in divided]
        if _is_mixed(axis, divided):
            mixed |= dict.fromkeys(own, f"{called(node)} sums over it and over rows that every rank has")
        elif own and has_trait(node, Trait.NUMBERS) and own != ax.factors(axis)[:1]:
            mixed |= dict.fromkeys(own, f"{called(node)} numbers its rows among others")
    return mixed


def _is_mixed(axis: Axis, divided: Mapping[Axis, int]) -> bool:
    """Return whether some rows of `axis` are divided and others whole; a product's are if those of a factor are."""
    axis = ax.find(axis)
    segments = {ax.is_divided([part], divided) for part in axis.parts if axis.kind == "sum"}
    return len(segments) > 1 or any(_is_mixed(part, divided) for part in axis.parts)


def solve(rivals: nx.Graph, saved: Mapping[Axis, int]) -> list[Axis]:
    """Return the leaves to divide, no two of them `rivals`: most bytes saved, then the first."""

    @cache
    def best(free: tuple[Axis, ...]) -> tuple[int, tuple[Axis, ...]]:
        if not free:
            return 0, ()
        first, *others = free
        left = tuple(leaf for leaf in others if leaf not in rivals[first])
        total, taken = best(left)
        with_first = total + saved[first], (first, *taken)
        if len(left) == len(others):
            return with_first
        return max(with_first, best(tuple(others)), key=itemgetter(0))

    order = attrgetter("serial")
    groups = (tuple(sorted(group, key=order)) for group in nx.connected_components(rivals))
    return sorted(chain.from_iterable(best(group)[1] for group in groups), key=order)


def replicated_heads(axis_map: AxisMap) -> frozenset[fx.Node]:
    """Return the attentions whose heads divide over t although neither the key-value heads nor the groups do.

    Their keys and values are whole on every rank. Raises ValueError if t is not a multiple of the key-value heads.
    """
    tensor, batch = axis_map.tensor, _batch_leaves(axis_map)
    result = set()
    for node, axis in axis_map.heads:
        sizes = [f.size for f in ax.factors(axis) if f not in batch]
        if axis.blocked or len(sizes) < 2 or prod(sizes) % tensor or any(n % tensor == 0 for n in sizes):
            continue
        if tensor % sizes[0]:
            raise ax.IndivisibleError(
                f"{sizes[0]} key-value heads do not divide over tensor={tensor} at {where(node)}, and tensor is not a "
                f"multiple of them (which would replicate them); use tensor={_divisors(sizes[0])}"
            )
        result.add(node)
    return frozenset(result)


def _batch_leaves(axis_map: AxisMap) -> set[Axis]:
    return {leaf for node in axis_map.inputs for axis in axis_map.of(node) for leaf in ax.leaves(axis)}


def _divisors(number: int) -> str:
    *others, last = (str(d) for d in range(1, number + 1) if number % d == 0)
    return f"{', '.join(others)} or {last}" if others else last


def _require_heads(axis_map: AxisMap, divided: Mapping[Axis, int]) -> None:
    """Raise ValueError if the number of heads is the reason why an attention is not divided."""
    batch = _batch_leaves(axis_map)
    found = []
    for node, axis in axis_map.heads:
        own = [f for f in ax.factors(axis) if f not in batch]
        headless = not own and (ax.find(axis).size > 1 or len(shape_of(node)) < 4)
        blocked = any(leaf.blocked for f in own for leaf in ax.leaves(f))
        # Of several leading dimensions this may be chunks of a sequence, and the heads another.
        unsure = len(shape_of(node)) > 4 and not ax.is_divided(own, divided)
        if not (blocked or headless or unsure):
            found.append((node, own, prod(f.size for f in own)))
    common = gcd(*(heads for _, _, heads in found))
    for node, own, heads in found:
        groups = own[0].size if own else 1
        if ax.is_divided(own, divided) or groups % axis_map.tensor == 0:  # it is not their number
            continue
        name, usable = f"{heads} heads", common
        kind: type[ValueError] = ax.IndivisibleError
        if heads % axis_map.tensor == 0:  # other rows lie between the heads of a group
            # What all layers save decides whether they are divided, too.
            name, usable, kind = f"{heads} heads in {groups} groups", gcd(common, groups), ValueError
        raise kind(
            f"{name} do not divide over tensor={axis_map.tensor} at {where(node)}; use tensor={_divisors(usable)}"
        )


def _explain(axis: Axis, tensor: int, batch: Container[Axis] = ()) -> str:
    """Return the reason why a dimension is whole. That it has leaves of the `batch` is none: every attention has."""
    own = [leaf for leaf in ax.leaves(axis) if leaf not in batch]
    blocked = next((leaf.blocked for leaf in own if leaf.blocked), "")
    odd = next((f"{tensor} does not divide {leaf.size}" for leaf in own if leaf.size % tensor), "")
    beside = f"a tensor has {ax.find(axis).size} twice, or another dimension beside it that saves more"
    return blocked or odd or (beside if own else "it has no dimension of heads")


def _describe_rest(graph: fx.Graph, axis_map: AxisMap, divided: Mapping[Axis, int]) -> list[str]:
    """Return one log line for each kind of attention or weight that every rank has whole, and for each padding."""
    lines: dict[str, list[str]] = defaultdict(list)
    batch = _batch_leaves(axis_map)
    for node, axis in axis_map.heads:
        if not ax.is_divided([axis, *axis_map.of(node)], divided):
            cost = f"{forward_work(node).flops:,.0f} FLOPs a forward on each of {axis_map.tensor} ranks"
            name = operator_name(node.target)
            why = _explain(axis, axis_map.tensor, batch)
            lines[f"attention replicated ({name}, {cost}) because {why}"].append(where(node))
    for (node, tensor), dim in axis_map.kv_heads.items():
        heads = ax.factors(axis_map.of(tensor)[dim])[0].size
        lines[f"{heads} key-value heads replicated over tensor={axis_map.tensor}"].append(where(node))
    for node in graph.nodes:
        matrix = node.op == "get_attr" and node in axis_map.weights and len(axis_map.of(node)) > 1
        if matrix and not ax.is_divided(axis_map.of(node), divided):
            weight = f"weight of shape {list(shape_of(node))} ({node.meta['val'].nbytes:,} bytes)"
            why = "; ".join(dict.fromkeys(_explain(axis, axis_map.tensor) for axis in axis_map.of(node)))
            lines[f"{weight} replicated because {why}"].append(str(node.target))
    for axis, padding in divided.items():
        if padding:
            lines[f"an axis of {axis.size} padded by {padding} in memory"].append(f"tensor={axis_map.tensor}")
    return [f"{what}: {place}" + f" and {len(more)} more" * bool(more) for what, (place, *more) in lines.items()]
