"""Channels: first in first out, sends that never wait, both ends counted, and no hang."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from autoptd.runtime.comm.point_to_point import Channel, ThreadChannel, neighbours, process_channels, thread_channels
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.mesh import Mesh
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_neighbours_are_the_pipelines_and_its_two_ends() -> None:
    assert neighbours(Mesh(1, 1, 4)) == []
    assert neighbours(Mesh(1, 2, 1)) == [(0, 1), (1, 0)]
    assert neighbours(Mesh(2, 3, 1)) == sorted(
        pair
        for line in ([0, 2, 4], [1, 3, 5])
        for a, b in ((line[0], line[1]), (line[1], line[2]), (line[2], line[0]))
        for pair in ((a, b), (b, a))
    )


def both_ways(channels: Any, me: int) -> Any:
    """All send everything before anyone receives; then every tensor arrives in order."""
    out: Channel = channels[me, 1 - me]
    back: Channel = channels[1 - me, me]
    for number in range(20):
        out.send(torch.full((1000 + number,), me * 100 + number))
    pending = [back.receive((1000 + number,), torch.int64, CPU) for number in range(20)]
    arrived = [int(p.wait().unique()) for p in pending]
    out.release()
    return arrived


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_messages_arrive_in_order_both_ways(kind: str) -> None:
    mesh = Mesh(1, 2, 1)
    if kind == "threads":
        world = ThreadWorld()
        shared = thread_channels(mesh, world)
        results = world.run(lambda me: both_ways(shared, me), [0, 1])
    else:
        results = run_ranks(lambda me: both_ways(process_channels(mesh, CPU), me), 2)
    for me, arrived in enumerate(results):
        assert arrived == [(1 - me) * 100 + number for number in range(20)]


def test_a_thread_that_receives_what_nobody_sends_is_a_deadlock() -> None:
    world = ThreadWorld()
    channel = ThreadChannel(world, "channel 0 -> 1")

    def work(me: int) -> None:
        if me == 1:
            channel.receive((2,), torch.float32, CPU).wait()

    with pytest.raises(RuntimeError, match=r"deadlock.*receive 0 on channel 0 -> 1 of torch.float32\[2\]"):
        world.run(work, [0, 1])


def test_ends_that_disagree_are_named() -> None:
    world = ThreadWorld()
    channel = ThreadChannel(world, "channel 0 -> 1")

    def work(me: int) -> None:
        if me == 0:
            channel.send(torch.ones(3))
        else:
            channel.receive((2,), torch.float32, CPU).wait()

    with pytest.raises(RuntimeError, match=r"receive 0 on channel 0 -> 1 .*\[2\] met a send of torch.float32\[3\]"):
        world.run(work, [0, 1])


def test_a_tensor_may_change_after_it_was_sent() -> None:
    world = ThreadWorld()
    channel = ThreadChannel(world, "channel 0 -> 1")

    def work(me: int) -> float:
        if me == 0:
            x = torch.ones(3)
            channel.send(x)
            channel.release()
            x.zero_()
            return 0.0
        return float(channel.receive((3,), torch.float32, CPU).wait().sum())

    assert world.run(work, [0, 1]) == [0.0, 3.0]


def test_send_buffers_are_held_until_they_are_released() -> None:
    """Gloo does not say when a message has left."""

    def work(rank: int) -> tuple[bool, bool]:
        channels = process_channels(Mesh(1, 2, 1), CPU)
        out, back = channels[rank, 1 - rank], channels[1 - rank, rank]
        if rank == 1:
            back.receive((1000,), torch.float32, CPU).wait()
        x = torch.ones(1000)
        storage = weakref.ref(x.untyped_storage())
        out.send(x)
        del x
        held = storage() is not None
        if rank == 0:
            back.receive((1000,), torch.float32, CPU).wait()
        out.release()
        return held, storage() is None

    assert run_ranks(work, 2) == [(True, True), (True, True)]


def test_a_pipeline_of_four_has_two_neighbours_each() -> None:
    mesh = Mesh(1, 4, 1)

    def pass_on(rank: int) -> list[int]:
        channels = process_channels(mesh, CPU)
        following, before = (rank + 1) % 4, (rank - 1) % 4
        channels[rank, following].send(torch.tensor(rank))
        channels[rank, before].send(torch.tensor(10 + rank))
        pending = [channels[peer, rank].receive((), torch.int64, CPU) for peer in (before, following)]
        received = [int(x.wait()) for x in pending]
        for peer in (before, following):
            channels[rank, peer].release()
        return received

    assert run_ranks(pass_on, 4) == [[(rank - 1) % 4, 10 + (rank + 1) % 4] for rank in range(4)]
