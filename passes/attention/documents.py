"""Recognize the masks of packed documents: a query sees the keys of its own document, up to its own place.

Such a mask is a conjunction. Each term is a constant that is proved to be causal or to show all, or compares the
numbers of one tensor, laid along queries and keys. How they are laid is found by laying the places of its elements so.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from autoptd.passes.attention.constants import Constants
from autoptd.passes.attention.masks import Mask
from autoptd.passes.attention.products import Step, call_name
from autoptd.passes.ir.nodes import argument, shape_of
from autoptd.passes.normal_form.constant_masks import buffers_under
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten

# ("causal", None), ("open", None), ("same", numbers) or ("ordered", numbers): a key's is not larger. None: unknown.
Term = tuple[str, fx.Node | None] | None


def read_documents(constants: Constants, steps: Sequence[Step], shape: Sequence[int]) -> Mask | None:
    """Return the mask among an attention's `steps` if it is causal inside of documents, for scores of `shape`.

    It is "packed", and `given` are the numbers of documents, integers [b, s], [1, s] or [s].
    """
    masked = [step for step in steps if step.mask is not None]
    scaled = masked and any(step.kind == "scale" for step in steps[steps.index(masked[0]) :])
    framed = all(tuple(step.frame) == tuple(shape) for step in masked)
    if scaled or not framed or len(shape) != 4 or shape[-1] != shape[-2]:
        return None
    reader = _Reader(constants, shape[0], shape[-1])
    terms = {term for step in masked for term in reader.read(step)}
    same, ordered = ([term[1] for term in terms if term and term[0] == kind] for kind in ("same", "ordered"))
    if None in terms or len(same) != 1 or not (ordered or ("causal", None) in terms):
        return None
    counted = all(_counts_on(same[0], positions) for positions in ordered)
    proved = frozenset(reader.proved)
    return Mask("packed", "causal inside of documents", given=same[0], proved=proved) if counted else None


def _counts_on(documents: Any, positions: Any) -> bool:
    """Return whether documents begin where `positions` do not count on by one: inside they are in order."""
    changes: Any = documents.target is aten.cumsum.default and documents.args[0]
    steps = changes and changes.target is aten.ne.Scalar and changes.args[1] == 1 and changes.args[0]
    if not steps or steps.target is not aten.diff.default or steps.args[0] is not positions:
        return False
    last = {-1, len(shape_of(documents)) - 1}
    along = {argument(steps, "dim"), argument(documents, "dim")} <= last
    return along and argument(steps, "n") == 1 and argument(steps, "append") is None


class _Reader:
    """A reader of masks for `batch` samples of `length` tokens, which are as read while `proved` buffers are."""

    def __init__(self, constants: Constants, batch: int, length: int) -> None:
        self.constants, self.batch, self.length = constants, batch, length
        self.proved: set[str] = set()

    def read(self, step: Step) -> Iterator[Term]:
        """Yield the terms of the mask of a step."""
        mask: Any = step.mask
        while mask.target is aten.expand.default:
            mask = mask.args[0]
        fits = (1, 1, *shape_of(mask))[-4:-2] in ((1, 1), (self.batch, 1)) and step.kind == "fill"
        hides = step.factor <= torch.finfo(step.source.meta["val"].dtype).min
        yield from self._divide(mask, not step.hides) if fits and hides else [None]

    def _divide(self, mask: Any, shows: bool) -> Iterator[Term]:
        """Yield the terms of a mask that shows what it is True for, or hides it."""
        source = self.constants.source(mask)
        if not isinstance(mask, fx.Node) or mask.meta["val"].dtype != torch.bool:
            yield None
            return
        if source is not None:
            seen = source if shows else self.constants.emit(aten.logical_not.default, source)
            self.proved.update(buffers_under(source))
            verdict = self.constants.judge.judge(seen)
            yield (verdict, None) if verdict in ("causal", "open") else None
            return
        given: Any = mask.args
        match call_name(mask), shows:
            case (("aten.logical_not" | "aten.bitwise_not"), _):
                yield from self._divide(given[0], not shows)
            case "aten.eq", _ if given[1] == 0:
                yield from self._divide(given[0], not shows)
            case (("aten.bitwise_and" | "aten.logical_and" | "aten.mul"), True) | ("aten.bitwise_or", False):
                for part in given:
                    yield from self._divide(part, shows)
            case "aten.tril", True if argument(mask, "diagonal") == 0:
                yield "causal", None
                yield from self._divide(given[0], shows)
            case ("aten.eq", True) | ("aten.ne", False):
                yield self._compare(mask, "")
            case ("aten.le", True) | ("aten.gt", False):
                yield self._compare(mask, "key")
            case ("aten.ge", True) | ("aten.lt", False):
                yield self._compare(mask, "query")
            case _:
                same = has_trait(mask, Trait.VIEWS & ~Trait.PERMUTES) and _rows(mask) == _rows(given[0])
                yield from self._divide(given[0], shows) if same else [None]

    def _compare(self, node: fx.Node, first: str) -> Term:
        """Read a comparison of the numbers of a query and a key, of which one is to be `first` if that counts."""
        (numbers, places), (other, others) = map(self._lay, node.args)
        if numbers is None or numbers is not other or numbers.meta["val"].is_floating_point():
            return None
        every = torch.arange(numbers.meta["val"].numel())
        whole = torch.equal(places.flatten(), every) and torch.equal(others.flatten(), every)
        laid = [(*places.shape[-2:],), (*others.shape[-2:],)]
        ways = {"query": [(self.length, 1), (1, self.length)], "key": [(1, self.length), (self.length, 1)]}
        fits = whole and laid in [ways[side] for side in ways if first in ("", side)]
        return ("ordered" if first else "same", numbers) if fits and _rows(node)[:-2] in ([], [self.batch]) else None

    def _lay(self, node: Any) -> tuple[fx.Node | None, Any]:
        """Return the tensor whose elements a value has, and their places in it; None for another value."""
        moved = isinstance(node, fx.Node) and (has_trait(node, Trait.VIEWS) or node.target is aten.index.Tensor)
        numbers, places = self._lay(node.args[0]) if moved else (None, None)
        if numbers is None:
            shape = shape_of(node) if isinstance(node, fx.Node) else ()
            flat = shape in ((self.batch, self.length), (1, self.length), (self.length,))
            return (node, torch.arange(prod(shape)).view(shape)) if flat else (None, None)
        sources = [(n, self.constants.source(n)) for n in node.all_input_nodes[1:]]
        known = {n: source and self.constants.judge.value(source) for n, source in sources}
        if any(value is None for value in known.values()):
            return None, None
        args, kwargs = fx.map_arg((node.args[1:], node.kwargs), known.__getitem__)
        return numbers, node.target(places, *args, **kwargs)


def _rows(mask: Any) -> list[int]:
    """Return the shape of a mask [.., queries, keys] without leading dimensions of size 1."""
    *lead, queries, keys = (1, 1, *shape_of(mask))
    return [*(size for size in lead if size != 1), queries, keys]
