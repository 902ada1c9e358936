"""Several input shapes of one model: the user's examples, and the agreement of their programs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from autoptd.check.program import ProgramError
from autoptd.passes.ir.nodes import is_lifted
from autoptd.passes.ir.program import Program, constants_graph, constants_made, copy_graph
from autoptd.runtime.program.manifest import Manifest

# Fields of the manifest that are equal for all shapes, besides inputs and parameters.
COMMON = (
    *("mesh", "schedule", "num_model_chunks", "num_microbatches", "scatter_gather", "seed"),
    *("aliases", "output", "arguments", "fixed", "uninitialized", "scales_loss", "autocast"),
)


def list_examples(example_inputs: Any) -> list[Any]:
    """Return the example of each input shape: the entries of a list of dicts, tuples or lists, else the only one.

    Raises TypeError for anything else.
    """
    if example_inputs is not None and not isinstance(example_inputs, (Mapping, Sequence, Tensor)):
        raise TypeError(f"example_inputs is {example_inputs!r}; expected a dict or tuple, or a list of these")
    if isinstance(example_inputs, list) and any(isinstance(x, (Mapping, tuple, list)) for x in example_inputs):
        return example_inputs
    return [example_inputs]  # a list without one is the positional inputs of one microbatch


def naming_shape(number: int, example: Any) -> AbstractContextManager[None]:
    """Let a ValueError or `ProgramError` name the example that it is about."""
    values = example.items() if isinstance(example, Mapping) else enumerate(example)
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in values if isinstance(value, Tensor))
    return _naming(f"example_inputs[{number}] ({shapes})", ValueError, ProgramError)


def naming_program(manifest: Manifest) -> AbstractContextManager[None]:
    """Let a `ProgramError` of a further shape's program name the shape."""
    label = f"input shape {manifest.shape} ({describe_shape(manifest)})"
    return _naming(label, ProgramError) if manifest.shape else nullcontext()


@contextmanager
def _naming(label: str, *kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise type(error)(f"{label}: {error}") from error


def describe_shape(manifest: Manifest) -> str:
    """Describe one microbatch: "idx [2, 128], targets [2, 128]"."""
    return ", ".join(f"{value.name} {list(value.shape)}" for value in manifest.inputs)


def guess_batch(program: Program, first: Program) -> Program:
    """Return a captured program whose inputs have the batch dimension found for `first`, the first shape.

    `find_disagreement` refuses an input that the first shape lacks.
    """
    dims = {value.name: value.batch_dim for value in first.inputs}
    return replace(program, inputs=tuple(replace(i, batch_dim=dims.get(i.name)) for i in program.inputs))


def keep_whole(program: Program, first: Program) -> Program:
    """Keep inputs whole that are whole in `first`, if microbatches of one sequence make them look divided."""
    whole = {value.name for value in first.inputs if value.batch_dim is None}
    single = {i.name for i in program.inputs if i.batch_dim is not None and i.shape[i.batch_dim] == 1}
    inputs = (replace(i, batch_dim=None) if i.name in whole & single else i for i in program.inputs)
    return replace(program, inputs=tuple(inputs))


def rename_own(program: Program, number: int) -> Program:
    """Rename the constants of one stage and tensors of the forward's code, whose values depend on the shape.

    A name stands for one tensor in the programs of all shapes.
    """
    (stage,) = program.stages
    own = [n for n, p in stage.parameters.items() if p.kind == "constant" or is_lifted(n)]
    names = {name: f"shape_{number}.{name}" for name in own}
    made = {names.get(name, name): node for name, node in constants_made(stage.constants).items()}
    graph, constants = copy_graph(stage.graph), constants_graph(made, made)
    for node in (*graph.nodes, *constants.nodes):
        if node.op == "get_attr":
            node.target = names.get(str(node.target), node.target)
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
            what = "has no such tensor" if known is None else "has a tensor of this name"
            return f"it has the {parameter.kind} {name}, and the first shape {what}"
        for field in ("shape", "dtype", "kind", "requires_grad", "placement", "initial"):
            found, expected = getattr(parameter, field), getattr(known, field)
            if found != expected:
                return f"its {name} has the {field} {found}, the first shape's {expected}"
    for name, parameter in first.parameters.items():
        here, there = ([s.index for s in m.stages if name in s.parameters] for m in (other, first))
        if parameter.kind == "parameter" and here != there:
            return f"its {name} is in stages {here}, the first shape's in {there}"
        absent = set(other.owners(name)) - set(first.homes(name))
        if parameter.kind == "buffer" and absent:
            lacks = "which that rank does not have in the first shape's program: give this shape first"
            return f"its pipeline rank {min(absent)} reads the buffer {name}, {lacks}"
    return ""
