"""Copy the structure of the user's module without its data."""

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # private: a device, but no data
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves  # private, with no public twin

# What may lead to a module again, and is copied even where a copy of it alone fails.
_STRUCTURE = (nn.Module, Tensor, list, tuple, dict, set, MethodType, functools.partial)


def make_mode() -> FakeTensorMode:
    """Return the mode of a traced copy's tensors: all on the CPU, none with data.

    Not meta, so that a model with ``torch.arange(s)``, of no device, traces wherever its weights are.
    """
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


@contextlib.contextmanager
def run_without_data(mode: FakeTensorMode) -> Iterator[None]:
    """Run a block in `mode`, without torch's log of tracebacks for operators that only a trace supports.

    What the user gave to ``torch.compile`` runs as written: its kernels would read memory that does not exist.
    """
    quiet = patch.object(logging.getLogger(fake_tensor.__name__), "disabled", True)
    with quiet, mode, torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def leave_modes() -> Iterator[None]:
    """Make new tensors on the CPU, with gradients, whatever device and mode the caller has set."""
    # A mode of a device is asked at every call of torch, so it is entered only where it is needed.
    here = contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with here, torch.inference_mode(False), torch.enable_grad():
        yield


def copy_structure(model: nn.Module, make: Callable[[Tensor], Tensor], others: Mapping[int, object] = {}) -> nn.Module:
    """Copy `model`'s structure; every parameter and buffer becomes its twin, such as `make_twin`'s, ties kept.

    So do `others` than tensors, by ids. The copy is in training mode; one of a training model keeps its modules' modes.
    """
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, object] = {id(tensor): make(tensor) for tensor in tensors} | dict(others)
    for module in model.modules():
        for tensor in tree_leaves(list(vars(module).values())):  # attributes, in containers included
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = make(tensor) if tensor.is_meta else tensor.detach().cpu()
    with patch.dict("copy._deepcopy_dispatch", {FunctionType: _copy_function}):  # private
        try:
            twin: nn.Module = copy.deepcopy(model, dict(memo))
        except Exception:
            # Locks, files, process groups: share what the forward may read and Python cannot copy.
            memo.update({id(value): value for value in _uncopyable(model, memo)})
            twin = copy.deepcopy(model, memo)
    set_training(twin)
    return twin


def _copy_function(function: FunctionType, twins: dict[int, object]) -> FunctionType:
    """Copy `function` with the twins of its closure, as ``lambda x: x @ self.weight``: Python copies none.

    Other variables stay shared with functions that are not copied, and so do tensors: torch.export knows a parameter by
    the module that it is read from.
    """
    given = function.__closure__ or ()
    cells = [CellType() if _leads_to_module(own) else own for own in given]
    if all(cell is own for cell, own in zip(cells, given, strict=True)):
        return function
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(vars(function))
    twins[id(function)] = twin  # before what it closes over, which may be the function itself
    for own, cell in zip(given, cells, strict=True):
        if cell is not own:
            cell.cell_contents = copy.deepcopy(own.cell_contents, twins)
    return twin


def _leads_to_module(cell: CellType) -> bool:
    filled = cell != CellType()  # with a name that was given nothing, a cell is equal to another empty one
    return filled and isinstance(cell.cell_contents, FunctionType | MethodType | nn.Module)


def set_training(model: nn.Module) -> None:
    """Put `model` in training mode for the trace; one that is in it keeps the modes of its submodules."""
    if not model.training:
        type(model).train(model)  # the train() that torch.export gives to its own modules refuses


def make_twin(tensor: Tensor, mode: FakeTensorMode | None = None) -> Tensor:
    """Return a twin of `tensor` without data: on the meta device, or in `mode` on the CPU."""
    twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if mode is not None:
        twin = FakeTensor(mode, twin, torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def _uncopyable(model: nn.Module, memo: dict[int, object]) -> Iterator[object]:
    for value in [value for module in model.modules() for value in vars(module).values()]:
        if not isinstance(value, _STRUCTURE):
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # anything a foreign __deepcopy__ or __reduce__ may raise
                yield value
