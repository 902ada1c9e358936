"""Rows of experts: each rank's part, and all together, against a loop over the pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.runtime import kernels
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels import experts
from autoptd.runtime.program.mesh import Coordinates, Mesh

TOKENS, SLOTS, EXPERTS, INNER, OUTER = 7, 2, 4, 5, 3


def make_rank(size: int = 1, index: int = 0) -> Rank:
    return Rank.local(Mesh(size, 1, 1), Coordinates(tensor=index, pipeline=0, data=0))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def choose(experts: int = EXPERTS) -> Tensor:
    """Different experts for each token; the last expert is nobody's, and one slot of a token is empty."""
    chosen = torch.stack([torch.randperm(experts - 1)[:SLOTS] for _ in range(TOKENS)])
    chosen[0, 1] = experts
    return chosen


def mix(rank: Rank, x: Tensor, gates: Tensor, chosen: Tensor, weight: Tensor, bias: Any, turned: bool) -> Tensor:
    order, counts = kernels.route(rank, chosen, EXPERTS, len(weight))
    rows = kernels.dispatch(x, order, SLOTS)
    rows = kernels.grouped_linear(rows, weight, counts, bias, transposed=turned)
    return kernels.combine(rows.tanh(), gates, order)


def loop(x: Tensor, gates: Tensor, chosen: Tensor, weight: Tensor, bias: Any, turned: bool) -> Tensor:
    sums = [torch.zeros(OUTER, dtype=x.dtype) for _ in range(TOKENS)]
    for token in range(TOKENS):
        for slot in range(SLOTS):
            if (expert := int(chosen[token, slot])) < EXPERTS:
                matrix = weight[expert] if turned else weight[expert].t()
                row = x[token] @ matrix + (0 if bias is None else bias[expert])
                sums[token] = sums[token] + gates[token, slot] * row.tanh()
    return torch.stack(sums)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_ranks_add_up_to_the_loop_with_every_gradient(size: int, turned: bool, biased: bool) -> None:
    torch.manual_seed(0)
    shape = (INNER, OUTER) if turned else (OUTER, INNER)
    x, gates, weight, chosen = draw(TOKENS, INNER), draw(TOKENS, SLOTS), draw(EXPERTS, *shape), choose()
    bias = draw(EXPERTS, OUTER) if biased else None
    own, total = EXPERTS // size, torch.zeros(TOKENS, OUTER, dtype=torch.float64)
    for index in range(size):
        part = slice(index * own, (index + 1) * own)
        given = weight[part], None if bias is None else bias[part], turned
        total = total + mix(make_rank(size, index), x, gates, chosen, *given)
    wanted = [x, gates, weight, *([] if bias is None else [bias])]
    scale = torch.randn_like(total)
    expected = loop(x, gates, chosen, weight, bias, turned)
    found, true = (torch.autograd.grad(result, wanted, scale) for result in (total, expected))
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)
    for own_gradient, gradient in zip(found, true, strict=True):
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-12, atol=1e-13)
    assert not found[2][-1].any()  # nobody's expert has a gradient, of zeros


def test_rows_behind_the_own_mean_nothing_in_either_direction() -> None:
    torch.manual_seed(0)
    rank, chosen, weight = make_rank(2), choose(), draw(2, OUTER, INNER)
    order, counts = kernels.route(rank, chosen, EXPERTS, 2)
    own = int(counts.sum())
    assert own < len(order) == TOKENS * SLOTS
    assert (order[own:] == TOKENS * SLOTS).all()
    rows = draw(len(order), INNER)
    out = kernels.grouped_linear(rows, weight, counts)
    assert not out[own:].any()
    spoilt = rows.detach().clone()
    spoilt[own:] = torch.nan
    gates = draw(TOKENS, SLOTS)
    for given in (rows, spoilt.requires_grad_()):
        result = kernels.combine(kernels.grouped_linear(given, weight, counts), gates, order)
        of_rows, of_gates = torch.autograd.grad(result.sum(), [given, gates])
        assert not of_rows[own:].any()
        assert of_gates.isfinite().all()
    (of_x,) = torch.autograd.grad(kernels.dispatch(x := draw(TOKENS, INNER), order, SLOTS), x, spoilt.detach())
    assert of_x.isfinite().all()


def test_a_token_with_an_expert_twice_is_refused_where_there_is_no_room() -> None:
    chosen = torch.zeros(TOKENS, SLOTS, dtype=torch.int64)
    _, counts = kernels.route(make_rank(2), chosen, EXPERTS, 2)
    assert counts.tolist() == [TOKENS * SLOTS, 0]
    with pytest.raises(RuntimeError, match="a token has one of 1 experts twice: expected 2 different ones"):
        kernels.route(make_rank(4), chosen, EXPERTS, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, c: kernels.route(make_rank(2), c, 4, 3), r"3 of 4 its own, on 2 tensor ranks"),
        (lambda x, w, c: kernels.route(make_rank(), c[0], 4, 4), r"experts \[2\], .* expected \[tokens, k\]"),
        (lambda x, w, c: kernels.grouped_linear(x, w, c[:3, 0]), r"counts \[3\], expected .* \[experts, out, in\]"),
        (lambda x, w, c: kernels.grouped_linear(x, w, c[:4, 0], None, True), r"expected .* \[experts, in, out\]"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(draw(TOKENS, INNER), draw(EXPERTS, OUTER, INNER), choose())


@pytest.mark.parametrize("turned", [False, True])
def test_the_grouped_product_of_torch_gives_what_the_loop_does(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a GPU's, in half precision; a CPU has it in float32, too."""
    torch.manual_seed(0)
    chosen, shape = choose(), (8, 16) if turned else (16, 8)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((TOKENS, 8), (TOKENS, SLOTS), (2, *shape), (2, 16))]
    x, gates, weight, bias = leaves
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(experts, "_runs_grouped", lambda *_, grouped=grouped: grouped)
        result = mix(make_rank(2, 1), x, gates, chosen, weight, bias, turned)
        results.append([result, *torch.autograd.grad(result.square().sum(), leaves)])
    for loop_, product in zip(*results, strict=True):
        torch.testing.assert_close(product, loop_, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes_are_those_of_their_arguments(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, gates = (draw(*shape).to(dtype) for shape in ((TOKENS, INNER), (EXPERTS, OUTER, INNER), (TOKENS, SLOTS)))
    chosen = choose()
    result = mix(make_rank(), x, gates, chosen, weight, None, False)
    assert result.dtype == dtype
    exact = loop(x.double(), gates.double(), chosen, weight.double(), None, False)
    torch.testing.assert_close(result.double(), exact, rtol=0, atol=10 * torch.finfo(dtype).eps)
    assert mix(make_rank(), x, gates.float(), chosen, weight, None, False).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[16, 0, 32, 8], [0, 0, 0, 0]])
@pytest.mark.parametrize("turned", [False, True])
def test_grouped_products_on_a_card_are_those_in_float64(card: str, counts: list[int], turned: bool) -> None:
    """Torch's grouped product, which counts nothing on the host; also of no rows, where a rank was sent none."""
    torch.manual_seed(0)
    number, rows = torch.tensor(counts, device=card), sum(counts)
    made = [torch.randn(shape, device=card) / 8 for shape in ((rows, 64), (4, 64, 128) if turned else (4, 128, 64))]
    narrow = [x.bfloat16().requires_grad_() for x in made]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    found = kernels.grouped_linear(narrow[0], narrow[1], number, None, turned)
    true = kernels.grouped_linear(wide[0], wide[1], number, None, turned)
    found.sum().backward()
    true.sum().backward()
    pairs: Any = [(found, true), *((x.grad, y.grad) for x, y in zip(narrow, wide, strict=True))]
    for own, exact in pairs:
        torch.testing.assert_close(own.double(), exact.double(), rtol=2e-2, atol=2e-2)
