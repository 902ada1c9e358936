"""The choice of the saved scheduler states that fit this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.record import StoredSchedulers


def choose_schedulers(
    groups: Sequence[Sequence[str]], stored: Sequence[StoredSchedulers], place: str
) -> Mapping[str, Any]:
    """Return the states of a rank whose `groups` were like this rank's, since schedulers know groups by number.

    CheckpointError if a group has another number now, or only ranks with other numbers of groups saved states.
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
    # A rank that scheduled all parameters of this one decides; else all that scheduled some, which must agree.
    chosen = [entry for count, entry in alike if count == len(own)][:1]
    if not chosen and not others:
        chosen = [entry for _, entry in alike] if own else list(stored)
    if stored and (not chosen or any(entry.states != chosen[0].states for entry in chosen)):
        raise CheckpointError(
            f"{place}: schedulers know parameter groups by number, and the {len(groups)} groups here are not the "
            f"{' or '.join(str(len(entry.groups)) for entry in stored)} saved ones in their order: make all groups on "
            "every rank in one order, even those that are empty there; or leave scheduler= out"
        )
    return chosen[0].states if chosen else {}
