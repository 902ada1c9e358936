"""Schedulers of layer-wise groups go on as they were after a checkpoint, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import autoptd
from autoptd.runtime.checkpoint.error import CheckpointError
from samples.gpt import GPT, GPTConfig
from tests.parity import loss_of
from tests.ranks import run_ranks

Mesh = tuple[int, int, int]
LAYERS, STEPS = 4, 2


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=16, block_size=4, n_layer=LAYERS, n_head=2, n_embd=8)).double()


def batch() -> Tensor:
    return torch.arange(8).view(2, 4)


def compile_model(mesh: Mesh) -> autoptd.CompiledProgram:
    return autoptd.compile(make_model(), mesh, example_inputs=(batch()[:1], batch()[:1]), num_microbatches=2)


def schedule(model: nn.Module, empty: bool) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """A group for each layer and one for the rest; what has no parameters on this rank is a group too if `empty`."""
    groups = [
        {"params": [p for n, p in model.named_parameters() if f"h.{i}." in n], "lr": 0.01 * 0.3**i}
        for i in range(LAYERS)
    ]
    groups.append({"params": [p for n, p in model.named_parameters() if "h." not in n], "lr": 0.002})
    optimizer = torch.optim.AdamW([group for group in groups if group["params"] or empty])
    return optimizer, LambdaLR(optimizer, lambda step: 0.9**step)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> float:
    for _ in range(STEPS):
        loss = loss_of(model(batch(), batch()))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return loss.item()


def resume(folder: Path, saved: Mesh, loaded: Mesh, empty: bool) -> list[float]:
    programs = [compile_model(mesh) for mesh in (saved, loaded)]

    def save(rank: int) -> None:
        parallel = programs[0].bind()
        optimizer, scheduler = schedule(parallel, empty)
        train(parallel, optimizer, scheduler)
        parallel.save_checkpoint(folder, optimizer, scheduler)

    def load(rank: int) -> float:
        parallel = programs[1].bind()
        optimizer, scheduler = schedule(parallel, empty)
        parallel.load_checkpoint(folder, optimizer, scheduler)
        return train(parallel, optimizer, scheduler)

    run_ranks(save, programs[0].mesh.size)
    return run_ranks(load, programs[1].mesh.size)


@pytest.mark.parametrize(
    ("saved", "loaded", "empty"),
    [((1, 2, 1), (1, 2, 1), False), ((1, 2, 1), (2, 1, 1), True), ((2, 1, 1), (1, 2, 1), True)],
    ids=str,
)
def test_parameter_group_schedules_resume_on_another_mesh(
    saved: Mesh, loaded: Mesh, empty: bool, tmp_path: Path
) -> None:
    model = make_model()
    trained = model, *schedule(model, True)
    train(*trained)
    expected = train(*trained)
    assert resume(tmp_path, saved, loaded, empty) == pytest.approx([expected] * 2, rel=1e-12)


def test_other_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"{CheckpointError.__name__}.* schedulers know parameter groups by number"):
        resume(tmp_path, (1, 2, 1), (2, 1, 1), False)
