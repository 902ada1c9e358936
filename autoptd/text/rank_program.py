"""The program of one rank: its place in the mesh, its peers, its slices, and its text."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.mesh import Coordinates
from autoptd.runtime.program.schedule import Action
from autoptd.text.reader import read_text, trace_stages


class Slice(NamedTuple):
    """The part of a tensor that a rank holds: `rows` of dimension `dim`, in order; all of it if None."""

    dim: int | None
    rows: tuple[range, ...]


class LocalParameter(NamedTuple):
    """A tensor's global shape, the shape that one rank holds, and the slice.

    Rows past the global shape are padding: in the local shape, not in the slice.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    slice: Slice


@dataclass(frozen=True)
class RankProgram:
    """The program of global rank `rank`; `code` is the text of its pipeline rank, and is what runs."""

    manifest: Manifest = field(repr=False)
    rank: int
    code: str = field(repr=False)

    @property
    def coordinates(self) -> Coordinates:
        return self.manifest.mesh.coordinates(self.rank)

    @property
    def peers(self) -> dict[str, tuple[int, ...]]:
        """Return the global ranks of its process groups by axis; its pipeline neighbours lie beside it in theirs."""
        return {axis: self.manifest.mesh.group(axis, self.rank) for axis in self.manifest.mesh.axes}

    @cached_property
    def schedule(self) -> tuple[Action, ...]:
        """Return the rank's actions in one step, in order: the text's SCHEDULE."""
        return read_text(self.code, self.manifest, self.coordinates.pipeline).actions

    @cached_property
    def parameters(self) -> dict[str, LocalParameter]:
        """Return the rank's tensors by their names in the user's ``state_dict``."""
        mesh, at = self.manifest.mesh, self.coordinates
        own = {n: p for n, p in self.manifest.parameters.items() if at.pipeline in self.manifest.owners(n)}
        held = {}
        for name, p in own.items():
            group, on = mesh.group(p.placement.axis, self.rank), p.placement[p.placement.axis]
            part = Slice(on.dim, tuple(range(*run) for run in on.runs(len(group), group.index(self.rank))))
            held[name] = LocalParameter(p.shape, p.local_shape(mesh.sizes), part)
        return held

    def module(self, device: str | torch.device = "meta") -> nn.Module:
        """Return the text's program as a module with one ``fx.GraphModule`` per stage (``stage_0``, ...).

        A stage takes (rank, received values, batch inputs), as its function does without ``p``. Parameters have the
        rank's own shapes, on `device` and without values; no process group is needed. What the text recomputes is
        computed once here and kept: the same values and gradients with more memory; its calls have the name of their
        function in `NodeInfo.recompute`. Raises ValueError for a text that does not trace.
        """
        placed = torch.device(device)
        tensors: dict[str, Tensor] = {}
        for name, local in self.parameters.items():
            parameter = self.manifest.parameters[name]
            value = torch.empty(local.local_shape, dtype=parameter.dtype, device=placed)
            tensors[name] = nn.Parameter(value, parameter.requires_grad) if parameter.kind == "parameter" else value
        root = nn.Module()
        text = read_text(self.code, self.manifest, self.coordinates.pipeline)
        for index, graph in trace_stages(text, self.manifest).items():
            for node in graph.nodes:  # rank.device, where the stage makes tensors itself
                node.kwargs = {k: placed if k == "device" else v for k, v in node.kwargs.items()}
            own = {name: tensors[name] for name in self.manifest.stages[index].parameters}
            root.add_module(f"stage_{index}", fx.GraphModule(own, graph, f"Stage{index}"))
        return root
