"""Groups of threads and of processes: equal bits, counted calls, and no hang when a rank fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm.groups import Group, Posted, ProcessGroup, running
from autoptd.runtime.comm.rank import Rank, thread_ranks
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.mesh import Coordinates, Mesh
from tests.counting import calls, elements
from tests.ranks import run_ranks


def on_threads(mesh: Mesh, function: Callable[[Rank], Any]) -> list[Any]:
    world = ThreadWorld()
    return world.run(function, thread_ranks(mesh, world))


def on_processes(mesh: Mesh, function: Callable[[Rank], Any]) -> list[Any]:
    return run_ranks(lambda _: function(Rank.distributed(mesh)), mesh.size)


RUNNERS = pytest.mark.parametrize("run", [on_threads, on_processes])


@RUNNERS
def test_every_axis_has_its_own_group(run: Callable[..., list[Any]]) -> None:
    mesh = Mesh(2, 2, 2)

    def gather(rank: Rank) -> Any:
        me = torch.tensor([mesh.rank_of(**rank.coordinates)])
        groups = (rank.group("tensor"), rank.group("pipeline"), rank.group("data"))
        return rank.coordinates, [[int(x) for x in group.all_gather(me)] for group in groups]

    for number, (coordinates, members) in enumerate(run(mesh, gather)):
        assert coordinates == mesh.coordinates(number)
        expected = (mesh.group("tensor", number), mesh.group("pipeline", number), mesh.group("data", number))
        assert members == [list(group) for group in expected]


@RUNNERS
def test_collectives_give_equal_bits_and_are_counted(run: Callable[..., list[Any]]) -> None:
    mesh = Mesh(3, 1, 1)
    xs = [torch.randn(5, 7).t() for _ in range(3)]

    def collect(rank: Rank) -> Any:
        x = xs[rank.group("tensor").index]  # not contiguous
        total = rank.group("tensor").all_reduce(x.clone())
        largest = rank.group("tensor").all_reduce(x.clone(), "max")
        gathered = rank.group("tensor").all_gather(x)
        second = rank.group("tensor").broadcast(x.clone(), 1)
        return (
            total,
            largest,
            gathered,
            second,
            dict(calls(rank.group("tensor"))),
            dict(elements(rank.group("tensor"))),
        )

    results = run(mesh, collect)
    for total, largest, gathered, second, count, size in results:
        assert torch.equal(total, results[0][0])
        torch.testing.assert_close(total, torch.stack(xs).sum(0))
        assert torch.equal(largest, torch.stack(xs).amax(0))
        assert all(torch.equal(a, b) for a, b in zip(gathered, xs, strict=True))
        assert torch.equal(second, xs[1])
        assert count == {"all_reduce": 2, "all_gather": 1, "broadcast": 1}
        assert size == {"all_reduce": 70, "all_gather": 35, "broadcast": 35}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_gloo_reduces_every_dtype_in_use(dtype: torch.dtype) -> None:
    def reduce(rank: Rank) -> Any:
        return rank.group("tensor").all_reduce(torch.full((3,), rank.group("tensor").index + 1, dtype=dtype))

    for result in on_processes(Mesh(2, 1, 1), reduce):
        assert result.dtype == dtype
        assert result.tolist() == [3, 3, 3]


def test_gathers_take_any_dtype() -> None:
    """NCCL knows neither int16 nor unsigned integers but bytes; of these gloo does not know uint16."""

    def move(rank: Rank) -> Any:
        x = torch.full((100,), 5 + rank.group("tensor").index, dtype=torch.uint16)
        gathered = rank.group("tensor").all_gather(x)
        return (
            [x.dtype for x in gathered],
            [int(x[5]) for x in gathered],
            int(rank.group("tensor").broadcast(x, 1)[5]),
        )

    for dtypes, numbers, second in on_processes(Mesh(2, 1, 1), move):
        assert dtypes == [torch.uint16, torch.uint16]
        assert (numbers, second) == ([5, 6], 6)


def test_gathers_take_any_memory_layout() -> None:
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "strided": lambda x: x.real,
        "conjugate": lambda x: x.conj(),
        "negative": lambda x: x.conj().imag,
    }

    def gather(rank: Rank) -> list[bool]:
        start = torch.arange(100) + 1j
        given = [[kind(start * (index + 1)) for index in range(2)] for kind in kinds.values()]
        return [
            torch.equal(one, two)
            for each in given
            for one, two in zip(rank.group("tensor").all_gather(each[rank.group("tensor").index]), each, strict=True)
        ]

    assert on_processes(Mesh(2, 1, 1), gather) == [[True] * 6] * 2


@pytest.mark.parametrize(("device", "size", "calls"), [("cuda", 2, 1), ("cuda", 1, 0), ("cpu", 2, 0)])
def test_a_group_of_gpus_is_connected_when_it_is_made(
    device: str, size: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL connects at the first call, which may wait for what a peer sends once it has connected too."""
    made: list[object] = []

    def shift(own: ProcessGroup, x: object, into: object) -> Posted[None]:
        made.append(own)
        return running(None)

    monkeypatch.setattr(dist, "get_world_size", lambda group: size)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: made.append(group))
    monkeypatch.setattr(ProcessGroup, "post_shift", shift)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: [None] * sizes[0])
    group: Any = object()
    own = ProcessGroup(group, torch.device(device))
    assert made == [group, own] * calls


@RUNNERS
def test_a_ring_goes_from_each_rank_to_the_next(run: Callable[..., list[Any]]) -> None:
    """Of three: two ranks would not tell the next one from the one before."""

    def work(rank: Rank) -> list[list[float]]:
        group = rank.group("tensor")
        own = torch.tensor([float(group.index)])
        taken = group.post_shift(own, torch.empty(1)).wait()
        order, whole = [], torch.empty(3, 1)
        rank.gather_in_pieces(own, whole, lambda at: order.append(float(whole[at])))
        total = rank.scatter_in_pieces(lambda at: torch.tensor([10.0**group.index * (at + 1)]))
        return [taken.tolist(), order, whole.flatten().tolist(), total.tolist()]

    assert run(Mesh(3, 1, 1), work) == [
        [[2.0], [0.0, 2.0, 1.0], [0.0, 1.0, 2.0], [111.0]],
        [[0.0], [1.0, 0.0, 2.0], [0.0, 1.0, 2.0], [222.0]],
        [[1.0], [2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [333.0]],
    ]


def test_a_group_of_one_never_communicates() -> None:
    rank = Rank.local(Mesh(1, 1, 1))
    x = torch.ones(3)
    assert rank.group("tensor").all_reduce(x) is x
    assert rank.group("tensor").broadcast(x, 0) is x
    assert rank.group("tensor").all_gather(x)[0] is x
    assert not calls(rank.group("tensor"))


def test_a_group_without_peers_propagates_shapes() -> None:
    group = Group(4, 3)
    x = torch.ones(2, 3, device="meta")
    assert group.all_reduce(x).shape == (2, 3)
    assert [y.shape for y in group.all_gather(x)] == [(2, 3)] * 4
    assert calls(group) == {"all_reduce": 1, "all_gather": 1}
    with pytest.raises(RuntimeError, match="Group of 4 ranks, which has no peers; give it meta"):
        group.all_reduce(torch.ones(2))


def test_one_threads_failure_frees_the_others() -> None:
    def fail(rank: Rank) -> None:
        if rank.coordinates == Coordinates(0, 0, 2):
            raise KeyError("no such weight")
        rank.group("tensor").all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="no such weight") as caught:
        on_threads(Mesh(4, 1, 1), fail)
    assert caught.value.__notes__ == ["(on rank 2 of 4)"]


def test_a_missing_collective_is_a_deadlock_not_a_hang() -> None:
    def forget(rank: Rank) -> None:
        if rank.group("tensor").index != 1:
            rank.group("tensor").all_reduce(torch.ones(2))

    with pytest.raises(RuntimeError, match=r"deadlock.*tensor group \[0, 1, 2\] rank 0 of 3 in all_reduce sum"):
        on_threads(Mesh(3, 1, 1), forget)


def test_crossed_groups_are_a_deadlock_not_a_hang() -> None:
    def cross(rank: Rank) -> None:
        first, second = (
            (rank.group("tensor"), rank.group("data"))
            if rank.group("tensor").index == rank.group("data").index
            else (rank.group("data"), rank.group("tensor"))
        )
        first.all_reduce(torch.ones(1))
        second.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match="deadlock"):
        on_threads(Mesh(2, 1, 2), cross)


def test_different_collectives_at_one_meeting_are_refused() -> None:
    def differ(rank: Rank) -> None:
        rank.group("tensor").all_reduce(torch.ones(2 + rank.group("tensor").index))

    with pytest.raises(RuntimeError, match=r"rank 0: all_reduce sum of torch.float32\[2\], rank 1: .*\[3\]"):
        on_threads(Mesh(2, 1, 1), differ)


def test_threads_keep_the_callers_grad_mode() -> None:
    with torch.no_grad():
        assert on_threads(Mesh(2, 1, 1), lambda _: torch.is_grad_enabled()) == [False, False]


def test_a_failing_process_is_reported_with_its_traceback() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise KeyError("no such weight")
        time.sleep(30)

    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed(.|\n)*KeyError: 'no such weight'"):
        run_ranks(fail, 2)
    assert time.monotonic() - begin < 15


def test_a_hanging_process_is_killed_and_says_where_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    def hang(rank: int) -> None:
        time.sleep(60)

    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 did not finish"):
        run_ranks(hang, 2, timeout=3)
    assert capfd.readouterr().err.count("in hang") == 2
