"""Read the inputs of one microbatch from the user's examples, or infer them from the model."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.capture.results import LossFunction
from autoptd.passes.ir.program import Program
from autoptd.runtime.program.manifest import Input, Manifest
from autoptd.runtime.program.tagged_json import decode_value
from autoptd.runtime.user_warnings import warn_caller

_LENGTHS = (
    *("n_positions", "max_position_embeddings", "block_size", "n_ctx", "context_length"),
    *("max_seq_len", "max_seq_length", "seq_len", "seq_length"),
)
_TARGETS = ("targets", "labels", "target", "y")
ExampleInputs = Mapping[str, Any] | Sequence[Any] | None
Arguments = Mapping[str, inspect.Parameter]  # of a forward


@dataclass(frozen=True)
class Examples:
    """The inputs of one microbatch: its tensors, its other arguments, and which of them go to loss_fn.

    `targets` are the names given to loss_fn; all others go to the model's forward.
    """

    inputs: tuple[Input, ...]
    constants: Mapping[str, Any]
    targets: tuple[str, ...]


def read_examples(
    model: nn.Module, example_inputs: ExampleInputs, loss_fn: LossFunction, microbatch_size: int | None
) -> Examples:
    """Return names, shapes and dtypes of one microbatch's inputs, in the order of forward's signature.

    Raises ValueError where names, shapes or `microbatch_size` disagree, or where nothing can be inferred.
    """
    signature = inspect.signature(model.forward)
    forward = signature.parameters
    targets = _target_names(loss_fn)
    if example_inputs is None:
        given: dict[str, Any] = _infer(model, forward, targets, microbatch_size or 1)
    elif isinstance(example_inputs, Mapping):
        given = dict(example_inputs)
    else:
        given = _by_position(example_inputs, forward, targets)
    targets = _target_names(loss_fn, given.keys() - forward.keys())
    _check_names(given, signature, targets)
    constants = {k: v for k, v in given.items() if not isinstance(v, Tensor)}
    if "use_cache" in forward and "use_cache" not in given:
        constants["use_cache"] = False  # a training step has no use for the key/value cache
        if getattr(getattr(model, "config", None), "use_cache", False):
            _warn_of_packing(given)
    order = {name: place for place, name in enumerate((*forward, *targets))}
    names = sorted((n for n in given if n not in constants), key=lambda name: order.get(name, len(order)))
    shapes = {name: tuple(given[name].shape) for name in names}
    if not names or any(0 in shape for shape in shapes.values()):
        found = ", ".join(f"{name} of shape {list(shape)}" for name, shape in shapes.items()) or "no tensor"
        raise ValueError(f"example_inputs has {found}; pass the tensors of one microbatch of training, none empty")
    first = list(shapes[names[0]])
    size = (first or [1])[0] if microbatch_size is None else microbatch_size
    if microbatch_size is not None and size not in first:
        raise ValueError(
            f"microbatch_size={size}, but example input {names[0]!r} is {first}: make them agree, or leave one out"
        )
    batch_dims = {name: shape.index(size) if size in shape else None for name, shape in shapes.items()}
    inputs = tuple(Input(name, shapes[name], given[name].dtype, batch_dims[name]) for name in names)
    return Examples(inputs, constants, targets)


def _warn_of_packing(given: Mapping[str, Any]) -> None:
    """Warn where transformers would take a sequence for several only because no cache is made."""
    if given.get("position_ids") is not None and given.get("attention_mask") is None:
        warn_caller(
            "position_ids come without attention_mask: where positions restart, transformers takes a sequence for "
            "packed ones, which do not attend to each other, but only if it makes no key/value cache. A step makes "
            "none, and this plain model does. For packed sequences set model.config.use_cache = False; for a single "
            "one pass use_cache=True in example_inputs, or an attention_mask"
        )


def make_example(program: Program | Manifest) -> dict[str, Any]:
    """Return one microbatch as compiled: tensors without values, and the fixed arguments."""
    tensors = {i.name: torch.empty(i.shape, dtype=i.dtype, device="meta") for i in program.inputs}
    return tensors | {name: decode_value(value, name) for name, value in program.fixed.items()}


def read_arguments(model: nn.Module, loss_fn: LossFunction) -> tuple[str, ...]:
    """Return the names of a call's positional arguments: forward's own in order, then loss_fn's targets."""
    forward = inspect.signature(model.forward).parameters.values()
    own = [p.name for p in forward if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(dict.fromkeys((*own, *_target_names(loss_fn))))


def _target_names(loss_fn: LossFunction, given: Collection[str] = ()) -> tuple[str, ...]:
    """Return what `loss_fn` takes besides the output: required arguments, and optional targets or `given` ones."""
    if loss_fn is None:
        return ()
    if isinstance(loss_fn, nn.Module):
        loss_fn = loss_fn.forward
    parameters = list(inspect.signature(loss_fn).parameters.values())
    return tuple(p.name for p in parameters[1:] if p.default is p.empty or p.name in {*_TARGETS, *given})


def _infer(model: nn.Module, forward: Arguments, targets: tuple[str, ...], size: int) -> dict[str, Tensor]:
    length = _sequence_length(model)
    names = [n for n, p in forward.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if not names and "input_ids" in forward:
        names = ["input_ids"]
    if not targets:
        names += [n for n in forward if n in _TARGETS and n not in names]
    if length is None or not names:
        what = "sequence length" if length is None else "input names"
        raise ValueError(
            f"cannot infer the {what} of {type(model).__name__} from its config or embedding tables; "
            "pass example_inputs={'input_ids': torch.zeros(b, s, dtype=torch.long), ...} for one microbatch"
        )
    return {name: torch.empty(size, length, dtype=torch.long, device="meta") for name in (*names, *targets)}


def _sequence_length(model: nn.Module) -> int | None:
    for holder in (getattr(model, "config", None), model):
        for name in _LENGTHS:
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    heads = {m.out_features for m in model.modules() if isinstance(m, nn.Linear)}
    if len(tables) < 2:
        return None
    # The table of the vocabulary has as many rows as a projection has outputs, or is the largest.
    vocabulary = next((i for i, count in enumerate(tables) if count in heads), tables.index(max(tables)))
    return next(count for index, count in enumerate(tables) if index != vocabulary)


def _by_position(values: Sequence[Any], forward: Arguments, targets: tuple[str, ...]) -> dict[str, Any]:
    taken = [n for n, p in forward.items() if p.kind is p.POSITIONAL_OR_KEYWORD and n not in targets]
    # The last values are the targets of the loss function, in its order.
    names = [*taken[: max(len(values) - len(targets), 0)], *targets]
    if isinstance(values, Tensor) or len(values) > len(names):
        what = "a tensor" if isinstance(values, Tensor) else f"{len(values)} values"
        raise ValueError(f"example_inputs is {what} for the inputs {names}; pass a dict of keyword arguments")
    return dict(zip(names, values, strict=False))


def _check_names(given: Mapping[str, Any], forward: inspect.Signature, targets: tuple[str, ...]) -> None:
    required = {n for n, p in forward.parameters.items() if p.default is p.empty}
    if both := [name for name in targets if name in required]:
        raise ValueError(f"loss_fn and forward both take {both[0]}: rename the argument of loss_fn")
    named = f"example_inputs names {', '.join(given) or 'nothing'}"
    if missing := [name for name in targets if name not in given]:
        way = f"bind what is no tensor, as in functools.partial(loss_fn, {missing[0]}=...)"
        raise ValueError(f"{named}, and loss_fn takes {', '.join(missing)} too: pass them, or {way}")
    try:
        forward.bind(**{name: value for name, value in given.items() if name not in targets})
    except TypeError as error:
        raise ValueError(f"{named}, and forward takes {', '.join(forward.parameters)}: {error}") from None
