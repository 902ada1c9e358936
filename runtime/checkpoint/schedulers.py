"""Which of the saved states of schedulers are this rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.record import StoredSchedulers


def choose_schedulers(
    groups: Sequence[Sequence[str]], stored: Sequence[StoredSchedulers], place: str
) -> Mapping[str, Any]:
    """Of all ranks' states those that are of `groups` like this rank's: a scheduler knows groups by their numbers.

    CheckpointError where a group has another number now, or only other ranks have as many.
    """
    own = {name: number for number, names in enumerate(groups) for name in names}
    alike: list[tuple[int, StoredSchedulers]] = []
    others = 0
    for entry in stored:
        numbers = {name: number for number, names in enumerate(entry.groups) for name in names}
        if own.keys().isdisjoint(numbers):
            continue
        moved = len(entry.groups) != len(groups) or any(own.get(n, i) != i for n, i in numbers.items())
        if moved:
            others += 1
        else:
            alike.append((len(own.keys() & numbers.keys()), entry))
    # Who scheduled all that this rank does decides; else all who scheduled some of it, which they must have done alike.
    chosen = [entry for count, entry in alike if count == len(own)][:1]
    if not chosen and not others:
        chosen = [entry for _, entry in alike] if own else list(stored)
    if stored and (not chosen or any(entry.states != chosen[0].states for entry in chosen)):
        raise CheckpointError(
            f"{place}: schedulers know groups of parameters by their numbers, and the {len(groups)} here are not the "
            f"{' or '.join(str(len(entry.groups)) for entry in stored)} that were saved, in their order: make all "
            "groups on every rank, in one order, though some be empty there, and load them so; or leave scheduler= out"
        )
    return chosen[0].states if chosen else {}
