"""A hand-made chain of stages, its manifest, and the same chain run plainly in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd.runtime import collectives
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.manifest import Boundary, Input, Manifest, Output, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter, Placement, Segment, Shard
from autoptd.runtime.program.program_text import ProgramText
from autoptd.runtime.program.schedule import make_schedule

WIDTH = 8
HIDDEN = 12
ROWS = 2  # of one microbatch

Weights = Mapping[str, Tensor]


class Chain:
    """Stages of `x = x + row(tanh(column(x)))`, a mean squared error at the end.

    Every stage relays two values untouched: `skip`, made by the first stage and used by the last, and the
    integers `ids`. With `tied` the first and the last stage scale by one parameter.
    """

    def __init__(
        self,
        mesh: tuple[int, int, int],
        schedule: str = "1f1b",
        v: int = 1,
        m: int = 4,
        tied: bool = False,
        scatter_gather: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.mesh = Mesh(*mesh)
        self.count = self.mesh.pipeline * v
        self.m = m
        self.tied = tied
        self.dtype = dtype
        self.schedule = make_schedule(schedule, self.mesh.pipeline, m, v)
        parameters = self._parameters()
        boundary = (
            Boundary("x", (ROWS, WIDTH), dtype, True),
            Boundary("skip", (ROWS, WIDTH), dtype, True),
            Boundary("ids", (ROWS,), torch.int64, False),
        )
        stages = [
            StageInterface(
                k,
                boundary if k else (),
                boundary if k < self.count - 1 else (),
                (("x", "ids") if k == 0 else ()) + (("target",) if k == self.count - 1 else ()),
                tuple(name for name in parameters if self._uses(k, name)),
            )
            for k in range(self.count)
        ]
        self.manifest = Manifest(
            mesh=self.mesh,
            schedule=schedule,
            num_model_chunks=v,
            num_microbatches=m,
            microbatch_size=ROWS,
            scatter_gather=scatter_gather,
            seed=0,
            inputs=(
                Input("x", (ROWS, WIDTH), dtype, 0),
                Input("ids", (ROWS,), torch.int64, 0),
                Input("target", (ROWS, WIDTH), dtype, 0),
            ),
            stages=tuple(stages),
            parameters=parameters,
            aliases={"head.scale": "scale"} if tied else {},
            output=Output("dict", "loss", "", ("loss", "logits")),
        )
        self.functions = {k: self._stage(k) for k in range(self.count)}

    def _parameters(self) -> dict[str, Parameter]:
        def divided(dim: int) -> Placement:
            return Placement(tensor=Shard(dim, (Segment(1, HIDDEN, 1, True),)))

        made = []
        if self.tied:
            made.append(Parameter("scale", (WIDTH,), self.dtype))
        for k in range(self.count):
            made += [
                Parameter(f"layer.{k}.column.weight", (HIDDEN, WIDTH), self.dtype, placement=divided(0)),
                Parameter(f"layer.{k}.column.bias", (HIDDEN,), self.dtype, placement=divided(0)),
                Parameter(f"layer.{k}.row.weight", (WIDTH, HIDDEN), self.dtype, placement=divided(1)),
                Parameter(f"layer.{k}.row.bias", (WIDTH,), self.dtype),
            ]
        made.append(Parameter("offset", (WIDTH,), self.dtype, kind="buffer", requires_grad=False))
        made.append(Parameter("constant.shift", (WIDTH,), self.dtype, kind="constant", requires_grad=False))
        made.append(Parameter("unused.weight", (3,), self.dtype))
        return {p.name: p for p in made}

    def _uses(self, stage: int, name: str) -> bool:
        if name == "scale":
            return stage in (0, self.count - 1)
        if name in ("offset", "constant.shift"):
            return stage == self.count - 1
        return name.startswith(f"layer.{stage}.")

    def _stage(self, k: int) -> Callable[..., Any]:
        last = k == self.count - 1

        def stage(rank: Rank, p: Weights, *values: Tensor) -> Any:
            if k == 0:
                x, ids, *rest = values
                x = x * p["scale"] if self.tied else x
                skip = torch.sin(x)
            else:
                x, skip, ids, *rest = values
            h = collectives.copy_to_tensor(rank, x)
            h = torch.tanh(F.linear(h, p[f"layer.{k}.column.weight"], p[f"layer.{k}.column.bias"]))
            h = F.linear(h, p[f"layer.{k}.row.weight"])
            x = x + (collectives.reduce_from_tensor(rank, h) + p[f"layer.{k}.row.bias"])
            if not last:
                return x, skip, ids
            x = x * p["scale"] if self.tied else x
            x = x + skip * ids.unsqueeze(1) + p["offset"] + p["constant.shift"]
            return F.mse_loss(x, rest[0])

        return stage

    @staticmethod
    def constants(p: Weights) -> dict[str, Tensor]:
        return {"constant.shift": p["offset"] * 2}

    def weights(self) -> dict[str, Tensor]:
        """Whole weights, the same at every call; without the constants."""
        generator = torch.Generator().manual_seed(3)
        return {
            name: torch.randn(p.shape, dtype=p.dtype, generator=generator) * 0.5
            for name, p in self.manifest.parameters.items()
            if p.kind != "constant"
        }

    def batch(self, replica: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 + replica)
        rows = ROWS * self.m
        return {
            "x": torch.randn(rows, WIDTH, dtype=self.dtype, generator=generator),
            "ids": torch.randint(0, 5, (rows,), generator=generator),
            "target": torch.randn(rows, WIDTH, dtype=self.dtype, generator=generator),
        }

    def parallel(self, connection: Connection) -> Parallel:
        here = connection.rank.coordinates.pipeline
        functions = {k: f for k, f in self.functions.items() if k % self.mesh.pipeline == here}
        text = ProgramText("", "", functions, self.constants, self.schedule[here])
        return Parallel(connection, ShapeFunctions(self.manifest, text, self.weights()))

    def plain(self, weights: Weights, batch: Weights, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and gradients of a plain loop of ``(loss / m).backward()``.

        A tied parameter's two uses add up separately, and once with each other.
        """
        rank = Rank.local(Mesh(1, 1, 1))
        whole = {**weights, **self.constants(weights)}
        leaves = [
            {n: whole[n].clone().requires_grad_(self.manifest.parameters[n].requires_grad) for n in stage.parameters}
            for stage in self.manifest.stages
        ]
        total = torch.zeros((), dtype=self.dtype)
        for i in range(self.m):
            x, ids, target = (batch[n][i * ROWS : (i + 1) * ROWS] for n in ("x", "ids", "target"))
            values: Any = (x, ids)
            for k, p in enumerate(leaves):
                values = self.functions[k](rank, p, *values, *((target,) if k == self.count - 1 else ()))
            loss = values / self.m
            (loss * scale).backward()
            total = total + loss.detach()
        gradients: dict[str, Tensor] = {}
        for p in leaves:
            for name, leaf in p.items():
                if leaf.grad is not None:
                    gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad
        return total, gradients
