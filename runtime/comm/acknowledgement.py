"""Which receive says that which send has arrived: a rank's own messages answer those that it has used."""

from __future__ import annotations

from collections.abc import Mapping

from autoptd.runtime.program.schedule import Action, Schedule


def find_acknowledged(schedule: Schedule, rank: int) -> Mapping[Action, Action]:
    """For the receives of pipeline rank `rank`, the last of its sends that their sender had used before it sent.

    A channel keeps its order, so all that was sent before it over the same channel has arrived too. It holds of a
    step of forwards only too, but says less: with three ranks or more nothing.
    """
    place = {action: number for number, action in enumerate(schedule[rank])}
    p = len(schedule)
    found = {}
    for peer in {(rank - 1) % p, (rank + 1) % p} - {rank}:
        last = None
        for action in schedule[peer]:
            if action.kind in ("F", "B"):
                used = _send_used_by(action)
                if used in place and (last is None or place[used] > place[last]):
                    last = used
            elif last is not None and action.kind.startswith("SEND") and action.counterpart in place:
                found[action.counterpart] = last
    return found


def _send_used_by(action: Action) -> Action:
    receive = action._replace(kind="RECV_F" if action.kind == "F" else "RECV_B")
    return receive.counterpart
