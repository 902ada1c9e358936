"""The result of `autoptd.compile` and `autoptd.load`: the texts that run, with methods to check and bind them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.capture.export import check_model
from autoptd.capture.quantized_modules import read_quantized
from autoptd.check.program import ProgramError, check_program
from autoptd.description import write_title
from autoptd.gc_pause import paused_collector
from autoptd.input_shapes import describe_shape, find_disagreement, naming_program
from autoptd.options import Options, check_seed
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.ir.program import Stage
from autoptd.passes.tensor_parallel.symbols import DimensionSymbols
from autoptd.planning.explanation import Explanation, explain_program
from autoptd.reports.overview import Overview
from autoptd.reports.page import write_page
from autoptd.reports.summary import summarize
from autoptd.runtime.engine.batch import find_shape
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.engine.graphs import check_queues, graph_devices
from autoptd.runtime.guards.optimizer_watch import refuse_forgotten
from autoptd.runtime.guards.weight_agreement import compare_weights
from autoptd.runtime.health.malloc import disable_malloc_trim
from autoptd.runtime.launch import end_with_launcher, join
from autoptd.runtime.module.parallel import Parallel, signed
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import Action
from autoptd.runtime.weights.file_tensor import Weights
from autoptd.runtime.weights.slices import check_proof
from autoptd.simulate.step import Simulation, Training, simulate_program
from autoptd.simulate.symbolic_cost import Cost
from autoptd.text.folder import load_folder, program_hash, save_folder
from autoptd.text.rank_program import RankProgram
from autoptd.text.reader import read_text, read_texts, shape_folder, trace_program, trace_texts
from autoptd.verification.report import Report
from autoptd.verification.step import verify_program
from autoptd.weights.sources import check_given, check_parameters, check_values, read_weights


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """The parallel program: `texts`, one per pipeline rank, are what runs; `stages` are the same as graphs.

    `manifest` has the plan in numbers, `log` a line per pass. `model` is the user's own module: `bind` takes its
    weights, and `verify` compares with it. `options` are those of the passes, unless it is loaded. `further`
    are the programs of further input shapes, with the same parameters in the same places: bound, they are one model.
    """

    stages: tuple[Stage, ...]
    log: tuple[str, ...]
    texts: tuple[str, ...]
    manifest: Manifest
    buffers: Mapping[str, Tensor] = field(repr=False)
    title: str = ""
    model: nn.Module | None = field(default=None, repr=False)
    loss_fn: Callable[..., Tensor] | None = field(default=None, repr=False)
    symbols: DimensionSymbols | None = field(default=None, compare=False, repr=False)
    options: Options | None = field(default=None, repr=False)
    further: tuple[CompiledProgram, ...] = field(default=(), repr=False)

    @property
    def shapes(self) -> tuple[CompiledProgram, ...]:
        """Return the program of each compiled input shape, this one first."""
        return self, *self.further

    @property
    def mesh(self) -> Mesh:
        return self.manifest.mesh

    @cached_property
    @paused_collector()
    def schedule(self) -> tuple[tuple[Action, ...], ...]:
        """Every pipeline rank's actions in one step: the SCHEDULE of its text."""
        return tuple(program.actions for program in read_texts(self.texts, self.manifest))

    def __str__(self) -> str:
        """Describe the plan and its costs."""
        return summarize(self.overview)

    @cached_property
    def overview(self) -> Overview:
        """The data that ``print(program)`` shows."""
        shapes = tuple(describe_shape(program.manifest) for program in self.shapes)
        return Overview.of(self.manifest, self.stages, self.schedule, self.log, self.title, shapes)

    @cached_property
    def cost(self) -> Cost:
        """The work, traffic and memory of a step as sympy expressions in the symbols of the field."""
        return Cost(self.stages, self.manifest, self.symbols)

    def rank(self, rank: int) -> RankProgram:
        """Return the program of one global rank. Raises ValueError outside the mesh."""
        return RankProgram(self.manifest, rank, self.texts[self.mesh.coordinates(rank).pipeline])

    @paused_collector()
    def check(self) -> tuple[str, ...]:
        """Prove over all ranks, without running anything, that the texts do not contradict themselves.

        The graphs are traced from the texts, which are what runs. Returns a line for each operator of an edited text
        or of `rules` that the proof does not cover: run `verify` for these. Raises `ProgramError` naming the first
        contradiction (autoptd/check/program.py lists the proofs), ValueError for a text that cannot be traced.
        """
        uncovered: list[str] = []
        for program in self.shapes:
            with naming_program(program.manifest):
                texts = read_texts(program.texts, program.manifest)
                traced = trace_texts(texts, program.manifest, program.buffers)
                uncovered += check_program(program.manifest, traced.stages, tuple(text.actions for text in texts))
        self.check_shapes()
        return tuple(uncovered)

    def check_shapes(self) -> None:
        """Raise `ProgramError` unless the programs of all input shapes train the same parameters in the same order."""
        for program in self.further:
            with naming_program(program.manifest):
                reason = find_disagreement(self.manifest, program.manifest)
                if not reason and program.schedule != self.schedule:
                    reason = "its SCHEDULE differs from the first shape's: make the same edit in both"
                if reason:
                    raise ProgramError(reason)

    def verify(
        self,
        *,
        model: nn.Module | None = None,
        weights: str | Mapping[str, Tensor] | None = None,
        batch: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        dtype: str = "float64",
    ) -> Report:
        """Run one step of all ranks on this machine in float64 and compare loss and every gradient.

        Verifies every input shape, or only the shape of a given `batch`.

        See `autoptd.verification.step.verify_program` for the arguments and what is raised.
        """
        check_seed(seed)
        reference = self.model if model is None else model
        if reference is None:
            raise ValueError("a loaded program has no model to compare with; call verify(model=...)")
        reference = read_quantized(reference)
        check_model(reference)
        programs: Sequence[CompiledProgram] = self.shapes
        if batch is not None:
            count = self.manifest.num_microbatches * self.mesh.data
            whole = [replace(program.manifest, num_microbatches=count) for program in programs]
            programs = [programs[find_shape(whole, batch)]]
        given: Any = {"weights": weights, "batch": batch, "seed": seed, "dtype": dtype}
        reports = []
        for own in programs:
            known = own.texts, own.manifest, own.buffers, reference, self.loss_fn
            shape = describe_shape(own.manifest) if self.further else ""
            reports.append(replace(verify_program(*known, **given), shape=shape))
        return replace(reports[0], further=tuple(reports[1:]))

    @paused_collector()
    def simulate(
        self,
        cluster: Cluster | str | Path,
        dtype: str | None = None,
        *,
        overlap: bool = True,
        zero: int = 0,
        wide_gradients: bool = True,
    ) -> Simulation:
        """Time one training step on `cluster` and count the memory of every pipeline rank, without any device.

        Follows every action of the schedule, with times of the stages' operators: computing, memory, communication.

        Args:
            cluster: see `Cluster.load`, which takes a name or path too.
            dtype: "bf16", "fp32", …: the type to compute in; default the one that the program was captured in. The
                memory that a loss needs for logits in half precision is known only if the model is compiled in it.
            overlap: the sender goes on while it sends, gradients are summed over the replicas while backwards run, and
                over the tensor ranks while those of weights are computed, as in the runtime; False: one after the
                other, as Megatron-LM did in SC21.
            zero: 1 divides the optimizer's states among the replicas (ZeRO's first stage; `shard_optimizer`).
            wide_gradients: gradients are kept and summed in at least float32, as in the runtime; False: in `dtype`.

        Raises ValueError for an invalid cluster file, and for a dtype that its device does not compute in.
        """
        described = Cluster.load(cluster)
        training = Training(overlap, zero, wide_gradients)
        return simulate_program(self.manifest, self.stages, self.schedule, described, dtype, training)

    def save_report(
        self, path: str | Path, cluster: Cluster | str | Path, dtype: str | None = None, **training: Any
    ) -> None:
        """Write one page that a browser shows without a network: schedule, memory, communication, stages and texts.

        The page predicts and explains a step on `cluster`; `dtype` and `training` are arguments of `simulate`.
        """
        explanation = self.explain(cluster, dtype, **training)
        write_page(path, self.overview, explanation.simulation, explanation.lines, self.texts)

    def explain(
        self, cluster: Cluster | str | Path = "dgx-a100", dtype: str | None = None, **training: Any
    ) -> Explanation:
        """Explain the time of a step on `cluster`: print the result, or read its fields.

        It has the critical rank, the cost of the bubble, the exposed communication, the effect of other settings, and
        the one that it recommends. Settings that need other texts are estimated (see `Estimator`) with the program's
        own `options`, from the model, and for ranks in their default order. `training`: as of `simulate`.
        """
        simulation = self.simulate(cluster, dtype, **training)
        known = self.manifest, self.stages, simulation, self.model, self.loss_fn, self.options
        return explain_program(*known, Training(**training))

    def save(self, folder: str | Path) -> None:
        """Write program_00.py …, manifest.json, schedule.txt and buffers.safetensors into `folder`.

        Further input shapes go into the subfolders ``shape_1`` and so on.
        """
        for number, program in enumerate(self.shapes):
            own = Path(folder) / shape_folder(number) if number else Path(folder)
            save_folder(own, program.texts, program.manifest, program.schedule, program.buffers)

    @torch.inference_mode(False)  # weights made in it could not be trained
    def bind(
        self,
        device: str | torch.device | None = None,
        weights: nn.Module | Mapping[str, Tensor] | str | Path | None = None,
        *,
        graphs: str | bool = "auto",
    ) -> Parallel:
        """Return this process's rank of the program as an nn.Module, under torchrun (not needed for a mesh of one).

        Args:
            device: default the CUDA device LOCAL_RANK among those that this process sees, else the CPU. The process
                group is NCCL or gloo to match.
            weights: whole tensors by the user's names: a module, a state_dict, or a folder or file of safetensors
                such as ``save_pretrained`` writes; default the compiled model's own. Only this rank's slices are
                read and copied. Parameters of a model on the meta device are drawn from the program's seed, as
                building the model on a real device would.
            graphs: "auto" replays each stage's forwards and backwards as CUDA graphs on CUDA (engine/graphs.py), from
                the second step of each shape and mode on; False runs them one operator at a time.

        Raises ValueError if WORLD_SIZE is not the mesh's size, CUDA has too few queues for graphs of a pipeline, a
        tensor is missing or has another shape, parameters of the compiled model were added, removed, tied, untied,
        frozen or unfrozen since, or a buffer whose values were compiled into the program (`Manifest.proved`) has
        changed; RuntimeError if ranks have different programs, or different weights from modules or mappings (those of
        files are not read for this).
        """
        if weights is None and self.model is not None:
            check_parameters(self.manifest, self.model)
        # As tensors say it: "cuda" has its number there, and Accelerate's "cpu:0" has none.
        placed = torch.empty(0, device=_default_device() if device is None else device).device
        replays = bool(graphs) and placed.type in graph_devices
        if replays and self.mesh.pipeline > 1:
            check_queues()
        if placed.type == "cuda":
            torch.cuda.set_device(placed)  # where torch.distributed puts objects and barriers
        given = [(program, program._read_weights(weights)) for program in self.shapes]
        check_proof(self.manifest, given[0][1])
        hashes = (program_hash(program.texts, program.manifest) for program in self.shapes)
        with join(self.manifest, placed, " ".join(hashes)) as connection:
            for program, own in given:
                compare_weights(program.manifest, connection, own)
            at = connection.rank.coordinates.pipeline
            programs = (ShapeFunctions(p.manifest, read_text(p.texts[at], p.manifest, at), own) for p, own in given)
            parallel = signed(self.manifest)(connection, *programs, drawn=weights is None, graphs=replays)
        parallel.loss_type = getattr(self.model, "loss_type", None)
        known = {} if self.model is None else vars(self.model)
        plain = {n for n, value in known.items() if isinstance(value, (int, float, str)) and n[0] != "_"}
        parallel.compiled_in = frozenset(plain - {"training", "loss_type"})
        for model in (self.model, weights):
            if isinstance(model, nn.Module):
                refuse_forgotten(parallel, model.named_parameters())
        if placed.type == "cpu":
            disable_malloc_trim()  # after the weights are read, whose memory goes back to the system
        return parallel

    def _read_weights(self, weights: nn.Module | Mapping[str, Tensor] | str | Path | None) -> Weights:
        """Return the given weights or the model's own; ValueError if some are missing that cannot be drawn."""
        if weights is not None:
            tensors = read_weights(weights, self.buffers)
            check_given(self.manifest, tensors)
            return tensors
        had_none = self.manifest.uninitialized or any(p.initial for p in self.manifest.parameters.values())
        tensors = read_weights({} if self.model is None and had_none else self.model, self.buffers)
        check_values(self.manifest, tensors)
        return tensors


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher may show each process a GPU of its own alone. (NCCL refuses two processes on one.)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def load(folder: str | Path, model: nn.Module | None = None) -> CompiledProgram:
    """Load the program that `CompiledProgram.save` wrote, edits included: stages are traced anew from the texts.

    `model` is the one that was compiled, for `verify`, `explain` and `bind`. Runs the texts' code. OSError for missing
    files, ValueError for a text that does not trace, or another model; `ProgramError` for contradictions.
    """
    end_with_launcher()
    name = Path(folder).resolve().name
    first = _load(Path(folder), name)
    further = (_load(Path(folder) / shape_folder(n), name) for n in range(1, first.manifest.num_shapes))
    result = replace(first, further=tuple(further), model=model)
    result.check_shapes()
    if model is not None:
        check_parameters(result.manifest, read_quantized(model))
    return result


def _load(folder: Path, name: str) -> CompiledProgram:
    texts, manifest, buffers = load_folder(folder)
    program = trace_program(texts, manifest, buffers=buffers)
    title = write_title(name, manifest.parameters)
    result = CompiledProgram(program.stages, program.log, texts, manifest, buffers, title)
    with naming_program(manifest):
        check_program(manifest, program.stages, result.schedule)
    return result
