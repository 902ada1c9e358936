"""The costs of a whole model's calls in their order: sums of them time any cut into stages.

A few of a model's equal layers are measured, and the others repeat one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from functools import cached_property
from itertools import chain, pairwise
from math import gcd

import numpy as np

from autoptd.passes.cost.durations import DTYPES, Durations, Seconds
from autoptd.passes.ir.nodes import info
from autoptd.passes.stages.choice import ItemTimes, Pipeline
from autoptd.passes.stages.cost_sequence import Memory, fold
from autoptd.passes.stages.cut import make_boundary, name_held
from autoptd.passes.stages.fused_order import FusedOrder
from autoptd.runtime import kernels
from autoptd.runtime.program.manifest import Boundary, Manifest, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter
from autoptd.simulate.memory import Owned, States, count_owned, freeze_others
from autoptd.simulate.stage_times import StageTimes, WorkTimes, time_messages


class LayerCosts:
    """The costs of an uncut program, divided for t tensor ranks, with `repeats` more of its second layer.

    All stages have the `durations` of the slowest tensor group. Raises ValueError for a dtype in which the device does
    not compute, and if layers are to be repeated and the program's do not repeat.
    """

    def __init__(self, fused_order: FusedOrder, repeats: int, durations: Durations) -> None:
        self._program, self._fused_order, self.row = fused_order.program, fused_order, fused_order.row
        self._durations, self.cluster, self.precision = durations, durations.cluster, durations.precision
        # Of each item of one microbatch: seconds by direction and kind (see `FusedOrder.divide` and `Seconds`), and
        # what a cut before it costs either side.
        self.cluster.device.peak(self.precision.dtype)
        self._times, self._penalty = fused_order.divide(lambda work: astuple(durations.seconds(work)))
        first, behind = self._period = self._find_period() if repeats else (0, 0)
        layer, rest = [*range(first, behind)], [*range(behind, len(self.row.items))]
        self._source = np.array([*range(behind), *(repeats * layer), *rest])
        copies = (len(layer) * [copy] for copy in range(1, repeats + 1))
        self._copy = np.array([*behind * [0], *chain.from_iterable(copies), *len(rest) * [0]], int)
        self._sums = np.pad(self._times[self._source].cumsum(0), ((1, 0), (0, 0), (0, 0)))
        self._more = np.pad(self._penalty[self._source], ((0, 1), (0, 0), (0, 0)))
        self._items: dict[bool, ItemTimes] = {}

    def on(self, mesh: Mesh) -> LayerCosts:
        """Return the costs on the ranks of a `mesh`, where those that share experts may be farther apart."""
        copies = int(self._copy.max(initial=0))
        return LayerCosts(self._fused_order, copies, replace(self._durations, mesh=mesh, _known={}))

    @cached_property
    def _amounts(self) -> np.ndarray:
        """For each item and the calls without parameters after it: bytes kept, FLOPs, bytes held by its backward.

        The fourth are the bytes that a stage which begins there, in a recomputed group, keeps too: the rest's inputs.
        """
        index, item_of, scale, fused_order = 0, self.row.position, self.precision.scale, self._fused_order
        amounts = np.zeros((len(self.row.items), 4))
        for node, work in fused_order.works.items():
            index = info(node).items[0] if info(node).items else index
            amounts[index, :2] += work.kept * scale, work.flops
            amounts[index, 2] = max(amounts[index, 2], work.working * scale)
        for group in fused_order.ledger.groups:
            own = sorted({i for node in group for i in info(node).items})
            for place in (i for i in own[1:] if fused_order.may_cut[i]):
                taken = {s for i in own if i >= place for s in self.row.items[i].all_input_nodes}
                live = (s.meta["val"].nbytes for s in taken if item_of.get(s, place) < place)
                amounts[place, 3] = scale * sum(live)
        return amounts

    def _find_period(self) -> tuple[int, int]:
        """Return the begin and end of the second layer's items, which the third layer must equal."""
        starts: dict[int, int] = {}
        for index, node in enumerate(self.row.items):
            label = info(node).layer
            if label is not None:
                starts.setdefault(label[1], index)
        one, other = (slice(starts.get(i, 0), starts.get(i + 1, 0)) for i in (1, 2))
        rows = (self._times, self._amounts)  # of groups of several layers, layers differ
        pairs = [(own[one], own[other]) for own in rows]
        alike = all(a.shape == b.shape and np.allclose(a, b, atol=1e-12) for a, b in pairs)
        if not {1, 2, 3} <= starts.keys() or not alike:
            raise ValueError(f"layers do not repeat: they begin at the calls {starts}")
        return starts[1], starts[2]

    @cached_property
    def _held(self) -> np.ndarray:
        return np.pad(self._amounts[self._source].cumsum(0), ((1, 0), (0, 0)))

    @cached_property
    def _named(self) -> tuple[list[tuple[str, ...]], Mapping[str, Parameter]]:
        """The names of each item's tensors; tensors of the repeated layer alone get a new name for each repeat.

        The first stage holds parameters that no item reads.
        """
        first, behind = self._period
        base = [tuple(sorted(name_held(self.row, [node]))) for node in self.row.items]
        reached = {str(node.target) for node in self.row.trained if node.op == "get_attr"}
        parameters = dict(freeze_others(self.row.stage.parameters, reached))
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
        labels = {label for node in self.row.items if (label := info(node).layer) is not None}
        return len(labels) + int(self._copy.max(initial=0)) if labels else 0

    @cached_property
    def experts(self) -> int:
        """The greatest common divisor of the numbers of experts of the mixtures; 0 if there is none."""
        routes = self.row.stage.graph.find_nodes(op="call_function", target=kernels.route)
        return gcd(*(int(node.args[2]) for node in routes))

    @cached_property
    def owned(self) -> Owned:
        """The elements that a pipeline rank with the whole model owns."""
        return self._own(tuple(sorted(self._named[1])))

    def _own(self, names: tuple[str, ...]) -> Owned:
        interface = StageInterface(0, (), (), (), names)
        return count_owned(self._manifest(self._program.mesh, 1, True, (interface,)), 0)

    @cached_property
    def seconds(self) -> float:
        """The seconds of one microbatch on a pipeline rank with the whole model."""
        return float(self._sums[-1, :, :2].sum())

    @cached_property
    def least_seconds(self) -> float:
        """The seconds of one microbatch's FLOPs at the device's peak for the dtype of its products."""
        autocast = self._program.autocast
        dtype = DTYPES[autocast.dtype] if autocast else self.precision.dtype
        return float(self._held[-1, 1]) / self.cluster.device.peak(dtype)

    @cached_property
    def kept(self) -> float:
        """The bytes that one microbatch of the whole model keeps for its backward."""
        return float(self._held[-1, 0])

    @cached_property
    def units(self) -> int:
        """The largest number of stages that the model can be cut into."""
        times = self._item_times(Mesh(self._program.mesh.tensor, 2, 1))
        return fold(times.costs, times.boundary_costs, None, 1, 1).units

    def pipeline(self, mesh: Mesh, schedule: str, num_microbatches: int, chunks: int) -> Pipeline:
        """Return the pipelines that the model can be cut into, of which `choose_cut` chooses."""
        return Pipeline(self._item_times(mesh), schedule, mesh.pipeline, num_microbatches, chunks)

    def memory(self, in_flight: Sequence[Sequence[int]], states: States, reserved: Sequence[int], limit: int) -> Memory:
        """Return the memory of the items, in stages with `in_flight` microbatches."""
        once = dict(zip(self._source.tolist(), self._named[0], strict=True))
        sizes = {i: states.held(self._own(own)) for i, own in once.items()}
        static = [round(sum(sizes[source].values())) for source in self._source.tolist()]
        activation = np.ceil(self._amounts[self._source, 0]).astype(int).tolist()
        return Memory(static, activation, in_flight, reserved, limit)

    def divide(
        self, mesh: Mesh, chunks: int, scatter_gather: bool, positions: Sequence[int]
    ) -> tuple[Manifest, tuple[StageTimes, ...]]:
        """Cut into stages at `positions`, and return a manifest for timing only, and their times."""
        cut = [0, *positions, len(self._source)]
        crossing = [self._crossing(at) for at in cut[1:-1]]
        received: list[tuple[Boundary, ...]] = [(), *crossing, ()]
        held = [tuple(sorted({n for names in self._named[0][a:b] for n in names})) for a, b in pairwise(cut)]
        stages = enumerate(zip(pairwise(received), held, strict=True))
        interfaces = tuple(StageInterface(i, *ends, (), own) for i, (ends, own) in stages)
        manifest = self._manifest(mesh, chunks, scatter_gather, interfaces)
        works = (self._sum(start, end) for start, end in pairwise(cut))
        return manifest, tuple(time_messages(manifest, works, self._durations))

    def _manifest(self, mesh: Mesh, chunks: int, scatter_gather: bool, stages: tuple[StageInterface, ...]) -> Manifest:
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
            parameters=self._named[1],
            aliases=program.aliases,
            output=program.output,
        )

    def _sum(self, start: int, end: int) -> WorkTimes:
        seconds = self._sums[end] - self._sums[start] + self._more[start] + self._more[end]
        forward, backward, again = (Seconds(*side) for side in seconds.tolist())
        kept, flops = (self._held[end] - self._held[start]).tolist()[:2]
        kept += float(self._amounts[self._source[start], 3])
        working = float(self._amounts[self._source[start:end], 2].max(initial=0.0))
        return WorkTimes(forward, backward + again, kept, working, flops).launched_on(self.cluster.device)

    def _item_times(self, mesh: Mesh) -> ItemTimes:
        """Return the times of the items; messages within a node and between nodes differ, and so does the best cut."""
        node = self.cluster.devices_per_node
        apart = mesh.size > node and node % (mesh.pipeline * mesh.tensor) != 0
        if apart not in self._items:
            durations = Durations(self.cluster, mesh, self.precision)
            times, parted = self._times[..., :2].sum(2), self._penalty[..., :2].sum(2)
            self._items[apart] = self._fused_order.make_times(durations, times, parted, self._source)
        return self._items[apart]

    def _crossing(self, at: int) -> tuple[Boundary, ...]:
        row, place = self.row, int(self._source[at])
        live = (node for node in row.items[:place] if row.last_use[node] >= place)
        return tuple(replace(make_boundary(node), requires_grad=node in row.trained) for node in live)
