"""Parameters that changed after bind, and optimizers that have others, are named."""

from __future__ import annotations

import gc
import pickle
import weakref
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoptd.runtime.comm.connection import Connection, connect, run_threads
from autoptd.runtime.guards import parameter_watch
from autoptd.runtime.guards.optimizer_watch import refuse_forgotten, watch_divided
from autoptd.runtime.guards.parameter_watch import ParameterWatch
from tests.counting import calls
from tests.ranks import run_ranks
from tests.runtime.chain import Chain
from tests.runtime.module.test_parallel import CPU, Plain, alone
from tests.steps import train_step

NAME = "layer.0.row.bias"


def test_changed_parameters_are_named() -> None:
    chain, parallel = alone()
    layer, row = parallel.get_submodule("layer.0"), parallel.get_submodule("layer.0.row")
    own = parallel.get_parameter(NAME)
    row.bias = nn.Parameter(own.detach().clone())
    with pytest.raises(ValueError, match=f"{NAME} was replaced after bind, .*parameter.copy_"):
        parallel(**chain.batch())
    del row.bias
    with pytest.raises(ValueError, match=f"{NAME} was removed after bind"):
        parallel(**chain.batch())
    row.bias = own
    parallel.adapter = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="parameter adapter was added after bind"):
        parallel(**chain.batch())
    del parallel.adapter
    parallel(**chain.batch())
    layer.row = nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"layer.0.row.\w+ was replaced after bind"):
        parallel(**chain.batch())
    layer.row = row
    layer.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"parameter layer.0.extra.bias was added after bind"):
        parallel(**chain.batch())
    del layer.extra
    parallel(**chain.batch())
    parallel.float()
    with pytest.raises(ValueError, match=r"is torch.float32\[.*\] on cpu, but was torch.float64"):
        parallel(**chain.batch())


def test_no_part_is_copied() -> None:
    _, parallel = alone()
    for duplicate in (copy, deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"bound to its process, and is neither copied nor pickled"):
            duplicate(parallel.get_submodule("layer.0"))


def test_buffers_are_read_as_they_are() -> None:
    """Also where a module of theirs was replaced, which has no parameters to watch."""
    module = nn.Module()
    module.rotary = nn.Module()
    module.rotary.register_buffer("frequencies", torch.zeros(2))
    module.register_buffer("scale", torch.zeros(1))
    watch = ParameterWatch(Chain((1, 1, 1), "gpipe", 1, 1).manifest, module, ())

    def read() -> dict[str, list[float]]:
        watch.check(module)
        return {name: buffer.tolist() for name, buffer in watch.buffers.items()}

    assert read() == {"rotary.frequencies": [0, 0], "scale": [0]}
    module.scale = torch.ones(1)
    module.rotary = nn.Module()
    module.rotary.register_buffer("frequencies", torch.ones(2))
    assert read() == {"rotary.frequencies": [1, 1], "scale": [1]}
    module.register_buffer("scale", None)
    assert read() == {"rotary.frequencies": [1, 1]}


def test_parameters_compiled_frozen_stay_frozen() -> None:
    chain = Chain((1, 1, 1), "gpipe", 1, 1)
    parameters = dict(chain.manifest.parameters)
    parameters[NAME] = replace(parameters[NAME], requires_grad=False)
    chain.manifest = replace(chain.manifest, parameters=parameters)
    parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
    parallel(**chain.batch())
    parallel.get_parameter(NAME).requires_grad_()
    with pytest.raises(ValueError, match=f"{NAME} was frozen when the program was compiled"):
        parallel(**chain.batch())


def test_an_optimizer_of_the_plain_model_is_refused() -> None:
    chain, parallel = alone()
    plain = Plain(chain)
    refuse_forgotten(parallel, plain.named_parameters())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    optimizer.step()  # before any backward, as some warm-ups do: harmless
    parallel(**chain.batch())["loss"].backward()
    with pytest.raises(
        ValueError,
        match=r"(?s)parameters of the model that was compiled \(.*\.\.\.\).*optimizer = AdamW\(parallel.parameters\(\)",
    ):
        optimizer.step()
    plain.gradients(chain.batch())  # who trains the plain model is not disturbed
    optimizer.step()
    plain.zero_grad()
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    del parallel
    optimizer.step()


def test_a_parallel_model_may_be_freed_during_a_step() -> None:
    """As the collector may at any time: torch goes through its hooks meanwhile, and bears the loss of none."""
    held: list[nn.Module] = []

    def free(*_: Any) -> None:
        held.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(free)
    held.append(alone()[1])
    refuse_forgotten(held[0], ())
    freed = weakref.ref(held[0])
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    handle.remove()
    assert freed() is None


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_an_optimizer_that_is_not_known_to_be_elementwise_is_refused(kind: Any) -> None:
    """Only of these parameters, and unless it steps them whole."""
    chain, parallel = alone()
    watch_divided(parallel, parallel._weights.marks)
    parallel(**chain.batch())["loss"].backward()
    optimizer = kind(parallel.parameters())
    before = [p.detach().clone() for p in parallel.parameters()]
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"{kind.__name__} is not known .*parallel\.whole_optimizer\({kind.__name__}, par"
        ):
            optimizer.step(lambda: 1.0)
    assert all(torch.equal(p, x) for p, x in zip(parallel.parameters(), before, strict=True))
    torch.optim.AdamW(parallel.parameters()).step()
    torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))]).step()
    parallel.whole_optimizer(torch.optim.Adafactor, parallel.parameters()).step()


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_an_optimizers_step_waits_for_no_weights(mesh: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every optimizer in the process is watched: those of other tensors, as of ours, walk no modules for it."""
    chain = Chain(mesh, "1f1b", 1, 2)
    walks: list[nn.Module] = []

    def walk(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walks.append(module)
        return named_modules(module, *args, **kwargs)

    def train(connection: Connection) -> None:
        parallel, other = chain.parallel(connection), nn.Parameter(torch.ones(2))
        bias = [p for name, p in parallel.named_parameters() if name[-8:] == "row.bias"]
        rest = [p for name, p in parallel.named_parameters() if name[-8:] != "row.bias"]
        sharded = parallel.shard_optimizer(torch.optim.AdamW(rest))
        optimizers = [sharded, torch.optim.SGD(bias, lr=0.1), torch.optim.SGD([other], lr=0.1)]
        parallel(**chain.batch())["loss"].backward()
        other.grad = torch.ones(2)
        before = walks.count(parallel)
        for optimizer in optimizers:
            optimizer.step()
            assert parallel._weights._gathering
        assert walks.count(parallel) == before

    named_modules = nn.Module.named_modules
    monkeypatch.setattr(nn.Module, "named_modules", walk)
    run_threads(chain.manifest, train)


def test_modules_in_a_mode_of_their_own_are_refused() -> None:
    chain, parallel = alone()
    parallel.get_submodule("layer.0.row").eval()
    with pytest.raises(ValueError, match=r"layer\.0\.row is in evaluation mode, and the parallel model is not"):
        parallel(**chain.batch())
    parallel.eval()
    parallel(**chain.batch())
    parallel.get_submodule("layer.0").train()
    with pytest.raises(ValueError, match=r"layer\.0 is in training mode"):
        parallel(**chain.batch())


@pytest.mark.parametrize(
    ("mesh", "name", "rank", "others"),
    [
        ((2, 1, 1), "layer.0.row.bias", 1, "0"),  # undivided: its copies would differ
        ((2, 1, 1), "layer.0.column.weight", 1, "0"),  # divided
        ((1, 1, 2), NAME, 0, "1"),
        ((1, 2, 1), "scale", 1, "0"),  # tied
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_shared_parameters_must_be_frozen_on_all_ranks(
    mesh: tuple[int, int, int], name: str, rank: int, others: str, late: bool
) -> None:
    """Each says so before messages of their steps would meet that do not fit; then they go on."""
    chain = Chain(mesh, "1f1b", 1, 2, tied=True)

    def body(rank_here: int) -> None:
        parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        batch = chain.batch(parallel.coordinates.data)
        if late:
            train_step(parallel, batch, optimizer)
        parallel.get_parameter(name).requires_grad_(rank_here != rank)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"{name} is frozen on rank {rank} and trained on rank {others}"):
                parallel(**batch)
        parallel.get_parameter(name).requires_grad_(False)
        before = parallel.get_parameter(name).clone()
        train_step(parallel, batch, optimizer)
        assert torch.equal(parallel.get_parameter(name), before)

    run_ranks(body, chain.manifest.mesh.size)


@pytest.mark.parametrize(("wary", "reductions"), [(100, [2, 1, 3, 2, 2, 2, 2, 2]), (1, [2, 1, 3, 2, 3, 2, 3, 2])])
def test_parameters_may_be_frozen_and_unfrozen_between_steps(
    wary: int, reductions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one pipeline rank too; it costs a reduction in the first step, and in some once it has changed after that."""
    monkeypatch.setattr(parameter_watch, "WARY", wary)
    chain = Chain((1, 2, 1), "1f1b", 1, 2, tied=True)
    _, expected = chain.plain(chain.weights(), chain.batch())
    steps: list[set[str]] = [set(), set(), {"scale"}, {"scale", NAME}, {NAME}, set(expected), set(), set()]

    def body(connection: Connection) -> list[int]:
        parallel, counts = chain.parallel(connection), []
        for frozen in steps:
            before = calls(connection.world)["all_reduce"]
            parallel.zero_grad()
            for name, parameter in parallel.named_parameters():
                parameter.requires_grad_(name not in frozen)
            parallel(**chain.batch())["loss"].backward()
            found = {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}
            assert found.keys() == parallel.state_dict().keys() & expected.keys() - frozen
            assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())
            with torch.no_grad():
                parallel(**chain.batch())
            counts.append(calls(connection.world)["all_reduce"] - before - 1)
        return counts

    assert run_threads(chain.manifest, body) == [reductions] * 2


def test_a_step_that_is_made_again_is_one_step() -> None:
    """Of dropout's counter and of the loss scale's, which would grow sooner than on one rank."""
    chain = Chain((1, 2, 1), "1f1b", 1, 2, tied=True)
    chain.manifest = replace(chain.manifest, scales_loss=True)

    def body(connection: Connection) -> tuple[int, int, int]:
        parallel, again = chain.parallel(connection), 0
        for frozen in (False, False, True):
            for name, parameter in parallel.named_parameters():
                parameter.requires_grad_(not (frozen and name == "scale"))
            before = calls(connection.rank.group("pipeline"))["broadcast"]  # of the loss, once each time
            parallel(**chain.batch())["loss"].backward()
            again += calls(connection.rank.group("pipeline"))["broadcast"] - before - 1
        assert parallel._runner.loss_scale is not None
        return parallel._runner.loss_scale.finite_steps, connection.rank.randomness.call, again

    assert run_threads(chain.manifest, body) == [(3, 3, 1)] * 2


def test_shards_are_of_what_all_ranks_train() -> None:
    """What is frozen on one rank while the optimizer is sharded, and not later, would be summed otherwise there."""
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.AdamW(parallel.parameters())
        train_step(parallel, chain.batch(connection.world.index), optimizer)
        parallel.get_parameter(NAME).requires_grad_(connection.world.index == 0)
        with pytest.raises(
            ValueError, match=rf"{NAME} would be stepped whole, on rank 1, and in bucket 0, .* on rank 0; ranks \[1\]"
        ):
            parallel.shard_optimizer(optimizer)
        parallel.get_parameter(NAME).requires_grad_(True)
        train_step(parallel, chain.batch(connection.world.index), parallel.shard_optimizer(optimizer))

    run_threads(chain.manifest, body)
