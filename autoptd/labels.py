"""Which batch inputs are labels of a mean loss, and which of their elements it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoptd.passes import product_work
from autoptd.passes.calls import argument, called, shape_of
from autoptd.passes.letters import letter
from autoptd.passes.program import Program
from autoptd.passes.work import find_trained
from autoptd.runtime import aten, kernels
from autoptd.runtime.manifest import Input

# Operators that only move elements, or add constant ones.
MOVING = frozenset(
    [
        *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
        *("transpose", "permute", "t", "contiguous", "clone", "alias", "detach", "to", "_to_copy"),
        *("slice", "narrow", "select", "pad", "constant_pad_nd"),
    ]
)
SCALING = frozenset(["neg", "mul", "div"])
# Operators whose result is scaled where what they take is.
LINEAR = (
    MOVING | SCALING | {"add", "sub", "rsub", "sum", "mean", "stack", "cat", "expand", "where", "nan_to_num"}
)
# Operators with one result that reduce dimensions, at first those that are not linear.
BENDING = frozenset(["var", "std", "amax", "amin", "max", "min", "logsumexp", "norm", "linalg_vector_norm"])
REDUCING = BENDING | {"mean", "sum"}
SOFTMAX = frozenset(["softmax", "log_softmax"])
# Operators in which what lies along a dimension meets, and those that take it apart, with where they name it.
MEETING = {"flip": 1, "cumsum": 1, "softmax": 1, "log_softmax": 1, "roll": 2, "topk": 2, "kthvalue": 2}
CUTTING = {"slice": 1, "narrow": 1, "split": 2, "split_with_sizes": 2, "chunk": 2, "tensor_split": 2}


class Loss(NamedTuple):
    """A cross-entropy of labels: what it leaves out, and whether it is the mean over the others, all alike."""

    target: fx.Node
    ignored: int
    mean: bool
    weighted: bool


def describe_labels(program: Program) -> tuple[Input, ...]:
    """The inputs of `program`, labels with their loss's ``ignore_index`` and the leading elements that it skips.

    An input is marked where cross-entropies of the mean over unweighted labels read it, moved only, and leave out the
    same: a loss that is written out, or labels that are changed on their way, leave it as it is. It weighs where one
    such cross-entropy, at most scaled, is the whole loss.
    """
    whole = _moved(_find_loss(program), MOVING | SCALING)
    marks: dict[str, tuple[int, int, bool]] = {}
    for name, places in _find_places(program).items():
        (node, place), *others = places
        if place is not None and all(other is not None and other[0] == place[0] for _, other in others):
            marks[name] = (*place, node is whole and not others)
    return tuple(
        replace(value, ignore_index=mark[0], skipped=mark[1], weighs=mark[2] and value.batch_dim is not None)
        if (mark := marks.get(value.name))
        else value
        for value in program.inputs
    )


def describe_means(program: Program, divided: Program) -> Iterator[str]:
    """What is said of a loss that is another one as the mean of microbatches' losses than over the whole batch.

    `divided` is the `program` before operators are fused.
    """
    if uncounted := tuple(dict.fromkeys((*find_uncounted(program), *find_counts(divided)))):
        yield (
            f"{' and '.join(uncounted)} {'come' if len(uncounted) > 1 else 'comes'} to the loss changed, with class "
            "weights, or counted by the model for a mean of its own, so that which labels count is not known: a step's "
            "loss is the mean of the microbatches' losses, each of which counts alike. That is another one than over "
            "the whole batch where they have unequal counts; change labels in the data, before the call, and leave the "
            "mean to cross_entropy, which leaves out its ignore_index"
        )
    if is_sum(divided):
        yield (
            "the loss is a sum over its batch, and a step's loss is the mean of the microbatches' losses over all "
            "replicas: their number times smaller than the sum over the whole batch, and the gradients with it. Return "
            "a mean, or scale the loss that the call returns"
        )
    if (mixed := find_mixed(divided, counted=bool(uncounted))) is not None:
        why = (
            f"joins a microbatch's sequences ({divided.letters.get('b', 1)} here) with each other, as contrasts and "
            "statistics of the batch do, and with none of another microbatch"
        )
    elif not uncounted and (mixed := find_bent(divided)) is not None:
        why = (
            "is not linear in what was summed over a microbatch's sequences, as a perplexity and a balance of experts "
            "are not"
        )
    if mixed is not None:
        yield (
            f"{called(mixed)} {why}: a step's loss is the mean of the microbatches' losses, which is another one than "
            "over the whole batch. For that, compile for one microbatch on one replica: microbatch_size= all "
            "sequences, num_microbatches=1"
        )


def find_uncounted(program: Program) -> tuple[str, ...]:
    """Inputs that come to the mean of a cross-entropy changed, or weighted: which of them count is not known."""
    places = _find_places(program, means=True)
    return tuple(name for name, found in places.items() if any(place is None for _, place in found))


def find_counts(program: Program) -> tuple[str, ...]:
    """Inputs that a count is made of, by which the loss is divided: a mean over them that is written out.

    Or multiplied, by what is one over the count. What is divided on its way to a cross-entropy is not its mean.
    """
    (stage,) = program.stages
    trained = find_trained(stage)

    def parts(node: fx.Node) -> list[fx.Node]:
        return [
            x for x in node.all_input_nodes if _name(node) in LINEAR and (x in trained or not shape_of(x))
        ]

    divisors = [divisor for node in _walk(_find_loss(program), parts) for divisor in _divisors(node)]
    counts = [x for x in divisors if isinstance(x, fx.Node) and x not in trained and not shape_of(x)]
    return tuple(dict.fromkeys(name for x in counts if _is_summed(x) for name, _ in _sources(x)))


def is_sum(program: Program) -> bool:
    """Whether the loss is known to grow with the microbatch: a sum over it, and nothing on the way may divide it."""
    (stage,) = program.stages
    trained = find_trained(stage)

    def parts(node: fx.Node) -> list[fx.Node]:
        """What `node` grows with, up to where a factor is no longer one of the loss."""
        if _read_loss(node) or node.target in product_work.FORWARDS or _name(node) in SOFTMAX:
            return []
        # What has no batch is the same for all of it, where it comes to what has one.
        return [x for x in node.all_input_nodes if x in trained and _has_batch(x) >= _has_batch(node)]

    grown = {node: parts(node) for node in _walk(_find_loss(program), parts)}
    read = [loss.target for node in grown if (loss := _read_loss(node))]
    values: list[Any] = [node.meta["val"] for node in (*grown, *read)]
    sizes = {n for x in (*values, *program.inputs) for n in getattr(x, "shape", ())} - {0, 1}
    batch = program.letters.get("b", 1)
    return all(
        _grows(node, sources) and not _may_divide(node, sources, batch, sizes)
        for node, sources in grown.items()
    )


def find_mixed(program: Program, counted: bool = False) -> fx.Node | None:
    """The first value that one sequence of the batch has of the others; None where each is by itself.

    It has two dimensions of the batch, is made along it, of two parts of it, or with what was reduced over it. Where
    labels are `counted`, only trained values: the others may be the counts.
    """
    (stage,) = program.stages
    trained, reduced, varying = find_trained(stage), set[fx.Node](), set[fx.Node]()
    parts: dict[fx.Node, set[Any]] = {}
    alone = program.letters.get("b", 1) == 1
    node: fx.Node
    for node in stage.graph.nodes:
        sources = node.all_input_nodes
        if node.meta.get("role") != "input" and varying.isdisjoint(sources):
            continue
        varying.add(node)
        parts[node] = _find_parts(node, parts)
        if counted and node not in trained:
            continue
        known = not reduced.isdisjoint(sources)
        meets = _is_along_batch(node, MEETING) or "batch_norm" in _name(node)
        several = (len(parts[node]) > 1 and _sizes(node)) or _count_batches(node, alone) > 1
        if meets or several or (known and _has_batch(node)):
            return node
        if known or (_name(node) in REDUCING and not _has_batch(node) and any(map(_has_batch, sources))):
            reduced.add(node)
    return None


def find_bent(program: Program) -> fx.Node | None:
    """The first trained value that is not linear in what was reduced over the batch, counts but for divisors.

    Or in the batch that it reduces itself, as a norm is not.
    """
    (stage,) = program.stages
    trained, reduced = find_trained(stage), set[Any]()
    varying = set[Any]()  # all that depends on the batch
    node: fx.Node
    for node in stage.graph.nodes:
        if node.meta.get("role") == "input" or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
        if _has_batch(node):
            continue
        if not reduced.isdisjoint(node.all_input_nodes):
            if node in trained and not _is_linear(node, varying, trained):
                return node
            reduced.add(node)
        elif (_name(node) in REDUCING or _read_loss(node)) and any(map(_has_batch, node.all_input_nodes)):
            if node in trained and _name(node) in BENDING:
                return node
            reduced.add(node)
    return None


def _is_linear(node: fx.Node, varying: Container[Any], trained: Container[Any]) -> bool:
    """Whether `node` is linear in all that is `varying`; what is divided by counts where it is trained."""
    if _name(node) == "div" and node.args[1] in varying:
        return node.args[1] not in trained
    if _name(node) in ("mul", "matmul"):
        return sum(x in varying for x in node.args) == 1
    return _name(node) in LINEAR or not _name(node)


def _grows(node: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Whether `node` has every sample of its `sources`, or their sum."""
    if not sources:
        loss = _read_loss(node)
        return _has_batch(node) or (loss is not None and not loss.mean)
    return _name(node) == "sum" or _has_batch(node) or not any(map(_has_batch, sources))


def _may_divide(node: fx.Node, sources: Sequence[fx.Node], batch: int, sizes: set[int]) -> bool:
    """Whether `node` may divide what grows by how large the batch is, be it through weights that add up to one."""
    if divisors := _divisors(node):
        return any(isinstance(x, fx.Node) or _may_count(x, {batch}) for x in divisors)
    factors: Any = node.args if _name(node) == "mul" else ()
    weights = [x for x in factors if isinstance(x, fx.Node) and x not in sources]
    numbers = [1 / x for x in factors if not isinstance(x, fx.Node) and x != 0]
    # A mask leaves out, and divides nothing. Every whole number is a multiple of a batch of one: a factor such as 0.1
    # is told from one over a count by the other sizes.
    return any(_moved(x).meta["val"].dtype != torch.bool for x in weights) or any(
        _may_count(x, sizes) for x in numbers
    )


def _may_count(number: float, sizes: Collection[int]) -> bool:
    """Whether a number in the code is a multiple of one of `sizes`, and may come from it: a graph does not say."""
    number = abs(number)
    return any(min(left := number % size, size - left) < 1e-9 * number for size in sizes)


def _is_summed(count: fx.Node) -> bool:
    """Whether a sum is taken on the way to `count`, as of labels that are counted."""
    return any(_name(node) in ("sum", "count_nonzero", "mean") for node in _walk(count))


def _divisors(node: fx.Node) -> Sequence[Any]:
    """What `node` divides by."""
    if _name(node) == "div":
        return node.args[1:2]
    exponent = node.args[1] if _name(node) == "pow" else None
    inverse = isinstance(exponent, (int, float)) and exponent < 0
    return node.args[:1] if inverse or _name(node) == "reciprocal" else ()


def _has_batch(node: fx.Node) -> bool:
    """Whether one of the dimensions is the batch, or made of it."""
    return _count_batches(node) > 0


def _count_batches(node: fx.Node, alone: bool = False) -> int:
    """How many dimensions are the batch, or made of it.

    Where a sequence is `alone`, those that are the batch: its length may be taken for the number of all tokens.
    """
    b = letter("b")
    return sum(size == b if alone else b in getattr(size, "free_symbols", ()) for size in _sizes(node))


def _sizes(node: fx.Node) -> Sequence[Any]:
    """The dimensions of a value in letters, of the first of several."""
    sizes = node.meta.get("sizes") or ()
    return sizes[0] if sizes and isinstance(sizes[0], tuple) else sizes


def _is_along_batch(node: fx.Node, places: Mapping[str, int]) -> bool:
    """Whether `node` is one of the operators with these `places`, and what it names there is of the batch."""
    place, default = places.get(_name(node), 0), -1 if places is MEETING else 0
    sizes, dims = _sizes(node.all_input_nodes[0]) if place else (), argument(node, place, "dim", default)
    named = [sizes[d] for d in ([dims] if isinstance(dims, int) else dims)] if sizes else []
    return any(letter("b") in getattr(size, "free_symbols", ()) for size in named)


def _find_parts(node: fx.Node, parts: Mapping[fx.Node, set[Any]]) -> set[Any]:
    """Which parts of the batch, neighbours in one, a value is made of; none where they were joined again."""
    sources, joined = node.all_input_nodes, _name(node) in ("cat", "stack")
    cut = sources[0] if node.target is getitem else node
    whole = argument(node, 4, "step", 1) != 1 or _sizes(node) in map(_sizes, sources)
    if _is_along_batch(cut, CUTTING) and (cut is not node or not whole):
        return {node.args[1:]}
    return set().union(*(parts.get(source, ()) for source in sources if not joined))


def _name(node: fx.Node) -> str:
    """The operator that `node` calls, as torch names it; empty where it calls none."""
    return node.target._schema.name.removeprefix("aten::") if isinstance(node.target, OpOverload) else ""


def _walk(
    start: fx.Node, parts: Callable[[fx.Node], Iterable[fx.Node]] = attrgetter("all_input_nodes")
) -> Iterator[fx.Node]:
    """`start`, its `parts`, theirs and so on, each once; by default all that it is computed from."""
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        yield node
        fresh = [source for source in parts(node) if source not in seen]
        seen.update(fresh)
        pending += fresh


def _find_places(
    program: Program, *, means: bool = False
) -> dict[str, list[tuple[fx.Node, tuple[int, int] | None]]]:
    """The losses that each input comes to, or the `means` among them, with what `_place` says of it."""
    found: dict[str, list[tuple[fx.Node, tuple[int, int] | None]]] = {}
    for stage in program.stages:
        for node in stage.graph.nodes:
            loss = _read_loss(node)
            if loss is None or (means and not loss.mean):
                continue
            for name, source in _sources(loss.target):
                counts = loss.mean and not loss.weighted
                place = _place(source, loss.target, loss.ignored) if counts else None
                found.setdefault(name, []).append((node, place))
    return found


def _find_loss(program: Program) -> fx.Node:
    """What the model returns."""
    loss = next(n for n in program.stages[-1].graph.nodes if n.op == "output").args[0]
    assert isinstance(loss, fx.Node)
    return loss


def _moved(node: fx.Node, names: Container[str] = MOVING) -> fx.Node:
    """The node that `node` is, but for casts and moves, or other operators by `names`."""
    while _name(node) in names and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _read_loss(node: fx.Node) -> Loss | None:
    """The cross-entropy that `node` is; None for all else."""
    if node.target is kernels.cross_entropy:
        target, weight = node.args[2], None
        ignored, mean = (
            argument(node, 4, "ignore_index", -100),
            argument(node, 5, "reduction", "mean") == "mean",
        )
    elif node.target is aten.cross_entropy_loss.default or node.target is aten.nll_loss_nd.default:
        target, weight = node.args[1], argument(node, 2, "weight")
        ignored, mean = argument(node, 4, "ignore_index", -100), argument(node, 3, "reduction", 1) == 1
    else:
        return None
    return Loss(target, ignored, mean, weight is not None) if isinstance(target, fx.Node) else None


def _sources(target: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """The inputs that `target` is computed from."""
    return ((str(node.target), node) for node in _walk(target) if node.meta.get("role") == "input")


def _place(source: fx.Node, target: fx.Node, ignored: int) -> tuple[int, int] | None:
    """`ignored`, and how many elements at the begin of the labels' last dimension do not come to the loss."""
    shape = source.meta["val"].shape
    if not shape:
        return None
    # Every label another number, to see where each is in the target.
    numbers = torch.arange(shape.numel()).view(shape) + max(0, ignored + 1)
    moved = _move(source, target, numbers)
    if moved is None:
        return None
    kept = torch.isin(numbers, moved)
    skipped = int((~kept).reshape(-1, shape[-1])[0].sum())
    alike = torch.equal(kept, (torch.arange(shape[-1]) >= skipped).expand(shape))
    once = bool((moved != ignored).sum() == kept.sum())
    return (ignored, skipped) if alike and once else None


def _move(source: fx.Node, target: fx.Node, numbers: Tensor) -> Tensor | None:
    """What `target` holds where `source` is `numbers`; None where more happens on the way than moving."""
    way = [target]
    while way[-1] is not source:
        node = way[-1]
        if _name(node) not in MOVING or len(node.all_input_nodes) != 1:
            return None
        way.append(node.all_input_nodes[0])
    value: Any = numbers
    for node in reversed(way[:-1]):
        run: Any = node.target
        value = run(*(value if isinstance(x, fx.Node) else x for x in node.args), **node.kwargs)
    return value if isinstance(value, Tensor) else None
