"""A sharded optimizer steps as the whole one does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import autoptd
from autoptd.runtime.comm.connection import Connection, connect, run_threads
from autoptd.runtime.comm.groups import Group, Posted, ProcessGroup
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.optimizer import gradient_buckets
from autoptd.runtime.optimizer.zero1 import SINGLE, FlatShard, is_shaped, join_states
from tests.checkpoints import bind_thread
from tests.ranks import run_ranks
from tests.runtime.chain import Chain
from tests.runtime.module.test_parallel import alone
from tests.steps import train_step

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


def train(
    chain: Chain,
    connection: Connection,
    make: MakeOptimizer,
    shard_at: int | None,
    steps: int = 4,
    max_norm: float | None = None,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The parameters after `steps` steps, the optimizer sharded before number `shard_at`, and the norms."""
    parallel = chain.parallel(connection)
    optimizer = make(list(parallel.parameters()))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms = []
    for step in range(steps):
        if step == shard_at:
            assert parallel.shard_optimizer(optimizer) is optimizer
        batch = chain.batch(connection.rank.coordinates.data + 10 * step)
        for scale in (0.5, 2.0):  # two calls a step
            (parallel(**batch)["loss"] * scale).backward()
        if max_norm is not None:
            norms.append(parallel.clip_grad_norm_(max_norm))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in parallel.named_parameters()}, norms


def compare(chain: Chain, make: MakeOptimizer, shard_at: int, **options: Any) -> None:
    whole = run_threads(chain.manifest, lambda connection: train(chain, connection, make, None, **options))
    parts = run_threads(chain.manifest, lambda connection: train(chain, connection, make, shard_at, **options))
    for (expected, _), (found, _) in zip(whole, parts, strict=True):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight.to(found[name].dtype)), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_is_bitwise_the_whole_one(name: str) -> None:
    compare(Chain((1, 2, 2), "interleaved_1f1b", 2, 4, tied=True), OPTIMIZERS[name], 0)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 3), (2, 2, 2)], ids=str)
def test_on_every_mesh(mesh: tuple[int, int, int]) -> None:
    compare(Chain(mesh, "1f1b", 1, 2), OPTIMIZERS["AdamW"], 0)


def test_states_move_with_the_parameters() -> None:
    compare(Chain((1, 1, 2), "1f1b", 1, 2), OPTIMIZERS["AdamW"], 2)


def test_small_buckets_and_groups_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 800)

    def in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        biases = [p for p in parameters if p.dim() == 1]
        others = [p for p in parameters if p.dim() > 1]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}]
        return torch.optim.AdamW(groups, lr=1e-2)

    compare(Chain((2, 2, 2), "interleaved_1f1b", 2, 4, tied=True), in_groups, 0)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_is_that_of_the_whole_gradient(norm_type: float) -> None:
    chain = Chain((2, 2, 2), "1f1b", 1, 2, tied=True)

    def norm(connection: Connection, shard: bool) -> Tensor:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        if shard:
            parallel.shard_optimizer(optimizer)
        parallel(**chain.batch(connection.rank.coordinates.data))["loss"].backward()
        before = parallel.clip_grad_norm_(0.01, norm_type)
        after = parallel.clip_grad_norm_(1.0, norm_type)
        torch.testing.assert_close(after, torch.tensor(0.01, dtype=after.dtype), rtol=1e-3, atol=0)
        return before

    whole = run_threads(chain.manifest, lambda connection: norm(connection, False))
    parts = run_threads(chain.manifest, lambda connection: norm(connection, True))
    for found, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torchs_norm_of_half_precision_is_not_rounded(dtype: torch.dtype) -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2, dtype=dtype)

    def norms(connection: Connection) -> tuple[Tensor, Tensor]:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        parallel(**chain.batch(connection.rank.coordinates.data))["loss"].backward()
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(1e7)
        return nn.utils.clip_grad_norm_(parallel.parameters(), 1e30), parallel.clip_grad_norm_(1e30)

    for found, expected in run_threads(chain.manifest, norms):
        assert expected > torch.finfo(torch.float16).max
        assert found.dtype is torch.float32
        assert torch.equal(found, expected)


def test_half_precision_steps_in_float32_and_computes_in_its_own() -> None:
    chain = Chain((1, 2, 2), "1f1b", 1, 2, dtype=torch.bfloat16)
    compare(chain, OPTIMIZERS["AdamW"], 0)

    def look(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        assert {p.dtype for p in parallel.parameters()} == {torch.float32}
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
        parallel.shard_optimizer(optimizer)
        # Now the float32 weights are those of the shards, divided among the replicas.
        used = [p for name, p in parallel.named_parameters() if name != "unused.weight"]
        assert {p.dtype for p in used} == {torch.bfloat16}
        (group,) = optimizer.param_groups
        owned = [p for p in group["params"] if p.dim() == 1 and p.shape != (3,)]
        assert {p.dtype for p in owned} == {torch.float32}
        elements = sum(p.numel() for p in used)
        assert elements <= 2 * sum(p.numel() for p in owned) < elements + 2 * len(owned)

    run_threads(chain.manifest, look)


def test_optimizers_that_cannot_be_sharded_are_refused() -> None:
    chain = Chain((1, 1, 1), "1f1b", 1, 2)

    def refuse(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        own = list(parallel.parameters())
        with pytest.raises(ValueError, match="LBFGS is not known to step each element by itself"):
            parallel.shard_optimizer(torch.optim.LBFGS(own))
        foreign = torch.optim.SGD([*own, nn.Parameter(torch.zeros(3))], lr=0.1)
        with pytest.raises(ValueError, match=r"parameter \d+ of the optimizer's group 0, \[3\], is not one of"):
            parallel.shard_optimizer(foreign)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(own, lr=0.1))
        with pytest.raises(ValueError, match="sharded already"):
            parallel.shard_optimizer(optimizer)

    run_threads(chain.manifest, refuse)


def test_steps_of_one_shard_must_agree() -> None:
    shard = FlatShard({"first": torch.zeros(2), "second": torch.zeros(3)}, torch.float32, Group())
    states = {name: {"step": torch.tensor(float(i))} for i, name in enumerate(shard.names)}
    with pytest.raises(ValueError, match="the optimizer's step differs among first, second"):
        join_states(shard, states)
    with pytest.raises(ValueError, match="second has no optimizer state, but first has"):
        join_states(shard, {"first": states["first"]})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_that_are_one_number_are_known(name: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS[name]([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert {key for key, x in optimizer.state[parameter].items() if not is_shaped(x)} <= set(SINGLE)
    assert not {key for key, x in optimizer.state[parameter].items() if is_shaped(x)} & set(SINGLE)


@pytest.mark.parametrize("late", [False, True])
def test_processes_step_bitwise_as_the_whole_optimizer(late: bool) -> None:
    """Over gloo; with `late` nothing of a gather has happened before something waits for it."""
    chain = Chain((1, 2, 2), "interleaved_1f1b", 2, 4, tied=True)

    def body(rank: int, shard_at: int | None) -> dict[str, Tensor]:
        if late:
            gather = ProcessGroup.post_all_gather

            def gather_late(group: ProcessGroup, x: Tensor, into: Tensor) -> Posted[Tensor]:
                return Posted(lambda: gather(group, x, into).wait())

            setattr(ProcessGroup, "post_all_gather", gather_late)  # noqa: B010  # in this forked process only
        connection = connect(chain.manifest, torch.device("cpu"), "same")
        return train(chain, connection, OPTIMIZERS["AdamW"], shard_at)[0]

    for found, expected in zip(run_ranks(body, 4, 0), run_ranks(body, 4, None), strict=True):
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_the_models_own_zero_grad_clears_what_the_optimizer_steps() -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def norms(connection: Connection, set_to_none: bool) -> list[float]:
        parallel = chain.parallel(connection)
        parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        found = []
        for _ in range(2):
            parallel(**chain.batch())["loss"].backward()
            found.append(parallel.clip_grad_norm_(1e9).item())
            parallel.zero_grad(set_to_none)
        return found

    for set_to_none in (True, False):
        for first, second in run_threads(chain.manifest, partial(norms, set_to_none=set_to_none)):
            assert first == second


def clear_one_by_one(parallel: Parallel) -> None:
    for parameter in parallel.parameters():
        parameter.grad = None


def clear_by_wrapper(parallel: Parallel) -> None:
    nn.ModuleList([parallel]).zero_grad()


@pytest.mark.parametrize("clear", [clear_one_by_one, clear_by_wrapper])
def test_gradients_cleared_on_the_parameters_are_cleared_in_the_shard(clear: Callable[[Parallel], None]) -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def run(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        norms = []
        for _ in range(2):
            parallel(**chain.batch())["loss"].backward()
            norms.append(parallel.clip_grad_norm_(1e9).item())
            clear(parallel)
        assert norms[1] == norms[0]
        clear_one_by_one(parallel)
        before = {name: p.detach().clone() for name, p in parallel.named_parameters()}
        optimizer.step()
        assert all(torch.equal(p, before[name]) for name, p in parallel.named_parameters())

    run_threads(chain.manifest, run)


def test_clearing_some_gradients_of_a_shard_is_refused() -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def run(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        next(parallel.parameters()).grad = None
        with pytest.raises(ValueError, match=r"was cleared, but not of all"):
            optimizer.step()
        with pytest.raises(ValueError, match=r"was cleared, but not of all"):
            parallel(**chain.batch())["loss"].backward()

    run_threads(chain.manifest, run)


def test_zeroed_gradients_are_zero_though_they_were_not_finite() -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def run(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in stepped if p.grad is not None]
        assert gradients
        for gradient in gradients:
            gradient.fill_(float("nan"))
        parallel.zero_grad(set_to_none=False)
        assert not any(gradient.any() for gradient in gradients)

    run_threads(chain.manifest, run)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sharded_steps_begin_at_values_written_into_parameters(dtype: torch.dtype) -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2, dtype=dtype)

    def write(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.AdamW(parallel.parameters(), lr=1e-3))
        for lr in (1e-3, 0.0):
            optimizer.param_groups[0]["lr"] = lr
            parallel(**chain.batch())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        masters = [shard.own.detach().clone() for shard in parallel._weights.shards]
        written = dict(parallel.named_parameters())["layer.0.row.bias"]
        with torch.no_grad():
            written.fill_(7.0)
        parallel(**chain.batch())["loss"].backward()
        optimizer.step()
        assert (dict(parallel.named_parameters())["layer.0.row.bias"] == 7).all()
        # What was not written keeps the float32 that it was stepped in.
        for shard, before in zip(parallel._weights.shards, masters, strict=True):
            assert ((shard.own == before) | (shard.own == 7)).all()
        parallel.load_state_dict(parallel.state_dict())
        for shard, before in zip(parallel._weights.shards, masters, strict=True):
            assert ((shard.own == before) | (shard.own == 7)).all()

    run_threads(chain.manifest, write)


def train_around(chain: Chain, shard: bool, around: Callable[[Parallel, str], None]) -> list[dict[str, Tensor]]:
    """The parameters after steps with something done "before" the call, "between" backward and step, and "after"."""

    def run(connection: Connection) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        optimizer = parallel.shard_optimizer(optimizer) if shard else optimizer
        for step in range(3):
            around(parallel, "before")
            parallel(**chain.batch(connection.rank.coordinates.data + 10 * step))["loss"].backward()
            around(parallel, "between")
            optimizer.step()
            around(parallel, "after")
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in parallel.named_parameters()}

    return run_threads(chain.manifest, run)


def swap_average(parallel: Parallel, when: str) -> None:
    """An average of the weights is put in their place by ``p.data = ...``, evaluated, and taken out again."""
    if when != "after":
        return
    batch = Chain((1, 2, 2), "1f1b", 1, 2).batch(parallel.coordinates.data)
    kept = {name: p.data for name, p in parallel.named_parameters()}
    for p in parallel.parameters():
        p.data = p.data * 0.5
    with torch.no_grad():
        parallel(**batch)
    for name, p in parallel.named_parameters():
        p.data = kept[name]


def write_row(parallel: Parallel, when: str) -> None:
    """One element, past all versions."""
    if when == "before" and "layer.0.row.weight" in parallel._weights.watch.parameters:
        parallel.get_parameter("layer.0.row.weight").data[1, 3] = 0.25


def write_through_modules(parallel: Parallel, when: str) -> None:
    if when == "after":
        for module in list(parallel.modules())[1:]:
            for name in module._parameters:
                with torch.no_grad():
                    getattr(module, name).mul_(0.9)


@pytest.mark.parametrize("around", [swap_average, write_row, write_through_modules])
def test_changes_around_sharded_steps_count(around: Callable[[Parallel, str], None]) -> None:
    chain = Chain((1, 2, 2), "1f1b", 1, 2)
    whole, parts = (train_around(chain, shard, around) for shard in (False, True))
    for found, expected in zip(parts, whole, strict=True):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=0)


def test_a_write_while_new_weights_come_is_refused() -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def write(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        kept = list(parallel.parameters())
        optimizer = parallel.shard_optimizer(torch.optim.AdamW(parallel.parameters(), lr=1e-2))
        parallel(**chain.batch(connection.rank.coordinates.data))["loss"].backward()
        optimizer.step()
        with torch.no_grad():
            kept[0].clamp_(-0.1, 0.1)
        with pytest.raises(ValueError, match=r"written right after a sharded optimizer's step.* take it again"):
            parallel(**chain.batch(connection.rank.coordinates.data))

    run_threads(chain.manifest, write)


def test_a_write_into_what_the_optimizer_has_counts_before_its_step_and_is_refused_else() -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def write(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.0))
        before = {name: p.detach().clone() for name, p in parallel.named_parameters()}
        used = {name for shard in parallel._weights.shards for name in shard.names}
        batch = chain.batch(connection.rank.coordinates.data)
        parallel(**batch)["loss"].backward()
        with torch.no_grad():
            for shard in parallel._weights.shards:
                shard.own.mul_(0.5)
        optimizer.step()
        for name, p in parallel.named_parameters():
            assert torch.equal(p, before[name] * 0.5 if name in used else before[name])
        with torch.no_grad():
            parallel._weights.shards[0].own.mul_(0.5)
        with pytest.raises(ValueError, match="was written outside of its step, where no stage sees it"):
            parallel(**batch)

    run_threads(chain.manifest, write)


@pytest.mark.parametrize("form", ["another loss", "assigned"])
def test_a_gradient_that_is_not_the_calls_is_refused(form: str) -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def add(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        loss = parallel(**chain.batch(connection.rank.coordinates.data))["loss"]
        if form == "another loss":
            with pytest.raises(ValueError, match=r"got a gradient of another loss than the call"):
                (loss + 0.1 * parallel.get_parameter("layer.0.row.bias").square().sum()).backward()
            return
        loss.backward()
        p = parallel.get_parameter("layer.0.row.bias")
        p.grad = torch.zeros_like(p)
        with pytest.raises(ValueError, match=r"gradient of layer.0.row.bias was replaced .* change it there"):
            optimizer.step()

    run_threads(chain.manifest, add)


def test_gradients_that_autograd_is_asked_for_are_those_of_the_parts() -> None:
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def ask(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        frozen = parallel.get_parameter("layer.0.row.bias").requires_grad_(False)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        frozen.requires_grad_()
        batch = chain.batch(connection.rank.coordinates.data)
        (part,) = (shard.own for shard in parallel._weights.shards)
        sharded = parallel.get_parameter("layer.0.row.weight")
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(parallel(**batch)["loss"], [frozen, sharded])
        found = torch.autograd.grad(parallel(**batch)["loss"], [part, frozen])
        assert part.grad is frozen.grad is None
        parallel(**batch)["loss"].backward()
        for parameter, gradient in zip((part, frozen), found, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)
        optimizer.step()

    run_threads(chain.manifest, ask)


def test_gradients_that_autograd_was_asked_for_are_stepped_by() -> None:
    """The parameters have none then, which does not clear what the caller gave the parts."""
    chain = Chain((1, 1, 2))

    def step(connection: Connection, ask: bool) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(OPTIMIZERS["SGD"](list(parallel.parameters())))
        loss = parallel(**chain.batch(connection.rank.coordinates.data))["loss"]
        if ask:
            parts = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            given = torch.autograd.grad(loss, parts, allow_unused=True)
            for part, gradient in zip(parts, given, strict=True):
                part.grad = gradient
        else:
            loss.backward()
        optimizer.step()
        return {name: p.detach().clone() for name, p in parallel.named_parameters()}

    own, whole = (run_threads(chain.manifest, partial(step, ask=ask)) for ask in (True, False))
    for found, expected in zip(own, whole, strict=True):
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_large_part_is_looked_at_to_its_end() -> None:
    shard = FlatShard({"wte": torch.zeros(2**24 + 4, 1)}, torch.float32, Group(1, 0))
    assert not shard.is_written()
    shard.flat[-1] = 1
    assert shard.is_written()


def move(parallel: Parallel) -> None:
    """As the Trainer does."""
    parallel.to(torch.device("cpu", 0))


def shrink_data(parallel: Parallel) -> None:
    for parameter in parallel.parameters():
        parameter.data = parameter.data * 0.9


def shrink_vector(parallel: Parallel) -> None:
    vector = nn.utils.parameters_to_vector(parallel.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.9, parallel.parameters())


def decay_data(parallel: Parallel) -> None:
    for parameter in parallel.parameters():
        parameter.data.mul_(0.9)


def decay_one(parallel: Parallel) -> None:
    list(parallel.parameters())[-2].data.mul_(0.9)


def exchange(parallel: Parallel) -> None:
    used = [p for n, p in parallel.named_parameters() if not n.startswith("unused")]
    first, second = next((p, q) for p in used for q in used if p is not q and p.shape == q.shape)
    first.data, second.data = second.data, first.data


@pytest.mark.parametrize(
    ("rebind", "late"),
    [
        (move, False),
        *(
            (rebind, late)
            for rebind in (shrink_data, shrink_vector, decay_data, decay_one, exchange)
            for late in (False, True)
        ),
    ],
)
def test_parameters_written_past_their_versions_train_on(rebind: Callable[[Parallel], None], late: bool) -> None:
    chain = Chain((1, 2, 2), "interleaved_1f1b", 2, 4)

    def run(connection: Connection, shard: bool) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        optimizer = parallel.shard_optimizer(optimizer) if shard else optimizer
        for step in range(3):
            if not late:
                rebind(parallel)  # before the backward: to move gradients that are elsewhere is refused
            parallel(**chain.batch(connection.rank.coordinates.data + 10 * step))["loss"].backward()
            if late:
                rebind(parallel)
            optimizer.step()
            optimizer.zero_grad()
            parallel.zero_grad()
        return {name: p.detach().clone() for name, p in parallel.named_parameters()}

    whole = run_threads(chain.manifest, partial(run, shard=False))
    for found, expected in zip(run_threads(chain.manifest, partial(run, shard=True)), whole, strict=True):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=0)


def test_every_parameter_has_a_storage_of_its_own(tmp_path: Path) -> None:
    """Files take one tensor of each storage, as of tied weights, and leave the others out."""
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def train_and_save(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.AdamW(parallel.parameters(), lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        optimizer.step()
        whole = parallel.full_state_dict()
        for name, p in parallel.named_parameters():
            assert p.untyped_storage().nbytes() == p.nbytes, name
        if connection.world.index == 0:
            save_model(parallel, str(tmp_path / "model.safetensors"))
            saved = load_file(tmp_path / "model.safetensors")
            assert all(torch.equal(saved[name], tensor) for name, tensor in whole.items())

    run_threads(chain.manifest, train_and_save)


def test_parameters_that_another_process_is_given_train_on() -> None:
    """Their storages move into memory that it shares."""
    chain = Chain((1, 1, 2), "1f1b", 1, 2)

    def train(connection: Connection, sent: bool) -> list[Tensor]:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        for step in range(3):
            parallel(**chain.batch(step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            if sent and connection.world.index == 0:
                for p in parallel.parameters():
                    p.untyped_storage().share_memory_()
        return [p.detach().clone() for p in parallel.parameters()]

    expected, found = (run_threads(chain.manifest, partial(train, sent=sent)) for sent in (False, True))
    for one, other in zip(expected[0], found[0], strict=True):
        assert torch.equal(one, other)


def test_sharding_is_refused_after_parameters_changed_dtype() -> None:
    _, parallel = alone()
    parallel.bfloat16()
    with pytest.raises(ValueError, match=r"is torch.bfloat16.*, but was torch.float64"):
        parallel.shard_optimizer(torch.optim.AdamW(parallel.parameters()))


def test_memory_of_another_shape_is_refused_before_the_step() -> None:
    chain = Chain((1, 1, 1), "1f1b", 1, 2)

    def rebind(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        bias = parallel.get_parameter("layer.0.row.bias")
        bias.data = bias.data[:1]
        with pytest.raises(ValueError, match=r"layer.0.row.bias is torch.float64\[1\] on cpu, but was"):
            optimizer.step()

    run_threads(chain.manifest, rebind)


def test_a_frozen_parameter_is_left_alone_and_freezing_later_is_refused() -> None:
    chain = Chain((1, 1, 1), "1f1b", 1, 2)

    def freeze(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        named = dict(parallel.named_parameters())
        named["layer.0.row.bias"].requires_grad_(False)
        before = named["layer.0.row.bias"].clone()
        optimizer = parallel.shard_optimizer(torch.optim.AdamW(parallel.parameters(), lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        optimizer.step()
        assert torch.equal(named["layer.0.row.bias"], before)
        named["layer.0.row.weight"].requires_grad_(False)
        with pytest.raises(ValueError, match=r"layer.0.row.weight was frozen after its optimizer was sharded"):
            parallel(**chain.batch())

    run_threads(chain.manifest, freeze)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 2), (1, 1, 2)], ids=str)
def test_parameters_unfrozen_later_count_in_the_sharded_norm(mesh: tuple[int, int, int]) -> None:
    """It is stepped whole, by an optimizer of its own beside the sharded one."""
    chain = Chain(mesh, "1f1b", 1, 2)

    def unfreeze(connection: Connection, shard: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        parallel = chain.parallel(connection)
        late = [p.requires_grad_(False) for name, p in parallel.named_parameters() if "column" in name]
        first = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], lr=0.1)
        if shard:
            parallel.shard_optimizer(first)
        second, norms = torch.optim.SGD(late, lr=0.1, momentum=0.9), []
        for step in range(4):
            for p in late:
                p.requires_grad_(step > 1)
            parallel(**chain.batch(connection.rank.coordinates.data + 10 * step))["loss"].backward()
            norms.append(nn.utils.clip_grad_norm_(parallel.parameters(), 0.1))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return norms, {name: p.detach().clone() for name, p in parallel.named_parameters()}

    whole = run_threads(chain.manifest, lambda connection: unfreeze(connection, False))
    parts = run_threads(chain.manifest, lambda connection: unfreeze(connection, True))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_would_not_run_is_refused(kind: str) -> None:
    chain = Chain((2, 1, 1), "1f1b", 1, 2)

    def refuse(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        register = getattr(parallel.get_parameter("layer.0.row.bias"), kind)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        refused = pytest.raises(ValueError, match=r"layer.0.row.bias has a hook .* train without shard_opt")
        handle = register(lambda gradient: None)
        with refused:
            parallel.shard_optimizer(optimizer)
        handle.remove()
        parallel.shard_optimizer(optimizer)
        parallel(**chain.batch())["loss"].backward()
        handle = register(lambda gradient: None)
        with refused:
            parallel(**chain.batch())
        handle.remove()
        parallel(**chain.batch())

    run_threads(chain.manifest, refuse)


def test_a_refused_optimizer_is_as_it_was() -> None:
    chain = Chain((1, 1, 1), "1f1b", 1, 2)

    def refuse(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
        parallel(**chain.batch())["loss"].backward()
        optimizer.step()
        optimizer.state[dict(parallel.named_parameters())["layer.0.row.bias"]]["step"] += 1
        parameters, states = list(optimizer.param_groups[0]["params"]), dict(optimizer.state)
        with pytest.raises(ValueError, match="the optimizer's step differs"):
            parallel.shard_optimizer(optimizer)
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
        assert dict(optimizer.state).keys() == states.keys()

    run_threads(chain.manifest, refuse)


class Repeated(nn.Module):
    """The first layer is the last one too: two tied parameters, whose gradients are summed over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.last = nn.Linear(8, 8)
        self.middle = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.middle(self.first(x))).square().mean()
        return loss


Groups = Callable[[list[nn.Parameter]], list[list[nn.Parameter]]]


@pytest.mark.parametrize(
    ("groups", "stepped"),
    [
        (lambda own: [own], "in bucket 0, of 2 parameters"),
        (lambda own: [own[1:], own[:1]], "in bucket 1, of 1 parameters"),
        (lambda own: [own[1:]], "whole"),
    ],
)
def test_owners_of_tied_parameters_step_them_in_the_same_groups(groups: Groups, stepped: str) -> None:
    torch.manual_seed(0)
    example = {"x": torch.zeros(1, 8)}
    program = autoptd.compile(Repeated(), (1, 2, 2), example_inputs=example, num_microbatches=2)
    assert program.manifest.owners("first.weight") == program.manifest.owners("first.bias") == (0, 1)

    def work(connection: Connection) -> None:
        parallel = bind_thread(program, connection)
        tied = [parallel.get_parameter(f"first.{name}") for name in ("weight", "bias")]
        rest = [p for p in parallel.parameters() if all(p is not each for each in tied)]

        def optimizer(groups: Groups) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": own} for own in (*groups(tied), rest) if own], lr=0.1)

        here = groups if connection.rank.coordinates.pipeline else lambda own: [own[:1], own[1:]]
        first = 2 * connection.rank.coordinates.data
        with pytest.raises(
            ValueError, match=rf"the parameter first.weight would be stepped .* on rank {first}"
        ) as refused:
            parallel.shard_optimizer(optimizer(here))
        assert stepped in str(refused.value)
        train_step(parallel, {"x": torch.ones(2, 8)}, parallel.shard_optimizer(optimizer(groups)))

    run_threads(program.manifest, work)


def test_a_rank_without_parameters_shards_nothing() -> None:
    """For which torch makes no optimizer."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(40):
                x = x.tanh() * x.cos()
            return x.square().mean()

    example = {"x": torch.zeros(1, 8)}
    program = autoptd.compile(Bare(), (1, 2, 2), example_inputs=example, num_microbatches=2, num_model_chunks=1)

    def work(connection: Connection) -> int:
        parallel = bind_thread(program, connection)
        own = list(parallel.parameters())
        optimizer = parallel.shard_optimizer(torch.optim.SGD(own, lr=0.1)) if own else None
        parallel({"x": torch.ones(2, 8)}["x"]).backward()
        if optimizer is not None:
            before = own[0].detach().clone()
            optimizer.step()
            parallel.state_dict()
            assert not torch.equal(before, next(iter(parallel.parameters())))
        return len(own)

    assert run_threads(program.manifest, work) == [2, 0, 2, 0]


def test_a_gradient_that_a_shard_has_is_not_read_as_zero() -> None:
    chain = Chain((1, 1, 1), "1f1b", 1, 2)

    def read(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        parallel(**chain.batch())["loss"].backward()
        gradients = {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}
        assert "layer.0.row.bias" in gradients
        for name, gradient in gradients.items():
            assert gradient.shape == parallel.get_parameter(name).shape
            assert gradient.isnan().all()

    run_threads(chain.manifest, read)


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_in_shards_are_clipped_by_value(foreach: bool) -> None:
    chain = Chain((1, 2, 2), "1f1b", 1, 2, tied=True)

    def clip(connection: Connection, shard: bool) -> dict[str, Tensor]:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        if shard:
            parallel.shard_optimizer(optimizer)
        parallel(**chain.batch(connection.rank.coordinates.data))["loss"].backward()
        nn.utils.clip_grad_value_(parallel.parameters(), 0.01, foreach=foreach)
        optimizer.step()
        return {name: p.detach().clone() for name, p in parallel.named_parameters()}

    whole, parts = (run_threads(chain.manifest, partial(clip, shard=shard)) for shard in (False, True))
    for found, expected in zip(parts, whole, strict=True):
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda gradient: gradient.mul_(2),
    "add_": lambda gradient: gradient.add_(1),
    "copy_": lambda gradient: gradient.copy_(torch.ones(len(gradient))),
    "clamp_": lambda gradient: gradient.clamp_(-1, 1),
    "nan_to_num_": torch.nan_to_num_,
    "zero_": lambda gradient: gradient.zero_(),
    "fill_": lambda gradient: gradient.fill_(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_gradient_that_a_shard_has_is_refused(name: str) -> None:
    """By torch, or by the next step and backward, until the gradients are cleared."""
    chain = Chain((1, 1, 1), "1f1b", 1, 2)

    def write(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        before = [p.detach().clone() for p in parallel.parameters()]
        parallel(**chain.batch())["loss"].backward()
        gradient = parallel.get_parameter("layer.0.row.bias").grad
        assert gradient is not None
        if name not in ("zero_", "fill_"):
            with pytest.raises(RuntimeError, match="single memory location"):
                WRITES[name](gradient)
            return
        WRITES[name](gradient)
        for go_on in (optimizer.step, parallel(**chain.batch())["loss"].backward):
            with pytest.raises(ValueError, match=r"layer\.0\.row\.bias was replaced or written, but a sharded"):
                go_on()
        assert all(map(torch.equal, parallel.parameters(), before))
        parallel.zero_grad()
        parallel(**chain.batch())["loss"].backward()
        gradient = parallel.get_parameter("layer.0.row.bias").grad
        assert gradient is not None
        assert gradient.isnan().all()
        optimizer.step()

    run_threads(chain.manifest, write)
