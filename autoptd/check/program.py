"""Prove statically, over all ranks, that the parts of a program agree."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from autoptd.check.tensor_parallel import prove_tensor_parallel
from autoptd.options import check_counts, check_modes, check_seed, fold_experts
from autoptd.passes.ir.nodes import nodes_in, where
from autoptd.passes.ir.program import Stage, constants_made
from autoptd.passes.operators.proof import PlacementError
from autoptd.runtime.program.manifest import Manifest, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter, Partial, Placement, Shard
from autoptd.runtime.program.schedule import Schedule
from autoptd.runtime.program.schedule_check import ScheduleError, check_schedule


class ProgramError(Exception):
    """A program that contradicts itself: what was found, where, what was expected, and a way out."""


def check_manifest(manifest: Manifest) -> None:
    """Raise `ProgramError` for a manifest that no program can have, whatever its texts say."""
    try:
        _check_values(manifest)
    except ValueError as error:
        raise ProgramError(f"the manifest: {error}; correct it in the manifest, or save the program again") from None


def _check_values(manifest: Manifest) -> None:
    mesh, counts = manifest.mesh, ("microbatch_size", "num_microbatches", "num_model_chunks", "num_shapes")
    check_counts(**{f"{axis} of the mesh": size for axis, size in mesh.axes.items()})
    check_counts(**{name: getattr(manifest, name) for name in counts})
    check_seed(manifest.seed)
    check_modes(schedule=manifest.schedule)
    fold_experts(mesh, mesh.expert)
    if mesh.ranks is not None and sorted(mesh.ranks) != list(range(mesh.size)):
        raise ValueError(f"ranks of the mesh are {mesh.ranks}; expected each of 0 to {mesh.size - 1} once")


def check_program(manifest: Manifest, stages: Sequence[Stage], schedule: Schedule) -> tuple[str, ...]:
    """Raise `ProgramError` for the first contradiction between `manifest`, `stages` and `schedule`.

    The `stages` are traced from the texts, with the arguments and parameters that the manifest gives each. Proved, for
    all ranks at once: every send has its receive, in the same order at both ends of each channel, and no cycle of waits
    remains; a stage returns what the next one takes; the slices of every parameter add up to it; and the tensor ranks
    together compute what one device would, forward and backward (`tensor_parallel`). All tensor ranks of a stage run
    one text without branches, so their collectives have one order. Only `verify` compares with the model.

    Returns a line for each operator that the proof does not cover.
    """
    _check_schedule(manifest, schedule)
    for parameter in manifest.parameters.values():
        _check_placement(parameter, manifest.mesh)
    _check_aliases(manifest)
    _check_boundaries(manifest)
    for stage, interface in zip(stages, manifest.stages, strict=True):
        _check_constants(stage, interface, manifest)
        _check_results(stage, interface, manifest)
    try:
        return prove_tensor_parallel(manifest, stages)
    except PlacementError as error:
        raise ProgramError(str(error)) from None


def _check_schedule(manifest: Manifest, schedule: Schedule) -> None:
    p, v, m = manifest.mesh.pipeline, manifest.num_model_chunks, manifest.num_microbatches
    if len(manifest.stages) != p * v:
        raise ProgramError(
            f"the manifest lists {len(manifest.stages)} stages; expected {p * v}: {v} model chunks on each of {p} "
            "pipeline ranks"
        )
    try:
        check_schedule(schedule, p, v, m)
    except ScheduleError as error:
        raise ProgramError(f"schedule: {error}; correct SCHEDULE in the program texts, or compile again") from error


def _check_axes(what: str, placement: Placement, mesh: Mesh) -> None:
    known = [*mesh.axes, *["expert"] * (mesh.expert > mesh.tensor)]
    for axis, on in placement.items():
        if axis not in known or isinstance(on, Partial) or isinstance(on, Shard) is (on.dim is None):
            raise ProgramError(
                f"{what} has the placement {on} on the axis {axis}; expected one of {', '.join(known)}, and on it "
                "a shard with a dimension, or a replica without one; correct it in the manifest"
            )


def _check_placement(parameter: Parameter, mesh: Mesh) -> None:
    shape, name = parameter.shape, f"parameter {parameter.name}{list(parameter.shape)}"
    _check_axes(name, parameter.placement, mesh)
    for axis, placement in parameter.placement.items():
        dim, rows = placement.dim, sum(segment.rows for segment in placement.segments)
        if dim is None:
            continue
        if not 0 <= dim < len(shape):
            raise ProgramError(f"{name} is divided along dimension {dim}, which does not exist")
        if placement.padding < 0 or rows - placement.padding != shape[dim]:
            raise ProgramError(
                f"{name}: its placement has {rows} rows, {placement.padding} of padding, expected {shape[dim]} of "
                f"dimension {dim}; correct its placement in the manifest"
            )
        for segment in placement.segments:
            if segment.divided and segment.size % mesh.sizes[axis]:
                raise ProgramError(
                    f"{name}: a segment of {segment.outer} x {segment.size} x {segment.inner} rows does not divide "
                    f"over {axis}={mesh.sizes[axis]}; leave it undivided, or compile for a size that divides it"
                )


def _check_aliases(manifest: Manifest) -> None:
    for alias, name in manifest.aliases.items():
        if name not in manifest.parameters:
            raise ProgramError(f"{alias} is an alias of {name}, which is not a parameter in the manifest")


def _check_constants(stage: Stage, interface: StageInterface, manifest: Manifest) -> None:
    made = constants_made(stage.constants)
    for name in interface.parameters:
        if manifest.parameters[name].kind == "constant" and name not in made:
            raise ProgramError(
                f"stage {interface.index} reads the constant {name}; constants(p) of its text makes "
                f"{', '.join(made) or 'none'}"
            )


def _check_boundaries(manifest: Manifest) -> None:
    """Raise `ProgramError` unless a stage and the next list the same values of their boundary in order."""
    sends = [(), *(stage.sends for stage in manifest.stages)]
    receives = [*(stage.receives for stage in manifest.stages), ()]
    for index, ends in enumerate(zip(sends, receives, strict=True)):
        for sent, received in zip_longest(*ends):
            if sent != received:
                raise ProgramError(
                    f"stage {index - 1} sends {sent or 'nothing'}, and stage {index} receives {received or 'nothing'}; "
                    "correct one of the two in the manifest"
                )
            _check_axes(f"{sent.name}, which stage {index} receives,", sent.placement, manifest.mesh)


def _check_results(stage: Stage, interface: StageInterface, manifest: Manifest) -> None:
    at, following = f"stage {interface.index}", interface.index + 1
    results = nodes_in(stage.graph.output_node().args[0])
    values = [node.meta["val"] for node in results]
    wanted = [(f"stage {following} takes {b.name} as", _write(b.dtype, b.shape)) for b in interface.sends]
    if following == len(manifest.stages):
        losses = [v for v in values[:1] if isinstance(v, torch.Tensor) and v.is_floating_point() and not v.dim()]
        wanted = [("expected", _describe(losses[0]) if losses else "a scalar floating-point loss")]
    for result in interface.outputs:
        shape = result.placement.local_shape(result.shape, manifest.mesh.sizes)
        wanted.append((f"the output {result.name} is", _write(result.dtype, shape)))
    if len(results) != len(wanted):
        shown = ", ".join(map(" ".join, wanted)) or "expected none"
        raise ProgramError(f"{at} returns {len(results)} values ({', '.join(map(str, results))}); {shown}")
    for node, value, (use, expected) in zip(results, values, wanted, strict=True):
        if _describe(value) != expected:
            raise ProgramError(f"{at}: {where(node)} is {_describe(value)}; {use} {expected}")


def _describe(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return _write(value.dtype, value.shape) if is_tensor else f"a {type(value).__name__}"


def _write(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
