"""Measure this machine: fit the values of a cluster to the times of kernels and messages.

The times are fitted to the cluster's own model: products to tiles; on CPUs, elementwise kernels and launches to whole
steps of small compiled transformers, so that everything in a program is measured and not only its products.
"""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from autoptd.calibration import kernel_timing, message_timing
from autoptd.calibration.kernel_timing import BLOCKS, DTYPES, compile_block, main_dtype
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.cluster import Cluster, Device, Link, Trust, round_flops
from autoptd.passes.cost.durations import Precision
from autoptd.passes.cost.work import Product
from autoptd.progress import show_progress
from autoptd.simulate.stage_times import time_stages

TILES = (16, 32, 64, 128, 256)
# Bounds of the search: of what decides the time of each of the blocks, and of a link's.
BLOCK_BOUNDS, LATENCIES = {"launch_seconds": (1e-9, 1e-2), "vector_flops": (1e7, 1e15)}, (1e-7, 1e-1)
RESOLUTION = 1e-9  # seconds: the least difference between two sizes of a message
MEASUREMENTS = {"kernel": kernel_timing.MEASUREMENTS, "message": message_timing.MEASUREMENTS}
HERE = Trust("all measured here, but for a network", 0.94, 1.06)  # as steps on two cores were to their prediction
PROCESSES = 2  # that time kernels at once, where there are as many devices

Results = Mapping[str, Sequence[Any]]


def calibrate(output: str | Path | None = None, *, devices: int | None = None, seconds: float = 20.0) -> Cluster:
    """Measure this machine and return a cluster of one node.

    Its devices are `devices` CUDA devices, or where there are none, cores that this process may use, each for one
    process of one thread; by default all of them. The file at `output` says of each value when and where it was
    measured. The network, which one machine cannot measure, is given as the links inside the node.

    Args:
        seconds: about how long to measure; starting processes takes some more.

    ValueError for impossible numbers or an `output` that cannot be written; RuntimeError with a process's failure.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = sorted(affinity(0)) if affinity else [*range(os.cpu_count() or 1)]
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available = cuda or len(cores)
    number = available if devices is None else devices
    _check(output, number, available, "CUDA devices" if cuda else "cores", seconds)
    main = main_dtype(torch.device("cuda" if cuda else "cpu"))
    groups = {"kernel": min(PROCESSES, available), "message": message_timing.PAIR if available > 1 else 0}
    found = {}
    with show_progress("calibrate") as say:
        for kind, ranks in groups.items():
            say(f"measure {kind}s")
            each = seconds / 2 / MEASUREMENTS[kind] / (1 if kind == "message" else 3)
            found[kind] = _measure(kind, ranks, each, cores[:PROCESSES]) if ranks else {}
    kernels, messages = found.values()
    device = fit_device(_describe_device(number, cuda), kernels, main)
    link = fit_link(messages, device, main, *kernels.get("plain", ())) if messages else _link_alone(device)
    cluster = Cluster(f"{number} x {device.name}", device, number, number, link, link, None if cuda else HERE)
    if output is not None:
        where = f"{datetime.now(UTC):%d %B %Y}, {device.name}, torch {torch.__version__}"
        others = dict.fromkeys(("network", "nics_per_node"), "not measured: as inside the node")
        cluster.save(output, f"measured {where}", others)
    return cluster


def describe_processor() -> str:
    """Return the processor's name, as the operating system reports it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def fit_device(device: Device, measured: Results, main: str) -> Device:
    """Return `device` with values fitted to the times of `time_kernels`, most of them in the dtype `main`.

    A CUDA device computes elementwise as fast as products outside of its tensor cores, in float32.
    """
    products = [(name, Product(1, m, n, k), seconds) for name, m, n, k, seconds in measured["products"]]
    peaks = {name: max(p.flops / s for other, p, s in products if other == name) for name in DTYPES}
    own = [(p, s) for name, p, s in products if name == main]
    tile = min(product(TILES, TILES), key=lambda tile: _spread(own, tile, device.multiprocessors))
    reached = statistics.median(round_flops(p, *tile, device.multiprocessors) / s for p, s in own)
    peaks[main] = max(peaks[main], reached)  # no product may fill all multiprocessors
    bandwidth = max(size / s for size, s in measured["copies"])
    device = replace(
        device,
        peak_flops=peaks,
        memory_bandwidth=bandwidth,
        memory_efficiency=max(measured["copies"])[0] / max(measured["copies"])[1] / bandwidth,
        gemm_efficiency=reached / peaks[main],
        tile_rows=tile[0],
        tile_columns=tile[1],
    )
    for launches in measured.get("launches", ()):
        return replace(device, vector_flops=peaks["fp32"], **launches)
    steps = zip(BLOCK_BOUNDS.items(), BLOCKS, measured["blocks"], strict=True)
    for (name, bounds), sizes, seconds in 3 * list(steps):  # each value has a small part in the other's time
        make = partial(_with_value, device, name)
        device = _solve(make, bounds, compile_block(sizes, main), seconds).device
    return device


def fit_link(measured: Results, device: Device, main: str, plain: float = math.nan) -> Link:
    """Return the link between devices like `device`, fitted to the times of `time_messages`.

    On such a device a plain step takes `plain` seconds; the measured steps, if there are any, are scaled to it.
    """
    collective, message = (_fit_rate(measured[name]) for name in ("reduced", "sent"))
    bandwidth = max(collective, message)
    link = Link(bandwidth, message / bandwidth, collective / bandwidth, 1.0)
    if "divided" not in measured:  # the smallest all-reduce of two ranks is two messages' latency
        return replace(link, latency_seconds=min(measured["reduced"])[1] / 2)
    seconds = plain * statistics.median(divided / alone for alone, divided in measured["divided"])
    program = compile_block(kernel_timing.DIVIDED, main, 2)

    def make(latency: float) -> Cluster:
        own = replace(link, latency_seconds=latency)
        return Cluster("", device, 2, 2, own, own)

    return _solve(make, LATENCIES, program, seconds).node


def _fit_rate(timed: Sequence[tuple[float, float]]) -> float:
    """Return bytes/s from the difference of two sizes: an all-reduce of two ranks sends as many bytes as a message."""
    (small, early), (large, late) = sorted(timed)
    return (large - small) / max(late - early, RESOLUTION)


def _link_alone(device: Device) -> Link:
    """Return the link of a device without peers, whose messages to itself would be copies in its memory."""
    return Link(device.memory_bandwidth, 1.0, 1.0, device.launch_seconds)


def _with_value(device: Device, name: str, value: Any) -> Cluster:
    link = _link_alone(device := replace(device, **{name: value}))
    return Cluster("", device, 1, 1, link, link)


def _spread(timed: Sequence[tuple[Product, float]], tile: tuple[int, int], multiprocessors: int) -> float:
    """Return the standard deviation of the products' log rates, counting the FLOPs that tiles of that size waste."""
    return statistics.pstdev(math.log(round_flops(p, *tile, multiprocessors) / s) for p, s in timed)


def _solve(
    make: Callable[[float], Cluster], bounds: tuple[float, float], program: CompiledProgram, seconds: float
) -> Cluster:
    """Return the cluster of the value within `bounds` for which a step of `program` takes closest to `seconds`."""
    low, high = bounds

    def predict(value: float) -> float:
        (times,) = time_stages(program.manifest, program.stages, make(value), Precision.of(program.stages))
        return kernel_timing.MICROBATCHES * (times.forward.total + times.backward.total)

    rising = predict(high) > predict(low)
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (predict(middle) < seconds) == rising else (low, middle)
    return make(math.sqrt(low * high))


# This machine


def _describe_device(number: int, cuda: int) -> Device:
    """Return what the system reports of a device, with 1 for every value that is to be measured."""
    if cuda:
        card = torch.cuda.get_device_properties(0)
        name, size, multiprocessors = card.name, card.total_memory, card.multi_processor_count
    else:
        name, multiprocessors = f"core of {describe_processor()}", 1
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // number
    return Device(name, {}, size, 1.0, 1.0, 1.0, 1.0, multiprocessors, 1, 1, 1.0)


def _check(output: str | Path | None, devices: int, available: int, kind: str, seconds: float) -> None:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r}: expected a whole number above 0")
    if devices > available:
        raise ValueError(
            f"devices={devices}: expected at most {available}, the {kind} of this machine, which processes do not share"
        )
    if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds!r}: expected a time above 0")
    if output is not None and (Path(output).suffix != ".toml" or not Path(output).absolute().parent.is_dir()):
        raise ValueError(f"output={str(output)!r}: expected a path that ends in .toml, in an existing folder")


def _measure(kind: str, world_size: int, seconds: float, cores: Sequence[int]) -> dict[str, Any]:
    """Run `world_size` processes that measure at once on `cores`, and return the results of the first."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}

    def run(rank: int) -> str:
        words = (str(rank), str(world_size), str(seconds), folder, json.dumps(list(cores)))
        command = [sys.executable, "-m", f"autoptd.calibration.{kind}_timing", *words]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ended.returncode:
            which = f"process {rank} of {world_size}, which measured {kind}s"
            raise RuntimeError(f"{which}, failed:\n{ended.stderr}")
        return ended.stdout

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(world_size) as pool:
        first, *_ = pool.map(run, range(world_size))
    results: dict[str, Any] = json.loads(first)
    return results
