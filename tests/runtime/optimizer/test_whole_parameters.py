"""Optimizers that look at more than an element step as they do on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoptd.runtime.comm.connection import Connection, connect, run_threads
from autoptd.runtime.module.parallel import Parallel
from tests.checkpoints import CONFIGS, SEQUENCES, bind_thread, compile_config, train_steps
from tests.generated_models import make_batch, make_model
from tests.parity import split_batch
from tests.ranks import run_ranks
from tests.runtime.chain import Chain
from tests.runtime.module.test_parallel import Plain

STEPS = 3
Make = Callable[..., Optimizer]


class PerTensor(Optimizer):
    """An optimizer as people write them: a loop over parameters, each with its own state."""

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], decay: float) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)  # as some do: the decay is of these too
                p.sub_(group["lr"] * self.update(p, p.grad, self.state[p], group["weight_decay"]))
        return loss


class Muon(PerTensor):
    """Momentum whose singular values are brought near 1 by Newton's and Schulz's iteration."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], decay: float) -> Tensor:
        momentum: Tensor = state.setdefault("momentum", torch.zeros_like(gradient)).mul_(0.9).add_(gradient)
        x: Tensor = momentum / momentum.norm()
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x * math.sqrt(max(1, p.shape[0] / p.shape[1])) + decay * p


class Shampoo(PerTensor):
    """The gradient between inverse roots of its second moments along each dimension."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], decay: float) -> Tensor:
        for dim in range(gradient.dim()):
            rows = gradient.movedim(dim, 0).flatten(1) if gradient.dim() > 1 else gradient.unsqueeze(1)
            factor = state.setdefault(f"factor_{dim}", torch.eye(len(rows), dtype=p.dtype)).add_(rows @ rows.T)
            values, vectors = torch.linalg.eigh(factor)
            root = vectors * values ** (-0.5 / gradient.dim()) @ vectors.T
            gradient = torch.tensordot(root, gradient, ([1], [dim])).movedim(0, dim)
        return gradient + decay * p


class Lamb(PerTensor):
    """Adam's step, as long as its parameter."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], decay: float) -> Tensor:
        mean: Tensor = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(gradient, 0.1)
        square: Tensor = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(gradient**2, 0.01)
        step: Tensor = mean / (square.sqrt() + 1e-3) + decay * p
        length: Tensor = p.norm() / step.norm()
        return step * length


MAKES: dict[str, Make] = {
    "torch's Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
    "Muon": Muon,
    "Shampoo": Shampoo,
    "LAMB": Lamb,
}


def make_optimizers(model: nn.Module, make: Make, whole: Callable[..., Optimizer]) -> list[Optimizer]:
    """`make` in groups, and AdamW for what is no matrix where `make` takes only these."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if p.dim() == 2 and word in n], "weight_decay": decay}
        for word, decay in (("row", 0.0), ("column", 0.1))
    ]
    others = [p for p in named.values() if p.dim() != 2]
    if make not in (Muon, torch.optim.Muon):
        return [whole(make, [*groups, {"params": others}], lr=0.02)]
    return [whole(make, groups, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


def make_plain(make: Make, *args: Any, **options: Any) -> Optimizer:
    return make(*args, **options)


def train(model: nn.Module, optimizers: Iterable[Optimizer], backward: Callable[[int], object]) -> None:
    """Steps of two calls each, with a schedule and clipping."""
    schedules = [torch.optim.lr_scheduler.ExponentialLR(own, 0.5) for own in optimizers]
    for step in range(STEPS):
        for call in range(2):
            backward(2 * step + call)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for own, schedule in zip(optimizers, schedules, strict=True):
            own.step()
            schedule.step()
            own.zero_grad()


def plain_backward(plain: Plain, chain: Chain, call: int) -> None:
    """The gradients of all replicas' batches of a call."""
    replicas = chain.mesh.data
    for at in range(replicas):
        plain.gradients(chain.batch(replicas * call + at), 1 / replicas)


def backward(parallel: Parallel, chain: Chain, connection: Connection, call: int) -> Tensor:
    batch = chain.batch(chain.mesh.data * call + connection.rank.coordinates.data)
    loss: Tensor = parallel(**batch)["loss"]
    loss.backward()
    return loss.detach()


def assert_near(found: Mapping[str, Tensor], expected: nn.Module) -> None:
    for name, whole in expected.state_dict().items():
        torch.testing.assert_close(found[name], whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(
    "mesh",
    [(2, 2, 2), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in [(1, 2, 2), (2, 1, 3), (2, 4, 1)])],
    ids=str,
)
def test_the_weights_are_the_plain_models(mesh: tuple[int, int, int], name: str) -> None:
    chain = Chain(mesh, "interleaved_1f1b" if mesh[1] > 1 else "gpipe", 2, 4, tied=True)

    def run(connection: Connection) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        optimizers = make_optimizers(parallel, MAKES[name], parallel.whole_optimizer)
        train(parallel, optimizers, partial(backward, parallel, chain, connection))
        backward(parallel, chain, connection, 0)  # compares copies and steps over the ranks
        return parallel.full_state_dict()

    plain = Plain(chain)
    train(plain, make_optimizers(plain, MAKES[name], make_plain), partial(plain_backward, plain, chain))
    assert_near(run_threads(chain.manifest, run)[0], plain)


@pytest.mark.parametrize("name", MAKES)
def test_a_checkpoint_moves_between_meshes(name: str, tmp_path: Path) -> None:
    """States of any shape go with the parameter; a class that is made plainly loads them where nothing is divided."""
    chains = [
        Chain((2, 2, 2), "1f1b", 1, 2, tied=True),
        Chain((2, 1, 2), "gpipe", 2, 2, tied=True),
        Chain((1, 1, 1), "gpipe", 2, 2, tied=True),
    ]
    plain = Plain(chains[0])
    expected = MAKES[name]([p for p in plain.parameters() if p.dim() == 2], lr=0.02)

    def run(chain: Chain, number: int, connection: Connection) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        make = make_plain if chain.mesh.size == 1 else parallel.whole_optimizer
        optimizer = make(MAKES[name], [p for p in parallel.parameters() if p.dim() == 2], lr=0.02)
        if number:
            parallel.load_checkpoint(tmp_path, optimizer)
        backward(parallel, chain, connection, number)
        optimizer.step()
        if chain.mesh.size > 1:
            parallel.save_checkpoint(tmp_path, optimizer)
        return parallel.full_state_dict()

    for number, chain in enumerate(chains):
        plain_backward(plain, chain, number)
        expected.step()
        expected.zero_grad()
        assert_near(run_threads(chain.manifest, partial(run, chain, number))[0], plain)


def test_the_checkpoint_of_another_optimizer_has_its_own_states(tmp_path: Path) -> None:
    """One of whole parameters was made, and is not used."""
    chain = Chain((2, 1, 1), "gpipe", 2, 2)

    def list_states(parallel: Parallel, optimizer: Optimizer) -> dict[str, Tensor]:
        known = (item for item in parallel.named_parameters() if item[1] in optimizer.state)
        return {name: optimizer.state[p]["exp_avg"].clone() for name, p in known}

    def save(connection: Connection) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        parallel.whole_optimizer(Lamb, parallel.parameters(), lr=0.01)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
        backward(parallel, chain, connection, 0)
        optimizer.step()
        parallel.save_checkpoint(tmp_path, optimizer)
        return list_states(parallel, optimizer)

    def load(connection: Connection) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
        parallel.load_checkpoint(tmp_path, optimizer)
        return list_states(parallel, optimizer)

    saved, loaded = (run_threads(chain.manifest, run) for run in (save, load))
    for before, after in zip(saved, loaded, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def step_once(chain: Chain, make: Callable[[nn.Module, Callable[..., Optimizer]], Callable[[Any], object]]) -> None:
    """Two steps of what ``make(model, whole_optimizer)`` gives, with a closure, as on one device."""

    def run(connection: Connection) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        step = make(parallel, parallel.whole_optimizer)
        with pytest.raises(FloatingPointError):
            step(fail)
        for call in range(2):
            loss = step(lambda call=call: backward(parallel, chain, connection, call))
            assert isinstance(loss, Tensor)
            parallel.zero_grad()
        backward(parallel, chain, connection, 0)
        return parallel.full_state_dict()

    plain = Plain(chain)
    step = make(plain, make_plain)
    for call in range(2):
        plain_backward(plain, chain, call)
        step(None)
        plain.zero_grad()
    assert_near(run_threads(chain.manifest, run)[0], plain)


def fail() -> None:
    raise FloatingPointError


def list_matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


class Keeping(Lamb):
    """States that are made with the optimizer, which keeps views of its parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.flat = {}
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.ones_like(p),
                "first": p.detach().clone(),
            }
            self.flat[p] = p.detach().view(-1)

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], decay: float) -> Tensor:
        self.flat[p].mul_(0.9).add_(state["first"].view(-1), alpha=0.1)
        return super().update(p, gradient, state, decay)


class Twice(Muon):
    """A step that calls its class's own, which has hooks too."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                p.mul_(1 - 0.1 / p.norm())
        return loss


class Both(Optimizer):
    """Two optimizers in one."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        self.inner = [Shampoo(params[::2], lr), torch.optim.Adafactor(params[1::2], lr)]
        super().__init__([{"params": params}], {"lr": lr})
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for inner in self.inner:
            inner.step()
        return loss


@pytest.mark.parametrize("kind", [Keeping, Twice, Both])
def test_however_it_is_written(kind: Make) -> None:
    Muon([nn.Parameter(torch.ones(2, 2))])  # so that torch's hooks are in its step
    chain = Chain((2, 1, 2), "1f1b", 1, 2)
    step_once(chain, lambda model, whole: whole(kind, list_matrices(model), lr=0.02).step)


def test_half_precision_steps_its_float32_weights() -> None:
    chain = Chain((2, 1, 2), "1f1b", 1, 2, dtype=torch.bfloat16)
    alone = Chain((1, 1, 1), "gpipe", 1, 2, dtype=torch.bfloat16)

    def run(chain: Chain, connection: Connection) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        optimizer = parallel.whole_optimizer(Muon, list_matrices(parallel), lr=1e-4)
        parallel(**chain.batch())["loss"].backward()
        with torch.no_grad():
            for p in parallel.parameters():
                p.grad = p / 3  # the same on both meshes
        for _ in range(3):  # each is less than bfloat16 holds
            optimizer.step()
        return {n: gather_slices(parallel, n, p) for n, p in parallel.named_parameters()}

    found, expected = (run_threads(c.manifest, partial(run, c))[0] for c in (chain, alone))
    for name, whole in expected.items():
        torch.testing.assert_close(found[name], whole, rtol=1e-6, atol=1e-6)


def gather_slices(parallel: Parallel, name: str, own: Tensor) -> Tensor:
    tensor = parallel._connection.rank.group("tensor")
    return parallel._manifest.parameters[name].placement["tensor"].join(tensor.all_gather(own))


def test_each_matrix_is_stepped_by_one_rank() -> None:
    """The ranks share them by size, and only one has a matrix's states."""
    chain = Chain((2, 1, 2), "gpipe", 4, 2)

    def run(connection: Connection) -> set[str]:
        parallel = chain.parallel(connection)
        optimizer = parallel.whole_optimizer(Muon, list_matrices(parallel), lr=0.02)
        backward(parallel, chain, connection, 0)
        optimizer.step()
        assert [list(p.shape) for p in optimizer.param_groups[0]["params"][:2]] == [[6, 8], [8, 6]]
        names = {id(p): name for name, p in parallel.named_parameters()}
        assert {tuple(state["momentum"].shape) for state in optimizer.state.values()} <= {(12, 8), (8, 12)}
        return {names[id(p)] for p in optimizer.state}

    found = run_threads(chain.manifest, run)
    assert [len(names) for names in found] == [2, 2, 2, 2]
    assert len(set().union(*found)) == 8


def test_in_processes_beside_a_sharded_optimizer(tmp_path: Path) -> None:
    chain = Chain((2, 1, 2), "1f1b", 1, 2)

    def run(rank: int) -> dict[str, Tensor]:
        connection = connect(chain.manifest, torch.device("cpu"), "text")
        parallel = chain.parallel(connection)
        whole, others = make_optimizers(parallel, Muon, parallel.whole_optimizer)
        train(parallel, [whole, parallel.shard_optimizer(others)], partial(backward, parallel, chain, connection))
        with pytest.raises(ValueError, match="bias is stepped by the sharded optimizer: leave it out of this one"):
            parallel.whole_optimizer(Lamb, parallel.parameters())
        parallel.save_checkpoint(tmp_path, others)  # which the refusal leaves as it was
        return parallel.full_state_dict()

    plain = Plain(chain)
    train(plain, make_optimizers(plain, Muon, make_plain), partial(plain_backward, plain, chain))
    assert_near(run_ranks(run, chain.mesh.size)[0], plain)


def test_what_cannot_be_stepped_apart_is_refused() -> None:
    chain = Chain((2, 1, 2), "1f1b", 1, 2)

    def refuse(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        before = {name: (p.data_ptr(), p.shape) for name, p in parallel.named_parameters()}
        with pytest.raises(ValueError, match="LBFGS looks for a direction of all parameters together"):
            parallel.whole_optimizer(torch.optim.LBFGS, parallel.parameters())
        with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
            parallel.whole_optimizer(torch.optim.Muon, parallel.parameters())
        assert before == {name: (p.data_ptr(), p.shape) for name, p in parallel.named_parameters()}
        backward(parallel, chain, connection, 0)

    run_threads(chain.manifest, refuse)


@pytest.mark.parametrize(("mesh", "other"), [((2, 1, 2), [2, 3, 0, 1]), ((1, 1, 2), [1, 0])], ids=str)
def test_another_replicas_state_is_refused(mesh: tuple[int, int, int], other: list[int]) -> None:
    """It steps other parameters."""
    chain = Chain(mesh, "1f1b", 1, 2)

    def make(connection: Connection) -> tuple[Parallel, Optimizer]:
        parallel = chain.parallel(connection)
        return parallel, parallel.whole_optimizer(Muon, list_matrices(parallel), lr=0.02)

    def save(connection: Connection) -> Any:
        parallel, optimizer = make(connection)
        backward(parallel, chain, connection, 0)
        optimizer.step()
        return optimizer.state_dict()

    states = run_threads(chain.manifest, save)

    def load(order: list[int], connection: Connection) -> str:
        parallel, optimizer = make(connection)
        optimizer.load_state_dict(states[order[connection.world.index]])
        backward(parallel, chain, connection, 0)
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return ""

    assert set(run_threads(chain.manifest, partial(load, sorted(other)))) == {""}
    said = run_threads(chain.manifest, partial(load, other))
    assert any("was saved for nothing of layer.0" in each for each in said)
    assert any("was saved for all of layer.0" in each for each in said)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_gpt_of_packed_padded_and_tied_tables(kind: str) -> None:
    config, program = CONFIGS[kind], compile_config(kind, (2, 2, 2))
    batches = [make_batch(config, SEQUENCES, seed) for seed in range(STEPS)]

    def run(connection: Connection) -> dict[str, Tensor]:
        parallel = bind_thread(program, connection)
        optimizer = parallel.whole_optimizer(Lamb, parallel.parameters())
        train_steps(parallel, optimizer, batches, connection.rank.coordinates.data)
        return parallel.full_state_dict()

    plain = make_model(config)
    optimizer = Lamb(plain.parameters())
    for batch in batches:
        for part in split_batch(batch, SEQUENCES):
            (plain(**part) / SEQUENCES).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_near(run_threads(program.manifest, run)[0], plain)


class Sharp(PerTensor):
    """Moves its weights, and asks for the loss there, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(0.1)
        return closure()


def test_a_closure_at_other_weights_is_refused() -> None:
    chain = Chain((2, 1, 1), "gpipe", 1, 2)

    def run(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.whole_optimizer(Sharp, list_matrices(parallel))
        with pytest.raises(ValueError, match="evaluates its closure at weights that it has changed"):
            optimizer.step(lambda: backward(parallel, chain, connection, 0))
        with pytest.raises(ValueError, match="step of whole parameters broke off"):
            backward(parallel, chain, connection, 0)

    run_threads(chain.manifest, run)
