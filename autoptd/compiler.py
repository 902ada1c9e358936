"""compile: capture, the pipeline of passes, emission, proof. The one file that knows the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autoptd.capture.autocast_state import leave_autocast
from autoptd.capture.broadcast_dropout import mark_expanded
from autoptd.capture.example_inputs import read_arguments
from autoptd.capture.export import capture
from autoptd.check.program import check_program
from autoptd.compiled import CompiledProgram
from autoptd.gc_pause import paused_collector
from autoptd.input_shapes import (
    check_examples,
    find_disagreement,
    guess_batch,
    keep_whole,
    list_examples,
    naming_program,
    naming_shape,
    rename_own,
)
from autoptd.loss.class_ranges import describe_rows
from autoptd.loss.labels import describe_labels
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
from autoptd.pass_list import passes_to_the_cut, passes_to_the_division, run_passes
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.work import forward_work
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.program import Program
from autoptd.passes.stages.align_shapes import align_cut
from autoptd.passes.stages.cut import Found, boundaries, cut_at, find_cut
from autoptd.passes.stages.fused_order import Uncut, passes_from_the_cut
from autoptd.planning.search import plan
from autoptd.progress import Watch
from autoptd.runtime.launch import end_with_launcher
from autoptd.runtime.program.manifest import Manifest, Proved, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.program.schedule import Schedule, make_schedule
from autoptd.runtime.user_warnings import warn_caller
from autoptd.runtime.weights.slices import hash_values
from autoptd.runtime.weights.submodules import name_layers
from autoptd.simulate.stage_times import count_flops
from autoptd.text.folder import load_folder
from autoptd.text.pass_dump import keep_text
from autoptd.text.reader import shape_folder, trace_program
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
        rules: sharding rules of custom operators, e.g. ``{"mylib.op": "b s h!, h -> b s h"}`` (see `axis_rules`).
        seed: of dropout masks and of a meta model's first weights; they depend on neither mesh nor microbatch size.
        initializer: initialises the model in place, for one on the meta device whose constructor does not say it.
        world_size, global_batch: devices, and sequences a step, for mesh="auto".
        cluster: balances stages by its times, in its memory if any cut fits; default "dgx-a100", of any memory.

    Raises TypeError or ValueError for what the user gave, `ProgramError` if the result contradicts itself.
    """
    given: Any = {"example_inputs": example_inputs, "loss_fn": loss_fn, "microbatch_size": microbatch_size}
    fixed: Any = {"scatter_gather": scatter_gather, "fuse": fuse, "layout": layout, "rules": rules}
    end_with_launcher()  # compiling takes its time, and comes before bind
    check_known(compile, unknown)
    check_seed(seed)
    check_planned(mesh, world_size, global_batch, cluster, num_microbatches)
    own: Any = {"seed": seed, "initializer": initializer, "cluster": cluster}
    if isinstance(mesh, str) and mesh == "auto":
        free: Any = {"schedule": schedule, "num_model_chunks": num_model_chunks, "recompute": recompute}
        size: Any = {"world_size": world_size, "global_batch": global_batch, "cluster": cluster}
        plans = plan(model, **size, **given, **fixed, **free)
        found = (compile(model, **{**given, **fixed, **own, **one.options}) for one in plans if one.simulated)
        return choose_fitting(found, Cluster.load(size["cluster"]))
    settled = "interleaved_1f1b" if schedule is None else schedule
    options = Options("none" if recompute is None else recompute, fuse, layout, rules)
    check_modes(schedule=settled, recompute=options.recompute, layout=layout)
    check_flags(fuse=fuse, scatter_gather=scatter_gather)
    counts: Any = {"num_microbatches": num_microbatches, "num_model_chunks": num_model_chunks}
    check_free_counts(microbatch_size=microbatch_size, **counts)
    job = _Job(model, read_mesh(mesh), loss_fn, settled, options, scatter_gather, **counts, **own)
    return _compile(job, list_examples(example_inputs), microbatch_size)


@dataclass(frozen=True)
class _Job:
    """What the user gave, settled: the same for all input shapes."""

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
        """Microbatches a step."""
        return self.num_microbatches or 8 * self.mesh.pipeline

    def divide(
        self, example: Any, microbatch_size: int | None, watch: Watch, first: Program | None = None
    ) -> Program:
        """Capture the model at the shape of `example`, and divide it over the tensor ranks; `first`: as that one."""
        watch.say("capture")
        given: Any = {"example_inputs": example, "microbatch_size": microbatch_size, "loss_fn": self.loss_fn}
        captured = capture(self.model, mesh=self.mesh, **given)
        captured = captured if first is None else guess_batch(captured, first)
        with leave_autocast():
            program = read_initial(captured, model=self.model, initializer=self.initializer)
            program = run_passes(passes_to_the_division(self.options.layout), program, watch, keep_text)
            program = mark_expanded(program, self.options.layout, self.model, self.loss_fn)
            program = replace(program, model_flops=count_flops(program.stages[0]))
            return run_passes(passes_to_the_cut(self.options.rules), program, watch, keep_text)

    def finish(
        self, cut: Program, divided: Program, actions: Schedule, watch: Watch, shape: int = 0
    ) -> CompiledProgram:
        """Rewrite the stages of a `cut` program, which was `divided` before; emit them, and check what was emitted."""
        keep_text(cut, "cut stages")
        passes = passes_from_the_cut(self.options.recompute, self.options.fuse)
        program = run_passes(passes, cut, watch, keep_text)
        watch.say("emit and check")
        parameters = divided.stages[0].parameters
        manifest = replace(
            _describe(program, parameters, self.model, self.loss_fn),
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
        return _emit(program, manifest, actions, self.model, self.loss_fn, self.options)


@paused_collector()
def _compile(job: _Job, examples: Sequence[Any], microbatch_size: int | None) -> CompiledProgram:
    """Walk the corridor with each of `examples`; where the first is divided and cut, the others are too."""
    check_examples(job.model, examples, job.loss_fn, microbatch_size)
    described = None if job.cluster is None else Cluster.load(job.cluster)
    with Watch("compile") as watch:
        divided = job.divide(examples[0], microbatch_size, watch)
        with leave_autocast():
            watch.say("finish uncut")
            uncut = Uncut(divided, job.options.recompute, job.options.fuse)
            chunks = job.num_model_chunks or _default_chunks(uncut, job.schedule, job.count)
            # Refuses before the cut is solved.
            actions = make_schedule(job.schedule, job.mesh.pipeline, job.count, chunks)

            def find(besides: Sequence[int]) -> Found:
                watch.say("cut stages")
                return find_cut(
                    uncut,
                    num_stages=job.mesh.pipeline * chunks,
                    schedule=job.schedule,
                    num_microbatches=job.count,
                    cluster=described,
                    besides=besides,
                )

            def finish(found: Found) -> CompiledProgram:
                cut = cut_at(divided, found.positions, found.entry)
                return job.finish(cut, divided, actions, watch)

            positions, first = fit_program(find, finish, described)
        further = []
        for number, example in enumerate(examples[1:], 1):
            with naming_shape(number, example):
                other = job.divide(example, None, watch, divided)
                other = rename_own(keep_whole(other, divided), number)
                with leave_autocast():
                    aligned = align_cut(other, divided, positions)
                    cut = cut_at(other, aligned, "cut_stages where the first input shape is cut")
                    program = job.finish(cut, other, actions, watch, number)
                reason = find_disagreement(first.manifest, program.manifest)
                if reason:
                    raise ValueError(
                        f"{reason}; all shapes train the same parameters: compile this one alone"
                    )
                further.append(program)
    return _join(first, further)


def _join(first: CompiledProgram, further: Sequence[CompiledProgram]) -> CompiledProgram:
    """The program of all shapes: values that one was proved of are those of all."""
    proved = {own.name: own for program in (first, *further) for own in program.manifest.proved}
    manifest = replace(
        first.manifest, proved=tuple(proved[name] for name in sorted(proved)), num_shapes=1 + len(further)
    )
    return replace(first, manifest=manifest, further=tuple(further))


def _describe(
    program: Program,
    parameters: Mapping[str, Parameter],
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
) -> Manifest:
    """The manifest, as far as the cut program says it: of one microbatch under the plainest schedule."""
    return Manifest(
        mesh=program.mesh,
        schedule="gpipe",
        num_model_chunks=len(program.stages) // program.mesh.pipeline,
        num_microbatches=1,
        microbatch_size=_microbatch_size(program),
        scatter_gather=True,
        seed=0,
        inputs=describe_rows(program, describe_labels(program)),
        stages=_interfaces(program),
        parameters=parameters,
        aliases=program.aliases,
        output=program.output,
        fixed=program.fixed,
        layers=name_layers(model),
        training=model.training,
        transient=_transient(parameters, model),
        model_flops=program.model_flops,
        arguments=read_arguments(model, loss_fn),
        uninitialized=program.uninitialized,
        proved=_proofs(program, parameters),
        scales_loss=any(_is_float16(node) for stage in program.stages for node in stage.graph.nodes),
    )


def _emit(
    program: Program,
    manifest: Manifest,
    schedule: Schedule,
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    options: Options,
) -> CompiledProgram:
    """Write the texts, and prove what they say."""
    title = _title(type(model).__name__, manifest.parameters)
    flops = [sum(forward_work(node).flops for node in stage.graph.nodes) for stage in program.stages]
    texts = emit_texts(program, manifest, schedule, title=title, flops=flops)
    result = CompiledProgram(
        program.stages,
        program.log,
        texts,
        manifest,
        program.buffers,
        title,
        model,
        loss_fn,
        program.symbols,
        options,
    )
    uncovered = result.check()
    if not uncovered:
        return result
    entry = f"check does not cover {len(uncovered)} operators, so verify: {uncovered[0]}"
    return replace(result, log=(*result.log, entry))


def load(folder: str | Path) -> CompiledProgram:
    """Load the program that `CompiledProgram.save` wrote, with edits: stages are traced anew from the texts.

    Runs the code in the folder's texts. Raises ValueError for a folder that is incomplete, or a text that does not
    trace; `ProgramError` if the program contradicts itself.
    """
    end_with_launcher()
    name = Path(folder).resolve().name
    first = _load(Path(folder), name)
    numbers = range(1, first.manifest.num_shapes)
    further = tuple(_load(Path(folder) / shape_folder(number), name) for number in numbers)
    result = replace(first, further=further)
    result.check_shapes()
    return result


def _load(folder: Path, name: str) -> CompiledProgram:
    """The program of one input shape, checked by itself."""
    texts, manifest, buffers = load_folder(folder)
    program = trace_program(texts, manifest, buffers=buffers)
    title = _title(name, manifest.parameters)
    result = CompiledProgram(program.stages, program.log, texts, manifest, buffers, title)
    with naming_program(manifest):
        check_program(manifest, program.stages, result.schedule)
    return result


def _default_chunks(uncut: Uncut, schedule: str, num_microbatches: int) -> int:
    """Stages per pipeline rank: 2 where the schedule and the model allow it."""
    pipeline = uncut.program.mesh.pipeline
    interleaves = schedule == "interleaved_1f1b" and num_microbatches % pipeline == 0 and pipeline > 1
    return 2 if interleaves and uncut.units >= 2 * pipeline else 1


def _microbatch_size(program: Program) -> int:
    """Sequences per microbatch: the batch dimension of the inputs that have one."""
    return min((i.shape[i.batch_dim] for i in program.inputs if i.batch_dim is not None), default=1)


def _interfaces(program: Program) -> tuple[StageInterface, ...]:
    """What each stage takes and gives, read off the graphs: it sends what the next receives."""
    received = boundaries(program)
    return tuple(
        StageInterface(
            index,
            received[index],
            received[index + 1] if index + 1 < len(received) else (),
            tuple(str(n.target) for n in stage.graph.nodes if info(n).role == "input"),
            tuple(stage.parameters),
        )
        for index, stage in enumerate(program.stages)
    )


def _transient(parameters: Mapping[str, Parameter], model: nn.Module) -> tuple[str, ...]:
    """Buffers that the user's ``state_dict`` does not have."""
    saved = model.state_dict().keys()
    return tuple(sorted(name for name, p in parameters.items() if p.kind == "buffer" and name not in saved))


def _is_float16(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16


def _proofs(program: Program, parameters: Mapping[str, Parameter]) -> tuple[Proved, ...]:
    """The buffers that the program was proved of, each with the hash of its values."""
    buffers = ((name, program.buffers[name], parameters[name].dtype) for name in sorted(program.proved))
    return tuple(Proved(name, hash_values(values, dtype)) for name, values, dtype in buffers)


def _title(name: str, parameters: Mapping[str, Parameter]) -> str:
    """A name, and the parameters of the whole model, tied ones once."""
    count = sum(torch.Size(p.shape).numel() for p in parameters.values() if p.kind == "parameter")
    return f"{name}, {count:,} parameters"
