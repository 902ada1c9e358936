"""A schedule on devices that share cores: processes of one machine, more of them than it has cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from autoptd.passes.cluster import Cluster
from autoptd.passes.pipeline import ActionTimes
from autoptd.runtime.mesh import Mesh
from autoptd.runtime.schedule import Action, Schedule

Job = tuple[int, int]  # a pipeline rank, and where its message goes: itself for what it computes


def walk_shared(
    schedule: Schedule, times: ActionTimes, mesh: Mesh, cluster: Cluster
) -> Iterator[tuple[int, Action, float, float]]:
    """Yield (rank, action, start, end) of every forward, backward and sent message, in the order they end.

    Who computes takes a core, and so does a message of gloo, which its ends copy; who waits sleeps. Where more than
    `cluster.devices_at_once` of a node want a core they share evenly, as an operating system's scheduler has it
    over its few milliseconds. The tensor and data peers of a pipeline rank do the same at the same time. `times`
    are those of a core alone, and `schedule` is one that waits for no end (see `check_schedule`).
    """
    peers: list[list[int]] = [[] for _ in range(mesh.pipeline)]
    for rank in range(mesh.size):
        peers[mesh.coordinates(rank).pipeline].append(rank)
    return _SharedWalk(schedule, times, list(map(cluster.nodes, peers)), cluster.devices_at_once).run()


class _SharedWalk:
    """The jobs that run, since when, and the seconds of a core that each has left.

    `peers` has for each pipeline rank the number of its ranks in each node.
    """

    def __init__(
        self, schedule: Schedule, times: ActionTimes, peers: Sequence[Mapping[int, int]], at_once: int
    ) -> None:
        self._pending = [deque(a for a in actions if not a.kind.startswith("RECV")) for actions in schedule]
        receives = (a for actions in schedule for a in actions if a.kind.startswith("RECV"))
        self._awaited = {(stage, kind[-1], microbatch) for stage, kind, microbatch in receives}
        self._times, self._peers, self._at_once = times, peers, at_once
        self._queues: dict[Job, deque[Action]] = {}
        self._running: dict[Job, tuple[Action, float]] = {}
        self._left: dict[Job, float] = {}
        self._now = 0.0

    def run(self) -> Iterator[tuple[int, Action, float, float]]:
        for rank in range(len(self._pending)):
            self._advance(rank)
        while self._left:
            rates = {job: self._rate(job[0]) for job in self._left}
            needed = {job: left / rates[job] for job, left in self._left.items()}
            step = min(needed.values())
            self._now += step
            for job, seconds in needed.items():
                self._left[job] -= step * rates[job]
                if seconds == step:
                    del self._left[job]
                    action, start = self._running.pop(job)
                    yield job[0], action, start, self._now
                    self._finish(job, action)

    def _rate(self, rank: int) -> float:
        """The share of a core that a pipeline rank's ranks have, in the most crowded of their nodes."""
        wanted = [
            sum(self._peers[other].get(node, 0) for other, _ in self._left) for node in self._peers[rank]
        ]
        return min(1.0, self._at_once / max(wanted))

    def _finish(self, job: Job, action: Action) -> None:
        """Start what waited for `action`: on its rank, behind it in its channel, and at the channel's other end."""
        rank, there = job
        if there != rank:
            self._awaited.discard((_consumer(action), action.kind[-1], action.microbatch))
            queue = self._queues[job]
            queue.popleft()
            if queue:
                self._start(job, queue[0])
            self._advance(there)
        self._advance(rank)

    def _advance(self, rank: int) -> None:
        """Post what `rank` sends, up to its next forward or backward, and start that if its value is there."""
        pending = self._pending[rank]
        while pending and pending[0] not in self._awaited and not self._holds_up(rank):
            action = pending.popleft()
            if not action.kind.startswith("SEND"):
                self._start((rank, rank), action)
                continue
            job = rank, _consumer(action) % len(self._pending)
            queue = self._queues.setdefault(job, deque())
            queue.append(action)
            if len(queue) == 1:
                self._start(job, action)

    def _holds_up(self, rank: int) -> bool:
        """Whether `rank` computes, or waits until what it sent has left."""
        sending = self._times.blocking and any(
            queue for (source, _), queue in self._queues.items() if source == rank
        )
        return sending or (rank, rank) in self._running

    def _start(self, job: Job, action: Action) -> None:
        stage, kind, _ = action
        if kind == "F" or kind == "B":
            seconds = (self._times.forward if kind == "F" else self._times.backward)[stage]
        else:
            seconds = self._times.messages[stage, kind]
        self._running[job], self._left[job] = (action, self._now), seconds


def _consumer(action: Action) -> int:
    """The stage that a sent message is for."""
    return action.stage + (1 if action.kind == "SEND_F" else -1)
