"""A rank's slices of the model's tensors: taken from whole tensors, registered in modules, and gathered again."""

from collections.abc import Callable, Container, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.hashing import hash_words, read_words
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.weights.file_tensor import FileTensor, Weights, copy_rows, read_whole
from autoptd.runtime.weights.initialization import draw_slice
from autoptd.runtime.weights.submodules import make_sliced_module

Slices = Mapping[str, Tensor]  # of a rank, by name
Constants = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class OnCPU(dict[str, Tensor]):
    """Tensors on the CPU, each from `get` when it is read: a program's constants are computed from them."""

    def __init__(self, get: Callable[[str], Tensor]) -> None:
        self._get = get

    def __missing__(self, name: str) -> Tensor:
        return self._get(name).detach().cpu()


def take_slices(
    manifest: Manifest, rank: Rank, constants: Constants, weights: Weights, drawn: bool, known: Container[str]
) -> dict[str, Tensor]:
    """Return this rank's slice of every tensor it keeps, by name, in the manifest's order, in fresh memory.

    The `known` names are left out: another program of this rank has them.

    `weights` has whole tensors under the user's names. Only those that this rank keeps are read (of divided ones in
    files only its rows), and those that its constants need. With `drawn`, others are initialised as the manifest says.
    """
    here = rank.coordinates.pipeline
    kept = [p for n, p in manifest.parameters.items() if n not in known and here in manifest.homes(n)]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        needed = any(parameter.kind == "constant" for parameter in kept)
        computed = constants(OnCPU(lambda name: read_whole(weights[name]))) if needed else {}
        slices = {}
        for parameter in kept:
            name, source = parameter.name, computed if parameter.kind == "constant" else weights
            if drawn and parameter.initial and not has_values(manifest, weights, name):
                slices[name] = draw_slice(parameter, rank, manifest.seed)
            else:
                slices[name] = take_slice(parameter, source[find_name(manifest, source, name)], rank)
    return slices


def refresh_constants(manifest: Manifest, rank: Rank, constants: Constants, slices: Slices) -> None:
    """Compute this rank's constants again from the buffers among its `slices`. A collective of the tensor group."""
    own = [name for name, p in manifest.parameters.items() if p.kind == "constant" and name in slices]
    if not own:
        return

    def join(name: str) -> Tensor:
        placement, own = manifest.parameters[name].placement, slices[name].detach()
        return placement["tensor"].join(rank.group("tensor").all_gather(own)) if placement.is_divided else own

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        computed = constants(OnCPU(join))
        for name in own:
            slices[name].copy_(take_slice(manifest.parameters[name], computed[name], rank))


def has_values(manifest: Manifest, tensors: Weights, name: str) -> bool:
    """Return whether the tensor stored as `name` is among `tensors` and not on the meta device."""
    return any(not tensors[known].is_meta for known in all_names(manifest, name) if known in tensors)


def find_name(manifest: Manifest, tensors: Weights, name: str) -> str:
    """Return the name or alias of the tensor stored as `name` that is in `tensors`; ValueError if none is."""
    for candidate in all_names(manifest, name):
        if candidate in tensors:
            return candidate
    shape = list(manifest.parameters[name].shape)
    raise ValueError(f"no tensor {name}{shape} among the {len(tensors)} given: give the whole model's")


def all_names(manifest: Manifest, name: str) -> tuple[str, ...]:
    """Return `name` and the aliases of the tensor stored under it."""
    return name, *(alias for alias, stored in manifest.aliases.items() if stored == name)


def check_whole(name: str, whole: Tensor | FileTensor, parameter: Parameter) -> None:
    """Raise ValueError unless the tensor given as `name` has values, and the shape of the `parameter`."""
    if whole.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: give real weights=")
    if tuple(whole.shape) != parameter.shape:
        raise ValueError(
            f"{name} has shape {list(whole.shape)} in the weights given, {list(parameter.shape)} in the program: give "
            "the weights of the model that was compiled, or compile the model with their sizes"
        )


def take_slice(parameter: Parameter, whole: Tensor | FileTensor, rank: Rank) -> Tensor:
    """Return this rank's slice of the `whole` tensor, copied to its device and to the parameter's dtype."""
    check_whole(parameter.name, whole, parameter)
    on_axis, group = rank.holds(parameter.placement)
    made = torch.zeros(parameter.local_shape(rank.mesh.sizes), dtype=parameter.dtype, device=rank.device)
    if on_axis.dim is None:
        return made.copy_(read_whole(whole))
    for rows in on_axis.rows(group.size, group.index):
        into = made.narrow(on_axis.dim, rows.local, rows.count)
        copy_rows(whole, on_axis.dim, rows.first, rows.first + rows.count, into)
    return made


def hash_values(tensor: Tensor, dtype: torch.dtype) -> str:
    """Return a hash of a tensor's shape and its values in `dtype`; a wider floating dtype gives the same."""
    values = tensor.detach().to(dtype)
    values = values.double() + 0 if values.is_floating_point() else values  # -0 is the same value as 0
    return f"{list(values.shape)} {hash_words(read_words(values)):#x}"


def hash_parts(manifest: Manifest, slices: Slices) -> dict[str, str]:
    """Return a hash of each of a rank's `slices` of a divided buffer that the program was proved with."""
    known = {name: manifest.parameters[name] for name in manifest.proved if name in slices}
    return {n: hash_values(slices[n], p.dtype) for n, p in known.items() if p.placement.is_divided}


def check_proof(manifest: Manifest, tensors: Weights, parts: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for other values of a buffer than the program was proved with; `parts` are of `hash_parts`."""
    for proved, whole in manifest.proved.items():
        known = manifest.parameters[proved]
        for name in all_names(manifest, proved):
            given = tensors.get(name)
            part = given is not None and known.placement.is_divided and tuple(given.shape) != known.shape
            digest = (parts or {}).get(proved) if part else whole
            if given is None or given.is_meta or digest is None:
                continue
            if hash_values(read_whole(given), known.dtype) != digest:
                raise ValueError(
                    f"the buffer {name} is given other values than it had when the program was compiled: the program "
                    "was compiled with the old ones (a mask that was proved causal, say) and is right for them only; "
                    "compile again from a model with the new values, or leave the buffer as it was"
                )


def check_tied(manifest: Manifest, tensors: Weights) -> None:
    """Raise ValueError if the names of one tensor of the program have different values in `tensors`."""
    for stored in dict.fromkeys(manifest.aliases.values()):
        names = [n for n in all_names(manifest, stored) if n in tensors and not tensors[n].is_meta]
        for other in names[1:]:
            if not _are_same(tensors[names[0]], tensors[other], manifest.parameters[stored].dtype):
                raise ValueError(
                    f"{names[0]} and {other} are one tensor in the program, and differ in the weights given: compile "
                    "the model without tying them, or give the weights of a model that ties them"
                )


def _are_same(one: Tensor | FileTensor, two: Tensor | FileTensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors have the same values in `dtype`: all values in memory, or some rows of files."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one is two or one.is_set_to(two) or torch.equal(one.to(dtype), two.to(one.device, dtype))
    count, *inner = one.shape or (0,)
    if one.shape != two.shape or not count:
        return one.shape == two.shape
    found = torch.zeros(2, 3, 1, *inner, dtype=dtype)
    for rows, tensor in zip(found, (one, two), strict=True):
        for into, row in zip(rows, (0, count // 2, count - 1), strict=True):
            copy_rows(tensor, 0, row, row + 1, into)
    return torch.equal(*found)


def register_slices(root: nn.Module, manifest: Manifest, slices: Slices) -> None:
    """Register `slices` below `root` under all their dotted names, in submodules; constants are not saved.

    Aliases come last, as in the user's modules, so that a tied tensor is listed under the name it is stored under.
    """
    modules = {"": root}
    tensors = dict(slices)
    for name, own in slices.items():
        if manifest.parameters[name].kind == "parameter":
            tensors[name] = nn.Parameter(own, manifest.parameters[name].requires_grad)
    aliases = {alias: name for alias, name in manifest.aliases.items() if name in slices}
    for name, stored in ({name: name for name in slices} | aliases).items():
        path, _, leaf = name.rpartition(".")
        module, tensor = _open_path(modules, path, manifest.layers), tensors[stored]
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor, persistent=manifest.is_saved(stored))


def _open_path(modules: dict[str, nn.Module], path: str, layers: Mapping[str, str]) -> nn.Module:
    if path not in modules:
        above, _, name = path.rpartition(".")
        modules[path] = make_sliced_module(layers.get(path, ""))
        _open_path(modules, above, layers).add_module(name, modules[path])
    return modules[path]


def load_whole(manifest: Manifest, rank: Rank, slices: Slices, state: Mapping[str, Tensor]) -> None:
    """Write this rank's slices of a whole `state` into `slices`. ValueError where it does not fit."""
    names = saved_names(manifest)
    if unknown := sorted(set(state) - set(names) - set(manifest.aliases)):
        raise ValueError(
            f"{len(unknown)} names of the state are unknown to the compiled model: "
            f"{', '.join(unknown[:5])}; give the state_dict of the model that was compiled"
        )
    check_proof(manifest, state)
    check_tied(manifest, state)
    # All are looked up before any is changed.
    whole = {name: state[find_name(manifest, state, name)] for name in names}
    with torch.no_grad():
        for name, own in slices.items():
            if name not in whole:
                continue
            value = take_slice(replace(manifest.parameters[name], dtype=own.dtype), whole[name], rank)
            # A value that was rounded to the whole one's dtype, as full_state_dict does, is no other value.
            rounded = own.to(whole[name].dtype).to(own.dtype)
            own.copy_(torch.where(rounded == value, own, value))


def gather_whole(manifest: Manifest, rank: Rank, slices: Slices) -> dict[str, Tensor]:
    """Return every saved tensor, whole and on the CPU, under all its names, on global rank 0; {} elsewhere."""
    gathered = {n: x for n in saved_names(manifest) if (x := gather_tensor(manifest, rank, slices, n)) is not None}
    # A buffer that the user's module does not save is not gathered, whatever its names.
    return gathered | {alias: gathered[s] for alias, s in manifest.aliases.items() if s in gathered}


def saved_names(manifest: Manifest) -> list[str]:
    """Return the names under which the tensors of a saved model are stored, in the manifest's order."""
    return [name for name in manifest.parameters if manifest.is_saved(name)]


def gather_tensor(manifest: Manifest, rank: Rank, slices: Slices, name: str) -> Tensor | None:
    """Return the whole tensor `name` on the CPU of global rank 0, None elsewhere. Every rank must call it.

    The first pipeline rank with it joins the slices, those of experts first, and broadcasts them along the pipeline.
    """
    root, at = rank.mesh.coordinates(0), rank.coordinates
    parameter, home = manifest.parameters[name], manifest.homes(name)[0]
    whole, on_axis = torch.empty(0), parameter.placement[parameter.placement.axis]
    if at.pipeline == home:
        own = slices[name].detach().to(parameter.dtype)
        if "expert" in parameter.placement:
            own = torch.cat(rank.group("exchange").all_gather(own))
        if at.data == root.data:
            whole = on_axis.join(rank.group("tensor").all_gather(own))
    if (at.data, at.tensor) != (root.data, root.tensor):
        return None
    if at.pipeline != home:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=rank.device)
    whole = rank.group("pipeline").broadcast(whole, home)
    return whole.to("cpu", copy=True) if rank.number == 0 else None
