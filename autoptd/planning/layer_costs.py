"""The costs of a whole model's calls in their order: sums of them time any cut into stages.

A few of a model's equal layers are measured, and the others repeat one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Durations, Precision
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.program import recomputed_groups, tensor_bytes
from autoptd.passes.stages.choice import ItemTimes, choose_cut
from autoptd.passes.stages.cost_sequence import Memory, fold
from autoptd.passes.stages.cut import Found, make_boundary, name_held
from autoptd.passes.stages.fused_order import FusedOrder, make_times
from autoptd.passes.stages.solver import count_pieces, cut_sequence
from autoptd.runtime.program.manifest import Boundary, Manifest, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter
from autoptd.simulate.memory import Owned, count_owned, freeze_others, state_bytes
from autoptd.simulate.stage_times import Seconds, StageTimes, WorkTimes, add_up, divide_work, time_stage


class LayerCosts:
    """The costs of an uncut program, divided for t tensor ranks, with `repeats` more of its second layer.

    All stages have the speed of the slowest tensor group of `world_size` devices. With `overlap`, gradients of weights
    are computed during all-reduces. Raises ValueError if layers are to be repeated and the program's do not repeat.
    """

    def __init__(
        self,
        uncut: FusedOrder,
        repeats: int,
        cluster: Cluster,
        world_size: int,
        precision: Precision,
        *,
        overlap: bool = True,
    ) -> None:
        self._program, self._uncut, self._row = uncut.program, uncut, uncut.row
        self._cluster, self.precision = cluster, precision
        # Of each item of one microbatch: seconds by direction and kind (see `FusedOrder.divide` and `Seconds`), what a
        # cut before it costs either side, and the amounts of `_measure`.
        cluster.device.peak(precision.dtype)  # refuses what the device has not
        tensor = self._program.mesh.tensor
        ranks = cluster.slowest(Mesh(tensor, 1, world_size // tensor).groups("tensor", pipeline=0))
        measure = cache(lambda work: astuple(add_up({work: 1}, cluster, ranks, precision, overlap)))
        self._times, self._apart = uncut.divide(measure)
        self._amounts = self._measure(uncut)
        first, behind = self._find_period() if repeats else (0, 0)
        self._source = np.array(
            [*range(behind), *(repeats * [*range(first, behind)]), *range(behind, len(self._row.items))]
        )
        self._copy = np.zeros(len(self._source), int)
        for copy in range(repeats):
            start = behind + copy * (behind - first)
            self._copy[start : start + behind - first] = copy + 1
        self._sums = np.pad(self._times[self._source].cumsum(0), ((1, 0), (0, 0), (0, 0)))
        self._held = np.pad(self._amounts[self._source].cumsum(0), ((1, 0), (0, 0)))
        self._more = np.pad(self._apart[self._source], ((0, 1), (0, 0), (0, 0)))
        self._names, self.parameters = self._name_parameters(first, behind)
        self._items: dict[bool, ItemTimes] = {}
        self._cuts: dict[tuple[int, int, bool, tuple[str, int] | None], Sequence[int]] = {}

    def _measure(self, uncut: FusedOrder) -> np.ndarray:
        """Measure each item and the calls without parameters after it: bytes kept, FLOPs, bytes held by its backward.

        The fourth amount are the bytes that a stage which begins there, in a recomputed group, keeps in addition: the
        inputs of the rest of the group.
        """
        index, item_of, scale = 0, self._row.position, self.precision.scale
        amounts = np.zeros((len(self._row.items), 4))
        for node, work in divide_work(uncut.stage, uncut.ledger).items():
            index = info(node).items[0] if info(node).items else index
            amounts[index, :2] += work.kept * scale, work.flops
            amounts[index, 2] = max(amounts[index, 2], work.working * scale)
        for group in recomputed_groups(uncut.stage.graph):
            own = sorted({i for node in group for i in info(node).items})
            for place in (i for i in own[1:] if uncut.fit[i]):
                taken = {s for i in own if i >= place for s in self._row.items[i].all_input_nodes}
                live = (tensor_bytes(s.meta["val"]) for s in taken if item_of.get(s, place) < place)
                amounts[place, 3] = scale * sum(live)
        return amounts

    def _find_period(self) -> tuple[int, int]:
        """Return the begin and end of the second layer's items, which the third layer must equal."""
        starts: dict[int, int] = {}
        for index, node in enumerate(self._row.items):
            label = info(node).layer
            if label is not None:
                starts.setdefault(label[1], index)
        one, other = (slice(starts.get(i, 0), starts.get(i + 1, 0)) for i in (1, 2))
        rows = (self._times, self._amounts)  # of groups of several layers, layers differ
        alike = (
            own[one].shape == own[other].shape and np.allclose(own[one], own[other], atol=1e-12)
            for own in rows
        )
        if not {1, 2, 3} <= starts.keys() or not all(alike):
            raise ValueError(f"layers do not repeat: they begin at the calls {starts}")
        return starts[1], starts[2]

    def _name_parameters(
        self, first: int, behind: int
    ) -> tuple[list[tuple[str, ...]], Mapping[str, Parameter]]:
        """Name the tensors of each item; tensors of the repeated layer alone get a new name for each repeat.

        The first stage holds parameters that no item reads.
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
        """The number of repeated layers; 0 if none are found."""
        labels = {label for node in self._row.items if (label := info(node).layer) is not None}
        return len(labels) + int(self._copy.max(initial=0)) if labels else 0

    @cached_property
    def owned(self) -> Owned:
        """The elements that a pipeline rank with the whole model owns."""
        return self._own(tuple(sorted(self.parameters)))

    def _own(self, names: tuple[str, ...]) -> Owned:
        interface = StageInterface(0, (), (), (), names)
        return count_owned(self._manifest(self._program.mesh, 1, True, (interface,)), 0)

    @cached_property
    def seconds(self) -> float:
        """The seconds of one microbatch on a pipeline rank with the whole model."""
        return float(self._sums[-1, :, :2].sum())

    @cached_property
    def kept(self) -> float:
        """The bytes that one microbatch of the whole model keeps for its backward."""
        return float(self._held[-1, 0])

    @cached_property
    def units(self) -> int:
        """The largest number of stages that the model can be cut into."""
        times = self._item_times(Mesh(self._program.mesh.tensor, 2, 1))
        return count_pieces(fold(times.costs, times.boundary_costs, None, 1, 1))

    def cut(self, mesh: Mesh, chunks: int, search: tuple[str, int] | None = None) -> Sequence[int]:
        """Return the cut with the fastest slowest stage.

        With `search`, a schedule and its number of microbatches, return the cut with the shortest step. Raises
        ValueError for more stages than `units`.
        """
        times = self._item_times(mesh)
        key = mesh.pipeline, chunks, times is self._items.get(True), search
        if key not in self._cuts:
            size: Any = {"num_stages": mesh.pipeline * chunks, "num_pipeline_ranks": mesh.pipeline}
            if search is None:
                cut = cut_sequence(times.costs, times.boundary_costs, **size, effort=0.0)
            else:
                size |= {"schedule": search[0], "num_microbatches": search[1]}
                cut = choose_cut(times, None, **size, memory_limit=None).cut
            self._cuts[key] = cut.positions
        return self._cuts[key]

    def memory(self, in_flight: Sequence[Sequence[int]], shards: int, wide: bool) -> Memory:
        """Return the memory of the items, in stages with `in_flight` microbatches and states as in `state_bytes`."""
        once = dict(zip(self._source.tolist(), self._names, strict=True))
        sizes = {i: state_bytes(self._own(own), self.precision, shards, wide) for i, own in once.items()}
        static = [round(sum(sizes[source].values())) for source in self._source.tolist()]
        return Memory(static, np.ceil(self._amounts[self._source, 0]).astype(int).tolist(), in_flight, ())

    def fit(self, mesh: Mesh, chunks: int, memory: Memory, limit: int) -> Found:
        """Return the cut into stages of at most `limit` bytes a rank, by their `memory`."""
        times = self._item_times(mesh)
        size: Any = {"num_stages": mesh.pipeline * chunks, "num_pipeline_ranks": mesh.pipeline}
        cut = cut_sequence(times.costs, times.boundary_costs, memory, **size, memory_limit=limit, effort=0.0)
        return Found(cut.positions, "", not cut.overflow, memory.of_ranks(cut.positions))

    def divide(
        self, mesh: Mesh, chunks: int, scatter_gather: bool, positions: Sequence[int]
    ) -> tuple[Manifest, tuple[StageTimes, ...]]:
        """Cut into stages at `positions`, and return a manifest for timing only, and their times."""
        cut = [0, *positions, len(self._source)]
        crossing = [self._crossing(at) for at in cut[1:-1]]
        received: list[tuple[Boundary, ...]] = [(), *crossing, ()]
        held = [tuple(sorted({n for names in self._names[a:b] for n in names})) for a, b in pairwise(cut)]
        interfaces = tuple(
            StageInterface(i, received[i], received[i + 1], (), own) for i, own in enumerate(held)
        )
        manifest = self._manifest(mesh, chunks, scatter_gather, interfaces)
        times = tuple(
            time_stage(manifest, index, self._sum(start, end), self._cluster, self.precision)
            for index, (start, end) in enumerate(pairwise(cut))
        )
        return manifest, times

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
        forward, backward, again = (Seconds(*side) for side in self._seconds(start, end).tolist())
        kept, flops = (self._held[end] - self._held[start]).tolist()[:2]
        kept += float(self._amounts[self._source[start], 3])
        working = float(self._amounts[self._source[start:end], 2].max(initial=0.0))
        return WorkTimes(forward, backward, again, kept, working, flops)

    def _seconds(self, start: int, end: int) -> np.ndarray:
        """Return the seconds of a stage by direction and kind."""
        seconds: np.ndarray = self._sums[end] - self._sums[start] + self._more[start] + self._more[end]
        return seconds

    def _item_times(self, mesh: Mesh) -> ItemTimes:
        """Return the times of the items; messages within a node and between nodes differ, and so does the best cut."""
        node = self._cluster.devices_per_node
        apart = mesh.size > node and node % (mesh.pipeline * mesh.tensor) != 0
        if apart not in self._items:
            durations = Durations(self._cluster, mesh, self.precision)
            times, parted = self._times[..., :2].sum(2), self._apart[..., :2].sum(2)
            self._items[apart] = make_times(self._uncut, durations, times, parted, self._source)
        return self._items[apart]

    def _crossing(self, at: int) -> tuple[Boundary, ...]:
        """Return the values that cross a cut before an item."""
        row, place = self._row, int(self._source[at])
        live = (node for node in row.items[:place] if row.last_use[node] >= place)
        return tuple(replace(make_boundary(node), requires_grad=node in row.trained) for node in live)
