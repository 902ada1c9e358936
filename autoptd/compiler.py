"""`autoptd.compile`: capture, the pipeline of passes, emission and proof. The one file that knows the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoptd.capture.autocast_state import leave_autocast
from autoptd.capture.broadcast_dropout import mark_expanded
from autoptd.capture.export import capture
from autoptd.compiled import CompiledProgram
from autoptd.description import describe_program, write_title
from autoptd.gc_pause import collect_garbage, paused_collector
from autoptd.input_shapes import (
    check_examples,
    find_disagreement,
    guess_batch,
    keep_whole,
    list_examples,
    naming_shape,
    rename_own,
)
from autoptd.loss.mean_warnings import describe_means
from autoptd.memory_fit import choose_fitting, fit_program
from autoptd.options import (
    Options,
    check_flags,
    check_free_counts,
    check_known,
    check_modes,
    check_planned,
    check_seed,
    read_mesh,
)
from autoptd.pass_list import run_passes, select_passes
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.work import forward_work
from autoptd.passes.ir.program import Program
from autoptd.passes.stages.align_shapes import align_cut
from autoptd.passes.stages.cut import Found, cut_at, find_cut
from autoptd.passes.stages.fused_order import FusedOrder
from autoptd.planning.plan import Plan
from autoptd.planning.search import plan
from autoptd.progress import Watch
from autoptd.runtime.launch import end_with_launcher
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import check_shape, make_schedule
from autoptd.runtime.user_warnings import warn_caller
from autoptd.simulate.stage_times import count_flops
from autoptd.text.pass_dump import keep_text
from autoptd.text.writer import emit_texts
from autoptd.versions import read_versions, warn_untested
from autoptd.weights.deferred_init import read_initial

warn_untested(read_versions())


def compile(
    model: nn.Module,
    mesh: object,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    num_model_chunks: int | None = None,
    scatter_gather: bool = True,
    recompute: str | int | None = None,
    fuse: bool = True,
    layout: str = "sbh",
    rules: Mapping[Any, str] | None = None,
    seed: int = 0,
    initializer: Callable[[nn.Module], object] | None = None,
    world_size: int | None = None,
    global_batch: int | None = None,
    cluster: Cluster | str | Path | None = None,
    **unknown: object,
) -> CompiledProgram:
    """Compile a plain model into the program that trains it on ``tensor x pipeline x data`` devices.

    Runs anywhere: no GPU, no process group. `model` is never modified; its weights may be on the meta device.

    Args:
        model: an nn.Module or fx.GraphModule that returns its loss (or its output, with `loss_fn`).
        mesh: (tensor, pipeline, data), a DeviceMesh with dims "tp", "pp", "dp", or "auto": see `autoptd.plan`, which
            also chooses what is None of microbatch_size, schedule, num_model_chunks and recompute.
        example_inputs: a dict or tuple for ONE microbatch, for its shapes and dtypes; None: from the model's config. A
            list of these: several input shapes; the first decides plan and division, and is the one simulated.
        loss_fn: ``loss_fn(output, **targets)``; its further arguments become batch inputs.
        microbatch_size: b, sequences; default the example's, else 1.
        num_microbatches: m per pipeline and step; default 8 p. A step takes b * m * d sequences.
        schedule: "gpipe", "1f1b" or "interleaved_1f1b" (SC21 §2.2), the default.
        num_model_chunks: v stages per pipeline rank; default 2 where p > 1 and the model allows it, else 1.
        scatter_gather: send 1/t of a replicated boundary tensor per tensor rank, all-gather on arrival (SC21 §4.1).
        recompute: "none" (default), "selective", "full", every k layers, or "optimal" (SC21 §3.5; passes/recompute.py).
        fuse: join chains of memory-bound operators into one kernel each (SC21 §4.2; passes/fusion/rules.py).
        layout: "sbh" holds activations [s, b, h] where that copies no more memory (SC21 §4.2), "bsh" as the user does.
        rules: sharding rules of custom operators, e.g. ``{"mylib.op": "b s h!, h -> b s h"}`` (see `text_rule`).
        seed: of dropout masks and of a meta model's first weights; they depend on neither mesh nor microbatch size.
        initializer: initialises the model in place, for one on the meta device whose constructor does not say it.
        world_size, global_batch: devices, and sequences a step, for mesh="auto".
        cluster: balances stages by its times, in its memory if any cut fits; default "dgx-a100", of any memory.

    Raises TypeError or ValueError for what the user gave, `ProgramError` if the result contradicts itself.
    """
    end_with_launcher()  # compiling takes its time, and comes before bind
    check_known(compile, unknown)
    check_seed(seed)
    check_planned(mesh, world_size, global_batch, cluster, num_microbatches)
    given: Any = {"example_inputs": example_inputs, "loss_fn": loss_fn, "microbatch_size": microbatch_size}
    given |= {"scatter_gather": scatter_gather, "fuse": fuse, "layout": layout, "rules": rules}
    given |= {"schedule": schedule, "num_model_chunks": num_model_chunks, "recompute": recompute}
    own: Any = {"seed": seed, "initializer": initializer, "cluster": cluster}
    if isinstance(mesh, str) and mesh == "auto":
        plans = plan(model, world_size=world_size, global_batch=global_batch, cluster=cluster, **given)  # type: ignore[arg-type]
        return choose_fitting(_follow(plans, model, given | own), Cluster.load(own["cluster"]))
    return _compile_for(model, mesh, num_microbatches=num_microbatches, **given, **own)


def _follow(plans: Sequence[Plan], model: nn.Module, given: Mapping[str, Any]) -> Iterator[CompiledProgram]:
    """Compile the `model` by each of the simulated `plans`, the best first, with the other arguments `given`."""
    return (_compile_for(model, **{**given, **one.options}) for one in plans if one.simulated)


def _compile_for(
    model: nn.Module,
    mesh: object,
    *,
    example_inputs: Any,
    microbatch_size: int | None,
    schedule: str | None,
    recompute: str | int | None,
    fuse: bool,
    layout: str,
    rules: Mapping[Any, str] | None,
    **job: Any,
) -> CompiledProgram:
    """Compile the `model` for one mesh; the arguments are those of `compile`."""
    settled = "interleaved_1f1b" if schedule is None else schedule
    options = Options("none" if recompute is None else recompute, fuse, layout, rules)
    check_modes(schedule=settled, recompute=options.recompute, layout=layout)
    check_flags(fuse=fuse, scatter_gather=job["scatter_gather"])
    counts = {name: job[name] for name in ("num_microbatches", "num_model_chunks")}
    check_free_counts(microbatch_size=microbatch_size, **counts)
    whole = _Job(model, read_mesh(mesh), schedule=settled, options=options, **job)
    return _compile(whole, list_examples(example_inputs), microbatch_size)


@dataclass(frozen=True)
class _Job:
    """The arguments of one compilation, settled: the same for all input shapes."""

    model: nn.Module
    mesh: Mesh
    loss_fn: Callable[..., torch.Tensor] | None
    schedule: str
    options: Options
    scatter_gather: bool
    num_microbatches: int | None
    num_model_chunks: int | None
    seed: int
    initializer: Callable[[nn.Module], object] | None
    cluster: Cluster | str | Path | None

    @property
    def count(self) -> int:
        """Microbatches per step."""
        return self.num_microbatches or 8 * self.mesh.pipeline

    def divide(
        self, example: Any, microbatch_size: int | None, watch: Watch, first: Program | None = None
    ) -> Program:
        """Capture the model at the shape of `example` and divide it over the tensor ranks, as `first` was."""
        watch.say("capture")
        given: Any = {"example_inputs": example, "microbatch_size": microbatch_size, "loss_fn": self.loss_fn}
        captured = capture(self.model, mesh=self.mesh, **given)
        captured = captured if first is None else guess_batch(captured, first)
        with leave_autocast():
            program = read_initial(captured, model=self.model, initializer=self.initializer)
            program = run_passes(select_passes(self.options, "arrange"), program, watch, keep_text)
            program = mark_expanded(program, self.options.layout, self.model, self.loss_fn)
            program = replace(program, model_flops=count_flops(program.stages[0]))
            return run_passes(select_passes(self.options, "divide"), program, watch, keep_text)

    def finish(self, cut: Program, divided: Program, watch: Watch, shape: int = 0) -> CompiledProgram:
        """Rewrite the stages of a `cut` program, emit and check their texts; `divided` is the uncut program."""
        keep_text(cut, "cut stages")
        program = run_passes(select_passes(self.options, "finish"), cut, watch, keep_text)
        watch.say("emit and check")
        parameters = divided.stages[0].parameters
        manifest = replace(
            describe_program(program, parameters, self.model, self.loss_fn),
            schedule=self.schedule,
            num_microbatches=self.count,
            scatter_gather=self.scatter_gather,
            seed=self.seed,
            autocast=None if program.autocast is None else program.autocast.dtype,
            shape=shape,
        )
        if shape == 0 and manifest.num_microbatches * manifest.mesh.data > 1:
            for text in describe_means(program, divided):
                warn_caller(text)
        title = write_title(type(self.model).__name__, parameters)
        flops = [sum(forward_work(node).flops for node in stage.graph.nodes) for stage in program.stages]
        schedule = make_schedule(self.schedule, self.mesh.pipeline, self.count, manifest.num_model_chunks)
        texts = emit_texts(program, manifest, schedule, title=title, flops=flops)
        del schedule  # of a long pipeline it is large, and the check reads it from the texts
        result = CompiledProgram(
            program.stages,
            program.log,
            texts,
            manifest,
            program.buffers,
            title,
            self.model,
            self.loss_fn,
            program.symbols,
            self.options,
        )
        if uncovered := result.check():
            entry = f"check does not cover {len(uncovered)} operators, so verify: {uncovered[0]}"
            result = replace(result, log=(*result.log, entry))
        return result


@paused_collector()
def _compile(job: _Job, examples: Sequence[Any], microbatch_size: int | None) -> CompiledProgram:
    """Compile for each of `examples`; the others are divided and cut where the first one is."""
    check_examples(job.model, examples, job.loss_fn, microbatch_size)
    described = None if job.cluster is None else Cluster.load(job.cluster)
    with Watch("compile") as watch:
        divided = job.divide(examples[0], microbatch_size, watch)
        collect_garbage()
        with leave_autocast():

            def finish(found: Found) -> CompiledProgram:
                cut = cut_at(divided, found.positions, found.entry)
                collect_garbage()
                return job.finish(cut, divided, watch)

            # Held by the call alone, which drops what it no longer needs.
            positions, first = fit_program(_prepare_cut(job, divided, described, watch), finish, described)
        further = []
        for number, example in enumerate(examples[1:], 1):
            with naming_shape(number, example):
                other = job.divide(example, None, watch, divided)
                other = rename_own(keep_whole(other, divided), number)
                with leave_autocast():
                    aligned = align_cut(other, divided, positions)
                    cut = cut_at(other, aligned, "cut_stages where the first input shape is cut")
                    program = job.finish(cut, other, watch, number)
                reason = find_disagreement(first.manifest, program.manifest)
                if reason:
                    raise ValueError(
                        f"{reason}; all shapes train the same parameters: compile this one alone"
                    )
                further.append(program)
    return _join(first, further)


def _prepare_cut(
    job: _Job, divided: Program, cluster: Cluster | None, watch: Watch
) -> Callable[[Sequence[int]], Found]:
    """Return the search for a cut of the `divided` program (see `fit_cut`), which alone holds the kernels it times.

    Raises ValueError, before any search, for a schedule that cannot run on the pipeline ranks.
    """
    watch.say("finish uncut")
    uncut = FusedOrder(divided, select_passes(job.options, "finish"))
    chunks = job.num_model_chunks or _default_chunks(uncut, job.schedule, job.count)
    check_shape(job.schedule, job.mesh.pipeline, job.count, chunks)

    def find(besides: Sequence[int]) -> Found:
        watch.say("cut stages")
        return find_cut(
            uncut,
            num_stages=job.mesh.pipeline * chunks,
            schedule=job.schedule,
            num_microbatches=job.count,
            cluster=cluster,
            besides=besides,
        )

    return find


def _join(first: CompiledProgram, further: Sequence[CompiledProgram]) -> CompiledProgram:
    """Join the programs of all shapes; buffer values that one of them relies on hold for all."""
    proved = {own.name: own for program in (first, *further) for own in program.manifest.proved}
    manifest = replace(
        first.manifest, proved=tuple(proved[name] for name in sorted(proved)), num_shapes=1 + len(further)
    )
    return replace(first, manifest=manifest, further=tuple(further))


def _default_chunks(uncut: FusedOrder, schedule: str, num_microbatches: int) -> int:
    """Return the stages per pipeline rank: 2 where the schedule and the model allow it."""
    pipeline = uncut.program.mesh.pipeline
    interleaves = schedule == "interleaved_1f1b" and num_microbatches % pipeline == 0 and pipeline > 1
    return 2 if interleaves and uncut.units >= 2 * pipeline else 1
