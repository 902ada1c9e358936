"""The manifest of a compiled program, read from its stages and the user's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx, nn

from autoptd.capture.example_inputs import read_arguments
from autoptd.loss.class_ranges import describe_rows
from autoptd.loss.labels import describe_labels
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.program import Program
from autoptd.passes.stages.cut import boundaries
from autoptd.runtime.program.manifest import Manifest, Proved, StageInterface
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.weights.slices import hash_values
from autoptd.runtime.weights.submodules import name_layers


def describe_program(
    program: Program,
    parameters: Mapping[str, Parameter],
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
) -> Manifest:
    """Return the manifest of a cut program, with one microbatch a step under GPipe until a schedule is set."""
    return Manifest(
        mesh=program.mesh,
        schedule="gpipe",
        num_model_chunks=len(program.stages) // program.mesh.pipeline,
        num_microbatches=1,
        microbatch_size=_microbatch_size(program),
        scatter_gather=True,
        seed=0,
        inputs=describe_rows(program, describe_labels(program)),
        stages=_interfaces(program),
        parameters=parameters,
        aliases=program.aliases,
        output=program.output,
        fixed=program.fixed,
        rules=program.rules,
        layers=name_layers(model),
        training=model.training,
        transient=_transient(parameters, model),
        model_flops=program.model_flops,
        arguments=read_arguments(model, loss_fn),
        uninitialized=program.uninitialized,
        proved=_proofs(program, parameters),
        scales_loss=any(_is_float16(node) for stage in program.stages for node in stage.graph.nodes),
    )


def _microbatch_size(program: Program) -> int:
    """Return the sequences of a microbatch: the batch dimension of the inputs that have one."""
    return min((i.shape[i.batch_dim] for i in program.inputs if i.batch_dim is not None), default=1)


def _interfaces(program: Program) -> tuple[StageInterface, ...]:
    """Read from the graphs what each stage receives; it sends what the next one receives."""
    received = boundaries(program)
    return tuple(
        StageInterface(
            index,
            received[index],
            received[index + 1] if index + 1 < len(received) else (),
            tuple(str(n.target) for n in stage.graph.nodes if info(n).role == "input"),
            tuple(stage.parameters),
        )
        for index, stage in enumerate(program.stages)
    )


def _transient(parameters: Mapping[str, Parameter], model: nn.Module) -> tuple[str, ...]:
    """List the buffers that the user's ``state_dict`` does not have."""
    saved = model.state_dict().keys()
    return tuple(sorted(name for name, p in parameters.items() if p.kind == "buffer" and name not in saved))


def _is_float16(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16


def _proofs(program: Program, parameters: Mapping[str, Parameter]) -> tuple[Proved, ...]:
    """List the buffers whose values passes relied on, each with the hash of its values."""
    buffers = ((name, program.buffers[name], parameters[name].dtype) for name in sorted(program.proved))
    return tuple(Proved(name, hash_values(values, dtype)) for name, values, dtype in buffers)


def write_title(name: str, parameters: Mapping[str, Parameter]) -> str:
    """Write a title: a name and the number of parameters of the whole model, tied ones once."""
    count = sum(torch.Size(p.shape).numel() for p in parameters.values() if p.kind == "parameter")
    return f"{name}, {count:,} parameters"
