"""Tables 1 and 2 of SC21, their programs, and the calibration of the two shares that no data sheet has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

import autoptd
from autoptd.passes.cost.cluster import Cluster
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import make_schedule
from autoptd.simulate.step import Simulation, Training, simulate_program
from samples.benchmarks.paper_model import build_paper_model
from samples.benchmarks.uniform_cut import uniform_cuts

Errors = npt.NDArray[np.float64]

CLUSTER = "dgx-a100"
CALIBRATED_ON = ("1.7B", "18.4B", "1008B")
GEMM_SHARES = np.linspace(0.60, 1.0, 81)  # of the peak
MEMORY_SHARES = np.linspace(0.40, 1.0, 241)  # of the bandwidth


@dataclass(frozen=True)
class PaperRow:
    """One run of the paper: sizes, mesh, batch (sequences), and the TFLOP/s per GPU that it reached.

    `chunks` is v: table 1's as in the released scripts, table 2's is not stated and taken to be 1.
    """

    name: str
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    devices: int
    microbatch: int
    batch: int
    tflops: float
    chunks: int = 1

    @property
    def data(self) -> int:
        return self.devices // (self.tensor * self.pipeline)

    @property
    def num_microbatches(self) -> int:
        return self.batch // (self.microbatch * self.data)

    def alone(self) -> PaperRow:
        """What one of its replicas does."""
        return replace(self, devices=self.tensor * self.pipeline, batch=self.batch // self.data)


# How Megatron-LM of 2021 ran a step.
MEGATRON = Training(overlap=False, wide_gradients=False)

TABLE_1 = (
    PaperRow("1.7B", 24, 2304, 24, 1, 1, 32, 16, 512, 137),
    PaperRow("3.6B", 32, 3072, 30, 2, 1, 64, 16, 512, 138),
    PaperRow("7.5B", 32, 4096, 36, 4, 1, 128, 16, 512, 142),
    PaperRow("18.4B", 48, 6144, 40, 8, 1, 256, 8, 1024, 135),
    PaperRow("39.1B", 64, 8192, 48, 8, 2, 512, 4, 1536, 138),
    PaperRow("76.1B", 80, 10240, 60, 8, 4, 1024, 2, 1792, 140, 3),
    PaperRow("145.6B", 96, 12288, 80, 8, 8, 1536, 2, 2304, 148, 2),
    PaperRow("310.1B", 128, 16384, 96, 8, 16, 1920, 1, 2160, 155, 2),
    PaperRow("529.6B", 128, 20480, 105, 8, 35, 2520, 1, 2520, 163, 3),
    PaperRow("1008B", 160, 25600, 128, 8, 64, 3072, 1, 3072, 163),
)
TABLE_2 = (
    PaperRow("174.6B", 96, 12288, 96, 8, 12, 384, 1, 1536, 153),
    PaperRow("174.6B", 96, 12288, 96, 8, 12, 768, 1, 1536, 149),
    PaperRow("174.6B", 96, 12288, 96, 8, 12, 1536, 1, 1536, 141),
    PaperRow("529.6B", 128, 20480, 105, 8, 35, 560, 1, 2240, 171),
    PaperRow("529.6B", 128, 20480, 105, 8, 35, 1120, 1, 2240, 167),
    PaperRow("529.6B", 128, 20480, 105, 8, 35, 2240, 1, 2240, 159),
)
TABLE_2_ZERO3 = (
    PaperRow("174.6B", 96, 12288, 96, 1, 1, 384, 4, 1536, 144),
    PaperRow("174.6B", 96, 12288, 96, 1, 1, 768, 2, 1536, 88),
    PaperRow("174.6B", 96, 12288, 96, 1, 1, 1536, 1, 1536, 44),
    PaperRow("529.6B", 128, 20480, 105, 1, 1, 640, 4, 2560, 138),
    PaperRow("529.6B", 128, 20480, 105, 1, 1, 1120, 2, 2240, 98),
    PaperRow("529.6B", 128, 20480, 105, 1, 1, 2240, 1, 2240, 48),
)


def compile_row(row: PaperRow, model: nn.Module | None = None, **options: Any) -> autoptd.CompiledProgram:
    """The row's program, of another `model` maybe: cut by layers and every layer recomputed, as in both tables."""
    with uniform_cuts():
        return autoptd.compile(
            model or build_paper_model(row.layers, row.heads, row.hidden),
            mesh=(row.tensor, row.pipeline, row.data),
            microbatch_size=row.microbatch,
            num_microbatches=row.num_microbatches,
            schedule="1f1b" if row.chunks == 1 else "interleaved_1f1b",
            num_model_chunks=row.chunks,
            **{"recompute": "full", "sequence_parallel": False, **options},  # of 2021
        )


def simulate_row(
    program: autoptd.CompiledProgram, cluster: Cluster, row: PaperRow | None = None, *, scatter_gather: bool = True
) -> Simulation:
    """As Megatron-LM ran it: a rank waits for its messages and all-reduces, and sums gradients after the pipeline.

    With `row`, on its number of replicas and microbatches: the stages are the same.
    """
    mesh, count = program.mesh, program.manifest.num_microbatches
    if row is not None:
        mesh, count = Mesh(row.tensor, row.pipeline, row.data), row.num_microbatches
    manifest = replace(
        program.manifest, mesh=place_replicas(mesh), num_microbatches=count, scatter_gather=scatter_gather
    )
    schedule = make_schedule(
        manifest.schedule, manifest.mesh.pipeline, manifest.num_microbatches, manifest.num_model_chunks
    )
    return simulate_program(manifest, program.stages, schedule, cluster, None, MEGATRON)


def place_replicas(mesh: Mesh) -> Mesh:
    """The mesh with its ranks in Megatron-LM's order: replicas beside each other, pipeline ranks farthest apart."""
    t, p, d = mesh.tensor, mesh.pipeline, mesh.data
    ranks = tuple((j * d + i) * t + k for i in range(d) for j in range(p) for k in range(t))
    return Mesh(**mesh.axes, ranks=ranks)


def with_shares(cluster: Cluster, gemm: float, memory: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, gemm_efficiency=gemm, memory_efficiency=memory))


class Calibration:
    """TFLOP/s of all rows at any GEMM and memory share.

    A step's time is nearly linear in the two shares' inverses: measured on a grid of 3 x 3, fitted in between.
    """

    def __init__(self, programs: Mapping[str, autoptd.CompiledProgram], cluster: Cluster) -> None:
        self.names = tuple(programs)
        grid = list(product((0.72, 0.8, 0.88), (0.5, 0.6, 0.72)))
        terms = np.array([_terms(*shares) for shares in grid])
        tables = []
        for program in programs.values():
            inverse = [1 / simulate_row(program, with_shares(cluster, *s)).tflops_per_device for s in grid]
            tables.append(np.linalg.lstsq(terms, np.array(inverse), rcond=None)[0])
        pairs = np.array([_terms(g, m) for g, m in product(GEMM_SHARES, MEMORY_SHARES)])
        self.shares = list(product(GEMM_SHARES, MEMORY_SHARES))
        self.tflops = 1 / (pairs @ np.array(tables).T)  # [pairs of shares, rows]

    def fit(self, names: Sequence[str], wanted: Mapping[str, float]) -> tuple[tuple[float, float], np.ndarray]:
        """The shares with the least squared relative errors on the rows `names`, and all rows' errors there."""
        errors = self.tflops / np.array([wanted[name] for name in self.names]) - 1
        chosen = [self.names.index(name) for name in names]
        best = int(np.argmin((errors[:, chosen] ** 2).sum(axis=1)))
        gemm, memory = self.shares[best]
        return (float(gemm), float(memory)), errors[best]

    def spread(self, wanted: Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], Errors]]:
        """The errors of all rows, for each choice of three rows to calibrate on."""
        for names in combinations(self.names, 3):
            yield names, self.fit(names, wanted)[1]


def _terms(gemm: float, memory: float) -> tuple[float, ...]:
    return 1.0, 1 / gemm, 1 / memory, 1 / gemm**2, 1 / memory**2, 1 / (gemm * memory)
