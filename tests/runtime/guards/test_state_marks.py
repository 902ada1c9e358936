"""An optimizer's state_dict says which pieces of the model it is of; on others it is refused."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.guards.optimizer_watch import MARK, watch_divided
from autoptd.runtime.module.parallel import Parallel
from tests.runtime.chain import Chain
from tests.runtime.module.test_parallel import alone

State = dict[str, Any]


def step(chain: Chain, parallel: Parallel, *optimizers: torch.optim.Optimizer) -> None:
    parallel(**chain.batch())["loss"].backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def watched() -> tuple[Chain, Parallel]:
    """Alone, as where the mesh divides the model."""
    chain, parallel = alone()
    watch_divided(parallel, parallel._weights.marks)
    parallel(**chain.batch())["loss"].backward()
    return chain, parallel


class Round(torch.optim.Optimizer):
    """Round another optimizer, with the hooks of a step alone, as third parties write Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> State:
        return self.inner.state_dict()


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adafactor])
def test_an_optimizer_round_another_one_leaves_the_mark_to_it(inner: Any) -> None:
    chain, parallel = watched()
    optimizer = parallel.whole_optimizer(lambda params: Round(inner(params)), parallel.parameters())
    step(chain, parallel, optimizer)
    assert MARK in optimizer.state_dict()["param_groups"][0]


def resume(chain: Chain, shard: bool, order: Sequence[int]) -> set[str]:
    """What ranks say in a second run, to the states that ranks `order` saved of their optimizers in a first one.

    A bias is frozen in both, which a sharded optimizer keeps as it is.
    """

    def make(connection: Connection) -> tuple[Parallel, torch.optim.Optimizer]:
        parallel = chain.parallel(connection)
        for name, parameter in parallel.named_parameters():
            parameter.requires_grad_(name[-8:] != "row.bias")
        layers = parallel.get_submodule("layer").parameters()
        optimizer = torch.optim.AdamW(layers)
        return parallel, parallel.shard_optimizer(optimizer) if shard else optimizer

    def save(connection: Connection) -> State:
        parallel, optimizer = make(connection)
        step(chain, parallel, optimizer)
        saved = optimizer.state_dict()
        assert MARK in saved["param_groups"][0]
        return saved

    def load(connection: Connection) -> str:
        parallel, optimizer = make(connection)
        optimizer.load_state_dict(states[order[chain.mesh.rank_of(**connection.rank.coordinates)]])
        try:
            step(chain, parallel, optimizer)
        except ValueError as error:
            return str(error)
        return "" if MARK not in optimizer.param_groups[0] else "it would be judged again"

    states = run_threads(chain.manifest, save)
    return set(run_threads(chain.manifest, load))


@pytest.mark.parametrize(
    ("mesh", "shard"), [((2, 1, 2), False), ((2, 1, 2), True), ((1, 2, 2), False), ((1, 2, 2), True), ((1, 1, 4), True)]
)
def test_a_ranks_own_state_is_taken(mesh: tuple[int, int, int], shard: bool) -> None:
    assert resume(Chain(mesh, "1f1b", 1, 2), shard, range(4)) == {""}


OTHER = r"parameter \d of group 0 was saved for (?P<there>.*), and this rank \(.*\) has (?P<here>.*) in that place: .*"
OTHER += r"parallel\.save_checkpoint and load_checkpoint"


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(("mesh", "there"), [((2, 1, 2), "0:6 of dimension 0"), ((1, 2, 2), "layer.1.")])
def test_another_ranks_state_is_refused(shard: bool, mesh: tuple[int, int, int], there: str) -> None:
    """Of the other tensor rank, or the other pipeline rank: it is of other slices, or layers."""
    found = [re.search(OTHER, said) for said in resume(Chain(mesh, "1f1b", 1, 2), shard, (1, 0, 3, 2))]
    assert all(found)
    assert any(there in match["there"] and there not in match["here"] for match in found if match)


def test_another_replicas_state_is_refused_of_a_sharded_optimizer_alone() -> None:
    chain, other = Chain((2, 1, 2), "1f1b", 1, 2), (2, 3, 0, 1)
    assert resume(chain, False, other) == {""}
    assert all(re.search(r"saved for elements \d+:\d+ of layer", said) for said in resume(chain, True, other))


def test_the_same_ranks_state_of_another_program_is_refused() -> None:
    """With two chunks a rank has other layers than with one, and their tensors have the same shapes."""
    one, two = Chain((1, 2, 1), "1f1b", 1, 2), Chain((1, 2, 1), "interleaved_1f1b", 2, 2)

    def run(chain: Chain, layers: Sequence[int], states: Sequence[State] = ()) -> list[Any]:
        def train(connection: Connection) -> Any:
            parallel, own = chain.parallel(connection), connection.rank.coordinates.pipeline
            named = parallel.get_submodule(f"layer.{layers[own]}").named_parameters()
            optimizer = torch.optim.AdamW([parameter for _, parameter in named])
            if states:
                optimizer.load_state_dict(states[own])
                with pytest.raises(
                    ValueError, match=rf"saved for layer\.{own}.*has layer\.{layers[own]}.\S+\[12, 8\] in that"
                ):
                    step(chain, parallel, optimizer)
            else:
                step(chain, parallel, optimizer)
            return optimizer.state_dict()

        return run_threads(chain.manifest, train)

    saved = run(one, (0, 1))
    assert run(two, (2, 3), saved)[0]["param_groups"] == saved[0]["param_groups"]  # still the other's


def test_unmarked_optimizer_states_are_loaded() -> None:
    """As older versions saved it, and as tensors of no parallel model are marked."""
    _, parallel = watched()
    optimizer = torch.optim.AdamW(parallel.parameters())
    optimizer.step()
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    for marks in ([None, *group[MARK][1:]], []):
        group[MARK] = marks
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert MARK not in optimizer.param_groups[0]  # looked at, and taken


def test_a_loaded_state_may_be_sharded_and_its_groups_may_grow() -> None:
    chain, parallel = watched()
    *most, last = parallel.parameters()
    first = torch.optim.AdamW(most)
    first.step()
    second = torch.optim.AdamW(most)
    second.load_state_dict(first.state_dict())
    second.step()
    second.param_groups[0]["params"].insert(0, last)
    second.step()
    second.param_groups[0]["params"].pop(0)
    second.load_state_dict(first.state_dict())
    parallel.shard_optimizer(second)
    step(chain, parallel, second)
    third = second.state_dict()
    second.load_state_dict(third)
    step(chain, parallel, second)
    third["param_groups"][0][MARK][0] = ["elements 1:2 of another"]
    second.load_state_dict(third)
    with pytest.raises(ValueError, match="saved for elements 1:2 of another"):
        step(chain, parallel, second)


def test_an_optimizer_of_two_models_says_what_both_have() -> None:
    (_, first), (_, second) = watched(), watched()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([*first.parameters(), other, *second.parameters()])
    optimizer.step()
    saved = optimizer.state_dict()
    marks = saved["param_groups"][0][MARK]
    count = len(marks) // 2
    assert marks == [*marks[:count], None, *marks[:count]]
    assert None not in marks[:count]
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert MARK not in optimizer.param_groups[0]
    for place, found in ((0, "first"), (-1, "second")):  # whose marks the other's question leaves there
        own, saved["param_groups"][0][MARK][place] = saved["param_groups"][0][MARK][place], [found]
        optimizer.load_state_dict(saved)
        with pytest.raises(ValueError, match=f"saved for {found}, and this rank"):
            optimizer.step()
        saved["param_groups"][0][MARK][place] = own


def test_a_checkpoint_takes_the_place_of_a_state_that_was_refused(tmp_path: Path) -> None:
    """As the refusal says."""
    _, parallel = watched()
    optimizer = torch.optim.AdamW(parallel.parameters())
    optimizer.step()
    parallel.save_checkpoint(tmp_path, optimizer)
    other = optimizer.state_dict()
    other["param_groups"][0][MARK][0] = ["another"]
    optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match="saved for another"):
        optimizer.step()
    parallel.load_checkpoint(tmp_path, optimizer)
    optimizer.step()
