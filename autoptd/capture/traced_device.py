"""The device that a forward sees: its tensors are on the CPU, and say to the user's code that they are elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda.amp import common
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only  # private, with no public twin

from autoptd.capture.source_lines import is_foreign

CPU = torch.device("cpu")
_DEVICE, _IS_CUDA, _IS_CPU = (vars(torch._C.TensorBase)[n].__get__ for n in ("device", "is_cuda", "is_cpu"))


def find_device(model: nn.Module, device: str | torch.device | None) -> str:
    """Return the type of the `device` for which a forward is traced; None: that of the model's tensors, not "meta"."""
    found = next((x.device for x in (*model.parameters(), *model.buffers()) if not x.is_meta), CPU)
    try:
        return (found if device is None else torch.device(device)).type
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}: {error}") from error


@contextmanager
def seem_on(device: str) -> Iterator[None]:
    """Let all tensors of this block, and those that it makes, be on a `device` that the machine may lack.

    So a forward takes the branches that it takes there. Nothing is placed on the device.
    """
    if device == "cpu":
        yield
        return
    said = torch.device(device, 0)
    own: Any = vars(FakeTensor)["device"]
    seen = property(lambda x: own.fget(x) if is_foreign(sys._getframe(1).f_code.co_filename) else said)

    def set_both(set_one: Any, name: str, value: Any) -> None:
        # Of the operators of the trace, which are the CPU's, the results have the dtypes of autocast.
        for one in {name, "cpu"} if name == device else {name}:
            set_one(one, value)

    setters: Any = {n: partial(set_both, getattr(torch, n)) for n in ("set_autocast_enabled", "set_autocast_dtype")}
    with (
        patch.object(FakeTensor, "device", seen),  # private: a property of Python, which no mode is asked for
        patch.object(common, "amp_definitely_not_available", return_value=False),
        patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        patch.multiple(torch, **setters),
        _Seeming(said),
    ):
        yield


class _Seeming(TorchFunctionMode):
    """A mode in which calls that ask for any device get the CPU, and tensors there say that they are on `said`."""

    def __init__(self, said: torch.device) -> None:
        super().__init__()
        self._said = said

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in (_DEVICE, _IS_CUDA, _IS_CPU, Tensor.get_device):
            found = func(*args, **options)
            if is_foreign(sys._getframe(1).f_code.co_filename) or args[0].is_meta:
                return found
            return {_DEVICE: self._said, _IS_CUDA: self._said.type == "cuda", _IS_CPU: False}.get(func, 0)
        if func in (Tensor.cuda, Tensor.cpu):
            return args[0]
        if func is Tensor.to and isinstance(args[1] if len(args) > 1 else None, str | int):
            args = (args[0], CPU, *args[2:])
        if isinstance(options.get("device"), str | int):
            options["device"] = CPU
        args, options = tree_map_only(torch.device, lambda _: CPU, (args, options))
        return func(*args, **options)
