"""Ranks find each other through torch's store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from autoptd.runtime.health.local_ranks import LocalRanks, gather_local_ranks, machine_number

LIMIT = 20.0


def test_all_know_each_other() -> None:
    store, found = HashStore(), dict[int, LocalRanks]()

    def gather(rank: int) -> None:
        found[rank] = gather_local_ranks(store, rank, 3, LIMIT)

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert {rank: sorted(roster.processes) for rank, roster in found.items()} == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
    assert len({roster.name for roster in found.values()}) == 1
    assert all(roster.everybody for roster in found.values())
    found[0].slots(1)[0] = 7
    assert found[2].slots(1)[0] == 7


def test_one_that_does_not_come_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not come to bind in 0 s"):
        gather_local_ranks(HashStore(), 0, 2, 0.1)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system has no handles of processes")
def test_one_that_ended_while_it_waited_is_named() -> None:
    store, ended = HashStore(), subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store.set("rank 1", json.dumps([ended.pid, machine_number(), 1]))
    store.add("come", 1)
    with pytest.raises(RuntimeError, match="rank 1 has ended while it waited for the others in bind"):
        gather_local_ranks(store, 0, 2, LIMIT)
