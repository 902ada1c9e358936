"""A model's repeated layers, found in its graph: as the period of its operators, never by a name.

Along the row of operators of all stages the calls of one layer return in the next. The longest periodic run of
calls, by operator, shapes and whether they have a gradient, is the stack of layers; of the places in a period where
it may begin, those count at which exactly one differentiable value is alive, beside what all layers read (an encoder's
output, a table of relative positions); before the first layer none may be, where what precedes it is frozen.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import fx

from autoptd.passes.ir.nodes import change_info, info, results_of
from autoptd.passes.ir.program import Program, copy_graph
from autoptd.passes.structure.linear_order import Row

Layer = Sequence[Sequence[fx.Node]]  # its calls in every stage, none in most
Codes = np.ndarray[Any, np.dtype[np.int64]]


def label_layers(program: Program) -> Program:
    """Say of every call and parameter of a layer which one it is of, before tensor ranks divide them.

    Layers of a stack follow each other directly; a first that does more (makes a table that all read) belongs to them.
    """
    (stage,) = program.stages
    stage = replace(stage, graph=copy_graph(stage.graph))
    row = Row(stage)
    stack, layer, end = -1, 0, None
    for start, behind in _Search(row).find(0, len(row.items)):
        stack, layer = (stack, layer + 1) if start == end else (stack + 1, 0)
        end = behind
        for node in row.items[start:behind]:
            change_info(node, layer=(stack, layer))
    for node in stage.graph.find_nodes(op="get_attr"):
        readers = {info(user).layer for user in node.users}
        if len(readers) == 1:
            change_info(node, layer=readers.pop())
    return replace(program, stages=(stage,))


def find_stacks(program: Program) -> list[list[Layer]]:
    """Return the stacks of layers of a program, cut or not, whose layers `label_layers` has labelled."""
    layers: dict[tuple[int, int], list[list[fx.Node]]] = {}
    for index, stage in enumerate(program.stages):
        for node in stage.graph.nodes:
            label = info(node).layer
            if label is not None and node.op == "call_function":
                layers.setdefault(label, [[] for _ in program.stages])[index].append(node)
    stacks = groupby(sorted(layers), key=itemgetter(0))
    return [[layers[label] for label in labels] for _, labels in stacks]


class _Search:
    """A search for periodic runs in the row of a whole model."""

    def __init__(self, row: Row) -> None:
        known: dict[Any, int] = {}
        signatures = ((_sign(node), node in row.trained) for node in row.items)
        self._codes: Codes = np.array([known.setdefault(s, len(known)) for s in signatures], dtype=np.int64)
        reading = [any(source.op == "get_attr" for source in node.all_input_nodes) for node in row.items]
        self._reads_parameter = np.array(reading)
        trained = [i for i, node in enumerate(row.items) if node in row.trained]
        self._defined: Codes = np.array(trained, dtype=np.int64)
        self._trained = np.searchsorted(trained, np.arange(len(row.items) + 1))  # before each position
        self._last_use: Codes = np.array([row.last_use[row.items[i]] for i in trained], dtype=np.int64)
        tensors = {n for n in row.trained if isinstance(n.meta["val"], torch.Tensor)}
        self._live, self._bytes = row.sum_alive(
            # A call with several results is no single value.
            lambda node: 1 if node in tensors else 2 if node in row.trained else 0,
            lambda node: node.meta["val"].nbytes if node in tensors else 0,
        )

    def find(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Return the layers between two positions, each from its first position to behind its last."""
        for first, behind, period in self._runs(start, end):
            borders = self._place_borders(first, behind, period)
            if borders:
                borders = self._extend(borders, start)
                yield from self.find(start, borders[0])
                yield from pairwise(borders)
                yield from self.find(borders[-1], end)
                return

    def _runs(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """List the longest run of each period with a gradient as (first, behind, period), the longest of all first."""
        runs = []
        codes = self._codes[start:end]
        for period in range(1, len(codes) // 2 + 1):
            breaks = np.flatnonzero(codes[:-period] != codes[period:])
            edges = np.concatenate(([-1], breaks, [len(codes) - period]))
            lengths, firsts = np.diff(edges) - 1, start + edges[:-1] + 1
            lengths *= self._trained[firsts + lengths + period] > self._trained[firsts]
            longest = int(lengths.argmax())
            length, first = int(lengths[longest]), int(firsts[longest])
            behind = first + length + period
            if length >= period and self._reads_parameter[first:behind].any():
                runs.append((first, behind, period))
        return sorted(runs, key=lambda run: (run[0] - run[1], run[2]))

    def _place_borders(self, first: int, behind: int, period: int) -> list[int]:
        """Return the borders of the run's layers; none where no place in the period is narrow.

        Most whole layers win, then the smallest value to keep, then the latest begin.
        """
        best = 0, 0, 0
        for begin in range(first, min(first + period, behind - 2 * period + 1)):
            count = (behind - begin) // period
            borders = begin + period * np.arange(count)
            alive = self._live[borders] - self._count_shared(begin, int(borders[-1]))
            if alive[0] in (0, 1) and (alive[1:] == 1).all():  # none before the first trained layer
                best = max(best, (count, -int(self._bytes[borders].max()), begin))
        count, _, begin = best
        return [begin + period * i for i in range(count + 1)] if count else []

    def _extend(self, borders: list[int], start: int) -> list[int]:
        """Add a layer in front that does all that the first of them does, and less than as much again."""
        first, period = borders[0], borders[1] - borders[0]
        pattern = Counter(self._codes[first : first + period].tolist())
        for begin in range(first - period, max(start, first - 2 * period + 1) - 1, -1):
            narrow = self._live[begin] - self._count_shared(begin, borders[-2]) == 1
            if narrow and pattern <= Counter(self._codes[begin:first].tolist()):
                return [begin, *borders]
        return borders

    def _count_shared(self, first: int, last: int) -> int:
        """Count the values from before the first layer that the last one, or what follows, still reads."""
        return int(((self._defined < first) & (self._last_use >= last)).sum())


def _sign(node: fx.Node) -> Any:
    """Return what a call has in common with its repeats: operator and shapes. Numbers may differ by layer."""
    sources = (source for source in node.all_input_nodes if info(source).role != "rank")
    return node.target, _shapes(node), tuple(map(_shapes, sources))


def _shapes(node: fx.Node) -> Any:
    return tuple((tuple(value.shape), value.dtype) for value in results_of(node))
