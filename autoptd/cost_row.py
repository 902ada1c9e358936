"""The calls of a whole model in a row, with what each takes: any cut of it into stages is timed by sums.

The row is measured on a few of a model's equal layers, and the others are repeats of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from autoptd.passes.cluster import Cluster
from autoptd.passes.durations import NANOSECONDS, Durations, Precision
from autoptd.passes.program import Program
from autoptd.passes.row import Row
from autoptd.passes.sequence import CostSequence, fold, minimize_slowest_stage, undominated
from autoptd.passes.stages import make_boundary, name_held
from autoptd.runtime.manifest import Boundary, Manifest, StageInterface
from autoptd.runtime.mesh import Mesh
from autoptd.runtime.placement import Parameter
from autoptd.stage_times import Seconds, StageTimes, WorkTimes, divide_work, time_stage, time_work
from autoptd.step_memory import Owned, count_owned, freeze_others

# Columns of the table of items: seconds, bytes and FLOPs of one microbatch.
COLUMNS = (
    *("forward", "forward_tensor", "backward", "backward_tensor", "again", "again_tensor"),
    *("kept", "flops"),
    *("forward_waiting", "backward_waiting", "again_waiting"),
)


class CostRow:
    """The row of a one-stage program, divided for t tensor ranks, with `repeats` more of its second layer.

    With `overlap` all-reduces hide behind the gradients of weights. ValueError where layers are to be repeated and the
    program's do not repeat.
    """

    def __init__(
        self, program: Program, repeats: int, cluster: Cluster, precision: Precision, *, overlap: bool = True
    ) -> None:
        (stage,) = program.stages
        self._program, self._cluster, self.precision, self._overlap = program, cluster, precision, overlap
        self._row = Row(stage)
        self._table, self._working = self._measure()
        first, behind = self._find_period() if repeats else (0, 0)
        self._source = np.array(
            [*range(behind), *(repeats * [*range(first, behind)]), *range(behind, len(self._row.items))]
        )
        self._copy = np.zeros(len(self._source), int)
        for copy in range(repeats):
            start = behind + copy * (behind - first)
            self._copy[start : start + behind - first] = copy + 1
        columns = self._table[self._source].cumsum(0)
        self._sums = np.vstack([np.zeros(len(COLUMNS)), columns])
        self._names, self.parameters = self._name_parameters(first, behind)
        self._sequences: dict[bool, CostSequence] = {}
        self._cuts: dict[tuple[int, bool], list[int]] = {}

    def _measure(self) -> tuple[np.ndarray, np.ndarray]:
        """What each item takes, with the calls on no parameter before it; and what its group's backward holds."""
        mesh = self._program.mesh
        ranks = mesh.tensor_group(0)
        row, places = self._row, {node: index for index, node in enumerate(self._row.items)}
        table, working = np.zeros((len(row.items), len(COLUMNS))), np.zeros(len(row.items))
        known: dict[object, WorkTimes] = {}
        works = divide_work(row.stage, mesh)
        index = 0
        for node in row.order:
            if node not in works:
                continue
            index = places.get(node, index)
            work = works[node]
            key = (
                *(tuple(count) for count in (work.forward, work.backward, work.again)),
                work.kept,
                work.working,
            )
            if key not in known:
                known[key] = time_work(work, self._cluster, ranks, self.precision, overlap=self._overlap)
            time = known[key]
            sides = (time.forward, time.backward, time.again)
            seconds = [value for side in sides for value in (side.compute, side.tensor)]
            waiting = [side.waiting for side in sides]
            table[index] += [*seconds, time.kept, work.flops, *waiting]
            working[index] = max(working[index], time.working)
        return table, working

    def _find_period(self) -> tuple[int, int]:
        """Where the second layer's items begin and end: it has one like it behind."""
        starts: dict[int, int] = {}
        for index, node in enumerate(self._row.items):
            label = node.meta.get("layer")
            if label is not None:
                starts.setdefault(label[1], index)
        if not {1, 2, 3} <= starts.keys() or starts[2] - starts[1] != starts[3] - starts[2]:
            raise ValueError(f"layers do not repeat: they begin at the calls {starts}")
        return starts[1], starts[2]

    def _name_parameters(
        self, first: int, behind: int
    ) -> tuple[list[tuple[str, ...]], Mapping[str, Parameter]]:
        """The tensors that each item needs; those that only the repeated layer needs have a name each time.

        Parameters that none needs the first stage holds.
        """
        base = [tuple(sorted(name_held(self._row, [node]))) for node in self._row.items]
        reached = {str(node.target) for node in self._row.trained if node.op == "get_attr"}
        parameters = dict(freeze_others(self._row.stage.parameters, reached))
        outside = {n for i, names in enumerate(base) if not first <= i < behind for n in names}
        names = []
        for source, copy in zip(self._source.tolist(), self._copy.tolist(), strict=True):
            own = base[source]
            if copy:
                own = tuple(name if name in outside else f"{name} of layer {copy}" for name in own)
                parameters.update((new, parameters[old]) for new, old in zip(own, base[source], strict=True))
            names.append(own)
        read = {name for own in names for name in own}
        unread = (n for n, p in parameters.items() if p.kind == "parameter" and n not in read)
        names[0] = (*names[0], *unread)
        return names, parameters

    @cached_property
    def layers(self) -> int:
        """How many repeated layers there are; 0 where none are found."""
        labels = {label for node in self._row.items if (label := node.meta.get("layer")) is not None}
        return len(labels) + int(self._copy.max(initial=0)) if labels else 0

    @cached_property
    def owned(self) -> Owned:
        """What a pipeline rank owns that has the whole model."""
        interface = StageInterface(0, (), (), (), tuple(sorted(self.parameters)))
        return count_owned(self._manifest(self._program.mesh, 1, True, (interface,)), 0)

    @cached_property
    def seconds(self) -> float:
        """Of one microbatch on a pipeline rank that has the whole model."""
        return float(self._sums[-1, :6].sum())

    @cached_property
    def kept(self) -> float:
        """Bytes that one microbatch keeps for its backward, of the whole model."""
        return float(self._sums[-1, COLUMNS.index("kept")])

    @cached_property
    def units(self) -> int:
        """The most stages that the row can be cut into."""
        return len(self._sequence(Mesh(self._program.mesh.tensor, 2, 1), False).places) - 1

    def divide(
        self, mesh: Mesh, chunks: int, scatter_gather: bool = True
    ) -> tuple[Manifest, tuple[StageTimes, ...]]:
        """Cut into stages, the slowest as fast as can be: a manifest as far as timing needs it, and their times.

        ValueError for more stages than `units`.
        """
        cut = self._cut(mesh, mesh.pipeline * chunks)
        crossing = [self._crossing(at) for at in cut[1:-1]]
        received: list[tuple[Boundary, ...]] = [(), *crossing, ()]
        interfaces = tuple(
            StageInterface(
                index,
                received[index],
                received[index + 1],
                (),
                tuple(sorted({name for names in self._names[start:end] for name in names})),
            )
            for index, (start, end) in enumerate(pairwise(cut))
        )
        manifest = self._manifest(mesh, chunks, scatter_gather, interfaces)
        times = tuple(
            time_stage(manifest, index, self._sum(start, end), self._cluster, self.precision)
            for index, (start, end) in enumerate(pairwise(cut))
        )
        return manifest, times

    def slowest(self, mesh: Mesh, chunks: int) -> float:
        """Seconds of one microbatch on the slowest rank of the cut that `divide` makes, without messages."""
        stages = np.diff(self._sums[self._cut(mesh, mesh.pipeline * chunks), :6].sum(1))
        return float(stages.reshape(chunks, mesh.pipeline).sum(0).max())

    def _manifest(
        self, mesh: Mesh, chunks: int, scatter_gather: bool, stages: tuple[StageInterface, ...]
    ) -> Manifest:
        program = self._program
        return Manifest(
            mesh=mesh,
            schedule="interleaved_1f1b",
            num_model_chunks=chunks,
            num_microbatches=1,
            microbatch_size=1,
            scatter_gather=scatter_gather,
            seed=0,
            inputs=program.inputs,
            stages=stages,
            parameters=self.parameters,
            aliases=program.aliases,
            output=program.output,
        )

    def _sum(self, start: int, end: int) -> WorkTimes:
        total = dict(zip(COLUMNS, (self._sums[end] - self._sums[start]).tolist(), strict=True))
        sides = [
            Seconds(total[side], total[f"{side}_tensor"], total[f"{side}_waiting"])
            for side in ("forward", "backward", "again")
        ]
        working = float(self._working[self._source[start:end]].max(initial=0.0))
        forward, backward, again = sides
        return WorkTimes(forward, backward, again, total["kept"], working, total["flops"])

    def _cut(self, mesh: Mesh, num_stages: int) -> list[int]:
        """Between neighbours in one node, and in different ones, messages differ, and what cut is best."""
        key = num_stages, mesh.pipeline * mesh.tensor > self._cluster.devices_per_node
        if key not in self._cuts:
            sequence = replace(self._sequence(mesh, key[1]), in_flight=np.zeros((1, num_stages), np.int64))
            cut = minimize_slowest_stage(sequence, None)
            if cut is None:
                raise ValueError(f"{num_stages} stages asked, but there are {len(sequence.places) - 1} units")
            self._cuts[key] = [int(place) for place in sequence.places[cut]]
        return self._cuts[key]

    def _sequence(self, mesh: Mesh, apart: bool) -> CostSequence:
        """The places worth a cut."""
        if apart not in self._sequences:
            durations = Durations(self._cluster, mesh, self.precision)
            tolls = self._row.tolls(durations)
            work = np.ceil(self._table[self._source, :6].sum(1) * NANOSECONDS).astype(np.int64)
            sequence = fold(work.tolist(), [tolls[i] for i in self._source.tolist()], None, 1, 1)
            self._sequences[apart] = sequence.take(undominated(sequence, np.zeros(0, np.int64)))
        return self._sequences[apart]

    def _crossing(self, at: int) -> tuple[Boundary, ...]:
        """What lives before an item of the row."""
        row, place = self._row, int(self._source[at])
        live = (node for node in row.items[:place] if row.last_use[node] >= place)
        return tuple(replace(make_boundary(node), requires_grad=node in row.trained) for node in live)
