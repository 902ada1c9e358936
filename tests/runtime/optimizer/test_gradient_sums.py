"""Gradients on their way from the stages to the optimizer: partial rows, tied parameters, float32, replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.comm.groups import Group, running
from autoptd.runtime.comm.timings import Measured
from autoptd.runtime.optimizer.gradient_memory import StageLeaves
from autoptd.runtime.optimizer.gradient_sums import GradientSums, list_complete, read_gradients
from autoptd.runtime.optimizer.zero1 import FlatShard
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import REPLICATED, Parameter, Placement, Segment, Shard
from autoptd.runtime.program.schedule import Action, Kind
from tests.runtime.chain import Chain


def manifest_of(mesh: tuple[int, int, int], *parameters: Parameter) -> Manifest:
    """Every stage has all of `parameters`."""
    manifest = Chain(mesh, "gpipe", 1, 1).manifest
    stages = tuple(replace(s, parameters=tuple(p.name for p in parameters)) for s in manifest.stages)
    return replace(manifest, stages=stages, parameters={p.name: p for p in parameters})


def sum_gradients(
    manifest: Manifest, connection: Connection, gradients: Mapping[str, Tensor], shards: Sequence[FlatShard] = ()
) -> dict[str, Tensor]:
    """What the sums make of one stage's `gradients`; with `shards` the replica's part of the only one."""
    here = connection.rank.coordinates.pipeline
    measured = Measured(connection.rank.device)
    complete = list_complete(manifest, here, [Action(here, Kind("B"), 0)])
    sums = GradientSums(manifest, connection, complete, shards)
    leaves = {name: torch.zeros_like(g, requires_grad=True) for name, g in gradients.items()}
    sums.leaves = StageLeaves({here: leaves})
    sums.attach(sums.leaves, frozenset(leaves))
    sums.start((), measured)
    for name, leaf in leaves.items():
        (leaf * gradients[name]).sum().backward()
    sums.end_stage(here)
    sums.finish()
    found = read_gradients(sums.take(), [0] if shards else list(gradients))
    return {name: g for name, g in zip(gradients, found, strict=True) if g is not None}


def test_partial_rows_are_summed_over_the_tensor_ranks_and_the_rest_is_left() -> None:
    placement = Placement(tensor=Shard(0, (Segment(1, 4, 1, True), Segment(1, 1, 1, False)), partial_gradient=True))
    manifest = manifest_of(
        (2, 1, 1),
        Parameter("packed", (5,), torch.float32, placement=placement),
        Parameter("norm", (2,), torch.float32, placement=REPLICATED.with_partial_gradient("tensor")),
        Parameter("bias", (2,), torch.float32),
    )

    def body(connection: Connection) -> dict[str, Tensor]:
        own = float(connection.rank.group("tensor").index + 1)
        gradients = {"packed": torch.full((3,), own), "norm": torch.full((2,), own), "bias": torch.ones(2)}
        return sum_gradients(manifest, connection, gradients)

    for index, gradients in enumerate(run_threads(manifest, body)):
        assert gradients["packed"].tolist() == [index + 1, index + 1, 3]
        assert gradients["norm"].tolist() == [3, 3]
        assert gradients["bias"].tolist() == [1, 1]


def test_tied_parameters_are_summed_by_name_in_whatever_order_their_owners_met_them() -> None:
    """As where layers are shared, and the first stage begins in the middle of one."""
    names = ("first", "second", "third")
    manifest = manifest_of((1, 2, 1), *(Parameter(name, (2,), torch.float32) for name in names))
    orders = (names, names[::-1])
    stages = [replace(s, parameters=orders[s.index % 2]) for s in manifest.stages]
    manifest = replace(manifest, stages=tuple(stages))

    def body(connection: Connection) -> dict[str, Tensor]:
        order = orders[connection.rank.coordinates.pipeline]
        gradients = {name: torch.full((2,), float(names.index(name) + 1)) for name in order}
        return sum_gradients(manifest, connection, gradients)

    for gradients in run_threads(manifest, body):
        assert {name: g.tolist() for name, g in gradients.items()} == {
            "first": [2, 2],
            "second": [4, 4],
            "third": [6, 6],
        }


@pytest.mark.parametrize("sharded", [False, True])
def test_owners_have_the_same_bits_in_whatever_order_each_adds_up_its_replicas(sharded: bool) -> None:
    """As rings do, which begin elsewhere for other groups and other places in a bucket."""
    manifest = manifest_of((1, 2, 3), Parameter("tied", (3,), torch.float64))

    def body(connection: Connection) -> Tensor:
        at, data = connection.rank.coordinates, connection.rank.group("data")
        if at.pipeline == 1:

            def add_up(x: Tensor) -> Tensor:
                third, second, first = data.all_gather(x)
                return first + second + third

            data.post_all_reduce = lambda tensors: running(list(map(add_up, tensors)))  # type: ignore[method-assign]
            data.post_reduce_scatter = lambda x: running([add_up(x)[at.data, None]])  # type: ignore[method-assign]
        shards = [FlatShard({"tied": torch.zeros(3).double()}, torch.float64, data)] if sharded else []
        own = [1e16, -1e16, 1.0][at.data]
        summed = sum_gradients(manifest, connection, {"tied": torch.full((3,), own).double()}, shards)
        return summed["tied"]

    found = run_threads(manifest, body)
    assert len({tuple(gradient.tolist()) for gradient in found}) == 1


def test_a_parameter_without_a_gradient_is_named_where_it_is_in_a_shard() -> None:
    manifest = manifest_of((1, 1, 1), *(Parameter(name, (2,), torch.float32) for name in ("first", "second")))
    connection = run_threads(manifest, lambda connection: connection)[0]
    complete = list_complete(manifest, 0, [Action(0, Kind("B"), 0)])
    leaves = {name: torch.zeros(2, requires_grad=True) for name in ("first", "second")}
    shard = FlatShard({name: leaf.detach() for name, leaf in leaves.items()}, torch.float32, Group())
    sums = GradientSums(manifest, connection, complete, [shard])
    sums.leaves = StageLeaves({0: leaves})
    sums.attach(sums.leaves, frozenset(leaves))
    sums.start((), Measured(connection.rank.device))
    leaves["first"].sum().backward()
    with pytest.raises(
        ValueError, match=r"^second took no part in the loss and has no gradient, .*: make the optimizer without it"
    ):
        sums.end_stage(0)


def test_half_precision_is_summed_in_float32() -> None:
    manifest = manifest_of((1, 1, 1), Parameter("weight", (1,), torch.bfloat16))
    connection = run_threads(manifest, lambda connection: connection)[0]
    measured = Measured(connection.rank.device)
    complete = list_complete(manifest, 0, [Action(0, Kind("B"), 0)])
    sums = GradientSums(manifest, connection, complete, ())
    leaf = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    sums.leaves = StageLeaves({0: {"weight": leaf}})
    sums.attach(sums.leaves, frozenset(["weight"]))
    sums.start((), measured)
    for _ in range(257):  # in bfloat16 the sum would stop growing at 256
        leaf.sum().backward()
    sums.end_stage(0)
    sums.finish()
    (found,) = read_gradients(sums.take(), ["weight"])
    assert found is not None
    assert found.dtype is torch.float32
    assert found.item() == 257


def test_gradients_are_whole_after_the_last_stage_that_uses_them() -> None:
    manifest = manifest_of((1, 1, 1), Parameter("shared", (1,), torch.float32))
    first = manifest.stages[0]
    manifest = replace(
        manifest,
        stages=(first, replace(first, index=1, parameters=("shared", "own"))),
        parameters={**manifest.parameters, "own": Parameter("own", (1,), torch.float32)},
    )
    actions = [Action(1, Kind("B"), 0), Action(0, Kind("B"), 0)]
    complete = list_complete(manifest, 0, actions)
    assert complete == {0: ("shared",), 1: ("own",)}


def test_gradients_of_parameters_on_several_stages_are_late() -> None:
    chain = Chain((1, 2, 1), tied=True)
    complete = list_complete(chain.manifest, 0, chain.schedule[0])
    assert complete[0, 1] == ("scale",)
    assert "scale" not in complete[0]


def test_buffers_are_neither_late_nor_summed() -> None:
    """As of rotary embeddings, which every stage has."""
    manifest = manifest_of((1, 2, 1), Parameter("frequencies", (2,), torch.float32, kind="buffer"))
    assert list_complete(manifest, 0, [Action(0, Kind("B"), 0)]) == {}
