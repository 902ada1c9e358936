"""The manifest of a compiled program, read from its stages and the user's model."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoptd.capture.example_inputs import read_arguments
from autoptd.capture.results import LossFunction
from autoptd.loss import describe_inputs
from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import Program
from autoptd.passes.stages.cut import boundaries
from autoptd.runtime.program.manifest import Manifest, StageInterface
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.weights.slices import hash_values
from autoptd.runtime.weights.submodules import name_layers


def describe_program(
    program: Program, parameters: Mapping[str, Parameter], model: nn.Module, loss_fn: LossFunction, **job: Any
) -> Manifest:
    """Return the manifest of a cut program; `job` are its fields that follow from the arguments of `compile`."""
    used = [(n, program.buffers[n], parameters[n].dtype) for n in sorted(program.proved)]
    same = ("mesh", "aliases", "output", "fixed", "rules", "model_flops", "uninitialized")
    saved = model.state_dict().keys()
    sizes = [i.shape[i.batch_dim] for i in program.inputs if i.batch_dim is not None]
    values = [node.meta.get("val") for stage in program.stages for node in stage.graph.nodes]
    return Manifest(
        **{name: getattr(program, name) for name in same},
        num_model_chunks=len(program.stages) // program.mesh.pipeline,
        microbatch_size=min(sizes, default=1),
        inputs=describe_inputs(program),
        stages=tuple(_interfaces(program)),
        parameters=parameters,
        layers=name_layers(model),
        training=model.training,
        transient=tuple(sorted(n for n, p in parameters.items() if p.kind == "buffer" and n not in saved)),
        arguments=read_arguments(model, loss_fn),
        proved={name: hash_values(values, dtype) for name, values, dtype in used},
        scales_loss=any(getattr(value, "dtype", None) is torch.float16 for value in values),
        autocast=None if program.autocast is None else program.autocast.dtype,
        device=program.device,
        **job,
    )


def _interfaces(program: Program) -> Iterator[StageInterface]:
    """Read from the graphs what each stage receives; it sends what the next one receives."""
    received = boundaries(program)
    for index, (stage, takes, gives) in enumerate(zip(program.stages, received, (*received[1:], ()), strict=True)):
        inputs = tuple(str(n.target) for n in stage.graph.nodes if info(n).role == "input")
        outputs = info(stage.graph.output_node()).outputs
        yield StageInterface(index, takes, gives, inputs, tuple(stage.parameters), outputs)


def write_title(name: str, parameters: Mapping[str, Parameter]) -> str:
    """Write a title: a name and the number of parameters of the whole model, tied ones once."""
    count = sum(torch.Size(p.shape).numel() for p in parameters.values() if p.kind == "parameter")
    return f"{name}, {count:,} parameters"
