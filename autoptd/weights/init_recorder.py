"""A recorder of initialisations: it keeps the writes of every in-place operator as distributions, without values.

Empty and random tensors are made on the meta device, so that nothing large exists; other tensors as usual. The code
sees CPU tensors all the same, since some initialisations skip steps that have no effect on tensors without values.
A later write of a whole tensor replaces the earlier ones; a write into a part (a padding row) is added to them.
Multiplying a whole tensor by a number changes its distribution; others leave it unknown until it is written.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import erf, prod, sqrt
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autoptd.capture.source_lines import user_line
from autoptd.passes.ir.autograd_functions import tensors_in
from autoptd.passes.ir.nodes import name_arguments
from autoptd.runtime import aten
from autoptd.runtime.program.placement import Draw

Values = Mapping[str, Any]  # arguments by name

# Elements of a tensor of zeros or ones that is made on the meta device too; of a vector, as a model has many biases.
LARGE, LONG = 1 << 24, 1 << 14
# Of a normal distribution that a truncated one must keep, since numbers outside are drawn again.
SMALLEST_SHARE = 0.01

_IS_META, _DEVICE = (inspect.getattr_static(Tensor, name).__get__ for name in ("is_meta", "device"))


class UnknownError(ValueError):
    """An initialisation that cannot be written as distributions, with the reason."""


class Written(NamedTuple):
    """A draw, and the number of its call: tensors with numbers of one call are not independent."""

    draw: Draw
    call: int


@dataclass
class Content:
    """The contents of a storage, whose tensor has `shape` and `stride`; a `problem` tells why they are unknown."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: StorageWeakRef  # keeps its number from being used again
    written: list[Written]
    problem: str = ""


class _Disguise(TorchFunctionMode):
    """A mode in which tensors on the meta device claim to be on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _IS_META:
            return False
        return torch.device("cpu") if func == _DEVICE and result.type == "meta" else result


class Writes(TorchDispatchMode):
    """A mode that records the writes of all tensors made in it, and of those given to `watch`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._contents: dict[int, Content] = {}
        self._calls = itertools.count()
        self._patches = ExitStack()

    def __enter__(self) -> Writes:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._patches.enter_context(_Disguise())
        # It reads its numbers, to find those outside.
        truncate = self._truncate(torch.nn.init._no_grad_trunc_normal_)
        self._patches.enter_context(patch.object(torch.nn.init, "_no_grad_trunc_normal_", truncate))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def watch(self, tensor: Tensor) -> None:
        """Record the writes into `tensor` from now on; its values so far are unknown."""
        self._hold(tensor, [])

    def read(self, tensor: Tensor) -> tuple[Written, ...]:
        """Return the contents of `tensor`. Raises UnknownError."""
        content = self._find(tensor)
        if content is None or not tensor.numel():
            return (Written(_find_constant(tensor), next(self._calls)),)
        if content.problem:
            raise UnknownError(content.problem)
        if not content.written:
            raise UnknownError("nothing writes it")
        parted = any(w.draw.run for w in content.written)
        if prod(content.shape) != tensor.numel() or (parted and not _is_all(content, tensor)):
            raise UnknownError("it is a part of a larger tensor")
        if content.written[0].draw.run:
            raise UnknownError("only a part of it is written")
        return tuple(content.written)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: OpOverload, args: Sequence[Any], options: dict[str, Any]) -> Any:
        packet, values = func.overloadpacket, name_arguments(func, args, options)
        draws = _DRAWS[packet](values) if packet in _DRAWS else None
        written = (a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write)
        targets = tensors_in([values[name] for name in written])
        if draws is not None and targets and targets[0].is_meta:
            result = targets[0]  # nothing is filled on the meta device, and torch takes a millisecond for it
        else:
            if draws is not None and not targets and _is_meta_made(draws, values):
                options["device"] = torch.device("meta")
            result = func(*args, **options)
        for target in targets:
            self._write(packet, target, draws, values)
        if not targets and isinstance(result, Tensor) and self._find(result) is None:
            source, edit = values.get("self"), _read_edit(packet, values)
            if draws is not None:
                self._hold(result, self._number(draws))
            elif edit and isinstance(source, Tensor) and (content := self._find(source)):
                edited = [w._replace(draw=edit(w.draw)) for w in content.written]
                if not content.problem and _is_all(content, source):
                    self._hold(result, edited)
        return result

    def _write(self, packet: Any, target: Tensor, draws: list[Draw] | None, values: Values) -> None:
        content = self._find(target)
        if content is None or not target.numel():
            return
        run = _find_run(content, target)
        written = None if draws is None else self._number(draws)
        if packet is aten.copy_:
            written = self._read_copied(target, values["src"])
        edit = _read_edit(packet, values) if target is values.get("self") else None
        if run is None or (written is None and (edit is None or run)):
            content.problem = f"{_place(packet)} cannot be described element by element"
        elif written is not None and not run:
            content.written, content.problem = written, ""
        elif written is not None:
            content.written += [Written(replace(w.draw, run=run), w.call) for w in written]
        elif edit is not None:
            content.written = [w._replace(draw=edit(w.draw)) for w in content.written]

    def _number(self, draws: list[Draw]) -> list[Written]:
        call = next(self._calls)
        return [Written(draw, call) for draw in draws]

    def _read_copied(self, target: Tensor, source: Tensor) -> list[Written] | None:
        content, into = self._find(source), self._find(target)
        if content is None or into is None or content.problem or not content.written:
            return None
        if len(content.written) == 1 and content.written[0].draw.kind == "constant":
            return None if content.written[0].draw.run else list(content.written)
        # Random numbers may only be copied as a whole: in two places they would not be independent.
        whole = _is_all(content, source) and tuple(target.shape) == content.shape == into.shape
        return list(content.written) if whole else None

    def _truncate(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap torch.nn.init's truncated normal distribution, so that it is recorded for watched tensors."""

        def truncate(tensor: Tensor, mean: float, std: float, a: float, b: float, **options: Any) -> Tensor:
            share = (erf((b - mean) / std / sqrt(2)) - erf((a - mean) / std / sqrt(2))) / 2
            self._write("trunc_normal_", tensor, [Draw("truncated_normal", mean=mean, std=std, low=a, high=b)], {})
            if (content := self._find(tensor)) is not None and share < SMALLEST_SHARE:
                content.problem = f"{_place('trunc_normal_')} keeps {share:.1%} of a normal distribution"
                return tensor
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return original(tensor, mean, std, a, b, **options)

        return truncate

    def _hold(self, tensor: Tensor, written: list[Written]) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        self._contents[storage.cdata] = Content(*place, storage, written)

    def _find(self, tensor: Tensor) -> Content | None:
        return self._contents.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None


def _is_meta_made(draws: list[Draw], values: Values) -> bool:
    """Return whether to make a tensor without values: an empty or random one, or a large one of a constant."""
    size = values.get("size")
    if size is None or "self" in values:
        return False
    constant = bool(draws) and draws[0].kind == "constant"
    return not constant or prod(size) >= (LONG if len(size) == 1 else LARGE)


def _is_all(content: Content, tensor: Tensor) -> bool:
    """Return whether `tensor` is the whole tensor of the storage, in the same order."""
    return tuple(tensor.shape) == content.shape and tensor.stride() == content.stride


def _find_run(content: Content, part: Tensor) -> tuple[int, ...] | None:
    """Return the run of elements of the storage's tensor that `part` is: () for the whole, None if it is no run."""
    if part.numel() == prod(content.shape):
        return ()
    first, plain = int(part.storage_offset()) - content.offset, torch.empty(content.shape, device="meta").stride()
    return (first, first + part.numel()) if content.stride == plain and part.is_contiguous() else None


def _read_edit(packet: Any, values: Values) -> Callable[[Draw], Draw] | None:
    """Return the change of a distribution by a copy, or by multiplying with a number; None for others."""
    name = str(packet).removesuffix("_")
    if name in ("aten.clone", "aten._to_copy"):
        return lambda draw: draw
    scales = name in ("aten.mul", "aten.div") and not values.get("rounding_mode")
    number = _read_number(values["other"]) if scales else None
    if number is None or (name == "aten.div" and not number):
        return None
    return lambda draw: draw.scaled(number if name == "aten.mul" else 1 / number)


def _read_number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.dim() == 0 and not value.is_meta else None
    return float(value)


def _constant(value: Any) -> list[Draw] | None:
    number = _read_number(value)
    return None if number is None else [Draw("constant", value=number)]


# The distribution that an operator writes into a whole tensor, from its arguments: [] for none, None if unknown.
_DRAWS: Mapping[Any, Callable[[Values], list[Draw] | None]] = {
    **dict.fromkeys((aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided), lambda _: []),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero_), lambda _: _constant(0)),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), lambda _: _constant(1)),
    **dict.fromkeys((aten.full, aten.full_like, aten.new_full), lambda v: _constant(v["fill_value"])),
    **dict.fromkeys((aten.rand, aten.rand_like), lambda _: [Draw("uniform", high=1.0)]),
    **dict.fromkeys((aten.randn, aten.randn_like), lambda _: [Draw("normal", std=1.0)]),
    aten.scalar_tensor: lambda v: _constant(v["s"]),
    aten.fill_: lambda v: _constant(v["value"]),
    aten.normal_: lambda v: [Draw("normal", mean=float(v["mean"]), std=float(v["std"]))],
    aten.uniform_: lambda v: [Draw("uniform", low=float(v["from"]), high=float(v["to"]))],
}


def _find_constant(tensor: Tensor) -> Draw:
    """Return the one value of all elements of a tensor that was made elsewhere. Raises UnknownError."""
    if not tensor.numel():
        return Draw("constant")
    if tensor.is_meta:
        raise UnknownError("its contents are unknown")
    values = tensor.detach().unique()
    if len(values) != 1:
        raise UnknownError("it holds values that are neither constant nor random numbers")
    return Draw("constant", value=float(values))


def _place(operator: object) -> str:
    """Return the user's line that called `operator`."""
    line = user_line()
    return f"{line} ({operator})" if line else f"{operator}"
