"""The peak of each rank's memory over a training step, beside what the simulator says the rank will hold.

A GPT with hundreds of megabytes of weights, optimizer states and activations is compiled from the meta device and
trained on CPU processes, one thread each: forwards and backwards, sums of gradients, clipping, fused AdamW (in some
cases sharded). After a step in which the optimizer makes its states, one step is watched by the operating system, and
one by torch's profiler, which sees every block that torch's allocator gives out: to what lives before the step it adds
what comes and goes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

import autoptd
from autoptd.runtime.health.malloc import M_MMAP_THRESHOLD
from autoptd.runtime.module.parallel import Parallel
from samples.benchmarks.process_memory import begin_peak, read_memory
from samples.benchmarks.report import publish
from samples.gpt import GPT, GPTConfig

MEGABYTE = 1e6


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch: `b` sequences a microbatch."""

    hidden: int = 384
    layers: int = 8
    heads: int = 6
    length: int = 256
    vocabulary: int = 8192
    b: int = 2

    def make_model(self) -> GPT:
        with torch.device("meta"):
            return GPT(GPTConfig(self.vocabulary, self.length, self.layers, self.heads, self.hidden))

    def make_batch(self, microbatches: int) -> dict[str, Tensor]:
        shape = (microbatches * self.b, self.length)
        return {name: torch.randint(0, self.vocabulary, shape) for name in ("idx", "targets")}


@dataclass(frozen=True)
class Case:
    """A mesh (tensor, pipeline, data), stages a pipeline rank, what is recomputed, and how the optimizer keeps it."""

    mesh: tuple[int, int, int]
    num_model_chunks: int = 1
    recompute: str = "none"
    microbatches: int = 4
    dtype: torch.dtype = torch.float32
    sharded: bool = False

    def compile(self, sizes: Sizes) -> autoptd.CompiledProgram:
        return autoptd.compile(
            sizes.make_model().to(self.dtype),
            self.mesh,
            example_inputs=sizes.make_batch(1),
            num_microbatches=self.microbatches,
            num_model_chunks=self.num_model_chunks,
            recompute=self.recompute,
        )

    def predict(self, program: autoptd.CompiledProgram) -> tuple[int, ...]:
        """Bytes by pipeline rank."""
        cluster = autoptd.Cluster.load("laptop-cpu")
        return program.simulate(cluster, zero=int(self.sharded)).memory_bytes

    @property
    def schedule(self) -> str:
        if self.mesh[1] == 1:
            return "-"
        return "1F1B" if self.num_model_chunks == 1 else f"interleaved, v = {self.num_model_chunks}"


CASES = (
    Case((1, 1, 1)),
    Case((1, 1, 1), recompute="selective"),
    Case((1, 1, 1), recompute="full"),
    Case((2, 1, 1)),
    Case((1, 1, 2)),
    Case((1, 2, 1)),
    Case((1, 2, 1), recompute="full"),
    Case((1, 2, 1), num_model_chunks=2),
    Case((2, 2, 2)),
    Case((2, 2, 2), num_model_chunks=2, recompute="full"),
    Case((1, 1, 2), sharded=True),
    Case((1, 2, 2), sharded=True),
    Case((1, 2, 1), dtype=torch.bfloat16),
    Case((1, 1, 2), dtype=torch.bfloat16),
    Case((1, 1, 2), dtype=torch.bfloat16, sharded=True),
    Case((1, 2, 2), dtype=torch.bfloat16, sharded=True),
)


@dataclass(frozen=True)
class Peak:
    """Bytes of live tensors before a step, and at most during it; the latter as the system sees it too."""

    before: int
    live: int
    resident: int


def measure_peak(program: autoptd.CompiledProgram, sizes: Sizes, sharded: bool) -> Peak:
    """Of this process's rank, in the training steps of `program`."""
    parallel = program.bind("cpu")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
    if sharded:
        parallel.shard_optimizer(optimizer)
    batch = sizes.make_batch(program.manifest.num_microbatches)

    def step() -> None:
        parallel(**batch)[1].backward()
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        list(parallel.parameters())  # waits for the new weights of a sharded one

    step()
    before = count_live(parallel, optimizer)
    resident = begin_peak()
    step()
    resident = read_memory("VmHWM") - resident
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
        time.sleep(0.1)  # gloo's threads let go of what they sent: into a profiler that has stopped, they crash
    live = before + find_peak(list_allocations(profiled))
    return Peak(before, live, before + resident)


def count_live(parallel: Parallel, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, narrow copies of them, buffers, what the optimizer steps, its states, sums of gradients, and
    what slots hold all the time."""
    kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    kept += [x for group in optimizer.param_groups for x in group["params"]]
    kept += [*parallel.parameters(), *parallel.buffers(), *parallel._weights.narrow.values()]
    sums = parallel._weights.sums._memory
    kept += [*(bucket.flat for bucket in sums), *(x for later in sums.further.values() for x in later)]
    stages = [stage for shape in parallel._shapes for stage in shape.stages.values()]
    kept += [x for stage in stages for slot in stage._slots for x in (*slot.values, *slot.gradients)]
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    return sum(held.values())


def list_allocations(profiled: profile) -> list[int]:
    """What torch's allocator gave out, and took back (negative), in order.

    What gloo's own threads give back the profiler does not see: it is gone once its place is given out again.
    """
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    found = []
    left = list(profiled.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        fields = event.typed[1]
        if isinstance(fields, _ExtraFields_Allocation):
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    changes = []
    held: dict[int, int] = {}
    for _, place, size in sorted(found, key=lambda one: one[0]):
        changes.append(size - held.pop(place, 0) if size > 0 else size)
        if size > 0:
            held[place] = size
        else:
            held.pop(place, None)
    return changes


def find_peak(changes: Iterable[int]) -> int:
    """The largest sum of a beginning of `changes`."""
    peak = held = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def _work(rank: int, case: Case, sizes: Sizes, folder: str) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)  # larger blocks are given back when they are freed
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)  # has bind leave it so
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same batch everywhere
    processes = math.prod(case.mesh)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
    if processes > 1:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
    peak = measure_peak(case.compile(sizes), sizes, case.sharded)
    Path(folder, f"{rank}.json").write_text(json.dumps([peak.before, peak.live, peak.resident]))
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(case: Case, sizes: Sizes) -> list[Peak]:
    """The peaks of all ranks, each a process."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (case, sizes, folder), nprocs=math.prod(case.mesh))
        return [Peak(*json.loads(Path(folder, f"{rank}.json").read_text())) for rank in range(math.prod(case.mesh))]


def compare(case: Case, sizes: Sizes) -> Iterator[list[str]]:
    """A row for each pipeline rank; of its tensor ranks and replicas the one that holds most."""
    program = case.compile(sizes)
    peaks = measure(case, sizes)
    for rank, expected in enumerate(case.predict(program)):
        own = [peak for i, peak in enumerate(peaks) if program.mesh.coordinates(i).pipeline == rank]
        most = max(own, key=lambda peak: peak.live)
        yield [
            str(case.mesh),
            case.schedule,
            case.recompute,
            str(case.dtype).removeprefix("torch."),
            "divided" if case.sharded else "whole",
            str(rank),
            f"{most.before / MEGABYTE:.0f}",
            f"{expected / MEGABYTE:.1f}",
            f"{most.live / MEGABYTE:.1f}",
            f"{expected / most.live:.3f}",
            f"{max(peak.resident for peak in own) / MEGABYTE:.1f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help="tensor,pipeline,data; may be given several times")
    parser.add_argument("--write", action="store_true", help="keep the table in samples/benchmarks/results")
    args = parser.parse_args()
    wanted = [tuple(map(int, text.split(","))) for text in args.mesh or ()]
    sizes = Sizes()
    rows = []
    for case in CASES:
        if not wanted or case.mesh in wanted:
            for row in compare(case, sizes):
                rows.append(row)
                print(*row, sep="  ", file=sys.stderr, flush=True)
    publish(
        "peak_memory",
        "The peak of a rank's memory over a training step, MB, predicted and measured",
        [
            "mesh (tensor, pipeline, data)",
            "schedule",
            "recompute",
            "weights",
            "optimizer",
            "pipeline rank",
            "before",
            "predicted",
            "live tensors",
            "predicted over live",
            "resident",
        ],
        rows,
        [
            f"GPT of {sizes.layers} layers, hidden {sizes.hidden}, {sizes.vocabulary} tokens, tied embedding; "
            f"microbatches of {sizes.b} sequences of {sizes.length} tokens; fused AdamW, gradients clipped; optimizer: "
            "its states are each replica's whole, or divided among the replicas",
            "before: what lives from step to step: parameters, what the optimizer steps and its states, sums of "
            "gradients, and the buffers of slots",
            "live tensors: at most, of what torch's allocator has given out and not got back, temporaries of operators "
            "included, and what the step leaves in memory shared with pipeline neighbours; resident: what was there "
            "before, and by how much the process grew over the step as Linux counts",
            "not predicted: what was sent and is not taken yet, such as the last gradients of a step",
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
