"""Ranks of one machine meet in memory: the same bits as by messages, in order, and no hang when one has ended."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoptd.runtime.communicator import ProcessGroup, Reduction
from autoptd.runtime.shared_memory import SLOT_BYTES, SharedMemory, share_memory
from tests.ranks import run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64]


CPU = torch.device("cpu")


def make_group(shared: bool = True) -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    group = ProcessGroup(world, CPU)
    assert isinstance(group._memory, SharedMemory)
    if not shared:
        group._memory = None
    return group


def sum_often(group: ProcessGroup) -> None:
    for _ in range(3):
        group.all_reduce(torch.ones(2))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_maxima_are_those_of_messages(size: int) -> None:
    shapes = [(), (0,), (1,), (3, 5), (SLOT_BYTES // 8,), (SLOT_BYTES // 8 + 1,), (5, SLOT_BYTES // 8)]

    def reduce(rank: int) -> Any:
        torch.manual_seed(rank)
        groups = make_group(), make_group(shared=False)
        for dtype in DTYPES:
            for shape in shapes:
                x = (100 * torch.randn(shape)).to(dtype)
                kinds: tuple[Reduction, ...] = ("sum",) if dtype.is_complex else ("sum", "max")
                for kind in kinds:
                    ours, theirs = (group.all_reduce(x.clone(), kind) for group in groups)
                    assert ours.shape == x.shape
                    if size == 2 or kind == "max" or not (dtype.is_floating_point or dtype.is_complex):
                        assert torch.equal(ours, theirs)
                    first = groups[1].broadcast(ours.clone(), 0)
                    assert torch.equal(ours, first)
                ours, theirs = (group.post_all_reduce(x.clone()).wait() for group in groups)
                rtol, atol = (0.02, 4.0) if dtype.itemsize == 2 else (1e-5, 1e-3)
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
                gathered = zip(*(group.all_gather(x) for group in groups), strict=True)
                assert all(torch.equal(one, other) for one, other in gathered)
        assert groups[0].counts["all_reduce"] == groups[1].counts["all_reduce"]

    run_ranks(reduce, size)


def test_a_result_outlives_the_slots() -> None:
    def gather(rank: int) -> Any:
        group = make_group()
        kept = [group.all_gather(torch.full((3,), 10.0 * turn + rank)) for turn in range(5)]
        return [[x[0].item() for x in turn] for turn in kept]

    for kept in run_ranks(gather, 2):
        assert kept == [[10.0 * turn, 10.0 * turn + 1] for turn in range(5)]


def test_what_is_posted_and_not_awaited_is_not_lost() -> None:
    def post(rank: int) -> Any:
        group = make_group()
        posted = [group.post_all_reduce(torch.full((4,), float(turn + rank))) for turn in range(6)]
        return [x.wait()[0].item() for x in reversed(posted)]

    assert run_ranks(post, 2) == [[11.0, 9.0, 7.0, 5.0, 3.0, 1.0]] * 2


def test_what_is_not_contiguous_is_summed_whole() -> None:
    def reduce(rank: int) -> Any:
        x = torch.arange(6.0).view(2, 3).t() * (rank + 1)
        group = make_group()
        return group.all_reduce(x), group.all_gather(x)[1]

    for total, second in run_ranks(reduce, 2):
        assert torch.equal(total, 3 * torch.arange(6.0).view(2, 3).t())
        assert torch.equal(second, 2 * torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            lambda group: group.all_reduce(torch.ones(3)),
            "8 bytes met rank 1's sum torch.float32 of 12",
        ),
        (lambda group: group.all_reduce(torch.ones(2), "max"), "of 8 bytes met rank 1's max"),
        (lambda group: group.all_gather(torch.ones(2)), "of 8 bytes met rank 1's all_gather"),
        (lambda group: group.all_reduce(torch.ones(2, dtype=torch.int32)), "met rank 1's sum torch.int32"),
    ],
)
def test_different_calls_are_refused(other: Any, words: str) -> None:
    def differ(rank: int) -> str:
        group = make_group()
        with pytest.raises(RuntimeError, match="the ranks disagree on their order") as caught:
            (lambda group: group.all_reduce(torch.ones(2)))(group) if rank == 0 else other(group)
        return str(caught.value)

    first, _ = run_ranks(differ, 2)
    with pytest.raises(RuntimeError, match=words):
        raise RuntimeError(first)


def test_a_rank_that_has_ended_is_named() -> None:
    def end(rank: int) -> None:
        group = make_group()
        dist.barrier()
        if rank == 2:
            del group  # as its process's end does: the pipes close
            return
        with pytest.raises(RuntimeError, match=r"the process of rank [12] has ended"):
            sum_often(group)

    run_ranks(end, 3)


def test_other_machines_and_other_backends_get_none(tmp_path: Path) -> None:
    def meet(rank: int) -> Any:
        tempfile.tempdir = str(tmp_path / str(rank))  # as on another machine
        before = open_files()
        memory = share_memory(dist.group.WORLD, CPU)  # type: ignore[arg-type]
        alone = dist.new_group([rank], use_local_synchronization=True)
        return memory, share_memory(alone, CPU), open_files() - before

    for memory, alone, left in run_ranks(meet, 2):
        assert memory is None
        assert alone is None
        assert left < 10  # the new group's own


def test_no_file_is_left_open(tmp_path: Path) -> None:
    def count(rank: int) -> list[int]:
        counts = []
        for _ in range(3):
            group = make_group()
            group.all_reduce(torch.ones(2))
            del group
            counts.append(open_files())
            dist.barrier()
        return counts

    for counts in run_ranks(count, 2):
        assert len(set(counts)) == 1
