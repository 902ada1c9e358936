"""Times of works and transfers on a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Durations, Precision
from autoptd.passes.cost.work import Work, backward_work, forward_work
from autoptd.runtime import aten, collectives
from autoptd.runtime.program.mesh import Mesh
from tests.passes.cost.test_work import X, call, tensor

SELENE = Cluster.load("dgx-a100")
QUICK = replace(SELENE, device=replace(SELENE.device, launch_seconds=1e-15, tile_seconds=0.0))


def durations(tensor: int = 1, cluster: Cluster = QUICK) -> Durations:
    return Durations(cluster, Mesh(tensor, 2, 1), Precision("bf16"))


def time_node(times: Durations, node: fx.Node) -> float:
    """Nanoseconds of both directions."""
    return sum(1e9 * times.seconds(work).total for work in (forward_work(node), backward_work(node)))


def test_a_large_gemm_takes_three_times_its_forward() -> None:
    rows, columns = 12 * 256, 36 * 256  # whole waves of tiles, forward and backward
    node = call(aten.linear.default, tensor(rows, 9216), tensor(columns, 9216), result=tensor(rows, columns))
    seconds = 3 * 2 * rows * columns * 9216 / (312e12 * SELENE.device.gemm_efficiency)
    assert time_node(durations(), node) == pytest.approx(seconds * 1e9, rel=1e-3)


def test_a_pointwise_operator_takes_its_memory_traffic() -> None:
    large = tensor(2048, 8192)
    node = call(aten.gelu.default, large, result=large)
    rate = SELENE.device.memory_bandwidth * SELENE.device.memory_efficiency
    assert time_node(durations(), node) == pytest.approx(5 * large.numel() * 2 / rate * 1e9, rel=1e-3)


def test_collectives_cost_their_ring() -> None:
    large = tensor(2048, 8192)
    node = call(collectives.reduce_from_tensor, None, large, result=large)
    alone, eight = (time_node(durations(t), node) for t in (1, 8))
    assert eight - alone == pytest.approx(SELENE.all_reduce_seconds(large.numel() * 2, range(8)) * 1e9, abs=1)


def test_views_are_free_and_copies_are_not() -> None:
    times = durations(cluster=SELENE)
    assert time_node(times, call(aten.to.dtype, X, torch.bfloat16, result=X)) == 0
    assert time_node(times, call(aten.to.dtype, X, torch.float32, result=X.float())) > 0
    assert time_node(times, call(aten.transpose.int, X, 1, 2, result=X.transpose(1, 2))) == 0
    # The gradients of the parts are put together.
    assert time_node(times, call(aten.split.Tensor, X, 32, 2, result=X.split(32, 2))) > 0
    assert time_node(times, call(aten.contiguous.default, X, result=X)) > 0
    assert time_node(times, call(aten.relu.default, tensor(1), result=tensor(1))) > 0


def test_an_undivided_tensor_is_scattered_over_the_links() -> None:
    def time(divided: bool, t: int, pipeline: int = 16) -> int:
        placed = Durations(SELENE, Mesh(t, pipeline, 1), Precision("bf16"))
        return placed.of_transfer(tensor(2**24), divided=divided)

    assert time(False, 1) == time(True, 8)
    assert time(False, 8) < 0.25 * time(False, 1)
    assert time(False, 1, pipeline=8) < 0.2 * time(False, 1)  # all in one node


def test_replicas_and_experts_share_the_cards_of_their_node() -> None:
    few = replace(SELENE, nics_per_node=4)
    placed = tuple(j * 8 + i for i in range(8) for j in range(2))  # eight replicas beside each other, of two stages
    beside, apart = Mesh(1, 2, 8, ranks=placed), Mesh(1, 16, 1)
    experts = Mesh(1, 1, 32, expert=16)  # each rank sends half of its rows to another node

    def message(cluster: Cluster, mesh: Mesh) -> float:
        return Durations(cluster, mesh, Precision("bf16")).of_transfer(tensor(2**24), divided=True)

    def exchange(cluster: Cluster, mesh: Mesh) -> float:
        return Durations(cluster, mesh, Precision("bf16")).seconds(Work(dispatched=2**30)).tensor

    assert message(few, beside) == pytest.approx(2 * message(SELENE, beside), rel=2e-3)
    assert message(few, apart) == message(SELENE, apart)  # one of its eight devices sends to the next node
    across = 2**29 / SELENE.network.message_rate
    assert exchange(few, experts) - exchange(SELENE, experts) == pytest.approx(across)
    inside = 2**30 * 7 / 16 / SELENE.node.message_rate
    assert exchange(SELENE, experts) == pytest.approx(across + inside, rel=1e-3)
