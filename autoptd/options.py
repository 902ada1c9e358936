"""Check the options of `autoptd.compile` before anything else."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.recompute import MODES
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import SCHEDULES

LAYOUTS = ("sbh", "bsh")
AXES = ("tensor", "pipeline", "data")


@dataclass(frozen=True)
class Options:
    """The options by which passes rewrite a model: those of `autoptd.compile` that are not in the manifest."""

    recompute: str | int = "none"
    fuse: bool = True
    layout: str = "sbh"
    rules: Mapping[Any, str] | None = None
    sequence_parallel: bool | None = None
    device: str | torch.device | None = None
    cluster: Cluster | None = None
    overlap: bool = True


def read_mesh(mesh: object) -> Mesh:
    """Read the mesh from (tensor, pipeline, data), or from a DeviceMesh with dims "tp", "pp" and "dp" in any order.

    Raises TypeError for another type, ValueError for wrong entries.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return _read_device_mesh(mesh)
    if isinstance(mesh, str) or not isinstance(mesh, Sequence):  # of a set the order is chance
        expected = 'three integers (tensor, pipeline, data), e.g. mesh=(2, 2, 2), a DeviceMesh, or "auto"'
        raise TypeError(f"mesh is {mesh!r}; expected {expected}")
    entries = tuple(mesh)
    if len(entries) != len(AXES):
        raise ValueError(f"mesh is {entries}; expected three: (tensor, pipeline, data), e.g. mesh=(2, 2, 2)")
    named = enumerate(zip(AXES, entries, strict=True))
    check_counts(**{f"mesh entry {position} ({axis})": entry for position, (axis, entry) in named})
    return Mesh(*entries)


def fold_experts(mesh: Mesh, expert: int | None) -> Mesh:
    """Return the mesh with experts divided over `expert` ranks, by default over the tensor ranks.

    Raises ValueError unless they can be all tensor ranks of as many data ranks, which divide the data ranks.
    """
    check_free_counts(expert=expert)
    known = [mesh.tensor * n for n in range(1, mesh.data + 1) if mesh.data % n == 0]
    if expert is not None and expert not in known:
        fits = ", ".join(map(str, known))
        raise ValueError(f"expert={expert} does not fit {mesh}: expected t times a divisor of d, one of {fits}")
    if mesh.ranks is not None and expert not in (None, mesh.tensor):
        raise ValueError(f"expert={expert} needs the ranks in torchrun's order: give mesh=(t, p, d)")
    return Mesh(**mesh.axes, ranks=mesh.ranks, expert=expert or 0)


def _read_device_mesh(mesh: DeviceMesh) -> Mesh:
    names = mesh.mesh_dim_names or ()
    if sorted(names) != ["dp", "pp", "tp"]:
        raise ValueError(
            f'the DeviceMesh has dims {names}; expected "tp", "pp" and "dp": '
            'init_device_mesh(device, (d, p, t), mesh_dim_names=("dp", "pp", "tp"))'
        )
    ordered = mesh.mesh.permute([names.index(name) for name in ("dp", "pp", "tp")])
    data, pipeline, tensor = ordered.shape
    ranks = tuple(int(rank) for rank in ordered.flatten().tolist())
    return Mesh(tensor, pipeline, data, None if ranks == tuple(range(len(ranks))) else ranks)


def check_modes(*, schedule: str, recompute: object = MODES[0], layout: str = LAYOUTS[0]) -> None:
    """Raise ValueError for a schedule, a mode of recomputing or a layout that does not exist."""
    if schedule not in SCHEDULES:
        (nearest,) = difflib.get_close_matches(str(schedule), SCHEDULES, n=1, cutoff=0.0)
        known = ", ".join(SCHEDULES)
        raise ValueError(f"unknown schedule {schedule!r}; did you mean {nearest!r}? Known schedules: {known}")
    layers = isinstance(recompute, int) and not isinstance(recompute, bool) and recompute > 0
    if not layers and recompute not in MODES:
        raise ValueError(f"recompute is {recompute!r}; expected {', '.join(map(repr, MODES))}, or a number of layers")
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected 'sbh' (sequence first) or 'bsh' (the model's own)")


def check_seed(seed: object) -> None:
    """Raise TypeError or ValueError unless `seed` is an integer of 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed is {seed!r}; expected an integer")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}; expected an integer of 64 bits, such as {seed % (1 << 32)}")


def check_flags(**flags: object) -> None:
    """Raise ValueError unless each is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; expected True or False")


def check_counts(**counts: object) -> None:
    """Raise ValueError unless each is a positive integer."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; expected a positive integer")


def check_free_counts(**counts: object) -> None:
    """Raise ValueError unless each is a positive integer, or None to let autoptd choose it."""
    check_counts(**{name: value for name, value in counts.items() if value is not None})


def check_planned(given: Mapping[str, object]) -> bool:
    """Return whether the mesh `given` is "auto"; raise ValueError if an argument for that is missing, or unfit."""
    mesh = given["mesh"]
    if isinstance(mesh, str) and mesh == "auto":
        if missing := [f"{name}=" for name in ("world_size", "global_batch", "cluster") if given[name] is None]:
            raise ValueError(
                f'mesh="auto" needs {", ".join(missing)}: give the number of devices (world_size), the sequences of a '
                "step (global_batch), and the cluster"
            )
        for name in ("num_microbatches", "expert"):
            if given[name] is not None:
                raise ValueError(f'{name}= does not go with mesh="auto", which chooses it: leave it out')
        return True
    for name in ("world_size", "global_batch"):
        if given[name] is not None:
            raise ValueError(f'{name}= goes with mesh="auto" only: leave it out with mesh={mesh!r}')
    return False
