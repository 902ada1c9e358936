"""The sources of a program's weights: a module, a state_dict, or safetensors on disk, which are read by rows."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor, nn

from autoptd.capture.quantized_modules import read_quantized, unpack_state
from autoptd.runtime.optimizer.gradient_buckets import DTYPES
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.user_warnings import warn_caller
from autoptd.runtime.weights.file_tensor import FileTensor, Weights
from autoptd.runtime.weights.slices import all_names, check_tied, check_whole, find_name, has_values
from autoptd.weights.safetensors_folder import SafetensorsFolder

SHOWN = 3  # missing names that an error shows, with the nearest name given


def read_weights(
    weights: nn.Module | Mapping[str, Tensor] | str | Path | None, others: Weights
) -> dict[str, Tensor | FileTensor]:
    """Return whole tensors by the user's names, those of `others` for names that `weights` lacks or has without values.

    A path is a safetensors file, or a folder of them. ValueError for None or an empty folder, TypeError for others.
    """
    if weights is None:
        raise ValueError("no model to take weights from; pass weights= (module, state_dict or folder)")
    if isinstance(weights, (str, Path)):
        weights = SafetensorsFolder(weights)
    own: dict[str, Tensor | FileTensor] = {}
    if isinstance(weights, nn.Module):
        weights = read_quantized(weights)
        own |= weights.named_parameters(remove_duplicate=False)
        own |= weights.named_buffers(remove_duplicate=False)
    elif isinstance(weights, SafetensorsFolder):
        own |= unpack_state(weights.stored)
    elif isinstance(weights, Mapping):
        own |= unpack_state(weights)
        for name, value in weights.items():
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                raise TypeError(f"weights[{name!r}] is a {type(value).__name__}; expected a dense tensor")
    else:
        raise TypeError(f"weights is a {type(weights).__name__}; expected a module, a state_dict or a path")
    return own | {name: other for name, other in others.items() if name not in own or own[name].is_meta}


def check_values(manifest: Manifest, tensors: Weights) -> None:
    """Raise ValueError unless every tensor has values, or initial distributions in the manifest."""
    known = manifest.parameters
    empty = [n for n in _wanted(manifest) if not known[n].initial and not has_values(manifest, tensors, n)]
    if empty:
        unknown = any(known[name].kind == "parameter" for name in empty)
        why = manifest.uninitialized if unknown else "buffers get their values from the user only"
        raise ValueError(
            f"{len(empty)} tensors are on the meta device and have no values ({', '.join(empty[:5])}), and their "
            f"initialisation is unknown: {why}. Give weights= to bind, or initializer= to compile: a function that "
            "initialises the model in place, as you would call it on a model with real weights (each module's "
            "reset_parameters(), say); it must write all of them if the constructor cannot be called again"
        )


def check_given(manifest: Manifest, tensors: Weights) -> None:
    """Raise ValueError unless `tensors` has every tensor of the program, with values, its shape and a float dtype.

    Only some rows of tensors that the program ties are read, to compare them. Warns of tensors it does not use.
    """
    wanted = _wanted(manifest)
    own = {known for name in manifest.parameters for known in all_names(manifest, name)}
    others = [name for name in tensors if name not in own]
    missing = [name for name in wanted if not any(known in tensors for known in all_names(manifest, name))]
    if missing:
        raise ValueError(_describe_missing(manifest, others, missing, len(tensors)))
    for name in wanted:
        known, expected = find_name(manifest, tensors, name), manifest.parameters[name]
        given = tensors[known]
        if expected.dtype.is_floating_point and given.dtype not in DTYPES:
            raise ValueError(
                f"{known} is {given.dtype} in the weights given, {expected.dtype} in the program: the numbers of a "
                "quantized model need its scales to be weights; give them dequantized, or compile the quantized model"
            )
        check_whole(known, given, expected)
    check_tied(manifest, tensors)
    if others and os.environ.get("RANK", "0") == "0":
        warn_caller(
            f"{len(others)} of the tensors given are not in the program, and are ignored: "
            f"{', '.join(others[:SHOWN])}{', ...' * (len(others) > SHOWN)}. Are they of the model that was compiled?"
        )


def check_parameters(manifest: Manifest, model: nn.Module) -> None:
    """Raise ValueError unless `model` has the program's parameters, with the same ones tied and trained.

    Raises ValueError, too, if buffers that are one tensor in the program have different values in `model`.
    """
    found = dict(model.named_parameters(remove_duplicate=False))
    more = [n for n in found if n not in manifest.parameters and n not in manifest.aliases]
    fewer = [n for n, p in manifest.parameters.items() if p.kind == "parameter" and n not in found]
    if more or fewer:
        own, name, other = ("has", more[0], "lacks") if more else ("lacks", fewer[0], "has")
        reason = f"the model {own} {name}, which the program {other} ({len(more)} more, {len(fewer)} fewer)"
        raise ValueError(f"{reason}: give the model that was compiled, or compile this one")
    homes: dict[int, str] = {}
    for name, p in found.items():
        stored = manifest.aliases.get(name, name)
        if found.get(stored) is not p:
            raise ValueError(f"{name} is tied to {stored} in the program, but not in the model: tie them")
        if (home := homes.setdefault(id(p), stored)) != stored:
            raise ValueError(f"{name} is tied to {home} in the model, but not in the program: compile again")
        if manifest.parameters[stored].requires_grad != p.requires_grad:
            raise ValueError(
                f"the parameter {name} {'requires' if p.requires_grad else 'requires no'} gradient now, unlike when "
                "the model was compiled: compile it again, or bind(weights=model.state_dict()) if only its values count"
            )
    check_tied(manifest, dict(model.named_buffers(remove_duplicate=False)))


def _wanted(manifest: Manifest) -> list[str]:
    """Return the tensors that ranks take from whole weights."""
    return [n for n, p in manifest.parameters.items() if p.kind != "constant" and manifest.homes(n)]


def _describe_missing(manifest: Manifest, others: list[str], missing: list[str], given: int) -> str:
    shown = []
    for name in missing[:SHOWN]:
        ends = (other for other in others if name.endswith("." + other) or other.endswith("." + name))
        near = next(ends, "") or next(iter(get_close_matches(name, others, 1)), "")
        shown.append(f"{name}{list(manifest.parameters[name].shape)}" + f" (nearest: {near})" * bool(near))
    more = f" and {len(missing) - SHOWN} more" * (len(missing) > SHOWN)
    return (
        f"{len(missing)} of the model's {len(_wanted(manifest))} tensors are not among the {given} given: "
        f"{', '.join(shown)}{more}; give the whole model's, under the names of its state_dict. Files of the class "
        "below, or for another version of the model, have other names: give weights=autoptd.SafetensorsFolder(path, "
        "rename=function), or (where experts are saved one by one, too) load them with from_pretrained of the compiled "
        "class and save with save_pretrained(folder, save_original_format=False)"
    )
