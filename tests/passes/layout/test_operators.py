"""Every operator the layout knows, and many it does not, alone and in chains: [b, s, h] in, [b, s, h] out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoptd.passes.layout import sequence_first
from autoptd.passes.layout.sequence_first import rewrite_layout
from tests.passes.layout.test_sequence_first import error, is_moved, is_same, prepare, run

WIDTH = 4
Step = Callable[[Any, Tensor], Tensor]


def attend(*given: Tensor) -> Tensor:
    q, k, v = given
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def fused(*given: Tensor, **options: Any) -> Tensor:
    q, k, v = given
    return F.scaled_dot_product_attention(q, k, v, **options)


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 2, 2).transpose(1, 2)


class Chain(nn.Module):
    """An embedding and `steps`; a result of another shape is broadcast against what it was made of."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.lin3 = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5)
        self.b = nn.Parameter(torch.randn(WIDTH))
        self.pos = nn.Parameter(torch.randn(8, WIDTH))
        self.steps = steps
        self.ids: dict[str, Tensor] = {}  # a dict: tensors may not be assigned while exported

    def forward(self, idx: Tensor) -> Tensor:
        self.ids["now"] = idx
        x = self.table(idx)
        for step in self.steps:
            y = step(self, x)
            x = y if y.shape == x.shape else x + y
        weights = torch.linspace(0.5, 1.5, x.shape[1], dtype=torch.float64)
        loss: Tensor = (x.square() * weights[:, None]).mean()
        return loss


def attend_sequence_first(m: Any, x: Tensor) -> Tensor:
    """Tells that the batch is the second dimension: the layout is sequence-first already."""
    q, k, v = (y.view(*x.shape[:2], 2, 2).permute(1, 2, 0, 3) for y in (x, x.tanh(), x * 2))
    return fused(q, k, v).permute(2, 0, 1, 3).reshape(x.shape)


STEPS: list[Step] = [
    lambda m, x: x.tanh(),
    lambda m, x: m.lin(x),
    lambda m, x: m.norm(x),
    lambda m, x: x.transpose(0, 1).contiguous().transpose(0, 1),
    lambda m, x: x.transpose(1, 2).softmax(1).transpose(1, 2),
    lambda m, x: x.permute(2, 0, 1).cumsum(0).permute(1, 2, 0),
    lambda m, x: x.reshape(-1, WIDTH).sigmoid().view(x.shape),
    lambda m, x: m.lin(x.reshape(-1, WIDTH)).view(x.shape),
    lambda m, x: x.reshape(-1, 2, 2).transpose(1, 2).reshape(x.shape),
    lambda m, x: x.view(*x.shape[:2], 2, 2).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(x.shape),
    lambda m, x: x + x.mean(1, keepdim=True),
    lambda m, x: x * x.mean(0),
    lambda m, x: x + x.sum((0, 2), keepdim=True),
    lambda m, x: x + x.amax(1)[:, None],
    lambda m, x: x - x.var(2, keepdim=True),
    lambda m, x: x.softmax(1),
    lambda m, x: x.cumsum(0),
    lambda m, x: x.cumsum(1),
    lambda m, x: torch.cat((x[:, 1:], x[:, :1]), 1),
    lambda m, x: torch.cat((x[1:], x[:1]), 0),
    lambda m, x: x.flip(0),
    lambda m, x: x.roll(1, 1),
    lambda m, x: torch.stack(x.unbind(0), 0),
    lambda m, x: torch.stack(x.unbind(1), 1),
    lambda m, x: torch.stack((x, x * 2), 0).sum(0),
    lambda m, x: torch.stack((x, x * 2), 1).sum(1),
    lambda m, x: torch.stack((x, -x), 2).amax(2),
    lambda m, x: x[None].expand(3, *x.shape).mean(0),
    lambda m, x: x[:, None].expand(-1, 2, -1, -1).transpose(1, 2).mean(2),
    lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    lambda m, x: F.pad(x, (0, 0, 0, 0, 1, 0))[:-1],
    lambda m, x: x.repeat_interleave(2, 1)[:, ::2],
    lambda m, x: x.repeat_interleave(2, 0)[1::2],
    lambda m, x: x.repeat(1, 2, 1)[:, : x.shape[1]],
    lambda m, x: x.reshape(-1).tanh().reshape(x.shape),
    lambda m, x: x.reshape(x.shape[0], -1).softmax(-1).reshape(x.shape),
    lambda m, x: x.reshape(x.shape[0] * x.shape[1] * 2, 2).softmax(0).reshape(x.shape),
    lambda m, x: x.gather(1, x.argsort(1)),
    lambda m, x: x.gather(2, x.argsort(2)),
    lambda m, x: x.gather(0, x.argsort(0)),
    lambda m, x: x.sort(1).values,
    lambda m, x: x.sort(0).values,
    lambda m, x: x @ m.w,
    lambda m, x: x @ (x.transpose(1, 2) @ x).tanh(),
    lambda m, x: (x @ x.transpose(1, 2)).tanh() @ x,
    lambda m, x: torch.bmm(x.transpose(0, 1).softmax(-1), m.w.expand(x.shape[1], WIDTH, WIDTH)).transpose(0, 1),
    lambda m, x: torch.einsum("bsh,hk->bsk", x, m.w),
    lambda m, x: torch.einsum("bsh,bth->bts", x, x) @ x,
    lambda m, x: torch.addmm(m.b, x.reshape(-1, WIDTH), m.w).view(x.shape),
    lambda m, x: x + m.pos[: x.shape[1]],
    lambda m, x: x + m.pos[None, : x.shape[1]],
    lambda m, x: x * m.pos[: x.shape[0], None],
    lambda m, x: x * m.pos[: x.shape[1], :1],
    lambda m, x: torch.where(x.amax(-1, keepdim=True) > 0, x, m.pos[: x.shape[1]]),
    lambda m, x: x.masked_fill((m.ids["now"] > 5)[..., None], 0.5),
    lambda m, x: x * (m.ids["now"][:, None, :] == m.ids["now"][:, :, None]).double().sum(-1, keepdim=True),
    lambda m, x: x + m.table(m.ids["now"].flip(1)),
    lambda m, x: x[:, -1:] + x,
    lambda m, x: x[-1:] * x,
    lambda m, x: x[:, 0, :].unsqueeze(1) + x,
    lambda m, x: x.select(0, 0) + x,
    lambda m, x: fused(*(heads(y) for y in (x, x.tanh(), x * 2)), is_causal=True).transpose(1, 2).reshape(x.shape),
    lambda m, x: fused(x, x, x, is_causal=True),
    attend_sequence_first,
    lambda m, x: (
        fused(
            *(heads(y) for y in m.lin3(x).split(WIDTH, -1)),
            attn_mask=(m.ids["now"] > 2)[:, None, None, :] | torch.eye(x.shape[1]).bool(),
        )
        .transpose(1, 2)
        .reshape(x.shape)
    ),
    lambda m, x: attend(*(heads(y) for y in m.lin3(x).split(WIDTH, -1))).transpose(1, 2).reshape(x.shape),
    lambda m, x: (
        attend(*(heads(y).reshape(-1, x.shape[1], 2) for y in m.lin3(x).chunk(3, -1)))
        .view(x.shape[0], 2, x.shape[1], 2)
        .transpose(1, 2)
        .reshape(x.shape)
    ),
    lambda m, x: (lambda t: t[0] * t[1].tanh() + t[2])(m.lin3(x).split(WIDTH, -1)),
    lambda m, x: (
        m.lin3(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)[1].transpose(1, 2).reshape(x.shape)
    ),
    lambda m, x: x.unflatten(2, (2, 2)).flatten(0, 1).mean(1, keepdim=True).expand(-1, 2, -1).reshape(x.shape),
    lambda m, x: x.view(x.shape[0], 1, x.shape[1], WIDTH).squeeze(1).square(),
    lambda m, x: (
        F.cross_entropy(x.reshape(-1, WIDTH), m.ids["now"].reshape(-1) % WIDTH, reduction="none").view(x.shape[:2])[
            ..., None
        ]
        + x
    ),
    lambda m, x: F.cross_entropy(x.transpose(1, 2), m.ids["now"] % WIDTH, reduction="none")[..., None] * x,
    lambda m, x: (
        x + F.cross_entropy(x[:, 1:].reshape(-1, WIDTH), m.ids["now"][:, :-1].reshape(-1) % WIDTH)
        if x.shape[1] > 1
        else x
    ),
    lambda m, x: x.log_softmax(-1).gather(-1, (m.ids["now"] % WIDTH)[..., None]) + x,
    lambda m, x: x.swapaxes(0, 2).relu().swapaxes(0, 2),
    lambda m, x: x.movedim(1, 0).exp().clamp(max=2).movedim(0, 1),
    lambda m, x: x.chunk(2, -1)[0].repeat(1, 1, 2),
    lambda m, x: torch.cat([x, x], 0).chunk(2, 0)[1],
    lambda m, x: x.index_select(1, torch.arange(x.shape[1]).flip(0)),
    lambda m, x: x[:, torch.arange(x.shape[1]).flip(0)],
    lambda m, x: x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]],
    lambda m, x: x.narrow(1, 0, x.shape[1] - 1 or 1).sum(1, keepdim=True) + x,
    lambda m, x: x.std(),
    lambda m, x: x.std(unbiased=False) + x,
    lambda m, x: x.flatten().var(True) + x.repeat_interleave(2).view(*x.shape[:2], 2, -1)[:, :, 0, :1],
    lambda m, x: x.new_ones(x.shape) * x,
    lambda m, x: torch.zeros_like(x) + x,
    lambda m, x: torch.full((x.shape[0], x.shape[1], 1), 2.0).double() * x,
    lambda m, x: x.tril() + x,
    lambda m, x: x.norm(dim=1, keepdim=True) * x,
    lambda m, x: x.prod(1, keepdim=True) + x,
    lambda m, x: x.logsumexp(1, keepdim=True) + x,
    lambda m, x: x.all(1, keepdim=True).double() + x,
]


@pytest.fixture(autouse=True)
def always_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move at any price: what would be left alone must be right too."""
    monkeypatch.setattr(sequence_first, "find_copies", lambda graph, strides: {})


def check(steps: list[Step], batch: int, length: int) -> bool:
    """Compare before and after; is anything moved?"""
    model = Chain(steps).double()
    inputs = {"idx": torch.randint(0, 11, (batch, length))}
    program = prepare(model, inputs)
    expected = run(program, model, inputs)
    rewritten = rewrite_layout(program)
    found = run(rewritten, model, inputs)
    rewritten.stages[0].graph.lint()
    if not float(expected[0]) or not any(float(g.abs().max()) for g in expected[1].values()):
        assert is_same(found, expected)
    else:
        assert error(found, expected) <= 1e-13
        assert batch > 1 or is_same(found, expected)
    return is_moved(rewritten)


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_each_operator_alone(number: int) -> None:
    torch.manual_seed(number)
    assert check([STEPS[number]], 2, 3) == (STEPS[number] is not attend_sequence_first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_chains(first: int) -> None:
    for seed in range(first, first + 50):
        r = random.Random(seed)
        torch.manual_seed(seed)
        check(r.choices(STEPS, k=r.randint(2, 5)), r.choice([1, 2, 3]), r.choice([1, 2, 3, 4]))
