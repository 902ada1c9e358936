"""Acknowledgement without messages of its own: a received message proves which sends its sender had used before."""

from __future__ import annotations

from collections.abc import Mapping

from autoptd.runtime.program.schedule import Action, Schedule


def find_acknowledged(schedule: Schedule, rank: int) -> Mapping[Action, Action]:
    """Return, for receives of pipeline rank `rank`, the last of its sends that the sender had used before it sent.

    A channel keeps its order, so everything sent earlier over the same channel has arrived too. This also holds in a
    step of forwards only, where three ranks or more acknowledge nothing.
    """
    place = {action: number for number, action in enumerate(schedule[rank])}
    p = len(schedule)
    found = {}
    for peer in {(rank - 1) % p, (rank + 1) % p} - {rank}:
        last = None
        for action in schedule[peer]:
            if action.kind.computes:
                used = action.receive.counterpart
                if used in place and (last is None or place[used] > place[last]):
                    last = used
            elif last is not None and action.kind.sends and action.counterpart in place:
                found[action.counterpart] = last
    return found
