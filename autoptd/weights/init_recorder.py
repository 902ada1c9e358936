"""A recorder of initialisations: it keeps the writes of every in-place operator as distributions, without values.

Empty and random tensors are made on the meta device, so that nothing large exists; other tensors as usual. The code
sees CPU tensors all the same, since some initialisations skip steps that have no effect on tensors without values.
A later write of a whole tensor replaces the earlier ones; a write into a part (a padding row) is added to them.
Multiplying or adding a number changes the distribution. After any other operator, the contents of a tensor are
unknown until it is written again.
"""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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
from autoptd.runtime import aten
from autoptd.runtime.program.placement import Draw

Box = tuple[tuple[int, ...], ...]

# Elements of a tensor of zeros or ones that is made on the meta device too; of a vector, such as a bias, fewer.
LARGE, LONG = 1 << 24, 1 << 14
# Of a normal distribution that a truncated one must keep, since numbers outside are drawn again.
SMALLEST_SHARE = 0.01

_UNIFORM, _NORMAL = Draw("uniform", high=1.0), Draw("normal", std=1.0)
_ZERO, _ONE = Draw("constant"), Draw("constant", value=1.0)
_FACTORIES: dict[Any, Draw | None] = {
    **dict.fromkeys((aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided), None),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), _ZERO),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), _ONE),
    **dict.fromkeys((aten.rand, aten.rand_like), _UNIFORM),
    **dict.fromkeys((aten.randn, aten.randn_like), _NORMAL),
}
_FILLED = {aten.full: "fill_value", aten.full_like: "fill_value", aten.new_full: "fill_value"}
_FILLED |= {aten.scalar_tensor: "s"}
_COPIES = (aten.clone, aten._to_copy)
_ARITHMETIC = (aten.mul, aten.mul_, aten.div, aten.div_, aten.add, aten.add_, aten.sub, aten.sub_)
_IS_META, _DEVICE = (inspect.getattr_static(Tensor, name).__get__ for name in ("is_meta", "device"))
_UNREAL = (aten.empty, aten.empty_strided, aten.rand, aten.randn)
_FILLS = (aten.fill_, aten.normal_, aten.uniform_, aten.zero_)
_SIZED = (aten.zeros, aten.ones, aten.full)


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
    written: list[Written] = field(default_factory=list)
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
        original = torch.nn.init._no_grad_trunc_normal_
        self._patches.enter_context(
            patch.object(torch.nn.init, "_no_grad_trunc_normal_", self._truncate(original))
        )
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
        boxed = any(w.draw.box for w in content.written)
        if prod(content.shape) != tensor.numel() or (boxed and not _is_all(content, tensor)):
            raise UnknownError("it is a part of a larger tensor")
        if content.written[0].draw.box:
            raise UnknownError("only a part of it is written")
        return tuple(content.written)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: OpOverload, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run an operator and record its writes."""
        packet = func.overloadpacket
        if _is_meta_made(packet, args):
            options["device"] = torch.device("meta")
        # Nothing is filled on the meta device, and torch takes a millisecond for it.
        result = args[0] if packet in _FILLS and args[0].is_meta else func(*args, **options)
        values = _name_arguments(func, args, options)
        targets = list(_written_tensors(func, values))
        for target in targets:
            self._write(packet, target, values)
        if not targets and isinstance(result, Tensor) and self._find(result) is None:
            self._make(packet, result, values)
        return result

    def _make(self, packet: Any, result: Tensor, values: Mapping[str, Any]) -> None:
        """Record the contents of a tensor that an operator has made."""
        if packet in _FACTORIES:
            draw = _FACTORIES[packet]
            self._hold(result, [] if draw is None else [Written(draw, next(self._calls))])
        elif packet in _FILLED:
            constant = Draw("constant", value=float(values[_FILLED[packet]]))
            self._hold(result, [Written(constant, next(self._calls))])
        elif isinstance(source := values.get("self"), Tensor):
            content = self._find(source)
            if content is None or content.problem or not _is_all(content, source):
                return
            edit = _read_edit(packet, values)
            if packet in _COPIES or edit is not None:
                edited = [w._replace(draw=edit(w.draw)) if edit else w for w in content.written]
                self._hold(result, edited)

    def _write(self, packet: Any, target: Tensor, values: Mapping[str, Any]) -> None:
        """Record that an operator writes `target`, a tensor or a part of one."""
        content = self._find(target)
        if content is None or not target.numel():
            return
        box = _find_box(content, target)
        written = self._read_source(packet, target, values)
        edit = _read_edit(packet, values)
        if box is None or (written is None and edit is None):
            content.problem = f"{_place(packet)} cannot be described element by element"
        elif written is not None and not box:
            content.written, content.problem = written, ""
        elif written is not None:
            content.written += [Written(replace(w.draw, box=box), w.call) for w in written]
        elif edit is not None:
            content.written = list(_edit(content.written, edit, box))

    def _read_source(self, packet: Any, target: Tensor, values: Mapping[str, Any]) -> list[Written] | None:
        """Return the distribution that an operator fills `target` with; None if it changes `target`, or is unknown."""
        draw = None
        if packet is aten.zero_:
            draw = _ZERO
        elif packet is aten.fill_:
            value = _read_number(values["value"])
            draw = None if value is None else Draw("constant", value=value)
        elif packet is aten.normal_:
            draw = Draw("normal", mean=float(values["mean"]), std=float(values["std"]))
        elif packet is aten.uniform_:
            draw = Draw("uniform", low=float(values["from"]), high=float(values["to"]))
        elif packet is aten.copy_:
            return self._read_copied(target, values["src"])
        return None if draw is None else [Written(draw, next(self._calls))]

    def _read_copied(self, target: Tensor, source: Tensor) -> list[Written] | None:
        content, into = self._find(source), self._find(target)
        if content is None or into is None or content.problem or not content.written:
            return None
        if len(content.written) == 1 and content.written[0].draw.kind == "constant":
            return None if content.written[0].draw.box else list(content.written)
        # Random numbers may only be copied as a whole: in two places they would not be independent.
        whole = _is_all(content, source) and tuple(target.shape) == content.shape == into.shape
        return list(content.written) if whole else None

    def _truncate(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap torch.nn.init's truncated normal distribution, so that it is recorded for watched tensors."""

        def truncate(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
        ) -> Tensor:
            content = self._find(tensor)
            if content is None:
                return original(tensor, mean, std, a, b, generator)
            box = _find_box(content, tensor)
            share = (erf((b - mean) / std / sqrt(2)) - erf((a - mean) / std / sqrt(2))) / 2
            if box is None or share < SMALLEST_SHARE:
                content.problem = f"{_place('trunc_normal_')} keeps {share:.1%} of a normal distribution"
                return tensor
            draw = Draw("truncated_normal", mean=mean, std=std, low=a, high=b, box=box)
            content.written = [*(content.written if box else ()), Written(draw, next(self._calls))]
            content.problem = content.problem if box else ""
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return original(tensor, mean, std, a, b, generator)

        return truncate

    def _hold(self, tensor: Tensor, written: list[Written]) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        self._contents[storage.cdata] = Content(
            tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), storage, written
        )

    def _find(self, tensor: Tensor) -> Content | None:
        if tensor.layout is not torch.strided:
            return None
        return self._contents.get(tensor.untyped_storage()._cdata)


def _is_meta_made(packet: Any, args: Sequence[Any]) -> bool:
    return packet in _UNREAL or (packet in _SIZED and prod(args[0]) >= (LONG if len(args[0]) == 1 else LARGE))


def _name_arguments(func: OpOverload, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    arguments = func._schema.arguments
    values = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return values | {a.name: value for a, value in zip(arguments, args, strict=False)} | dict(options)


def _written_tensors(func: OpOverload, values: Mapping[str, Any]) -> Iterator[Tensor]:
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = values[argument.name]
            yield from [value] if isinstance(value, Tensor) else value or ()


def _is_all(content: Content, tensor: Tensor) -> bool:
    """Return whether `tensor` is the whole tensor of the storage, in the same order."""
    return tuple(tensor.shape) == content.shape and tensor.stride() == content.stride


def _find_box(content: Content, part: Tensor) -> Box | None:
    """Return the box of `part` in the tensor of its storage: () for the whole, None if its elements are no box."""
    if part.numel() == prod(content.shape):
        return ()
    if sorted(content.stride, reverse=True) != list(content.stride):
        return None
    rest = int(part.storage_offset()) - content.offset
    box = []
    free = [(size, stride) for size, stride in zip(part.shape, part.stride(), strict=True) if size > 1]
    for size, stride in zip(content.shape, content.stride, strict=True):
        first, rest = divmod(rest, stride)
        length = next((n for n, step in free if step == stride and first + n <= size), 1)
        if length > 1:
            free.remove((length, stride))
        box.append((first, first + length))
    inside = all(end <= size for (_, end), size in zip(box, content.shape, strict=True))
    return tuple(box) if inside and not free and not rest else None


def _edit(written: Sequence[Written], edit: Callable[[Draw], Draw], box: Box) -> Iterator[Written]:
    """Yield the contents after the elements of `box` (all: ()) have been multiplied or shifted."""
    if not box:
        yield from (w._replace(draw=edit(w.draw)) for w in written)
        return
    yield from written
    for draw, call in written:
        pairs = zip(draw.box or box, box, strict=True)
        both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
        if all(first < end for first, end in both):
            yield Written(replace(edit(draw), box=both), call)


def _read_edit(packet: Any, values: Mapping[str, Any]) -> Callable[[Draw], Draw] | None:
    """Return the change of a distribution by multiplying or adding a number; None for other operators."""
    if packet in (aten.neg, aten.neg_):
        return lambda draw: draw.scaled(-1)
    number = _read_number(values["other"]) if packet in _ARITHMETIC else None
    if number is None or values.get("rounding_mode") is not None:
        return None
    if packet in (aten.mul, aten.mul_):
        return lambda draw: draw.scaled(number)
    if packet in (aten.div, aten.div_):
        return (lambda draw: draw.scaled(1 / number)) if number else None
    distance = number * float(values.get("alpha") or 1) * (1 if packet in (aten.add, aten.add_) else -1)
    return lambda draw: draw.shifted(distance)


def _read_number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.dim() == 0 and not value.is_meta else None
    return float(value)


def _find_constant(tensor: Tensor) -> Draw:
    """Return the one value of all elements of a tensor that was made elsewhere. Raises UnknownError."""
    if not tensor.numel():
        return _ZERO
    if tensor.is_meta:
        raise UnknownError("its contents are unknown")
    values = tensor.detach().unique()
    if len(values) != 1:
        raise UnknownError("it holds values that are neither constant nor random numbers")
    return Draw("constant", value=float(values))


def _place(operator: object) -> str:
    """Return the user's line that called `operator`."""
    line = user_line(traceback.extract_stack())
    return f"{line} ({operator})" if line else f"{operator}"
