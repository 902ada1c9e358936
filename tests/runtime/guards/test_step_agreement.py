"""The one reduction of a step: batches that differ inside a replica, and values that are not finite."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.guards.step_agreement import compare_ranks
from autoptd.runtime.guards.weight_agreement import Copies, StepLog
from autoptd.runtime.optimizer.loss_scale import are_finite
from autoptd.runtime.program.hashing import hash_batch, hash_words, read_words
from autoptd.runtime.program.mesh import Mesh
from tests.counting import calls
from tests.generated_models import ModelConfig, make_batch, make_model
from tests.parity import loss_of
from tests.ranks import run_ranks
from tests.runtime.chain import Chain

CPU = torch.device("cpu")


def copies(chain: Chain, connection: Connection) -> Copies:
    parameters = dict(chain.parallel(connection).named_parameters())
    return Copies(chain.manifest, connection.rank, parameters, StepLog())


def draw(dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(5, 7, generator=generator, dtype=torch.complex64).to(dtype)
    return torch.randint(0, 2, (5, 7), generator=generator).to(dtype)


DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.complex64], ids=str)
def test_a_changed_element_changes_the_hash(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(100):
        batch = {"x": draw(dtype, generator), "y": draw(dtype, generator)}
        before = hash_batch(batch, CPU)
        assert hash_batch({name: value.clone() for name, value in batch.items()}, CPU) == before
        other = batch["y"].clone()
        place = tuple(int(torch.randint(0, size, (1,), generator=generator)) for size in other.shape)
        other[place] = 1 - other[place].to(torch.int64) if dtype is torch.bool else other[place] + 1
        assert hash_batch({**batch, "y": other}, CPU) != before


def test_a_swap_changes_the_hash() -> None:
    numbers = torch.arange(6)
    assert hash_words(numbers) != hash_words(numbers.flip(0))
    assert hash_batch({"a": numbers, "b": numbers + 1}, CPU) != hash_batch({"a": numbers + 1, "b": numbers}, CPU)
    assert hash_words(read_words(torch.zeros(3))) != hash_words(read_words(torch.zeros(4)))


def test_the_hash_takes_views_as_they_look() -> None:
    x = torch.arange(12).view(3, 4).t()
    assert hash_words(read_words(x)) == hash_words(read_words(x.contiguous()))


def test_a_hundred_perturbations_are_caught_and_named() -> None:
    chain = Chain((2, 2, 2))
    generator = torch.Generator().manual_seed(0)
    cases = []
    for _ in range(100):
        rank = int(torch.randint(0, 8, (1,), generator=generator))
        name = ("x", "ids", "target")[int(torch.randint(0, 3, (1,), generator=generator))]
        place = int(torch.randint(0, chain.batch()[name].numel(), (1,), generator=generator))
        cases.append((rank, name, place))

    def body(connection: Connection) -> list[str]:
        at = connection.rank.coordinates
        own = copies(chain, connection)
        caught = []
        for rank, name, place in cases:
            batch = chain.batch(at.data)
            if connection.world.index == rank:
                batch[name].view(-1)[place] += 1
            with pytest.raises(ValueError, match="differs inside replica") as error:
                compare_ranks(chain.manifest, connection, batch, torch.ones(()), [], own, ())
            caught.append(str(error.value))
        compare_ranks(chain.manifest, connection, chain.batch(at.data), torch.ones(()), [], own, ())
        return caught

    messages = run_threads(chain.manifest, body)
    for case, (rank, name, place) in enumerate(cases):
        (text,) = {own[case] for own in messages}
        at = chain.manifest.mesh.coordinates(rank)
        shape = chain.batch()[name].shape
        indices = [int(i) for i in torch.unravel_index(torch.tensor(place), shape)]
        assert f"argument {name} differs inside replica {at.data}" in text
        assert f"on rank {rank} (tensor {at.tensor}, pipeline {at.pipeline}) element {indices} is" in text
        assert f"ranks {[rank]} differ" in text


def test_a_step_refuses_a_batch_that_differs() -> None:
    config = ModelConfig(layers=2)
    program = autoptd.compile(make_model(config), (2, 2, 1), example_inputs=make_batch(config, 1), num_microbatches=4)
    name = program.manifest.inputs[0].name

    def work(rank: int) -> tuple[str, int, bool]:
        parallel = program.bind()
        batch = make_batch(config, 4)
        loss_of(parallel(**batch)).backward()
        before = dict(calls(parallel._connection.world))
        loss_of(parallel(**batch)).backward()
        reductions = calls(parallel._connection.world)["all_reduce"] - before["all_reduce"]
        parallel.zero_grad()
        if rank == 3:
            batch[name][1, 2] += 1
        with pytest.raises(ValueError, match="differs inside replica 0") as caught:
            parallel(**batch)
        return str(caught.value), reductions, all(p.grad is None for p in parallel.parameters())

    for text, reductions, untouched in run_ranks(work, 4):
        assert f"argument {name}" in text
        assert "on rank 3 (tensor 1, pipeline 1) element [1, 2]" in text
        assert "ranks [3] differ from the rest of [0, 1, 2, 3]" in text
        assert (reductions, untouched) == (1, True)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_rank_in_another_mode_is_refused(mesh: tuple[int, int, int]) -> None:
    chain = Chain(mesh, "gpipe", 1, 2)

    def body(connection: Connection) -> tuple[str, str]:
        parallel = chain.parallel(connection)
        batch = chain.batch(connection.rank.coordinates.data)
        parallel(**batch)
        parallel.train(connection.world.index == 0)
        with pytest.raises(ValueError, match="call parallel") as mode:
            parallel(**batch)
        parallel.train()
        parallel(**batch)
        parallel._connection.rank.randomness.call += connection.world.index
        with pytest.raises(ValueError, match="call parallel") as steps:
            parallel(**batch)
        return str(mode.value), str(steps.value)

    for mode, steps in run_threads(chain.manifest, body):
        assert "rank 1 is in evaluation mode after 1 steps" in mode
        assert "the others are in training mode after 1 steps" in mode
        assert "rank 1 is in training mode after 3 steps in training mode, where the others" in steps


def leave_out(optimizer: torch.optim.Optimizer) -> None:
    """No step."""


def step_faster(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 1.001
    optimizer.step()


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def write(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    with torch.no_grad():
        torch._foreach_mul_(optimizer.param_groups[0]["params"], 2)


@pytest.mark.parametrize("act", [leave_out, step_faster, write])
@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 3)])
def test_a_replica_that_steps_otherwise_is_refused(
    mesh: tuple[int, int, int], act: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Once it is the turn of a parameter that differs; and no other training is."""
    chain = Chain(mesh, "gpipe", 1, 2)
    turns = len(chain.manifest.stages[0].parameters)

    def body(connection: Connection) -> str:
        parallel = chain.parallel(connection)
        batch = chain.batch(connection.rank.coordinates.data)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)

        def train(act: Callable[[torch.optim.Optimizer], None]) -> None:
            parallel(**batch)["loss"].backward()
            act(optimizer)
            optimizer.zero_grad()

        def evaluate() -> None:  # where turns go on
            for _ in range(turns):
                parallel.eval()(**batch)

        for _ in range(turns):
            train(step)
        train(act if connection.world.index == 0 else step)
        with pytest.raises(ValueError, match="which have one model together") as refused:
            evaluate()
        return str(refused.value)

    (text,) = set(run_threads(chain.manifest, body))
    replicas = [chain.manifest.mesh.tensor * chain.manifest.mesh.pipeline * i for i in range(mesh[2])]
    assert f"of ranks {replicas}, which have one model together, [{0 if mesh[2] > 2 else replicas[-1]}] differ" in text
    assert "call optimizer.step() on every rank or on none" in text


def test_owners_of_a_tied_parameter_keep_it_alike() -> None:
    chain = Chain((2, 2, 1), "gpipe", 1, 2, tied=True)

    def body(connection: Connection) -> str:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for rate in (0.1, 0.1, 0.2 if connection.rank.coordinates.pipeline == 0 else 0.1):
            parallel(**chain.batch())["loss"].backward()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(ValueError, match=r"scale has other values on rank . than on rank .") as refused:
            parallel(**chain.batch())
        return str(refused.value)

    (text,) = set(run_threads(chain.manifest, body))
    assert "of ranks [0, 2], which have one model together, [2] differ" in text


OPTIONS = ("lr", "weight_decay", "eps", "betas", "amsgrad")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("mesh", "option"), [((2, 2, 1), ""), *itertools.product([(2, 2, 1), (1, 2, 2)], OPTIONS)])
def test_ranks_of_a_stage_make_the_same_steps(mesh: tuple[int, int, int], sharded: bool, option: str) -> None:
    """A step more, or another option, on one of them; the other pipeline rank's rate is its own."""
    chain = Chain(mesh, "gpipe", 1, 2)
    others = {"betas": (0.5, 0.5), "amsgrad": True, "lr": np.float32(0.5)}

    def body(connection: Connection) -> str:
        parallel = chain.parallel(connection)
        stage = connection.rank.coordinates.pipeline
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1 * (1 + stage), foreach=stage == 0)
        if sharded:
            parallel.shard_optimizer(optimizer)
        for number in range(3):
            parallel(**chain.batch())["loss"].backward()
            if number == 2 and connection.world.index == 3:
                if not option:
                    optimizer.step()
                optimizer.param_groups[0].update({option: others.get(option, 0.5)} if option else {})
                for state in optimizer.state.values():
                    state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(ValueError, match=r"were different on rank . than on|has other values on") as refused:
            parallel(**chain.batch())
        return str(refused.value)

    (text,) = set(run_threads(chain.manifest, body))
    if sharded or mesh == (2, 2, 1):
        assert "steps (how many, or with which lr" in text
    assert f"of ranks {[2, 3] if mesh[0] == 2 else [1, 3]}, which have" in text


def test_ranks_of_a_stage_step_by_the_same_gradients() -> None:
    """One may be dropped by a norm, say, which of a slice is another on each rank."""
    chain = Chain((2, 1, 1), "gpipe", 1, 2)

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
        parallel(**chain.batch())["loss"].backward()
        if connection.world.index == 1:
            parallel.get_parameter("layer.0.column.weight").grad = None
        optimizer.step()
        with pytest.raises(ValueError, match=r"steps .* were different on rank 1 than on rank 0"):
            parallel(**chain.batch())

    run_threads(chain.manifest, body)


@pytest.mark.parametrize(
    ("mesh", "sharded"), [((2, 1, 1), False), ((1, 2, 1), False), ((1, 1, 2), True), ((2, 1, 1), True)]
)
def test_the_loss_is_scaled_alike(mesh: tuple[int, int, int], sharded: bool) -> None:
    """What each makes of its loss may be anything, but the same: gradients are of all ranks' parts together."""
    chain = Chain(mesh)

    def body(connection: Connection) -> str:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        if sharded:
            parallel.shard_optimizer(optimizer)
        for other in (0, 0, 1):
            losses = [parallel(**chain.batch())["loss"] for _ in range(2)]
            torch.stack(losses).log().sum().backward()
            (parallel(**chain.batch())["loss"] / (3 + other * connection.world.index)).backward()
        with pytest.raises(ValueError, match="the factors that losses were multiplied by") as refused:
            parallel(**chain.batch())
        return str(refused.value)

    (text,) = set(run_threads(chain.manifest, body))
    assert "of ranks [0, 1], which have" in text


def test_options_that_are_no_numbers_are_not_compared() -> None:
    steps, rank = StepLog(), Rank.local(Mesh(1, 1, 1))
    own = []
    for option in (torch.ones(2, 2), [1, (True, None)], 1 << 2000, None, "name", [[1.0, 1], [1, 1]]):
        steps.reset()
        steps.add(["weight"], {"option": option})
        own.append(int(steps.tensor(rank)))
    assert own[0] == own[-1]
    assert own[2] == own[3] == own[4]
    assert len(set(own)) == 3


def test_ranks_of_a_stage_may_load_its_weights_before_the_next_call() -> None:
    """The factors of before are those of all ranks still."""
    chain = Chain((1, 2, 1))

    def body(connection: Connection) -> list[float]:
        parallel = chain.parallel(connection)
        losses = [parallel(**chain.batch())["loss"]]
        (losses[0] / 3).backward()
        if connection.rank.coordinates.pipeline == 0:
            parallel.load_state_dict(parallel.state_dict())
        losses.append(parallel(**chain.batch())["loss"])
        return [loss.item() for loss in losses]

    (first, second), other = run_threads(chain.manifest, body)
    assert [first, second] == [first, first] == other


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("sharded", [False, True])
def test_steps_that_come_to_the_same_are_the_same(sharded: bool, tmp_path: Path) -> None:
    """One tried again, in another order, with what is none of this model's; and all are, after a checkpoint."""
    chain = Chain((2, 2, 2), "gpipe", 1, 2)

    def body(connection: Connection) -> str:
        odd = connection.world.index % 2
        parallel = chain.parallel(connection)
        first, *rest = parallel.parameters()
        parts = [[first, *rest]] if sharded else [[first], rest]
        optimizers = [torch.optim.AdamW(part, lr=0 if odd else 0.0) for part in parts]
        if sharded:
            parallel.shard_optimizer(optimizers[0])
        elif odd:
            optimizers[0].add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
        parallel(**chain.batch())["loss"].backward()
        failing = optimizers[0].register_step_pre_hook(interrupt)
        if odd:
            with pytest.raises(KeyboardInterrupt):
                optimizers[0].step()
        failing.remove()
        for optimizer in optimizers[:: -1 if odd else 1]:
            optimizer.step()
        parallel(**chain.batch())["loss"].backward()
        parallel.save_checkpoint(tmp_path)
        if odd:
            optimizers[0].step()
        with pytest.raises(ValueError, match="steps") as refused:
            parallel(**chain.batch())
        parallel.load_checkpoint(tmp_path)
        parallel(**chain.batch())
        return str(refused.value)

    assert len(set(run_threads(chain.manifest, body))) == 1


def test_replicas_have_batches_of_their_own() -> None:
    chain = Chain((1, 2, 2))

    def body(connection: Connection) -> list[bool]:
        batch = chain.batch(connection.rank.coordinates.data)
        own, loss = copies(chain, connection), torch.ones(())
        flags = [connection.world.index == 3, False, connection.world.index == 1]
        return compare_ranks(chain.manifest, connection, batch, loss, [], own, flags)

    assert run_threads(chain.manifest, body) == [[False, True, False, True]] * 4


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_one_rank_with_a_broken_gradient_tells_all(value: float) -> None:
    chain = Chain((2, 1, 2))

    def body(connection: Connection) -> Any:
        rank = connection.world.index
        gradient = torch.tensor([1e30, value if rank == 2 else -1e30])
        batch = chain.batch(connection.rank.coordinates.data)
        own, loss = copies(chain, connection), torch.ones(())
        whole = compare_ranks(chain.manifest, connection, batch, loss, [torch.ones(2)], own, ())
        broken = compare_ranks(chain.manifest, connection, batch, loss, [gradient], own, ())
        return whole, broken

    assert run_threads(chain.manifest, body) == [([False], [True])] * 4


def test_large_and_empty_gradients_are_finite() -> None:
    gradients = [torch.full((9,), 3e38), torch.zeros(0), torch.ones(2, dtype=torch.bfloat16)]
    assert are_finite(gradients, CPU)
    assert are_finite([], CPU)
    for broken in ([torch.nan], [torch.inf, -torch.inf], [3e38, 3e38, torch.inf]):  # the last sum overflows anyway
        assert not are_finite([*gradients, torch.tensor(broken)], CPU)
        assert not are_finite([torch.ones(3), torch.tensor(broken)], CPU)
