"""Measure this machine: a cluster whose values are what kernels and messages take here.

Times are fitted to the cluster's own model: products to tiles, the kernels beside them and the launches to whole
steps of small compiled transformers, so that what a program consists of is measured and not only its products.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autoptd.calibration.kernel_timing import (
    BLOCKS,
    COPIES,
    DIVIDED,
    DTYPES,
    MICROBATCHES,
    SHAPES,
    compile_block,
    main_dtype,
)
from autoptd.calibration.message_timing import MESSAGES, PAIR, ROUNDS
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.cluster import Cluster, Device, Link, round_flops
from autoptd.passes.cost.durations import Precision
from autoptd.passes.cost.work import Product
from autoptd.simulate.stage_times import time_stages

TILES = (16, 32, 64, 128, 256)
LAUNCHES, VECTORS, LATENCIES = (1e-9, 1e-2), (1e7, 1e15), (1e-7, 1e-1)  # where the values are looked for
RESOLUTION = 1e-9  # seconds: what two sizes of a message differ in at least
MEASUREMENTS = {
    "kernel": len(DTYPES) + len(SHAPES) - 1 + len(COPIES) + len(BLOCKS) + 1,
    "message": 2 * len(MESSAGES) + ROUNDS,
}
PROCESSES = 2  # that compute at once, where there are devices for it
MOST_PAIRS = 4  # that share these cores: they find their caches as cold as more would

Results = Mapping[str, Sequence[Any]]


def calibrate(
    output: str | Path | None = None, *, devices: int | None = None, seconds: float = 20.0
) -> Cluster:
    """Measure this machine, with a bar on a terminal; a cluster of one node, written to `output` where it is given.

    CUDA devices where there are any, else processes of one thread: `devices` of them (default one for each core)
    share the cores this process may use; what sharing costs is measured with as many on a core. The file says of each
    value that, when and where it was measured; what cannot be measured on one machine, its network, it gives as links
    inside the node.

    Args:
        seconds: how long to measure, about; processes take some to start.

    Raises ValueError for numbers that cannot be and an `output` that cannot be written, RuntimeError with what a
    process said that failed.
    """
    cores = _own_cores()
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = devices if devices is not None else cuda or len(cores)
    _check(output, number, cuda, seconds)
    main = main_dtype(torch.device("cuda" if cuda else "cpu"))
    pairs = 1
    if not cuda and len(cores) > 1 and hasattr(os, "sched_setaffinity"):  # as many on a core as there will be
        pairs = min(MOST_PAIRS, math.ceil(number / len(cores)))
    groups = {"kernel": min(PROCESSES, cuda or len(cores)), "message": PAIR * pairs if cuda != 1 else 0}
    times = {
        kind: seconds / 2 / count / (1 if kind == "message" else 3) for kind, count in MEASUREMENTS.items()
    }
    with _Bar() as bar:
        kernels, messages = (
            _measure(kind, ranks, times[kind], cores[:PROCESSES], bar.step) if ranks else {}
            for kind, ranks in groups.items()
        )
    device = fit_device(_describe_device(number, cuda), kernels, main)
    device = fit_crowd(device, messages) if messages else device
    link = fit_link(messages, device, main, *kernels["plain"]) if messages else _link_alone(device)
    cluster = Cluster(
        f"{number} x {device.name}",
        device,
        number,
        number if cuda else min(len(cores), number),
        number,
        link,
        link,
    )
    if output is not None:
        where = f"{datetime.now(UTC):%d %B %Y}, {device.name}, torch {torch.__version__}"
        apart = "not measured: as inside the node"
        others = {"network": apart, "nics_per_node": apart}
        if pairs == 1:
            alone = "not measured: as of a core that is not shared"
            others |= {"crowded_efficiency": alone, "crowded_seconds": alone}
        cluster.save(output, f"measured {where}", others)
    return cluster


def describe_processor() -> str:
    """The processor's name as the system has it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def fit_device(device: Device, measured: Results, main: str) -> Device:
    """The device that takes what `kernel_timing.time_kernels` measured, most of it in the dtype `main`."""
    products = [(name, Product(1, m, n, k), seconds) for name, m, n, k, seconds in measured["products"]]
    peaks = {name: max(p.flops / s for other, p, s in products if other == name) for name in DTYPES}
    own = [(p, s) for name, p, s in products if name == main]
    tile = min(product(TILES, TILES), key=lambda tile: _spread(own, tile, device.multiprocessors))
    rates = [round_flops(p, *tile, device.multiprocessors) / s for p, s in own]
    bandwidth = max(size / s for size, s in measured["copies"])
    device = replace(
        device,
        peak_flops=peaks,
        memory_bandwidth=bandwidth,
        memory_efficiency=max(measured["copies"])[0] / max(measured["copies"])[1] / bandwidth,
        gemm_efficiency=min(1.0, statistics.median(rates) / peaks[main]),
        tile_rows=tile[0],
        tile_columns=tile[1],
    )
    seconds, blocks = measured["blocks"], [compile_block(sizes, main) for sizes in BLOCKS]
    for _ in range(3):  # each has a little of the other
        device = _solve(partial(_with_launches, device), LAUNCHES, blocks[0], seconds[0]).device
        device = _solve(partial(_with_vectors, device), VECTORS, blocks[1], seconds[1]).device
    return device


def fit_crowd(device: Device, measured: Results) -> Device:
    """The device with what is left of its speed where processes take turns on it, by `message_timing.time_messages`."""
    left = statistics.median(plain / shared for plain, *_, shared in measured["divided"])
    return replace(device, crowded_efficiency=min(1.0, left))


def fit_link(measured: Results, device: Device, main: str, plain: float) -> Link:
    """The link that takes what `message_timing.time_messages` measured, between devices like `device`.

    On these a plain step takes `plain` seconds: what the steps took is put in proportion to it.
    """
    collective, message = (_fit_rate(measured[name]) for name in ("reduced", "sent"))
    bandwidth = max(collective, message)
    link, program = (
        Link(bandwidth, message / bandwidth, collective / bandwidth, 1.0, 1.0, 1.0),
        compile_block(DIVIDED, main, 2),
    )
    times = [plain * statistics.median(row[i] / row[0] for row in measured["divided"]) for i in (1, 2, 3)]
    latency, core, crowded = (
        _solve(partial(_with_latency, own, link), LATENCIES, program, seconds).node.latency_seconds
        for own, seconds in zip((device, device, device.crowded), times, strict=True)
    )
    core = min(core, latency)
    return replace(link, latency_seconds=latency, core_seconds=core, crowded_seconds=max(core, crowded))


def _fit_rate(timed: Sequence[tuple[float, float]]) -> float:
    """Bytes/s, by what two sizes differ in: an all-reduce of two ranks sends all bytes as a message does."""
    (small, early), (large, late) = sorted(timed)
    return (large - small) / max(late - early, RESOLUTION)


def _link_alone(device: Device) -> Link:
    """Of a device without peers: its messages to itself would be copies in its memory."""
    return Link(device.memory_bandwidth, 1.0, 1.0, *[device.launch_seconds] * 3)


def _with_launches(device: Device, seconds: float) -> Cluster:
    device = replace(device, launch_seconds=seconds)
    return Cluster("", device, 1, 1, 1, _link_alone(device), _link_alone(device))


def _with_vectors(device: Device, flops: float) -> Cluster:
    return _with_launches(replace(device, vector_flops=flops), device.launch_seconds)


def _with_latency(device: Device, link: Link, seconds: float) -> Cluster:
    link = replace(link, latency_seconds=seconds, core_seconds=seconds, crowded_seconds=seconds)
    return Cluster("", device, 2, 2, 2, link, link)


def _spread(timed: Sequence[tuple[Product, float]], tile: tuple[int, int], multiprocessors: int) -> float:
    """How unlike the rates are at which products are computed, with what tiles of that size waste."""
    return statistics.pstdev(math.log(round_flops(p, *tile, multiprocessors) / s) for p, s in timed)


def _solve(
    make: Callable[[float], Cluster], bounds: tuple[float, float], program: CompiledProgram, seconds: float
) -> Cluster:
    """The cluster, made of a value within `bounds`, where a step of `program` takes `seconds`, or nearest to it."""
    low, high = bounds

    def predict(value: float) -> float:
        (times,) = time_stages(program.manifest, program.stages, make(value), Precision.of(program.stages))
        return MICROBATCHES * (times.forward.total + times.backward.total)

    rising = predict(high) > predict(low)
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (predict(middle) < seconds) == rising else (low, middle)
    return make(math.sqrt(low * high))


# This machine


def _own_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _describe_device(number: int, cuda: int) -> Device:
    """What the system says of a device; what is to be measured is 1."""
    if cuda:
        card = torch.cuda.get_device_properties(0)
        name, size, multiprocessors = card.name, card.total_memory, card.multi_processor_count
    else:
        name, multiprocessors = f"core of {describe_processor()}", 1
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // number
    return Device(name, {}, size, 1.0, 1.0, 1.0, 1.0, multiprocessors, 1, 1, 1.0, 1.0)


def _check(output: str | Path | None, devices: int, cuda: int, seconds: float) -> None:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r}: expected a whole number above 0")
    if cuda and devices > cuda:
        raise ValueError(
            f"devices={devices}: this machine has {cuda} CUDA devices, which no two processes share"
        )
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds!r}: expected a time above 0")
    if output is not None and (Path(output).suffix != ".toml" or not Path(output).absolute().parent.is_dir()):
        raise ValueError(
            f"output={str(output)!r}: expected a path that ends in .toml, in a folder that there is"
        )


# Processes


class _Bar(Progress):
    """On a terminal, how many of all measurements are done."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self.add_task("", total=sum(MEASUREMENTS.values()))

    def step(self, name: str) -> None:
        self.update(self._task, advance=1, description=name)


def _measure(
    kind: str, world_size: int, seconds: float, cores: Sequence[int], done: Callable[[str], None]
) -> dict[str, Any]:
    """Let `world_size` processes measure at once, on `cores`; the first one's results."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _start(
                Path(folder), environment, kind, rank, world_size, seconds, folder, json.dumps(list(cores))
            )
            for rank in range(world_size)
        ]
        first, last = processes[0].stdout, ""
        assert first is not None
        for line in first:
            last = line
            done(kind)
        failed = [rank for rank, process in enumerate(processes) if process.wait()]
        if failed:
            words = (Path(folder) / f"{failed[0]}.log").read_text()
            raise RuntimeError(
                f"process {failed[0]} of {world_size}, which measured {kind}s, failed:\n{words}"
            )
    results: dict[str, Any] = json.loads(last)
    return results


def _start(
    folder: Path, environment: Mapping[str, str], kind: str, rank: int, *words: object
) -> subprocess.Popen[str]:
    """Rank 0 is listened to; what any of them complains of is kept in a file."""
    command = [sys.executable, "-m", f"autoptd.{kind}_timing", *map(str, (rank, *words))]
    output = subprocess.DEVNULL if rank else subprocess.PIPE
    with (folder / f"{rank}.log").open("w") as log:
        return subprocess.Popen(command, stdout=output, stderr=log, text=True, env=environment)
