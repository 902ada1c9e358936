"""The manifest: what a rank must know besides its program text, as plain data, written to manifest.json."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch

from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import REPLICATED, Parameter, Placement


@dataclass(frozen=True)
class Input:
    """One tensor of the user's batch, as ONE microbatch has it; `batch_dim` None: every one gets it whole.

    Of labels, `ignore_index` is the number that their mean loss leaves out, and `skipped` how many at the begin of
    their last dimension it does not read; None: no labels, or of a loss of which that is not known. With `weighs` the
    model's loss is that mean and nothing beside it, so that microbatches count by how many valid ones they have.
    Row numbers, of a table or of a loss's classes, must be below `rows`, the fewest of these, or be `exempt` there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    ignore_index: int | None = None
    skipped: int = 0
    weighs: bool = False
    rows: int | None = None
    exempt: int | None = None


def count_tokens(inputs: Iterable[Input]) -> int:
    """Return the tokens of a sequence: the numbers that a sample has in the largest input of integers."""
    rows = (i for i in inputs if i.batch_dim is not None and len(i.shape) > 1)
    whole = (i for i in rows if not i.dtype.is_floating_point and i.dtype != torch.bool)  # a mask has pairs of tokens
    return max((prod(i.shape) // i.shape[i.batch_dim or 0] for i in whole), default=0)


@dataclass(frozen=True)
class Boundary:
    """One tensor that crosses from a stage to the next, as one tensor rank holds it.

    Where `placement` divides it, each tensor rank holds its own part already (no scatter/gather); else all the same.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placement: Placement = REPLICATED

    @property
    def bytes(self) -> int:
        """The bytes that one tensor rank holds."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Result:
    """A tensor that a call returns besides the loss: one of ``compile(outputs=...)``.

    `path` is its place in what the model returns: ("logits",), or ("hidden_states", "2") of several. `shape` is that of
    one microbatch, on all tensor ranks together, and `batch_dim` its samples; without one all microbatches are stacked.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = None
    placement: Placement = REPLICATED

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class StageInterface:
    """The arguments and results of stage `index`; its function is ``stage_<index>(rank, p, *receives, *inputs)``.

    It returns what it `sends`, or the loss, and then the `outputs` that are made in it.
    """

    index: int
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[Result, ...] = ()


OutputKind = Literal["tensor", "tuple", "dict", "dataclass"]


@dataclass(frozen=True)
class Output:
    """The model's result around the loss; with `separate_loss` a call returns the loss, and then this as a second."""

    kind: OutputKind
    loss: str = ""
    type: str = ""
    fields: tuple[str, ...] = ()
    separate_loss: bool = False


@dataclass(frozen=True)
class Manifest:
    """The plan in numbers: mesh, schedule, batch, stage interfaces, parameters.

    `aliases` maps a further ``state_dict`` name of a tied tensor to the name it is stored under. `layers` are the
    classes in torch.nn of the user's modules, by path, and `training` is the mode that these were in. `transient` are
    the buffers that the user's module keeps out of its ``state_dict``. `arguments` are the names that a call's
    positions stand for: those of the model's own forward, captured or not, then loss_fn's targets; empty: `inputs`.
    `uninitialized` says why the weights of a model on the meta device must be given; empty where they can be drawn.
    With `scales_loss` something is computed in float16, whose range gradients need scaling for. `autocast` is the dtype
    of the autocast that was on around compile, whose casts the programs have; `device` the type of device that the
    model's forward saw. `model_flops` are those of one microbatch's products in the plain model, forward and backward:
    on any mesh the same. Of a model compiled for several input shapes, `shape` is the number of this one, and the first
    knows their number `num_shapes`. `fixed` are the arguments that are no tensors, and their values as `encode_value`
    gives them. `proved` are the buffers whose values were compiled into the program of any shape, and the hashes of
    these (`hash_values`): it holds for no others. `rules` are the user's, by which check proves custom operators, and
    `recompute` is what the user asked for.
    """

    mesh: Mesh
    schedule: str
    num_model_chunks: int
    num_microbatches: int
    microbatch_size: int
    scatter_gather: bool
    seed: int
    inputs: tuple[Input, ...]
    stages: tuple[StageInterface, ...]
    parameters: Mapping[str, Parameter]
    aliases: Mapping[str, str]
    output: Output
    layers: Mapping[str, str] = field(default_factory=dict)
    training: bool = True
    fixed: Mapping[str, Any] = field(default_factory=dict)
    transient: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    uninitialized: str = ""
    proved: Mapping[str, str] = field(default_factory=dict)
    scales_loss: bool = False
    autocast: torch.dtype | None = None
    device: str = "cpu"
    model_flops: int = 0
    shape: int = 0
    num_shapes: int = 1
    rules: Mapping[str, str] = field(default_factory=dict)
    recompute: Any = "none"  # a mode, or a number of layers

    @property
    def weighing_labels(self) -> Input | None:
        """Return the labels whose valid count weighs microbatches; None if all weigh alike."""
        return next((labels for labels in self.inputs if labels.weighs), None)

    def owners(self, name: str) -> tuple[int, ...]:
        """Pipeline ranks that hold parameter `name`, ascending; several when it is tied across stages."""
        return tuple(sorted({s.index % self.mesh.pipeline for s in self.stages if name in s.parameters}))

    def homes(self, name: str) -> tuple[int, ...]:
        """Pipeline ranks that keep `name`: its owners, or without any the first, for checkpoints."""
        return self.owners(name) or ((0,) if self.is_saved(name) else ())

    def is_saved(self, name: str) -> bool:
        """Return whether the user's ``state_dict`` has `name`."""
        return self.parameters[name].kind != "constant" and name not in self.transient
