"""Groups of ranks that reduce, gather and broadcast together: of processes, of threads, or of shapes only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import count
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten  # private, with no public twin; the other too
from torch._utils import _unflatten_dense_tensors as unflatten

from autoptd.runtime.comm.threads import ThreadWorld

Reduction = Literal["sum", "max"]

# torch 2.13 renamed them; the old names stay, with a warning.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_COMBINE: Mapping[Reduction, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum}


Result = TypeVar("Result")


@dataclass(frozen=True)
class Posted(Generic[Result]):
    """A collective or message that runs while its ranks do other things: `wait` gives its result, once."""

    wait: Callable[[], Result]


def running(result: Result, *works: dist.Work | None) -> Posted[Result]:
    """Return a collective or message of torch's `works`; one without was complete when it was posted."""

    def wait() -> Result:
        for work in filter(None, works):
            work.wait()
        return result

    return Posted(wait)


@dataclass(eq=False)
class Group:
    """The ranks along one axis of the mesh, as one of them sees it: `index` of `size`.

    This one has no peers: for shapes on the meta device, and for real tensors in a group of one rank. All ranks of the
    others must post and wait for their collectives in one order, other calls included, and must not touch a posted
    collective's tensors before they have waited for it. Here, posted collectives complete at once.
    """

    size: int = 1
    index: int = 0

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        """Return the elementwise sum or maximum over the group, the same bits on every rank. May overwrite `x`."""
        return self._alone("all_reduce", x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, in rank order; all have the same shape and dtype."""
        x = self._alone("all_gather", x)
        return [x] if self.size == 1 else [torch.empty_like(x) for _ in range(self.size)]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return the `x` of the rank with index `source`. May overwrite the others' `x`."""
        return self._alone("broadcast", x)

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the rows of every rank's `x` that are for this one, in rank order.

        Rank i has ``rows[i][j]`` rows for rank j, which lie in its `x` in the order of these.
        """
        return self._alone("all_to_all", x)

    def _alone(self, kind: str, x: Tensor) -> Tensor:
        if self.size > 1 and not x.is_meta:
            raise RuntimeError(
                f"{kind} of a tensor on {x.device} in a Group of {self.size} ranks, which has no peers; "
                "give it meta tensors, or a rank of processes (Rank.distributed) or threads (thread_ranks)"
            )
        return x

    def post_all_reduce(self, tensors: Sequence[Tensor]) -> Posted[list[Tensor]]:
        """Begin to sum each of one or more `tensors`, of one dtype, over the group. May overwrite them."""
        return running(unflatten(self.all_reduce(flatten(tensors)), tensors))

    def post_reduce_scatter(self, x: Tensor) -> Posted[list[Tensor]]:
        """Begin to sum `x` [size · n]; the result is a list of one tensor, this rank's n elements of the sum."""
        return running([self.all_reduce(x).view(self.size, -1)[self.index].clone()])

    def post_all_gather(self, x: Tensor, into: Tensor) -> Posted[Tensor]:
        """Begin to write every rank's `x` [n], in rank order, into `into` [size · n]."""
        return running(torch.cat(self.all_gather(x), out=into))

    def post_shift(self, x: Tensor, into: Tensor) -> Posted[Tensor]:
        """Begin to send `x` to the next rank of a ring, and to write `into` its like what the one before sends."""
        return running(into.copy_(self.all_gather(x)[self.index - 1]))


class ProcessGroup(Group):
    """A group of processes, each of which must make it: ``torch.distributed`` for tensors on `device`, NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(dist.get_world_size(group), dist.get_rank(group))
        self.group = group
        if device.type == "cuda" and self.size > 1:
            # NCCL connects a group at its first collective, and neighbours at their first message. Inside a schedule
            # that call may wait for the device, and so for messages that a peer sends only after it has connected too.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self.post_shift(*torch.zeros(2, 1, device=device)).wait()

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, OPERATIONS[op], group=self.group)
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        gathered = x.new_empty((self.size * x.numel(),))
        own = x.detach().resolve_conj().contiguous().view(-1)
        # As bytes, since NCCL and gloo do not know all dtypes; in `broadcast` too.
        all_gather_single(gathered.view(torch.uint8), own.view(torch.uint8), group=self.group)
        return list(gathered.view(self.size, *x.shape).unbind())

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        x = x.contiguous()
        dist.broadcast(x.view(-1).view(torch.uint8), group=self.group, group_src=source)
        return x

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        sent, taken = list(rows[self.index]), [row[self.index] for row in rows]
        into = x.new_empty(sum(taken), *x.shape[1:])
        dist.all_to_all_single(into, x.contiguous(), taken, sent, group=self.group)
        return into

    def post_all_reduce(self, tensors: Sequence[Tensor]) -> Posted[list[Tensor]]:
        flat = flatten(tensors)
        return running(unflatten(flat, tensors), dist.all_reduce(flat, group=self.group, async_op=True))

    def post_reduce_scatter(self, x: Tensor) -> Posted[list[Tensor]]:
        if x.device.type == "cpu":  # gloo's own takes longer than an all-reduce
            parts = torch.empty_like(x)
            sent = dist.all_to_all_single(parts, x, group=self.group, async_op=True)
            return Posted(lambda: [running(parts, sent).wait().view(self.size, -1).sum(0)])
        own = x.new_empty(x.numel() // self.size)
        return running([own], reduce_scatter_single(own, x, group=self.group, async_op=True))

    def post_all_gather(self, x: Tensor, into: Tensor) -> Posted[Tensor]:
        return running(into, all_gather_single(into, x, group=self.group, async_op=True))

    def post_shift(self, x: Tensor, into: Tensor) -> Posted[Tensor]:
        ends: Any = ((dist.isend, x, self.index + 1), (dist.irecv, into, self.index - 1))
        posted = [dist.P2POp(act, part, group=self.group, group_peer=peer % self.size) for act, part, peer in ends]
        return running(into, *dist.batch_isend_irecv(posted))


class GroupCache(dict[object, Any]):
    """Groups of processes, each made once: torch closes none before the default group. Every rank makes them alike.

    `broken`: an exchange broke off, so that its messages may be left in the groups, where the next exchange would
    take them for its own. `world` has all ranks in place of the default group, which cannot be replaced then.
    """

    broken = False
    world: dist.ProcessGroup | None = None

    def __call__(self, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        key = make, arguments, *named.items()
        if key not in self:
            self[key] = make(*arguments, **named)
        return self[key]


@lru_cache(maxsize=1)
def group_cache(world: dist.ProcessGroup | None) -> GroupCache:
    """Return the cache that belongs to the default group `world`."""
    return GroupCache()


class ThreadGroup(Group):
    """A group of threads of `world`, with a `name` there of its own; `rank.thread_ranks` makes them.

    For the CPU only: there a backward pass runs in the thread that called it, so its collectives can meet. On a GPU
    all backward passes of a process share one thread and would wait for each other.
    """

    def __init__(self, world: ThreadWorld, name: str, size: int, index: int) -> None:
        super().__init__(size, index)
        self.world, self.name, self._numbers = world, name, count()

    def all_reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        # In rank order, so that all ranks round alike.
        return reduce(_COMBINE[op], self._exchange(f"all_reduce {op}", x))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [value.clone() for value in self._exchange("all_gather", x)]

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self._exchange(f"broadcast from {source}", x)[source].clone()

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        padded = x.new_zeros(max(map(sum, rows)), *x.shape[1:])
        padded[: len(x)] = x
        given = zip(self._exchange(f"all_to_all by {rows}", padded), rows, strict=True)
        return torch.cat([value[: sum(row)].split(list(row))[self.index] for value, row in given])

    def _exchange(self, kind: str, x: Tensor) -> list[Tensor]:
        """Return copies, in common, of all ranks' `x`; RuntimeError where they met in other collectives, or shapes."""
        place, signature = (self.name, next(self._numbers)), f"{kind} of {x.dtype}{list(x.shape)}"
        with self.world.condition:
            given = self.world.given.setdefault(place, {})
            given[self.index] = signature, x.detach().clone()
            self.world.condition.notify_all()
            what = f"{self.name} rank {self.index} of {self.size} in {signature}"
            self.world.wait(lambda: len(given) == self.size, what)
            self.world.given.pop(place, None)
        if any(other != signature for other, _ in given.values()):
            calls = ", ".join(f"rank {i}: {other}" for i, (other, _) in sorted(given.items()))
            raise RuntimeError(f"the ranks of one {self.name} met in different collectives: {calls}")
        return [given[i][1] for i in range(self.size)]
