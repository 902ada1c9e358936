"""Ranks of one machine meet in memory: the same bits as by messages, in order, and no hang when one has ended."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoptd.runtime.comm import shared_files, shared_memory
from autoptd.runtime.comm.groups import ProcessGroup, Reduction
from autoptd.runtime.comm.shared_memory import MOST_RANKS, SLOT_BYTES, SharedMemory, share_memory
from autoptd.runtime.health import local_ranks
from tests.ranks import leave_machine, run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64]
CPU = torch.device("cpu")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def make_group(shared: bool = True) -> ProcessGroup:
    group = ProcessGroup(world(), CPU)
    assert isinstance(group._memory, SharedMemory)
    if not shared:
        group._memory = None
    return group


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_maxima_are_those_of_messages(size: int) -> None:
    shapes = [(), (0,), (1,), (3, 5), (SLOT_BYTES // 8,), (SLOT_BYTES // 8 + 1,)]

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
                ours, theirs = (group.post_all_reduce([x.clone()]).wait()[0] for group in groups)
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


def test_a_slot_is_kept_until_all_have_taken_it() -> None:
    """Rank 0 is an exchange ahead of rank 1, which has not yet looked at the one before."""

    def run_ahead(rank: int) -> Any:
        group = make_group()
        first = group.post_all_reduce([torch.full((4,), 1.0 + rank)])
        if rank == 0:
            first.wait()
            second = group.post_all_reduce([torch.full((4,), 10.0)])
            dist.barrier()
        else:
            dist.barrier()
            first.wait()
            second = group.post_all_reduce([torch.full((4,), 20.0)])
        return first.wait()[0][0].item(), second.wait()[0][0].item()

    assert run_ranks(run_ahead, 2) == [(3.0, 30.0)] * 2


def test_what_is_posted_and_not_awaited_is_not_lost() -> None:
    def post(rank: int) -> Any:
        group = make_group()
        posted = [group.post_all_reduce([torch.full((4,), float(turn + rank))]) for turn in range(6)]
        return [x.wait()[0][0].item() for x in reversed(posted)]

    assert run_ranks(post, 2) == [[11.0, 9.0, 7.0, 5.0, 3.0, 1.0]] * 2


def test_what_is_not_contiguous_is_summed_whole() -> None:
    def reduce(rank: int) -> Any:
        x = torch.arange(6.0).view(2, 3).t() * (rank + 1)
        group = make_group()
        return group.all_reduce(x), group.all_gather(x)[1]

    for total, second in run_ranks(reduce, 2):
        assert torch.equal(total, 3 * torch.arange(6.0).view(2, 3).t())
        assert torch.equal(second, 2 * torch.arange(6.0).view(2, 3).t())


def test_the_order_of_waits_does_not_matter() -> None:
    """More than a group promises: what is posted in one order meets in that order."""

    def post(rank: int) -> Any:
        group = make_group()
        first, second, third = (
            group.post_all_reduce([torch.full((4,), 10.0**i * (rank + 1))]) for i in range(3)
        )
        waits = [first, second, third] if rank == 0 else [third, first, second]
        for posted in waits[:2]:
            posted.wait()
        gathered = group.all_gather(torch.tensor([float(rank)]))  # before rank 0 has waited for the third
        again = [posted.wait()[0][0].item() for posted in (first, second, third, first)]
        return again, [x.item() for x in gathered]

    assert run_ranks(post, 2) == [([3.0, 30.0, 300.0, 3.0], [0.0, 1.0])] * 2


def test_who_leaves_out_a_wait_changes_no_sum() -> None:
    def leave(rank: int) -> Any:
        group = make_group()
        first = group.post_all_reduce([torch.full((2,), 1.0 + rank)])
        if rank == 0:
            first.wait()
        second = group.all_reduce(torch.full((2,), 10.0 + rank))
        return first.wait()[0][0].item(), second[0].item()

    assert run_ranks(leave, 2) == [(3.0, 21.0)] * 2


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_many_slots_keep_their_order(size: int, dtype: torch.dtype) -> None:
    """Posted, while small ones of the same group are done at once, and waited for in any order."""
    width = 3 * SLOT_BYTES // dtype.itemsize + 5

    def reduce(rank: int) -> Any:
        group = make_group()
        values = [torch.arange(width, dtype=torch.float32).remainder(7 + k).to(dtype) for k in range(3)]
        posted = [group.post_all_reduce([(rank + 1) * value]) for value in values]
        assert group.all_reduce(torch.ones(2)).tolist() == [size, size]
        assert [int(x) for x in group.all_gather(torch.tensor(rank))] == list(range(size))
        order = (2, 0, 1) if rank else (0, 1, 2)
        found = {k: posted[k].wait() for k in order}
        ranks = size * (size + 1) // 2
        return all(torch.equal(found[k][0], ranks * value) for k, value in enumerate(values))

    assert run_ranks(reduce, size) == [True] * size


@pytest.mark.parametrize(("size", "shared"), [(2, True), (3, True), (MOST_RANKS, True), (2, False)])
def test_tensors_share_slots_and_go_over_their_ends(size: int, shared: bool) -> None:
    """Or, without memory, are one message."""
    most = SLOT_BYTES // 8
    counts = [3, 0, most - 3, 1, most, 2 * most + 1, 0, most - 1, most, 7]

    def reduce(rank: int) -> list[bool]:
        group = make_group(shared)
        values = [torch.arange(n).double() + i for i, n in enumerate(counts)]
        values += [torch.tensor(5.0).double(), torch.arange(12.0).double().view(3, 4).t()]
        given = [(rank + 1) * value for value in values]
        found = group.post_all_reduce(given).wait()
        assert group.counts["all_reduce"] == 1
        assert group.elements["all_reduce"] == sum(x.numel() for x in values)
        times = size * (size + 1) // 2
        same = all(torch.equal(x, times * value) for x, value in zip(found, values, strict=True))
        nothing = group.post_all_reduce([torch.zeros(0)]).wait()
        return [same, (found[0] is given[0]) is shared, nothing[0].shape == (0,)]

    assert run_ranks(reduce, size) == [[True] * 3] * size


def test_sums_of_other_numbers_of_slots_are_refused() -> None:
    """Their parts are alike: without the size of the whole one's third would meet the other's next first."""

    def differ(rank: int) -> tuple[str, int, bool]:
        group = make_group()
        slots = 2 + rank
        x = torch.ones(slots * SLOT_BYTES // 4)
        freed = weakref.ref(x)
        with pytest.raises(RuntimeError) as caught:
            group.all_reduce(x)
        del x
        with pytest.raises(RuntimeError, match="share no memory any more"):
            group.all_reduce(torch.ones(3 * SLOT_BYTES // 4))
        said = str(caught.value)
        del caught
        assert group._memory is not None
        return said, len(group._memory._posted), freed() is None

    (first, *left), (_, *others) = run_ranks(differ, 2)
    assert f"sum of torch.float32, {2 * SLOT_BYTES} bytes, as exchange 1 met rank 1's" in first
    assert f"{3 * SLOT_BYTES} bytes" in first
    assert left == others == [0, True]


OTHER_CALLS = {
    "sum of torch.float32, 12 bytes": lambda group: group.all_reduce(torch.ones(3)),
    "max of torch.float32, 8 bytes": lambda group: group.all_reduce(torch.ones(2), "max"),
    "all_gather of torch.float32, 8 bytes": lambda group: group.all_gather(torch.ones(2)),
    "sum of torch.int32, 8 bytes": lambda group: group.all_reduce(torch.ones(2, dtype=torch.int32)),
}


@pytest.mark.parametrize("words", OTHER_CALLS)
def test_different_calls_are_refused_and_nothing_goes_on(words: str) -> None:
    def differ(rank: int) -> list[str]:
        group, said = make_group(), []
        for call in (OTHER_CALLS[words] if rank else sum_once, sum_once):
            with pytest.raises(RuntimeError) as caught:
                call(group)
            said.append(str(caught.value))
        return said

    first, _ = run_ranks(differ, 2)
    assert f"met rank 1's {words}" in first[0]
    assert first[1].startswith("ranks share no memory any more: an exchange before failed")


def test_a_rank_that_has_ended_is_named() -> None:
    def end(rank: int) -> str:
        group = make_group()
        if rank == 2:
            del group  # as its process's end does: the pipes close
        dist.barrier()
        if rank == 2:
            return ""
        with pytest.raises(RuntimeError, match="have ended, or failed") as caught:
            sum_once(group)
        return str(caught.value)

    first, second, _ = run_ranks(end, 3)
    assert all("2" in said for said in (first, second))


def test_a_rank_that_ends_amid_the_parts_of_a_sum_is_named() -> None:
    def end(rank: int) -> str:
        group = make_group()
        x = torch.ones(4 * SLOT_BYTES // 4)
        posted = group.post_all_reduce([x])
        assert group._memory is not None
        dist.barrier()
        if rank == 1:
            group._memory._run_first()
            del posted, group  # as its process's end does: the pipes close
            gc.collect()
        dist.barrier()
        if rank == 1:
            return ""
        with pytest.raises(RuntimeError, match="have ended, or failed") as caught:
            posted.wait()
        assert group._memory is not None
        assert not group._memory._posted
        return str(caught.value)

    assert "ranks [1]" in run_ranks(end, 2)[0]


def test_a_forked_child_exchanges_nothing() -> None:
    def fork(rank: int) -> int:
        group = make_group()
        child = os.fork()
        if child == 0:
            try:
                group.all_reduce(torch.ones(2))
            except RuntimeError as error:
                os._exit(7 if "this process was forked from one that did" in str(error) else 1)
            os._exit(2)
        said = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert group.all_reduce(torch.ones(1)).item() == 2  # the parent's is whole
        return said

    assert run_ranks(fork, 2, timeout=20) == [7, 7]


def test_a_forked_child_holds_nothing_open() -> None:
    """A data loader's worker that outlives its rank; or the others would never learn that this has ended."""

    def fork(rank: int) -> str:
        group = make_group()
        if rank == 1:
            dist.barrier()
            with pytest.raises(RuntimeError) as caught:
                sum_once(group)
            dist.barrier()  # only now the child may end
            return str(caught.value)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            os._exit(0)
        del group
        dist.barrier()
        dist.barrier()
        os.write(writing, b"0")
        os.waitpid(child, 0)
        return ""

    assert "ranks [0] have ended, or failed" in run_ranks(fork, 2, timeout=20)[1]


def sum_once(group: ProcessGroup) -> None:
    group.all_reduce(torch.ones(2))


def is_shared() -> bool:
    before = open_files()
    memory = share_memory(world(), CPU)
    assert memory is not None or open_files() == before
    return memory is not None


def test_other_machines_have_messages() -> None:
    def meet(rank: int) -> bool:
        leave_machine(rank)
        return is_shared()

    assert run_ranks(meet, 2) == [False, False]


@pytest.mark.parametrize("function", ["open", "pipe", "memfd_create"])
def test_one_rank_that_may_not_leaves_all_with_messages(function: str) -> None:
    def meet(rank: int) -> Any:
        if rank == 1:
            kept = getattr(os, function)

            def refuse(*words: Any) -> Any:
                if function != "open" or str(words[0]).startswith("/proc"):
                    raise PermissionError(1, "not allowed")
                return kept(*words)

            setattr(os, function, refuse)
        return is_shared(), ProcessGroup(world(), CPU).all_reduce(torch.ones(1)).item()

    assert run_ranks(meet, 2) == [(False, 2.0)] * 2


def test_many_ranks_and_other_devices_have_messages() -> None:
    def meet(rank: int) -> Any:
        return is_shared(), share_memory(world(), torch.device("cuda"))

    assert run_ranks(meet, MOST_RANKS + 1) == [(False, None)] * (MOST_RANKS + 1)


def test_devices_without_shared_memory_are_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(rank: int) -> Any:
        monkeypatch.setattr(dist, "all_gather", lambda *_, **__: pytest.fail("a collective"))
        return share_memory(world(), torch.device("cuda"))

    assert run_ranks(meet, 2) == [None, None]


def test_who_fails_while_they_meet_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(rank: int) -> list[int]:
        whole, counts = local_ranks.gather, [open_files()]

        def fail(*words: Any) -> Any:
            whole(*words)
            raise RuntimeError("a peer died")

        for module in (shared_memory, shared_files):
            monkeypatch.setattr(module, "gather", fail)
            with pytest.raises(RuntimeError, match="a peer died"):
                share_memory(world(), CPU)
            counts.append(open_files())
            monkeypatch.undo()
        return counts

    for counts in run_ranks(meet, 2):
        assert len(set(counts)) == 1


def test_nothing_is_left_behind() -> None:
    def count(rank: int) -> Any:
        counts = []
        for _ in range(3):
            group = make_group()
            given = torch.ones(2)
            group.all_reduce(given)
            result = weakref.ref(group.post_all_reduce([torch.ones(2)]).wait()[0])
            freed = result() is None
            del group
            counts.append((open_files(), freed))
            dist.barrier()
        return counts

    for counts in run_ranks(count, 2):
        assert len(set(counts)) == 1
        assert counts[0][1]


def test_what_cannot_be_combined_is_refused_by_gloo_and_harms_nothing() -> None:
    def refuse(rank: int) -> float:
        group = make_group()
        cases: list[tuple[torch.Tensor, Reduction]] = [
            (torch.ones(2, dtype=torch.complex64), "max"),
            (torch.ones(2).to(torch.float8_e4m3fn), "sum"),
        ]
        for x, kind in cases:
            with pytest.raises((RuntimeError, ValueError)) as caught:
                group.all_reduce(x, kind)
            assert "share no memory" not in str(caught.value)
        return group.all_reduce(torch.ones(1)).item()

    assert run_ranks(refuse, 2) == [2.0, 2.0]


def test_groups_made_in_inference_mode_are_like_others() -> None:
    def make(rank: int) -> float:
        with torch.inference_mode():
            group = make_group()
            group.all_reduce(torch.ones(1))
        return group.all_reduce(torch.ones(1)).item()

    assert run_ranks(make, 2) == [2.0, 2.0]


def test_a_broken_memory_keeps_nothing() -> None:
    def break_it(rank: int) -> Any:
        group = make_group()
        held = torch.ones(2)
        freed = weakref.ref(held)
        with pytest.raises(RuntimeError):
            group.all_reduce(held, "sum" if rank else "max")
        del held
        for _ in range(3):
            with pytest.raises(RuntimeError, match="share no memory any more"):
                group.post_all_reduce([torch.ones(2)])
        assert group._memory is not None
        return len(group._memory._posted), freed() is None

    assert run_ranks(break_it, 2) == [(0, True)] * 2
