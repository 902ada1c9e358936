"""Half the steps, a checkpoint, new processes and the other half are bit for bit all the steps in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.compiled import CompiledProgram
from tests.parity import split_batch
from tests.plain_models import LENGTH, VOCABULARY, PlainGPT
from tests.ranks import run_ranks

MeshShape = tuple[int, int, int]
EPOCH = 20  # batches
SEQUENCES = 4
O = torch.optim.Optimizer  # noqa: E741
S = torch.optim.lr_scheduler

OPTIMIZERS: dict[str, Callable[[Any], O]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
SCHEDULERS: dict[str, Callable[[O], Any]] = {
    "step": lambda o: S.StepLR(o, 7, 0.5),
    "multistep": lambda o: S.MultiStepLR(o, [10, 30, 30], 0.3),
    "cosine": lambda o: S.CosineAnnealingLR(o, 50, 1e-4),
    "lambda": lambda o: S.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequential": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=5), S.ExponentialLR(o, 0.97)], milestones=[5]
    ),
    "onecycle": lambda o: S.OneCycleLR(o, 0.05, total_steps=60),
    "plateau": lambda o: S.ReduceLROnPlateau(o, patience=1, factor=0.7),
}


@dataclass(frozen=True)
class Case:
    mesh: MeshShape
    optimizer: str
    scheduler: str
    dropout: float = 0.1
    asynchronous: bool = False
    chunks: int | None = None

    def __str__(self) -> str:
        return "-".join(str(x) for x in (*self.mesh, self.optimizer, self.scheduler))


QUICK = [Case((1, 1, 1), "adamw", "sequential"), Case((2, 2, 1), "adam", "plateau", asynchronous=True)]
CASES = [
    Case((1, 2, 1), "sgd", "onecycle"),
    Case((2, 1, 1), "adamw", "cosine"),
    Case((1, 1, 2), "radam", "lambda", asynchronous=True),
    Case((2, 1, 2), "adagrad", "multistep"),
    Case((1, 2, 2), "adamw", "step"),
    Case((4, 1, 1), "sgd", "sequential", dropout=0.0),
    Case((1, 2, 1), "adam", "multistep", asynchronous=True, chunks=1),
    Case((2, 2, 1), "adamw", "onecycle", dropout=0.3),
    Case((1, 1, 1), "adam", "plateau", asynchronous=True),
    Case((2, 2, 2), "adamw", "lambda"),
]


class Loader:
    """Batches in an order of their own in each epoch; knows where it stands."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def next(self) -> dict[str, Tensor]:
        order = torch.randperm(EPOCH, generator=torch.Generator().manual_seed(self.epoch))
        seed = 1000 * self.epoch + int(order[self.batch])
        tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        self.epoch, self.batch = (self.epoch, self.batch + 1) if self.batch + 1 < EPOCH else (self.epoch + 1, 0)
        return {"idx": tokens[:, :-1], "targets": tokens[:, 1:]}


@cache
def compile_case(mesh: MeshShape, dropout: float, chunks: int | None) -> CompiledProgram:
    torch.manual_seed(0)
    model = PlainGPT(dropout=dropout)
    example = torch.zeros(1, LENGTH, dtype=torch.long)
    return autoptd.compile(
        model,
        mesh,
        example_inputs={"idx": example, "targets": example},
        num_microbatches=SEQUENCES // mesh[2],
        schedule="1f1b",
        num_model_chunks=chunks,
    )


@dataclass
class Seen:
    losses: list[float]
    state: dict[str, Tensor]
    moments: list[Any]
    rest: list[Any]
    next_batch: dict[str, Tensor]


def train(case: Case, rank: int, begin: int, end: int, folder: Path, save: bool) -> Seen:
    program = compile_case(case.mesh, case.dropout, case.chunks)
    parallel = program.bind()
    at = program.mesh.coordinates(rank).data
    optimizer = OPTIMIZERS[case.optimizer](parallel.parameters())
    scheduler = SCHEDULERS[case.scheduler](optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=6)
    loader = Loader()
    if begin:
        position = parallel.load_checkpoint(folder, optimizer, {"rate": scheduler, "scaler": scaler})
        loader.epoch, loader.batch = position
    losses = []
    for _ in range(begin, end):
        loss = parallel(**split_batch(loader.next(), case.mesh[2])[at])[1]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step(*([loss.item()] if case.scheduler == "plateau" else []))
        losses.append(loss.item())
    if save:
        parallel.save_checkpoint(
            folder,
            optimizer,
            {"rate": scheduler, "scaler": scaler},
            data=(loader.epoch, loader.batch),
            asynchronous=case.asynchronous,
        )
        parallel.finish_checkpoint()
    names = {id(p): n for n, p in parallel.named_parameters()}
    moments = sorted((names[id(p)], sorted(of.items())) for p, of in optimizer.state.items())
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    rest = [options, repr(scheduler.state_dict()), scaler.state_dict(), parallel._connection.rank.randomness.call]
    state = {n: x.clone() for n, x in parallel.state_dict().items()}
    return Seen(losses, state, moments, rest, loader.next())


def check(case: Case, folder: Path, steps: int) -> None:
    compile_case(case.mesh, case.dropout, case.chunks)  # once, before the forks
    size, half = case.mesh[0] * case.mesh[1] * case.mesh[2], steps // 2
    whole = run_ranks(lambda rank: train(case, rank, 0, steps, folder, False), size, timeout=200)
    first = run_ranks(lambda rank: train(case, rank, 0, half, folder, True), size, timeout=200)
    second = run_ranks(lambda rank: train(case, rank, half, steps, folder, False), size, timeout=200)
    for a, b, c in zip(whole, first, second, strict=True):
        assert b.losses + c.losses == a.losses
        assert len(set(a.losses)) == steps
        assert set(c.state) == set(a.state)
        assert all(torch.equal(c.state[n], x) for n, x in a.state.items())
        assert flatten(c.moments) == flatten(a.moments)
        assert c.rest == a.rest
        assert all(torch.equal(c.next_batch[n], x) for n, x in a.next_batch.items())


def flatten(moments: list[Any]) -> list[Any]:
    return [
        (name, state, value.tolist() if isinstance(value, Tensor) else value)
        for name, of in moments
        for state, value in of
    ]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_resumed_training_is_the_same(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fifty_steps_resumed_in_the_middle(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path, 50)
