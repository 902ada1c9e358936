"""Name the lines of the texts from which on values, or gradients, are not those of the plain model."""

import sys
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from traceback import walk_stack
from typing import Any

from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves  # private, with no public twin

from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import Program, split_results

ROUNDING = 1e-9  # relative, of sums in another order
SHOWN = 3
Sums = tuple[float, float]  # of the elements and of their squares, which no layout changes
SumsByLine = Mapping[str, list[Sums]]


class Values(TorchDispatchMode):
    """A mode that keeps the sums of each floating result: in `found`, or of the last operator of each text's line."""

    def __init__(self, filename: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Sums] = []
        self.lines: dict[str, list[Sums]] = {}
        self._filename = filename

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(result) if isinstance(x, Tensor))
        values = [x for x in tensors if x.is_floating_point() and not x.is_meta]
        sums = [(float(x.sum()), float(x.square().sum())) for x in values]
        if not self._filename:
            self.found += sums
        elif sums:
            frames = walk_stack(sys._getframe(1))
            line = next((line for frame, line in frames if frame.f_code.co_filename == self._filename), 0)
            self.lines[f"{self._filename}:{line}"] = sums
        return result


def find_first_wrong(program: Program, plain: Sequence[Sums], ranks: Sequence[SumsByLine]) -> str:
    """Say from which line on no value is one of `plain` any more; `ranks` are the sums of one replica's ranks by line.

    A value is the same on all tensor ranks, or divided among them. One that is neither, such as a partial sum, is right
    if something right is computed from it.
    """
    known = sorted((squares, total) for total, squares in plain)
    nodes = [node for stage in program.stages for node in stage.graph.nodes if node.op == "call_function"]
    lines = list(dict.fromkeys(info(node).line for node in nodes))
    right = {line for line in lines if _is_right(line, known, ranks)}
    followed = _find_followed(program, right)
    left = dict.fromkeys(info(node).line for node in nodes if node not in followed and node.users)
    wrong = [line for line in left if any(line in own for own in ranks)]
    if not wrong:
        return "every value is one of the plain model's: compare the order of the microbatches in SCHEDULE"
    before = [line for line in lines[: lines.index(wrong[0])] if line in right]
    after = f"after {before[-1]}, the last that is right" if before else "the first of all"
    then = f"; then at {', '.join(wrong[1:SHOWN])}" if wrong[1:] else ""
    return f"the first wrong value is made at {wrong[0]}, {after}{then}"


def _find_followed(program: Program, right: Set[str]) -> set[fx.Node]:
    """Return the nodes on a `right` line, and all from which such a one is computed."""
    followed: set[fx.Node] = set()
    received: list[bool] = []  # of the stage after: what it takes is followed
    for stage in reversed(program.stages):
        sent, _ = split_results(stage.graph)
        followed.update(node for node, goes_on in zip(sent, received, strict=False) if goes_on)
        for node in reversed(stage.graph.nodes):
            if info(node).line in right or any(user in followed for user in node.users):
                followed.add(node)
        boundaries = (node for node in stage.graph.nodes if info(node).role == "boundary")
        received = [node in followed for node in boundaries]
    return followed


def _is_right(line: str, known: list[Sums], ranks: Sequence[SumsByLine]) -> bool:
    """Return whether the values of `line` are among the `known`: those of a rank, or added up over the ranks."""
    own = [rank[line] for rank in ranks if line in rank]
    if not own:
        return False
    whole = [tuple(map(sum, zip(*parts, strict=True))) for parts in zip(*own, strict=False)]
    return all(_is_known(sums, known) for sums in own[0]) or all(_is_known(sums, known) for sums in whole)


def _is_known(sums: Any, known: list[tuple[float, float]]) -> bool:
    total, squares = sums
    for other, value in known[bisect_left(known, (squares * (1 - ROUNDING),)) :]:
        if other > squares * (1 + ROUNDING):
            break
        if abs(value - total) <= ROUNDING * max(abs(total), squares**0.5):
            return True
    return False


def find_first_right(program: Program, wrong: Container[str]) -> str:
    """Say between which lines a backward goes wrong that makes these gradients `wrong`: those behind are right."""
    reads = list(dict.fromkeys(_list_reads(program)))
    names = [name for name, _ in reads]
    tied = [(name, line) for name, line in reads if name in wrong and names.count(name) > 1]
    read = [(name, line) for name, line in reads if names.count(name) == 1]
    last = max((at for at, (name, _) in enumerate(read) if name in wrong), default=None)
    if last is None:
        lines = " and ".join(line for _, line in tied)
        return f"the gradient of {tied[0][0]}, read at {lines}, is wrong: look at both" if tied else ""
    until = "".join(f"; that of {name}, read at {line}, is right" for name, line in read[last + 1 : last + 2])
    return f"the backward goes wrong behind {read[last][1]}: the gradient of {read[last][0]} is wrong{until}"


def _list_reads(program: Program) -> Iterator[tuple[str, str]]:
    """Yield each trained parameter and a line that reads it, in the order of the forward."""
    for stage in program.stages:
        for node in stage.graph.nodes:
            for taken in node.all_input_nodes:
                if taken.op == "get_attr" and stage.parameters[str(taken.target)].requires_grad:
                    yield str(taken.target), info(node).line
