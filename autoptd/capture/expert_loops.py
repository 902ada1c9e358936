"""Loops over experts: the rows of an expert, whose number depends on data, get a buffer for all tokens.

``x[torch.where(mask)]`` becomes ``kernels.dispatch`` by the order of ``kernels.route``, products with a matrix become
``kernels.grouped_linear``, which computes no more rows than there are, and ``index_add`` adds ``kernels.combine``.
What works row by row in between is the same for rows that mean nothing. Anything else is left as it was traced.

How many experts have tokens depends on data, too: a loop over these is traced over all (`KnownExperts`).
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dis import opmap
from math import prod
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves  # private, with no public twin

from autoptd.capture.known_values import KnownValues, find_memory, find_node
from autoptd.capture.side_effects import NUMBERS
from autoptd.capture.source_lines import CaptureError, user_frame, user_line
from autoptd.passes.ir.nodes import aten_name
from autoptd.passes.normal_form.writer import is_mutation
from autoptd.passes.operators.table import Trait, has_trait, strip
from autoptd.runtime import aten

_OURS = torch.ops.autoptd
_PICKS = ("where", "nonzero_numpy", "nonzero")  # the tokens of a mask
# Besides views and what works element by element, operators that keep rows. A dropout that drops nothing gets by.
_BY_ROWS = {"split", "chunk", "mean", "sum", "layer_norm", "rms_norm", "dropout"}


class _Rows(NamedTuple):
    """The rows of one expert: their pairs of a token and a slot, in `order`, and how many they are, `counts`.

    `others` says which pairs do not have the expert, of `sizes` [tokens, slots]; the mask's tokens are dim `along`.
    """

    order: fx.Node
    counts: fx.Node
    others: fx.Node
    sizes: tuple[int, int]
    along: int


def bound_rows(graph: fx.Graph) -> None:
    """Rewrite the loops over experts of a traced `graph`, in place."""
    if not any(map(depends_on_data, graph.nodes)):
        return
    writer = _Writer(graph)
    for node in list(graph.nodes):
        if node.op == "call_function":
            writer.visit(node)
    for node in reversed(graph.nodes):
        if not node.users and depends_on_data(node):
            graph.erase_node(node)


def depends_on_data(node: fx.Node) -> bool:
    """Return whether a value is a number, or has a size, that depends on data."""
    values = tree_leaves(node.meta.get("val"))
    return any(isinstance(x, NUMBERS) for value in values for x in (value, *getattr(value, "shape", ())))


def _find_count(node: fx.Node) -> Any:
    """Return the symbol of how many rows a value has, behind dimensions of size 1; None for one without rows."""
    shape = tree_leaves(node.meta["val"])[0].shape
    at = [dim for dim, size in enumerate(shape) if isinstance(size, NUMBERS)]
    return shape[at[0]].node.expr if len(at) == 1 and prod(shape[: at[0]]) == 1 else None


def _has_once(mask: Any) -> bool:
    """Return whether a token has a row once at most: in a mask of tokens, or that of an expert that ``topk`` chose."""
    shape = mask.meta["val"].shape
    if len(shape) == 1 or len(shape) > 2 or 1 in shape:
        return len(shape) <= 2
    while has_trait(mask, Trait.VIEWS) or mask.target in (aten.eq.Scalar, aten.one_hot.default) or _takes_one(mask):
        mask = mask.args[0]
    return mask.target is getitem and aten_name(mask.args[0].target) == "topk"


def _takes_one(node: Any) -> bool:
    """Return whether a node takes one place of its argument's first dimension, by a tensor that has its number."""
    return node.target is aten.index.Tensor and len(node.args[1]) == 1 and node.args[1][0].meta["val"].numel() == 1


class _Writer:
    """`made` has what became of each value of rows, and whose rows these are; `written` counts writes to memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[fx.Node, tuple[fx.Node, _Rows]] = {}
        self.indices: dict[fx.Node, tuple[_Rows, int]] = {}  # of a mask, along one of its dimensions
        self.masks: dict[Any, _Rows | None] = {}
        self.written = Counter[int]()
        self.seen: dict[fx.Node, int] = {}  # the writes to what rows were taken from, until then

    def visit(self, node: fx.Node) -> None:
        """Rewrite a call, if it is part of a loop over experts."""
        given: Any = node.args
        self.current, name = node, aten_name(node.target)
        source: Any = given[0] if given else None
        if name in _PICKS and len(given) == 1:
            if (rows := self._route(source)) is not None:
                self.indices[node] = rows, 0
        elif isinstance(source, fx.Node) and source in self.indices and (node.target is getitem or name == "squeeze"):
            self.indices[node] = self.indices[source][0], given[1] if node.target is getitem else 0
        elif name == "index":
            self._take(source, given[1])
        elif name in ("index_add", "index_add_") and given[1] == 0 and not node.kwargs:
            self._put(source, given[2], given[3], adds=True)
        elif name in ("index_put", "index_put_") and len(given[1]) == 1 and not node.kwargs:
            self._put(source, given[1][0], given[2], adds=given[3:] == (True,))
        else:
            self._keep(node, name)
        if is_mutation(node.target):
            self.written.update(find_memory(source))

    def _route(self, mask: fx.Node) -> _Rows | None:
        """Sort what a mask of tokens has, or one of tokens and their slots, of which there are fewer."""
        if depends_on_data(mask) or not _has_once(mask):
            return None
        shape = mask.meta["val"].shape
        along = int(shape[-1] > shape[0])
        sizes = shape[along], shape.numel() // shape[along]
        others = self._emit(aten.eq.Scalar, mask, 0)
        others = self._emit(aten.transpose.int, others, 0, 1) if along else others
        others = self._shape(others, [*sizes])
        route = self._emit(_OURS.route.default, others, 0, 1)
        return _Rows(self._emit(getitem, route, 0), self._emit(getitem, route, 1), others, sizes, along)

    def _find(self, pick: fx.Node) -> tuple[_Rows | None, list[int]]:
        """Return the rows that a mask picks, or indices of tokens, and from which sizes; [] for indices of slots."""
        if pick in self.indices:
            rows, dim = self.indices[pick]
            return rows, [rows.sizes[0]] if dim == rows.along else []
        mask = pick.meta["val"]
        if mask.dtype != torch.bool or any(map(self._count_writes, (pick, *pick.all_input_nodes))):
            return None, []
        key = pick.target, pick.args  # a model may write its mask twice: for what it reads, and what it writes
        if key not in self.masks:
            self.masks[key] = self._route(self._shape(pick, [mask.numel()]))
        return self.masks[key], list(mask.shape)

    def _take(self, x: fx.Node, picks: list[Any]) -> None:
        """Take the rows of tokens, or of pairs of a token and a slot, behind dimensions of size 1."""
        lead = next(dim for dim, pick in enumerate(picks) if pick is not None)
        first, *second = picks[lead:]
        rows, taken = self._find(first)
        if rows is None or not taken or depends_on_data(x):
            return
        (tokens, slots), shape = rows.sizes, list(x.meta["val"].shape)
        if second:
            if [self.indices.get(pick) for pick in second] != [(rows, 1 - rows.along)]:
                return
            taken, slots = [tokens, slots], 1
        rest = shape[lead + len(taken) :]
        if shape != [*[1] * lead, *taken, *rest]:
            return
        flat = self._shape(x, [prod(taken), prod(rest)])
        found = self._emit(_OURS.dispatch.default, flat, rows.order, slots)
        self.made[self.current] = self._shape(found, [*[1] * lead, tokens, *rest]), rows
        self.seen[self.current] = self._count_writes(x)

    def _put(self, out: fx.Node, pick: fx.Node, source: Any, *, adds: bool) -> None:
        """Add each token's rows to it, or put them in its place."""
        if not adds and (term := self._find_term(out, pick, source)) is not None:
            source, adds = term, True
        rows, taken = self._find(pick)
        made, own = self.made.get(source, (None, None))
        shape = list(out.meta["val"].shape)
        rest = shape[len(taken) :]
        if rows is None or made is None or own != rows or not taken or shape != [*taken, *made.meta["val"].shape[1:]]:
            return
        flat = self._shape(made, [rows.sizes[0], prod(rest)])
        ones = self._emit(aten.ones_like.default, rows.others, dtype=made.meta["val"].dtype)
        total = self._shape(self._emit(_OURS.combine.default, flat, ones, rows.order), shape)
        if not self._is_fresh(out):
            kept = out
            if not adds:  # as a sum, not a choice: the ranks may have a term of each, and sum them once for all experts
                absent = self._emit(aten.to.dtype, self._emit(aten.all.dim, rows.others, 1), out.meta["val"].dtype)
                kept = self._emit(aten.mul.Tensor, out, self._shape(absent, [*taken, *[1] * len(rest)]))
            total = self._emit(aten.add.Tensor, kept, total)
        if is_mutation(self.current.target):
            total = self._emit(aten.copy_.default, out, total)
        self.current.replace_all_uses_with(total)
        self.graph.erase_node(self.current)

    def _find_term(self, out: fx.Node, pick: fx.Node, source: Any) -> Any:
        """Return the term of ``out[pick] += term``, which takes rows, adds to them alone, and puts them back."""
        own: Any
        own, term = source.args if source.target in (aten.add.Tensor, aten.add_.Tensor) else (None, None)
        alone = own in self.seen and own.args == (out, [pick]) and len(own.users) == 1 and not source.kwargs
        return term if alone and self.seen[own] == self._count_writes(out) else None

    def _is_fresh(self, value: fx.Node) -> bool:
        """Return whether nothing has been written so far to a value of zeros, or of no known elements."""
        value = strip(value, Trait.RESHAPES)
        kind = aten_name(value.target).removeprefix("new_").removesuffix("_like")
        return kind in ("zeros", "empty") and not self._count_writes(value)

    def _count_writes(self, node: fx.Node) -> int:
        return sum(self.written[memory] for memory in find_memory(node))

    def _keep(self, node: fx.Node, name: str) -> None:
        """Write what works row by row as it is, and products with a matrix for as many rows as there are."""
        if not (inside := [n for n in node.all_input_nodes if depends_on_data(n)]):
            return
        reshapes = has_trait(node, Trait.RESHAPES)  # to sizes that may depend on data; it is given those of the buffer
        owners = {self.made.get(n, (None, None))[1] for n in inside[: 1 if reshapes else None]}
        rows = owners.pop() if len(owners) == 1 else None
        if rows is None or _find_count(node) is None or _find_count(node) != _find_count(inside[0]):
            return
        given: Any = node.args
        args, kwargs = fx.map_arg((given, node.kwargs), lambda n: self.made[n][0] if n in self.made else n)
        pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
        if name in ("linear", "matmul", "mm"):
            if depends_on_data(given[1]) or any(x.meta["val"].dim() != 2 for x in args[:2]):
                return
            made = self._multiply(rows, *args, transposed=name != "linear")
        elif reshapes:
            sizes = [rows.sizes[0] if isinstance(size, NUMBERS) else size for size in node.meta["val"].shape]
            made = self._shape(args[0], sizes)
        elif pointwise or name in _BY_ROWS or node.target is getitem or has_trait(node, Trait.VIEWS | Trait.CASTS):
            made = self._emit(node.target, *args, **kwargs)
        else:
            return
        self.made[node] = made, rows

    def _multiply(self, rows: _Rows, x: fx.Node, weight: fx.Node, bias: Any = None, *, transposed: bool) -> fx.Node:
        dtype = self.current.meta["val"].dtype  # that of autocast, where it is on
        x, weight = (self._emit(aten.to.dtype, factor, dtype) for factor in (x, weight))
        matrix = self._emit(aten.unsqueeze.default, weight, 0)
        made = self._emit(_OURS.grouped_linear.default, x, matrix, rows.counts, None, transposed)
        return made if bias is None else self._emit(aten.add.Tensor, made, self._emit(aten.to.dtype, bias, dtype))

    def _shape(self, value: fx.Node, shape: list[int]) -> fx.Node:
        return self._emit(aten.view.default, self._emit(aten.contiguous.default, value), shape)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call in front of the one that is visited, at its place in the user's model."""
        with self.graph.inserting_before(self.current):
            made = self.graph.call_function(target, args, kwargs)
        args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad():
            made.meta = {**self.current.meta, "val": target(*args, **kwargs)}
        return made


class KnownExperts(KnownValues):
    """A mode that gives a forward known values, and all experts where its `loops` are over those that have tokens.

    A run of the same forward without a trace is given as many.
    """

    def __init__(self, traced: nn.Module) -> None:
        super().__init__(traced)
        self.loops: list[ExpertLoop] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.unbind and isinstance(args[0].shape[0], NUMBERS):
            given = self.given[f"{func} {user_line()}"]
            if get_proxy_mode() is None and given:
                return torch.arange(given.popleft()).split(1)
            if get_proxy_mode() is not None and (mask := _find_mask(find_node(args[0]))) is not None:
                self.loops.append(loop := ExpertLoop(mask))
                given.append(loop.number)
                return loop.run()
        if func is Tensor.__getitem__ and self.loops and isinstance(args[1], Tensor) and args[1].shape == ():
            # A trace takes what a tensor numbers as dependent on data, although the experts' own numbers are known.
            number = self.compute(args[1]) if get_proxy_mode() is not None else None
            args = args if number is None or number.is_floating_point() else (args[0], number.item())
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def notes(self) -> dict[str, None]:
        """Return a line for the log of each loop."""
        said = "takes all experts: one without tokens has a gradient of 0, where the plain model's may have none"
        return dict.fromkeys(f"{loop.line} {said}" for loop in self.loops)


class ExpertLoop:
    """The loop ``for expert in (mask.sum((1, 2)) > 0).nonzero()``, at a `line` of the user's, over all experts.

    One without tokens adds no rows; its gradients are then 0, where the plain model may have none. `check` refuses a
    loop that does anything else.
    """

    def __init__(self, mask: fx.Node) -> None:
        self.line, self.number = user_line(), mask.meta["val"].shape[0]
        frame, _ = user_frame()
        # At the head of a plain ``for``; enumerate, zip and list would number what they are given.
        plain = frame is not None and frame.f_code.co_code[frame.f_lasti] == opmap["GET_ITER"]
        self._mask, self._counts = mask, not plain
        self._bodies: list[list[fx.Node]] = []  # what was traced for each expert

    def run(self) -> Iterator[Tensor]:
        """Yield the number of each expert; note what is traced for it."""
        graph, numbers = self._mask.graph, _read_numbers()
        for expert in range(self.number):
            before = len(graph.nodes)
            yield torch.arange(expert, expert + 1)
            self._bodies.append([*graph.nodes][before:])
        self._counts |= not numbers.items() <= _read_numbers().items()

    def check(self) -> None:
        """Raise CaptureError if what was traced for an expert does more than to add rows of its own tokens."""
        found = "counts its turns" if self._counts else "is left early" * (len(self._bodies) < self.number)
        written = (n.args[0] for n in self._mask.graph.nodes if is_mutation(n.target))
        if any(find_memory(x) & find_memory(self._mask) for x in written):
            found = "has a mask that is written to"
        for number, body in enumerate(self._bodies):
            own = (aten.index.Tensor, (self._mask, [body[0]])), (aten.select.int, (self._mask, 0, number))
            for node in body:
                writes = is_mutation(node.target) and not depends_on_data(node.args[0])  # type: ignore[arg-type]
                if (writes or not node.users.keys() <= {*body}) and not _adds_rows(node, own):
                    found = f"makes a value ({node.target}) that is read although an expert has no tokens"
        if found:
            raise CaptureError(
                f"{self.line}: this loop over the experts that have tokens {found}, and a program takes all experts: "
                "loop over all of them, and only add rows of their own tokens to a result"
            )


def _adds_rows(node: fx.Node, own: Collection[Any]) -> bool:
    """Return whether a node adds or puts rows to the tokens of one of the masks that are an expert's `own`."""
    given: Any = node.args
    name = aten_name(node.target).removesuffix("_")
    if name not in ("index_add", "index_put"):
        return False
    pick = given[2] if name == "index_add" else given[1][0]
    where = pick.args[0] if pick.target is getitem else pick
    mask = strip(where.args[0], Trait.RESHAPES | Trait.SQUEEZES) if aten_name(where.target) in _PICKS else where
    return (mask.target, mask.args) in own


def _find_mask(hits: Any) -> fx.Node | None:
    """Return the mask, of zeros and ones, of which `hits` are the experts with tokens along its first dimension."""
    given: list[Any] = []
    for names in (["nonzero"], ["gt", "greater"], ["sum"]):
        if aten_name(getattr(hits, "target", None)) not in names:
            return None
        hits, *rest = hits.args
        given += rest
    rank = hits.meta["val"].dim()
    counted = len(given) == 2 and given[0] == 0 and {dim % rank for dim in given[1]} == {*range(1, rank)}
    return hits if counted and _is_mask(hits) else None


def _is_mask(value: Any) -> bool:
    """Return whether each element of a value is 0 or 1."""
    if not isinstance(value, fx.Node) or value.meta["val"].dtype == torch.bool or aten_name(value.target) == "one_hot":
        return isinstance(value, fx.Node)
    own = value.args[:1] if has_trait(value, Trait.VIEWS | Trait.CASTS) else (None,)
    return all(map(_is_mask, value.args if aten_name(value.target) == "mul" else own))


def _read_numbers() -> dict[str, Any]:
    """Return the numbers among the user's local variables, and how many items those have that are lists or the like."""
    frame, _ = user_frame()
    held = {} if frame is None else frame.f_locals
    counted = {name: len(value) for name, value in held.items() if type(value) in (list, set, dict)}
    return counted | {name: value for name, value in held.items() if type(value) in (int, float)}
