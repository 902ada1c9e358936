"""A job whose rank is killed or stopped while the others bind, clip, save or load ends as in a call."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autoptd.runtime import launch
from autoptd.runtime.module.parallel import Parallel
from tests.jobs import Ended, mark, run_job
from tests.test_failures import KILLED, LINES, build, is_running, strike, wait_for_ends

LIMIT = 1.5  # AUTOPTD_TIMEOUT in these tests
MESH = (1, 2, 1)
VICTIM = 1
DUTIES = ("clip", "save", "save aside", "finish", "load", "whole", "export", "trace", "barrier")
# The rest are done alike.
every_duty = pytest.mark.parametrize(
    "place", [pytest.param(d, marks=() if d in ("clip", "save") else pytest.mark.slow) for d in DUTIES[:-1]]
)


def run_duties(parallel: Parallel, folder: Path, before: Callable[[str], object]) -> None:
    """A step, and what every rank must call between steps, each after ``before(place)``."""
    idx = torch.zeros(4, 8, dtype=torch.long)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(idx, idx)[1].backward()
    optimizer.step()
    duties: dict[str, Callable[[], object]] = {
        "clip": lambda: parallel.clip_grad_norm_(1.0),
        "save": lambda: parallel.save_checkpoint(folder / "saved", optimizer),
        "save aside": lambda: parallel.save_checkpoint(folder / "saved", asynchronous=True),
        "finish": parallel.finish_checkpoint,
        "load": lambda: parallel.load_checkpoint(folder / "saved"),
        "whole": parallel.full_state_dict,
        "export": lambda: parallel.export_pretrained(folder / "exported"),
        "trace": lambda: parallel.save_trace(folder / "trace.json"),
        "barrier": dist.barrier,
    }
    assert tuple(duties) == DUTIES
    for place, duty in duties.items():
        before(place)
        duty()


def fail_before(place: str, fault: Callable[[], object], folder: Path, limit: float = LIMIT) -> Ended:
    """A job of two ranks, of which VICTIM does `fault` before it comes to `place`."""
    program = build(MESH)

    def work(rank: int) -> None:
        def before(here: str) -> None:
            if rank == VICTIM and here == place:
                mark(folder)
                fault()

        before("bind")
        run_duties(program.bind("cpu"), folder, before)

    return run_job(work, program.mesh.size, folder, {"AUTOPTD_TIMEOUT": str(limit)})


def check_blamed(ended: Ended, place: str, reason: str) -> None:
    (line,) = ended.stderr[0].splitlines()
    assert re.match(rf"autoptd: rank 0 stopped in .*: rank 1 failed first, in {place} \(.*\): {reason}", line)
    assert 0 not in ended.statuses.values()


@pytest.mark.parametrize(
    "place",
    [pytest.param(d, marks=() if d in ("clip", "save", "whole", "barrier") else pytest.mark.slow) for d in DUTIES],
)
def test_a_killed_rank_is_named_by_those_that_wait_for_it(place: str, tmp_path: Path) -> None:
    ended = fail_before(place, strike(signal.SIGKILL), tmp_path)
    check_blamed(ended, "the time between steps, after step 1", KILLED)
    assert max(ended.seconds.values()) < 5


@every_duty
def test_a_stopped_rank_is_named_by_those_that_wait_for_it(place: str, tmp_path: Path) -> None:
    ended = fail_before(place, strike(signal.SIGSTOP), tmp_path)
    check_blamed(ended, "the time between steps, after step 1", r"its process has been silent for \d s")
    assert ended.statuses[VICTIM] == signal.SIGKILL
    assert max(ended.seconds.values()) < LIMIT + 5


def test_a_rank_that_is_late_for_a_duty_is_waited_for(tmp_path: Path) -> None:
    ended = fail_before("save", lambda: time.sleep(LIMIT + 1.5), tmp_path)
    assert set(ended.statuses.values()) == {0}
    assert ended.lines == []


def test_a_rank_that_never_comes_to_a_duty_is_named(tmp_path: Path) -> None:
    ended = fail_before("save", lambda: time.sleep(60), tmp_path, limit=0.4)
    check_blamed(ended, "the time between steps, after step 1", r"it has not moved for \d s")
    assert max(ended.seconds.values()) < 11 * 0.4 + 5


def test_an_error_of_ones_own_is_no_peers_end(tmp_path: Path) -> None:
    """Though the peer has ended: what raises is no message."""

    def work(rank: int) -> None:
        build(MESH).bind("cpu")
        if rank == VICTIM:
            mark(tmp_path)
            os._exit(0)
        time.sleep(1)
        raise RuntimeError("my own error")

    ended = run_job(work, 2, tmp_path)
    assert re.match("autoptd: rank 0 failed in .*: RuntimeError: my own error; see", ended.stderr[0])
    assert "Traceback" in ended.stderr[0]


@pytest.mark.parametrize(("fault", "seconds"), [(strike(signal.SIGKILL), 1.5), (lambda: time.sleep(5), 4.0)])
def test_a_rank_that_does_not_come_to_bind_is_named(
    fault: Callable[[], object], seconds: float, tmp_path: Path
) -> None:
    """At once where its process has ended, else after ten times the limit."""
    ended = fail_before("bind", fault, tmp_path, limit=0.2)
    assert re.search(r"RuntimeError: ranks \[1\] did not come to bind in [0-3] s", ended.stderr[0])
    assert ended.statuses[0] != 0
    assert ended.seconds[0] < seconds


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, KILLED), (signal.SIGSTOP, r"its process has been silent for \d s")]
)
def test_a_rank_that_fails_in_bind_is_named(number: signal.Signals, reason: str, tmp_path: Path) -> None:
    program = build(MESH)

    def work(rank: int) -> None:
        def fail(*known: object) -> None:
            mark(tmp_path)
            os.kill(os.getpid(), number)

        if rank == VICTIM:
            vars(launch)["connect"] = fail  # in this process alone
        program.bind("cpu")

    ended = run_job(work, 2, tmp_path, {"AUTOPTD_TIMEOUT": str(LIMIT)})
    check_blamed(ended, "bind after step 0, which every rank must call", reason)
    assert len(ended.stderr[0].splitlines()) <= LINES
    assert max(ended.seconds.values()) < LIMIT + 5


def test_ranks_that_begin_torch_distributed_by_bind(tmp_path: Path) -> None:
    """With no launcher's store: rank 0 serves one. And torch's exception hook, put round ours, hides nothing."""
    program = build(MESH)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    ranks = []
    for rank in range(2):
        if (process := os.fork()) == 0:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            os.environ.update(place, WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank))
            tempfile.tempdir = str(tmp_path)
            sys.stderr = (tmp_path / str(rank)).open("w", buffering=1)
            torch.set_num_threads(1)
            try:
                run_duties(program.bind("cpu"), tmp_path, lambda place: None)
                assert list(tmp_path.glob("autoptd-*")) == []
                dist.barrier()
                raise ValueError("my own error")
            except BaseException as error:
                vars(sys)["__stderr__"] = sys.stderr
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(2)
        ranks.append(process)
    assert [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks] == [1, 1]
    first, second = sorted(((tmp_path / str(rank)).read_text() for rank in range(2)), key=len)
    assert re.match(r"autoptd: rank \d stopped in .*: rank \d failed first, in .*: ValueError: my own error", first)
    assert len(first.splitlines()) == 1
    assert re.match(r"autoptd: rank \d failed in .*: ValueError: my own error", second)
    assert "Traceback" in second


PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
"""
COMPILING = """
import os, sys, time
from pathlib import Path
import autoptd
try:
    autoptd.compile(None, mesh=(1, 1, 1))
except TypeError:
    (Path(sys.argv[1]) / "child").write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_that_compiles_ends_with_torchrun(launched: bool, tmp_path: Path) -> None:
    """And what torchrun has not started, with nobody."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    if launched:
        environment["TORCHELASTIC_RUN_ID"] = "test"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, COMPILING, str(tmp_path)], env=environment)
    path = tmp_path / "child"
    while not (path.exists() and path.read_text()):
        assert parent.poll() is None
        time.sleep(0.01)
    child = int(path.read_text())
    parent.kill()
    parent.wait()
    try:
        if launched:
            assert wait_for_ends({"child": child}, time.time())["child"] < 2
        else:
            time.sleep(1)
            assert is_running(child)
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def test_who_goes_on_without_sharding_its_optimizer_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    program = build((1, 1, 2))

    def work(rank: int) -> None:
        parallel = program.bind("cpu")
        mark(tmp_path)
        if rank != VICTIM:
            parallel.shard_optimizer(torch.optim.SGD(parallel.parameters(), lr=0.1))
        idx = torch.zeros(4, 8, dtype=torch.long)
        parallel(idx, idx)

    ended = run_job(work, 2, tmp_path, {"AUTOPTD_TIMEOUT": str(LIMIT)})
    assert all(ended.statuses.values())
    assert max(ended.seconds.values()) < 2 * LIMIT + 5
    assert "in comparison of shards of step 0" in "\n".join(ended.lines)
