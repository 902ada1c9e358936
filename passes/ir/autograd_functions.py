"""Runs of the user's autograd functions without data, which find out what they compute."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves  # private, with no public twin

from autoptd.passes.ir.nodes import name_arguments, shape_of
from autoptd.runtime.kernels.autograd_function import AutogradFunction
from autoptd.runtime.program.class_path import find_class

# Operators that work element by element, though torch does not say so; the last where they keep the shape.
_COPIES = {"_to_copy", "copy_", "floor_divide", "where"}
_FACTORIES = {"empty_like", "full", "full_like", "ones_like", "scalar_tensor", "zeros_like"}
_FACTORIES |= {"new_full", "new_ones", "new_zeros"}
_LOOKS = {"_unsafe_view", "alias", "detach", "expand", "view"}


class Operation(NamedTuple):
    """An operator that a function calls, the tensors that it takes and writes to, its numbers, and its result."""

    operator: Any
    tensors: Sequence[Tensor]
    written: Sequence[Tensor]
    numbers: Sequence[Any]
    result: Any

    @property
    def elementwise(self) -> bool:
        """Whether each element of the result is of those at its place alone."""
        name = self.operator._opname
        kept = name in _LOOKS and self.tensors[0].shape == self.result.shape
        return kept or name in _COPIES | _FACTORIES or torch.Tag.pointwise in self.operator.tags


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, given = func(*args, **(kwargs or {})), tree_leaves((args, kwargs))
        named = name_arguments(func, args, kwargs or {})
        written = [named[a.name] for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        numbers = [x for x in given if isinstance(x, bool | int | float | complex)]
        self.made.append(Operation(func, tensors_in(given), tensors_in(written), numbers, result))
        return result


def tensors_in(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def run_forward(function: AutogradFunction, args: Iterable[Any]) -> tuple[Any, list[Operation]]:
    """Return the results of a call on the meta device, and the operations of its forward."""
    with Operations() as operations:
        return function.run(*args), operations.made


def run_backward(results: Any, args: Any) -> tuple[list[Operation], Exception | None]:
    """Return the operations of the backward of a call on the meta device, and the error where it needs data."""
    wanted, made = ([x for x in tensors_in(own) if x.requires_grad] for own in (args, results))
    with Operations() as operations:
        try:
            if made:
                torch.autograd.grad(made, wanted, [torch.empty_like(x) for x in made], allow_unused=True)
        except Exception as error:  # anything of the user's own code
            return operations.made, error
    return operations.made, None


@dataclass(frozen=True)
class _Given:
    """A tensor among the arguments of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def find_operations(function: AutogradFunction, args: Iterable[Any], scale: int = 1) -> tuple[list[Operation], bool]:
    """Return the operations of forward and backward of a call with nodes among `args`, of sizes times `scale`.

    And whether these are all: a backward may need data.
    """

    def describe(node: fx.Node) -> Any:
        shape = tuple(size * scale if size > 1 else size for size in shape_of(node))
        return _Given(shape, node.meta["val"].dtype)

    return _run(find_class(function.path, "autograd function"), function, fx.map_arg(tuple(args), describe))


@cache
def _run(_: type, function: AutogradFunction, given: Any) -> tuple[list[Operation], bool]:
    def make(value: Any) -> Any:
        if not isinstance(value, _Given):
            return value
        floats = value.dtype.is_floating_point
        return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=floats)

    args: Any = fx.node.map_aggregate(given, make)
    with torch.enable_grad():
        results, forward = run_forward(function, args)
        backward, error = run_backward(results, args)
    return [*forward, *backward], error is None


def is_elementwise(node: fx.Node) -> bool:
    """Return whether a call works element by element, backward included, and takes no number that a size changes."""
    target: Any = node.target
    value, args = node.meta["val"], node.args[1:]
    try:
        runs = [find_operations(target, args, scale) for scale in (1, 2)]
        shapes = torch.broadcast_shapes(*map(shape_of, node.all_input_nodes[1:]))
    except Exception:  # of shapes that do not fit together, or of the user's own code for these alone
        return False
    taken = ([(x.operator, () if x.operator._opname in _LOOKS else x.numbers) for x in own] for own, _ in runs)
    same = isinstance(value, Tensor) and value.shape == shapes and next(taken) == next(taken)
    return same and all(x.elementwise for x in runs[0][0]) and all(known for _, known in runs)


def find_cast(function: AutogradFunction, device: str) -> torch.dtype | None:
    """Return the dtype to which ``torch.amp.custom_fwd`` casts a function's arguments under autocast of a `device`."""
    cls: Any = find_class(function.path, "autograd function")
    own = inspect.getclosurevars(cls.forward).nonlocals
    casts = own.keys() >= {"cast_inputs", "fwd"} and own["device_type"] == device
    return own["cast_inputs"] if casts else None
