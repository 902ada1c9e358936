"""Point-to-point through shared memory: any tensor, in order, however far one is ahead, and no hang at an end."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoptd.runtime import shared_channel
from autoptd.runtime.channel import process_channels
from autoptd.runtime.mesh import Mesh
from autoptd.runtime.shared_channel import MOST_IDLE, Blocks, Pages, SharedChannel, share_channels
from tests.ranks import leave_machine, run_ranks

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE


def make_line(rank: int) -> SharedChannel:
    return share_channels([1 - rank], CPU)[1 - rank]


def receive(line: SharedChannel, like: torch.Tensor) -> torch.Tensor:
    return line.receive(like.shape, like.dtype, CPU).wait()


def make_blocks() -> Blocks:
    return Blocks(Pages(os.memfd_create("autoptd")))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_any_tensor_crosses_as_it_is() -> None:
    def cross(rank: int) -> bool:
        line = make_line(rank)
        torch.manual_seed(0)
        whole = torch.randn(6, 50, dtype=torch.complex128)
        sent: list[torch.Tensor] = [
            torch.tensor(3.5),
            torch.empty(0, 4),
            torch.arange(12).view(3, 4).t(),
            torch.arange(10)[::3],
            torch.ones(1, 3).expand(5, 3),
            torch.ones(2, dtype=torch.bool),
            torch.randn(3).to(torch.float8_e4m3fn),
            torch.randn(7, dtype=torch.bfloat16),
            whole,
            whole.conj(),
            whole.conj().imag,
            torch.randn(3, requires_grad=True),
            torch.randn(3 * 2**20),
        ]
        with torch.inference_mode():
            sent.append(torch.ones(3))
        if rank == 0:
            for x in sent:
                line.send(x)
            return True
        return all(same_bits(receive(line, x), x) for x in sent)

    assert run_ranks(cross, 2) == [True, True]


def same_bits(found: torch.Tensor, x: torch.Tensor) -> bool:
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    same = found.view(-1).view(torch.uint8).tolist() == x.view(-1).view(torch.uint8).tolist()
    return same and found.dtype == x.dtype and found.shape == x.shape and not found.requires_grad


def test_what_was_sent_may_change_and_what_arrived_is_its_own() -> None:
    def change(rank: int) -> list[list[float]]:
        line = make_line(rank)
        x = torch.zeros(3)
        kept = []
        for turn in range(4):
            if rank == 0:
                line.send(x.fill_(turn))
                x.fill_(-1)
            else:
                kept.append(receive(line, x))
            dist.barrier()  # the block is free, and taken again
        return [y.tolist() for y in kept]

    assert run_ranks(change, 2)[1] == [[turn] * 3 for turn in map(float, range(4))]


def test_who_is_far_ahead_waits_for_nobody() -> None:
    """More signals than a pipe holds, from both at once: neither has read when it writes."""
    count = 5000

    def run_ahead(rank: int) -> bool:
        line = make_line(rank)
        for number in range(count):
            line.send(torch.full((3,), number))
        return all(receive(line, torch.full((3,), n)).tolist() == [n] * 3 for n in range(count))

    assert run_ranks(run_ahead, 2) == [True, True]


def test_receives_may_be_waited_for_in_any_order() -> None:
    def reorder(rank: int) -> list[float]:
        line = make_line(rank)
        for number in range(6):
            line.send(torch.tensor(float(number)))
        pending = [line.receive((), torch.float32, CPU) for _ in range(6)]
        return [pending[number].wait().item() for number in (5, 0, 3, 1, 4, 2)]

    assert run_ranks(reorder, 2) == [[5.0, 0.0, 3.0, 1.0, 4.0, 2.0]] * 2


def test_few_blocks_serve_many_messages() -> None:
    def repeat(rank: int) -> int:
        line = make_line(rank)
        for size in [1000, 3000, 2000] * 50:
            x = torch.ones(size)
            line.send(x)
            receive(line, x)
        return line.own._size

    assert run_ranks(repeat, 2) == [shared_channel.LEAST_REGION] * 2


def test_regions_double_and_a_file_is_open_for_each() -> None:
    gc.collect()
    before = open_files()
    blocks = make_blocks()
    taken = [blocks.take(100 * PAGE) for _ in range(200)]
    for number, block in enumerate(taken):
        blocks.pages.show(block, 100 * PAGE, torch.uint8).fill_(number)
    assert open_files() - before <= 10
    assert [int(blocks.pages.show(b, 100 * PAGE, torch.uint8).unique()) for b in taken] == list(range(200))
    assert blocks.take(2**28).capacity == 2**28
    del blocks
    gc.collect()
    assert open_files() == before


@pytest.mark.parametrize("sizes", [[5 * PAGE, 3 * PAGE, 9 * PAGE], [9 * PAGE, 3 * PAGE, 5 * PAGE]])
def test_the_smallest_that_holds_it_is_taken(sizes: Sequence[int]) -> None:
    blocks = make_blocks()
    made = {size: blocks.take(size) for size in sizes}
    for block in made.values():
        blocks.give(block)
    assert blocks.take(4 * PAGE + 1) == made[5 * PAGE]
    assert blocks.take(1) == made[3 * PAGE]
    assert blocks.take(0) == made[9 * PAGE]
    assert blocks.take(0) not in made.values()


def test_what_nobody_needs_goes_back_to_the_system() -> None:
    """After an evaluation in which one was far ahead of the other."""
    blocks, size = make_blocks(), MOST_IDLE // 4

    def fill(count: int) -> list[Any]:
        taken = [blocks.take(size) for _ in range(count)]
        for number, block in enumerate(taken):
            blocks.pages.show(block, size, torch.uint8).fill_(1 + number)
        assert [int(blocks.pages.show(b, size, torch.uint8)[-1]) for b in taken] == list(range(1, 1 + count))
        return taken

    for block in fill(10):
        blocks.give(block)
    assert blocks.pages.count_held() == MOST_IDLE
    for block in fill(4):  # first those that are still there
        blocks.give(block)
    assert blocks.pages.count_held() == MOST_IDLE
    again = fill(10)
    assert blocks.pages.count_held() == 10 * size
    for block in again:
        blocks.give(block)
    assert blocks.pages.count_held() == blocks._idle == MOST_IDLE


def test_ends_that_disagree_are_named() -> None:
    def disagree(rank: int) -> str:
        line = make_line(rank)
        if rank == 0:
            line.send(torch.ones(3))
            return ""
        with pytest.raises(RuntimeError) as caught:
            receive(line, torch.ones(2, dtype=torch.float64))
        return str(caught.value)

    assert run_ranks(disagree, 2)[1] == (
        "receive 0 from rank 0 of torch.float64[2], 16 bytes, met a send of float32, 12 bytes: the two ends "
        "disagree on their order"
    )


@pytest.mark.parametrize("action", ["send", "receive"])
def test_a_rank_that_has_ended_is_named(action: str) -> None:
    def end(rank: int) -> str:
        line = make_line(rank)
        if rank == 1:
            del line  # as its process's end does: the pipes close
            gc.collect()
        dist.barrier()
        if rank == 1:
            return ""
        with pytest.raises(RuntimeError) as caught:
            line.send(torch.ones(2)) if action == "send" else receive(line, torch.ones(2))
        return str(caught.value)

    assert run_ranks(end, 2)[0] == "ranks [1] have ended, or failed before this"


def test_what_was_sent_before_the_end_arrives() -> None:
    """The last stage of a job that is over need not wait for an answer, nor for who takes it."""

    def end(rank: int) -> list[float]:
        line = make_line(rank)
        if rank == 0:
            line.send(torch.ones(2))
            line.send(torch.zeros(2))
            del line
            gc.collect()
        dist.barrier()
        return [] if rank == 0 else [receive(line, torch.ones(2)).mean().item() for _ in range(2)]

    assert run_ranks(end, 2)[1] == [1.0, 0.0]


def test_a_forked_child_passes_nothing_and_holds_nothing_open() -> None:
    """A data loader's worker that outlives its rank; or the other would never learn that this has ended."""

    def fork(rank: int) -> Any:
        line = make_line(rank)
        if rank == 1:
            dist.barrier()
            with pytest.raises(RuntimeError) as caught:
                receive(line, torch.ones(1))
            dist.barrier()  # only now the child may end
            return str(caught.value)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                line.send(torch.ones(1))
            except RuntimeError as error:
                os.read(reading, 1)
                os._exit(7 if "this process was forked from one that did" in str(error) else 1)
            os._exit(2)
        del line
        gc.collect()
        dist.barrier()
        dist.barrier()
        os.write(writing, b"0")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_ranks(fork, 2, timeout=20) == [7, "ranks [0] have ended, or failed before this"]


def test_a_line_of_four_has_two_neighbours_each() -> None:
    mesh = Mesh(1, 4, 1)

    def pass_on(rank: int) -> Any:
        channels = process_channels(mesh, CPU)
        following, before = (rank + 1) % 4, (rank - 1) % 4
        channels[rank, following].send(torch.tensor(rank))
        channels[rank, before].send(torch.tensor(10 + rank))
        heard = [channels[peer, rank].receive((), torch.int64, CPU).wait() for peer in (before, following)]
        return [int(x) for x in heard], {type(channel).__name__ for channel in channels.values()}

    expected = [([(rank - 1) % 4, 10 + (rank + 1) % 4], {"SharedChannel"}) for rank in range(4)]
    assert run_ranks(pass_on, 4) == expected


def test_neighbours_on_two_machines_pass_messages() -> None:
    """Ranks 0 and 1 on one, 2 and 3 on another."""
    mesh = Mesh(1, 4, 1)

    def pass_on(rank: int) -> Any:
        leave_machine(rank // 2)
        channels = process_channels(mesh, CPU)
        following, before = (rank + 1) % 4, (rank - 1) % 4
        channels[rank, following].send(torch.tensor(rank))
        heard = int(channels[before, rank].receive((), torch.int64, CPU).wait())
        channels[rank, following].flush()
        return heard, type(channels[rank, following]).__name__

    kinds = ["SharedChannel", "ProcessChannel"] * 2
    assert run_ranks(pass_on, 4) == [((rank - 1) % 4, kinds[rank]) for rank in range(4)]


@pytest.mark.parametrize(
    ("function", "allowed"), [("open", 0), ("open", 2), ("open", 3), ("pipe", 1), ("memfd_create", 0)]
)
def test_who_may_not_has_messages_and_leaves_nothing_open(function: str, allowed: int) -> None:
    """Of three, with rank 1 only: it may have opened what is rank 0's."""

    def meet(rank: int) -> Any:
        kept, calls = getattr(os, function), [0]

        def refuse(*words: Any) -> Any:
            calls[0] += function != "open" or str(words[0]).startswith("/proc")
            if calls[0] > allowed:
                raise PermissionError(1, "not allowed")
            return kept(*words)

        if rank == 1:
            setattr(os, function, refuse)
        before = open_files()
        channels = share_channels([peer for peer in range(3) if peer != rank], CPU)
        return sorted(channels), open_files() - before

    met = [[1, 2], [0], [0]] if allowed >= 2 else [[2], [], [0]]
    assert run_ranks(meet, 3) == [(peers, 3 * len(peers) + bool(peers)) for peers in met]


def test_nothing_is_left_behind() -> None:
    def count(rank: int) -> Any:
        counts = []
        for _ in range(3):
            line = make_line(rank)
            line.send(torch.ones(2))
            receive(line, torch.ones(2))
            dist.barrier()
            del line
            gc.collect()
            counts.append(open_files())
        return counts

    for counts in run_ranks(count, 2):
        assert len(set(counts)) == 1
