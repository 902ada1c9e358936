"""Mixtures of stacked experts: the chosen pairs alone are computed, where the others are proved to add nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoptd.runtime import kernels
from samples.wild.decoder import HIDDEN
from samples.wild.habits import EXPERTS, Mixture, vary
from tests.test_mixtures import compile_tokens, verify_exactly

INFINITY = float("inf")
Body = Callable[[Any, Tensor], Tensor]


def scatter(m: Any, x: Tensor, fill: float, count: int = 2) -> Tensor:
    """The scores of the experts that each token chose, and the number `fill` for all others."""
    scores = m.router(x)
    best, chosen = scores.topk(count, dim=-1)
    return torch.full_like(scores, fill).scatter(1, chosen, best)


def spread(x: Tensor) -> Tensor:
    return x.expand(EXPERTS, -1, -1)


def columns(weights: Tensor) -> Tensor:
    return weights.t().unsqueeze(-1)


def weigh_inputs(m: Any, x: Tensor) -> Tensor:
    """As in Llama-4, of which each token has one expert: [experts * tokens, width]."""
    weights = torch.sigmoid(scatter(m, x, -INFINITY, 1).float()).to(x.dtype)
    rows = x.repeat(EXPERTS, 1) * weights.transpose(0, 1).reshape(-1, 1)
    gate, up = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), m.up).chunk(2, dim=-1)
    y = torch.bmm(up * functional.silu(gate), m.out).view(-1, HIDDEN)
    return y.reshape(EXPERTS, -1, HIDDEN).sum(dim=0)


def weigh_both(m: Any, x: Tensor) -> Tensor:
    """Two experts for each token, weighed in front of their products and behind."""
    weights = columns(scatter(m, x, 0.0))
    y = functional.gelu((spread(x) * weights.tanh()) @ m.up) * 0.5
    result: Tensor = (y @ m.down * weights).sum(0)
    return result


def weigh_outputs(m: Any, x: Tensor) -> Tensor:
    gates = columns(scatter(m, x, -INFINITY).exp() / 3)
    first, second = (functional.gelu(spread(x) @ m.up) @ m.down).split([HIDDEN // 4, 3 * HIDDEN // 4], -1)
    return torch.cat([(part * gates).sum(0) for part in (first, second)], -1)


def gate(m: Any, x: Tensor) -> Tensor:
    """Two products read the same rows."""
    rows = spread(x)
    y = (functional.silu(rows @ m.up) * (rows @ m.up_too)) @ m.down
    result: Tensor = (y * columns(scatter(m, x, 0.0))).sum(0)
    return result


def compute(body: Body, mesh: tuple[int, int, int] = (2, 1, 1), **options: Any) -> Any:
    class Stacked(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.05)
            self.up_too = nn.Parameter(torch.randn_like(self.up) * 0.05)

        def forward(self, x: Tensor) -> Tensor:
            return body(self, x.flatten(0, 1)).view(x.shape)

    torch.manual_seed(0)
    program = compile_tokens(vary(Stacked)(), mesh, **options)
    verify_exactly(program)
    return program


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mesh", "expert"), [((1, 1, 1), None), ((2, 1, 1), None), ((2, 1, 2), 4)])
@pytest.mark.parametrize("body", [weigh_inputs, weigh_both, weigh_outputs, gate])
def test_chosen_pairs_alone_are_computed(body: Body, mesh: tuple[int, int, int], expert: int | None) -> None:
    program = compute(body, mesh, expert=expert)
    targets = [node.target for node in program.stages[0].graph.nodes]
    assert targets.count(kernels.combine) == targets.count(kernels.dispatch) > 0
    assert not {torch.ops.aten.bmm.default, torch.ops.aten.matmul.default}.intersection(targets)
    assert "all experts of all tokens" not in "".join(program.log)


LEFT: dict[str, Body] = {
    "others are weighed by a number": lambda m, x: (
        functional.gelu(spread(x) @ m.up) @ m.down * columns(scatter(m, x, 0.1))
    ).sum(0),
    "others are weighed by what is made of a number": lambda m, x: (
        functional.gelu(spread(x) @ m.up) @ m.down * columns(scatter(m, x, 0.0).sigmoid())
    ).sum(0),
    "others are zero before a function that is not": lambda m, x: (
        ((spread(x) * columns(scatter(m, x, 0.0))) @ m.up).cos() @ m.down
    ).sum(0),
    "each expert adds its own": lambda m, x: (
        (spread(x) * columns(scatter(m, x, 0.0))) @ m.up @ m.down + m.down[:, :1]
    ).sum(0),
    "elements of all pairs are dropped": lambda m, x: (
        functional.dropout(spread(x) @ m.up @ m.down, 0.1, m.training) * columns(scatter(m, x, 0.0))
    ).sum(0),
    "others are weighed by all scores": lambda m, x: (
        spread(x) @ m.up @ m.down * columns(scatter(m, x, -INFINITY).softmax(-1) + m.router(x))
    ).sum(0),
    "scores of a token are taken for those of an expert": lambda m, x: (
        spread(x) @ m.up @ m.down * scatter(m, x, 0.0).reshape(EXPERTS, -1, 1)
    ).sum(0),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", LEFT)
def test_others_that_may_add_something_stay_with_the_reason(name: str) -> None:
    """All pairs are computed, divided in width."""
    program = compute(LEFT[name])
    assert "kernels.combine" not in program.rank(0).code
    (line,) = (line for line in program.log if line.startswith("normalize"))
    assert "aten.sum (test_stacked_experts.py:" in line
    assert "computes all experts of all tokens: those that a token did not choose are not proved to add 0" in line


def test_experts_that_a_token_may_have_twice_stay() -> None:
    """Of which a scatter keeps the score of one."""

    def body(m: Any, x: Tensor) -> Tensor:
        scores = m.router(x)
        chosen = (scores.argmax(-1, keepdim=True) + torch.arange(2)).clamp(max=EXPERTS - 1)
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        result: Tensor = (spread(x) @ m.up @ m.down * columns(weights)).sum(0)
        return result

    assert "kernels.combine" not in compute(body).rank(0).code
