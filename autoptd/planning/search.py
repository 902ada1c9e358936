"""plan: find the mesh, model chunks, microbatches and recomputation of the fastest step on a cluster.

The search takes candidates in the order of their bounds (branch and bound) and simulates none that a bound rules out.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoptd.capture.fake_module import leave_modes
from autoptd.gc_pause import paused_collector
from autoptd.input_shapes import list_examples
from autoptd.options import Options, check_counts, check_flags, check_free_counts, check_modes, read_mesh
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.operators.axes import IndivisibleError
from autoptd.passes.recompute import find_cores
from autoptd.passes.tensor_parallel.sequence import has_divided_tokens
from autoptd.planning.estimator import Estimate, Estimator
from autoptd.planning.plan import LEAST_LOSS, RECOMPUTE, Candidate, Plan, Space, explain_rank
from autoptd.runtime.program.manifest import count_tokens
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import Kind, compute_order
from autoptd.simulate.step import Training

SLACK = 0.95  # factor of an extrapolated bound
SEARCHED = 8192  # forwards of a step at most for which a cut is searched that is not the best: it takes too long
STATES = 0.5  # of a rank's memory, above which they are what does not fit
TRIED = 4  # candidates that need least memory, tried if none fits


@paused_collector()
@leave_modes()
def plan(
    model: nn.Module,
    *,
    world_size: int,
    global_batch: int,
    cluster: Cluster | str | Path,
    dtype: str | None = None,
    mesh: tuple[int, int, int] | Mesh | None = None,
    top: int = 1,
    max_tensor: int | None = None,
    microbatch_size: int | None = None,
    num_model_chunks: int | None = None,
    schedule: str | None = None,
    recompute: str | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    scatter_gather: bool = True,
    fuse: bool = True,
    layout: str = "sbh",
    rules: Mapping[Any, str] | None = None,
    sequence_parallel: bool | None = None,
    device: str | torch.device | None = None,
    overlap: bool = True,
    zero: int = 0,
    wide_gradients: bool = True,
) -> tuple[Plan, ...]:
    """Find the fastest way to train `model` on `world_size` devices that fits in their memory, less its reserve.

    Considered are all meshes (t, p, d) of that size, microbatches of 1, 2, 4, … sequences, up to 8 model chunks a
    pipeline rank (no more stages than layers), and recomputation of nothing, the attention weights or all layers.
    GPipe, which takes more memory than 1F1B, only if asked for. Tokens are divided where it pays, or to fit.

    Args:
        model: as for `autoptd.compile`; its weights may be on the meta device.
        world_size: devices; global_batch: sequences in a step, of all replicas.
        cluster: see `Cluster.load`, which takes a name or path too.
        dtype: computes in this type; default the model's own.
        mesh: (tensor, pipeline, data): the result is the best plan of all meshes, and that of this one.
        top: meshes to simulate at least, for comparison, in the order of their bounds.
        max_tensor: tensor ranks at most; default what one node holds.
        microbatch_size, num_model_chunks, schedule, recompute: what is fixed; default: what is best. Of
            `example_inputs` the microbatch size is their own; of several input shapes the first is planned for.
        overlap, zero, wide_gradients: how steps are run, as `CompiledProgram.simulate` takes it: zero=1 is for those
            who call ``parallel.shard_optimizer``.

    The other arguments are those of `autoptd.compile`. The result has one `Plan` for every mesh that divides the
    model and the batch: the best first, then those too slow to be simulated, and those that do not fit at the end.

    Raises TypeError or ValueError for what the user gave, for a world size that no mesh divides, and where no plan
    fits: then the one that needs least, its fullest rank and the bytes that it is over.
    """
    check_modes(schedule="1f1b" if schedule is None else schedule, layout=layout)
    check_flags(fuse=fuse, scatter_gather=scatter_gather)
    if recompute not in (None, *RECOMPUTE):
        raise ValueError(f"recompute={recompute!r}: expected {', '.join(map(repr, RECOMPUTE))}, or None for any")
    check_counts(world_size=world_size, global_batch=global_batch, top=top)
    check_free_counts(max_tensor=max_tensor, microbatch_size=microbatch_size, num_model_chunks=num_model_chunks)
    described = Cluster.load(cluster)
    examples = list_examples(example_inputs)
    given: Any = {"example_inputs": examples[0], "loss_fn": loss_fn}
    by_tokens = sequence_parallel if len(examples) == 1 else bool(sequence_parallel)  # of several t may divide some
    written: Any = {"layout": layout, "rules": rules, "sequence_parallel": by_tokens, "fuse": fuse, "device": device}
    given |= {"scatter_gather": scatter_gather, "options": Options(cluster=described, overlap=overlap, **written)}
    run: Any = {"overlap": overlap, "zero": zero, "wide_gradients": wide_gradients}
    estimator = Estimator(model, described, world_size, dtype, Training(**run), **given)
    size = microbatch_size or estimator.example_size
    space = Space(world_size, global_batch, described, max_tensor, size, num_model_chunks, schedule, recompute)
    known = {**written, **run, "dtype": dtype, "scatter_gather": scatter_gather, "cluster": cluster}
    return tuple(replace(own, given=known) for own in _search(estimator, space, mesh, top))


def _search(estimator: Estimator, space: Space, mesh: tuple[int, ...] | Mesh | None, top: int) -> tuple[Plan, ...]:
    """Return the plans of all meshes, or the best of them and that of one `mesh`."""
    best, *others = Search(estimator, space).run(top)
    if mesh is not None:
        own, *_ = Search(estimator, replace(space, mesh=read_mesh(mesh))).run()
        others = [replace(own, why=explain_rank(own, (best, own)))] * (own.mesh != best.mesh)
    return best, *others


class Search:
    """The branch and bound search: a candidate is bounded, then measured, then simulated."""

    def __init__(self, estimator: Estimator, space: Space) -> None:
        self._estimator, self._space = estimator, space
        self._limit = space.cluster.device.usable_bytes
        self._recompute = space.recompute or RECOMPUTE[0]
        self._size = space.microbatch_size or 1
        self._whole = estimator.measure(1, self._size, self._recompute)
        twice = self._whole if space.microbatch_size else estimator.measure(1, 2, self._recompute)
        # Seconds of one microbatch of b sequences are at least fixed + b * each.
        self._each = (twice.seconds - self._whole.seconds) / self._size
        # By tensor and expert ranks, and what is computed again; None: whatever it is.
        self._refused: dict[tuple[int, int, str | int | None], str] = {}
        self._candidates: set[Candidate] = set()
        # By bound, and in order. What it is of: fewer measurements; the candidate's own schedule; its cut, too full.
        self._heap: list[tuple[float, int, int, Candidate]] = []
        self._found: dict[Mesh, tuple[Candidate, Estimate]] = {}
        self._full: dict[Mesh, list[tuple[float, Candidate]]] = {}
        self._best = math.inf

    def run(self, top: int = 1) -> tuple[Plan, ...]:
        """Return the plans of all meshes, the `top` simulated; raise ValueError if none fits."""
        whole, cores = self._whole, bool(find_cores(self._whole.row.stage.graph))
        heap = self._heap
        for candidate in self._space.candidates(whole.layers, whole.units, whole.experts, cores=cores):
            self._enqueue(candidate)
        if not self._candidates:
            raise ValueError(self._explain_none())
        while heap and (heap[0][0] <= self._best or len(self._found) < top):
            bound, index, level, candidate = heapq.heappop(heap)
            found = self._found.get(candidate.mesh)
            late = self._best < bound and candidate.num_model_chunks == 1  # chunks are cut again, and may yet be best
            if found and (found[1].step_seconds <= bound or (late and found[0].num_model_chunks > 1)):
                continue
            if level == 0 and (higher := self._extrapolate(candidate)) > bound:  # more is measured by now
                heapq.heappush(heap, (higher, index, 0, candidate))
            elif level == 0:
                cuts = candidate.num_stages <= self._count_units(candidate)  # maybe fewer than for t = 1
                if cuts and not self._is_too_full(candidate):
                    pipelined = self._estimator.pipeline_seconds(candidate)
                    heapq.heappush(heap, (pipelined + self._finish(candidate), index, 1, candidate))
            elif slower := self._simulate(candidate, fit=level == 2):
                heapq.heappush(heap, (slower, index, 2, candidate))
        if not self._found:
            raise ValueError(self._explain_full() if self._full else self._explain_none())
        self._search_cuts()
        return self._rank([(bound, candidate) for bound, _, _, candidate in heap])

    def _enqueue(self, candidate: Candidate) -> None:
        self._candidates.add(candidate)
        if not self._is_too_full(candidate):
            heapq.heappush(self._heap, (self._extrapolate(candidate), len(self._candidates), 0, candidate))

    def _note_full(self, need: float, candidate: Candidate) -> None:
        """Write down that a candidate does not fit; with divided tokens it may, if it has whole ones."""
        self._full.setdefault(candidate.mesh, []).append((need, candidate))
        row, other = self._estimator.rows.get(candidate.key), replace(candidate, sequence_parallel=True)
        free = self._estimator.options.sequence_parallel is None and candidate.tensor > 1
        if free and row and other not in self._candidates and not has_divided_tokens(row.row.stage.graph):
            self._enqueue(other)

    def _search_cuts(self) -> None:
        """Cut the plans with several chunks a rank as `compile` does, which shortens the step by up to an eighth."""
        best = min(self._found.values(), key=lambda found: found[1].step_seconds)[0]
        for mesh, (candidate, _) in self._found.items():
            short = candidate.num_stages * candidate.num_microbatches <= SEARCHED
            if candidate.num_model_chunks > 1 and (short or candidate is best):
                self._found[mesh] = candidate, self._estimator.fit(candidate, int(self._limit), search=True)

    # Bounds

    def _extrapolate(self, candidate: Candidate) -> float:
        """Return a lower bound of a step's seconds, from measurements of fewer tensor ranks and smaller microbatches.

        It is the time of m microbatches on even ranks, the bubble (SC21 §2.2), and the optimizer.
        """
        size = candidate.microbatch_size
        whole = max(
            (
                t * row.seconds + (size - b) * self._each
                for (t, b, how, expert, tokens), row in self._estimator.rows.items()
                if t <= candidate.tensor and b <= size and how in (self._recompute, candidate.recompute)
                if expert == candidate.expert  # others read more weights, or send more rows
                if tokens <= candidate.sequence_parallel  # which takes longer
            ),
            default=self._whole.least_seconds / 2 * size / self._size,  # half: of causal scores
        )
        each = SLACK * whole / candidate.tensor / candidate.pipeline
        passes = candidate.num_microbatches + (candidate.pipeline - 1) / candidate.num_model_chunks
        return passes * each + self._finish(candidate)

    def _finish(self, candidate: Candidate) -> float:
        """Return a lower bound of the optimizer's seconds, on ranks with equal shares of the parameters.

        The gradient sums may overlap with the last backwards.
        """
        cluster, training = self._space.cluster, self._estimator.training
        moved = training.states(self._whole.precision, candidate.data).moved(self._whole.owned)
        rate = cluster.device.memory_bandwidth * cluster.device.memory_efficiency
        return moved / (candidate.mesh.expert * candidate.pipeline) / rate

    def _need(self, candidate: Candidate) -> float:
        """Return a lower bound of the fullest pipeline rank's bytes, for any cut.

        A rank that holds h microbatches of all its chunks when its first backward begins has room for 1/h of the bytes
        that they keep, and the ranks share the sum. Without a measurement of the candidate it is an extrapolation.
        """
        t, p = candidate.tensor, candidate.pipeline
        if row := self._estimator.rows.get(candidate.key):
            share, kept = 1.0, row.kept
        else:
            row, share = self._whole, 1.0 / candidate.mesh.expert
            kept = row.kept * candidate.microbatch_size / self._size / t
            kept *= candidate.recompute == self._recompute
        held = _count_held(candidate.schedule, p, candidate.num_microbatches, candidate.num_model_chunks)
        states = self._estimator.training.states(row.precision, candidate.data)
        static = share * sum(states.held(row.owned).values())
        return max((static + min(held) * kept) / p, (static / max(held) + kept) / sum(1 / h for h in held))

    def _is_too_full(self, candidate: Candidate) -> bool:
        need = self._need(candidate)
        full = SLACK * need > self._limit
        if full:
            self._note_full(need, candidate)
        return full

    # Steps

    def _count_units(self, candidate: Candidate) -> int:
        """Measure a candidate, and return the most stages that it can be cut into; 0 if it is refused."""
        ranks, how = (candidate.tensor, candidate.expert), candidate.recompute
        if (*ranks, None) in self._refused or (*ranks, how) in self._refused:
            return 0
        try:
            return self._estimator.measure(*candidate.key).units
        except ValueError as error:
            self._refused[*ranks, None if isinstance(error, IndivisibleError) else how] = str(error)
            return 0

    def _divides(self, candidate: Candidate) -> bool:
        """Return whether so many tensor ranks divide the model and leave enough cuts, by one measurement."""
        known = [row.units for key, row in self._estimator.rows.items() if key[0] == candidate.tensor]
        return candidate.num_stages <= max(known or [self._count_units(candidate)])

    def _simulate(self, candidate: Candidate, *, fit: bool) -> float:
        """Return 0.0 when done; otherwise the step time at which to requeue the candidate, cut to fit in memory."""
        estimator, limit = self._estimator, int(self._limit)
        estimate = estimator.fit(candidate, limit) if fit else estimator.estimate(candidate)
        if max(estimate.memory_bytes) > self._limit:
            self._note_full(max(estimate.memory_bytes), candidate)
            return 0.0 if fit or candidate.pipeline == 1 else estimate.step_seconds
        found = self._found.get(candidate.mesh)
        if found is None or estimate.step_seconds < found[1].step_seconds:
            self._found[candidate.mesh] = candidate, estimate
            self._best = min(self._best, estimate.step_seconds)
        return 0.0

    # Results

    def _rank(self, left: Sequence[tuple[float, Candidate]]) -> tuple[Plan, ...]:
        """Return the plans in order: simulated ones, meshes too slow to be simulated, meshes that do not fit."""
        order = sorted(self._found.values(), key=lambda found: found[1].step_seconds)
        plans = []
        for candidate, found in order:
            graph = self._estimator.rows[candidate.key].row.stage.graph
            own = replace(candidate, sequence_parallel=has_divided_tokens(graph))
            plans.append(_plan(own, found.step_seconds, max(found.memory_bytes), True, breakdown=found.breakdown))
        plans = [replace(own, why=explain_rank(own, plans)) for own in plans]
        seen = set(self._found)
        for bound, candidate in sorted(left):
            if candidate.mesh not in seen and self._divides(candidate):
                seen.add(candidate.mesh)
                # It was above the best step before that was cut again, which may have made it longer.
                slower = max(0.0, bound / plans[0].step_seconds - 1)
                bounded = f"at least {slower:.1%} slower" if slower >= LEAST_LOSS else "at best as fast"
                why = f"not simulated: {bounded}, with these settings or others"
                plans.append(_plan(candidate, bound, self._need(candidate), None, why=why))
        for mesh, full in self._full.items():
            possible = (pair for pair in sorted(full) if self._divides(pair[1]))
            if mesh not in seen and (leanest := next(possible, None)):
                need, candidate = leanest
                over = (need - self._limit) / 1e9
                why = f"does not fit: at least {need / 1e9:.3g} GB on a rank, {over:.3g} GB over"
                plans.append(_plan(candidate, self._extrapolate(candidate), need, False, why=why))
        tokens = self._space.global_batch * count_tokens(self._estimator.examples.inputs)
        plain = self._estimator.measure(1, self._size, RECOMPUTE[0]).least_seconds / self._size
        least = plain * self._space.global_batch / self._space.world_size
        known: Any = {"uncounted": self._estimator.uncounted, "tokens": tokens}
        return tuple(replace(own, **known, mfu=least / own.step_seconds) for own in plans)

    def _explain_full(self) -> str:

        def order(pair: tuple[float, Candidate]) -> Any:
            return pair[1].microbatch_size, -RECOMPUTE.index(str(pair[1].recompute)), pair

        leanest = (min(full, key=order)[1] for full in self._full.values())
        measured = [own for own in leanest if self._count_units(own)]
        likely = sorted(measured, key=self._need)[:TRIED]
        found = [(self._estimator.estimate(own).memory_bytes, own) for own in likely]
        limit = round(self._limit)
        if not found:
            return f"no plan fits in {limit:,} bytes a device: {self._list_refusals()}"
        memory, candidate = min(found, key=lambda pair: max(pair[0]))
        worst, ways = memory.index(max(memory)), ["more devices", "devices with more memory"]
        ways += ["a smaller microbatch"] * (self._size > 1)
        ways += ['recompute="full"'] * (self._space.recompute not in (None, RECOMPUTE[-1]))
        ways += ["zero=1 (parallel.shard_optimizer)"] * (not self._estimator.training.zero)
        row = self._estimator.measure(*candidate.key)
        held = self._estimator.training.states(row.precision, candidate.data).held(row.owned)
        share = sum(held.values()) / candidate.pipeline / max(memory)  # of even ranks
        ways += [
            "LoRA, whose frozen weights have no gradients (there is no division of weights over replicas here)"
            if share > STATES
            else "shorter sequences (there is no context parallelism here, which divides a sequence over ranks)"
        ]
        return (
            f"no plan fits in memory: {candidate} needs least, and its pipeline rank {worst} holds {max(memory):,} "
            f"bytes, {max(memory) - limit:,} more than a device's {limit:,}; {min(1, share):.0%} are weights, "
            f"gradients and the optimizer's states; use {', or '.join(ways)}"
        )

    def _explain_none(self) -> str:
        space, meshes = self._space, list(self._space.meshes())
        tried = [
            f"d must divide global_batch={space.global_batch}",
            f"t may be {', '.join(str(t) for t in sorted({mesh[0] for mesh in meshes})) or 'none'}",
            f"p * v may be {self._whole.layers or self._whole.units} at most, the model's layers or places for a cut",
        ]
        if space.microbatch_size:
            tried.append(f"microbatches of {space.microbatch_size} must divide a replica's share")
        if space.schedule or space.num_model_chunks:
            tried += [f"schedule={space.schedule!r} and num_model_chunks={space.num_model_chunks} are fixed"]
        return (
            f"world_size={space.world_size} divides into no mesh (tensor, pipeline, data): {'; '.join(tried)}"
            f"{self._list_refusals()}; change world_size or global_batch"
        )

    def _list_refusals(self) -> str:
        refused = self._refused.items()
        return "".join(f"; t={t}{f', recompute={how!r}' if how else ''}: {why}" for (t, _, how), why in refused)


def _plan(candidate: Candidate, seconds: float, memory: float, fits: bool | None, **further: Any) -> Plan:
    return Plan(**vars(candidate), step_seconds=seconds, memory_bytes=round(memory), fits=fits, **further)


@cache
def _count_held(schedule: str, p: int, m: int, v: int) -> Sequence[int]:
    """Count, by rank, the microbatches of which it holds every chunk's activations when its first backward begins."""
    held = []
    for rank in range(p):
        order = compute_order(schedule, rank, p, m, v)
        begun = Counter(action.stage for action in takewhile(lambda one: one.kind is Kind.FORWARD, order))
        held.append(min(begun[stage] for stage in range(rank, p * v, p)))
    return held
