"""Estimates of a model's step on a mesh of a cluster, without compiling it for that mesh.

The model is captured once for each microbatch size, with few of its equal layers, and divided once for each number of
tensor ranks. The times of its calls are then cut into stages and scheduled as those of a compiled program would be.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from autoptd.capture.example_inputs import read_examples
from autoptd.capture.export import capture, check_model
from autoptd.capture.quantized_modules import read_quantized
from autoptd.options import Options, fold_experts
from autoptd.pass_list import run_passes, select_passes
from autoptd.passes.cost import schedule_times
from autoptd.passes.cost.call_work import find_uncounted
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Durations, Precision
from autoptd.passes.ir.program import Passes, Program
from autoptd.passes.operators.axes import IndivisibleError
from autoptd.passes.stages.fused_order import FusedOrder
from autoptd.planning.layer_costs import LayerCosts
from autoptd.planning.plan import Candidate, Key
from autoptd.planning.shortened_model import shorten_model
from autoptd.planning.stage_cut import find_cut
from autoptd.progress import show_progress
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import Kind
from autoptd.simulate.stage_times import StageTimes
from autoptd.simulate.step import Training, action_times, check_ranks, simulate_times

DEFAULTS = Options()
ROUNDING = 1e-12  # of a sum of times
WALKED = 2048  # forwards of a step that is simulated whole
Divided = tuple[Manifest, Sequence[StageTimes], float]  # for timing alone, into stages; the schedule's seconds


@dataclass(frozen=True)
class Estimate:
    """A step in seconds, its parts on the busiest rank (see `Simulation`), and each rank's peak in bytes."""

    step_seconds: float
    breakdown: Mapping[str, float]
    memory_bytes: tuple[int, ...]


class Estimator:
    """Estimates of one model on `world_size` devices of one cluster.

    `training` is how steps are run. The other arguments are those of `autoptd.compile`.
    """

    def __init__(
        self,
        model: nn.Module,
        cluster: Cluster,
        world_size: int,
        dtype: str | None = None,
        training: Training | None = None,
        *,
        example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        scatter_gather: bool = True,
        options: Options = DEFAULTS,
    ) -> None:
        check_ranks(cluster, world_size)
        self.cluster, self._world_size = cluster, world_size
        self.training = training or Training()
        self._dtype = dtype
        model = read_quantized(model)
        check_model(model)
        self.examples = read_examples(model, example_inputs, loss_fn, None)
        self._model, self._short = model, shorten_model(model, self.examples)
        self._given: dict[str, Any] = {"example_inputs": example_inputs, "loss_fn": loss_fn}
        self._scatter_gather, self.options = scatter_gather, options
        self._once = cache(operator.call)  # of the model captured, arranged, divided, cut
        self.rows: dict[Key, LayerCosts] = {}  # that are measured
        self.uncounted: dict[str, float] = {}  # of a simulation

    @property
    def example_size(self) -> int | None:
        """The number of sequences in the given examples, or None without any."""
        if self._given["example_inputs"] is None:
            return None
        dims = (i.shape[i.batch_dim] for i in self.examples.inputs if i.batch_dim is not None)
        return min(dims, default=1)

    def measure(
        self, tensor: int, microbatch_size: int, recompute: str | int, expert: int = 0, tokens: bool = False
    ) -> LayerCosts:
        """Measure the calls; raise ValueError if the model does not divide by `tensor`, or cannot be recomputed so.

        With `tokens` these are divided, although it takes longer.
        """
        key = tensor, microbatch_size, recompute, expert, tokens
        if key not in self.rows:
            try:
                self.rows[key] = self._measure(key)
            except ValueError as error:
                if isinstance(error, IndivisibleError) or not self._short[1]:  # of a layer: so for all
                    raise
                self._short = self._model, 0  # the whole says whether it is the model that is wrong
                self._once.cache_clear()
                self.rows[key] = self._measure(key)
        return self.rows[key]

    def pipeline_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of a step's schedule; raise ValueError for an impossible candidate."""
        return float(self._once(self._divide_stages, candidate)[2])

    def _time_schedule(self, candidate: Candidate, times: Sequence[StageTimes]) -> float:
        p, m = candidate.pipeline, candidate.num_microbatches
        shares = self._shares(candidate)
        walks = [self._walk(candidate, times, count) for count, _ in shares]
        line = sum(share * walk[0] for (_, share), walk in zip(shares, walks, strict=True))
        count, (seconds, busy, work) = shares[0][0], walks[0]
        if busy + (m - count) * work <= line * (1 + ROUNDING):
            return line
        # A rank that is idle in short steps decides this one, from where its work has taken up what it was idle.
        slope = (line - seconds) / (m - count)
        turn = min(m, count + p * math.ceil((seconds - busy) / (work - slope) / p))
        return self._walk(candidate, times, turn)[0] + (m - turn) * work

    def fit(self, candidate: Candidate, limit: int | None, *, search: bool = False) -> Estimate:
        """Estimate a step that is cut within `limit` bytes a rank if possible.

        With `search` it is cut as `compile` does, which takes a second where ranks have several stages; without, the
        slowest stage is as fast as can be.
        """
        return self._estimate(candidate, self._divide_stages(candidate, limit, search))

    def estimate(self, candidate: Candidate) -> Estimate:
        """Estimate a step and its parts, of stages without a limit; raise ValueError for an impossible candidate."""
        return self._estimate(candidate, self._once(self._divide_stages, candidate))

    def _estimate(self, candidate: Candidate, divided: Divided) -> Estimate:
        p, m = candidate.pipeline, candidate.num_microbatches
        manifest, times, pipelined = divided
        count = self._shares(candidate)[0][0]
        schedule, order = schedule_times.order_actions(candidate.schedule, p, count, candidate.num_model_chunks)
        manifest = replace(manifest, num_microbatches=count)
        precision = self._row(candidate).precision
        short = simulate_times(manifest, times, schedule, order, self.cluster, precision, self.training)
        walked = max(row[-1].end for row in short.timeline)
        seconds = short.step_seconds + pipelined - walked
        repeated = ("compute", "tensor", "pipeline")
        breakdown = {name: s * (m / count if name in repeated else 1) for name, s in short.breakdown.items()}
        breakdown["bubble"] += seconds - sum(breakdown.values())
        return Estimate(seconds, breakdown, short.memory_bytes)

    def _shares(self, candidate: Candidate) -> Sequence[tuple[int, float]]:
        """Return counts of microbatches and the shares with which their steps add up to the step of m microbatches.

        A long step repeats every p microbatches: it is on the line through two short ones, but GPipe's memory grows.
        """
        p, m, v = candidate.pipeline, candidate.num_microbatches, candidate.num_model_chunks
        count = 3 * p
        if m <= count or p * v * m <= WALKED or candidate.schedule == "gpipe":
            return ((m, 1.0),)
        more = (m - count) / p
        return (count, 1 + more), (count - p, -more)

    def _walk(self, candidate: Candidate, times: Sequence[StageTimes], microbatches: int) -> tuple[float, float, float]:
        """Return the seconds of a schedule; of the rank that decides longer ones, those busy, and per microbatch."""
        p, more = candidate.pipeline, candidate.num_microbatches - microbatches
        _, order = schedule_times.order_actions(candidate.schedule, p, microbatches, candidate.num_model_chunks)
        blocking = not self.training.overlap
        taken = action_times(times, blocking=blocking)
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for rank, action, start, end in schedule_times.walk(order, p, taken):
            if blocking or action.kind.computes:
                first.setdefault(rank, start)
                last[rank] = end
        seconds = max(last.values())
        ranks = (
            (seconds - max(0.0, last[rank] - first[rank] - work * microbatches), work)
            for rank, work in enumerate(rank_seconds(taken, p))
        )
        return seconds, *max(ranks, key=lambda rank: rank[0] + more * rank[1])

    def _divide_stages(self, candidate: Candidate, limit: int | None = None, search: bool = False) -> Divided:
        row, mesh, v = self._row(candidate), candidate.mesh, candidate.num_model_chunks
        given: Any = {"limit": limit, "training": self.training, "scatter_gather": self._scatter_gather}
        cut, _ = find_cut(row, mesh, candidate.schedule, candidate.num_microbatches, v, search=search, **given)
        manifest, times = row.divide(mesh, v, self._scatter_gather, cut.positions)
        return manifest, times, self._time_schedule(candidate, times)

    def _row(self, candidate: Candidate) -> LayerCosts:
        """Return the costs of a candidate's calls; those that send rows to experts depend on where its ranks are."""
        row = self.measure(*candidate.key)
        return self._once(row.on, candidate.mesh) if candidate.expert else row

    def _measure(self, key: Key) -> LayerCosts:
        tensor, microbatch_size, recompute, expert, tokens = key
        divided = self._once(self._divide, tensor, microbatch_size, expert or tensor, tokens)
        finishing = select_passes(replace(self.options, recompute=recompute), "finish")
        with show_progress("plan") as say:
            say("finish uncut")
            fused_order = FusedOrder(divided, finishing)
        self.uncounted |= find_uncounted([fused_order.stage])
        precision = Precision.of(divided.stages, self._dtype)
        mesh = fold_experts(Mesh(tensor, 1, self._world_size // tensor), expert or None)
        durations = Durations(self.cluster, mesh, precision, self.training.overlap)
        return LayerCosts(fused_order, self._short[1], durations)

    def _capture(self, microbatch_size: int) -> Program:
        given: Any = {**self._given, "microbatch_size": microbatch_size, "device": self.options.device}
        return capture(self._short[0], mesh=Mesh(1, 1, 1), **given)

    def _arrange(self, divides: bool, microbatch_size: int) -> Program:
        """Arrange the model for any number of tensor ranks above one, or for a single one, which has its own layout."""
        captured = self._once(self._capture, microbatch_size)
        return self._rewrite(captured, Mesh(2 if divides else 1, 1, 1), select_passes(self.options, "arrange"))

    def _divide(self, tensor: int, microbatch_size: int, expert: int, tokens: bool) -> Program:
        arranged = self._once(self._arrange, tensor > 1, microbatch_size)
        mesh = Mesh(tensor, 1, expert // tensor, expert=expert)
        options = replace(self.options, sequence_parallel=tokens or self.options.sequence_parallel)
        return self._rewrite(arranged, mesh, select_passes(options, "divide"))

    def _rewrite(self, program: Program, mesh: Mesh, passes: Passes) -> Program:
        with show_progress("plan") as say:
            return run_passes(passes, replace(program, mesh=mesh), say)


def rank_seconds(times: schedule_times.ActionTimes, num_ranks: int) -> list[Any]:
    """Return the time of each rank's own actions on one microbatch, with messages where they hold up their sender."""
    stages = range(len(times.by_kind[Kind.FORWARD]))
    holding = {k: row for k, row in times.by_kind.items() if k.computes or (times.blocking and num_ranks > 1)}
    rows = [(row, 0 if kind.computes else kind.direction) for kind, row in holding.items()]
    seconds = [sum(row[stage] for row, way in rows if stage + way in stages) for stage in stages]
    return [sum(seconds[rank::num_ranks]) for rank in range(num_ranks)]
