"""`autoptd.compile`: capture, the pipeline of passes, emission and proof. The one file that knows the whole."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoptd import input_shapes, options
from autoptd.capture.autocast_state import leave_autocast
from autoptd.capture.broadcast_dropout import mark_expanded
from autoptd.capture.export import capture
from autoptd.capture.fake_module import leave_modes
from autoptd.capture.quantized_modules import read_quantized
from autoptd.capture.results import Outputs
from autoptd.compiled import CompiledProgram
from autoptd.description import describe_program, write_title
from autoptd.gc_pause import collect_garbage, paused_collector
from autoptd.loss import describe_means
from autoptd.options import Options
from autoptd.pass_list import run_passes, select_passes
from autoptd.passes.cost.call_work import count_flops
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Durations, Precision
from autoptd.passes.ir.program import Program
from autoptd.passes.stages.cut import align_cut, cut_at
from autoptd.passes.stages.fused_order import FusedOrder
from autoptd.passes.tensor_parallel.sequence import has_divided_tokens
from autoptd.planning.layer_costs import LayerCosts
from autoptd.planning.search import plan
from autoptd.planning.stage_cut import describe_cut, find_cut
from autoptd.progress import Say, show_progress
from autoptd.runtime.launch import end_with_launcher
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import check_shape, make_schedule
from autoptd.runtime.user_warnings import warn_caller
from autoptd.simulate.step import Training
from autoptd.text.writer import emit_texts, keep_text
from autoptd.weights.deferred_init import read_initial

MOST_CUTS = 3  # programs that are made of one model, each cut in less memory than the one before


def compile(
    model: nn.Module,
    mesh: object,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    outputs: Outputs = (),
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    num_model_chunks: int | None = None,
    scatter_gather: bool = True,
    recompute: str | int | None = None,
    fuse: bool = True,
    layout: str = "sbh",
    rules: Mapping[Any, str] | None = None,
    sequence_parallel: bool | None = None,
    expert: int | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    initializer: Callable[[nn.Module], object] | None = None,
    world_size: int | None = None,
    global_batch: int | None = None,
    cluster: Cluster | str | Path | None = None,
    dtype: str | None = None,
    overlap: bool = True,
    zero: int = 0,
    wide_gradients: bool = True,
) -> CompiledProgram:
    """Compile a plain model into the program that trains it on ``tensor x pipeline x data`` devices.

    Runs anywhere: no GPU, no process group. `model` is never modified; its weights may be on the meta device. Raises
    TypeError or ValueError for what the user gave, `ProgramError` if the result contradicts itself.

    Args:
        model: an nn.Module or fx.GraphModule that returns its loss (or its output, with `loss_fn`).
        mesh: (tensor, pipeline, data), a DeviceMesh with dims "tp", "pp", "dp", or "auto" for `world_size` devices and
            `global_batch` sequences a step: see `autoptd.plan`, which also chooses what is None of its arguments.
        example_inputs: a dict or tuple for ONE microbatch, for its shapes and dtypes; None: from the model's config. A
            list of these: several input shapes; the first decides plan and division, and is the one simulated.
        loss_fn: ``loss_fn(output, **targets)``; its further arguments become batch inputs.
        outputs: fields of the model's output that a call returns besides the loss; True: all that hold tensors.
        microbatch_size: b, default the example's, else 1; num_microbatches: m, default 8 p. A step takes b * m * d.
        schedule: "gpipe", "1f1b" or "interleaved_1f1b" (SC21 §2.2), the default.
        num_model_chunks: v stages per pipeline rank; default 2 where p > 1 and the model allows it, else 1.
        scatter_gather: send 1/t of a replicated boundary tensor per tensor rank, all-gather on arrival (SC21 §4.1).
        recompute: "none" (default), "selective", "full", every k layers, or "optimal" (SC21 §3.5; passes/recompute.py).
        fuse: join chains of memory-bound operators into one kernel each (SC21 §4.2; passes/fusion/rules.py).
        layout: "sbh" holds activations [s, b, h] where that copies no more memory (SC21 §4.2), "bsh" as the user does.
        rules: sharding rules of custom operators, e.g. ``{"mylib.op": "b s h!, h -> b s h"}`` (see `text_rule`).
        sequence_parallel: divide the tokens between divided regions; None: where it is faster, or fits the `cluster`.
        expert: the ranks over which experts of a mixture are divided, t times a divisor of d; default t.
        device: the type that forward sees, as "cuda", on any machine; default that of the weights, for meta "cpu".
        seed: of dropout masks and of a meta model's first weights; they depend on neither mesh nor microbatch size.
        initializer: initialises the model in place, for one on the meta device whose constructor does not say it.
        cluster: balances stages by its times, in its memory if any cut fits; default "dgx-a100", of any memory.
        dtype, overlap, zero, wide_gradients: how steps will run there, which the cut relies on: see `simulate`.
    """
    given: Any = dict(locals())  # all arguments, by their names
    end_with_launcher()  # compiling takes its time, and comes before bind
    options.check_seed(seed)
    if options.check_planned(given):
        shared = signature(plan).parameters.keys() & given.keys() - {"mesh"}
        given |= plan(**{name: given[name] for name in shared})[0].options
    return _compile(**{name: x for name, x in given.items() if name not in ("world_size", "global_batch")})


@paused_collector()
@leave_modes()
def _compile(model: nn.Module, *, example_inputs: Any, microbatch_size: int | None, **job: Any) -> CompiledProgram:
    """Compile the `model` for one mesh, with the other arguments of `compile`.

    Further input shapes are divided and cut where the first one is.
    """
    known = options.fold_experts(options.read_mesh(job.pop("mesh")), job.pop("expert"))
    defaults = {"schedule": "interleaved_1f1b", "num_microbatches": 8 * known.pipeline, "recompute": "none"}
    job |= {name: value for name, value in defaults.items() if job[name] is None}
    job["cluster"] = None if job["cluster"] is None else Cluster.load(job["cluster"])
    job["training"] = Training(job["overlap"], *(job.pop(name) for name in ("zero", "wide_gradients")))
    chosen = Options(**{field.name: job.pop(field.name) for field in fields(Options)})
    options.check_modes(schedule=job["schedule"], recompute=chosen.recompute, layout=chosen.layout)
    by_tokens = chosen.sequence_parallel
    options.check_flags(fuse=chosen.fuse, scatter_gather=job["scatter_gather"], sequence_parallel=by_tokens or False)
    counts = {name: job[name] for name in ("num_microbatches", "num_model_chunks")}
    options.check_free_counts(microbatch_size=microbatch_size, **counts)
    examples = input_shapes.list_examples(example_inputs)
    if by_tokens is None and len(examples) > 1:  # of which t may divide some
        chosen = replace(chosen, sequence_parallel=False)
    with show_progress("compile") as say:
        settled = _Job(read_quantized(model), known, chosen, say, **job)
        divided, positions, first = settled.fit(examples[0], microbatch_size)
        further = []
        for number, example in enumerate(examples[1:], 1):
            with input_shapes.naming_shape(number, example):
                other = input_shapes.rename_own(settled.divide(example, None, divided), number)
                with leave_autocast():
                    entry = "cut_stages where the first input shape is cut"
                    further.append(settled.finish(other, align_cut(other, divided, positions), entry, number))
                if why := input_shapes.find_disagreement(first.manifest, further[-1].manifest):
                    raise ValueError(f"{why}; all shapes train the same parameters: compile this one alone")
    # Buffer values that the program of one shape relies on hold for all.
    proved = (pair for program in (first, *further) for pair in program.manifest.proved.items())
    manifest = replace(first.manifest, proved=dict(sorted(proved)), num_shapes=len(examples))
    return replace(first, manifest=manifest, further=tuple(further))


@dataclass(frozen=True)
class _Job:
    """The settled arguments of one compilation, the same for all input shapes."""

    model: nn.Module
    mesh: Mesh
    options: Options
    say: Say
    schedule: str
    num_microbatches: int
    loss_fn: Callable[..., torch.Tensor] | None
    outputs: Outputs
    scatter_gather: bool
    num_model_chunks: int | None
    dtype: str | None
    training: Training
    seed: int
    initializer: Callable[[nn.Module], object] | None

    def divide(self, example: Any, microbatch_size: int | None, first: Program | None = None) -> Program:
        """Capture the model at the shape of `example` and divide it over the tensor ranks, as `first` was."""
        self.say("capture")
        given: Any = {"loss_fn": self.loss_fn, "outputs": self.outputs, "device": self.options.device}
        trace = partial(capture, self.model, mesh=self.mesh, **given)
        captured = trace(example_inputs=example, microbatch_size=microbatch_size)
        captured = captured if first is None else input_shapes.guess_batch(captured, first)
        arrange = select_passes(self.options, "arrange")
        with leave_autocast():
            program = read_initial(captured, model=self.model, initializer=self.initializer)
            program = run_passes(arrange, program, self.say, keep_text)
            program = mark_expanded(
                program, lambda two: run_passes(arrange, trace(example_inputs=two, microbatch_size=2), lambda _: None)
            )
            program = replace(program, model_flops=count_flops(program.stages[0]))
            program = run_passes(select_passes(self.options, "divide"), program, self.say, keep_text)
        return program if first is None else input_shapes.keep_whole(program, first)

    def search(self, divided: Program) -> Callable[[int | None], tuple[tuple[int, ...], str, Sequence[int]]]:
        """Return the search for a cut of the `divided` program, which alone holds the kernels that it times.

        Within a limit it finds where a cut stands, its line for the log, and the bytes of the ranks. Raises ValueError,
        before any search, for a schedule that cannot run on the pipeline ranks.
        """
        self.say("finish uncut")
        p, m = self.mesh.pipeline, self.num_microbatches
        fused_order = FusedOrder(divided, select_passes(self.options, "finish"))
        precision = Precision.of(divided.stages, self.dtype)
        costs = LayerCosts(fused_order, 0, Durations(self.cluster, self.mesh, precision, self.training.overlap))
        interleaves = self.schedule == "interleaved_1f1b" and m % p == 0 and p > 1
        chunks = self.num_model_chunks or (2 if interleaves and costs.units >= 2 * p else 1)
        check_shape(self.schedule, p, m, chunks)
        run: Any = {"training": self.training, "scatter_gather": self.scatter_gather}

        def find(limit: int | None) -> tuple[tuple[int, ...], str, Sequence[int]]:
            self.say("cut stages")
            cut, held = find_cut(costs, self.mesh, self.schedule, m, chunks, limit=limit, **run)
            full = f"; no cut was found to fit in {limit / 1e9:.4g} GB a rank" if limit and max(held) > limit else ""
            return cut.positions, describe_cut(cut, p, self.cluster.name) + full, held

        return find

    @property
    def cluster(self) -> Cluster:
        """The cluster by whose times stages are balanced."""
        return self.options.cluster or Cluster.load("dgx-a100")

    def fit(self, example: Any, size: int | None, *log: str) -> tuple[Program, Sequence[int], CompiledProgram]:
        """Return the divided program, a cut and the compiled program, within the memory of a given cluster if possible.

        Tokens are divided where whole ones do not fit, if nobody decided that. Warns if no cut is found to fit.
        """
        divided = self.divide(example, size)
        divided = replace(divided, log=(*divided.log, *log))
        collect_garbage()
        with leave_autocast():
            find = self.search(divided)
            if self.options.cluster is None:
                positions, entry, _ = find(None)
                del find  # and the kernels that it timed, before the program is made
                return divided, positions, self.finish(divided, positions, entry)
            limit = most = int(self.cluster.device.usable_bytes)
            for _ in range(MOST_CUTS):
                positions, entry, held = find(limit)
                program = self.finish(divided, positions, entry)
                memory = program.simulate(self.cluster, self.dtype, **vars(self.training)).memory_bytes
                over = max(memory) - most
                if over <= 0 or max(held) > limit:
                    break
                limit -= over  # which the sums of items did not know
        if over > 0:
            whole = self.mesh.tensor > 1 and not has_divided_tokens(divided.stages[0].graph)
            if whole and self.options.sequence_parallel is None:
                other = replace(self, options=replace(self.options, sequence_parallel=True))
                why = f"tokens divided: with whole ones a rank holds {over:,} bytes more than {self.cluster.name} has"
                return other.fit(example, size, why)
            warn_caller(
                f"the program does not fit {self.cluster.name}: pipeline rank {memory.index(max(memory))} holds "
                f"{max(memory):,} bytes, {over:,} more than a device's {most:,}, and no better cut was found; more "
                'pipeline ranks, a smaller microbatch or recompute="full" hold less (see autoptd.plan)'
            )
        return divided, positions, program

    def finish(self, divided: Program, positions: Sequence[int], entry: str, shape: int = 0) -> CompiledProgram:
        """Cut the `divided` program at `positions`, rewrite its stages, emit and check their texts."""
        cut = cut_at(divided, positions, entry)
        collect_garbage()
        keep_text(cut, "cut stages")
        program = run_passes(select_passes(self.options, "finish"), cut, self.say, keep_text)
        self.say("emit and check")
        parameters = divided.stages[0].parameters
        job = {n: getattr(self, n) for n in ("schedule", "num_microbatches", "scatter_gather", "seed")}
        job |= {"recompute": self.options.recompute, "shape": shape}
        manifest = describe_program(program, parameters, self.model, self.loss_fn, **job)
        if shape == 0 and self.num_microbatches * self.mesh.data > 1:
            for text in describe_means(program, divided):
                warn_caller(text)
        title = write_title(type(self.model).__name__, parameters)
        # A long pipeline's schedule is large, so it is not kept: the check reads it from the texts.
        order = self.schedule, self.mesh.pipeline, self.num_microbatches, manifest.num_model_chunks
        texts = emit_texts(program, manifest, make_schedule(*order), title=title)
        known = program.buffers, title, self.model, self.loss_fn, program.symbols, self.options
        result = CompiledProgram(program.stages, program.log, texts, manifest, *known)
        if uncovered := result.check():
            entry = f"check does not cover {len(uncovered)} operators, so verify: {uncovered[0]}"
            result = replace(result, log=(*result.log, entry))
        return result
