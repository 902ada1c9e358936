"""What Triton kernels load and store, counted element by element while Triton's interpreter runs them on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

LOAD, STORE = "create_masked_load", "create_masked_store"
# Methods of the interpreter's builder, and where pointers and mask stand among their arguments. No kernel here has
# atomic operations, which would go another way.
ACCESSES = {LOAD: (0, 1), STORE: (0, 2)}
NOWHERE = np.empty(0, np.uint64), np.empty(0, np.int32)


class InterpreterChangedError(Exception):
    """Triton's interpreter, whose insides are its own, is not the one that is known here."""


@dataclass
class Traffic:
    """Bytes asked for, and by whom where: name and element size of each access in turn, and its addresses."""

    asked: int = 0
    problem: str = ""
    accesses: list[tuple[str, int, Any]] = field(default_factory=list)

    def add(self, access: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.asarray(pointers.data)[np.broadcast_to(mask.data, pointers.data.shape)]
        self.asked += addresses.size * size
        self.accesses.append((access, size, np.unique(addresses)))

    def count_once(self) -> int:
        """Bytes that move between memory and a cache which keeps all that is read again.

        Each address is stored once, and loaded once unless it was stored before. Each is of one element size.
        """
        loads, stores = self._find_first(LOAD), self._find_first(STORE)
        moved = 0
        for size in loads.keys() | stores.keys():
            loaded, since = loads.get(size, NOWHERE)
            stored, until = stores.get(size, NOWHERE)
            _, again, before = np.intersect1d(loaded, stored, assume_unique=True, return_indices=True)
            kept = int((until[before] < since[again]).sum())
            moved += size * (loaded.size - kept + stored.size)
        return moved

    def _find_first(self, wanted: str) -> dict[int, tuple[Any, Any]]:
        """By element size: the addresses that `wanted` accesses, and the number of the first access of each."""
        found = {}
        for size in {size for access, size, _ in self.accesses if access == wanted}:
            parts = [
                (addresses, np.full(addresses.size, number, np.int32))
                for number, (access, own, addresses) in enumerate(self.accesses)
                if (access, own) == (wanted, size)
            ]
            addresses, numbers = (np.concatenate(each) for each in zip(*parts, strict=True))
            places, first = np.unique(addresses, return_index=True)
            found[size] = places, numbers[first]
        return found


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what kernels load and store inside; raise InterpreterChangedError where that cannot be counted.

    Nothing asked for counts as such too: the kernels did not run, or on another way.
    """
    traffic = Traffic()
    builder = _find_builder()
    kept = {access: getattr(builder, access) for access in ACCESSES}
    for access, (pointers, mask) in ACCESSES.items():
        setattr(builder, access, _watch(kept[access], traffic, access, pointers, mask))
    try:
        yield traffic
    finally:
        for access in ACCESSES:
            delattr(builder, access)
    if traffic.problem or not traffic.asked:
        raise InterpreterChangedError(traffic.problem or "no load and no store passed by")


def _find_builder() -> Any:
    try:
        module = import_module("triton.runtime.interpreter")
    except ImportError as error:
        raise InterpreterChangedError(f"Triton's interpreter is not there: {error}") from error
    builder = getattr(module, "interpreter_builder", None)
    missing = [access for access in ACCESSES if not hasattr(builder, access)]
    if missing:
        raise InterpreterChangedError(f"Triton's interpreter has no interpreter_builder.{missing[0]}")
    return builder


def _watch(method: Callable[..., Any], traffic: Traffic, access: str, pointers: int, mask: int) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            traffic.add(access, arguments[pointers], arguments[mask])
        except (AttributeError, IndexError, TypeError) as error:
            # Raised after the kernel, since the interpreter makes an error of its own of what is raised inside.
            traffic.problem = f"{access} is called in another way: {error}"
        return method(*arguments, **named)

    return call
