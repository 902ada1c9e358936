"""Gradients of a divided model, of which torch's own norm would be one rank's: they give the whole model's.

``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm``, and so Accelerate, the Trainer and Lightning, take the norm
of each gradient and then the norm of these. Both are recognised, and the second is taken over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.guards.divided_dimension import NORMS, Held, is_norm_over, names_elements, writes
from autoptd.runtime.optimizer.clipping import check_norm_type
from autoptd.runtime.optimizer.zero1 import Shard
from autoptd.runtime.user_warnings import warn_caller

# What reads no values either, by the names that Tensor and torch have in common; attributes are the first.
ABOUT = frozenset(
    [
        *("__get__", "__hash__", "__len__", "__format__", "data_ptr", "dim", "element_size", "get_device"),
        *("is_complex", "is_contiguous", "is_floating_point", "is_same_size", "is_set_to", "ndimension"),
        *("nelement", "numel", "size", "storage_offset", "stride", "type", "untyped_storage"),
    ]
)
VIEWS = (Tensor.view, Tensor.flatten, Tensor.reshape)
CASTS = (Tensor.float, Tensor.double, Tensor.to)
# What the 2-norm is written out with: the elements' squares, and what is made of all of these.
POWERS = (Tensor.pow, Tensor.__pow__, torch.pow, Tensor.square, torch.square)
PRODUCTS = (Tensor.mul, torch.mul)
SUMS = (Tensor.sum, torch.sum, Tensor.mean, torch.mean)
# What changes each element by itself, in place, and what does so to each of a list.
EACH_ELEMENT = (
    *(Tensor.zero_, Tensor.mul_, Tensor.div_, Tensor.clamp_, Tensor.clamp_min_, Tensor.clamp_max_),
    *(Tensor.nan_to_num_, torch.nan_to_num_, torch.clamp_),
)
OF_EACH = (
    *(torch._foreach_zero_, torch._foreach_mul_, torch._foreach_div_),
    *(torch._foreach_clamp_min_, torch._foreach_clamp_max_),
)
CALL = "call parallel.clip_grad_norm_(max_norm) instead, on every rank"


Leaves = Mapping[str | int, nn.Parameter]


@dataclass(frozen=True)
class Whole:
    """The model whose gradients are shared: ``norm()(norm_type, leaves)``, of these, is a collective of its ranks."""

    norm: WeakMethod[Callable[[float, Container[str | int]], Tensor]]
    leaves: WeakMethod[Callable[[], Leaves]]  # what an optimizer may step here, under the names of gradients
    everywhere: WeakMethod[Callable[[], bool]]  # whether every rank has gradients, and so asks too
    shards: Mapping[int, Sequence[str]]  # the parameters of what a sharded optimizer steps
    divided: Mapping[str | int, Held]  # of parameters that the tensor ranks divide, what is here


class ShareNorm(Tensor):
    """Norms of this rank's gradients `of` some parameters, on the way to the norm of all."""

    whole: Whole
    of: tuple[str | int, ...]
    norm_type: float

    @classmethod
    @leave_uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func is Tensor.to:
                return tag(result, args[0].whole, args[0].of, args[0].norm_type)
            if func is torch.stack and args:
                return _join(result, args[0])
        name = getattr(func, "__name__", "")
        norm_type = find_norm_type(func, args, kwargs or {})
        if norm_type is not None and args and isinstance(args[0], cls):
            return _whole_norm(args[0], norm_type, result)
        if name == "__repr__" or (name in ABOUT and not isinstance(result, Tensor) and len(args) < 2):
            return result
        share = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        raise ValueError(_describe_part(f"{name} of the norm", share.of[0]))


class GradientShare(Tensor):
    """This rank's share of the gradient `of` a parameter, or a copy of it: a tensor in every respect but its norm."""

    whole: Whole
    of: str | int
    kept: bool  # in a parameter's ``.grad``, of which `Whole` takes norms

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()

    def _is_kept(self) -> bool:
        """By a backward, or by the caller, who had it of torch.autograd.grad."""
        leaves = self.whole.leaves()
        leaf = None if leaves is None else leaves().get(self.of)
        return self.kept or (leaf is not None and leaf.grad is self)

    @classmethod
    @leave_uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        share = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(share, cls) and (held := share.whole.divided.get(share.of)) is not None:
                _check_divided(share.of, held, func, args, kwargs or {})
            result = func(*args, **(kwargs or {}))
        if isinstance(share, cls):
            if result is share:
                return share
            kept = func in VIEWS and result.data_ptr() == share.data_ptr()
            if kept or func in CASTS or func is Tensor.detach or _gets_data(func):
                alias = result.as_subclass(type(share))
                vars(alias).update(vars(share))
                return alias
            if func in POWERS or (func in PRODUCTS and args[-1] is share):
                powers = result.as_subclass(SharePowers)
                powers.of = share.of
                return powers
        # A norm along another dimension, or the like, is the caller's own affair.
        if (norm_type := find_norm_type(func, args, kwargs or {})) is None:
            return result
        for each in tree_leaves(share):
            if isinstance(each, cls) and not each._is_kept():
                raise ValueError(
                    f"norm of a gradient of {each.of} that is not in its .grad, of which this rank has a share only: "
                    f"let loss.backward() leave it there, and then {CALL}"
                )
        if isinstance(result, Tensor):
            return tag(result, args[0].whole, (args[0].of,), norm_type)
        return [
            tag(norm, share.whole, (share.of,), norm_type) if isinstance(share, cls) else norm
            for norm, share in zip(result, args[0], strict=True)
        ]


class SharePowers(Tensor):
    """Powers of each element of this rank's share of the gradient `of` a parameter, which a norm may be made of."""

    of: str | int

    @classmethod
    @leave_uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SUMS and len(args) == 1 and (kwargs or {}).get("dim") is None:
            raise ValueError(_describe_part(f"{func.__name__} of powers", args[0].of))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Elsewhere(GradientShare):
    """Stands for the gradient of a parameter that a sharded optimizer steps: it has no values, only its norm.

    What changes each element by itself changes the `elements` that this replica has, of the gradient of `own`.
    """

    own: nn.Parameter
    elements: slice

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Elsewhere(of={self.of!r}, shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    @leave_uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args[1:], *(kwargs or {}).values()]
        if func in EACH_ELEMENT and isinstance(args[0], cls) and all(map(_is_scalar, given)):
            part = args[0]._here()
            if part is not None:
                func(part, *args[1:], **(kwargs or {}))
            return args[0]
        if func in OF_EACH and all(map(_is_scalar, given)):
            parts = [gradient._here() if isinstance(gradient, cls) else gradient for gradient in args[0]]
            with torch._C.DisableTorchFunctionSubclass():
                func([part for part in parts if part is not None], *args[1:], **(kwargs or {}))
            return args[0]
        # Asked before it is called: what writes would change one zero that stands for all.
        unread = func in (Tensor.detach, Tensor.requires_grad_, *CASTS) or _gets_data(func)
        if unread or find_norm_type(func, args, kwargs or {}) is not None:
            return super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", str(func))
        if name in ABOUT:
            result = super().__torch_function__(func, types, args, kwargs)
            if not isinstance(result, Tensor):  # as .T is
                return result
        raise ValueError(
            f"{name} of a gradient that is not here: a sharded optimizer has its part of it, in the .grad of what it "
            f"steps (optimizer.param_groups); for the norm of the whole gradient {CALL}"
        )

    def _here(self) -> Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            return None if self.own.grad is None else self.own.grad[self.elements]


def _check_divided(
    name: str | int, held: Held, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise ValueError where `func` writes elements by number along the dimension of which a part is `held`.

    Warn where it reads them, or takes norms along it, as optimizers do that are warned of already.
    """
    here = (
        f"the gradient of {name}: tensor ranks divide dimension {held.dim}, and this rank has {held.places}"
    )
    if args[0].shape != held.shape:  # a view, whose dimensions are others
        return
    if names_elements(func, args, kwargs, held.dim):
        text = (
            f"elements by number of {here}, so that they are others here. Take them of whole tensors "
            "(full_state_dict), or by a mask of that dimension, bools, cut to what is here"
        )
        if writes(func):
            raise ValueError(text)
        warn_caller(text)
    if find_norm_type(func, args, kwargs) is None and is_norm_over(func, args, kwargs, held.dim):
        warn_caller(
            f"norms of {here}, so that they are of a part. Take norms over other dimensions, or of the whole model's: "
            f"{CALL}"
        )


def _describe_part(what: str, name: str | int) -> str:
    return (
        f"{what} of this rank's share of the gradient of {name}, as if it were that of the whole: for the norm of the "
        f"whole model's {CALL}, with max_norm=float('inf') to leave it as it is"
    )


def find_norm_type(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """Which norm of all elements `func` takes of its first argument, or of each of a list; None where it takes none."""
    if func not in NORMS or len(args) > 2 or kwargs.get("dim") is not None or kwargs.get("keepdim"):
        return None
    order = args[1] if len(args) == 2 else kwargs.get("ord", kwargs.get("p"))
    if order is None or order == "fro":
        return 2.0
    # With an order torch.linalg.norm takes that of a matrix, where it is given one.
    of_matrix = func is torch.linalg.norm and not (
        args and isinstance(args[0], Tensor) and args[0].dim() == 1
    )
    return None if of_matrix or isinstance(order, str) else float(order)


def _gets_data(func: Any) -> bool:
    return getattr(func, "__self__", None) is Tensor.data and func.__name__ == "__get__"


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not isinstance(value, GradientShare)
    return value is None or isinstance(value, int | float)


def tag(norms: Tensor, whole: Whole, names: tuple[str | int, ...], norm_type: float) -> ShareNorm:
    """`norms` as those of the gradients `names`."""
    tagged = norms.as_subclass(ShareNorm)
    tagged.whole, tagged.of, tagged.norm_type = whole, names, norm_type
    return tagged


def share_gradients(leaves: Leaves, whole: Whole) -> dict[str | int, tuple[RemovableHandle, ...]]:
    """Make every gradient of one of `leaves` a share of `whole`: in ``.grad``, and what torch.autograd.grad gives.

    Until the handles given are removed.
    """

    def share(name: str | int, gradient: Tensor, kept: bool) -> GradientShare:
        shared = gradient.as_subclass(GradientShare)
        shared.whole, shared.of, shared.kept = whole, name, kept
        return shared

    @leave_uncompiled
    def mark(name: str | int, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else share(name, gradient, kept=False)

    @leave_uncompiled
    def keep(name: str | int, leaf: Tensor) -> None:
        if leaf.grad is not None and not (isinstance(leaf.grad, GradientShare) and leaf.grad.kept):
            leaf.grad = share(name, leaf.grad, kept=True)

    return {
        name: (
            leaf.register_hook(partial(mark, name)),
            leaf.register_post_accumulate_grad_hook(partial(keep, name)),
        )
        for name, leaf in leaves.items()
    }


def stand_in(shard: Shard, parameters: Mapping[str, nn.Parameter], whole: Whole) -> list[RemovableHandle]:
    """After every backward, let each of the `shard`'s `parameters` have a gradient elsewhere, and no other.

    Where all of them have been cleared by then, so is the shard's: the backward's gradient is added to none. Gives the
    handles of what refuses other gradients.
    """
    own, held = shard.own, shard.ranges()
    kept: dict[str, Elsewhere] = {}
    for name, parameter in parameters.items():
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        kept[name] = zero.expand(parameter.shape).as_subclass(Elsewhere)
        kept[name].whole, kept[name].of, kept[name].kept, kept[name].own = whole, name, True, own
        kept[name].elements = held[name][0] if name in held else slice(0, 0)

    @leave_uncompiled
    def give(_: Tensor) -> None:
        for name, parameter in parameters.items():
            parameter.grad = kept[name]

    @leave_uncompiled
    def clear(_: Tensor) -> None:
        clear_with(own, parameters)

    own.register_hook(clear)  # before the gradient is added
    own.register_post_accumulate_grad_hook(give)
    return [p.register_hook(partial(_refuse_gradient, name)) for name, p in parameters.items()]


def _refuse_gradient(name: str, gradient: Tensor | None) -> None:
    if gradient is None:  # a call's
        return
    raise ValueError(
        f"a gradient comes to {name} that is not of the call: a sharded optimizer would not see it. Add what it is of "
        "to the loss that the model returns, or train without shard_optimizer"
    )


def check_elsewhere(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError where the gradient of one of `parameters`, which is elsewhere, was replaced."""
    for name, parameter in parameters.items():
        if parameter.grad is not None and not isinstance(parameter.grad, Elsewhere):
            raise ValueError(
                f"the gradient of {name} was replaced by another tensor, which a sharded optimizer does not step by: "
                "change it in place (p.grad.mul_, p.grad.zero_), or train without shard_optimizer"
            )


def clear_with(own: nn.Parameter, parameters: Mapping[str, nn.Parameter]) -> None:
    """Clear the gradient of `own` where that of each of `parameters`, which have it elsewhere, was cleared.

    One that the caller gave `own`, who had it of torch.autograd.grad, stays. Raises ValueError where it was of some
    only: the others' are in `own` with it.
    """
    cleared = [name for name, parameter in parameters.items() if parameter.grad is None]
    if not cleared or not isinstance(own.grad, GradientShare) or not own.grad.kept:
        return
    if len(cleared) < len(parameters):
        raise ValueError(
            f"the gradient of {cleared[0]} was cleared, but not of all that a sharded optimizer steps with it: "
            "clear all (optimizer.zero_grad()), or give what is not to be stepped a group with a learning rate of 0"
        )
    own.grad = None


def _join(stacked: Tensor, norms: Sequence[Tensor]) -> ShareNorm:
    shares = [norm for norm in norms if isinstance(norm, ShareNorm)]
    first = shares[0]
    if len(shares) < len(norms) or any(s.whole is not first.whole for s in shares):
        raise ValueError(
            "the norm of gradients of a parallel model together with others: each rank has other shares of the "
            f"model's, so clip the others alone, and for the model {CALL}"
        )
    return tag(stacked, first.whole, tuple(name for s in shares for name in s.of), first.norm_type)


def _whole_norm(norms: ShareNorm, norm_type: float, own: Tensor) -> Tensor:
    """The norm of the whole model's gradient, in the dtype of the sums; `own` is that of this rank's shares."""
    check_norm_type(norm_type)
    norm, leaves, everywhere = norms.whole.norm(), norms.whole.leaves(), norms.whole.everywhere()
    if norm is None or leaves is None or everywhere is None:
        raise ValueError(
            "these are gradients of a parallel model that is no more: keep it as long as its parameters"
        )
    given = set(norms.of)
    given |= {index for index, names in norms.whole.shards.items() if given.issuperset(names)}
    # What was frozen after its backward may be left out, on every rank.
    trained = [name for name, leaf in leaves().items() if leaf.grad is not None and leaf.requires_grad]
    absent = [name for name in trained if name not in given]
    missing = sorted(name if isinstance(name, str) else norms.whole.shards[name][0] for name in absent)
    if missing or norms.norm_type != norm_type or not everywhere():
        reason = f"not of {missing[0]}" if missing else "some ranks have no gradients and do not ask for it"
        raise ValueError(
            "torch's norm of a parallel model's gradients is taken over all its ranks where it is of all "
            f"gradients on each; here it is of {len(norms.of)}, {reason}: {CALL}"
        )
    # Stand-ins have the dtype of their parameters, whose gradients are summed in more.
    return norm(norm_type, given).to(torch.promote_types(own.dtype, torch.float32))
