"""Tables 1 and 2 of SC21 beside the simulated steps of the compiled programs.

    python -m samples.benchmarks.paper_tables [--write] [1] [2]

Two shares that no data sheet has, of the peak in GEMMs and of the bandwidth in elementwise kernels, were calibrated on
three rows of table 1 and frozen in passes/cost/clusters/dgx-a100.toml; all other values are public. Compiles 18
programs: some minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

import numpy as np

import autoptd
from autoptd.passes.cost.cluster import Cluster
from samples.benchmarks.paper_rows import (
    CALIBRATED_ON,
    CLUSTER,
    TABLE_1,
    TABLE_2,
    TABLE_2_ZERO3,
    Calibration,
    compile_row,
    simulate_row,
)
from samples.benchmarks.report import publish
from samples.benchmarks.zero3 import simulate_zero3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the tables in results/")
    parser.add_argument("tables", nargs="*", default=["1", "2"], help="1, 2 or both")
    asked = parser.parse_args()
    cluster = Cluster.load(CLUSTER)
    for table in asked.tables:
        {"1": publish_table_1, "2": publish_table_2}[table](cluster, asked.write)


def publish_table_1(cluster: Cluster, write: bool) -> None:
    programs = {row.name: compile_row(row) for row in TABLE_1}
    publish(
        "paper_table_1",
        "SC21 table 1, simulated on the described Selene (TFLOP/s per device, equation (3))",
        [
            "model",
            "t, p, d",
            "v",
            "m",
            "paper",
            "simulated",
            "error",
            "bubble",
            "tensor",
            "data",
            "largest rank",
            "simulated in",
        ],
        show_table_1(programs, cluster),
        describe_calibration(Calibration(programs, cluster)),
        write,
        script="paper_tables",
    )


def publish_table_2(cluster: Cluster, write: bool) -> None:
    publish(
        "paper_table_2",
        "SC21 table 2, simulated on the described Selene (TFLOP/s per device, equation (3))",
        ["model", "scheme", "devices", "b", "paper", "simulated", "error"],
        show_table_2(cluster),
        [
            "v, which the paper does not state, is taken to be 1.",
            "ZeRO-3: parameters gathered one by one, nothing overlapped; one number, the share of a ring's rate, is "
            "fitted on these rows (autoptd/simulate/zero3.py).",
        ],
        write,
        script="paper_tables",
    )


def show_table_1(programs: Mapping[str, autoptd.CompiledProgram], cluster: Cluster) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    errors = []
    for row in TABLE_1:
        begin = time.process_time()
        step = simulate_row(programs[row.name], cluster)
        seconds = f"{time.process_time() - begin:.2f} s"
        errors.append(step.tflops_per_device / row.tflops - 1)
        shares = [f"{step.breakdown[kind] / step.step_seconds:.1%}" for kind in ("bubble", "tensor", "data")]
        memory = f"{max(step.memory_bytes) / 1e9:.1f} GB"
        mesh = f"{row.tensor}, {row.pipeline}, {row.data}"
        found = f"{step.tflops_per_device:.1f}"
        counts = (row.chunks, row.num_microbatches, f"{row.tflops:g}")
        rows.append((row.name, mesh, *counts, found, f"{errors[-1]:+.1%}", *shares, memory, seconds))
    rows.append(("mean", *[""] * 5, f"{np.abs(errors).mean():.1%}", *[""] * 5))
    return rows


def describe_calibration(calibration: Calibration) -> list[str]:
    wanted = {row.name: row.tflops for row in TABLE_1}
    shares, errors = calibration.fit(CALIBRATED_ON, wanted)
    spread = [np.abs(errors) for _, errors in calibration.spread(wanted)]
    largest, mean = (np.array([measure(e) for e in spread]) for measure in (np.max, np.mean))
    return [
        f"Calibrated on {', '.join(CALIBRATED_ON)}: {shares[0]:.3f} of the peak in GEMMs, {shares[1]:.4f} of the "
        f"memory bandwidth; errors there {', '.join(f'{e:+.1%}' for e in errors)}.",
        f"Over all {len(spread)} choices of three rows: largest error {largest.min():.1%} to {largest.max():.1%}, "
        f"median {np.median(largest):.1%}, below 9 % for {(largest < 0.09).sum()}; mean error {mean.min():.1%} to "
        f"{mean.max():.1%}, median {np.median(mean):.1%}, below 3 % for {(mean < 0.03).sum()}.",
        "Simulated in: CPU time, the program compiled.",
    ]


def show_table_2(cluster: Cluster) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for row in TABLE_2_ZERO3:
        found = simulate_zero3(compile_row(row.alone()), cluster, row.devices).tflops_per_device
        rows.append(_compare(row.name, "ZeRO-3", row.devices, row.microbatch, row.tflops, found))
    for name in dict.fromkeys(row.name for row in TABLE_2):
        group = [row for row in TABLE_2 if row.name == name]
        program = compile_row(group[0])
        for row in group:
            found = simulate_row(program, cluster, row).tflops_per_device
            rows.append(_compare(row.name, "PTD-P", row.devices, row.microbatch, row.tflops, found))
    return rows


def _compare(name: str, scheme: str, devices: int, microbatch: int, paper: float, found: float) -> Sequence[object]:
    return name, scheme, devices, microbatch, f"{paper:g}", f"{found:.1f}", f"{found / paper - 1:+.1%}"


if __name__ == "__main__":
    main()
