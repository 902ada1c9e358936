"""The kernels against torch's own operators, on every number of tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime import collectives, kernels
from autoptd.runtime.comm.rank import Rank, thread_ranks
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.randomness import Randomness
from tests.counting import elements


def assert_exact(actual: Tensor, expected: Tensor) -> None:
    """To the last digits of float64."""
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-15)


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def on_tensor_ranks(tensor: int, function: Callable[[Rank], Any]) -> list[Any]:
    world = ThreadWorld()
    return world.run(function, thread_ranks(Mesh(tensor, 1, 1), world))


def own_part(x: Tensor, dim: int, tensor: int, index: int) -> Tensor:
    """Part `index` of `tensor` along `dim`, padded to equal widths with values that must not matter."""
    width = -(-x.shape[dim] // tensor)
    pad = list(x.shape)
    pad[dim] = width * tensor - x.shape[dim]
    return torch.cat([x, x.new_full(pad, 1e3)], dim).narrow(dim, index * width, width).clone().requires_grad_()


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", [37, 36, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy(tensor: int, vocabulary: int, reduction: Literal["mean", "sum"]) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(24, vocabulary, dtype=torch.float64)
    target = torch.randint(0, vocabulary, (24,))
    target[[2, 5]] = 0
    target[7] = vocabulary - 1
    target[[3, 20]] = -100
    plain = logits.clone().requires_grad_()
    expected = functional.cross_entropy(plain, target, reduction=reduction)
    (2 * expected).backward()

    def divided(rank: Rank) -> tuple[Tensor, Tensor, Any]:
        own = own_part(logits, 1, tensor, rank.group("tensor").index)
        loss = kernels.cross_entropy(rank, own, target, vocabulary, reduction=reduction)
        (2 * loss).backward()
        return loss.detach(), gradient(own), dict(elements(rank.group("tensor")))

    results = on_tensor_ranks(tensor, divided)
    gradients = torch.cat([of_own for _, of_own, _ in results], 1)
    assert_exact(gradients[:, :vocabulary], gradient(plain))
    assert not gradients[:, vocabulary:].any()
    for loss, _, sums in results:
        assert_exact(loss, expected.detach())
        assert torch.equal(loss, results[0][0])
        assert sums == ({} if tensor == 1 else {"all_reduce": 3 * 24})


@pytest.mark.parametrize("tensor", [1, 3])
def test_cross_entropy_of_ignored_targets_only(tensor: int) -> None:
    logits, target = torch.randn(4, 7, dtype=torch.float64), torch.full((4,), 6)

    def divided(rank: Rank) -> tuple[Tensor, Tensor]:
        own = own_part(logits, 1, tensor, rank.group("tensor").index)
        loss = kernels.cross_entropy(rank, own, target, 7, ignore_index=6)
        loss.backward()
        return loss.detach(), gradient(own)

    for loss, of_own in on_tensor_ranks(tensor, divided):
        assert loss.isnan()
        assert not of_own.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_sums_half_precision_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 600).to(dtype)
    target = torch.randint(0, 600, (64,))
    plain = logits.double().requires_grad_()
    expected = functional.cross_entropy(plain, target)
    expected.backward()

    def divided(rank: Rank) -> tuple[Tensor, Tensor]:
        own = own_part(logits, 1, 2, rank.group("tensor").index)
        loss = kernels.cross_entropy(rank, own, target, 600)
        loss.backward()
        return loss.detach(), gradient(own)

    step = torch.finfo(dtype).eps
    results = on_tensor_ranks(2, divided)
    for loss, of_own in results:
        assert loss.dtype == of_own.dtype == dtype
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=step, atol=0)
    joined = torch.cat([of_own for _, of_own in results], 1).double()
    torch.testing.assert_close(joined, gradient(plain), rtol=2 * step, atol=1e-6)


def test_cross_entropy_holds_large_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e4]])

    def divided(rank: Rank) -> Tensor:
        return kernels.cross_entropy(rank, own_part(logits, 1, 2, rank.group("tensor").index), torch.tensor([3]), 4)

    for loss in on_tensor_ranks(2, divided):
        torch.testing.assert_close(loss, functional.cross_entropy(logits, torch.tensor([3])))


@pytest.mark.parametrize("tensor", [1, 2, 3])
@pytest.mark.parametrize("all_hidden", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cross_entropy_of_hidden_columns(tensor: int, all_hidden: bool, dtype: torch.dtype) -> None:
    """A row may have nothing but -inf on some ranks; on all, it is nan, as in torch."""
    torch.manual_seed(0)
    logits = torch.randn(5, 6, dtype=torch.float64).to(dtype)
    target = torch.tensor([0, 5, 3, 1, 2])
    logits[0, 2:] = logits[1, :4] = logits[2, :3] = logits[2, 4:] = -torch.inf
    if all_hidden:
        logits[4] = -torch.inf
    plain = logits.double().clone().requires_grad_()
    expected = functional.cross_entropy(plain, target)
    expected.backward()

    def divided(rank: Rank) -> tuple[Tensor, Tensor]:
        own = own_part(logits, 1, tensor, rank.group("tensor").index)
        loss = kernels.cross_entropy(rank, own, target, 6)
        loss.backward()
        return loss.detach(), gradient(own)

    results = on_tensor_ranks(tensor, divided)
    joined = torch.cat([of_own for _, of_own in results], 1)
    step = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    torch.testing.assert_close(
        joined.double(), gradient(plain), rtol=step, atol=1e-14 if dtype == torch.float64 else 1e-6, equal_nan=True
    )
    for loss, _ in results:
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=step, atol=0, equal_nan=True)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("wrong", [-1, 7, 8])
def test_cross_entropy_refuses_a_target_outside_the_vocabulary(tensor: int, wrong: int) -> None:
    target = torch.tensor([0, wrong])

    def divided(rank: Rank) -> Tensor:
        return kernels.cross_entropy(
            rank, own_part(torch.zeros(2, 7), 1, tensor, rank.group("tensor").index), target, 7
        )

    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        on_tensor_ranks(tensor, divided)


def test_cross_entropy_has_no_second_derivative() -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    rank = Rank.local(Mesh(1, 1, 1))
    loss = kernels.cross_entropy(rank, logits, torch.arange(4), 6)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_cross_entropy_says_what_it_takes() -> None:
    rank = Rank.local(Mesh(1, 1, 1))
    with pytest.raises(ValueError, match=r"logits \[2, 3, 7\] and target \[2, 3\], expected \[N, V/t\] and \[N\]"):
        kernels.cross_entropy(rank, torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64), 7)
    with pytest.raises(ValueError, match=r"logits \[2, 7\] and target \[2\], .* with V = 9 and t = 1"):
        kernels.cross_entropy(rank, torch.zeros(2, 7), torch.tensor([0, 8]), 9)
    with pytest.raises(ValueError, match="reduction='max', expected 'mean', 'sum' or 'none'"):
        kernels.cross_entropy(rank, torch.zeros(2, 7), torch.zeros(2, dtype=torch.int64), 7, reduction="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", [37, 36])
def test_embedding(tensor: int, vocabulary: int) -> None:
    torch.manual_seed(0)
    table = torch.randn(vocabulary, 6, dtype=torch.float64)
    ids = torch.randint(0, vocabulary, (3, 11))
    ids[0, :3] = torch.tensor([0, vocabulary - 1, 0])
    plain = table.clone().requires_grad_()
    expected = functional.embedding(ids, plain)
    expected.square().sum().backward()

    def divided(rank: Rank) -> tuple[Tensor, Tensor]:
        own = own_part(table, 0, tensor, rank.group("tensor").index)
        rows = collectives.reduce_from_tensor(rank, kernels.embedding(rank, own, ids, vocabulary))
        rows.square().sum().backward()
        return rows.detach(), gradient(own)

    results = on_tensor_ranks(tensor, divided)
    assert torch.equal(torch.cat([of_own for _, of_own in results])[:vocabulary], gradient(plain))
    for rows, _ in results:
        assert torch.equal(rows, expected)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("wrong", [-1, 7, 8, 100])
def test_embedding_refuses_an_id_outside_the_vocabulary_on_every_rank(tensor: int, wrong: int) -> None:
    def divided(rank: Rank) -> bool:
        own = own_part(torch.zeros(7, 2), 0, tensor, rank.group("tensor").index)
        with pytest.raises(IndexError, match="out of range"):
            kernels.embedding(rank, own, torch.tensor([1, wrong]), 7)
        return True

    assert all(on_tensor_ranks(tensor, divided))


def test_dropout_keeps_scales_and_stands_aside() -> None:
    rank = Rank.local(Mesh(1, 1, 1))
    x = torch.randn(4, 50, dtype=torch.float64, requires_grad=True)
    y = kernels.dropout(rank, x, 0.25, 1)
    y.sum().backward()
    kept = y != 0
    assert 0 < int(kept.sum()) < x.numel()
    assert_exact(y, torch.where(kept, x / 0.75, 0))
    assert_exact(gradient(x), kept.double() / 0.75)
    assert kernels.dropout(rank, x, 0, 1) is x
    assert not kernels.dropout(rank, x, 1.0, 1).any()
    rank.randomness.training = False
    assert kernels.dropout(rank, x, 0.25, 1) is x
    with pytest.raises(ValueError, match=r"dropout probability is 1.5, expected 0 to 1"):
        kernels.dropout(rank, x, 1.5, 1)


def test_dropout_sees_through_views_and_layouts() -> None:
    rank = Rank.local(Mesh(1, 1, 1))
    rank.randomness = Randomness(seed=3, call=4, sample=8)
    x = torch.ones(2, 5, 6)
    whole = kernels.dropout(rank, x, 0.5, 1)
    flat = kernels.dropout(rank, x.view(10, 6), 0.5, 1, shape=(2, 5, 6))
    assert torch.equal(flat.view(2, 5, 6), whole)
    assert torch.equal(kernels.dropout(rank, x.transpose(0, 1), 0.5, 1, sample=1).transpose(0, 1), whole)
    rank.randomness.sample = 9
    assert torch.equal(kernels.dropout(rank, x[1:], 0.5, 1), whole[1:])


@pytest.mark.parametrize("tensor", [2, 3])
def test_dropout_of_a_divided_dimension(tensor: int) -> None:
    x = torch.ones(2, 5, 6)
    whole = kernels.dropout(Rank.local(Mesh(1, 1, 1)), x, 0.5, 1)

    def divided(rank: Rank) -> Tensor:
        own = x.chunk(tensor, 2)[rank.group("tensor").index]
        return kernels.dropout(rank, own, 0.5, 1, divided=2)

    assert torch.equal(torch.cat(on_tensor_ranks(tensor, divided), 2), whole)


MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bool": torch.ones(7, 7, dtype=torch.bool).tril(2),
    "additive": torch.randn(2, 1, 7, 7, dtype=torch.float64),
    "blind query": torch.ones(7, 7, dtype=torch.bool).tril(-1),
    "blind additive": torch.zeros(7, 7, dtype=torch.float64).masked_fill(
        torch.ones(7, 7, dtype=torch.bool).triu(), -torch.inf
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_scaled_softmax_between_products_is_torchs_attention(mask: str, causal: bool) -> None:
    if causal and mask != "none":
        with pytest.raises(ValueError, match="a mask and is_causal=True"):
            kernels.scaled_softmax(Rank.local(Mesh(1, 1, 1)), torch.ones(1, 1, 7, 7), MASKS[mask], is_causal=True)
        return
    torch.manual_seed(0)
    ours = [torch.randn(2, 3, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    torchs = [x.detach().clone().requires_grad_() for x in ours]
    q, k, v = ours
    scores = q @ k.transpose(-2, -1)
    result = kernels.scaled_softmax(Rank.local(Mesh(1, 1, 1)), scores, MASKS[mask], causal, 0.3) @ v
    q, k, v = torchs
    expected = functional.scaled_dot_product_attention(q, k, v, MASKS[mask], is_causal=causal, scale=0.3)
    torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-14)
    result.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(gradient(mine), gradient(other), rtol=1e-12, atol=1e-13)


def test_a_row_of_the_least_number_is_seen_evenly() -> None:
    """What eager attention makes of a padded query; torch's fused backward is wrong there (weights of 1, not 1 / n)."""
    scores = torch.randn(2, 3, 7, 7, dtype=torch.float64, requires_grad=True)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu()
    mask = torch.zeros(7, 7, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    result = kernels.scaled_softmax(Rank.local(Mesh(1, 1, 1)), scores, mask)
    expected = (scores + mask).softmax(-1)
    assert torch.equal(result, expected)
    assert torch.equal(result[..., 0, :], torch.full((2, 3, 7), 1 / 7, dtype=torch.float64))
    value = torch.randn(7, 4, dtype=torch.float64)
    (ours,) = torch.autograd.grad((result @ value).square().sum(), scores)
    (plain,) = torch.autograd.grad((expected @ value).square().sum(), scores)
    assert_exact(ours, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_softmax_of_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 7, 7).to(dtype)
    result = kernels.scaled_softmax(Rank.local(Mesh(1, 1, 1)), scores, is_causal=True, scale=3.0)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = (scores.float() * 3).masked_fill(hidden, -torch.inf).softmax(-1).to(dtype)
    assert result.dtype == dtype
    assert torch.equal(result, expected)


def test_scaled_softmax_refuses_a_mask_that_is_larger_than_the_scores() -> None:
    with pytest.raises(ValueError, match=r"scores \[1, 7, 7\] .* a mask \[2, 7, 7\] .* broadcast"):
        kernels.scaled_softmax(Rank.local(Mesh(1, 1, 1)), torch.ones(1, 7, 7), torch.ones(2, 7, 7))


@pytest.mark.parametrize("tensor", [2, 4])
def test_scaled_softmax_drops_alike_for_divided_heads(tensor: int) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    local = Rank.local(Mesh(1, 1, 1))
    whole = kernels.scaled_softmax(local, scores, is_causal=True, p=0.3, operator=6)
    weights = kernels.scaled_softmax(local, scores, is_causal=True)
    assert_exact(whole, kernels.dropout(local, weights, 0.3, 6))
    assert not torch.equal(whole, weights)

    def divided(rank: Rank) -> Tensor:
        own = scores.chunk(tensor, 1)[rank.group("tensor").index]
        return kernels.scaled_softmax(rank, own, is_causal=True, p=0.3, operator=6, divided=1)

    assert_exact(torch.cat(on_tensor_ranks(tensor, divided), 1), whole)


def test_shapes_on_meta() -> None:
    rank = Rank.local(Mesh(4, 1, 1))
    logits = on_meta(6, 10).requires_grad_()
    target = on_meta(6, dtype=torch.int64)
    loss = kernels.cross_entropy(rank, logits, target, 37)
    assert loss.shape == ()
    loss.backward()
    assert gradient(logits).shape == (6, 10)
    assert elements(rank.group("tensor")) == {"all_reduce": 18}
    ids = on_meta(2, 3, dtype=torch.int64)
    assert kernels.embedding(rank, on_meta(10, 5), ids, 37).shape == (2, 3, 5)
    x = on_meta(3, 2, 8)
    assert kernels.dropout(rank, x, 0.1, 1, sample=1, divided=2).shape == (3, 2, 8)
    assert kernels.dropout(rank, x.transpose(0, 1), 0.1, 1).stride() == x.transpose(0, 1).stride()
    scores = on_meta(2, 3, 7, 7, dtype=torch.bfloat16)
    weights = kernels.scaled_softmax(rank, scores, is_causal=True, p=0.1, divided=1)
    assert (weights.shape, weights.dtype) == (scores.shape, scores.dtype)
