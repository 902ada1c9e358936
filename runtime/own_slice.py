"""What ``parallel.state_dict()`` gives where the model is divided: tensors that no file gets as if they were whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

REASON = (
    "this tensor (shape {shape}) is one rank's slice out of parallel.state_dict(), not the model's: in a file of the "
    "model it would be taken for the whole. Call parallel.full_state_dict() on every rank and save what rank 0 gets "
    "(Trainer: save_strategy='no', Lightning: enable_checkpointing=False, and save after training); to go on later, "
    "parallel.save_checkpoint. To write every rank's own slices to a file of its own, save x.as_subclass(torch.Tensor)"
)


class OwnSlice(Tensor):
    """A tensor in every respect but two: it cannot be pickled, nor read through its address, as safetensors does.

    What is computed from it (``.cpu()``, ``.clone()``) is one too; ``as_subclass(torch.Tensor)`` is a plain view.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(REASON.format(shape=list(self.shape)))

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnSlice:
        return self.detach().clone().as_subclass(OwnSlice)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr:
            raise ValueError(REASON.format(shape=list(args[0].shape)))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def mark_slices(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    """A hook of ``state_dict``: make the tensors below `prefix` slices; parameters (keep_vars) stay what they are."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state[name] = value.as_subclass(OwnSlice)
