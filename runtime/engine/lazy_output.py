"""What a call returns besides the loss: tensors that the ranks put together when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only  # private, with no public twin

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Reduction
from autoptd.runtime.kernels.operands import widen
from autoptd.runtime.program.manifest import Result

aten = torch.ops.aten


@dataclass(eq=False)
class RankPart:
    """This rank's part of an output of a call, and the ways to read all of it: each is a collective of all ranks.

    `local` has the tensors of all microbatches, stacked, on pipeline rank `source`; None elsewhere. `result` describes
    those of one microbatch. What is read is this replica's.
    """

    result: Result
    microbatches: int
    source: int
    connection: Connection
    local: Tensor | None
    whole: Tensor | None = None  # once it was read

    def __post_init__(self) -> None:
        self.rank, self.on = self.connection.rank, self.result.placement["tensor"]
        last, segments = len(self.result.shape) - 1, self.on.segments
        run = self.on.dim == last and len(segments) == segments[0].outer == 1
        # Each rank has the last dimension, or a run of it, so that it can be reduced before it is sent.
        self.is_reducible = self.result.batch_dim != last and last >= 0 and (self.on.dim is None or run)

    @property
    def shape(self) -> list[int]:
        """The shape of the whole."""
        shape, dim = list(self.result.shape), self.result.batch_dim
        if dim is None:
            return [self.microbatches, *shape]
        return [*shape[:dim], self.microbatches * shape[dim], *shape[dim + 1 :]]

    def full(self) -> Tensor:
        """Return the whole."""
        if self.whole is None:
            self.whole = self._share(self._join, self.result.shape, self.result.dtype)
        return self.whole

    def argmax(self) -> Tensor:
        """Return the places of the largest elements in the last dimension; two numbers a row leave each rank."""

        def find(local: Tensor) -> Tensor:
            start, count = self._columns()
            largest, index = (
                local[..., :count].max(-1) if count else (local[..., 0].clone().fill_(-torch.inf),) * 2
            )
            if self.on.dim is None:
                return index
            group = self.rank.group("tensor")
            owner = torch.stack(group.all_gather(largest)).argmax(0, keepdim=True)
            return torch.stack(group.all_gather(index.long() + start)).gather(0, owner)[0]

        return self._share(find, self.result.shape[:-1], torch.int64)

    def log_prob(self, classes: Tensor) -> Tensor:
        """Return the logarithms of the softmax at the `classes`, and 0 at those that do not exist.

        Three numbers a row leave each rank.
        """
        dtype = widen(self.result.dtype)

        def find(local: Tensor) -> Tensor:
            return torch.stack(
                [self._find_log_prob(*row) for row in zip(local, self._split(classes), strict=True)]
            )

        found = self._share(find, self.result.shape[:-1], dtype)
        return found.masked_fill((classes < 0) | (classes >= self.result.shape[-1]), 0)

    def _find_log_prob(self, logits: Tensor, classes: Tensor) -> Tensor:
        start, count = self._columns()
        own = logits[..., :count].to(widen(logits.dtype))
        largest = own.amax(-1) if count else own.new_full(own.shape[:-1], -torch.inf)
        largest = self._reduce(largest, "max")
        total = (own - largest[..., None]).exp().sum(-1)
        column = classes - start
        here = (column >= 0) & (column < count)
        aim = logits.gather(-1, column.masked_fill(~here, 0)[..., None])[..., 0].to(own.dtype) - largest
        total, aim = self._reduce(torch.stack([total, aim.masked_fill(~here, 0)])).unbind()
        return aim - total.log()

    def _reduce(self, x: Tensor, op: Reduction = "sum") -> Tensor:
        return x if self.on.dim is None else self.rank.group("tensor").all_reduce(x, op)

    def _columns(self) -> tuple[int, int]:
        """Return the first place of the last dimension that this rank has, and the number of these without padding."""
        count = self.result.shape[-1]
        if self.on.dim is None:
            return 0, count
        group = self.rank.group("tensor")
        width = self.on.segments[0].rows // group.size
        return width * group.index, max(0, min(width, count - width * group.index))

    def _join(self, local: Tensor) -> Tensor:
        """Return all tensor ranks' parts together."""
        if self.on.dim is None:
            return local
        return replace(self.on, dim=self.on.dim + 1).join(self.rank.group("tensor").all_gather(local))

    def _share(self, make: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return what the ranks with the output `make` of it, of this `shape` a microbatch, on all of them."""
        at, group = self.connection, self.rank.group("pipeline")
        with torch.no_grad(), at.position.collective_call("read an output"), at.exchange():
            if self.local is None:
                made = torch.empty(self.microbatches, *shape, dtype=dtype, device=self.rank.device)
            else:
                made = make(self.local)
            made, dim = group.broadcast(made, self.source), self.result.batch_dim
        return made if dim is None else made.movedim(0, dim).flatten(dim, dim + 1)

    def _split(self, x: Tensor) -> Tensor:
        """Return a tensor of the whole call with its microbatches stacked."""
        dim = self.result.batch_dim
        return x if dim is None else x.unflatten(dim, (self.microbatches, -1)).movedim(dim, 0)


class LazyOutput(Tensor):
    """A tensor that a call returned besides the loss; the ranks put it together when it is read, which all must do.

    Shapes and dtypes are known and cost nothing. `log_prob`, and ``argmax`` over the last dimension, send a few numbers
    a row; everything else reads `full`, which is kept. It has no gradient: what is to be differentiated belongs in the
    loss.
    """

    part: RankPart
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, part: RankPart) -> LazyOutput:
        own: LazyOutput = Tensor._make_wrapper_subclass(
            cls, part.shape, dtype=part.result.dtype, device=part.rank.device
        )
        own.part = part
        return own

    @staticmethod
    def of(part: RankPart) -> Tensor:
        """Return the output; in training, its use in a backward is an error."""
        return _read(part.result.dtype.is_floating_point, lambda: LazyOutput(part))

    def full(self) -> Tensor:
        """Return the whole tensor of this replica's batch. All ranks must call it."""
        return _read(self.requires_grad, lambda: self.part.full().detach())

    def log_prob(self, classes: Tensor) -> Tensor:
        """Return the log-probability of one of the `classes` of the last dimension in each row. All ranks must call it.

        `classes` has the shape without that dimension. Numbers that are no class, such as -100, give 0.
        """
        if list(classes.shape) != list(self.shape[:-1]) or classes.dtype != torch.int64:
            raise ValueError(
                f"log_prob of {self} was given classes {list(classes.shape)} of {classes.dtype}; expected "
                f"{list(self.shape[:-1])} of torch.int64: one for each row (labels of next tokens, moved by one)"
            )
        if self.part.is_reducible:
            return _read(self.requires_grad, lambda: self.part.log_prob(classes))
        legal = (classes >= 0) & (classes < self.shape[-1])
        found = self.full().to(widen(self.dtype)).log_softmax(-1)
        return found.gather(-1, classes.masked_fill(~legal, 0)[..., None])[..., 0].masked_fill(~legal, 0)

    def numpy(self, *, force: bool = False) -> Any:
        return self.full().numpy(force=force)  # torch's own reads memory that is not here

    def tolist(self) -> Any:
        return self.full().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyOutput({self.part.result.name}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (aten.detach.default, aten.alias.default):
            return LazyOutput(args[0].part)
        if func is aten.argmax.default and isinstance(args[0], LazyOutput) and args[0].part.is_reducible:
            own, dim, keepdim = (*args, None, False)[:3]
            if dim in (-1, own.dim() - 1):
                found = own.part.argmax()
                return found[..., None] if keepdim else found
        args, options = tree_map_only(LazyOutput, lambda own: own.part.full(), (args, kwargs or {}))
        return func(*args, **options)


def _read(guarded: bool, make: Callable[[], Tensor]) -> Tensor:
    if not (guarded and torch.is_grad_enabled()):
        return make()
    anchor = torch.zeros((), requires_grad=True)
    return _WithoutGradient.apply(anchor, make)  # type: ignore[no-any-return, no-untyped-call]


class _WithoutGradient(torch.autograd.Function):
    """A value without a gradient, which says so where a plain tensor's would be left out in silence."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "an output of a parallel model was differentiated, and its gradient ends there: only the loss has one. "
            "Compute this part of the loss in the model's forward, or in the loss_fn of compile; or use .detach()"
        )
