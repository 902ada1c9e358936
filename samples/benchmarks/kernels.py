"""The fused kernels beside eager torch and torch.compile, as a share of the card's copy bandwidth.

Without a GPU: each kernel runs under Triton's interpreter, must mean what plain torch does, and its loads and stores
are counted beside the fewest bytes that must move.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels import registration
from autoptd.runtime.program.mesh import Mesh
from samples.benchmarks.kernel_cases import CASES, Case, Maker, Sizes
from samples.benchmarks.memory_traffic import InterpreterChangedError, count_traffic
from samples.benchmarks.report import publish

GPU_SIZES = Sizes(rows=8192, batch=4, hidden=12288, matrices=48, length=2048, vocabulary=51200)
# As wide as on a GPU: then a tile has as many rows, and a vector is read as often for each row.
CPU_SIZES = Sizes(rows=96, batch=1, hidden=12288, matrices=2, length=512, vocabulary=51200)
MEANING_SIZES = Sizes(rows=8, batch=2, hidden=256, matrices=2, length=40, vocabulary=500, item=4)
DROPOUT = 0.1
SHARE, EXCESS = 0.85, 1.05
WARM_UP, REPETITIONS = 5, 30
FILLED = 4  # times
COPIED = 1 << 30  # bytes: far more than a cache holds
TOLERANCE = 2e-5  # float32 kernels against float64, over the largest element

Chain = Callable[..., Any]


def run_forward(chain: Chain, rank: Rank, p: float, operands: Sequence[Tensor]) -> list[Tensor]:
    results = chain(rank, p, *operands)
    return list(results) if isinstance(results, tuple) else [results]


def run_backward(results: Sequence[Tensor], operands: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor]:
    leaves = [operand for operand in operands if operand.requires_grad]
    return list(torch.autograd.grad(results, leaves, slopes))


def mark(text: str, bad: bool) -> str:
    return f"{text} (!)" if bad else text


# --- with a GPU


def time_calls(call: Callable[[Any], object], prepare: Callable[[], Any], flushed: Tensor) -> float:
    """Median seconds of `call(prepare())`, of the call alone; `flushed` empties the caches before it.

    Filling it so often takes long enough for the call to be in the queue before its time begins, backwards of 0.5 ms of
    CPU time too.
    """
    spent: list[float] = []
    for repetition in range(WARM_UP + REPETITIONS):
        given = prepare()
        for _ in range(FILLED):
            flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(given)
        end.record()
        torch.cuda.synchronize()
        if repetition >= WARM_UP:
            spent.append(begin.elapsed_time(end) / 1000)
    return statistics.median(spent)


def measure_bandwidth(flushed: Tensor) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=flushed.device)
    target = torch.empty_like(source)
    return 2 * COPIED / time_calls(lambda _: target.copy_(source), lambda: None, flushed)


def time_chain(chain: Chain, rank: Rank, operands: list[Tensor], flushed: Tensor) -> tuple[float, float]:
    """Median seconds of forward and of backward."""

    def forward(_: None = None) -> list[Tensor]:
        return run_forward(chain, rank, DROPOUT, operands)

    slopes = [torch.randn_like(result) for result in forward()]
    of_forward = time_calls(forward, lambda: None, flushed)
    return of_forward, time_calls(lambda results: run_backward(results, operands, slopes), forward, flushed)


def measure_case(case: Case, rank: Rank, bandwidth: float, flushed: Tensor) -> list[list[str]]:
    """Two rows: forward and backward."""
    operands = case.make(GPU_SIZES, Maker(torch.bfloat16, rank.device))
    torch.compiler.reset()
    chains = (case.ours, case.plain, torch.compile(case.plain, dynamic=False))
    times = zip(*(time_chain(chain, rank, operands, flushed) for chain in chains), strict=True)
    rows = []
    for way, count, (ours, eager, inductor) in zip(
        ("forward", "backward"), (case.forward, case.backward), times, strict=True
    ):
        least = count(GPU_SIZES)
        share = least / ours / bandwidth
        rows.append(
            [
                f"{case.name}: {way}",
                f"{least / 1e6:.0f}",
                mark(f"{1e6 * ours:.0f}", ours > inductor),
                mark(f"{share:.0%}", share < SHARE),
                f"{1e6 * eager:.0f}",
                f"{1e6 * inductor:.0f}",
            ]
        )
    return rows


def measure(cases: Sequence[Case], write: bool) -> None:
    """Time every case on the current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    rank = make_rank(device)
    flushed = torch.empty(COPIED, dtype=torch.uint8, device=device)
    bandwidth = measure_bandwidth(flushed)
    rows = [row for case in cases for row in measure_case(case, rank, bandwidth, flushed)]
    publish(
        "kernels_gpu",
        f"Kernels on {torch.cuda.get_device_name(device)}, bfloat16",
        ["kernel", "MB that must move", "ours, us", "of copy bandwidth", "eager, us", "torch.compile, us"],
        rows,
        [
            f"A copy moves {bandwidth / 1e9:.0f} GB/s, read and written.",
            f"{GPU_SIZES}; dropout {DROPOUT}. Medians of {REPETITIONS} calls, caches emptied before each.",
            f"(!): slower than torch.compile, or under {SHARE:.0%} of the copy bandwidth.",
        ],
        write,
        script="kernels",
    )


# --- without one


@contextmanager
def interpret(rows: int) -> Iterator[None]:
    """CPU tensors go to the Triton kernels, under the interpreter; sums over `rows` are split as on a GPU."""
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    tiles = import_module("autoptd.runtime.kernels.triton.tiles")
    devices, programs = registration.kernel_devices, tiles.PROGRAMS
    registration.kernel_devices, tiles.PROGRAMS = {"cpu"}, max(1, programs * rows // GPU_SIZES.rows)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        registration.kernel_devices, tiles.PROGRAMS = devices, programs  # type: ignore[attr-defined]


def count_bytes(case: Case, rank: Rank) -> list[str]:
    """The fewest bytes of forward and backward, and how many times as many are asked for and moved."""
    operands = case.make(CPU_SIZES, Maker(torch.bfloat16, rank.device))
    with interpret(CPU_SIZES.rows):
        with count_traffic() as forward:
            results = run_forward(case.ours, rank, DROPOUT, operands)
        slopes = [torch.ones_like(result) for result in results]
        with count_traffic() as backward:
            run_backward(results, operands, slopes)
    cells = []
    for traffic, count in ((forward, case.forward), (backward, case.backward)):
        least, once = count(CPU_SIZES), traffic.count_once()
        cells += [
            f"{least / 1e6:.2f}",
            mark(f"{once / 1e6:.2f}: {once / least:.2f}", once > EXCESS * least),
            f"{traffic.asked / 1e6:.2f}: {traffic.asked / least:.2f}",
        ]
    return cells


def measure_error(case: Case, rank: Rank) -> float:
    """The largest difference of results and gradients from float64, over the largest element.

    The kernel in float32 is compared with the operator's plain meaning, and without dropout, whose masks differ,
    that with the chain it is timed against.
    """
    operands = case.make(MEANING_SIZES, Maker(torch.float32, rank.device))
    exact = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in operands]
    with interpret(MEANING_SIZES.rows):
        ours = run_both(case.ours, rank, DROPOUT, operands)
    pairs = [
        *zip(ours, run_both(case.ours, rank, DROPOUT, exact), strict=True),
        *zip(run_both(case.ours, rank, 0.0, exact), run_both(case.plain, rank, 0.0, exact), strict=True),
    ]
    return max(float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs)


def run_both(chain: Chain, rank: Rank, p: float, operands: Sequence[Tensor]) -> list[Tensor]:
    """Results and gradients; the results' own gradients are the same for every chain."""
    results = run_forward(chain, rank, p, operands)
    generator = torch.Generator().manual_seed(1)
    slopes = [torch.randn(result.shape, generator=generator).to(result.dtype) for result in results]
    return [*(result.detach() for result in results), *run_backward(results, operands, slopes)]


def check(cases: Sequence[Case], write: bool) -> None:
    """Check every case's meaning under the interpreter and count its bytes; SystemExit where a meaning differs."""
    rank = make_rank(torch.device("cpu"))
    rows, wrong = [], []
    notes = [
        f"MB, and times the least. {CPU_SIZES}, bfloat16, dropout {DROPOUT}; the Triton kernels alone.",
        "moved: each address loaded once, unless it was stored before, and stored once, as with a cache that keeps "
        f"what is read again. (!): over {EXCESS} times the least. asked: every load and store. Norms store a sum of "
        "the gradients of weight and bias for each program, which with so few rows is more than on a GPU.",
        f"error: of results and gradients in float32, {MEANING_SIZES.rows} rows, over the largest element; at most "
        f"{TOLERANCE}.",
    ]
    for case in cases:
        error = measure_error(case, rank)
        if not error <= TOLERANCE:
            wrong.append(case.name)
        try:
            cells = count_bytes(case, rank)
        except InterpreterChangedError as problem:
            cells = ["not counted"] * 6
            note = f"Bytes are not counted: {problem}."
            notes += [] if note in notes else [note]
        rows.append([case.name, *cells, mark(f"{error:.0e}", not error <= TOLERANCE)])
    columns = ["least", "moved", "asked"]
    publish(
        "kernels",
        "Kernels under Triton's interpreter: bytes loaded and stored beside the least",
        ["kernel", *(f"{way}: {column}" for way in ("forward", "backward") for column in columns), "error"],
        rows,
        notes,
        write,
    )
    if wrong:
        raise SystemExit(f"not what plain torch computes: {', '.join(wrong)}")


def make_rank(device: torch.device) -> Rank:
    rank = Rank.local(Mesh(1, 1, 1), device=device)
    rank.randomness.training = True
    # As a stage's slot has it: to make one in each call would wait for a GPU.
    rank.randomness.moment = rank.randomness.locate(device)
    return rank


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--write", action="store_true", help="keep the table under results/")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    cases = [case for case in CASES if given.only in case.name]
    if find_spec("triton") is None:
        raise SystemExit("Triton is not installed: pip install 'autoptd[triton]'")
    if torch.cuda.is_available():
        measure(cases, given.write)
    else:
        check(cases, given.write)


if __name__ == "__main__":
    main()
