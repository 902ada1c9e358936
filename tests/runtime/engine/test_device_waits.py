"""On the way of a step nothing waits for a GPU, for which "meta" stands here: no number is copied there, or read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.engine.batch import split_batch
from autoptd.runtime.engine.label_weights import read_items
from autoptd.runtime.guards.step_agreement import compare_ranks
from autoptd.runtime.health import watchdog
from autoptd.runtime.health.activity import BUSY, Position
from autoptd.runtime.optimizer.clipping import global_norm
from autoptd.runtime.optimizer.gradient_buckets import share_loss
from autoptd.runtime.program.manifest import Input
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.randomness import draw_mask, mask_key
from tests.runtime.chain import Chain

META = torch.device("meta")
READS = (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__)


class Waits(TorchFunctionMode):
    """Notes what waits for a device: numbers that are set as elements or made tensors, and what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers = func is Tensor.__setitem__ and not isinstance(args[2], Tensor)
        made = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        if numbers or made or func in READS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def stand_in(mesh: Mesh) -> Any:
    """A connection of one rank on the device, whose peers give what it gives."""
    return SimpleNamespace(rank=Rank.local(mesh, device=META), world=Group(mesh.size))


def test_a_loss_is_shared_without_waiting() -> None:
    divisors = torch.full((2,), 2.0, dtype=torch.float64, device=META)
    losses = list(torch.zeros(2, device=META).unbind())
    with Waits() as waits:
        share_loss(Rank.local(Mesh(1, 2, 2), device=META), losses, divisors)
    assert waits.found == []


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (1, 2, 2)])
def test_ranks_are_compared_by_one_look(mesh: tuple[int, int, int]) -> None:
    chain = Chain(mesh)
    copies: Any = SimpleNamespace(fingerprint=lambda: torch.zeros(2, dtype=torch.int64, device=META))
    batch = {"ids": torch.zeros(8, dtype=torch.int64, device=META)}
    loss = torch.zeros((), dtype=torch.float64, device=META)
    manifest: Any = SimpleNamespace(mesh=chain.mesh, inputs=(Input("ids", (2,), torch.int64, 0, rows=4),))
    with Waits() as waits, pytest.raises(NotImplementedError):  # what is looked at has no values
        compare_ranks(manifest, stand_in(chain.mesh), batch, loss, [loss], copies, (False, True))
    assert waits.found == ["tolist"]


def test_a_number_of_items_is_filled_in() -> None:
    manifest: Any = SimpleNamespace(weighing_labels="labels")
    with Waits() as waits:
        assert read_items(manifest, 5, META).shape == ()
    assert waits.found == []


def test_the_norm_of_a_shard_chooses_no_elements() -> None:
    """A tensor chosen by a mask has as many elements as the host must wait to know."""
    chain = Chain((2, 1, 2))
    name, parameter = next(
        (n, p) for n, p in chain.manifest.parameters.items() if p.placement["tensor"].dim is not None
    )
    count = torch.Size(parameter.placement["tensor"].local_shape(parameter.shape, 2)).numel()
    places = slice(0, count // 2), slice(0, count // 2)
    gradient = torch.zeros(count // 2, dtype=torch.float64, device=META)
    shard: Any = SimpleNamespace(own=SimpleNamespace(grad=gradient), ranges=lambda: {name: places})
    rank = Rank.local(chain.mesh, device=META)
    assert global_norm(chain.manifest, rank, {}, [shard], 2.0).shape == ()


def test_a_mask_is_drawn_without_waiting() -> None:
    key = mask_key(3, (4, 2, 16), sample=1, divided=2, size=2, index=1)
    moment = torch.empty(3, dtype=torch.int64, device=META)
    with Waits() as waits:
        assert draw_mask(key, moment, 0.1, (4, 2, 16)).shape == (4, 2, 16)
    assert waits.found == []


def test_no_row_is_looked_up_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would end the process, before the check after the step can say where in the batch it is."""
    manifest = Chain((1, 1, 1)).manifest
    given: Any = SimpleNamespace(
        num_microbatches=1, inputs=(Input("ids", (1, 4), torch.int64, 0, rows=4, exempt=-100),)
    )
    batch = {"ids": torch.tensor([[3, 4, -1, -100]])}
    assert split_batch(given, batch, ["ids"])[0][0].tolist() == [[3, 4, -1, -100]]
    monkeypatch.setattr(Tensor, "is_cpu", False, raising=False)
    assert split_batch(given, batch, ["ids"])[0][0].tolist() == [[3, 0, 0, -100]]
    assert manifest.inputs[1].rows is None


def test_who_waits_for_a_gpu_is_not_taken_for_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA waits in a loop: by the time that threads take, all ranks would compute."""
    roster: Any = SimpleNamespace(processes={}, rank=0)
    position = Position(None, {})
    watching = watchdog.Watchdog(Chain((1, 2, 1)).manifest, roster, None, position, 60.0)  # type: ignore[arg-type]
    watching._beat()
    sum(range(1_000_000))
    watching._beat()
    assert position.slots[BUSY] > 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    watching._beat()
    assert position.slots[BUSY] == 0
