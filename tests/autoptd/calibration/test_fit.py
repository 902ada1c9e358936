"""Calibration: what is fitted is what was measured, and a file of this machine is one that loads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd import Cluster
from autoptd.calibration import fit, kernel_timing
from autoptd.calibration.fit import fit_device, fit_link
from autoptd.calibration.kernel_timing import (
    BLOCKS,
    COPIES,
    DIVIDED,
    DTYPES,
    LARGE_COPIES,
    LARGE_SHAPES,
    SHAPES,
    compile_block,
)
from autoptd.calibration.message_timing import CUDA_MESSAGES, MESSAGES
from autoptd.cli.main import main
from autoptd.passes.cost.cluster import Device, Link, round_flops
from autoptd.passes.cost.work import Product

KNOWN = Device(
    "known", {"fp32": 1e11, "bf16": 4e11, "fp16": 1e10, "fp64": 5e10}, 1e9, 4e10, 0.9, 0.5, 2e10, 1, 64, 32, 7e-6
)
LINK = Link(2e9, 0.5, 1.0, 1e-4)
PLAIN = 0.02  # seconds of a plain step
ALONE = Cluster("", KNOWN, 1, 1, LINK, LINK)


def measure_products(device: Device, shapes: Sequence[tuple[int, int, int]], main: str) -> list[list[Any]]:
    products = []
    for dtype in DTYPES:
        for m, n, k in shapes if dtype == main else shapes[:1]:
            flops = round_flops(Product(1, m, n, k), *tiling(device))
            products.append([dtype, m, n, k, flops / (device.peak(dtype) * device.gemm_efficiency)])
    return products


def tiling(device: Device) -> tuple[int, int, int]:
    return device.tile_rows, device.tile_columns, device.multiprocessors


def measure_known() -> dict[str, Any]:
    """What the known device would take."""
    steps = [compile_block(sizes, "fp32").simulate(ALONE).breakdown["compute"] for sizes in BLOCKS]
    copies = [[8 * count, 8 * count / KNOWN.memory_bandwidth] for count in COPIES]
    copies[-1][1] /= KNOWN.memory_efficiency  # larger than the caches
    return {"products": measure_products(KNOWN, SHAPES, "fp32"), "copies": copies, "blocks": steps}


def test_a_device_is_found_again_from_what_it_takes() -> None:
    """Of a product only peak times efficiency shows; the tiles may be others that waste the same."""
    unknown = replace(KNOWN, peak_flops={}, memory_bandwidth=1.0, gemm_efficiency=1.0, tile_rows=1, tile_columns=1)
    found = fit_device(
        replace(unknown, memory_efficiency=1.0, vector_flops=1.0, launch_seconds=1.0), measure_known(), "fp32"
    )
    assert found.memory_bandwidth == pytest.approx(4e10)
    assert found.peak("fp32") * found.gemm_efficiency == pytest.approx(0.9e11, rel=1e-6)
    for shape in SHAPES:
        known, again = (round_flops(Product(1, *shape), *tiling(d)) for d in (KNOWN, found))
        assert known == pytest.approx(again)
    assert found.launch_seconds == pytest.approx(7e-6, rel=0.01)
    assert found.memory_efficiency == pytest.approx(0.5)
    assert found.vector_flops == pytest.approx(2e10, rel=0.01)


def test_a_slower_step_is_more_launches_or_slower_kernels() -> None:
    measured = measure_known()
    small, large = measured["blocks"]
    slow = [fit_device(KNOWN, {**measured, "blocks": b}, "fp32") for b in ([2 * small, large], [small, 2 * large])]
    assert slow[0].launch_seconds > 1.5 * KNOWN.launch_seconds
    assert slow[1].vector_flops < 0.5 * KNOWN.vector_flops


def test_a_cuda_device_is_found_again_from_what_it_takes() -> None:
    """Its launches are measured by themselves: no step of a program, which the host may hold up, decides anything."""
    card = Cluster.load("dgx-h100").device
    rate = card.memory_bandwidth * card.memory_efficiency
    measured: dict[str, Any] = {
        "products": measure_products(card, LARGE_SHAPES, "bf16"),
        "copies": [[8 * count, 8 * count / rate] for count in LARGE_COPIES],
        "launches": [{"launch_seconds": 6.5e-6, "graphed_launch_seconds": 1e-6}],
    }
    blank = Device(card.name, {}, card.memory_bytes, 1.0, 1.0, 1.0, 1.0, card.multiprocessors, 1, 1, 1.0)
    found = fit_device(blank, measured, "bf16")
    for dtype in DTYPES:
        # In the last wave of the largest product's tiles half of the multiprocessors are idle.
        assert found.peak(dtype) == pytest.approx(card.peak(dtype) * card.gemm_efficiency, rel=0.04)
    reached = found.peak("bf16") * found.gemm_efficiency
    assert reached == pytest.approx(card.peak("bf16") * card.gemm_efficiency, rel=1e-6)
    for shape in LARGE_SHAPES:
        known, again = (round_flops(Product(1, *shape), *tiling(d)) for d in (card, found))
        assert known == pytest.approx(again)
    assert found.memory_bandwidth * found.memory_efficiency == pytest.approx(rate)
    assert found.vector_flops == found.peak("fp32")
    assert (found.launch_seconds, found.graphed_launch_seconds) == (6.5e-6, 1e-6)


def test_a_link_between_cuda_devices_is_found_again_from_what_it_takes() -> None:
    cluster = Cluster.load("dgx-h100")
    measured: dict[str, list[Any]] = {
        "reduced": [[size, cluster.all_reduce_seconds(size, (0, 1))] for size in CUDA_MESSAGES],
        "sent": [[size, cluster.node.send_seconds(size)] for size in CUDA_MESSAGES],
    }
    found = fit_link(measured, cluster.device, "bf16")
    assert found.collective_rate == pytest.approx(cluster.node.collective_rate)
    assert found.message_rate == pytest.approx(cluster.node.message_rate)
    assert found.latency_seconds == pytest.approx(cluster.node.latency_seconds, rel=0.01)


def test_a_card_is_timed_in_blocks_of_calls() -> None:
    """Without one they run here, and the median of a call is what it takes, asleep or not."""
    timer = kernel_timing.Timer(torch.device("cuda"), 0.05)
    assert 2e-3 <= timer.time(lambda: time.sleep(2e-3)) < 5e-3


@pytest.mark.gpu
def test_this_card(card: str, tmp_path: Path) -> None:
    """Orders of magnitude alone, as other tests may use the card at the same time; an H100's are known."""
    found = autoptd.calibrate(tmp_path / "mine.toml", devices=1, seconds=5.0)
    device = Cluster.load(tmp_path / "mine.toml").device
    assert device.peak_flops.keys() == DTYPES.keys()
    assert device.peak("bf16") == pytest.approx(found.device.peak("bf16"), rel=1e-5)
    assert device.peak("bf16") > 2 * device.peak("fp32") > 1e12
    assert 0.2 < device.gemm_efficiency <= 1
    assert 1e-7 < device.graphed_launch_seconds < device.launch_seconds < 1e-3
    if "H100" in device.name:
        assert 1e14 < device.peak("bf16") < 989.5e12  # alone about 790e12
        assert 4e11 < device.memory_bandwidth < 3.35e12  # alone about 3e12


def test_a_link_is_found_again_from_what_it_takes() -> None:
    pair = Cluster("", KNOWN, 2, 2, LINK, LINK)
    spent = compile_block(DIVIDED, "fp32", 2).simulate(pair).breakdown
    seconds = spent["compute"] + spent["tensor"]
    measured: dict[str, list[Any]] = {
        "reduced": [[size, pair.all_reduce_seconds(size, (0, 1))] for size in MESSAGES],
        "sent": [[size, pair.node.send_seconds(size)] for size in MESSAGES],
        # In the second round the machine is half as fast.
        "divided": [[drift * PLAIN, drift * seconds] for drift in (1, 2)],
    }
    found = fit_link(measured, KNOWN, "fp32", PLAIN)
    assert found.collective_rate == pytest.approx(2e9)
    assert found.message_rate == pytest.approx(1e9)
    assert found.latency_seconds == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize("sizes", BLOCKS)
def test_the_steps_that_are_timed_run(sizes: kernel_timing.Sizes) -> None:
    """Their weights are the constructor's: they are compiled on the meta device."""
    block = compile_block(sizes, "fp32").bind("cpu")
    kernel_timing.block_step(block, sizes, torch.device("cpu"))()
    assert block.last_step.loss > 1


@pytest.mark.slow
def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a moment, so not well: the file loads, its values are a machine's, and a step can be predicted on it."""
    file = tmp_path / "mine.toml"
    assert main(["calibrate", "--seconds", "0.2", "-o", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = Cluster.load(file)
    assert found.devices_per_node == len(os.sched_getaffinity(0))
    for kind in ("device", "node"):
        for key, value in asdict(getattr(found, kind)).items():
            assert shown[kind][key] == (pytest.approx(value, rel=1e-5) if key != "name" else value)
    assert all(1e8 < peak < 1e14 for peak in found.device.peak_flops.values())
    assert 1e8 < found.node.message_rate < found.device.memory_bandwidth < 1e13
    assert 1e-7 < found.device.launch_seconds < 1e-2
    for line in file.read_text().splitlines():
        assert not line or line.startswith("[") or "# measured" in line or "# not measured: as" in line
    step = compile_block(BLOCKS[1], "fp32").simulate(found)
    assert 0 < step.step_seconds < 10


@pytest.mark.parametrize(("cores", "processes"), [(1, (1, 0)), (2, (2, 2)), (4, (2, 2))])
def test_a_pair_of_processes_measures_messages_on_two_cores(
    cores: int, processes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def measure(kind: str, ranks: int, *words: object) -> dict[str, Any]:
        started.append((kind, ranks))
        return {}

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(fit, "_measure", measure)
    monkeypatch.setattr(fit, "fit_device", lambda *words: pytest.fail("measured"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(pytest.fail.Exception):
        autoptd.calibrate()
    wanted = zip(("kernel", "message"), processes, strict=True)
    assert started == [(kind, ranks) for kind, ranks in wanted if ranks]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 0}, "devices=0: expected a whole number above 0"),
        ({"devices": 3}, "devices=3: expected at most 2, the cores of this machine"),
        ({"seconds": 0.0}, r"seconds=0\.0: expected a time above 0"),
        ({"seconds": "x"}, "seconds='x': expected a time above 0"),
        ({"output": "machine"}, "output='machine': expected a path that ends in .toml"),
        ({"output": "no/such/folder/machine.toml"}, "in an existing folder"),
    ],
)
def test_impossible_settings_are_refused_before_measuring(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_measure", lambda *words: pytest.fail("measured"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        autoptd.calibrate(**given)


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"process 0 of 1, which measured kernels, failed:(.|\n)*TypeError"):
        fit._measure("kernel", 1, float("nan"), ["no core"])  # type: ignore[list-item]
