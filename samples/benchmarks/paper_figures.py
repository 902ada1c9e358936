"""The orderings of SC21's figures 12 to 18, from simulated steps, with no further calibration.

python -m samples.benchmarks.paper_figures [--write] [figure or "fusion" ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from autoptd.passes.cost.cluster import Cluster
from samples.benchmarks.paper_model import build_paper_model
from samples.benchmarks.paper_rows import CLUSTER, PaperRow, compile_row, simulate_row
from samples.benchmarks.report import publish

Cells = Sequence[object]
GPT_175B = PaperRow("175B", 96, 12288, 96, 8, 12, 96, 1, 12, 0)
GPT_530B = PaperRow("530B", 128, 20480, 105, 8, 35, 280, 1, 280, 0)
GPT_162B = PaperRow("162B", 128, 20480, 32, 8, 8, 64, 1, 32, 0)
GPT_6B = PaperRow("5.9B", 32, 3840, 32, 1, 2, 64, 1, 32, 0)
GPT_145B = PaperRow("145B", 96, 12288, 80, 8, 16, 128, 1, 16, 0)
GPT_91B = PaperRow("91B", 80, 10240, 72, 8, 8, 64, 1, 128, 0)  # sizes not given: 72 x 10240 are 91 billion


def compare_schedules(cluster: Cluster) -> Iterator[Cells]:
    """Figures 12 and 18: 1F1B, interleaved with scatter/gather and without, over the batch.

    The paper does not say how many chunks it has: shown are v = 4, two layers each, and what 2 and 8 would gain.
    """
    programs = {v: compile_row(replace(GPT_175B, chunks=v)) for v in (1, 2, 4, 8)}
    for batch in (12, 24, 36, 48, 60, 120, 240):  # the paper stops at 60
        row = replace(GPT_175B, batch=batch)
        pieces, whole = (
            {
                v: simulate_row(program, cluster, row, scatter_gather=divided).tflops_per_device
                for v, program in programs.items()
            }
            for divided in (True, False)
        )
        shown = (pieces[1], pieces[4], whole[1], whole[4])
        gains = (pieces[v] / whole[v] - 1 for v in (2, 4, 8))
        yield batch, *(f"{one:.1f}" for one in shown), *(f"{gain:+.1%}" for gain in gains)


def compare_tensor_with_pipeline(cluster: Cluster) -> Iterator[Cells]:
    """Figure 13: 64 devices as (p, t); b = 1."""
    for tensor in (2, 4, 8, 16, 32):
        own = replace(GPT_162B, tensor=tensor, pipeline=64 // tensor)
        program = compile_row(own)
        rows = [replace(own, batch=batch) for batch in (32, 128)]
        yield (
            f"{own.pipeline}, {tensor}",
            *(f"{simulate_row(program, cluster, row).tflops_per_device:.1f}" for row in rows),
        )


def compare_pipeline_with_data(cluster: Cluster) -> Iterator[Cells]:
    """Figure 14: 64 devices as (p, d); b = 1."""
    for pipeline in (2, 4, 8, 16, 32):
        own = replace(GPT_6B, pipeline=pipeline)
        program = compile_row(own)
        rows = [replace(own, batch=batch) for batch in (32, 128, 512)]
        yield (
            f"{pipeline}, {own.data}",
            *(f"{simulate_row(program, cluster, row).tflops_per_device:.1f}" for row in rows),
        )


def compare_tensor_with_data(cluster: Cluster) -> Iterator[Cells]:
    """Figure 15: 64 devices as (t, d); b = 1."""
    for tensor in (2, 4, 8, 16, 32):
        own = replace(GPT_6B, pipeline=1, tensor=tensor)
        program = compile_row(own)
        rows = [replace(own, batch=batch) for batch in (32, 128, 512)]
        yield (
            f"{tensor}, {own.data}",
            *(f"{simulate_row(program, cluster, row).tflops_per_device:.1f}" for row in rows),
        )


def compare_microbatches(cluster: Cluster) -> Iterator[Cells]:
    """Figure 16: (t, p) = (8, 8)."""
    for microbatch in (1, 2, 4, 8):
        own = replace(GPT_91B, microbatch=microbatch)
        program = compile_row(own)
        rows = [replace(own, batch=batch) for batch in (128, 512)]
        yield microbatch, *(f"{simulate_row(program, cluster, row).tflops_per_device:.1f}" for row in rows)


def compare_recomputation(cluster: Cluster) -> Iterator[Cells]:
    """Figure 17: (t, p) = (8, 16); b = 1. Each activation is kept, or every layer computed again."""
    programs = [compile_row(GPT_145B, recompute=mode) for mode in ("none", "full")]
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        row = replace(GPT_145B, batch=batch)
        kept, again = (simulate_row(program, cluster, row) for program in programs)
        yield (
            batch,
            *(f"{batch / one.step_seconds:.2f}" for one in (kept, again)),
            f"{kept.step_seconds / again.step_seconds - 1:+.1%}",
            *(f"{max(one.memory_bytes) / 1e9:.0f} GB" + " (too much)" * (not one.fits) for one in (kept, again)),
        )


def compare_fusion(cluster: Cluster) -> Iterator[Cells]:
    """SC21 §5.8: the same steps with each operator a kernel, and fused. The paper does not say on what batch."""
    for row, paper in ((replace(GPT_175B, batch=60), "113 to 135, +19%"), (GPT_530B, "133 to 148, +11%")):
        model = build_paper_model(row.layers, row.heads, row.hidden, fused=False)
        programs = compile_row(row, model, fuse=False), compile_row(row)
        plain, fused = (simulate_row(program, cluster).tflops_per_device for program in programs)
        yield row.name, row.batch, f"{plain:.1f}", f"{fused:.1f}", f"{fused / plain - 1:+.1%}", paper


FIGURES: Mapping[str, tuple[str, Sequence[str], Callable[[Cluster], Iterator[Cells]]]] = {
    "12": (
        "175 billion parameters on 96 devices: schedules and scatter/gather (SC21 figures 12 and 18)",
        [
            "batch",
            "1F1B",
            "interleaved",
            "1F1B, whole",
            "interleaved, whole",
            *(f"pieces gain, v = {v}" for v in (2, 4, 8)),
        ],
        compare_schedules,
    ),
    "13": (
        "162 billion parameters on 64 devices: tensor and pipeline (SC21 figure 13)",
        ["p, t", "batch 32", "batch 128"],
        compare_tensor_with_pipeline,
    ),
    "14": (
        "5.9 billion parameters on 64 devices: pipeline and data (SC21 figure 14)",
        ["p, d", "batch 32", "batch 128", "batch 512"],
        compare_pipeline_with_data,
    ),
    "15": (
        "5.9 billion parameters on 64 devices: tensor and data (SC21 figure 15)",
        ["t, d", "batch 32", "batch 128", "batch 512"],
        compare_tensor_with_data,
    ),
    "16": (
        "91 billion parameters on 64 devices, t = p = 8: the microbatch (SC21 figure 16)",
        ["b", "batch 128", "batch 512"],
        compare_microbatches,
    ),
    "17": (
        "145 billion parameters on 128 devices, (t, p) = (8, 16): recomputation (SC21 figure 17)",
        ["batch", "sequences/s", "recomputed", "gain", "largest rank", "recomputed"],
        compare_recomputation,
    ),
    "fusion": (
        "Fused operators (SC21 §5.8)",
        ["model", "batch", "each a kernel", "fused", "gain", "paper"],
        compare_fusion,
    ),
}

RATE = "TFLOP/s per device by equation (3), every layer recomputed."
NOTES = {
    "17": ("Sequences a second, without and with every layer recomputed.",),
    "fusion": (
        RATE,
        "each a kernel: as Megatron-LM without its own, the softmax in float32 by a cast, scale, mask, softmax and a "
        "cast, and the bias before the GeLU apart",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", default=list(FIGURES), help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--write", action="store_true", help="keep the tables in results/")
    asked = parser.parse_args()
    cluster = Cluster.load(CLUSTER)
    for figure in asked.figures:
        title, columns, compare = FIGURES[figure]
        publish(
            f"paper_figure_{figure}",
            title,
            columns,
            list(compare(cluster)),
            list(NOTES.get(figure, [RATE])),
            asked.write,
            script="paper_figures",
        )


if __name__ == "__main__":
    main()
