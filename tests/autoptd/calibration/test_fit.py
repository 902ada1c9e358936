"""Calibration: what is fitted is what was measured, and a file of this machine is one that loads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import autoptd
from autoptd import Cluster
from autoptd.calibration import fit
from autoptd.calibration.fit import fit_device, fit_link
from autoptd.calibration.kernel_timing import BLOCKS, COPIES, DIVIDED, DTYPES, SHAPES, compile_block
from autoptd.calibration.message_timing import MESSAGES
from autoptd.cli.main import main
from autoptd.passes.cost.cluster import Device, Link, round_flops
from autoptd.passes.cost.work import Product

KNOWN = Device(
    "known",
    {"fp32": 1e11, "bf16": 4e11, "fp16": 1e10, "fp64": 5e10},
    1e9,
    4e10,
    0.9,
    0.5,
    2e10,
    1,
    64,
    32,
    7e-6,
)
LINK = Link(2e9, 0.5, 1.0, 1e-4)
PLAIN = 0.02  # seconds of a plain step
ALONE = Cluster("", KNOWN, 1, 1, LINK, LINK)


def measure_known() -> dict[str, Any]:
    """What the known device would take."""
    products = []
    for dtype in DTYPES:
        for m, n, k in SHAPES if dtype == "fp32" else SHAPES[:1]:
            flops = round_flops(Product(1, m, n, k), KNOWN.tile_rows, KNOWN.tile_columns, 1)
            products.append([dtype, m, n, k, flops / (KNOWN.peak(dtype) * KNOWN.gemm_efficiency)])
    steps = [compile_block(sizes, "fp32").simulate(ALONE).breakdown["compute"] for sizes in BLOCKS]
    copies = [[8 * count, 8 * count / KNOWN.memory_bandwidth] for count in COPIES]
    copies[-1][1] /= KNOWN.memory_efficiency  # larger than the caches
    return {"products": products, "copies": copies, "blocks": steps}


def test_a_device_is_found_again_from_what_it_takes() -> None:
    """Of a product only peak times efficiency shows; the tiles may be others that waste the same."""
    unknown = replace(
        KNOWN, peak_flops={}, memory_bandwidth=1.0, gemm_efficiency=1.0, tile_rows=1, tile_columns=1
    )
    found = fit_device(
        replace(unknown, memory_efficiency=1.0, vector_flops=1.0, launch_seconds=1.0), measure_known(), "fp32"
    )
    assert found.memory_bandwidth == pytest.approx(4e10)
    assert found.peak("fp32") * found.gemm_efficiency == pytest.approx(0.9e11, rel=1e-6)
    for m, n, k in SHAPES:
        shape = Product(1, m, n, k)
        known, again = (round_flops(shape, d.tile_rows, d.tile_columns, 1) for d in (KNOWN, found))
        assert known == pytest.approx(again)
    assert found.launch_seconds == pytest.approx(7e-6, rel=0.01)
    assert found.memory_efficiency == pytest.approx(0.5)
    assert found.vector_flops == pytest.approx(2e10, rel=0.01)


def test_a_slower_step_is_more_launches_or_slower_kernels() -> None:
    measured = measure_known()
    small, large = measured["blocks"]
    slow = [
        fit_device(KNOWN, {**measured, "blocks": b}, "fp32") for b in ([2 * small, large], [small, 2 * large])
    ]
    assert slow[0].launch_seconds > 1.5 * KNOWN.launch_seconds
    assert slow[1].vector_flops < 0.5 * KNOWN.vector_flops


def test_a_link_is_found_again_from_what_it_takes() -> None:
    pair = Cluster("", KNOWN, 2, 2, LINK, LINK)
    spent = compile_block(DIVIDED, "fp32", 2).simulate(pair).breakdown
    seconds = spent["compute"] + spent["tensor"]
    measured: dict[str, list[Any]] = {
        "reduced": [[size, pair.all_reduce_seconds(size, (0, 1))] for size in MESSAGES],
        "sent": [[size, pair.send_seconds(size, 0, 1)] for size in MESSAGES],
        # In the second round the machine is half as fast.
        "divided": [[drift * PLAIN, drift * seconds] for drift in (1, 2)],
    }
    found = fit_link(measured, KNOWN, "fp32", PLAIN)
    assert found.collective_rate == pytest.approx(2e9)
    assert found.message_rate == pytest.approx(1e9)
    assert found.latency_seconds == pytest.approx(1e-4, rel=0.01)


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

    monkeypatch.setattr(fit, "_own_cores", lambda: list(range(cores)))
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
        ({"devices": 3}, "devices=3: expected at most 2: this machine has 2 cores"),
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
    monkeypatch.setattr(fit, "_own_cores", lambda: [0, 1])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        autoptd.calibrate(**given)


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(
        RuntimeError, match=r"process 0 of 1, which measured kernels, failed:(.|\n)*TypeError"
    ):
        fit._measure("kernel", 1, float("nan"), ["no core"])  # type: ignore[list-item]
