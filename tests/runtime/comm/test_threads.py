"""Ranks as threads: an interrupt and a rank's failure stop them all, at their waits and between actions."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.comm.point_to_point import ThreadChannel
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.program.schedule import Action, Kind
from tests.ranks import run_ranks
from tests.runtime.chain import Chain


def interrupt(_: int) -> tuple[list[int], int, int]:
    """Interrupt two ranks, one of which waits for ever: those that ended, and the threads before and after."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    world, ended = ThreadWorld(), list[int]()
    channel = ThreadChannel(world, "channel 1 -> 0")

    def work(me: int) -> None:
        try:
            if me == 0:
                channel.receive((2,), torch.float32, torch.device("cpu")).wait()
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # it computes
        finally:
            ended.append(me)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        world.run(work, [0, 1])
    return sorted(ended), before, threading.active_count()


def test_an_interrupt_leaves_no_rank_behind() -> None:
    """It would abort the process: a thread inside torch when the interpreter ends does."""
    ((ended, before, after),) = run_ranks(interrupt, 1)  # the process of the tests may take an interrupt for its end
    assert ended == [0, 1]
    assert before == after


def test_a_rank_stops_at_its_next_action_when_another_has_failed() -> None:
    chain, acted = Chain((1, 1, 2), "gpipe", 1, 2), list[int]()

    def body(connection: Connection) -> None:
        for number in range(1000):
            connection.position.act(Action(0, Kind("F"), number))
            acted.append(number)
            if number == 1 and connection.world.index == 0:
                raise ValueError("my own error")
            time.sleep(0.01)

    with pytest.raises(ValueError, match="my own error"):
        run_threads(chain.manifest, body)
    assert max(acted) < 100
