"""What an initialisation writes is kept as distributions; what is none is said with its line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoptd.runtime.program.placement import Draw
from autoptd.weights.init_recorder import UnknownError, Writes

NORMAL, UNIFORM = Draw("normal", std=1.0), Draw("uniform", high=1.0)


def record(write: Callable[[nn.Parameter], object], *shape: int) -> tuple[Draw, ...]:
    """The draws of a meta parameter of `shape` that `write` is called on."""
    parameter = nn.Parameter(torch.empty(shape or (4, 6), device="meta"))
    with Writes() as writes, torch.no_grad():
        writes.watch(parameter)
        write(parameter)
    return tuple(written.draw for written in writes.read(parameter))


def one(kind: str, run: tuple[int, ...] = (), **numbers: float) -> Draw:
    return Draw(kind, run=run, **numbers)  # type: ignore[arg-type]


def round_draw(draw: Draw) -> Draw:
    """Without the last bits of what torch computes from a layer's sizes."""
    numbers = {name: round(getattr(draw, name), 12) for name in ("value", "mean", "std", "low", "high")}
    return replace(draw, **numbers)


XAVIER = math.sqrt(6 / 10)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda p: nn.init.normal_(p, 0.1, 0.02), (one("normal", mean=0.1, std=0.02),)),
        (lambda p: nn.init.uniform_(p, -1, 2), (one("uniform", low=-1.0, high=2.0),)),
        (lambda p: nn.init.constant_(p, 3), (one("constant", value=3.0),)),
        (nn.init.ones_, (one("constant", value=1.0),)),
        (nn.init.zeros_, (one("constant"),)),
        (nn.init.xavier_uniform_, (one("uniform", low=-XAVIER, high=XAVIER),)),
        (nn.init.xavier_normal_, (one("normal", std=math.sqrt(2 / 10)),)),
        (lambda p: nn.init.kaiming_normal_(p, a=1.0), (one("normal", std=1 / math.sqrt(6)),)),
        (lambda p: nn.init.trunc_normal_(p, std=0.02), (one("truncated_normal", std=0.02, low=-2.0, high=2.0),)),
        (lambda p: p.data.normal_(2).mul_(0.5), (one("normal", mean=1.0, std=0.5),)),
        (lambda p: p.uniform_().div_(-2), (one("uniform", low=-0.5, high=0.0),)),
        (lambda p: p.normal_().mul_(torch.tensor(3.0)), (one("normal", std=3.0),)),
        (lambda p: p.copy_(torch.randn(4, 6) * 0.02), (one("normal", std=0.02),)),
        (lambda p: p.copy_(torch.ones(6)), (one("constant", value=1.0),)),
        (lambda p: p.fill_(2).normal_(), (NORMAL,)),
        (lambda p: nn.init.orthogonal_(p).normal_(), (NORMAL,)),
        (lambda p: p.t().view(-1, 4).uniform_(), (UNIFORM,)),
        (lambda p: p.normal_()[2].fill_(0), (NORMAL, one("constant", run=(12, 18)))),
        (lambda p: p.normal_()[-1:, 2:5].zero_(), (NORMAL, one("constant", run=(20, 23)))),
        (lambda p: p.normal_().view(-1)[3:9].zero_(), (NORMAL, one("constant", run=(3, 9)))),
        (
            lambda p: [nn.init.zeros_(p), nn.init.trunc_normal_(p[:1])],
            (one("constant"), one("truncated_normal", run=(0, 6), std=1.0, low=-2.0, high=2.0)),
        ),
    ],
)
def test_writes_are_kept_as_distributions(write: Callable[[nn.Parameter], object], expected: tuple[Draw, ...]) -> None:
    found = record(write)
    assert [round_draw(draw) for draw in found] == [round_draw(draw) for draw in expected]


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda p: nn.init.orthogonal_(p), r"nn\.init\.orthogonal_\(p\).* \(aten\.copy_\)"),
        (lambda p: nn.init.eye_(p), r"nn\.init\.eye_\(p\).* \(aten\.eye\) cannot be described element"),
        (lambda p: nn.init.sparse_(p, 0.5), r"sparse_\(p, 0\.5\)"),
        (lambda p: p.normal_().clamp_(-1, 1), r"clamp_\(-1, 1\).* \(aten\.clamp_\)"),
        (lambda p: p.normal_().mul_(torch.rand(4, 6)), r"aten\.mul_"),
        (lambda p: [p.normal_(), p[:2].mul_(0.5)], r"aten\.mul_"),
        (lambda p: p.copy_(torch.arange(6.0)), r"aten\.copy_"),
        (lambda p: p.normal_()[::2].zero_(), r"\[::2\]\.zero_\(\)"),
        (lambda p: p.normal_()[:, 3:].zero_(), r"\[:, 3:\]\.zero_\(\)"),
        (lambda p: p.normal_().add_(1), r"aten\.add_"),
        (lambda p: p.normal_().neg_(), r"aten\.neg_"),
        (lambda p: p.exponential_(), r"aten\.exponential_"),
        (lambda p: p.bernoulli_(0.5), r"aten\.bernoulli_"),
        (lambda p: p.div_(0), r"aten\.div_"),
        (lambda p: nn.init.trunc_normal_(p, a=4.0, b=5.0), r"trunc_normal_\) keeps 0\.0% of a normal"),
        (lambda p: p[:2].copy_(torch.randn(2, 6)), r"aten\.copy_"),  # could be put in two places
        (lambda p: p[1:].zero_(), "only a part of it is written"),
        (lambda p: None, "nothing writes it"),
        (lambda p: p.mul_(2), "nothing writes it"),
    ],
)
def test_writes_of_no_known_distribution_are_named(write: Callable[[nn.Parameter], object], problem: str) -> None:
    with pytest.raises(UnknownError, match=problem):
        record(write)


def test_tensors_made_inside_are_known() -> None:
    with Writes() as writes:
        layer = nn.Linear(3, 2)
        table = nn.Embedding(5, 3, padding_idx=1)
        made = nn.Parameter(0.02 * torch.randn(4, 4))
        scale = nn.Parameter(torch.ones([]) * 7)
        number = nn.Parameter(torch.tensor(0.5))
        position = nn.Parameter(torch.zeros(1, 3, 2))
        nn.init.trunc_normal_(position, std=0.1)
        listed = nn.Parameter(torch.tensor([1.0, 2.0]))
        mask = torch.tril(torch.ones(3, 3))
    bound = 1 / math.sqrt(3)

    def draws(tensor: Tensor) -> list[Draw]:
        return [written.draw for written in writes.read(tensor)]

    assert layer.weight.is_meta
    (drawn,) = draws(layer.weight)
    assert round_draw(drawn) == round_draw(one("uniform", low=-bound, high=bound))
    assert draws(table.weight) == [NORMAL, one("constant", run=(3, 6))]
    assert draws(made) == [one("normal", std=0.02)]
    assert draws(scale) == [one("constant", value=7.0)]
    assert draws(number) == [one("constant", value=0.5)]
    assert draws(position) == [one("truncated_normal", std=0.1, low=-2.0, high=2.0)]
    assert torch.equal(mask, torch.ones(3, 3).tril()), "buffers have their values"
    with pytest.raises(UnknownError, match="values that are neither constant nor random numbers"):
        writes.read(listed)


def test_code_sees_cpu_tensors() -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    with Writes():
        for tensor in (parameter, torch.empty(2), torch.randn(2), parameter.data[0]):
            assert not tensor.is_meta
            assert tensor.device.type == "cpu"
        assert not torch.empty(1, device=parameter.device).is_meta
    assert parameter.is_meta


def test_nothing_large_is_made() -> None:
    with Writes() as writes:
        table = nn.Parameter(torch.zeros(1 << 40, 2))
        other = nn.Parameter(torch.randn(1 << 40, device="cpu") * 0.1)
        bias = nn.Parameter(torch.zeros(1 << 16))
    assert all(tensor.is_meta for tensor in (table, bias)), "a model has many vectors"
    assert [written.draw for written in writes.read(table)] == [one("constant")]
    assert [written.draw for written in writes.read(other)] == [one("normal", std=0.1)]


def test_the_calls_tell_copies() -> None:
    with Writes() as writes:
        first = nn.Parameter(torch.randn(3))
        copy, other = nn.Parameter(first.detach().clone()), nn.Parameter(torch.randn(3))
    calls = [writes.read(p)[0].call for p in (first, copy, other)]
    assert calls[0] == calls[1] != calls[2]


def fail_inside() -> None:
    with Writes():
        nn.Parameter(torch.empty(2)).numpy()


def test_torch_is_as_before_afterwards() -> None:
    original = torch.nn.init._no_grad_trunc_normal_
    with pytest.raises(TypeError):
        fail_inside()
    assert torch.nn.init._no_grad_trunc_normal_ is original
    assert not torch.empty(2).is_meta
