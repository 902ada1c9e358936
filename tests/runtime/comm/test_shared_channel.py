"""Point-to-point through shared memory: any tensor, in order, however far one is ahead, and no hang at an end."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoptd.runtime.comm import shared_channel
from autoptd.runtime.comm.point_to_point import process_channels
from autoptd.runtime.comm.shared_channel import MOST_IDLE, Blocks, Pages, SharedChannel, share_channels
from autoptd.runtime.program.mesh import Mesh
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
        same = all(receive(line, torch.full((3,), n)).tolist() == [n] * 3 for n in range(count))
        dist.barrier()  # what the pipe has no room for yet is lost with its sender
        return same

    assert run_ranks(run_ahead, 2) == [True, True]


def test_who_takes_much_need_not_wait_for_its_answers_to_be_read() -> None:
    """The other end has gone on to something else that all do."""
    count = 3000

    def take(rank: int) -> bool:
        line = make_line(rank)
        for number in range(count):
            if rank == 0:
                line.send(torch.tensor(number))
        dist.barrier()  # all have blocks of their own
        found = [int(receive(line, torch.tensor(0))) for _ in range(count)] if rank else []
        dist.barrier()
        until = time.monotonic() + 20
        while rank == 0 and len(line.own._free.get(PAGE, ())) < count:
            assert time.monotonic() < until
            line.flush()  # takes what was answered, in parts
        dist.barrier()
        return rank == 0 or found == list(range(count))

    assert run_ranks(take, 2) == [True, True]


def test_a_third_rank_is_reached_by_who_is_far_ahead() -> None:
    """Rank 1 hears rank 2 first, which waits for rank 0, which has much to tell rank 1."""
    count = 3000

    def pass_on(rank: int) -> list[int]:
        lines, found = share_channels([peer for peer in range(3) if peer != rank], CPU), []
        if rank == 0:
            for number in range(count):
                lines[1].send(torch.tensor(number))
            lines[2].send(torch.tensor(-1))
        elif rank == 2:
            lines[1].send(receive(lines[0], torch.tensor(0)))
        else:
            found = [int(receive(lines[2], torch.tensor(0)))]
            found += [int(receive(lines[0], torch.tensor(0))) for _ in range(count)]
        dist.barrier()  # as a step ends; what has found no room is lost with who sent it
        return found

    assert run_ranks(pass_on, 3)[1] == [-1, *range(count)]


def test_a_thread_that_writes_for_who_has_ended_ends() -> None:
    def end(rank: int) -> int:
        line = make_line(rank)
        if rank == 0:
            for _ in range(3000):
                line.send(torch.tensor(1))
            dist.barrier()  # with rank 1, which ends
            dist.barrier()
            time.sleep(0.2)  # the thread has found it too
            with pytest.raises(RuntimeError, match=r"ranks \[1\] have ended"):
                line.send(torch.tensor(1))
        else:
            dist.barrier()
            del line
            gc.collect()
            dist.barrier()
        time.sleep(0.1)
        return sum("_write_late" in thread.name for thread in threading.enumerate())

    assert run_ranks(end, 2) == [0, 0]


def test_what_is_received_does_not_depend_on_the_modes_round_it() -> None:
    def cross(rank: int) -> list[float]:
        line = make_line(rank)
        for _ in range(2):
            line.send(torch.ones(3))
        with torch.device("meta"):
            first = receive(line, torch.empty(3))
        with torch.inference_mode():
            second = line.receive((3,), torch.float32, CPU)
        return [float(x.sum()) for x in (first, second.wait().requires_grad_())]

    assert run_ranks(cross, 2) == [[3.0, 3.0]] * 2


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


@pytest.mark.parametrize("sizes", [[7 * PAGE, 3 * PAGE, 14 * PAGE], [14 * PAGE, 3 * PAGE, 7 * PAGE]])
def test_the_smallest_that_holds_it_is_taken_unless_it_is_far_too_large(sizes: Sequence[int]) -> None:
    blocks = make_blocks()
    made = {size: blocks.take(size) for size in sizes}
    assert [block.capacity for block in made.values()] == sizes
    for block in made.values():
        blocks.give(block)
    assert blocks.take(2 * PAGE + 1) == made[3 * PAGE]
    assert blocks.take(2 * PAGE + 1) not in made.values()  # 7 pages are more than twice as many
    assert blocks.take(5 * PAGE + 1) == made[7 * PAGE]
    assert blocks.take(8 * PAGE) == made[14 * PAGE]
    assert blocks.take(0).capacity == PAGE


def test_sizes_that_grow_make_few_blocks() -> None:
    blocks = make_blocks()
    for pages in range(1, 2000):
        blocks.give(blocks.take(pages * PAGE))
    assert len(blocks._free) <= 60
    assert blocks._size <= 16 * 2000 * PAGE


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
    for block in fill(4):  # those that are still there
        blocks.give(block)
    assert blocks.pages.count_held() == MOST_IDLE
    again = fill(10)
    assert blocks.pages.count_held() == 10 * size
    for block in again:
        blocks.give(block)
    assert blocks.pages.count_held() == blocks._idle_bytes == MOST_IDLE


def test_what_was_used_last_is_kept() -> None:
    """Of small ones that an evaluation left, and a large one that training takes again and again."""
    blocks = make_blocks()
    small = [blocks.take(MOST_IDLE // 8) for _ in range(8)]
    for block in small:
        blocks.pages.show(block, MOST_IDLE // 8, torch.uint8).fill_(1)
    for block in small:
        blocks.give(block)
    for size in (MOST_IDLE // 2, 2 * MOST_IDLE):  # the latest, even if it is larger than all that is kept
        large = blocks.take(size)
        blocks.pages.show(large, size, torch.uint8).fill_(1)
        blocks.give(large)
        assert large in blocks._idle
        assert blocks.pages.count_held() == max(MOST_IDLE, size)


@pytest.mark.parametrize("like", [torch.ones(2), torch.ones(1, 3), torch.ones(3, dtype=torch.int32)], ids=str)
def test_ends_that_disagree_are_named_and_go_on_no_more(like: torch.Tensor) -> None:
    """Of as many bytes too."""

    def disagree(rank: int) -> list[str]:
        line, said = make_line(rank), []
        if rank == 0:
            line.send(torch.ones(3))
            return []
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                receive(line, like)
            said.append(str(caught.value))
        return said

    first, second = run_ranks(disagree, 2)[1]
    assert first == (
        f"receive 0 from rank 0 of {like.dtype}{list(like.shape)} met a send of torch.float32[3]: the two ends "
        "disagree on their order"
    )
    assert second.startswith("the channel with rank 0 is used no more: receive 0 was of")


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
        line.send(torch.ones(1))
        receive(line, torch.ones(1))
        if rank == 1:
            dist.barrier()
            with pytest.raises(RuntimeError) as caught:
                receive(line, torch.ones(1))
            dist.barrier()  # only now the child may end
            return str(caught.value)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            held = [Path("/proc/self/fd", n) for n in os.listdir("/proc/self/fd")]
            try:
                line.send(torch.ones(1))
            except RuntimeError as error:
                os.read(reading, 1)
                if any("memfd:autoptd" in str(file.resolve()) for file in held):
                    os._exit(3)
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
