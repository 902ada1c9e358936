"""Make random weights and batches for `verify`: whole weights in float64, and a batch for every replica."""

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor, fx, nn

from autoptd.loss import find_lookups, find_sources
from autoptd.passes.ir.program import Program
from autoptd.runtime.program.manifest import Input, Manifest
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.weights.file_tensor import read_whole
from autoptd.runtime.weights.slices import all_names, find_name, has_values
from autoptd.verification.float64 import promote
from autoptd.weights.sources import read_weights

DEVIATION = 0.02  # of random weights, as GPTs are initialised


def draw_weights(
    manifest: Manifest,
    model: nn.Module,
    buffers: Mapping[str, Tensor],
    weights: str | Mapping[str, Tensor] | None,
    seed: int,
) -> dict[str, Tensor]:
    """Return whole tensors on the CPU by their names in the manifest, floating ones in float64.

    `weights` None: the model's own; "random": parameters drawn from `seed` and their names alone; else taken from
    there, and from the model if missing there. Raises ValueError naming what has no values.
    """
    if isinstance(weights, str) and weights != "random":
        raise ValueError(f"weights={weights!r} is unknown: expected None, 'random', or tensors by name")
    source = read_weights(model, buffers)
    if weights is not None and not isinstance(weights, str):
        source = read_weights(weights, source)
    found: dict[str, Tensor] = {}
    missing = []
    for name, parameter in manifest.parameters.items():
        if parameter.kind == "constant":
            continue
        whole = read_whole(source[find_name(manifest, source, name)])
        if tuple(whole.shape) != tuple(parameter.shape):
            raise ValueError(
                f"{name} has shape {list(whole.shape)} in the model or the given weights, {list(parameter.shape)} in "
                "the program: verify with the compiled model, or compile this one"
            )
        if weights == "random" and parameter.kind == "parameter":
            found[name] = _draw(parameter, seed)
        elif whole.is_meta:
            missing.append(name)
        else:
            found[name] = whole.to("cpu", promote(whole.dtype))
    if missing:
        way = "weights= with them" if weights == "random" else "weights='random', or weights= with them"
        raise ValueError(
            f"{len(missing)} tensors are on the meta device and have no values ({', '.join(missing[:5])}): pass {way}"
        )
    return found


def find_empty(manifest: Manifest, model: nn.Module, buffers: Mapping[str, Tensor]) -> list[str]:
    """Return the buffers without values in `model` and `buffers`, or without a place in `model` for these."""
    own, found = read_weights(model, {}), read_weights(model, buffers)
    names = [name for name, parameter in manifest.parameters.items() if parameter.kind == "buffer"]
    placed = {name for name in names if any(known in own for known in all_names(manifest, name))}
    return [name for name in names if name not in placed or not has_values(manifest, found, name)]


def _draw(parameter: Parameter, seed: int) -> Tensor:
    """Draw normal numbers, around one for a vector that scales (the weight of a norm); the same on every mesh."""
    generator = _generator(seed, parameter.name)
    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * DEVIATION
    scales = len(parameter.shape) == 1 and parameter.name.endswith("weight")
    return drawn + 1 if scales else drawn


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))


def draw_batch(
    program: Program, manifest: Manifest, batch: Mapping[str, Tensor] | None, seed: int
) -> dict[str, Tensor]:
    """Return the batch of all replicas, floating inputs in float64; drawn from `seed` unless given.

    Drawn integers are legal in every table and loss that reads them; if an edited text has fewer rows of a table,
    those of the whole table count. Inputs called a mask are ones, with padding on the right if they are integers
    [sequences, positions]. Raises ValueError for a given batch that is not d * m * b sequences.
    """
    count = manifest.num_microbatches * manifest.mesh.data
    bounds = _bounds(program, manifest)
    fallback = min(bounds.values(), default=2)
    values = {}
    for expected in manifest.inputs:
        shape = list(expected.shape)
        if expected.batch_dim is not None:
            shape[expected.batch_dim] *= count
        if batch is None:
            values[expected.name] = _draw_input(expected, shape, bounds.get(expected.name, fallback), seed)
            continue
        value = batch.get(expected.name)
        if not isinstance(value, Tensor) or list(value.shape) != shape or value.dtype is not expected.dtype:
            given = "missing" if value is None else repr(value)
            found = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else given
            raise ValueError(
                f"batch: {expected.name} is {found}; expected {expected.dtype}{shape}, the sequences of all "
                f"{manifest.mesh.data} replicas x {manifest.num_microbatches} microbatches"
            )
        values[expected.name] = value.detach().to("cpu", promote(value.dtype))
    return values


def _draw_input(expected: Input, shape: list[int], bound: int, seed: int) -> Tensor:
    generator = _generator(seed, expected.name)
    if "mask" in expected.name and len(shape) == 2 and not expected.dtype.is_floating_point:
        return _draw_padding(shape, expected.batch_dim or 0, generator).to(expected.dtype)
    if expected.dtype is torch.bool or "mask" in expected.name:
        return torch.ones(shape, dtype=promote(expected.dtype))
    if expected.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(bound, shape, generator=generator, dtype=expected.dtype)


def _draw_padding(shape: list[int], batch_dim: int, generator: torch.Generator) -> Tensor:
    """Draw a mask of `shape`: each sequence starts with ones, at least half of it, and ends in padding."""
    length = shape[1 - batch_dim]
    lengths = torch.randint((length + 1) // 2, max(length, 2), (shape[batch_dim], 1), generator=generator)
    mask = torch.arange(length) < lengths
    return mask.T.contiguous() if batch_dim else mask


def _bounds(program: Program, manifest: Manifest) -> dict[str, int]:
    """Return the smallest table or number of classes that each batch input indexes."""
    found: dict[str, int] = {}
    for lookup in find_lookups(program):
        rows = lookup.rows if lookup.ignored is not None else _count_rows(lookup.source, manifest)
        for name, _ in find_sources(lookup.numbers):
            found[name] = min(rows, found.get(name, rows))
    return found


def _count_rows(table: fx.Node, manifest: Manifest) -> int:
    """Return the rows of a table: those of the parameter that it is, or is a part or a copy of."""
    columns, source = table.meta["val"].shape[1:], table
    while source.op == "call_function" and len(source.all_input_nodes) == 1:
        (source,) = source.all_input_nodes
    if source.op == "get_attr" and source.meta["val"].shape[1:] == columns:
        return manifest.parameters[str(source.target)].shape[0]
    return int(table.meta["val"].shape[0])
