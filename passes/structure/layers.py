"""A model's repeated layers, found in its graph: as the period of its operators, never by a name.

Along the row of operators of all stages the calls of one layer return in the next. The longest periodic run of
calls, by operator, shapes and whether they have a gradient, is the stack of layers; of the places in a period where
it may begin, those count at which exactly one differentiable value is alive, beside what all layers read (an encoder's
output, a table of relative positions); before the first layer none may be, where what precedes it is frozen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import fx

from autoptd.passes.ir.node_info import change_info, info
from autoptd.passes.ir.program import Program, Stage, copy_graph, tensor_bytes
from autoptd.passes.structure.linear_order import Row
from autoptd.runtime.collectives import copy_to_tensor

Layer = Sequence[Sequence[fx.Node]]  # its calls in every stage, none in most
Codes = np.ndarray[Any, np.dtype[np.int64]]


def find_stacks(program: Program) -> list[list[Layer]]:
    """Return the stacks of layers of a cut program, in order; the layers of one stack follow each other directly.

    A first layer that does more than the others (it makes the table that they all read) belongs to them.
    """
    stage, home = _join_stages(program)
    row = Row(stage)
    stacks: list[list[Layer]] = []
    end = None
    for start, behind in _Search(row).find(0, len(row.items)):
        calls: list[list[fx.Node]] = [[] for _ in program.stages]
        found = dict(home[node][::-1] for node in row.items[start:behind])
        for node, index in found.items():
            copies = (n for n in node.all_input_nodes if n.target is copy_to_tensor and n not in calls[index])
            calls[index] += [n for n in copies if n.args[1] in found or found.keys() >= n.users.keys()]
            calls[index].append(node)
        if start != end:
            stacks.append([])
        stacks[-1].append(calls)
        end = behind
    return stacks


def label_layers(program: Program) -> Program:
    """Say of every call and parameter of a layer which one it is of, before kernels join a layer with the next."""
    program = replace(
        program, stages=tuple(replace(stage, graph=copy_graph(stage.graph)) for stage in program.stages)
    )
    for number, stack in enumerate(find_stacks(program)):
        for index, layer in enumerate(stack):
            for node in (node for calls in layer for node in calls):
                change_info(node, layer=(number, index))
    for node in (node for stage in program.stages for node in stage.graph.nodes if node.op == "get_attr"):
        readers = {info(user).layer for user in node.users}
        if len(readers) == 1:
            change_info(node, layer=readers.pop())
    return program


def _join_stages(program: Program) -> tuple[Stage, Mapping[fx.Node, tuple[int, fx.Node]]]:
    """Return the model as one stage again, and for each of its calls the stage and node that it is."""
    graph = fx.Graph()
    home: dict[fx.Node, tuple[int, fx.Node]] = {}
    given: dict[tuple[str, str], fx.Node] = {}
    sent: tuple[Any, ...] = ()
    for index, stage in enumerate(program.stages):
        values: dict[fx.Node, fx.Node] = {}
        received = iter(sent)
        for node in stage.graph.nodes:
            if info(node).role == "boundary":
                values[node] = next(received)
            elif node.op == "output":
                result = fx.map_arg(node.args[0], values.__getitem__)
                sent = tuple(result) if isinstance(result, (tuple, list)) else (result,)
            elif node.target is copy_to_tensor:  # which a first trained layer does without
                values[node] = values[node.args[1]]
            elif node.op == "call_function":
                values[node] = graph.node_copy(node, values.__getitem__)
                home[values[node]] = index, node
            else:  # a tied parameter and a batch input are one value, whichever stages read them
                name = node.op, str(node.target)
                if name not in given:
                    given[name] = graph.node_copy(node)
                values[node] = given[name]
    graph.output(result)
    parameters = {name: p for stage in program.stages for name, p in stage.parameters.items()}
    return Stage(graph, parameters, fx.Graph()), home


class _Search:
    """Looks for periodic runs in the row of a whole model."""

    def __init__(self, row: Row) -> None:
        known: dict[Any, int] = {}
        signatures = ((_sign(node), node in row.trained) for node in row.items)
        self._codes: Codes = np.array([known.setdefault(s, len(known)) for s in signatures], dtype=np.int64)
        self._reads_parameter = np.array(
            [any(source.op == "get_attr" for source in node.all_input_nodes) for node in row.items]
        )
        trained = [i for i, node in enumerate(row.items) if node in row.trained]
        self._defined: Codes = np.array(trained, dtype=np.int64)
        self._trained = np.searchsorted(trained, np.arange(len(row.items) + 1))  # before each position
        self._last_use: Codes = np.array([row.last_use[row.items[i]] for i in trained], dtype=np.int64)
        tensors = {n for n in row.trained if isinstance(n.meta["val"], torch.Tensor)}
        self._live, self._bytes = row.sum_alive(
            # A call with several results is no single value.
            lambda node: 1 if node in tensors else 2 if node in row.trained else 0,
            lambda node: tensor_bytes(node.meta["val"]) if node in tensors else 0,
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
        best: tuple[int, int, int] | None = None
        for begin in range(first, first + period):
            count = (behind - begin) // period
            if count < 2:
                break
            borders = begin + period * np.arange(count)
            alive = self._live[borders] - self._count_shared(begin, int(borders[-1]))
            if alive[0] in (0, 1) and (alive[1:] == 1).all():  # none before the first trained layer
                best = max(best or (0, 0, 0), (count, -int(self._bytes[borders].max()), begin))
        if best is None:
            return []
        count, _, begin = best
        return [begin + period * i for i in range(count + 1)]

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
    return node.target, _shapes(node.meta["val"]), tuple(_shapes(source.meta["val"]) for source in sources)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return tuple(map(_shapes, value))
