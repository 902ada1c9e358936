"""The static proof of a schedule: it is complete, channels agree at both ends, and no rank waits forever."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

from autoptd.runtime.program.schedule import COMPUTING, Action, Kind, Schedule

Key = tuple[int, Kind, int]  # of an action: quicker to make, and equal to it


class ScheduleError(ValueError):
    """A schedule that cannot run, or would not train: the first contradiction found."""


def check_schedule(schedule: Schedule, p: int, v: int, m: int) -> None:
    """Prove that the schedule runs p·v stages on m microbatches; ScheduleError names the first contradiction.

    Each (microbatch, stage) runs once forward and once backward on its rank, in an order that its values allow, and
    backwards of a stage in ascending microbatches. Each receive is posted before its value is needed, and each value
    is sent after it is made. Both ends of every channel have the same order, and no cycle of waits remains.
    """
    if len(schedule) != p:
        raise ScheduleError(f"it has {len(schedule)} rows: expected one for each of {p} pipeline ranks")
    for rank, actions in enumerate(schedule):
        _check_rank(rank, actions, p, v, m)
    _check_channels(schedule, p)
    for _ in execution_order(schedule):
        pass


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) of the whole schedule in an order in which every wait is already over.

    Sends never wait; computing waits until the value of its posted receive is sent. ScheduleError names a cycle.
    """
    position = [0] * len(schedule)
    posted: set[Key] = set()
    sent: set[Key] = set()
    waiting: dict[Key, int] = {}
    ready = list(reversed(range(len(schedule))))
    while ready:
        rank = ready.pop()
        actions = schedule[rank]
        for index in range(position[rank], len(actions)):
            action = actions[index]
            stage, kind, microbatch = action
            if kind.computes:
                if action in posted:
                    if action not in sent:
                        waiting[action] = rank
                        position[rank] = index
                        break
                    posted.remove(action)  # asked for no more: the sets stay small
                    sent.remove(action)
            elif kind.receives:
                posted.add((stage, kind.compute, microbatch))
            else:
                consumer = (stage + kind.direction, kind.compute, microbatch)
                sent.add(consumer)
                if consumer in waiting:
                    ready.append(waiting.pop(consumer))
            yield rank, action
        else:
            position[rank] = len(actions)
    if waiting:
        raise ScheduleError(_describe_wait(schedule, position, min(waiting.values())))


def _check_rank(rank: int, actions: Sequence[Action], p: int, v: int, m: int) -> None:
    stages = range(rank, p * v, p)
    needs = {stage: {kind: _needed(stage, kind, p, p * v - 1) for kind in Kind} for stage in stages}
    done: set[Key] = set()
    next_backward = dict.fromkeys(stages, 0)
    for action in actions:
        stage, kind, microbatch = action
        if stage not in needs or not 0 <= microbatch < m:
            raise ScheduleError(
                f"rank {rank}: {action} does not belong here: expected stage "
                f"{' or '.join(map(str, needs))} and a microbatch from 0 to {m - 1}"
            )
        if action in done:
            raise ScheduleError(f"rank {rank}: {action} comes twice: expected once")
        needed = needs[stage][kind]
        if needed is None:
            place = "first" if stage == 0 else "last"
            reason = f"stage {stage} is the {place} stage" if p > 1 else "all stages are on this one rank"
            raise ScheduleError(f"rank {rank}: {action} leads nowhere: {reason}")
        for other, before in needed:
            if (other, before, microbatch) not in done:
                expected = Action(other, before, microbatch)
                raise ScheduleError(f"rank {rank}: {action} comes too early: expected {expected} before it")
        if kind is Kind.BACKWARD:
            if microbatch != next_backward[stage]:
                raise ScheduleError(
                    f"rank {rank}: {action} is out of turn: expected {stage}B{next_backward[stage]}, since "
                    "gradients are added in ascending microbatches"
                )
            next_backward[stage] = microbatch + 1
        done.add(action)
    # All that a rank has to do but for receives, which its compute actions have already asked for.
    for stage in stages:
        sends = [kind.send for kind in COMPUTING if p > 1 and 0 <= stage + kind.direction < p * v]
        for kind, microbatch in product((*COMPUTING, *sends), range(m)):
            if (stage, kind, microbatch) not in done:
                raise ScheduleError(_describe_missing(rank, Action(stage, kind, microbatch), p, m))


def _needed(stage: int, kind: Kind, p: int, last: int) -> list[tuple[int, Kind]] | None:
    """List what comes before an action on its rank, for its microbatch; None for a message without another rank."""
    neighbour = stage + kind.direction if kind.sends else stage - kind.direction
    has_neighbour = 0 <= neighbour <= last
    if not kind.computes:
        known = [(stage, kind.compute)] if kind.sends else []
        return known if p > 1 and has_neighbour else None
    needed = [(stage, Kind.FORWARD)] if kind is Kind.BACKWARD else []
    if has_neighbour:
        needed.append((stage, kind.receive) if p > 1 else (neighbour, kind))
    return needed


def _describe_missing(rank: int, missing: Action, p: int, m: int) -> str:
    text = f"rank {rank}: {missing} is missing: expected"
    if missing.kind.computes:
        return f"{text} stage {missing.stage} to run each of {m} microbatches once {missing.kind.name.lower()}"
    consumer = missing.counterpart.compute
    return f"{text} it after {missing.compute}, for {consumer} on rank {consumer.stage % p}"


def _check_channels(schedule: Schedule, p: int) -> None:
    """Check that each channel's receives are posted in the order of its sends."""
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.kind.sends:
                sends[rank, (action.stage + action.kind.direction) % p].append(action)
            elif action.kind.receives:
                receives[(action.stage - action.kind.direction) % p, rank].append(action)
    for (source, destination), sent in sends.items():
        # Every value is sent and received exactly once by now: the two ends differ in order, if at all.
        for index, (action, found) in enumerate(zip(sent, receives[source, destination], strict=True)):
            if found != action.counterpart:
                raise ScheduleError(
                    f"rank {destination}: {found} is message {index} from rank {source}, which sends "
                    f"{action} there: expected {action.counterpart}, receives in the order of the sends"
                )


def _describe_wait(schedule: Schedule, position: Sequence[int], rank: int) -> str:
    """Follow the waits from a blocked rank to the cycle, or to a value that nobody sends."""
    trail: list[int] = []
    steps: list[str] = []
    while rank not in trail:
        action = schedule[rank][position[rank]]
        send = action.receive.counterpart
        trail.append(rank)
        steps.append(f"rank {rank} at {action} for {send}")
        rank = send.stage % len(schedule)
        if send not in schedule[rank]:
            return f"{', '.join(steps)}, which rank {rank} never sends"
    cycle = ", ".join(steps[trail.index(rank) :])
    return f"a cycle of waits: {cycle}: expected each value to be sent before its sender waits"
