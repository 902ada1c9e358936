"""Half precision and sharded optimizers in checkpoints: what is stored is what is stepped, whoever steps it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.module.parallel import Parallel
from tests.checkpoints import assert_same
from tests.runtime.chain import Chain

MeshShape = tuple[int, int, int]
HALF = {"half": torch.bfloat16, "single": torch.float32}


def make(mesh: MeshShape, dtype: torch.dtype) -> Chain:
    """Two stages, on one pipeline rank or two."""
    return Chain(mesh, "gpipe", 2 // mesh[1], 2, tied=True, dtype=dtype)


def start(chain: Chain, connection: Connection, shard: bool) -> tuple[Parallel, torch.optim.Optimizer]:
    parallel = chain.parallel(connection)
    decayed = [p for p in parallel.parameters() if p.dim() > 1]
    rest = [p for p in parallel.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    if shard:
        parallel.shard_optimizer(optimizer)
    return parallel, optimizer


def step(chain: Chain, connection: Connection, parallel: Parallel, optimizer: Any, number: int) -> Tensor:
    loss: Tensor = parallel(**chain.batch(connection.rank.coordinates.data + 10 * number))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_training_goes_on_bit_for_bit(dtype: str, first: bool, second: bool, tmp_path: Path) -> None:
    """Four steps are two, a checkpoint, and two more, whether sharded before, after, or both."""
    chain = make((1, 2, 2), HALF[dtype])

    def whole(connection: Connection) -> tuple[list[Tensor], dict[str, Tensor]]:
        parallel, optimizer = start(chain, connection, first)
        losses = []
        for number in range(4):
            if number == 2:
                parallel.save_checkpoint(tmp_path, optimizer, data=number, asynchronous=True)
            losses.append(step(chain, connection, parallel, optimizer, number))
        parallel.finish_checkpoint()
        return losses[2:], dict(parallel.full_state_dict())

    def resumed(connection: Connection) -> tuple[list[Tensor], dict[str, Tensor]]:
        parallel, optimizer = start(chain, connection, second)
        at = parallel.load_checkpoint(tmp_path, optimizer)
        losses = [step(chain, connection, parallel, optimizer, at + number) for number in range(2)]
        return losses, dict(parallel.full_state_dict())

    for (a, expected), (b, found) in zip(
        run_threads(chain.manifest, whole), run_threads(chain.manifest, resumed), strict=True
    ):
        assert [x.item() for x in b] == [x.item() for x in a]
        assert_same(
            {n: x.to(HALF[dtype]) for n, x in found.items()}, {n: x.to(HALF[dtype]) for n, x in expected.items()}
        )


def test_a_sharded_half_precision_checkpoint_moves(tmp_path: Path) -> None:
    """From (1, 2, 2) sharded to (2, 2, 3) sharded to one rank: the float32 weights and states stay what they were."""
    folders = [tmp_path / str(i) for i in range(3)]
    chains = [make(mesh, torch.bfloat16) for mesh in ((1, 2, 2), (2, 2, 3), (1, 1, 1))]

    def begin(connection: Connection) -> None:
        parallel, optimizer = start(chains[0], connection, True)
        step(chains[0], connection, parallel, optimizer, 0)
        parallel.save_checkpoint(folders[0], optimizer)

    def move(connection: Connection) -> None:
        parallel, optimizer = start(chains[1], connection, True)
        parallel.load_checkpoint(folders[0], optimizer)
        parallel.save_checkpoint(folders[1], optimizer)

    def end(connection: Connection) -> list[dict[str, Tensor]]:
        seen = []
        for folder in folders[:2]:
            parallel, optimizer = start(chains[2], connection, False)
            parallel.load_checkpoint(folder, optimizer)
            names: dict[Any, str] = {p: n for n, p in parallel.named_parameters()}
            state = {f"{names[p]} {k}": v for p, of in optimizer.state.items() for k, v in of.items()}
            seen.append({**dict(parallel.named_parameters()), **state})
        return seen

    run_threads(chains[0].manifest, begin)
    run_threads(chains[1].manifest, move)
    ((before, after),) = run_threads(chains[2].manifest, end)
    assert any(name.endswith("exp_avg_sq") for name in before)
    assert_same(before, after)
    trained = [x for name, x in before.items() if name.endswith("weight") and x.is_floating_point()]
    assert any(not torch.equal(x, x.bfloat16().float()) for x in trained)


def test_a_loss_scale_is_kept(tmp_path: Path) -> None:
    chain = make((1, 2, 1), torch.float16)
    chain.manifest = dataclasses.replace(chain.manifest, scales_loss=True)

    def body(connection: Connection) -> None:
        parallel, optimizer = start(chain, connection, False)
        assert parallel._runner.loss_scale is not None
        parallel._runner.loss_scale.value, parallel._runner.loss_scale.finite_steps = 1024.0, 7
        parallel.save_checkpoint(tmp_path, optimizer)
        other, _ = start(chain, connection, False)
        other.load_checkpoint(tmp_path)
        assert other._runner.loss_scale is not None
        assert (other._runner.loss_scale.value, other._runner.loss_scale.finite_steps) == (1024.0, 7)

    run_threads(chain.manifest, body)


class Frozen(nn.Module):
    """A trained weight, a frozen one and, of another kind, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("shift", torch.linspace(0, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.second(self.first(x)) + self.shift).square().mean()
        return loss


def bind_frozen(dtype: torch.dtype, rest: torch.dtype) -> tuple[Parallel, torch.optim.Optimizer]:
    """A model whose trained weights are of `dtype`, and what is not trained of `rest`."""
    torch.manual_seed(0)
    model = Frozen().requires_grad_(False)
    model.first.to(dtype).requires_grad_(True)
    model.second.to(rest)
    model.shift = model.shift.to(rest)
    x = torch.randn(1, 5).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not rest):
        program = autoptd.compile(model, (1, 1, 1), example_inputs={"x": x}, num_microbatches=1)
    parallel = program.bind()
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], lr=1e-2)
    parallel(x=x).backward()
    optimizer.step()
    return parallel, optimizer


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float16, torch.float32])
def test_checkpoints_stepped_in_float32_load_into_each_other(
    saved: torch.dtype, loaded: torch.dtype, tmp_path: Path
) -> None:
    first, optimizer = bind_frozen(saved, torch.float32)
    first.save_checkpoint(tmp_path, optimizer)
    second, other = bind_frozen(loaded, torch.float32)
    second.load_checkpoint(tmp_path, other)
    assert_same(dict(second.named_parameters()), dict(first.named_parameters()))
    states = [{str(i): x for of in o.state.values() for i, x in enumerate(of.values())} for o in (optimizer, other)]
    assert_same(*states)


@pytest.mark.parametrize(
    ("saved", "loaded", "name"),
    [
        ((torch.float64, torch.float64), (torch.float32, torch.float32), "first.weight is torch.float64"),
        ((torch.float32, torch.float32), (torch.float64, torch.float64), "first.weight is torch.float32"),
        ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), "second.weight is torch.bfloat16"),
        ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), "second.weight is torch.float32"),
    ],
)
def test_checkpoints_that_need_conversion_are_refused(
    saved: tuple[torch.dtype, torch.dtype], loaded: tuple[torch.dtype, torch.dtype], name: str, tmp_path: Path
) -> None:
    first, _ = bind_frozen(*saved)
    first.save_checkpoint(tmp_path)
    second, _ = bind_frozen(*loaded)
    before = {name: x.clone() for name, x in second.named_parameters()}
    with pytest.raises(autoptd.CheckpointError, match=f"{name}.*compile the model with that tensor in"):
        second.load_checkpoint(tmp_path)
    assert_same(dict(second.named_parameters()), before)
