"""Groups of ranks that reduce, gather and broadcast together: of processes, of threads, or of shapes only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autoptd.runtime.comm.shared_memory import SLOT_BYTES, Exchange, SharedMemory, share_memory
from autoptd.runtime.comm.threads import Meeting

Reduction = Literal["sum", "max"]

# What torch adds and compares. For others gloo has its own words.
_COMBINED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
_COMBINED |= {torch.int64, torch.int32, torch.int16, torch.int8}

# torch 2.13 renamed them; the old names stay, with a warning.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_COMBINE: Mapping[Reduction, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}


Result_co = TypeVar("Result_co", covariant=True)


class Posted(Protocol[Result_co]):
    """A collective that runs while its ranks do other things; in shared memory they do it when they wait."""

    def wait(self) -> Result_co:
        """Its result, once it is there. Call it once."""


class Group(Protocol):
    """The ranks along one axis of the mesh, as one of them sees it: `index` of `size`.

    A group of one never communicates and counts nothing. `counts` holds the calls so far and `elements` the
    elements of their arguments, both by kind: "all_reduce", "all_gather", "broadcast", "reduce_scatter". What is
    posted must be posted in one order on all ranks and waited for in one order, also among other calls, and its tensors
    left alone until then.
    """

    size: int
    index: int
    counts: Counter[str]
    elements: Counter[str]

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """The elementwise sum or maximum over the group, the same bits on every rank. May overwrite `x`."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x`, in rank order; all have the same shape and dtype."""

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The `x` of the rank with index `source`. May overwrite the others' `x`."""

    def post_all_reduce(self, tensors: Sequence[Tensor]) -> Posted[list[Tensor]]:
        """Begin the sum of each of one or more `tensors`, of one dtype, over the group. May overwrite them."""

    def post_reduce_scatter(self, x: Tensor) -> Posted[list[Tensor]]:
        """Begin the sum of `x` [size · n]; the result is this rank's n elements of it, as the only one of a list."""

    def post_all_gather(self, x: Tensor, into: Tensor) -> Posted[Tensor]:
        """Begin to write every rank's `x` [n], in rank order, into `into` [size · n]."""


class _Counted:
    """What all groups share: their size, this rank's index, and the counters."""

    def __init__(self, size: int, index: int) -> None:
        if not 0 <= index < size:
            raise ValueError(f"index {index} is outside a group of {size}; use 0 to {size - 1}")
        self.size = size
        self.index = index
        self.counts: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def _counts(self, kind: str, *tensors: Tensor) -> bool:
        """Whether there is anybody to communicate with; if so, the call is counted."""
        if self.size > 1:
            self.counts[kind] += 1
            self.elements[kind] += sum(x.numel() for x in tensors)
        return self.size > 1


@dataclass(frozen=True)
class Done(Generic[Result_co]):
    """A collective that was over when it was posted."""

    result: Result_co

    def wait(self) -> Result_co:
        return self.result


@dataclass(frozen=True)
class _Running(Generic[Result_co]):
    work: dist.Work
    result: Result_co

    def wait(self) -> Result_co:
        self.work.wait()
        return self.result


class _AtOnce(_Counted, Group):
    """A group that has no way to do two things at once: what is posted is done."""

    def post_all_reduce(self, tensors: Sequence[Tensor]) -> Posted[list[Tensor]]:
        return Done(_split_like(self.all_reduce(_flatten(tensors)), tensors))

    def post_reduce_scatter(self, x: Tensor) -> Posted[list[Tensor]]:
        return Done([self.all_reduce(x).view(self.size, -1)[self.index]])

    def post_all_gather(self, x: Tensor, into: Tensor) -> Posted[Tensor]:
        return Done(torch.cat(self.all_gather(x), out=into))


class ProcessGroup(_Counted):
    """A group of processes, for tensors on `device`: ``torch.distributed`` over NCCL or gloo.

    Every one of them must make it. Sums, maxima and small gathers go through memory that they share, where they can.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(dist.get_world_size(group), dist.get_rank(group))
        self.group = group
        self._memory = share_memory(group, device)
        if device.type == "cuda" and self.size > 1:
            # NCCL connects a group at its first call. Inside a schedule that may wait for the device, and so for
            # messages that a peer sends only once it has connected too.
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        if not self._counts("all_reduce", x):
            return x
        x = x.contiguous()
        if (memory := self._memory_for(x, op)) is not None:
            return _share_reduction(memory, [x], op).wait()[0]
        dist.all_reduce(x, OPERATIONS[op], group=self.group)
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        if not self._counts("all_gather", x):
            return [x]
        gathered = x.new_empty((self.size * x.numel(),))
        own = x.detach().resolve_conj().contiguous().view(-1)
        if (memory := self._memory_for(x, "all_gather")) is not None:
            memory.post("all_gather", [own], partial(torch.cat, out=gathered), own.nbytes).wait()
        else:
            # Bytes, since NCCL does not know all dtypes; below too.
            all_gather_single(gathered.view(torch.uint8), own.view(torch.uint8), group=self.group)
        return list(gathered.view(self.size, *x.shape).unbind())

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        if not self._counts("broadcast", x):
            return x
        x = x.contiguous()
        dist.broadcast(x.view(-1).view(torch.uint8), group=self.group, group_src=source)
        return x

    def post_all_reduce(self, tensors: Sequence[Tensor]) -> Posted[list[Tensor]]:
        if not self._counts("all_reduce", *tensors):
            return Done(list(tensors))
        if (memory := self._memory_for(tensors[0], "sum")) is not None:
            return _share_reduction(memory, tensors, "sum")
        flat = _flatten(tensors)
        work = require_work(dist.all_reduce(flat, group=self.group, async_op=True))
        return _Running(work, _split_like(flat, tensors))

    def _memory_for(self, x: Tensor, kind: str) -> SharedMemory | None:
        """The memory, for reductions of any size and small gathers, where it can combine them.

        Not in code that torch.compile traces: it knows torch.distributed. The ranks compile the same code.
        """
        if self._memory is None or torch.compiler.is_dynamo_compiling():
            return None
        fits = x.is_cpu and (kind != "all_gather" or x.nbytes <= SLOT_BYTES)
        known = x.dtype in _COMBINED or (x.is_complex() and kind != "max")
        return self._memory if fits and known else None

    def post_reduce_scatter(self, x: Tensor) -> Posted[list[Tensor]]:
        if not self._counts("reduce_scatter", x):
            return Done([x])
        own = x.new_empty(x.numel() // self.size)
        return _Running(require_work(reduce_scatter_single(own, x, group=self.group, async_op=True)), [own])

    def post_all_gather(self, x: Tensor, into: Tensor) -> Posted[Tensor]:
        if not self._counts("all_gather", x):
            return Done(into.copy_(x))
        return _Running(require_work(all_gather_single(into, x, group=self.group, async_op=True)), into)


class Opener(dict[object, Any]):
    """Opens groups of processes, each once: torch closes none before the default group. Every rank calls it alike.

    `broken`: messages of an exchange that broke off may be in them, which the next would take for its own. `world` is
    one of all ranks in place of the default group, once that may have such messages in it; it cannot be left.
    """

    broken = False
    world: dist.ProcessGroup | None = None

    def __call__(self, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        key = make, arguments, *named.items()
        if key not in self:
            self[key] = make(*arguments, **named)
        return self[key]


@lru_cache(maxsize=1)
def opener(world: dist.ProcessGroup | None) -> Opener:
    """That of the default group `world`."""
    return Opener()


class ThreadGroup(_AtOnce):
    """A group of threads of this process, which meet at a shared `meeting`; `rank.thread_ranks` makes them.

    For the CPU: there a backward pass runs in the thread that asked for it, so collectives inside it meet; on
    a GPU all backward passes of a process share one thread, and would wait for each other.
    """

    def __init__(self, meeting: Meeting, index: int) -> None:
        super().__init__(meeting.size, index)
        self.meeting = meeting

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        if not self._counts("all_reduce", x):
            return x
        combine = _COMBINE[op]
        with self.meeting.exchange(self.index, _signature(f"all_reduce {op}", x), x.detach()) as values:
            result = values[0].clone()
            for value in values[1:]:  # in rank order, so that all ranks round alike
                combine(result, value, out=result)
        return result

    def all_gather(self, x: Tensor) -> list[Tensor]:
        if not self._counts("all_gather", x):
            return [x]
        with self.meeting.exchange(self.index, _signature("all_gather", x), x.detach()) as values:
            return [value.clone() for value in values]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        if not self._counts("broadcast", x):
            return x
        signature = _signature(f"broadcast from {source}", x)
        with self.meeting.exchange(self.index, signature, x.detach()) as values:
            return values[source].clone()


class LocalGroup(_AtOnce):
    """A group without its peers: shapes on the meta device, and real tensors where it has one rank only."""

    def __init__(self, size: int = 1, index: int = 0) -> None:
        super().__init__(size, index)

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        return self._alone("all_reduce", x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        x = self._alone("all_gather", x)
        return [x] if self.size == 1 else [torch.empty_like(x) for _ in range(self.size)]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._alone("broadcast", x)

    def _alone(self, kind: str, x: Tensor) -> Tensor:
        if self.size > 1 and not x.is_meta:
            raise RuntimeError(
                f"{kind} of a tensor on {x.device} in a LocalGroup of {self.size} ranks, which has no peers; "
                "give it meta tensors, or a rank of processes (Rank.distributed) or threads (thread_ranks)"
            )
        self._counts(kind, x)
        return x


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Their elements in a row; one that is contiguous stays what it is."""
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat([x.reshape(-1) for x in tensors])


def _split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a row, as views of it with the shapes of `tensors`."""
    parts = flat.view(-1).split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _share_reduction(
    memory: SharedMemory, tensors: Sequence[Tensor], op: Reduction
) -> Exchange[list[Tensor]]:
    """Begin to reduce `tensors` over the ranks of `memory`, a slot at a time, in place; copies of those with gaps."""
    own = [x.contiguous() for x in tensors]
    size = sum(x.nbytes for x in own)
    # They run in order: the last one's result is that of all.
    return [
        memory.post(op, pieces, partial(_combine, _COMBINE[op], pieces, own), size)
        for pieces in _fill_slots([x.detach().view(-1) for x in own])
    ][-1]


def _fill_slots(rows: Sequence[Tensor]) -> list[list[Tensor]]:
    """Views of `rows` [n], in their order, by the slots that they fill."""
    most = SLOT_BYTES // rows[0].itemsize
    slots: list[list[Tensor]] = [[]]
    room = most
    for row in rows:
        if row.numel() <= room:  # without a view, which would cost as much as a small exchange
            slots[-1].append(row)
            room -= row.numel()
            continue
        if room:
            slots[-1].append(row[:room])
        parts = row[room:].split(most)
        slots += [[part] for part in parts]
        room = most - parts[-1].numel()
    return slots


def _combine(
    combine: Callable[..., Tensor], pieces: Sequence[Tensor], whole: list[Tensor], given: Sequence[Tensor]
) -> list[Tensor]:
    """Write the slots, combined in rank order, so that all ranks round alike, into `pieces`; give the `whole`."""
    sizes = [piece.numel() for piece in pieces]
    parts = [given] if len(pieces) == 1 else zip(*(slot.split(sizes) for slot in given), strict=True)
    for piece, (first, second, *others) in zip(pieces, parts, strict=True):
        combine(first, second, out=piece)
        for other in others:
            combine(piece, other, out=piece)
    return whole


def _signature(kind: str, x: Tensor) -> str:
    return f"{kind} of {x.dtype}{list(x.shape)}"


def require_work(work: dist.Work | None) -> dist.Work:
    """What torch posted, which it leaves out where this process has no part in it: then RuntimeError."""
    if work is None:
        raise RuntimeError("this process is no member of the group")
    return work
