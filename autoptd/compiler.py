"""compile: capture, the pipeline of passes, emission, proof. The one file that knows the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoptd.archive import load_folder
from autoptd.capture import capture
from autoptd.check import check_program
from autoptd.compiled import CompiledProgram
from autoptd.emit import emit_texts
from autoptd.example_inputs import read_arguments
from autoptd.initialization import read_initial
from autoptd.options import check_counts, check_known, check_modes, read_mesh
from autoptd.passes.attention import recognize_attention
from autoptd.passes.constants import fold_constants
from autoptd.passes.cost import node_flops
from autoptd.passes.fusion import fuse_operators
from autoptd.passes.layout import rewrite_layout
from autoptd.passes.normalize import normalize
from autoptd.passes.program import Program
from autoptd.passes.recompute import recompute_activations
from autoptd.passes.sharding import shard_tensors
from autoptd.passes.stages import boundaries, count_units, cut_stages
from autoptd.runtime.manifest import Manifest, StageInterface
from autoptd.runtime.placement import Parameter
from autoptd.runtime.schedule import Schedule, make_schedule
from autoptd.tracing import trace_program
from autoptd.watch import Watch

Passes = tuple[tuple[str, Callable[[Program], Program]], ...]


def compile(
    model: nn.Module,
    mesh: object,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
    schedule: str = "interleaved_1f1b",
    num_model_chunks: int | None = None,
    scatter_gather: bool = True,
    recompute: str | int = "none",
    fuse: bool = True,
    layout: str = "sbh",
    rules: Mapping[Any, str] | None = None,
    seed: int = 0,
    initializer: Callable[[nn.Module], object] | None = None,
    **unknown: object,
) -> CompiledProgram:
    """Compile a plain model into the program that trains it on ``tensor x pipeline x data`` devices.

    Runs anywhere: no GPU, no process group. `model` is never modified; its weights may be on the meta device.

    Args:
        model: an nn.Module or fx.GraphModule that returns its loss (or its output, with `loss_fn`).
        mesh: (tensor, pipeline, data), or a DeviceMesh with dims "tp", "pp", "dp".
        example_inputs: a dict or tuple for ONE microbatch, for its shapes and dtypes; None: from the model's config
        loss_fn: ``loss_fn(output, **targets)``; its further arguments become batch inputs.
        microbatch_size: b, sequences; default the example's, else 1.
        num_microbatches: m per pipeline and step; default 8 p. A step takes b * m * d sequences.
        schedule: "gpipe", "1f1b" or "interleaved_1f1b" (SC21 §2.2).
        num_model_chunks: v stages per pipeline rank; default 2 where p > 1 and the model allows it, else 1.
        scatter_gather: send 1/t of a replicated boundary tensor per tensor rank, all-gather on arrival (SC21 §4.1).
        recompute: "none", "selective", "full", every k layers, or "optimal" (SC21 §3.5; passes/recompute.py).
        fuse: join chains of memory-bound operators into one kernel each (SC21 §4.2; passes/fusion.py).
        layout: "sbh" holds activations [s, b, h] where that copies no more memory (SC21 §4.2), "bsh" as the user does.
        rules: sharding rules of custom operators, e.g. ``{"mylib.op": "b s h!, h -> b s h"}`` (passes/axis_rules.py).
        seed: of dropout masks and of a meta model's first weights; they depend on neither mesh nor microbatch size.
        initializer: initialises the model in place, for one on the meta device whose constructor does not say it.

    Raises TypeError or ValueError for what the user gave, `ProgramError` if the result contradicts itself.
    """
    check_known(compile, unknown)
    check_modes(schedule=schedule, recompute=recompute, layout=layout, fuse=fuse)
    check_counts(
        microbatch_size=microbatch_size, num_microbatches=num_microbatches, num_model_chunks=num_model_chunks
    )
    placed = read_mesh(mesh)
    count = num_microbatches or 8 * placed.pipeline
    given = {"example_inputs": example_inputs, "loss_fn": loss_fn, "microbatch_size": microbatch_size}
    with Watch("compile") as watch:
        watch.say("capture")
        captured = capture(model, mesh=placed, **given)  # type: ignore[arg-type]
        program = read_initial(captured, model=model, initializer=initializer)
        program = _run(_passes_to_the_cut(rules, layout), program, watch)
        parameters = program.stages[0].parameters
        chunks = num_model_chunks or _default_chunks(program, schedule, count)
        actions = make_schedule(schedule, placed.pipeline, count, chunks)  # refuses before the cut is solved
        watch.say("cut stages")
        program = cut_stages(program, num_stages=placed.pipeline * chunks)
        program = _run(_passes_from_the_cut(recompute, fuse), program, watch)
        watch.say("emit and check")
        manifest = replace(
            _describe(program, parameters, model, loss_fn),
            schedule=schedule,
            num_microbatches=count,
            scatter_gather=scatter_gather,
            seed=seed,
        )
        return _emit(program, manifest, actions, model, loss_fn)


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
        inputs=program.inputs,
        stages=_interfaces(program),
        parameters=parameters,
        aliases=program.aliases,
        output=program.output,
        transient=_transient(parameters, model),
        arguments=read_arguments(model, loss_fn),
        uninitialized=program.uninitialized,
    )


def _emit(
    program: Program,
    manifest: Manifest,
    schedule: Schedule,
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
) -> CompiledProgram:
    """Write the texts, and prove what they say."""
    title = f"{type(model).__name__}, {_count(manifest.parameters):,} parameters"
    flops = [sum(map(node_flops, stage.graph.nodes)) for stage in program.stages]
    texts = emit_texts(program, manifest, schedule, title=title, flops=flops)
    result = CompiledProgram(
        program.stages, program.log, texts, manifest, program.buffers, title, model, loss_fn
    )
    result.check()
    return result


def load(folder: str | Path) -> CompiledProgram:
    """The program that `CompiledProgram.save` wrote, edits included: stages are traced anew from the texts.

    Runs the code in the folder's texts. Raises ValueError for a folder that is incomplete, or a text that does not
    trace; `ProgramError` if the program contradicts itself.
    """
    texts, manifest, buffers = load_folder(folder)
    program = trace_program(texts, manifest, buffers=buffers)
    result = CompiledProgram(program.stages, program.log, texts, manifest, buffers, Path(folder).name)
    check_program(manifest, program.stages, result.schedule)
    return result


def _run(passes: Passes, program: Program, watch: Watch) -> Program:
    """Walk the corridor: each pass makes the next program."""
    for name, step in passes:
        watch.say(name)
        program = step(program)
    return program


def _passes_to_the_cut(rules: Mapping[Any, str] | None, layout: str) -> Passes:
    moving: Passes = (("rewrite layout", rewrite_layout),) if layout == "sbh" else ()
    return (
        ("normalize", normalize),
        ("fold constants", fold_constants),
        ("recognize attention", recognize_attention),
        *moving,
        ("shard tensors", partial(shard_tensors, rules=rules)),
    )


def _passes_from_the_cut(recompute: str | int, fuse: bool) -> Passes:
    """Layers are found before a kernel joins the end of one with the begin of the next."""
    fusing: Passes = (("fuse operators", fuse_operators),) if fuse else ()
    return (("recompute activations", partial(recompute_activations, recompute=recompute)), *fusing)


def _default_chunks(program: Program, schedule: str, num_microbatches: int) -> int:
    """Stages per pipeline rank: 2 where the schedule and the model allow it."""
    pipeline = program.mesh.pipeline
    interleaves = schedule == "interleaved_1f1b" and num_microbatches % pipeline == 0 and pipeline > 1
    return 2 if interleaves and count_units(program) >= 2 * pipeline else 1


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
            tuple(str(n.target) for n in stage.graph.nodes if n.meta.get("role") == "input"),
            tuple(stage.parameters),
        )
        for index, stage in enumerate(program.stages)
    )


def _transient(parameters: Mapping[str, Parameter], model: nn.Module) -> tuple[str, ...]:
    """Buffers that the user's ``state_dict`` does not have."""
    saved = model.state_dict().keys()
    return tuple(sorted(name for name, p in parameters.items() if p.kind == "buffer" and name not in saved))


def _count(parameters: Mapping[str, Parameter]) -> int:
    """Parameters of the whole model, tied ones once."""
    return sum(torch.Size(p.shape).numel() for p in parameters.values() if p.kind == "parameter")
