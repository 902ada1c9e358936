"""Time a row of operators as the kernels that they become after the cut.

Stages are cut before kernels join their operators: the end of a layer and the beginning of the next are one kernel, and
between them is the narrowest place. So the whole is finished as if it were one stage, and a kernel's time is divided
over its operators. A cut within it costs the time that its two parts, each finished alone, take more.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from networkx.utils import UnionFind
from numpy.typing import NDArray
from torch import fx

from autoptd.passes.cost.call_work import divide_work
from autoptd.passes.cost.durations import NANOSECONDS, Durations
from autoptd.passes.cost.saved_tensors import Ledger
from autoptd.passes.cost.work import Work, backward_work, forward_work
from autoptd.passes.ir.nodes import change_info, info, shaping_arguments
from autoptd.passes.ir.program import Passes, Program, Stage, copy_graph, find_trained
from autoptd.passes.stages.choice import ItemTimes
from autoptd.passes.structure.linear_order import Row

Measure = Callable[[Work], Sequence[float]]  # always as many numbers
Floats = NDArray[np.float64]


class FusedOrder:
    """The one stage of a program as a `row` of items, and as the `stage` that the `finishing` passes make of them.

    The first of these marks what is recomputed; the others join operators into kernels, whose `works` are the calls'.

    Each call of that says in ``info(node).items`` which positions of the row it stands for, and in ``.value`` the
    one whose value it returns. `may_cut` says where a cut may stand: where all live values are results of kernels, so
    that no cut falls inside a kernel's arithmetic, and every cut rounds in the same way.
    """

    def __init__(self, program: Program, finishing: Passes) -> None:
        (stage,) = program.stages
        self.row = Row(stage)
        graph = copy_graph(stage.graph)
        for old, node in zip(stage.graph.nodes, graph.nodes, strict=True):
            place = self.row.position.get(old)
            change_info(node, value=place, items=() if place is None else (place,))
        (_, mark), *self._passes = finishing
        self.program = mark(program.replace_stages((Stage(graph, stage.parameters, stage.constants),), ""))
        self._marked = Row(self.program.stages[0])
        self._order = sorted(self._marked.items, key=lambda node: info(node).items)
        self._parts: dict[str, list[tuple[Work, Work]]] = {}  # the works of some items of one kernel
        self.stage = self._finish(self._marked.stage)
        self.ledger = Ledger(self.stage, self.program.mesh)
        self.works = divide_work(self.stage, self.ledger)
        given = {info(node).value for node in self.stage.graph.nodes}
        self.may_cut = self.row.allowed()
        for item, node in enumerate(self.row.items):
            if item not in given:
                behind = min(self.row.last_use[node] + 1, len(self.may_cut))
                self.may_cut[item + 1 : behind] = [False] * (behind - item - 1)

    def _finish(self, stage: Stage) -> Stage:
        program = self.program.replace_stages((stage,), "")
        for _, step in self._passes:
            program = step(program)
        return program.stages[0]

    def make_times(self, durations: Durations, table: Floats, penalty: Floats, items: Any) -> ItemTimes:
        """Return the times of a row's `items` from seconds by direction, divided over their operators."""
        ends = np.rint(table[items].cumsum(0) * NANOSECONDS).astype(np.int64)
        forward, backward, again = np.diff(ends, axis=0, prepend=0).T
        more = np.rint(penalty[items] * NANOSECONDS).astype(np.int64)
        parted = more[:, 0].tolist(), more[:, 1:].sum(1).tolist()

        def time(node: fx.Node) -> int:
            value, divided = node.meta["val"], info(node).is_divided
            return durations.of_transfer(value, divided=divided) if isinstance(value, torch.Tensor) else 0

        # What lives before each item, and its gradients.
        sent = self.row.sum_alive(time, lambda node: time(node) if node in self.row.trained else 0)[:, :-1]
        ahead, back, may_cut = (np.array(own)[items].tolist() for own in (*sent, self.may_cut))
        return ItemTimes(forward.tolist(), (backward + again).tolist(), ahead, back, may_cut, parted)

    def divide(self, measure: Measure) -> tuple[Floats, Floats]:
        """Divide what the calls measure over the items, by direction: forward, backward, what the backward repeats.

        The second is what a cut before an item adds to each side. Calls on no parameter count with the item before.
        """
        calls = self.works.items()
        measured = [(info(n).items, _measure(measure, own.forward, own.backward, own.again)) for n, own in calls]
        table, sums, penalty = (np.zeros((len(self.row.items), 3, len(measure(Work())))) for _ in range(3))
        joined = UnionFind(range(len(table)))
        for items, _ in measured:
            joined.union(*items)
        units = [sorted(unit) for unit in joined.to_sets()]
        first = {item: unit[0] for unit in units for item in unit}
        index = 0
        for items, own in measured:
            index = first[items[0]] if items else index
            (sums if items else table)[index] += own
        for unit in units:
            whole = sums[unit[0]]
            share = np.zeros_like(whole)
            for count, (last, end) in enumerate(pairwise(unit), 1):
                places = [place for place in range(last + 1, end + 1) if self.may_cut[place]]
                if places:
                    parts, again = (unit[:count], unit[count:]), bool(whole[2].any())
                    before, behind = (self._take(part, measure, again) for part in parts)
                    penalty[places] += np.maximum(before + behind - whole, 0) / 2
                    more = np.clip((whole + before - behind) / 2, share, whole)
                    table[last] += more - share
                    share = more
            table[unit[-1]] += whole - share
        return table, penalty

    def _take(self, items: Sequence[int], measure: Measure, again: bool) -> Floats:
        """Return what some items of one kernel take, finished by themselves; equal ones are finished once."""
        row, nodes = self._marked, [self._order[i] for i in items]
        place = {node: str(i) for i, node in enumerate(nodes)}
        outside: dict[fx.Node, str] = {}

        def read(node: fx.Node) -> Any:  # in a ``repr`` meta tensors are shapes
            which = place.get(node) or outside.setdefault(node, f"{node.op} {len(outside)}")
            return which, node.meta.get("val"), node in row.trained

        sends = [node for node in nodes if not node.users.keys() <= place.keys()]
        calls = [(n.target, fx.map_arg((shaping_arguments(n), n.kwargs), read), n in sends) for n in nodes]
        if (key := repr(calls)) not in self._parts:
            sources = (source for node in nodes for source in node.all_input_nodes)
            receives = dict.fromkeys(s for s in sources if s in row.position and s not in place)
            graph = row.build_graph(nodes, list(receives), sends)
            stage = self._finish(Stage(graph, row.stage.parameters, fx.Graph()))
            trained, made = find_trained(stage), (node for node in stage.graph.nodes if info(node).items)
            self._parts[key] = [(forward_work(node), backward_work(node, trained)) for node in made]
        taken: Floats = np.sum([_measure(measure, *works, again) for works in self._parts[key]], axis=0)
        return taken


def _measure(measure: Measure, forward: Work, backward: Work, again: bool) -> Floats:
    """Return the measures of a call by direction."""
    ahead, back = (np.array(measure(work)) for work in (forward, backward))
    return np.array([ahead, back, ahead * again])
