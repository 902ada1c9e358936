"""Join the gradients of all ranks, and compare them with each other and with the plain model's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.program.manifest import Manifest

FLOOR = 1e-6  # of the largest gradient of all: the scale for smaller ones
ZERO = 1e-12, 1e-3  # of the same: the size of a gradient that is only rounding, and the scale for it
ROUNDING = 1e-12


@dataclass(frozen=True)
class StepResult:
    """A step of one rank or of the plain model: loss, gradients, the number of promoted casts, notes on the loss.

    `norm` is that by which the whole gradient would be clipped. `outputs` has, by path, what else it returns: of a rank
    for its replica, of the plain model for each. `tables`: what forward put in the place of tensors, by their address.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    promoted: int
    notes: tuple[str, ...] = ()
    norm: float = 0.0
    outputs: Sequence[Mapping[tuple[str, ...], Tensor]] = ()
    tables: Mapping[int, Tensor] = field(default_factory=dict)


def join_gradients(manifest: Manifest, found: list[StepResult]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return whole gradients from the first replica's first owners, and where ranks that must agree do not."""
    mesh = manifest.mesh
    wrong: list[str] = []
    for rank, result in enumerate(found):
        pairs = {"loss": (result.loss, found[0].loss), "norm of the gradient": (result.norm, found[0].norm)}
        for what, (one, other) in pairs.items():
            if one != other and not (one != one and other != other):
                wrong.append(f"rank {rank} has the {what} {one!r}, rank 0 {other!r}")
    whole: dict[str, Tensor] = {}
    for name, parameter in manifest.parameters.items():
        placement = parameter.placement
        on_axis = placement[placement.axis]
        for pipeline in manifest.owners(name):
            ranks = mesh.group(placement.axis, mesh.rank_of(0, pipeline, 0))
            parts = [part for rank in ranks if (part := found[rank].gradients.get(name)) is not None]
            if len(parts) < len(ranks):
                continue
            for rank, part in zip(ranks, parts, strict=True):
                for peer in mesh.group(placement.replicas, rank)[1:]:
                    theirs = found[peer].gradients.get(name)
                    if theirs is None or not torch.equal(part, theirs):
                        what = f"the gradient of {name} on rank {peer} differs from that of rank {rank}"
                        wrong.append(f"replicas differ: {what}")
                rows = on_axis.split(part, len(ranks), divided=False)
                first = on_axis.split(parts[0], len(ranks), divided=False)
                wrong += _say_different(rows, first, f"undivided gradient of {name}", rank, ranks[0])
            own = on_axis.join(parts)
            if name in whole:
                owner = mesh.rank_of(0, manifest.owners(name)[0], 0)
                wrong += _say_different([own], [whole[name]], f"gradient of the tied {name}", ranks[0], owner)
            whole.setdefault(name, own)
    return whole, tuple(wrong)


def _say_different(
    found: Sequence[Tensor], expected: Sequence[Tensor], what: str, rank: int, other: int
) -> Iterator[str]:
    for own, first in zip(found, expected, strict=True):
        if not _largest(own - first) <= ROUNDING * _largest(first):
            yield f"ranks differ: the {what} on rank {rank} differs from that of rank {other}"


def compare_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each gradient; one that only one side has is compared with zero."""
    largest = {name: _largest(gradient) for name, gradient in expected.items()}
    top = max(largest.values(), default=0.0)
    noise, unit = ZERO
    errors = {}
    for name in dict.fromkeys([*expected, *found]):
        both = name in found and name in expected
        difference = _largest(found[name] - expected[name] if both else found.get(name, expected.get(name)))
        own = largest.get(name, 0.0)
        # A key's bias, for example, shifts all scores alike: its gradient is zero except for rounding.
        scale = max(own, FLOOR * top) if own > noise * top else unit * top
        errors[name] = (difference / scale if scale else math.inf) if difference else 0.0
    return errors


def compare_outputs(found: Sequence[Mapping[Any, Tensor]], expected: Sequence[Any]) -> dict[str, float]:
    """Return the largest relative error of each output; one of another shape is infinitely wrong."""
    errors: dict[str, float] = {}
    for own, plain in zip(found, expected, strict=True):
        for path, value in own.items():
            wide, known = value.to(torch.complex128), plain[path].to(torch.complex128)
            alike = wide.shape == known.shape  # and elements may be infinite in both, such as those of masked classes
            difference = _largest((wide - known).masked_fill(wide == known, 0)) if alike else math.inf
            name, error = f"output {'.'.join(path)}", difference / (_largest(known[known.isfinite()]) or 1.0)
            errors[name] = max(error, errors.get(name, 0.0), key=lambda e: (e != e, e))
    return errors


def _largest(tensor: Tensor | None) -> float:
    return float(tensor.abs().max()) if tensor is not None and tensor.numel() else 0.0
