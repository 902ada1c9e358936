"""Tables 1 and 2 of SC21, and the orderings of its figures, from simulated steps of compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import autoptd
from autoptd import Cluster
from samples.benchmarks.paper_figures import GPT_6B, compare_microbatches, compare_tensor_with_pipeline
from samples.benchmarks.paper_model import UnfusedAttention, UnfusedMLP, WrittenAttention, build_paper_model
from samples.benchmarks.paper_rows import (
    CALIBRATED_ON,
    CLUSTER,
    TABLE_1,
    TABLE_2,
    TABLE_2_ZERO3,
    Calibration,
    PaperRow,
    compile_row,
    simulate_row,
)
from samples.benchmarks.planner import COLUMNS, measure
from samples.benchmarks.zero3 import simulate_zero3
from samples.gpt import GPT, MLP, GPTConfig

SELENE = Cluster.load(CLUSTER)
FEW = 4  # layers of a model that is tried in its widths only


def test_training_times_are_the_papers() -> None:
    """34 and 84 days for 8 T P / (n X), P from a small program's cost at the paper's sizes (SC21 §5.1)."""
    example = {name: torch.zeros(1, 16, dtype=torch.long) for name in ("idx", "targets")}
    model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=3, n_head=2, n_embd=24))
    cost = autoptd.compile(model, mesh=(1, 1, 1), example_inputs=example).cost

    def days(layers: int, hidden: int, tokens: float, devices: int, tflops: float) -> float:
        sizes = {"l": layers, "h": hidden, "f": 4 * hidden, "V": 51_200, "s": 2_048}
        count = cost.evaluate(cost.parameters, **sizes)
        return 8 * tokens * count / (devices * tflops * 1e12) / 86_400

    assert days(96, 12_288, 300e9, 1024, 140) == pytest.approx(34, abs=1)
    assert days(128, 25_600, 450e9, 3072, 163) == pytest.approx(84, abs=1)


# Seconds of an iteration with full recomputation, and with sequence parallelism and selective recomputation: tables 3
# and 5 of Korthikanti et al. 2022, on the devices of SC21.
BY_TOKENS = (
    (PaperRow("22B", 64, 6144, 48, 8, 1, 8, 4, 4, 0), 1.42, 1.10),
    (PaperRow("175B", 96, 12288, 96, 8, 8, 64, 1, 64, 0, 3), 18.13, 13.75),
    (PaperRow("530B", 128, 20480, 105, 8, 35, 280, 1, 280, 0, 3), 49.05, 37.83),
    (PaperRow("1T", 160, 25600, 128, 8, 64, 512, 1, 512, 0), 94.42, 71.49),
)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "full", "by_tokens"), BY_TOKENS, ids=[row.name for row, _, _ in BY_TOKENS])
def test_times_with_sequence_parallelism(row: PaperRow, full: float, by_tokens: float) -> None:
    assert simulate_row(compile_row(row), SELENE).step_seconds == pytest.approx(full, rel=0.1)
    step = simulate_row(compile_row(row, recompute="selective", sequence_parallel=True, overlap=False), SELENE)
    assert step.step_seconds == pytest.approx(by_tokens, rel=0.1)
    assert step.fits


def test_the_smallest_row() -> None:
    """Table 1's first row, which needs no links."""
    (row,) = (row for row in TABLE_1 if row.name == "1.7B")
    program = compile_row(row)
    step = simulate_row(program, SELENE)
    assert step.tflops_per_device == pytest.approx(row.tflops, rel=0.06)
    assert step.fits
    # Equation (3) over devices and time is what is given.
    layers, h, s, v = row.layers, row.hidden, 2_048, 51_200
    flops = 96 * row.batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert step.tflops_per_device == pytest.approx(flops / row.devices / step.step_seconds / 1e12)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: str(row.name))
def test_table_1(row: PaperRow) -> None:
    """Within 6 % on each row (76.1B: 9 %), and all fit."""
    step = simulate_row(compile_row(row), SELENE)
    assert step.tflops_per_device == pytest.approx(row.tflops, rel=0.09 if row.name == "76.1B" else 0.06)
    if row.name in CALIBRATED_ON:
        assert step.tflops_per_device == pytest.approx(row.tflops, rel=0.03)
    assert step.fits


@pytest.mark.slow
def test_the_shipped_shares_are_those_of_the_calibration() -> None:
    """As long as the simulator changes, what was fitted before may be no fit any more."""
    rows = [row for row in TABLE_1 if row.name in CALIBRATED_ON]
    calibration = Calibration({row.name: compile_row(row) for row in rows}, SELENE)
    shares, _ = calibration.fit(CALIBRATED_ON, {row.name: row.tflops for row in rows})
    device = SELENE.device
    assert shares == pytest.approx((device.gemm_efficiency, device.memory_efficiency), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: f"{row.name}-{row.devices}")
def test_table_2(row: PaperRow) -> None:
    assert simulate_row(compile_row(row), SELENE).tflops_per_device == pytest.approx(row.tflops, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_2_ZERO3, ids=lambda row: f"{row.name}-{row.devices}")
def test_table_2_zero3(row: PaperRow) -> None:
    step = simulate_zero3(compile_row(row.alone()), SELENE, row.devices)
    assert step.tflops_per_device == pytest.approx(row.tflops, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"), list(zip(TABLE_2, TABLE_2_ZERO3, strict=True)), ids=lambda row: f"{row.name}-{row.devices}"
)
def test_the_ratios_of_table_2(ours: PaperRow, theirs: PaperRow) -> None:
    """What PTD-P is ahead of ZeRO-3 by, on about as many devices and on twice and four times as many."""
    step = simulate_row(compile_row(ours), SELENE)
    baseline = simulate_zero3(compile_row(theirs.alone()), SELENE, theirs.devices)
    found = step.tflops_per_device / baseline.tflops_per_device
    assert found == pytest.approx(ours.tflops / theirs.tflops, rel=0.15)


@pytest.mark.slow
def test_eight_tensor_ranks_are_best_on_nodes_of_eight() -> None:
    """Figure 13, at both batches."""
    rows = list(compare_tensor_with_pipeline(SELENE))
    for column in (1, 2):
        assert max(rows, key=lambda row: float(str(row[column])))[0] == "8, 8"


@pytest.mark.slow
def test_the_best_microbatch_is_neither_the_smallest_nor_the_largest() -> None:
    """Figure 16, at both batches."""
    rows = list(compare_microbatches(SELENE))
    for column in (1, 2):
        assert max(rows[1:-1], key=lambda row: float(str(row[column]))) == max(
            rows, key=lambda row: float(str(row[column]))
        )


@cache
def compare_with_planner() -> list[float]:
    """By how many percent table 1's (t, p), with its own best b and m, are slower than our best plan, ascending."""
    place = COLUMNS.index("slower by")
    return sorted(float(str(measure(row, row.chunks)[place]).rstrip("%")) for row in TABLE_1)


@pytest.mark.slow
def test_the_papers_meshes_are_near_the_planners() -> None:
    """Ten within 9 %, seven of them within 5 %."""
    slower = compare_with_planner()
    assert slower[6] <= 5
    assert slower[9] <= 9


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="3.6B is 5.1 % slower, 39.1B 6.5 %, 7.5B 8.5 %: a smaller t is faster and fits")
def test_nine_of_the_papers_meshes_are_within_a_twentieth_of_the_planners() -> None:
    assert compare_with_planner()[8] <= 5


@pytest.mark.slow
def test_throughput_falls_in_tensor_ranks_most_across_nodes() -> None:
    """Figure 15, its widths: all-reduces take the time, and beyond eight devices they leave the node."""
    few = replace(GPT_6B, layers=FEW, pipeline=1)
    found = []
    for tensor in (2, 4, 8, 16):
        row = replace(few, tensor=tensor)
        found.append(simulate_row(compile_row(row), SELENE).tflops_per_device)
    assert found == sorted(found, reverse=True)
    falls = -np.diff(np.log(found))
    assert falls.argmax() == len(falls) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "pipelines"), [(8, (2, 4, 8)), pytest.param(32, (2, 4, 8, 16, 32), marks=pytest.mark.slow)]
)
def test_throughput_falls_in_pipeline_ranks(layers: int, pipelines: Sequence[int]) -> None:
    """Figure 14, its widths, at every batch: the replicas are beside each other."""
    rows = [replace(GPT_6B, layers=layers, pipeline=p) for p in pipelines]
    programs = [(row, compile_row(row)) for row in rows]
    for batch in (32, 128, 512):
        found = [simulate_row(c, SELENE, replace(row, batch=batch)).tflops_per_device for row, c in programs]
        assert found == sorted(found, reverse=True), batch


def test_scatter_gather_decides_for_interleaving() -> None:
    """Figures 12 and 18, their widths and layers a rank, on two nodes: with scatter/gather interleaving wins, the gap
    closes as the batch grows, and without it the default wins at a large batch."""
    row = PaperRow("175B", 96, 12288, 16, 8, 2, 16, 1, 2, 0)
    default, interleaved = (compile_row(replace(row, chunks=v)) for v in (1, 8))
    gaps = []
    for batch in (2, 8, 32):
        own = replace(row, batch=batch)
        plain, pieces, whole = (
            simulate_row(program, SELENE, own, scatter_gather=kept).tflops_per_device
            for program, kept in ((default, True), (interleaved, True), (interleaved, False))
        )
        gaps.append(pieces / plain)
        assert pieces > whole
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 1
    assert whole < simulate_row(default, SELENE, own, scatter_gather=False).tflops_per_device


@pytest.mark.slow
def test_recomputation_costs_a_forward_and_saves_memory() -> None:
    """Figure 17, its widths and layers a rank: at most a third slower, at every batch."""
    row = PaperRow("145B", 96, 12288, 20, 8, 4, 32, 1, 4, 0)
    kept, again = (compile_row(row, recompute=mode) for mode in ("none", "full"))
    for batch in (1, 4, 16):
        own = replace(row, batch=batch)
        steps = [simulate_row(program, SELENE, own) for program in (kept, again)]
        assert 1.2 < steps[1].step_seconds / steps[0].step_seconds < 4 / 3
    assert max(steps[1].memory_bytes) < max(steps[0].memory_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "paper"),
    [
        (PaperRow("175B", 96, 12288, 4, 8, 1, 8, 1, 1, 0), 0.19),
        (PaperRow("530B", 128, 20480, 4, 8, 1, 8, 1, 1, 0), 0.11),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_fused_operators_gain(row: PaperRow, paper: float) -> None:
    """SC21 §5.8."""
    model = build_paper_model(row.layers, row.heads, row.hidden, fused=False)
    programs = compile_row(row, model, fuse=False), compile_row(row)
    plain, fused = (simulate_row(program, SELENE).tflops_per_device for program in programs)
    assert fused / plain - 1 == pytest.approx(paper, rel=0.25)


@pytest.mark.parametrize(("one", "other"), [(WrittenAttention, UnfusedAttention), (MLP, UnfusedMLP)])
def test_the_unfused_baseline_computes_the_same(one: type[nn.Module], other: type[nn.Module]) -> None:
    torch.manual_seed(0)
    config = GPTConfig(64, 16, 1, 4, 32, 0.0)
    fused, apart = one(config), other(config)
    apart.load_state_dict(fused.state_dict())
    x = torch.randn(2, 16, 32)
    torch.testing.assert_close(apart(x), fused(x))
