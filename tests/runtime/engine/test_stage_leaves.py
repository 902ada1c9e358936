"""The leaves of stages: the same tensors in every step, and never on memory that the model's have left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoptd.runtime.comm.connection import connect
from autoptd.runtime.module.parallel import Parallel
from tests.runtime.chain import Chain
from tests.runtime.module.test_parallel import CPU, Plain, alone
from tests.steps import train_step

NAME = "layer.0.row.weight"


def read_leaves(parallel: Parallel) -> list[Tensor]:
    return [leaf for own in parallel._shapes[0].leaves.by_stage.values() for leaf in own.values()]


def train(parallel: Parallel, batch: dict[str, Tensor]) -> Tensor:
    parallel.zero_grad()
    loss: Tensor = parallel(**batch)["loss"]
    loss.backward()
    return loss.detach()


def test_leaves_stay() -> None:
    """In training, evaluation, and after the optimizer's step, a load and a change of mode."""
    chain, parallel = alone(tied=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    train(parallel, chain.batch())
    first = read_leaves(parallel)
    with torch.inference_mode():
        parallel.eval()(**chain.batch())
    parallel.train()
    for number in range(3):
        train_step(parallel, chain.batch(number), optimizer)
    parallel.load_state_dict(parallel.state_dict())
    train(parallel, chain.batch())
    assert all(leaf is kept for leaf, kept in zip(read_leaves(parallel), first, strict=True))


def rebind(module: nn.Module) -> None:
    module.get_parameter(NAME).data = module.get_parameter(NAME).detach() * 2


def read_otherwise(module: nn.Module) -> None:
    """In the same memory, and of the same shape."""
    weight = module.get_parameter(NAME)
    weight.data = weight.detach().as_strided(weight.shape, (1, len(weight)))


def rebind_buffer(module: nn.Module) -> None:
    module.get_buffer("offset").data = module.get_buffer("offset") * 2


def replace_buffer(module: nn.Module) -> None:
    module.offset = module.get_buffer("offset") * 3


def freeze(module: nn.Module) -> None:
    module.get_parameter(NAME).requires_grad_(False)


def move(module: nn.Module) -> None:
    module.double()  # to where it is
    with torch.no_grad():
        module.get_parameter(NAME).mul_(2)


@pytest.mark.parametrize("change", [rebind, read_otherwise, rebind_buffer, replace_buffer, freeze, move])
def test_what_changed_between_steps_counts(change: Callable[[nn.Module], None]) -> None:
    chain, parallel = alone()
    plain = Plain(chain)
    train(parallel, chain.batch())
    for module in (parallel, plain):
        change(module)
    for _ in range(2):
        plain.zero_grad()
        expected = plain.gradients(chain.batch())
        with torch.no_grad():
            assert torch.equal(parallel(**chain.batch())["loss"], expected)
        assert torch.equal(train(parallel, chain.batch()), expected)
        for name, parameter in parallel.named_parameters():
            gradient = plain.get_parameter(name).grad if parameter.requires_grad else None
            assert (parameter.grad is None) == (gradient is None), name
            assert gradient is None or torch.equal(parameter.grad, gradient), name  # type: ignore[arg-type]


def test_memory_that_was_left_is_not_kept() -> None:
    """By a model that is moved to make room."""
    chain, parallel = alone()
    train(parallel, chain.batch())
    left = StorageWeakRef(parallel.get_parameter(NAME).untyped_storage())
    parallel.zero_grad()
    parallel._apply(torch.clone)
    assert left.expired()
    assert torch.equal(train(parallel, chain.batch()), Plain(chain).gradients(chain.batch()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_step_that_broke_off_leaves_no_gradient(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain((1, 1, 1), "gpipe", 2, 3, dtype=dtype)
    parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
    expected = train(parallel, chain.batch())
    gradients = [p.grad for p in parallel.parameters()]

    def stop(stage: int) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parallel._weights.sums, "end_stage", stop)
        with pytest.raises(KeyboardInterrupt):
            train(parallel, chain.batch())
    assert torch.equal(train(parallel, chain.batch()), expected)
    for parameter, gradient in zip(parallel.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
