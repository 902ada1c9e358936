"""A schedule on devices that share cores: processes of one machine, more of them than it has cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.schedule_times import ActionTimes
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import Action, Schedule

IDLE = 1e-9  # cores: what shares are exact to
Job = tuple[int, int]  # a pipeline rank, and where its message goes: itself for what it computes


def walk_shared(
    schedule: Schedule, times: ActionTimes, waiting: ActionTimes, mesh: Mesh, cluster: Cluster
) -> Iterator[tuple[int, Action, float, float]]:
    """Yield (rank, action, start, end) of every forward, backward and sent message, in the order they end.

    Who computes takes a core, and so does a message, which its ends copy; who waits sleeps. Where more than
    `cluster.devices_at_once` of a node want a core they share evenly, as an operating system's scheduler has it
    over its few milliseconds. The tensor and data peers of a pipeline rank do the same at the same time. `times`
    are those of a core alone, and `schedule` is one that waits for no end (see `check_schedule`).

    Of an action's time `waiting` is what takes no core, in small parts all through it, as the latencies of a
    stage's all-reduces are. It is no shorter on an idle core, nor longer on a crowded one, where meanwhile others
    work.
    """
    peers: list[list[int]] = [[] for _ in range(mesh.pipeline)]
    for rank in range(mesh.size):
        peers[mesh.coordinates(rank).pipeline].append(rank)
    return _SharedWalk(
        schedule, times, waiting, list(map(cluster.nodes, peers)), cluster.devices_at_once
    ).run()


class Spell(NamedTuple):
    """A job's seconds with a core of its own: on the core, and waiting."""

    working: float
    waiting: float

    def busy(self, share: float) -> float:
        """The part of a core that it uses, when it has such a `share` of one whenever it wants one."""
        return self.working / (self.working / share + self.waiting)

    def speed(self, share: float) -> float:
        """How fast it gets on with that share, beside a core of its own."""
        alone = self.working + self.waiting
        return alone / (self.working / share + self.waiting) if alone else 1.0


class _SharedWalk:
    """The jobs that run, since when, and the seconds that each would have left on a core alone.

    `peers` has for each pipeline rank the number of its ranks in each node.
    """

    def __init__(
        self,
        schedule: Schedule,
        times: ActionTimes,
        waiting: ActionTimes,
        peers: Sequence[Mapping[int, int]],
        at_once: int,
    ) -> None:
        self._pending = [deque(a for a in actions if not a.kind.startswith("RECV")) for actions in schedule]
        receives = (a for actions in schedule for a in actions if a.kind.startswith("RECV"))
        self._awaited = {(stage, kind[-1], microbatch) for stage, kind, microbatch in receives}
        self._times, self._waiting, self._peers, self._at_once = times, waiting, peers, at_once
        self._queues: dict[Job, deque[Action]] = {}
        self._running: dict[Job, tuple[Action, float]] = {}
        self._left: dict[Job, float] = {}
        self._spells: dict[Job, Spell] = {}
        self._now = 0.0

    def run(self) -> Iterator[tuple[int, Action, float, float]]:
        for rank in range(len(self._pending)):
            self._advance(rank)
        while self._left:
            rates = self._rates()
            needed = {job: left / rates[job] for job, left in self._left.items()}
            step = min(needed.values())
            self._now += step
            for job, seconds in needed.items():
                self._left[job] -= step * rates[job]
                if seconds == step:
                    del self._left[job], self._spells[job]
                    action, start = self._running.pop(job)
                    yield job[0], action, start, self._now
                    self._finish(job, action)

    def _rates(self) -> dict[Job, float]:
        """How fast each job gets on, in the most crowded of the nodes that its ranks are in."""
        crowds: dict[int, list[tuple[int, Spell]]] = {}
        for (rank, _), spell in self._spells.items():
            for node, count in self._peers[rank].items():
                crowds.setdefault(node, []).append((count, spell))
        shares = {node: share_cores(crowd, self._at_once) for node, crowd in crowds.items()}
        return {
            job: spell.speed(min(shares[node] for node in self._peers[job[0]]))
            for job, spell in self._spells.items()
        }

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
        seconds, waiting = (
            (times.forward if kind == "F" else times.backward)[stage]
            if kind == "F" or kind == "B"
            else times.messages[stage, kind]
            for times in (self._times, self._waiting)
        )
        self._running[job], self._left[job] = (action, self._now), seconds
        self._spells[job] = Spell(seconds - waiting, waiting)


def share_cores(crowd: Sequence[tuple[int, Spell]], cores: int) -> float:
    """The share of a core that everybody has who wants one, of `crowd`: how many processes do each spell.

    With it all cores are at work; it is 1 where there are enough for all who want one at a time.
    """
    working = [(count, spell) for count, spell in crowd if spell.working]
    share = 1.0
    if sum(count * spell.busy(share) for count, spell in working) > cores:
        # Newton's steps: the busy cores grow ever slower with the share, so that it is reached from below.
        share = cores / sum(count for count, _ in working)
        while (idle := cores - sum(count * spell.busy(share) for count, spell in working)) > IDLE:
            share += idle / sum(count * (spell.busy(share) / share) ** 2 for count, spell in working)
    return share


def _consumer(action: Action) -> int:
    """The stage that a sent message is for."""
    return action.stage + (1 if action.kind == "SEND_F" else -1)
