"""f, g and take_own: each other's conjugates, checked against the plain computation and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoptd.runtime import collectives
from autoptd.runtime.comm.rank import Rank, thread_ranks
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.mesh import Mesh
from tests.counting import calls


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_divided_mlp_equals_the_whole_one(tensor: int) -> None:
    torch.manual_seed(0)
    x, up, down = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 6), (8, 6), (6, 8)))
    leaves = [value.clone().requires_grad_() for value in (x, up, down)]
    whole = (leaves[0] @ leaves[1].t()).tanh() @ leaves[2].t()
    whole.square().sum().backward()

    def divided(rank: Rank) -> tuple[Tensor, ...]:
        own = rank.group("tensor").index
        mine = [x, up.chunk(tensor)[own], down.chunk(tensor, 1)[own]]
        mine = [value.clone().requires_grad_() for value in mine]
        inner = (collectives.copy_to_tensor(rank, mine[0]) @ mine[1].t()).tanh()
        result = collectives.reduce_from_tensor(rank, inner @ mine[2].t())
        result.square().sum().backward()
        expected = {} if tensor == 1 else {"all_reduce": 2}
        assert calls(rank.group("tensor")) == expected
        return result.detach(), *(value.grad for value in mine if value.grad is not None)

    world = ThreadWorld()
    results = world.run(divided, thread_ranks(Mesh(tensor, 1, 1), world))
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for own, (result, of_x, of_up, of_down) in enumerate(results):
        torch.testing.assert_close(result, whole.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(of_x, gradients[0], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(of_up, gradients[1].chunk(tensor)[own], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(of_down, gradients[2].chunk(tensor, 1)[own], rtol=1e-13, atol=1e-13)
        assert torch.equal(result, results[0][0])
        assert torch.equal(of_x, results[0][1])


def test_reducing_leaves_the_partial_value_as_it_was() -> None:
    def reduce(rank: Rank) -> tuple[Tensor, Tensor]:
        x = torch.full((2,), 1.0 + rank.group("tensor").index)
        return x, collectives.reduce_from_tensor(rank, x)

    world = ThreadWorld()
    for own, (x, total) in enumerate(world.run(reduce, thread_ranks(Mesh(2, 1, 1), world))):
        assert x.tolist() == [1 + own] * 2
        assert total.tolist() == [3, 3]


def test_take_own_narrows_and_its_gradients_add_up() -> None:
    def take(rank: Rank) -> tuple[Tensor, Tensor | None]:
        x = torch.arange(12.0).view(2, 6).requires_grad_()
        own = collectives.take_own(rank, x, 1)
        (own * own).sum().backward()
        return own.detach(), x.grad

    world = ThreadWorld()
    results = world.run(take, thread_ranks(Mesh(3, 1, 1), world))
    x = torch.arange(12.0).view(2, 6)
    assert torch.equal(torch.cat([own for own, _ in results], 1), x)
    assert torch.equal(torch.stack([gradient for _, gradient in results if gradient is not None]).sum(0), 2 * x)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_scattered_and_gathered(dim: int) -> None:
    """Each rank's gradients are those of the sum, or of the whole value, that it has a part of."""
    terms = [torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]

    def run(rank: Rank) -> list[Tensor]:
        own = rank.group("tensor").index
        term, part = terms[own].clone().requires_grad_(), terms[0].chunk(2, dim)[own].clone().requires_grad_()
        scattered = collectives.reduce_scatter(rank, term, dim)
        gathered = collectives.gather_to_tensor(rank, part, dim)
        whole = collectives.all_gather(rank, part, dim)
        (of_term,) = torch.autograd.grad(scattered.square().sum(), term)
        (of_sum,) = torch.autograd.grad((gathered * terms[own]).sum(), part)
        (of_whole,) = torch.autograd.grad((whole * terms[1]).sum(), part)
        assert torch.equal(term, terms[own])  # nothing is summed in place
        return [x.detach() for x in (scattered, gathered, whole, of_term, of_sum, of_whole)]

    world, total = ThreadWorld(), terms[0] + terms[1]
    for own, found in enumerate(world.run(run, thread_ranks(Mesh(2, 1, 1), world))):
        parts = [value.chunk(2, dim)[own] for value in (total, terms[1])]
        expected = [parts[0], terms[0], terms[0], 2 * total, *parts]
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)


def test_take_own_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"dimension 1 of \[2, 6\] does not divide over 4 tensor ranks"):
        collectives.take_own(Rank.local(Mesh(4, 1, 1)), torch.ones(2, 6, device="meta"), 1)


def test_one_tensor_rank_is_the_identity() -> None:
    rank = Rank.local(Mesh(1, 1, 1))
    x = torch.ones(2)
    assert collectives.copy_to_tensor(rank, x) is x
    assert collectives.reduce_from_tensor(rank, x) is x
    assert collectives.take_own(rank, x, 0) is x


def test_shapes_on_meta() -> None:
    rank = Rank.local(Mesh(4, 1, 1))
    x = torch.ones(8, 3, device="meta", requires_grad=True)
    assert collectives.copy_to_tensor(rank, x).shape == (8, 3)
    assert collectives.reduce_from_tensor(rank, x).shape == (8, 3)
    assert collectives.take_own(rank, x, 0).shape == (2, 3)
