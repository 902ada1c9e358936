"""Schedulers and scalers: their names, and the choice of the saved states that fit those of this rank."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.record import StoredSchedulers


class Stateful(Protocol):
    """A learning rate scheduler, a gradient scaler, or another object with a state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


Schedulers = Stateful | Sequence[Stateful] | Mapping[str, Stateful] | None


def name_schedulers(given: Schedulers) -> dict[str, Stateful]:
    """Return schedulers by name: the keys of a mapping, else "0", "1", …; TypeError for objects without a state."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        named = dict(given)
    elif isinstance(given, Sequence):
        named = {str(i): item for i, item in enumerate(given)}
    else:
        named = {"0": given}
    for name, item in named.items():
        if not all(callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"scheduler {name} is a {type(item).__name__} without state_dict and load_state_dict: give a "
                "scheduler or scaler, or a list or dict of them"
            )
    return named


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
        if len(entry.groups) != len(groups) or any(own.get(n, i) != i for n, i in numbers.items()):
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
