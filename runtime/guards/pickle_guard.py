"""Tensors of a divided model that no file gets as if they were whole: those of ``state_dict()``, and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor, nn

REASON = (
    "this tensor (shape {shape}) is one rank's slice out of a parallel model, not the model's, and is not pickled, "
    "which copy.copy does too (take a .clone(), or copy.deepcopy): in a file of the model it would be taken for the "
    "whole. Call parallel.full_state_dict() on every rank and save what rank 0 gets "
    "(Trainer: save_strategy='no', Lightning: enable_checkpointing=False, and save after training); to go on later, "
    "parallel.save_checkpoint. To write every rank's own slices to a file of its own, save x.as_subclass(torch.Tensor)"
)


class OwnSlice(Tensor):
    """A tensor in every respect but two: it cannot be pickled, nor read through its address, as safetensors does.

    What is computed from it (``.cpu()``, ``.clone()``) is one too; ``as_subclass(torch.Tensor)`` is a plain view.
    """

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnSlice:
        return self.detach().clone().as_subclass(OwnSlice)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr:
            _refuse(args[0].shape)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def mark_slices(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    """A hook of each module's ``state_dict``: make its own tensors slices; parameters (keep_vars) stay as they are."""
    for name in (prefix + own for own in chain(module._parameters, module._buffers)):
        value = state.get(name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[name] = value.as_subclass(OwnSlice)


def keep_unwritten(parameter: nn.Parameter) -> None:
    """Refuse to pickle a `parameter` from now on; copies of it are plain tensors.

    By an attribute of its own: of a subclass torch's optimizers would step one tensor at a time. Its address, which
    safetensors asks for, is given: others tell tied parameters by it.
    """
    parameter.__reduce_ex__ = partial(_refuse, tuple(parameter.shape))  # type: ignore[method-assign]


def _refuse(shape: Sequence[int], *_: Any) -> NoReturn:
    raise ValueError(REASON.format(shape=list(shape)))
