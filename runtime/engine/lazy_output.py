"""What a call returns besides the loss: tensors that the ranks put together when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only  # private, with no public twin

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.kernels.class_scores import maximum, pick
from autoptd.runtime.kernels.operands import widen
from autoptd.runtime.kernels.vocabulary import logsumexp
from autoptd.runtime.program.manifest import Result

aten = torch.ops.aten


@dataclass(eq=False)
class RankPart:
    """This rank's part of an output of a call, and the ways to read all of it: each is a collective of all ranks.

    `local` has the tensors of all microbatches, stacked, on pipeline rank `source`; None elsewhere. `result` describes
    those of one microbatch. What is read is this replica's, and `whole` is all of it, once it was read.
    """

    result: Result
    microbatches: int
    source: int
    connection: Connection
    local: Tensor | None
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        # Whose collectives are no part of the last step's times.
        self.rank, self.on = replace(self.connection.rank, measured=None), self.result.placement["tensor"]
        last, segments = len(self.result.shape) - 1, self.on.segments
        run = self.on.dim == last and len(segments) == segments[0].outer == 1
        # Each rank has the last dimension, or a run of it, so that it can be reduced before it is sent.
        self.is_reducible = self.result.batch_dim != last >= 0 and (self.on.dim is None or run)

    def full(self) -> Tensor:
        """Return the whole."""
        if self.whole is None:
            self.whole = self._share(self._join, self.result.shape, self.result.dtype)
        return self.whole

    def argmax(self) -> Tensor:
        """Return the places of the largest elements in the last dimension; a few numbers a row leave each rank."""

        def find(local: Tensor) -> Tensor:
            return local.argmax(-1) if self.on.dim is None else maximum(self.rank, local, -1, self.result.shape[-1])[1]

        return self._share(find, self.result.shape[:-1], torch.int64)

    def log_prob(self, classes: Tensor) -> Tensor:
        """Return the log-softmax at `classes`, 0 at those that do not exist; three numbers a row leave each rank."""
        dtype, dim, legal = widen(self.result.dtype), self.result.batch_dim, classes >= 0
        legal &= classes < (count := self.result.shape[-1])
        own = classes.masked_fill(~legal, 0)[..., None]

        def weigh(logits: Tensor, rows: Tensor) -> Tensor:
            if self.on.dim is None or not self.is_reducible:
                return logits.to(dtype).log_softmax(-1).gather(-1, rows)[..., 0]
            picked = pick(self.rank, logits, rows, count)[..., 0].to(dtype)
            return picked - logsumexp(self.rank, logits, -1, count).to(dtype)

        if not self.is_reducible:
            found = weigh(self.full(), own)
        else:
            rows = own if dim is None else own.unflatten(dim, (self.microbatches, -1)).movedim(dim, 0)
            found = self._share(lambda local: torch.stack(list(map(weigh, local, rows))), self.result.shape[:-1], dtype)
        return found.masked_fill(~legal, 0)

    def _join(self, local: Tensor) -> Tensor:
        """Return all tensor ranks' parts together."""
        if self.on.dim is None:
            return local
        return replace(self.on, dim=self.on.dim + 1).join(self.rank.group("tensor").all_gather(local))

    def _share(self, make: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return what the ranks with the output `make` of it, of this `shape` a microbatch, on all of them."""
        at, rank = self.connection, self.connection.rank
        with torch.no_grad(), at.position.collective_call("read an output"), at.exchange():
            if self.local is None:
                made = torch.empty(self.microbatches, *shape, dtype=dtype, device=rank.device)
            else:
                made = make(self.local)
            return self.merge(rank.group("pipeline").broadcast(made, self.source))

    def merge(self, stacked: Tensor) -> Tensor:
        """Return a tensor of a whole call from those of its microbatches, stacked."""
        dim = self.result.batch_dim
        return stacked if dim is None else stacked.movedim(0, dim).flatten(dim, dim + 1)


class LazyOutput(Tensor):
    """A tensor that a call returned besides the loss; the ranks put it together when it is read, which all must do.

    Shapes and dtypes are known and cost nothing. `log_prob`, and ``argmax`` over the last dimension, send a few numbers
    a row; everything else reads `full`, which is kept. It has no gradient: only the loss can be differentiated.
    """

    part: RankPart
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, part: RankPart) -> LazyOutput:
        shape = part.merge(torch.empty(part.microbatches, *part.result.shape, device="meta")).shape
        about: Any = {"dtype": part.result.dtype, "device": part.connection.rank.device}
        own: LazyOutput = Tensor._make_wrapper_subclass(cls, shape, **about)
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
        return _read(self.requires_grad, lambda: self.part.log_prob(classes))

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


def _of_whole(name: str) -> Callable[..., Any]:
    """Return a method of a tensor that reads memory, which a lazy output has none of."""
    return lambda output, *args, **kwargs: getattr(output.full(), name)(*args, **kwargs)


for _key in ["numpy", "tolist", "data_ptr", "untyped_storage", "__dlpack__", "__reduce_ex__", "__deepcopy__"]:
    setattr(LazyOutput, _key, _of_whole(_key))


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
