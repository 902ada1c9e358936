"""Joining the ranks: the right number of them, all with one program; a mesh of one needs nobody."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from autoptd.runtime.comm.connection import check_world_size, connect
from autoptd.runtime.comm.groups import ProcessGroup
from autoptd.runtime.program.mesh import Mesh
from tests.ranks import run_ranks
from tests.runtime.chain import ROWS, WIDTH, Chain

CPU = torch.device("cpu")


def test_mesh_of_one_needs_no_launcher() -> None:
    manifest = replace(Chain((1, 1, 1)).manifest, seed=7)
    connection = connect(manifest, CPU, "text")
    assert not dist.is_initialized()
    assert connection.rank.randomness.seed == 7
    assert not connection.channels


def test_world_size_must_be_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    message = (
        "WORLD_SIZE is 6, but mesh tensor=2 pipeline=2 data=2 is a program for 8 ranks: start 8 processes "
        "with torchrun, or compile for a mesh of 6"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check_world_size(Mesh(2, 2, 2))


def test_world_size_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="WORLD_SIZE is 4"):
        connect(Chain((1, 2, 1)).manifest, CPU, "text")
    assert not dist.is_initialized()


def test_ranks_with_another_program_are_named() -> None:
    manifest = Chain((1, 3, 1), "gpipe", 1, 1).manifest

    def body(rank: int) -> str:
        try:
            connect(manifest, CPU, "edited" if rank == 2 else "text")
        except RuntimeError as error:
            return str(error)
        return "connected"

    assert all(said.startswith("ranks [2] of 3 have another program") for said in run_ranks(body, 3))


def test_groups_and_channels_follow_a_reordered_mesh() -> None:
    chain = Chain((2, 2, 1), "1f1b", 1, 1, tied=True)
    manifest = replace(chain.manifest, mesh=Mesh(**chain.mesh.axes, ranks=(0, 2, 1, 3)))

    def body(rank: int) -> tuple[object, ...]:
        connection = connect(manifest, CPU, "text")
        tied = connection.tied[0, 1].all_gather(torch.tensor(rank))
        at = connection.rank.coordinates
        own, peer = at.pipeline, 1 - at.pipeline
        there, back = connection.channels[own, peer], connection.channels[peer, own]
        there.send(torch.tensor([rank]))
        heard = back.receive((1,), torch.int64, CPU).wait()
        there.release()
        return tuple(at.values()), [int(x) for x in tied], int(heard)

    assert run_ranks(body, 4) == [
        ((0, 0, 0), [0, 1], 1),
        ((0, 1, 0), [0, 1], 0),
        ((0, 0, 1), [2, 3], 3),
        ((0, 1, 1), [2, 3], 2),
    ]


def test_groups_are_opened_once() -> None:
    """Each is some files and threads, which torch keeps until the process ends."""
    chain = Chain((2, 2, 1), "1f1b", 1, 2, tied=True)

    def body(rank: int) -> list[tuple[int, int]]:
        counts = []
        for _ in range(5):
            parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
            parallel(**chain.batch())["loss"].backward()
            del parallel
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        return counts

    for counts in run_ranks(body, 4):
        assert len(set(counts[1:])) == 1, counts


def test_a_message_that_was_left_is_nobodys() -> None:
    """Though gloo's channels have no groups of their own."""
    chain = Chain((1, 2, 1), "1f1b", 1, 2)

    def body(rank: int) -> float:
        connection = connect(chain.manifest, CPU, "text")
        if rank == 0:
            connection.channels[0, 1].send(torch.full((ROWS, WIDTH), 7.0, dtype=chain.dtype))
        with pytest.raises(KeyboardInterrupt), connection.exchange():
            raise KeyboardInterrupt
        for _ in range(2):  # the second has the first one's groups
            parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
            loss: float = parallel(**chain.batch())["loss"].item()
        return loss

    expected, _ = chain.plain(chain.weights(), chain.batch())
    assert run_ranks(body, 2) == [pytest.approx(expected.item(), rel=1e-12)] * 2


def test_groups_that_may_have_messages_in_them_are_left() -> None:
    """By all ranks, and by all who share them, though one rank alone broke off."""
    chain = Chain((2, 2, 1), "1f1b", 1, 2)

    def body(rank: int) -> list[int]:
        first, second = (connect(chain.manifest, CPU, "text") for _ in range(2))
        connections = [first, second]
        if rank == 1:
            with pytest.raises(KeyboardInterrupt), first.exchange():
                raise KeyboardInterrupt
            with pytest.raises(RuntimeError, match="begin again in new processes"):
                chain.parallel(second)(**chain.batch())
        connections += [connect(chain.manifest, CPU, "text") for _ in range(2)]
        pipelines = [connection.rank.group("pipeline") for connection in connections]
        groups = [group.group for group in pipelines if isinstance(group, ProcessGroup)]
        return [groups.index(group) for group in groups]

    assert run_ranks(body, 4) == [[0, 0, 2, 2]] * 4
