"""torch's own norm of a divided model's gradients is the whole model's, or refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.guards.norm_guard import GradientShare, ShareNorm
from autoptd.runtime.module.parallel import Parallel
from tests.runtime.chain import Chain
from tests.runtime.module.test_parallel import Plain

FORMS: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}]


def run(chain: Chain, ask: Callable[[Parallel], Any]) -> list[Any]:
    """``ask(parallel)`` on every rank, after a backward."""

    def body(connection: Connection) -> Any:
        parallel = chain.parallel(connection)
        parallel(**chain.batch())["loss"].backward()
        return ask(parallel)

    return run_threads(chain.manifest, body)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_torch_clips_by_the_norm_of_the_whole_model(norm_type: float, foreach: bool | None) -> None:
    chain = Chain((2, 2, 2), "interleaved_1f1b", 2, 2, tied=True)

    def ask(parallel: Parallel) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        first = get_total_norm([p.grad for p in parallel.parameters() if p.grad is not None], norm_type)
        norm = clip_grad_norm_(parallel.parameters(), 0.01, norm_type, foreach=foreach)
        return first, norm, {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}

    plain = Plain(chain)
    plain.gradients(chain.batch())
    expected = clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    for rank, (first, norm, own) in enumerate(run(chain, ask)):
        assert type(norm) is Tensor
        assert torch.equal(first, norm)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for name, gradient in own.items():
            whole = plain.get_parameter(name).grad
            assert whole is not None
            part = chain.manifest.parameters[name].placement.take(
                whole, 2, chain.mesh.coordinates(rank).tensor
            )
            torch.testing.assert_close(gradient.as_subclass(Tensor), part, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("-inf"), float("nan")])
def test_what_is_no_norm_is_refused(norm_type: float) -> None:
    """By both calls; the gradients stay as they were."""

    def ask(parallel: Parallel) -> None:
        gradients = {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}
        before = {name: gradient.clone() for name, gradient in gradients.items()}
        refused = partial(pytest.raises, ValueError, match=f"norm_type is {norm_type}, expected a positive")
        with refused():
            clip_grad_norm_(parallel.parameters(), 0.01, norm_type)
        with refused():
            parallel.clip_grad_norm_(0.01, norm_type)
        assert all(torch.equal(gradients[name], gradient) for name, gradient in before.items())

    run(Chain((2, 1, 1), "gpipe", 1, 1), ask)


def test_a_norm_of_some_gradients_is_refused() -> None:
    chain = Chain((2, 1, 1), "gpipe", 1, 1)

    def some(parallel: Parallel) -> None:
        with pytest.raises(ValueError, match=r"here it is of 3, not of layer.*parallel.clip_grad_norm_\(max"):
            clip_grad_norm_([p for p in parallel.parameters() if p.grad is not None][:3], 1.0)
        other = nn.Parameter(torch.ones(3, dtype=chain.dtype))
        other.grad = torch.ones(3, dtype=chain.dtype)
        with pytest.raises(ValueError, match="together with others"):
            clip_grad_norm_([*parallel.parameters(), other], 1.0)

    run(chain, some)


@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize("sharded", [False, True])
def test_what_was_frozen_after_its_backward_is_clipped(mesh: tuple[int, int, int], sharded: bool) -> None:
    """An optimizer steps by the gradient that it has. What clips only trained ones leaves it out, as in torch."""
    chain = Chain(mesh, "1f1b", 1, 2)
    frozen = "layer.0.row.bias"

    def ask(connection: Connection) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        parallel = chain.parallel(connection)
        if sharded:
            others = [p for name, p in parallel.named_parameters() if name != frozen]
            parallel.shard_optimizer(torch.optim.SGD(others, lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        own = dict(parallel.named_parameters()).get(frozen)
        if own is not None:
            own.requires_grad_(False)
        trained = clip_grad_norm_([p for p in parallel.parameters() if p.requires_grad], float("inf"))
        whole = clip_grad_norm_(parallel.parameters(), float("inf"))
        return trained, whole, parallel.clip_grad_norm_(0.01), own.grad if own is not None else None

    plain = Plain(chain)
    plain.gradients(chain.batch())
    plain.get_parameter(frozen).requires_grad_(False)
    some = clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], float("inf"))
    expected = clip_grad_norm_(plain.parameters(), 0.01)
    assert some < expected
    for trained, whole, norm, own in run_threads(chain.manifest, ask):
        torch.testing.assert_close(trained, some, rtol=1e-12, atol=0)
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        if own is not None:
            clipped = plain.get_parameter(frozen).grad
            torch.testing.assert_close(own.as_subclass(Tensor), clipped, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)])
def test_a_norm_of_what_autograd_gives_is_refused(mesh: tuple[int, int, int]) -> None:
    """It is one rank's, and not in ``.grad``, of which the whole model's is taken; nor is what a hook is given."""
    chain = Chain(mesh, "1f1b", 1, 2)
    seen: list[str] = []

    def read(gradient: Tensor) -> None:
        with pytest.raises(
            ValueError, match=r"not in its \.grad, of which this rank has a share only: let loss\."
        ):
            gradient.norm()
        seen.append("hook")

    def ask(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        given = torch.autograd.grad(
            parallel(**chain.batch())["loss"], list(parallel.parameters()), allow_unused=True
        )
        own = [gradient for gradient in given if gradient is not None]
        for foreach in (True, False):
            with pytest.raises(
                ValueError, match=r"norm of a gradient of layer\.\d.* and then call parallel\.clip"
            ):
                get_total_norm(own, foreach=foreach)
        hooked = next(p for name, p in parallel.named_parameters() if name.startswith("layer"))
        hooked.register_hook(read)
        parallel(**chain.batch())["loss"].backward()
        norm = get_total_norm([p.grad for p in parallel.parameters() if p.grad is not None])
        for each, p in zip(own, (p for p in parallel.parameters() if p.grad is not None), strict=True):
            assert torch.equal(each, p.grad)  # type: ignore[arg-type]
            p.grad = each
        for foreach in (True, False):
            assert clip_grad_norm_(parallel.parameters(), float("inf"), foreach=foreach) == norm > 0

    run_threads(chain.manifest, ask)
    assert len(seen) == chain.mesh.size


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda gradient: gradient.norm(),
    "norm of data": lambda gradient: gradient.data.norm(2),
    "norm of detached": lambda gradient: torch.norm(gradient.detach(), p=2),
    "linalg.norm": lambda gradient: torch.linalg.norm(gradient),
    "vector_norm": lambda gradient: torch.linalg.vector_norm(gradient, ord=2),
    "norm of a cast": lambda gradient: gradient.double().norm(),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_norm_by_other_words_is_of_the_whole_model_or_refused(spelling: str, sharded: bool) -> None:
    chain = Chain((2, 1, 2), "1f1b", 1, 2, tied=True)
    take = SPELLINGS[spelling]

    def ask(connection: Connection) -> tuple[Tensor, Tensor]:
        parallel = chain.parallel(connection)
        if sharded:
            parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        norms = [take(p.grad) for p in parallel.parameters() if p.grad is not None]
        assert norms[0].dim() == 0
        together = torch.stack(norms)
        for read in (lambda: norms[0].item(), lambda: sum(n**2 for n in norms), lambda: together.square()):
            with pytest.raises(ValueError, match=r"as if it were that of the whole: .* max_norm=float"):
                read()
        return together.norm(), parallel.clip_grad_norm_(float("inf"))

    for found, expected in run_threads(chain.manifest, ask):
        assert torch.equal(found, expected)


REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda gradient: gradient / 2,
    "cleaned": torch.nan_to_num,
    "cloned": torch.clone,
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)])
def test_a_gradient_that_was_replaced_is_not_stepped(name: str, mesh: tuple[int, int, int]) -> None:
    chain = Chain(mesh, "1f1b", 1, 2)

    def ask(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        parallel(**chain.batch())["loss"].backward()
        optimizer.step()
        before = [p.detach().clone() for p in parallel.parameters()]
        for p in parallel.parameters():
            p.grad = None if p.grad is None else REPLACED[name](p.grad)
        with pytest.raises(ValueError, match=r"the gradient of .* was replaced .* change it in place"):
            optimizer.step()
        assert all(map(torch.equal, parallel.parameters(), before))

    run_threads(chain.manifest, ask)


def test_a_gradient_of_a_shard_that_was_replaced_is_not_stepped() -> None:
    chain = Chain((2, 1, 2), "1f1b", 1, 2)

    def ask(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        for p in optimizer.param_groups[0]["params"]:
            p.grad = None if p.grad is None else p.grad / 2
        with pytest.raises(ValueError, match=r"the gradient of elements .* of layer.* was replaced"):
            optimizer.step()

    run_threads(chain.manifest, ask)


def test_a_norm_that_a_rank_does_not_ask_for_is_refused() -> None:
    """Where what it has is frozen; `clip_grad_norm_` of the parallel model is asked by all."""
    chain = Chain((1, 2, 1), "1f1b", 1, 2)

    def ask(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        for name, parameter in parallel.named_parameters():
            parameter.requires_grad_(name.startswith("layer.1"))
        parallel(**chain.batch())["loss"].backward()
        if connection.rank.coordinates.pipeline == 1:
            with pytest.raises(ValueError, match="some ranks have no gradients and do not ask for it"):
                clip_grad_norm_(parallel.parameters(), 0.1)
        else:
            assert clip_grad_norm_(parallel.parameters(), 0.1) == 0
        assert parallel.clip_grad_norm_(0.1) > 0
        for parameter in parallel.parameters():
            parameter.requires_grad_()
        parallel(**chain.batch())["loss"].backward()
        assert clip_grad_norm_(parallel.parameters(), 0.1) > 0

    run_threads(chain.manifest, ask)


def test_a_norm_is_refused_wherever_it_stands() -> None:
    chain = Chain((2, 1, 1), "gpipe", 1, 1)

    def ask(parallel: Parallel) -> None:
        p = parallel.get_parameter("layer.0.row.weight")
        assert p.grad is not None
        norm = p.grad.norm()
        assert type(p.grad.view(-1).norm()) is ShareNorm
        for use in (
            lambda: torch.zeros(()) + norm,
            lambda: norm.data + 1,
            lambda: torch.hstack([norm, norm]),
        ):
            with pytest.raises(ValueError, match="as if it were that of the whole"):
                use()

    run(chain, ask)


WRITTEN_OUT: dict[str, Callable[[Tensor], object]] = {
    "pow": lambda gradient: gradient.pow(2).sum(),
    "**": lambda gradient: (gradient**2).sum().sqrt(),
    "product": lambda gradient: torch.sum(gradient * gradient),
    "square": lambda gradient: gradient.detach().float().square().mean(),
}


@pytest.mark.parametrize("way", WRITTEN_OUT)
def test_a_norm_that_is_written_out_is_refused(way: str) -> None:
    def ask(parallel: Parallel) -> None:
        p = parallel.get_parameter("layer.0.row.weight")
        assert p.grad is not None
        with pytest.raises(
            ValueError, match=r"of powers of this rank's share of the gradient of layer\.0\.row"
        ):
            WRITTEN_OUT[way](p.grad)
        # What optimizers make of them, and what is printed.
        square = p.grad.square()
        others = [square.sum(0), square.mean(dim=0), square.max(), square.clone(), square * 2, square + 1]
        for other in (*others, p.grad * 2, p.grad.sum(), p.grad.abs().max()):
            assert type(other) is Tensor
        assert type(p.grad * p.detach()) is Tensor

    run(Chain((2, 1, 1), "gpipe", 1, 1), ask)


READ: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda g: g[0],
    "rows": lambda g: g[1:2],
    "rows of all columns": lambda g: g[..., -1:, :],
    "numbers": lambda g: g[torch.tensor([0])],
    "a list of numbers": lambda g: g[[0, 1]],
    "narrowed": lambda g: g.narrow(0, 0, 1),
    "selected": lambda g: torch.index_select(g, dim=-2, index=torch.tensor([0])),
}
WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda g: g.__setitem__(0, 0.0),
    "rows": lambda g: g.__setitem__(slice(1), 0.0),
    "filled": lambda g: g.index_fill_(0, torch.tensor([0]), 0.0),
    "put": lambda g: g.index_put_((torch.tensor([0]),), torch.tensor(0.0, dtype=g.dtype)),
    "scattered": lambda g: g.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 0.0),
}


def column_gradient(parallel: Parallel) -> Tensor:
    """Of a weight whose rows the two tensor ranks divide."""
    gradient = parallel.get_parameter("layer.0.column.weight").grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("way", WRITTEN)
def test_elements_by_number_are_not_written_along_a_divided_dimension(way: str) -> None:
    """Another rank's elements have these numbers."""

    def ask(parallel: Parallel) -> str:
        gradient = column_gradient(parallel)
        before = gradient.as_subclass(Tensor).clone()
        with pytest.raises(
            ValueError, match=r"layer.0.column.weight: tensor ranks divide dimension 0"
        ) as said:
            WRITTEN[way](gradient)
        assert torch.equal(gradient.as_subclass(Tensor), before)
        return str(said.value)

    texts = run(Chain((2, 1, 1), "gpipe", 1, 1), ask)
    assert ["this rank has 0:6" in texts[0], "this rank has 6:12" in texts[1]] == [True, True]


@pytest.mark.parametrize("way", READ)
def test_elements_by_number_are_warned_of_along_a_divided_dimension(way: str) -> None:
    def ask(parallel: Parallel) -> None:
        gradient = column_gradient(parallel)
        assert torch.equal(READ[way](gradient), READ[way](gradient.as_subclass(Tensor)))

    with pytest.warns(UserWarning, match=r"by number of the gradient of layer.0.column.weight") as said:
        run(Chain((2, 1, 1), "gpipe", 1, 1), ask)
    assert {warning.filename for warning in said} == {__file__}


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "norms": lambda g: g.norm(dim=0),
    "of columns": lambda g: torch.linalg.vector_norm(g, 2, (0,), keepdim=True),
    "of both dimensions": lambda g: torch.norm(g, p=2, dim=(-1, -2)),
    "with its dimensions": lambda g: g.norm(keepdim=True),
}


@pytest.mark.parametrize("way", NORMS)
def test_a_norm_along_a_divided_dimension_is_warned_of(way: str) -> None:
    """It is of this rank's part, and some optimizers take it."""

    def ask(parallel: Parallel) -> None:
        gradient = column_gradient(parallel)
        norm = NORMS[way](gradient)
        assert type(norm) is Tensor
        assert torch.equal(norm, NORMS[way](gradient.as_subclass(Tensor)))

    with pytest.warns(UserWarning, match=r"norms of the gradient of layer.0.column.weight") as said:
        run(Chain((2, 1, 1), "gpipe", 1, 1), ask)
    assert {warning.filename for warning in said} == {__file__}


@pytest.mark.filterwarnings("error")
def test_what_is_done_along_another_dimension_is_done() -> None:
    """Or by a mask, or of all; and where nothing is divided, along every one."""

    def ask(parallel: Parallel) -> None:
        weight, bias = (parallel.get_parameter(f"layer.0.row.{name}").grad for name in ("weight", "bias"))
        assert weight is not None
        assert bias is not None
        plain = weight.as_subclass(Tensor).clone()
        for index in (0, (slice(1, None), slice(None)), (None, ..., slice(2, None), slice(None))):
            assert torch.equal(weight[index], plain[index])
        assert torch.equal(weight.narrow(0, 2, 3), plain[2:5])
        assert torch.equal(weight.norm(dim=0), plain.norm(dim=0))
        weight[weight > 0] = 0
        weight[:, torch.arange(6) > 2] = 1
        plain[plain > 0] = 0
        plain[:, 3:] = 1
        weight[:2], plain[:2] = 3, 3
        assert torch.equal(weight.as_subclass(Tensor), plain)
        assert torch.equal(bias[2:3], bias.as_subclass(Tensor)[2:3])
        for part in (slice(0, None), slice(6), ..., True, None, np.ones(6, dtype=bool), [True] * 6):
            assert torch.equal(weight[:, part], plain[:, part])
        assert weight.flatten()[::5].numel() == 10
        assert weight.view(2, 4, 6)[:, 0].shape == (2, 6)
        with pytest.raises(ValueError, match="dimension 1, and this rank has"):
            weight[:, 0] = 1

    run(Chain((2, 1, 1), "gpipe", 1, 1), ask)
    undivided = Chain((1, 2, 1), "gpipe", 1, 1)
    run(
        undivided,
        lambda parallel: [p.grad[:1].norm(dim=0) for p in parallel.parameters() if p.grad is not None],
    )


def test_shares_are_tensors_else() -> None:
    """Accumulated in place, scaled, copied, pickled, given to every form of an optimizer."""
    chain = Chain((2, 1, 1), "gpipe", 1, 1)

    def ask(parallel: Parallel) -> None:
        p = parallel.get_parameter("layer.0.row.weight")
        share = p.grad
        assert isinstance(share, GradientShare)
        once = share.clone()
        assert type(once) is Tensor
        assert type(copy.deepcopy(share)) is Tensor
        assert type(pickle.loads(pickle.dumps(share))) is Tensor
        assert type(share.norm(dim=0)) is Tensor
        assert type(torch.linalg.vector_norm(share, 2, 0)) is Tensor
        parallel(**chain.batch())["loss"].backward()
        assert p.grad is share
        torch.testing.assert_close(share.as_subclass(Tensor), 2 * once, rtol=1e-13, atol=0)
        after = []
        for form in FORMS:
            before = p.detach().clone()
            torch.optim.AdamW(parallel.parameters(), lr=0.1, **form).step()
            after.append(p.detach().clone())
            with torch.no_grad():
                p.copy_(before)
        torch.testing.assert_close(after[0], after[1], rtol=1e-12, atol=0)
        torch.testing.assert_close(after[0], after[2], rtol=1e-12, atol=0)
        parallel.zero_grad(set_to_none=False)
        assert not p.grad.count_nonzero()

    run(chain, ask)


def test_one_rank_and_replicas_keep_plain_gradients() -> None:
    for mesh in ((1, 1, 1), (1, 1, 2)):
        chain = Chain(mesh, "gpipe", 1, 1)
        kinds = run(chain, lambda parallel: {type(p.grad) for p in parallel.parameters()} - {type(None)})
        assert all(kind == {Tensor} for kind in kinds)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 1, 2)])
def test_torch_clips_what_a_sharded_optimizer_steps(mesh: tuple[int, int, int]) -> None:
    chain = Chain(mesh, "gpipe", 1, 2)

    def body(connection: Connection) -> tuple[list[Tensor], list[Tensor]]:
        parallel = chain.parallel(connection)
        used = [p for n, p in parallel.named_parameters() if not n.startswith("unused")]
        optimizer = parallel.shard_optimizer(torch.optim.SGD(used, lr=0.1))
        stepped = optimizer.param_groups[0]["params"]
        norms, scaled = [], []
        asked: list[Callable[[], Tensor]] = [
            lambda: clip_grad_norm_(parallel.parameters(), 0.01),
            lambda: clip_grad_norm_(parallel.parameters(), 0.01, foreach=True),
            lambda: clip_grad_norm_(stepped, 0.01),
            lambda: parallel.clip_grad_norm_(0.01),
        ]
        for ask in asked:
            parallel(**chain.batch())["loss"].backward()
            norms.append(ask())
            scaled.append(torch.cat([p.grad for p in stepped]).as_subclass(Tensor))
            with pytest.raises(ValueError, match="gradients on each; here it is of 1, not of "):
                clip_grad_norm_(used[:1], 1.0)
            parallel.zero_grad()
            assert all(p.grad is None for p in stepped)
        return norms, scaled

    for norms, scaled in run_threads(chain.manifest, body):
        assert norms[0] > 0.01
        assert all(map(torch.equal, norms, norms[1:]))
        assert all(map(torch.equal, scaled, scaled[1:]))
