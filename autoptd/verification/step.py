"""Run the whole step of all ranks on this machine in float64, and compare it with the plain model."""

import math
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autoptd.capture.results import find_loss, find_outputs
from autoptd.capture.source_lines import short_line, user_line
from autoptd.passes.ir.nodes import argument, results_of
from autoptd.passes.ir.program import Program
from autoptd.runtime import kernels
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.weights.slices import check_proof
from autoptd.text.reader import read_texts, text_filename, trace_program
from autoptd.verification.fault_line import Values, find_first_right, find_first_wrong
from autoptd.verification.float64 import Promotion, promote
from autoptd.verification.gradients import StepResult, compare_gradients, compare_outputs, join_gradients
from autoptd.verification.keyed_draws import KeyedDraws
from autoptd.verification.random_inputs import draw_batch, draw_weights
from autoptd.verification.reference import run_plain, take_parts
from autoptd.verification.report import LOSS, NORM, Report, compare_numbers
from autoptd.weights.sources import check_parameters

T = TypeVar("T")

ROUNDINGS = 4
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
    dtype: str = "float64",
) -> Report:
    """Run one step of every rank of the program `texts`, a thread each, and compare with `model`.

    Both run in float64, as in training but without dropout; casts to fewer bits inside are promoted in both. With the
    `dtype` "model", for models that refuse float64, both run as they train, and may differ by `ROUNDINGS` times what
    another rounding of the weights changes in the plain model. `model` is left as it is. `weights`: None for the
    model's own; "random" to draw from `seed`, for a model on the meta device; else whole tensors by the user's names.
    `batch`: whole tensors of all d * m microbatches, by input name; None to draw from `seed`.

    Raises ValueError if `model` has other parameters than the program; if the step does not fit into memory, with the
    bytes it needs; if tensors are missing; if a buffer has other values than those the program was proved for; or if
    the batch has a number for which the model or a text has no row.
    """
    if dtype not in ("float64", "model"):
        raise ValueError(f"dtype is {dtype!r}; expected 'float64', or 'model' for those that the model trains in")
    check_parameters(manifest, model)
    check_memory(manifest)
    start = time.perf_counter()
    program = trace_program(texts, manifest, buffers=buffers)
    tensors = draw_weights(manifest, model, buffers, weights, seed)
    check_proof(manifest, tensors)
    values = draw_batch(program, manifest, batch, seed)
    precise = dtype == "float64"
    if not precise:
        tensors = {name: x.to(manifest.parameters[name].dtype) for name, x in tensors.items()}
        values = {i.name: values[i.name].to(i.dtype) for i in manifest.inputs}
    wide = widen(manifest) if precise else manifest
    drawn = KeyedDraws(program, manifest.seed)
    run_alone = partial(run_plain, manifest, model, loss_fn, tensors, values, drawn, precise)
    run_divided = partial(_run_ranks, texts, wide, tensors, values, precise)
    # The plain model first: the texts must accept every batch that it accepts.
    plain = _explain(PLAIN, "pass batch= with values that it accepts", values, run_alone)
    anew = {name: plain.tables[x.data_ptr()] for name, x in buffers.items() if x.data_ptr() in plain.tables}
    tensors |= anew
    way = "the plain model accepts it: correct the lookup in the text"
    found = _explain("the program", way, values, run_divided)
    own, disagreements = join_gradients(wide, found)
    expected = [plain.outputs[manifest.mesh.coordinates(rank).data] for rank in range(len(found))]
    casts = plain.promoted, sum(one.promoted for one in found)
    report = Report(
        loss=found[0].loss,
        reference_loss=plain.loss,
        gradient_errors=compare_gradients(own, plain.gradients),
        norm_error=compare_numbers(found[0].norm, plain.norm),
        output_errors=compare_outputs([own.outputs[0] for own in found], expected),
        disagreements=disagreements,
        ranks=manifest.mesh.size,
        seconds=time.perf_counter() - start,
        notes=(*plain.notes, *_notes(program, manifest, casts, anew)),
        bounds={} if precise else _find_bounds(program, plain, tensors, seed, run_alone),
    )
    return replace(report, fault=_find_fault(report, program, manifest, run_alone, run_divided))


def _find_bounds(
    program: Program, plain: StepResult, tensors: dict[str, Tensor], seed: int, run: Callable[[], StepResult]
) -> dict[str, float]:
    """Return the errors that rounding may make: some times those of another step of the `plain` model.

    In that the weights are rounded elsewhere, by as much as the narrowest dtype that the program computes in.
    """
    made = (x for s in program.stages for n in s.graph.nodes for x in results_of(n) if isinstance(x, Tensor))
    rounding = max(torch.finfo(x.dtype).eps for x in made if x.is_floating_point())
    generator, kept = torch.Generator().manual_seed(seed), dict(tensors)
    for name, x in kept.items():
        if x.is_floating_point():
            step = rounding * torch.rand(x.shape, generator=generator, dtype=torch.float64)
            tensors[name] = (x * (1 + step)).to(x.dtype)
    other = run()
    tensors |= kept
    errors = compare_gradients(other.gradients, plain.gradients)
    errors |= compare_outputs(other.outputs, plain.outputs)
    errors |= {LOSS: compare_numbers(other.loss, plain.loss), NORM: compare_numbers(other.norm, plain.norm)}
    return {name: ROUNDINGS * max(error, rounding) for name, error in errors.items()}


def _find_fault(
    report: Report, program: Program, manifest: Manifest, alone: partial[Any], divided: partial[Any]
) -> str:
    """Say where the first wrong value is made, if there is one: both run again, and their values are kept.

    Sums of values in fewer bits are never the same, so that only float64 has a line.
    """
    if report.bounds:
        return ""
    if LOSS not in report.wrong:
        return find_first_right(program, report.wrong)
    with Values() as reference:
        alone()
    places = enumerate(map(program.mesh.coordinates, range(program.mesh.size)))
    first = {rank: Values(text_filename(manifest, at.pipeline)) for rank, at in places if at.data == 0}
    divided(first)
    return find_first_wrong(program, reference.found, [watch.lines for watch in first.values()])


def check_memory(manifest: Manifest) -> None:
    """Raise ValueError unless all ranks' slices and the plain model fit into memory, each `COPIES` times."""
    mesh, parameters = manifest.mesh, manifest.parameters.items()
    plain = sum(prod(p.shape) for _, p in parameters)
    slices = sum(prod(p.local_shape(mesh.sizes)) * len(manifest.homes(name)) for name, p in parameters)
    needed = COPIES * torch.float64.itemsize * (plain + slices * mesh.tensor * mesh.data) + MARGIN
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
        stages=tuple(
            replace(s, receives=wide(s.receives), sends=wide(s.sends), outputs=wide(s.outputs)) for s in manifest.stages
        ),
    )


def _run_ranks(
    texts: Sequence[str],
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    precise: bool,
    watches: Mapping[int, Values] | None = None,
) -> list[StepResult]:
    """Return every rank's step by global rank, run from the texts' functions and schedule; `watches` are of ranks."""
    programs = read_texts(texts, manifest)
    cores = torch.get_num_threads()

    def step(connection: Connection) -> StepResult:
        at, watch = connection.rank.coordinates, (watches or {}).get(connection.rank.number, nullcontext())
        with watch, Promotion() if precise else nullcontext() as promotion:
            parallel = Parallel(connection, ShapeFunctions(manifest, programs[at.pipeline], tensors))
            parallel.eval()
            result = parallel(**take_parts(manifest, batch, manifest.mesh.data, at.data))
            loss, _ = find_loss(result, None, {}, wanted=True)
            loss.backward()
            norm = float(parallel.clip_grad_norm_(math.inf))
        gradients = {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}
        whole = result[1] if manifest.output.separate_loss else result
        outputs = {path: x.full().detach() for path, x in find_outputs(whole, manifest.output, True).items()}  # type: ignore[attr-defined]
        promoted = promotion.count if promotion else 0
        return StepResult(float(loss.detach()), gradients, promoted, (), norm, [outputs])

    torch.set_num_threads(max(1, cores // manifest.mesh.size))
    try:
        with torch.enable_grad():
            return run_threads(manifest, step)
    finally:
        torch.set_num_threads(cores)


def _explain(who: str, way: str, batch: Mapping[str, Tensor], run: Callable[[], T]) -> T:
    """Run one side of the comparison; turn its error into one that says where, and what to do."""
    try:
        return run()
    except Exception as error:
        line = user_line(traceback.extract_tb(error.__traceback__)) or _find_forward_line(run)
        found, what = f"{error}, at {line}", type(error).__name__
        if isinstance(error, IndexError) or "out of bounds" in str(error):
            numbers = {n: x for n, x in batch.items() if x.numel() and not x.is_floating_point()}
            rows = ((n, x) for n, x in numbers.items() if x.dtype is not torch.bool)
            held = (f"{name} from {int(x.min())} to {int(x.max())}" for name, x in rows)
            what, way = "looks up a row that does not exist", f"The batch holds {', '.join(held)}; {way}"
        elif re.search(r"\bmeta\b", str(error).lower()):
            what = "reads a tensor on the meta device that is neither a parameter nor a buffer"
            way = "Register it as a buffer, or build the model on the CPU"
        else:
            what = f"fails with {what}"
            way = "verify computes in float64 unless dtype='model' is given, as the model trains"
        raise ValueError(f"verify: {who} {what}: {found}. {way}") from error


def _find_forward_line(run: Callable[[], object]) -> str:
    """Run what failed in its backward again; return the line of the forward that torch says is to blame."""
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True, False):
        warnings.simplefilter("always")
        with suppress(Exception):
            run()
    lines = (short_line(str(one.message)) for one in caught)
    return next((f"{line}, in its backward" for line in lines if line), "a place that torch does not tell")


def _notes(program: Program, manifest: Manifest, casts: Sequence[int], anew: Iterable[str]) -> Iterator[str]:
    if tables := ", ".join(anew):
        yield f"the model makes {tables} anew for this dtype; the ranks were given these values too"
    if whole := [i.name for i in manifest.inputs if i.batch_dim is None]:
        yield f"not split over the microbatches, each gets it whole: {', '.join(whole)}"
    if any(casts):
        yield f"casts to fewer bits were promoted to float64: {casts[0]} in the plain model, {casts[1]} in all ranks"
    if manifest.autocast is not None:
        yield (
            f"so were those of autocast to {str(manifest.autocast).removeprefix('torch.')}; the plain model ran "
            "without autocast, which does not cast float64"
        )
    nodes = [node for stage in program.stages for node in stage.graph.nodes]
    if any(node.target is kernels.uniform for node in nodes):
        yield "random numbers that forward draws are those of the program's seed in both"
    ours = (node for node in nodes if getattr(node.target, "__module__", "").startswith(kernels.__name__))
    if any(argument(node, "p") for node in ours):
        yield "dropout was off in both; its masks have their own tests"
