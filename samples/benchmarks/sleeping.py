"""Pipeline stages that only sleep, so that a step's time is the schedule's and needs no cores.

A stage is a custom operator with a fake kernel and a derivative: torch.distributed.pipelining and autoptd's
executor run the same module in the same processes, in turn with each rank's compute alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from autoptd.runtime.comm.connection import connect
from autoptd.runtime.engine.executor import Executor, ShapeFunctions
from autoptd.runtime.optimizer.gradient_memory import StageLeaves
from autoptd.runtime.program.manifest import Boundary, Input, Manifest, Output, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.program.program_text import ProgramText
from autoptd.runtime.program.schedule import make_schedule

CPU = torch.device("cpu")


@torch.library.custom_op("autoptd_samples::sleep", mutates_args=())
def sleep(x: Tensor, weight: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
    """Sleep, then give ``x + weight``; the derivative sleeps `backward_seconds`."""
    if forward_seconds > 0:
        time.sleep(forward_seconds)
    return x + weight


@sleep.register_fake
def _(x: Tensor, weight: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
    return torch.empty_like(x)


def _keep_seconds(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[3]


def _sleep_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    if ctx.seconds > 0:
        time.sleep(ctx.seconds)
    return gradient, gradient.sum(), None, None


sleep.register_autograd(_sleep_backward, setup_context=_keep_seconds)


class SleepingStage(nn.Module):
    """One stage: `forward_seconds` forward, `backward_seconds` backward, the shape unchanged."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = (forward_seconds, backward_seconds)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = sleep(x, self.weight, *self.seconds)
        return y


@dataclass(frozen=True)
class Case:
    """One comparison. Seconds: a rank with all its chunks, per microbatch of [1, size, size]."""

    schedule: str
    num_ranks: int
    num_model_chunks: int
    num_microbatches: int
    forward_seconds: float
    backward_seconds: float
    size: int
    repetitions: int

    @property
    def formula(self) -> float:
        """Step time over the compute of one rank: 1 + (p - 1) / (v m) (SC21 §2.2.2)."""
        return 1 + (self.num_ranks - 1) / (self.num_model_chunks * self.num_microbatches)

    @property
    def num_actions(self) -> int:
        """Forwards and backwards of all ranks in a step."""
        return 2 * self.num_ranks * self.num_model_chunks * self.num_microbatches


def make_manifest(case: Case) -> Manifest:
    """The plan of ``num_ranks * num_model_chunks`` sleeping stages, one tensor between neighbours."""
    num_stages = case.num_ranks * case.num_model_chunks
    shape = (1, case.size, case.size)
    boundaries = [(Boundary(f"h.{k}", shape, torch.float32, requires_grad=True),) for k in range(num_stages - 1)]
    stages = tuple(
        StageInterface(k, receives, sends, () if k else ("x",), (f"h.{k}.weight",))
        for k, (receives, sends) in enumerate(zip([(), *boundaries], [*boundaries, ()], strict=True))
    )
    return Manifest(
        mesh=Mesh(1, case.num_ranks, 1),
        schedule=case.schedule,
        num_model_chunks=case.num_model_chunks,
        num_microbatches=case.num_microbatches,
        microbatch_size=1,
        scatter_gather=True,
        seed=0,
        inputs=(Input("x", shape, torch.float32, 0),),
        stages=stages,
        parameters={f"h.{k}.weight": Parameter(f"h.{k}.weight", (), torch.float32) for k in range(num_stages)},
        aliases={},
        output=Output("tensor"),
    )


def make_step(case: Case, stages: dict[int, SleepingStage], batch: Tensor) -> Callable[[], object]:
    """This rank's step on autoptd's executor."""
    manifest = make_manifest(case)
    last = case.num_ranks * case.num_model_chunks - 1

    def run_stage(stage: SleepingStage, is_last: bool, rank: object, p: object, x: Tensor) -> Tensor:
        y: Tensor = stage(x)
        return y.mean() if is_last else y

    functions = {index: partial(run_stage, stage, index == last) for index, stage in stages.items()}
    schedule = make_schedule(case.schedule, case.num_ranks, case.num_microbatches, case.num_model_chunks)
    connection = connect(manifest, CPU, repr(case))
    text = ProgramText("", "", functions, dict, schedule[connection.rank.coordinates.pipeline])
    executor = Executor(ShapeFunctions(manifest, text, {}), connection, {}, graphs=False)
    executor.leaves = StageLeaves({index: dict(stage.named_parameters()) for index, stage in stages.items()})
    rows: list[tuple[Tensor, ...]] = [(x,) for x in batch.split(1)]
    nothing: list[tuple[Tensor, ...]] = [()] * case.num_microbatches
    inputs = {index: nothing if index else rows for index in stages}
    seeds = torch.full((case.num_microbatches,), 1 / case.num_microbatches, dtype=torch.float64)

    def pass_by(stage: int) -> None:
        """Nothing begins or ends with a stage: there are no gradients to sum."""

    return partial(executor.run, inputs, seeds, pass_by)


def make_torch_step(case: Case, stages: dict[int, SleepingStage], batch: Tensor) -> Callable[[], object]:
    """This rank's step on torch.distributed.pipelining."""
    num_stages = case.num_ranks * case.num_model_chunks
    parts: list[Any] = [PipelineStage(stage, index, num_stages, CPU) for index, stage in stages.items()]
    options: Any = {"n_microbatches": case.num_microbatches, "loss_fn": lambda output, target: output.mean()}
    schedule: Any = Schedule1F1B(parts[0], **options) if len(parts) == 1 else ScheduleInterleaved1F1B(parts, **options)
    args = (batch,) if 0 in stages else ()
    keywords = {"target": batch, "losses": []} if num_stages - 1 in stages else {}
    return lambda: schedule.step(*args, **keywords, return_outputs=False)


def run_alone(case: Case, stages: dict[int, SleepingStage], batch: Tensor) -> None:
    """This rank's forwards and backwards of a step, with no pipeline round them."""
    for x in batch.split(1):
        for stage in stages.values():
            y = stage(x.detach().requires_grad_())
            torch.autograd.backward([y], [x])


def time_step(step: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds of the slowest rank, and CPU seconds of all ranks, for one step begun together."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    seconds = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    total = seconds.clone()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return seconds[0].item(), total[1].item()


def compare(case: Case) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of each repetition, run in turn: "alone", "autoptd" and "torch"; on every rank."""
    rank, size = dist.get_rank(), case.num_ranks
    seconds = (case.forward_seconds / case.num_model_chunks, case.backward_seconds / case.num_model_chunks)
    stages = {rank + size * chunk: SleepingStage(*seconds) for chunk in range(case.num_model_chunks)}
    batch = torch.zeros(case.num_microbatches, case.size, case.size)
    steps: dict[str, Callable[[], object]] = {
        "alone": partial(run_alone, case, stages, batch),
        "autoptd": make_step(case, stages, batch),
        "torch": make_torch_step(case, stages, batch),
    }
    for step in steps.values():  # the first step of torch's stages infers shapes
        time_step(step)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(case.repetitions):
        for name, step in steps.items():
            measured[name].append(time_step(step))
    return measured
