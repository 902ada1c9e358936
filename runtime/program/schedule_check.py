"""The static proof of a schedule: all is there, channels agree at both ends, no rank waits forever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from autoptd.runtime.program.schedule import Action, Schedule

_RECEIVES = ("RECV_F", "RECV_B")
_COMPUTES = ("F", "B")


class ScheduleError(ValueError):
    """A schedule that cannot run, or would not train: the first contradiction found."""


def check_schedule(
    schedule: Schedule, num_pipeline_ranks: int, num_model_chunks: int, num_microbatches: int
) -> None:
    """Prove that the schedule runs p·v stages on m microbatches; ScheduleError names the first contradiction.

    Each (microbatch, stage) runs once forward and once backward on its rank, in an order its values allow,
    backwards of a stage in ascending microbatches; each receive is posted before it is needed and each value
    sent after it is made; both ends of every channel have the same order; and no cycle of waits remains.
    """
    p, v, m = num_pipeline_ranks, num_model_chunks, num_microbatches
    if len(schedule) != p:
        raise ScheduleError(
            f"the schedule has {len(schedule)} rows: expected one for each of {p} pipeline ranks"
        )
    for rank, actions in enumerate(schedule):
        _check_rank(rank, actions, p, v, m)
    _check_channels(schedule, p)
    for _ in execution_order(schedule):
        pass


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) of the whole schedule in an order in which every wait is already over.

    Sends never wait, a compute action waits until what its rank has posted for it is sent. ScheduleError
    names the cycle where the ranks wait for one another.
    """
    position = [0] * len(schedule)
    posted: set[tuple[int, str, int]] = set()
    sent: set[tuple[int, str, int]] = set()
    waiting: dict[tuple[int, str, int], int] = {}
    ready = list(reversed(range(len(schedule))))
    while ready:
        rank = ready.pop()
        actions = schedule[rank]
        for index in range(position[rank], len(actions)):
            action = actions[index]
            stage, kind, microbatch = action
            if kind in _COMPUTES:
                if action in posted and action not in sent:
                    waiting[action] = rank
                    position[rank] = index
                    break
            elif kind in _RECEIVES:
                posted.add((stage, kind[-1], microbatch))
            else:
                consumer = (stage + (1 if kind == "SEND_F" else -1), kind[-1], microbatch)
                sent.add(consumer)
                if consumer in waiting:
                    ready.append(waiting.pop(consumer))
            yield rank, action
        else:
            position[rank] = len(actions)
    if waiting:
        raise ScheduleError(_describe_wait(schedule, position, min(waiting.values())))


def _check_rank(rank: int, actions: Sequence[Action], p: int, v: int, m: int) -> None:
    """Check one row by itself."""
    last = p * v - 1
    done: set[tuple[int, str, int]] = set()
    next_backward = dict.fromkeys(range(rank, p * v, p), 0)
    for action in actions:
        stage, kind, microbatch = action
        if stage not in next_backward or not 0 <= microbatch < m:
            raise ScheduleError(
                f"rank {rank}: {action} does not belong here: expected stage "
                f"{' or '.join(map(str, next_backward))} and a microbatch from 0 to {m - 1}"
            )
        if action in done:
            raise ScheduleError(f"rank {rank}: {action} comes twice: expected once")
        if kind == "F":
            if stage > 0 and _arrival(action, p) not in done:
                _raise_too_early(rank, action, _arrival(action, p))
        elif kind == "B":
            if (stage, "F", microbatch) not in done:
                _raise_too_early(rank, action, Action(stage, "F", microbatch))
            if stage < last and _arrival(action, p) not in done:
                _raise_too_early(rank, action, _arrival(action, p))
            if microbatch != next_backward[stage]:
                raise ScheduleError(
                    f"rank {rank}: {action} is out of turn: expected {stage}B{next_backward[stage]}, since "
                    "gradients are added in ascending microbatches"
                )
            next_backward[stage] = microbatch + 1
        else:
            _check_transfer(rank, action, p, last)
            if kind not in _RECEIVES and (stage, kind[-1], microbatch) not in done:
                _raise_too_early(rank, action, Action(stage, "F" if kind == "SEND_F" else "B", microbatch))
        done.add(action)
    for expected in _expected(rank, p, v, m):
        if expected not in done:
            raise ScheduleError(_describe_missing(rank, expected, p, m))


def _arrival(action: Action, p: int) -> tuple[int, str, int]:
    """Name what brings a compute action the neighbouring stage's value, and so comes before it."""
    stage, kind, microbatch = action
    if p > 1:
        return (stage, "RECV_F" if kind == "F" else "RECV_B", microbatch)
    return (stage - 1 if kind == "F" else stage + 1, kind, microbatch)


def _raise_too_early(rank: int, action: Action, needed: tuple[int, str, int]) -> None:
    stage, kind, microbatch = needed
    raise ScheduleError(
        f"rank {rank}: {action} comes too early: expected {stage}{kind}{microbatch} before it"
    )


def _check_transfer(rank: int, action: Action, p: int, last: int) -> None:
    """Check that a send or receive has a neighbouring stage, on another rank."""
    if p == 1:
        raise ScheduleError(f"rank {rank}: {action} leads nowhere: all stages are on this one pipeline rank")
    if not 0 <= action.counterpart.stage <= last:
        place = "first" if action.stage == 0 else "last"
        raise ScheduleError(f"rank {rank}: {action} leads nowhere: stage {action.stage} is the {place} stage")


def _expected(rank: int, p: int, v: int, m: int) -> Iterator[tuple[int, str, int]]:
    """List all that a rank has to do, but for receives, which its compute actions have already asked for."""
    last = p * v - 1
    for stage in range(rank, p * v, p):
        kinds = ["F", "B"]
        if p > 1 and stage < last:
            kinds.append("SEND_F")
        if p > 1 and stage > 0:
            kinds.append("SEND_B")
        for kind in kinds:
            for microbatch in range(m):
                yield stage, kind, microbatch


def _describe_missing(rank: int, missing: tuple[int, str, int], p: int, m: int) -> str:
    stage, kind, microbatch = missing
    if kind in _COMPUTES:
        direction = "forward" if kind == "F" else "backward"
        return (
            f"rank {rank}: {stage}{kind}{microbatch} is missing: expected stage {stage} to run each of {m} "
            f"microbatches once {direction}"
        )
    neighbour = stage + 1 if kind == "SEND_F" else stage - 1
    return (
        f"rank {rank}: {stage}{kind}{microbatch} is missing: expected it after "
        f"{stage}{kind[-1]}{microbatch}, for {neighbour}{kind[-1]}{microbatch} on rank {neighbour % p}"
    )


def _check_channels(schedule: Schedule, p: int) -> None:
    """Check that each channel's receives are posted in the order of its sends."""
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.kind in _COMPUTES:
                continue
            counterpart = action.counterpart
            peer = counterpart.stage % p
            if action.kind in _RECEIVES:
                receives[peer, rank].append(action)
            else:
                sends[rank, peer].append(counterpart)
    for channel in sorted(sends.keys() | receives.keys()):
        if sends[channel] == receives[channel]:
            continue
        source, destination = channel
        # Every value is sent and received exactly once by now, so the two differ in order, not in length.
        pairs = zip(sends[channel], receives[channel], strict=True)
        index, (expected, found) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise ScheduleError(
            f"rank {destination}: {found} is message {index} from rank {source}, which sends "
            f"{expected.counterpart} there: expected {expected}, receives in the order of the sends"
        )


def _describe_wait(schedule: Schedule, position: Sequence[int], rank: int) -> str:
    """Follow who waits for whom from a blocked rank, to the cycle or to a value that nobody sends."""
    trail: list[int] = []
    steps: list[str] = []
    while rank not in trail:
        action = schedule[rank][position[rank]]
        send = _awaited(action)
        trail.append(rank)
        steps.append(f"rank {rank} at {action} for {send}")
        rank = send.stage % len(schedule)
        if send not in schedule[rank]:
            return f"{', '.join(steps)}, which rank {rank} never sends"
    cycle = ", ".join(steps[trail.index(rank) :])
    return f"a cycle of waits: {cycle}: expected each value to be sent before its sender waits"


def _awaited(compute: Action) -> Action:
    """Name the send a compute action waits for."""
    return Action(
        compute.stage, "RECV_F" if compute.kind == "F" else "RECV_B", compute.microbatch
    ).counterpart
