"""Compare the backward of the user's autograd functions with their forward, which is all that a trace sees."""

import contextlib
import math
import traceback
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves  # private, with no public twin

from autoptd.capture.source_lines import user_line

_TOLERANCE = 1e-6
_ROUND = "_checkpoint_without_reentrant_generator"
_ROUND += "_impl" if hasattr(checkpoint, f"{_ROUND}_impl") else ""  # since torch 2.14
# Of torch.library: such an operator stays whole in a trace, with its gradient.
_LIBRARY = "GeneratedBackwardFor_"


class Functions:
    """The autograd functions called during a trace, each with the place and arguments of its first call."""

    def __init__(self) -> None:
        self.seen: dict[Any, tuple[str, tuple[Any, ...]]] = {}
        self.checkpointed: dict[str, None] = {}  # the places of activation checkpointing

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Note every ``Function.apply`` in this block, and replace activation checkpointing by the call it wraps."""
        original = Function.__dict__["apply"]

        def look_through(*_: Any, **__: Any) -> Iterator[None]:
            self.checkpointed[user_line(traceback.extract_stack())] = None
            yield

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is checkpoint.CheckpointFunction:
                place = user_line(traceback.extract_stack())
                self.checkpointed[place] = None
                result = args[0](*args[2:])
                if _needs_gradient(tree_leaves(result)) and not _needs_gradient(args[2:]):
                    raise ValueError(
                        f"{place}: no argument of this reentrant checkpoint needs a gradient, so torch gives none to "
                        "the parameters inside; set use_reentrant=False, or pass an argument that needs one"
                    )
                return result
            if cls not in self.seen and not cls.__name__.startswith(_LIBRARY):
                self.seen[cls] = (user_line(traceback.extract_stack()), args)
            return original.__get__(None, cls)(*args, **kwargs)

        # Private: the context of a call that is not reentrant. A torch without it traces such calls itself.
        inner = patch.object(checkpoint, _ROUND, look_through, create=True)
        with patch.object(Function, "apply", classmethod(apply)), inner:
            yield

    def check(self) -> tuple[str, ...]:
        """Compare each function's own backward with autograd through its forward, on small random numbers.

        Returns a log line for each function and checkpoint. Raises ValueError if the two differ or cannot be compared.
        """
        inlined = "activation checkpointing is inlined; recompute= says what the backward computes again"
        compared = (_compare(cls, *noted) for cls, noted in self.seen.items())
        return (*(f"{place}: {inlined}" for place in self.checkpointed), *compared)


def _needs_gradient(values: Iterable[object]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in values)


def _compare(cls: Any, place: str, args: tuple[Any, ...]) -> str:
    name = cls.__name__
    way_out = "write it with torch operators whose gradient autograd knows, or as a torch.library operator"
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            given = [_small(arg) for arg in args]
            own = _gradients(lambda *values: cls.apply(*values), given)
            written = _gradients(lambda *values: _forward(cls, values), given)
    except Exception as error:
        raise ValueError(
            f"{place}: {name} has its own backward, which could not be compared with the gradient of its forward "
            f"({type(error).__name__}: {error}); {way_out}"
        ) from error
    difference = max((float((a - b).abs().max()) for a, b in zip(own, written, strict=True)), default=0.0)
    if not difference < _TOLERANCE:
        how = "one is nan" if math.isnan(difference) else f"they differ by {difference:.1e}"
        raise ValueError(
            f"{place}: the backward of {name} is not the gradient of its forward ({how}), and only the forward can be "
            f"traced; {way_out}"
        )
    return f"{place}: {name} is differentiated through its forward; its own backward agrees"


def _small(value: Any) -> Any:
    """Return a random stand-in for a traced tensor, each dimension at most 4."""
    if not isinstance(value, Tensor):
        return value
    shape = [min(size, 4) for size in value.shape]
    if value.is_floating_point():
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)
    return torch.zeros(shape, dtype=value.dtype)


def _forward(cls: Any, values: tuple[Any, ...]) -> Any:
    if cls.setup_context is not Function.setup_context:
        return cls.forward(*values)
    ctx = SimpleNamespace(save_for_backward=lambda *_: None, mark_non_differentiable=lambda *_: None)
    ctx.set_materialize_grads = ctx.save_for_forward = ctx.mark_dirty = lambda *_: None
    ctx.needs_input_grad = tuple(isinstance(v, Tensor) and v.requires_grad for v in values)
    return cls.forward(ctx, *values)


def _gradients(function: Any, given: list[Any]) -> list[Tensor]:
    tensors = [value for value in given if isinstance(value, Tensor) and value.requires_grad]
    results = function(*given)
    results = results if isinstance(results, tuple) else (results,)
    real = [r for r in results if isinstance(r, Tensor) and r.is_floating_point()]
    total = sum((r * torch.linspace(1, 2, r.numel(), dtype=r.dtype).view_as(r)).sum() for r in real)
    if not isinstance(total, Tensor) or not total.requires_grad:
        return [torch.zeros_like(tensor) for tensor in tensors]
    found = torch.autograd.grad(total, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]
