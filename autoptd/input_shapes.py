"""Several input shapes of one model: the examples a user gives of them, and what their programs must have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from autoptd.capture.example_inputs import Examples, read_examples
from autoptd.check.program import ProgramError
from autoptd.passes.ir.nodes import is_lifted
from autoptd.passes.ir.program import Program, copy_graph
from autoptd.runtime.program.manifest import Input, Manifest

# What the manifests of all shapes say alike, beside inputs and parameters.
COMMON = (
    *("mesh", "schedule", "num_model_chunks", "num_microbatches", "scatter_gather"),
    *("seed", "aliases", "output"),
    *("arguments", "uninitialized", "scales_loss", "autocast"),
)


def list_examples(example_inputs: Any) -> list[Any]:
    """Return the examples of each input shape: the entries of a list of dicts, tuples or lists, else the one given.

    Raises TypeError for a list that mixes these with others, and for anything else.
    """
    if example_inputs is not None and not isinstance(example_inputs, (Mapping, Sequence, Tensor)):
        raise TypeError(
            f"example_inputs is {example_inputs!r}; expected one microbatch as a dict or tuple, or a list of these"
        )
    if not isinstance(example_inputs, list):
        return [example_inputs]
    whole = [isinstance(x, (Mapping, tuple, list)) for x in example_inputs]
    if not any(whole):
        return [example_inputs]  # the positional inputs of one microbatch
    if not all(whole):
        other = example_inputs[whole.index(False)]
        raise TypeError(
            f"example_inputs is a list with a {type(other).__name__} among examples: for several input shapes expected "
            "are dicts or tuples, one microbatch each; for one shape the inputs of one microbatch, as a dict"
        )
    return example_inputs


def check_examples(
    model: nn.Module,
    examples: Sequence[Any],
    loss_fn: Callable[..., Tensor] | None,
    microbatch_size: int | None,
) -> None:
    """Raise ValueError unless all `examples` are the same inputs, and no two have the same shapes."""
    if len(examples) == 1:
        return
    first = read_examples(model, examples[0], loss_fn, microbatch_size)
    seen = {tuple(value.shape for value in first.inputs): 0}
    for number, example in enumerate(examples[1:], 1):
        with naming_shape(number, example):
            own = read_examples(model, example, loss_fn, None)
            if _kinds(own) != _kinds(first) or own.constants != first.constants:
                raise ValueError(
                    f"it has {_describe_kinds(own)}, and the first {_describe_kinds(first)}: expected the same inputs "
                    "in other shapes"
                )
            same = seen.setdefault(tuple(value.shape for value in own.inputs), number)
            if same != number:
                raise ValueError(f"it has the shapes of example_inputs[{same}]: leave one of them out")


def _kinds(examples: Examples) -> list[tuple[str, object]]:
    return [(value.name, value.dtype) for value in examples.inputs]


def _describe_kinds(examples: Examples) -> str:
    named = [f"{name} of {str(dtype).removeprefix('torch.')}" for name, dtype in _kinds(examples)]
    return ", ".join([*named, *(f"{name}={value!r}" for name, value in examples.constants.items())])


@contextmanager
def naming_shape(number: int, example: Any) -> Iterator[None]:
    """Let a ValueError or `ProgramError` say which example it is of."""
    values = example.items() if isinstance(example, Mapping) else enumerate(example)
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in values if isinstance(value, Tensor))
    try:
        yield
    except (ValueError, ProgramError) as error:
        raise type(error)(f"example_inputs[{number}] ({shapes}): {error}") from error


def describe_shape(manifest: Manifest) -> str:
    """One microbatch: "idx [2, 128], targets [2, 128]"."""
    return ", ".join(f"{value.name} {list(value.shape)}" for value in manifest.inputs)


@contextmanager
def naming_program(manifest: Manifest) -> Iterator[None]:
    """Let a `ProgramError` of a further shape's program say which shape it is of."""
    try:
        yield
    except ProgramError as error:
        if not manifest.shape:
            raise
        raise ProgramError(f"input shape {manifest.shape} ({describe_shape(manifest)}): {error}") from error


def guess_batch(program: Program, first: Program) -> Program:
    """Return a captured program whose inputs have the batch dimension found for `first`, the first shape."""
    dims = {value.name: value.batch_dim for value in first.inputs}
    return replace(
        program, inputs=tuple(replace(value, batch_dim=dims[value.name]) for value in program.inputs)
    )


def keep_whole(program: Program, first: Program) -> Program:
    """Keep inputs whole that `first` gives whole, if microbatches of one sequence make them look divided."""
    whole = {value.name for value in first.inputs if value.batch_dim is None}

    def place(value: Input) -> Input:
        single = value.batch_dim is not None and value.shape[value.batch_dim] == 1
        return replace(value, batch_dim=None) if single and value.name in whole else value

    return replace(program, inputs=tuple(map(place, program.inputs)))


def rename_own(program: Program, number: int) -> Program:
    """Give the constants of one stage, and tensors of the forward's code, names that no other shape's have.

    Their values follow from the shape: a name stands for one tensor in the programs of all shapes.
    """
    (stage,) = program.stages
    own = [n for n, p in stage.parameters.items() if p.kind == "constant" or is_lifted(n)]
    names = {name: f"shape_{number}.{name}" for name in own}
    graph, constants = copy_graph(stage.graph), copy_graph(stage.constants)
    for node in (*graph.nodes, *constants.nodes):
        if node.op == "get_attr":
            node.target = names.get(str(node.target), node.target)
    for node in constants.nodes:
        if node.op == "output":
            table: Any = node.args[0]
            node.args = ({names.get(name, name): value for name, value in table.items()},)
    parameters = {names.get(n, n): replace(p, name=names.get(n, n)) for n, p in stage.parameters.items()}
    buffers = {names.get(name, name): value for name, value in program.buffers.items()}
    renamed = replace(stage, graph=graph, parameters=parameters, constants=constants)
    return replace(program, stages=(renamed,), buffers=buffers)


def find_disagreement(first: Manifest, other: Manifest) -> str:
    """Return why a shape's program cannot train the parameters of the `first` shape's; "" if it can."""
    for name in COMMON:
        if getattr(first, name) != getattr(other, name):
            return f"its {name} is {getattr(other, name)!r}, the first shape's {getattr(first, name)!r}"
    own, given = (
        [f"{i.name} of {i.dtype} with the batch in dimension {i.batch_dim}" for i in manifest.inputs]
        for manifest in (other, first)
    )
    if own != given:
        return f"its inputs are {', '.join(own)}, the first shape's {', '.join(given)}"
    for name, parameter in other.parameters.items():
        known = first.parameters.get(name)
        if known is None and not other.is_saved(name):
            continue
        if known is None or parameter.kind == "constant":
            return (
                f"its {parameter.kind} {name} is {'not one' if known is None else 'one'} of the first shape's"
            )
        for field in ("shape", "dtype", "kind", "requires_grad", "placement", "initial"):
            if getattr(parameter, field) != getattr(known, field):
                found, expected = getattr(parameter, field), getattr(known, field)
                return f"its {name} has the {field} {found}, the first shape's {expected}"
    return _compare_stages(first, other)


def _compare_stages(first: Manifest, other: Manifest) -> str:
    """Which parameter is in other stages by one manifest than by the other, or which buffer is not at hand; or ""."""
    kinds = {name: parameter.kind for name, parameter in first.parameters.items()}
    own, given = (_place_tensors(manifest) for manifest in (other, first))
    for name in kinds:
        if kinds[name] == "parameter" and own.get(name) != given.get(name):
            return f"its {name} is in stages {own.get(name, [])}, the first shape's in {given.get(name, [])}"
    for name in kinds:
        absent = set(other.owners(name)) - set(first.homes(name))
        if kinds[name] == "buffer" and absent:
            return (
                f"its pipeline rank {min(absent)} reads the buffer {name}, which by the first shape's program it does "
                "not have: give this shape first"
            )
    return ""


def _place_tensors(manifest: Manifest) -> dict[str, list[int]]:
    """The stages that have each tensor."""
    found: dict[str, list[int]] = {}
    for stage in manifest.stages:
        for name in stage.parameters:
            found.setdefault(name, []).append(stage.index)
    return found
