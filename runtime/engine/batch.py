"""The inputs and the output of a call: the batch, checked and cut; the output, rebuilt around the loss."""

import difflib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.engine.label_weights import count_valid
from autoptd.runtime.program.class_path import find_class
from autoptd.runtime.program.manifest import Input, Manifest, Output
from autoptd.runtime.program.tagged_json import decode_value, encode_value, show

SHOWN = 8  # microbatches


def bind_batch(
    manifests: Sequence[Manifest], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[int, dict[str, Tensor]]:
    """Return the number of the manifest, of one per compiled shape, that a call's arguments fit, and the batch by name.

    Raises TypeError or ValueError where none fits. Positions are those of the model's own forward. An argument that was
    not captured must be None or left out, and one that is no tensor left out, or equal to the compiled one.
    """
    given = name_arguments(manifests[0], args, kwargs)
    shape = find_shape(manifests, given)
    manifest = manifests[shape]
    _check_fixed(manifest, given)
    for expected in manifest.inputs:
        _check_input(manifest, expected, given[expected.name], device)
    if device.type == "cpu":  # on a GPU looking would wait for it
        check_rows(manifest, given)
    return shape, {expected.name: given[expected.name] for expected in manifest.inputs}


def call_signature(manifest: Manifest) -> inspect.Signature:
    """Return the signature of a call, with the names of the model's own forward: those too that must be None."""
    values = dict.fromkeys((*manifest.arguments, *(value.name for value in manifest.inputs)))
    values |= {name: decode_value(value, name) for name, value in manifest.fixed.items()}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(name, kind, default=value) for name, value in values.items()]
    own, others = (f"{name}{'_' * (name in values)}" for name in ("self", "others"))
    rest = inspect.Parameter(others, inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([inspect.Parameter(own, kind), *given, rest])


def name_arguments(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by the names of the program's inputs, each once."""
    names = [i.name for i in manifest.inputs]
    known = {*names, *manifest.fixed}
    order = manifest.arguments or tuple(names)
    if len(args) > len(order):
        raise TypeError(f"{len(args)} positional arguments: the model takes {len(order)}, {', '.join(order)}")
    given = dict(zip(order, args, strict=False))
    if twice := [name for name in given if name in kwargs]:
        raise TypeError(f"argument {twice[0]} is given twice, by position and by name")
    given |= kwargs
    for name, value in given.items():
        if name not in known and value is not None:
            nearest = difflib.get_close_matches(name, names, n=1)
            meant = f"; did you mean {nearest[0]}?" if nearest else "."
            at = f" (position {order.index(name)})" if name in order[: len(args)] else ""
            raise TypeError(
                f"unexpected argument {name}{at}{meant} The program was compiled for {', '.join(names)}: leave it out "
                "(by position give None, and the rest by name), or compile with example_inputs that have it"
            )
    if missing := [name for name in names if given.get(name) is None]:
        raise TypeError(
            f"argument {', '.join(missing)} is missing: the program was compiled for {', '.join(names)}: give it, or "
            "compile with example_inputs that lack it (a loss that the Trainer takes labels for, as with "
            "label_smoothing_factor, belongs into the model's forward)"
        )
    return given


def _check_fixed(manifest: Manifest, given: Mapping[str, Any]) -> None:
    for name, fixed in manifest.fixed.items():
        value = given.get(name)
        try:
            same = name not in given or ((own := encode_value(value, name)) == fixed and _write(own) == _write(fixed))
        except TypeError:
            same = False
        if not same:
            compiled = decode_value(fixed, name)
            raise ValueError(
                f"argument {name} is {show(value)}, but the program was compiled with {show(compiled)}, which is a "
                "part of it: leave it out, or compile with example_inputs that have the other value"
            )


def _write(value: Any) -> str:
    return json.dumps(json.loads(json.dumps(value, sort_keys=True), parse_int=float))  # which tells True from 1


def find_shape(manifests: Sequence[Manifest], given: Mapping[str, Any]) -> int:
    """Return the number of the compiled shape that the tensors `given` have; ValueError for any other shape."""
    own = {name: list(value.shape) for name, value in given.items() if isinstance(value, Tensor)}
    for number, manifest in enumerate(manifests):
        expected = {value.name: batch_shape(manifest, value) for value in manifest.inputs}
        if all(own.get(name, shape) == shape for name, shape in expected.items()):
            return number
    if len(manifests) == 1:
        return 0  # whose check says which argument it is
    found = ", ".join(f"{name} {shape}" for name, shape in own.items())
    known = "; ".join(map(describe_batch, manifests))
    raise ValueError(
        f"the batch has {found}: the program was compiled for {len(manifests)} other shapes, {known}. Give a batch of "
        "one of these, or compile for this one too: example_inputs takes a list of examples, one microbatch each"
    )


def batch_shape(manifest: Manifest, value: Input) -> list[int]:
    """Return the shape of an input in a call, which takes all microbatches of a replica."""
    shape = list(value.shape)
    if value.batch_dim is not None:
        shape[value.batch_dim] *= manifest.num_microbatches
    return shape


def describe_batch(manifest: Manifest) -> str:
    """Return the shapes of a call's inputs: "idx [8, 128], targets [8, 128]"."""
    return ", ".join(f"{value.name} {batch_shape(manifest, value)}" for value in manifest.inputs)


def _check_input(manifest: Manifest, expected: Input, value: Any, device: torch.device) -> None:
    name = expected.name
    if not isinstance(value, Tensor):
        raise TypeError(f"argument {name} is a {type(value).__name__}, expected a tensor")
    shape, dtype = batch_shape(manifest, expected), expected.dtype
    if list(value.shape) != shape:
        b, m, dim = manifest.microbatch_size, manifest.num_microbatches, expected.batch_dim
        count = f" (microbatch_size {b} x num_microbatches {m} = {b * m} sequences of this replica in dimension {dim})"
        raise ValueError(
            f"argument {name} has shape {list(value.shape)}, expected {shape}{count * (dim is not None)}: "
            "give a batch of that shape, or compile for this one"
        )
    if value.dtype is not dtype:
        raise ValueError(f"argument {name} is {value.dtype}, expected {dtype}: give it .to({dtype})")
    if value.device.type != device.type or device.index not in (None, value.device.index):
        raise ValueError(f"argument {name} is on {value.device}, expected {device}: give it .to('{device}')")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"argument {name} requires gradient, but the program gives gradients to its own parameters only, so that "
            "the modules that computed this one would not train: give it .detach(), or make them (an encoder, say) a "
            "part of the model that is compiled"
        )


def check_rows(manifest: Manifest, batch: Mapping[str, Tensor]) -> None:
    """Raise ValueError for the first row number of the batch that its table, or its loss, does not have."""
    for expected in manifest.inputs:
        name, rows, values = expected.name, expected.rows or 0, batch[expected.name]
        fits = not rows or not values.numel() or ((e := values.aminmax()).min >= 0 and e.max < rows)
        if not fits and (wrong := find_unknown(expected, values)).any():
            place = wrong.nonzero()[0].tolist()
            largest = values[wrong].max().item()
            raise ValueError(
                f"argument {name} has {values[tuple(place)].item()} at {place}, and its largest number outside is "
                f"{largest}: expected numbers from 0 to {rows - 1}, the {rows} rows of its table; take the tokenizer "
                "of this model, or a model with a larger vocabulary"
            )


def find_unknown(expected: Input, values: Tensor) -> Tensor:
    """Return a mask of the `values` of an input that are no rows of its table, or its loss."""
    assert expected.rows is not None
    return ((values < 0) | (values >= expected.rows)) & (values != expected.exempt)


def split_batch(manifest: Manifest, batch: Mapping[str, Tensor], names: Sequence[str]) -> list[tuple[Tensor, ...]]:
    """Return the inputs `names` of each microbatch, in order; contiguous, as they were captured."""
    columns = []
    for name in names:
        (expected,) = (i for i in manifest.inputs if i.name == name)
        value = batch[name]
        if expected.rows is not None and not value.is_cpu:
            # To look such a row up would end the process before `check_rows` can name it after the step.
            value = value.masked_fill(find_unknown(expected, value), 0)
        if expected.batch_dim is None:
            columns.append([value.contiguous()] * manifest.num_microbatches)
        else:
            dim = expected.batch_dim
            columns.append([x.contiguous() for x in value.split(expected.shape[dim], dim)])
    return list(zip(*columns, strict=True)) or [()] * manifest.num_microbatches


def unequal_counts(manifest: Manifest, batch: Mapping[str, Tensor]) -> str:
    """Return a warning where microbatches with unequal counts of valid labels count alike, else "".

    Labels are the inputs whose loss and its ``ignore_index`` are known; those that weigh the loss are right.
    """
    for labels in manifest.inputs:
        if labels.ignore_index is None or labels.batch_dim is None or labels.weighs:
            continue
        counts = [int(count) for count in count_valid(labels, batch[labels.name]).tolist()]
        if len(set(counts)) > 1:
            listed = ", ".join(map(str, counts[:SHOWN])) + ", ..." * (len(counts) > SHOWN)
            return (
                f"the microbatches have unequal counts of {labels.name} other than {labels.ignore_index}: {listed}. "
                "The model's loss has other parts beside their mean, so that it cannot be weighed by labels: it is the "
                "mean of the microbatches' losses; pack the sequences, or divide the batch so that each has as many"
            )
    return ""


Outputs = Mapping[tuple[str, ...], Tensor]  # by their paths


def output_builder(output: Output) -> Callable[[Tensor, Outputs], Any]:
    """Return a function from the loss and the outputs to the model's output: every other field is None."""
    cls = find_class(output.type, "model's output class") if output.type else dict

    def build(loss: Tensor, outputs: Outputs) -> Any:
        fields = {name: _find_field(outputs, (name,)) for name in output.fields}
        if output.loss:
            fields[output.loss] = loss
        result: Any = tuple(fields.values())
        if output.kind == "tensor":
            result = outputs.get(("output",), loss)
        elif output.kind != "tuple":
            result = cls(fields) if output.kind == "dict" else cls(**fields)
        return (loss, result) if output.separate_loss else result

    return build


def _find_field(outputs: Outputs, path: tuple[str, ...]) -> Any:
    """Return the output at a path, or a tuple of those below it; None where there are none."""
    if path in outputs:
        return outputs[path]
    own = {other[: len(path) + 1] for other in outputs if other[: len(path)] == path}
    below = sorted(own, key=lambda other: int(other[-1]))  # stages have them in another order
    return tuple(_find_field(outputs, one) for one in below) or None
