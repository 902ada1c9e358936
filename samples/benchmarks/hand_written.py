"""The demo's GPT divided by hand with torch.distributed: what a compiled program is compared with.

    torchrun --nproc-per-node 8 -m samples.benchmarks.hand_written --mesh 2,2,2

Takes the arguments of samples.train and trains the same model on the same data in the same steps. Layers and
vocabulary are divided by torch.distributed.tensor.parallel (column and row, DTensor, a parallel loss), stages of equal
numbers of layers are run by torch.distributed.pipelining, replicas are DistributedDataParallel's. Gloo runs all of it,
but that takes no DTensors, and under the interleaved schedule torch 2.13 fails an assertion of its own (reducer.cpp:
"rebuilt parameter indices size is not same as original model parameters size"): there one flat tensor of gradients is
summed after the step. What these leave to the user is written here: packed queries, keys and values, the tied
embedding, and the norm of all gradients.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from samples import corpus, train
from samples.gpt import GPT, Block, SelfAttention


class Stage(nn.Module):
    """Consecutive layers of `model`; the first stage has its embeddings too, the last its head."""

    def __init__(self, model: GPT, index: int, num_stages: int) -> None:
        super().__init__()
        each, rest = divmod(len(model.h), num_stages)
        if rest:
            raise ValueError(f"{len(model.h)} layers do not divide into {num_stages} equal stages")
        first, last = index == 0, index == num_stages - 1
        self.embeddings = nn.ModuleList([model.wte, model.wpe] if first else [])
        self.h = nn.ModuleList(list(model.h)[index * each : (index + 1) * each])
        self.head = nn.Sequential(*([model.ln_f, model.lm_head] if last else []))

    def forward(self, x: Tensor) -> Tensor:
        """Token numbers [b, s] or activations [b, s, h] to activations, or logits [b, s, V or V/t]."""
        if self.embeddings:
            tokens, positions = self.embeddings
            x = tokens(x) + positions(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def attend_own_heads(attention: SelfAttention, x: Tensor) -> Tensor:
    """The forward of `attention` with this rank's heads, whose q, k and v lie together in the packed weight."""
    b, s, h = x.shape
    q, k, v = (y.view(b, s, -1, h // attention.n_head).transpose(1, 2) for y in attention.c_attn(x).chunk(3, dim=2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out: Tensor = attention.c_proj(y.transpose(1, 2).contiguous().view(b, s, -1))
    return out


def divide_layers(stage: Stage, mesh: DeviceMesh) -> None:
    """Divide `stage` over the tensor ranks, column and row in turn; the vocabulary of embedding and head too."""
    tensor = mesh.size()
    for block in stage.h:
        assert isinstance(block, Block)
        packed = block.attn.c_attn
        for parameter in packed.parameters():  # [3, t, own] rows to [t, 3, own]
            rows = parameter.detach().unflatten(0, (3, tensor, -1)).transpose(0, 1)
            parameter.data = rows.flatten(0, 2).contiguous()
        block.attn.forward = partial(attend_own_heads, block.attn)  # type: ignore[method-assign]
        plan: dict[str, ParallelStyle] = {
            "attn.c_attn": ColwiseParallel(),
            "attn.c_proj": RowwiseParallel(),
            "mlp.c_fc": ColwiseParallel(),
            "mlp.c_proj": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    if stage.embeddings:
        parallelize_module(stage.embeddings[0], mesh, RowwiseParallel(input_layouts=Replicate()))
    if stage.head:
        parallelize_module(stage.head[1], mesh, ColwiseParallel())
        if stage.embeddings:  # parallelize_module has made two of the tied weight
            stage.head[1].weight = stage.embeddings[0].weight


def divide_gradient(parameter: Tensor) -> None:
    """Let the gradient lie as its `parameter` does: that of a divided embedding is whole on every rank."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def is_divided(x: Tensor) -> bool:
    return isinstance(x, DTensor) and not x.placements[0].is_replicate()


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class HandWritten:
    """This rank's stages of the GPT, and a training step of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        tensor, pipeline, data = args.mesh
        mesh = init_device_mesh("cpu", (data, pipeline, tensor), mesh_dim_names=("dp", "pp", "tp"))
        self._tensor, self._pipeline, self._data = mesh["tp"], mesh["pp"], mesh["dp"]
        self.replica = self._data.get_local_rank()
        self._replicas, self._microbatches = data, args.microbatches
        own, num_stages = self._pipeline.get_local_rank(), pipeline * (args.chunks or 1)
        model = train.make_model(args)
        assert isinstance(model, GPT)
        self.stages = [Stage(model, index, num_stages) for index in range(own, num_stages, pipeline)]
        for stage in self.stages:
            if tensor > 1:
                divide_layers(stage, self._tensor)
        self._with_ddp = data > 1 and tensor == 1 and len(self.stages) == 1
        self.parameters = list(dict.fromkeys(p for stage in self.stages for p in stage.parameters()))
        self._is_first, self._is_last = own == 0, own == pipeline - 1
        self._tied: Tensor | None = None
        if pipeline > 1:
            self._join_ends(mesh)
        modules: list[nn.Module] = list(self.stages)
        if self._with_ddp:
            group = self._data.get_group()
            modules = [DistributedDataParallel(module, process_group=group) for module in modules]
        self._module = modules[0]
        self._schedule: Schedule1F1B | ScheduleInterleaved1F1B | None = None
        if pipeline > 1:
            stages = [
                PipelineStage(
                    module, own + i * pipeline, num_stages, torch.device("cpu"), group=self._pipeline.get_group()
                )
                for i, module in enumerate(modules)
            ]
            if len(stages) == 1:
                self._schedule = Schedule1F1B(stages[0], args.microbatches, self._loss)
            else:
                self._schedule = ScheduleInterleaved1F1B(list(stages), args.microbatches, self._loss)

    def _join_ends(self, mesh: DeviceMesh) -> None:
        """Make the groups of first and last stages, which have a copy each of the tied embedding."""
        for line in mesh.mesh.movedim(1, 2).flatten(0, 1).tolist():
            group = dist.new_group([line[0], line[-1]])
            if dist.get_rank() in (line[0], line[-1]):
                self._ends = group
        if self._is_first:
            self._tied = self.stages[0].get_parameter("embeddings.0.weight")
        if self._is_last:
            self._tied = self.stages[-1].get_parameter("head.1.weight")

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._tensor.size() > 1:
            logits = DTensor.from_local(logits, self._tensor, [Shard(2)], run_check=False)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def step(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Leave the gradients of this replica's batch in ``.grad``, summed and clipped to norm 1; give the loss."""
        with loss_parallel() if self._tensor.size() > 1 else nullcontext():
            losses = self._run(idx, targets)
        total = torch.zeros((), dtype=self.parameters[0].dtype)
        if losses:
            total = torch.stack([local(loss.detach()) for loss in losses]).mean() / self._replicas
        for parameter in self.parameters:
            divide_gradient(parameter)
        if self._tied is not None:
            assert self._tied.grad is not None
            dist.all_reduce(local(self._tied.grad), group=self._ends)
        if self._replicas > 1 and not self._with_ddp:
            self._sum_gradients()
        self._clip(1.0)
        dist.all_reduce(total, group=self._data.get_group())
        dist.broadcast(total, group=self._pipeline.get_group(), group_src=self._pipeline.size() - 1)
        return total

    def _run(self, idx: Tensor, targets: Tensor) -> list[Tensor]:
        """The microbatches' forwards and backwards; their losses on the last stage's rank."""
        losses: list[Tensor] = []
        if self._schedule is not None:
            given = [idx] if self._is_first else []
            if self._is_last:
                self._schedule.step(*given, target=targets, losses=losses, return_outputs=False)
            else:
                self._schedule.step(*given, return_outputs=False)
            return losses
        count = self._microbatches
        for number, (x, y) in enumerate(zip(idx.chunk(count), targets.chunk(count), strict=True), 1):
            waits = self._with_ddp and number < count
            with self._module.no_sync() if waits else nullcontext():  # type: ignore[operator]
                loss = self._loss(self._module(x), y) / count
                loss.backward()
            losses.append(loss * count)
        return losses

    def _sum_gradients(self) -> None:
        gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=self._data.get_group())
        flat /= self._replicas
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _clip(self, max_norm: float) -> None:
        """Clip by the norm of the whole model's gradient: divided parameters' parts, undivided ones, tied ones once."""
        counted = [p for p in self.parameters if self._is_first or p is not self._tied]
        squares = torch.zeros(2, dtype=torch.float64)
        for index, kind in enumerate((True, False)):
            parts = [local(p.grad) for p in counted if is_divided(p) is kind and p.grad is not None]
            if parts:
                squares[index] = nn.utils.get_total_norm(parts).double() ** 2
        if self._tensor.size() > 1:
            dist.all_reduce(squares[:1], group=self._tensor.get_group())
        square = squares.sum()
        dist.all_reduce(square, group=self._pipeline.get_group())
        factor = torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0).to(self.parameters[0].dtype)
        torch._foreach_mul_([local(p.grad) for p in self.parameters if p.grad is not None], factor)


def group_parameters(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Of DTensors and of others: an optimizer's fused step takes no mixture."""
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    return [group for group in groups if group]


def train_by_hand(args: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """As `samples.train.train`: a training step after the other, each one's loss and seconds."""
    ours = HandWritten(args)
    groups = [{"params": group} for group in group_parameters(ours.parameters)]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / args.warm_up, 1.0, args.warm_up)
    data = corpus.batches(
        corpus.load_corpus(),
        args.microbatches * args.microbatch_size,
        args.length,
        seed=args.seed,
        replica=ours.replica,
        replicas=args.mesh[2],
    )
    for idx, targets in itertools.islice(data, args.steps):
        started = time.perf_counter()
        loss = ours.step(idx, targets)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        yield loss.item(), time.perf_counter() - started


def main() -> None:
    args = train.parse_arguments()
    for step, (loss, seconds) in enumerate(train_by_hand(args), 1):
        train.report_step(args, int(os.environ.get("RANK", 0)), step, loss, seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
