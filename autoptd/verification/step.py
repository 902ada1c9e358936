"""Run the whole step of all ranks on this machine in float64, and compare it with the plain model."""

from __future__ import annotations

import inspect
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoptd.capture.source_lines import user_line
from autoptd.passes.ir.program import Program
from autoptd.runtime import kernels
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.engine.batch import find_loss
from autoptd.runtime.engine.bound_shape import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.weights.slices import check_proved
from autoptd.text.reader import read_texts, trace_program
from autoptd.verification.float64 import Promotion, promote
from autoptd.verification.gradients import StepResult, compare_gradients, join_gradients
from autoptd.verification.random_inputs import draw_batch, draw_weights
from autoptd.verification.reference import run_plain, take_parts
from autoptd.verification.report import Report
from autoptd.weights.sources import check_parameters

COPIES = 3  # of each tensor while a step runs: itself, its gradient, and a sum on its way
PLAIN = "the plain model"
MARGIN = 256 * 2**20  # bytes for activations and the rest


def verify_program(
    texts: Sequence[str],
    manifest: Manifest,
    buffers: Mapping[str, Tensor],
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    *,
    weights: str | Mapping[str, Tensor] | None = None,
    batch: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Report:
    """Run one step of every rank of the program `texts`, a thread each, and compare with `model`.

    Both run in float64, as in training but without dropout; casts to fewer bits inside are promoted in both. `model`
    is left as it is. `weights`: None for the model's own; "random" to draw from `seed`, for a model on the meta
    device; else whole tensors by the user's names. `batch`: whole tensors of all d * m microbatches, by input name;
    None to draw from `seed`.

    Raises ValueError if `model` has other parameters than the program; if the step does not fit into memory, with the
    bytes it needs; if tensors are missing; if a buffer has other values than those the program was proved for; or if
    the batch has a number for which the model or a text has no row.
    """
    check_parameters(manifest, model)
    check_memory(manifest)
    start = time.perf_counter()
    program = trace_program(texts, manifest, buffers=buffers)
    tensors = draw_weights(manifest, model, buffers, weights, seed)
    check_proved(manifest, tensors)
    values = draw_batch(program, manifest, batch, seed)
    wide = widen(manifest)
    # The plain model first: the texts must accept every batch that it accepts.
    with _explain_rows(PLAIN, "pass batch= with values that it accepts", values):
        plain = run_plain(manifest, model, loss_fn, tensors, values)
    with _explain_rows("the program", "the plain model accepts it: correct the lookup in the text", values):
        found = _run_ranks(texts, wide, tensors, values)
    own, disagreements = join_gradients(wide, found)
    return Report(
        loss=found[0].loss,
        reference_loss=plain.loss,
        gradient_errors=compare_gradients(own, plain.gradients),
        disagreements=disagreements,
        ranks=manifest.mesh.size,
        seconds=time.perf_counter() - start,
        notes=(*plain.notes, *_notes(program, manifest, plain.promoted, sum(r.promoted for r in found))),
    )


def check_memory(manifest: Manifest) -> None:
    """Raise ValueError unless all ranks' slices and the plain model fit into memory, each `COPIES` times."""
    mesh = manifest.mesh
    plain = sum(prod(p.shape) for p in manifest.parameters.values())
    slices = sum(
        prod(p.local_shape(mesh.axes)) * len(manifest.homes(name)) for name, p in manifest.parameters.items()
    )
    slices *= mesh.tensor * mesh.data
    needed = COPIES * torch.float64.itemsize * (plain + slices) + MARGIN
    if needed > (available := available_bytes()):
        raise ValueError(
            f"verify runs all {mesh.size} ranks and the plain model here in float64, which takes about {needed:,} "
            f"bytes; this machine has {available:,} free. Verify the same model with fewer layers or a smaller hidden "
            "size, or on a machine with more memory"
        )


def available_bytes() -> int:
    """Return the bytes of memory still available: the kernel's estimate, which counts caches as free."""
    table = Path("/proc/meminfo")
    if table.exists() and (found := re.search(r"MemAvailable:\s*(\d+)", table.read_text())):
        return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def widen(manifest: Manifest) -> Manifest:
    """Return the manifest with float64 for every floating dtype."""

    def wide(values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(replace(value, dtype=promote(value.dtype)) for value in values)

    return replace(
        manifest,
        scales_loss=False,
        inputs=wide(manifest.inputs),
        parameters=dict(zip(manifest.parameters, wide(manifest.parameters.values()), strict=True)),
        stages=tuple(replace(s, receives=wide(s.receives), sends=wide(s.sends)) for s in manifest.stages),
    )


def _run_ranks(
    texts: Sequence[str], manifest: Manifest, tensors: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> list[StepResult]:
    """Return every rank's step by global rank, run from the functions and the schedule of the texts."""
    programs = read_texts(texts, manifest)
    schedule = tuple(program.actions for program in programs)
    cores = torch.get_num_threads()

    def step(connection: Connection) -> StepResult:
        at = connection.rank.coordinates
        with Promotion() as promotion:
            program = programs[at.pipeline]
            constants = program.constants or (lambda p: {})
            functions = ShapeFunctions(manifest, program.stages, constants, schedule, tensors)
            parallel = Parallel(connection, functions)
            parallel.eval()
            replica = take_parts(manifest, batch, manifest.mesh.data, at.data)
            loss = find_loss(manifest.output, parallel(**replica))
            loss.backward()
        gradients = {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}
        return StepResult(float(loss.detach()), gradients, promotion.count)

    torch.set_num_threads(max(1, cores // manifest.mesh.size))
    try:
        with torch.enable_grad():
            return run_threads(manifest, step)
    finally:
        torch.set_num_threads(cores)


@contextmanager
def _explain_rows(who: str, way: str, batch: Mapping[str, Tensor]) -> Iterator[None]:
    """Turn torch's error for a missing row into one that says where, and what the batch holds.

    Also for operators that do not take float64, and for tensors without values.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        line = user_line(traceback.extract_tb(error.__traceback__))
        if re.search(r"\bmeta\b", str(error).lower()):
            raise ValueError(
                f"verify: {who} reads a tensor on the meta device that is neither a parameter nor a buffer, at {line}: "
                f"{error}. Register it as a buffer, or build the model on the CPU"
            ) from error
        if "got Double" in str(error):
            raise ValueError(
                f"verify computes in float64, and {who} has an operator that does not, at {line}: {error}. Compile the "
                "model with another one; for transformers' experts: model.set_experts_implementation('batched_mm')"
            ) from error
        if not isinstance(error, IndexError) and "out of bounds" not in str(error):
            raise ValueError(f"verify computes in float64, where {who} fails at {line}: {error}") from error
        held = (
            f"{name} from {int(x.min())} to {int(x.max())}"
            for name, x in batch.items()
            if x.numel() and not x.is_floating_point() and x.dtype is not torch.bool
        )
        raise ValueError(
            f"verify: {who} looks up a row that does not exist: {error}, at {line}. The batch holds "
            f"{', '.join(held)}; {way}"
        ) from error


def _notes(program: Program, manifest: Manifest, plain: int, promoted: int) -> Iterator[str]:
    if whole := [i.name for i in manifest.inputs if i.batch_dim is None]:
        yield f"not split over the microbatches, each gets it whole: {', '.join(whole)}"
    if plain or promoted:
        yield f"casts to fewer bits were promoted to float64: {plain} in the plain model, {promoted} in all ranks"
    if manifest.autocast is not None:
        yield (
            f"so were those of autocast to {str(manifest.autocast).removeprefix('torch.')}; the plain model ran "
            "without autocast, which does not cast float64"
        )
    if any(_drops(node) for stage in program.stages for node in stage.graph.nodes):
        yield "dropout was off in both; its masks have their own tests"


def _drops(node: fx.Node) -> bool:
    if not getattr(node.target, "__module__", "").startswith(kernels.__name__):
        return False
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    return bool(given.arguments.get("p"))
