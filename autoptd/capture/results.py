"""The structure of what a model returns: its loss, and the tensors that a call returns beside it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeGuard

from torch import Tensor, is_floating_point

from autoptd.capture.source_lines import CaptureError
from autoptd.runtime.program.class_path import find_class
from autoptd.runtime.program.manifest import Output, OutputKind

Outputs = bool | Sequence[str]  # options of `compile`
LossFunction = Callable[..., Tensor] | None


def find_loss(
    result: object, loss_fn: LossFunction, targets: Mapping[str, object], wanted: Outputs
) -> tuple[Tensor, Output]:
    """Return the scalar loss in what a model returned, or that of `loss_fn`, and the structure of a call's result.

    With `loss_fn` that is the loss alone if no outputs are `wanted`. Raises CaptureError.
    """
    kind, fields = _read_fields(result)
    if loss_fn is not None:
        if not is_loss(loss := loss_fn(result, **targets)):
            raise CaptureError(f"loss_fn returned {describe(loss)}; expected a scalar floating-point tensor")
        if not wanted or kind == "tensor":
            return loss, Output("tensor", separate_loss=bool(wanted))
        return loss, Output(kind, "", _type_name(result), tuple(fields), separate_loss=True)
    if is_loss(result):
        return result, Output("tensor")
    for name in fields if kind == "tuple" else ("loss",):
        if is_loss(item := fields.get(name)):
            return item, Output(kind, name, _type_name(result), tuple(fields))
    way = "return the loss (alone, in a tuple, or under 'loss'), or pass loss_fn="
    raise CaptureError(f"the model returned {describe(result)}, which has no scalar loss; {way}")


def find_outputs(result: object, output: Output, wanted: Outputs) -> dict[tuple[str, ...], Tensor]:
    """Return the tensors of the fields `wanted` of what a model returned, by their paths; True: all of them.

    A field is a tensor, or a list or tuple of these; of all fields, others are left out. CaptureError for other names.
    """
    _, fields = ("", {}) if output == Output("tensor") else _read_fields(result)
    named = [name for name in fields if name != output.loss] if wanted is True else [*wanted]  # type: ignore[misc]
    found: dict[tuple[str, ...], Tensor] = {}
    for name in named:
        leaves = dict(_list_tensors((name,), fields.get(name)))
        if wanted is not True and (name == output.loss or not leaves or None in leaves.values()):
            raise CaptureError(
                f"outputs= has {name!r}, and the model returned {describe(result)}: expected the name of a field "
                'besides the loss that is a tensor, or a list or tuple of tensors ("0", "1", ... in a tuple, "output" '
                "for a model that returns one tensor)"
            )
        found.update({path: x for path, x in leaves.items() if x is not None and None not in leaves.values()})
    return found


def _list_tensors(path: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    """Yield the tensors of a field with their paths; None for anything else."""
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _list_tensors((*path, str(index)), item)
    else:
        yield path, value if isinstance(value, Tensor) else None


def _read_fields(result: object) -> tuple[OutputKind, Mapping[str, object]]:
    """Return the kind of a model's output as the manifest has it, and its fields."""
    if isinstance(result, Mapping) or dataclasses.is_dataclass(result):
        kind: OutputKind = "dataclass" if dataclasses.is_dataclass(result) else "dict"
        return kind, dict(result) if isinstance(result, Mapping) else vars(result)
    if isinstance(result, (tuple, list)):
        return "tuple", {str(place): item for place, item in enumerate(result)}
    return "tensor", {"output": result}


def describe(result: object) -> str:
    """Describe a value in a few words: type, shapes, keys."""
    if isinstance(result, Tensor):
        return f"a tensor {list(result.shape)} of {str(result.dtype).removeprefix('torch.')}"
    name = type(result).__name__
    if isinstance(result, Mapping):
        return f"{name} with {', '.join(f'{k}: {describe(v)}' for k, v in result.items())}"
    if isinstance(result, (tuple, list)):
        return f"{name} of {', '.join(describe(v) for v in result)}"
    return f"{name} {result!r}" if isinstance(result, (str, int, float, bool, type(None))) else name


def _type_name(value: object) -> str:
    """Return the name by which every rank finds the class; ValueError where none does."""
    path = f"{type(value).__module__}:{type(value).__qualname__}"
    find_class(path, "model's output class")
    return path


def is_loss(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() == 0 and is_floating_point(value)
