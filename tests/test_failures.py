"""A job whose rank is killed, stopped, or raises, ends by itself: soon, with a code, and with one line a rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime import launch
from autoptd.runtime.health.activity import Position
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.schedule import Action
from samples.gpt import GPT, GPTConfig
from tests.jobs import Ended, mark, run_job

LIMIT = 3.0  # AUTOPTD_TIMEOUT in these tests
STEP = 2  # in which it happens
BETWEEN = "between"
LINES = 15
Fault = Callable[[], Any]


@cache
def build(mesh: tuple[int, int, int] = (2, 2, 1)) -> CompiledProgram:
    torch.manual_seed(0)
    chunks = 2 if mesh[1] > 1 else 1
    return autoptd.compile(
        GPT(GPTConfig(32, 8, 2, 2, 8)), mesh, microbatch_size=1, num_microbatches=4, num_model_chunks=chunks
    )


def places(victim: int) -> list[str]:
    """Ten places of a step on rank `victim`: seven actions from first to last, and three phases."""
    actions = build().rank(victim).schedule
    chosen = [str(actions[i * (len(actions) - 1) // 6]) for i in range(7)]
    return [*chosen, "loss", "agreement", BETWEEN]


def fail_at(place: str, fault: Fault, folder: Path) -> None:
    """In this forked rank, do `fault` when step STEP comes to `place`."""
    kept = {name: getattr(Position, name) for name in ("act", "phase")}

    def patched(name: str) -> Callable[..., None]:
        def run(self: Position, what: Action | str) -> None:
            kept[name](self, what)
            here = str(what) or BETWEEN
            if self.read().step == STEP and here == place:
                mark(folder)
                fault()

        return run

    for name in kept:
        setattr(Position, name, patched(name))


def train(
    victim: int, place: str, fault: Fault, folder: Path, mesh: tuple[int, int, int] = (2, 2, 1), **options: Any
) -> Ended:
    program = build()
    steps = options.pop("steps", 1_000_000)

    def work(rank: int) -> None:
        parallel = program.bind()
        if rank == victim:
            fail_at(place, fault, folder)
        take_steps(parallel, steps)

    environment = {"AUTOPTD_TIMEOUT": str(LIMIT), **options.pop("environment", {})}
    return run_job(work, program.mesh.size, folder, environment, **options)


def take_steps(parallel: Parallel, steps: int) -> None:
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        idx = torch.randint(32, (4, 8), generator=generator)
        parallel(idx, idx)[1].backward()
        optimizer.step()
        optimizer.zero_grad()


def strike(number: signal.Signals) -> Fault:
    return lambda: os.kill(os.getpid(), number)


def spin() -> None:
    while True:
        pass


def fail() -> None:
    raise ValueError("my own error")


def describe(victim: int, place: str) -> str:
    """How the lines name `victim`, failing at `place`."""
    token = re.match(r"(\d+)[FBSR]", place)
    stages = f"stage {token[1]}" if token else rf"stages {build().mesh.coordinates(victim).pipeline}, \d"
    words = f"the time between steps, after step {STEP}" if place == BETWEEN else f"{place} of step {STEP}"
    return rf"rank {victim} failed first, in {words} \({stages}\): "


def check_lines(ended: Ended, victim: int, place: str, reason: str) -> None:
    """Each other rank has written one line, which names the victim; and has ended with a code."""
    for rank, text in ended.stderr.items():
        assert ended.statuses[rank] != 0
        if rank != victim:
            (line,) = text.splitlines()
            assert re.match(rf"autoptd: rank {rank} stopped in .* step \d+: {describe(victim, place)}{reason}", line), (
                line
            )
            record = json.loads(Path(line.rpartition("see ")[2]).read_text())
            assert (record["rank"], record["coordinates"]) == (victim, str(build().mesh.coordinates(victim)))
    assert len(ended.stderr[0].splitlines()) <= LINES


KILLED = re.escape("its process ended without a word")


@pytest.mark.parametrize(("victim", "index"), [(0, 3), (3, 7), (2, 9)])
def test_a_killed_rank_ends_the_job(victim: int, index: int, tmp_path: Path) -> None:
    place = places(victim)[index]
    ended = train(victim, place, strike(signal.SIGKILL), tmp_path)
    check_lines(ended, victim, place, KILLED)
    assert max(ended.seconds.values()) < 5


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("index", range(10))
def test_every_rank_killed_everywhere(victim: int, index: int, tmp_path: Path) -> None:
    place = places(victim)[index]
    ended = train(victim, place, strike(signal.SIGKILL), tmp_path)
    check_lines(ended, victim, place, KILLED)
    assert max(ended.seconds.values()) < 5
    print(f"gone after {max(ended.seconds.values()):.2f} s")


@pytest.mark.parametrize(
    ("victim", "index"), [(1, 4), *(pytest.param(v, 2 * v, marks=pytest.mark.slow) for v in range(4))]
)
def test_a_stopped_rank_ends_the_job(victim: int, index: int, tmp_path: Path) -> None:
    place = places(victim)[index]
    ended = train(victim, place, strike(signal.SIGSTOP), tmp_path)
    check_lines(ended, victim, place, "its process has been silent for [345] s")
    assert ended.statuses[victim] == signal.SIGKILL  # by the rank that blames it: no launcher waits for it
    assert max(ended.seconds.values()) < LIMIT + 5
    print(f"gone after {max(ended.seconds.values()):.2f} s")


def test_a_rank_in_a_loop_ends_the_job(tmp_path: Path) -> None:
    place = places(2)[3]
    ended = train(2, place, spin, tmp_path)
    check_lines(ended, 2, place, "it has not moved for [3456] s, and computes; see")
    assert max(ended.seconds.values()) < LIMIT + 5


@pytest.mark.parametrize("index", [5, 9])
def test_an_exception_is_shown_once(index: int, tmp_path: Path) -> None:
    place = places(1)[index]
    ended = train(1, place, fail, tmp_path)
    check_lines(ended, 1, place, "ValueError: my own error; see ")
    first, *rest = ended.stderr[1].splitlines()
    assert re.match(rf"autoptd: {describe(1, place)}".replace("failed first,", "failed"), first)
    assert rest[0].endswith("Traceback (most recent call last):")
    assert sum("Traceback" in line for line in ended.lines) == 1
    assert max(ended.seconds.values()) < 5


@pytest.mark.parametrize(("method", "call"), [("full_state_dict", "full_state_dict"), ("__call__", "an evaluation")])
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_collective_calls_of_one_rank_alone_are_refused(
    mesh: tuple[int, int, int], method: str, call: str, tmp_path: Path
) -> None:
    """As under `if rank == 0`: by whoever comes second, before messages of two calls meet."""
    program = build(mesh)

    def work(rank: int) -> None:
        parallel = program.bind()
        take_steps(parallel, STEP)
        if rank == 0:
            mark(tmp_path)
            idx = torch.zeros(4, 8, dtype=torch.long)
            with torch.no_grad():
                getattr(parallel, method)(*([idx, idx] if method == "__call__" else []))
        take_steps(parallel, STEP)

    ended = run_job(work, 2, tmp_path)
    said = "\n".join(ended.lines)
    training = "a call in training"
    pairs = f"({call} of this rank met {training} of rank 1|{training} of this rank met {call} of rank 0)"
    assert re.search(rf"RuntimeError: {pairs}, which is at .*: every rank makes each call", said), said
    assert max(ended.seconds.values()) < 5


def test_time_between_calls_does_not_count(tmp_path: Path) -> None:
    ended = train(0, BETWEEN, lambda: time.sleep(LIMIT + 1.5), tmp_path, steps=3)
    assert set(ended.statuses.values()) == {0}
    assert ended.lines == []
    assert list(tmp_path.glob("machine_*/*")) == []


def test_ranks_of_another_machine_hear_of_it(tmp_path: Path) -> None:
    place = places(3)[4]
    ended = train(3, place, strike(signal.SIGKILL), tmp_path, machines=2)
    check_lines(ended, 3, place, KILLED)
    assert len(list(tmp_path.glob("machine_*/autoptd-*.json"))) == 2
    assert max(ended.seconds.values()) < 5


def test_a_limit_must_be_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv("AUTOPTD_TIMEOUT", text)
        with pytest.raises(ValueError, match=f"AUTOPTD_TIMEOUT is '{text}', expected a positive number"):
            build((1, 1, 1)).bind("cpu")


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    parent = os.fork()
    if parent == 0:
        child = os.fork()
        if child == 0:
            os.environ["TORCHELASTIC_RUN_ID"] = "test"
            launch.end_with_launcher()
            (tmp_path / "child").write_text(str(os.getpid()))
            time.sleep(60)
        while True:
            time.sleep(1)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    began = time.monotonic()
    while is_running(child):
        assert time.monotonic() - began < 2
        time.sleep(0.01)


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from tests.test_failures import build, fail_at, strike, take_steps

torch.set_num_threads(1)
victim, place, number, folder = sys.argv[1:]
parallel = build().bind()
rank = os.environ["RANK"]
(Path(folder) / rank).write_text(str(os.getpid()))
if rank == victim:
    fail_at(place, strike(getattr(signal, number)), Path(folder))
take_steps(parallel, 1_000_000)
"""


def launch_job(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """torchrun on four ranks of SCRIPT, and all their process numbers once they have started or failed."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "AUTOPTD_TIMEOUT": str(LIMIT),
        "TMPDIR": str(folder),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    process = subprocess.Popen(
        [*torchrun, str(script), *arguments, str(folder)],
        env=environment,
        stderr=(folder / "stderr").open("w"),
        text=True,
    )
    ranks = [folder / str(rank) for rank in range(4)]
    while not all(path.exists() and path.read_text() for path in ranks):
        assert process.poll() is None, (folder / "stderr").read_text()
        time.sleep(0.01)
    return process, {path.name: int(path.read_text()) for path in ranks}


def wait_for_ends(processes: dict[str, int], began: float) -> dict[str, float]:
    """The seconds after which each process had ended."""
    ends: dict[str, float] = {}
    while len(ends) < len(processes):
        assert time.time() - began < 60, f"{sorted(processes.keys() - ends.keys())} still run"
        for name, process in processes.items():
            if name not in ends and not is_running(process):
                ends[name] = time.time() - began
        time.sleep(0.01)
    return ends


@pytest.mark.slow
@pytest.mark.parametrize(("number", "limit"), [("SIGKILL", 5.0), ("SIGSTOP", LIMIT + 5)])
@pytest.mark.parametrize(("victim", "index"), [(0, 2), (1, 5), (2, 8), (3, 4)])
def test_under_torchrun(victim: int, index: int, number: str, limit: float, tmp_path: Path) -> None:
    place = places(victim)[index]
    process, ranks = launch_job(tmp_path, str(victim), place, number)
    failed = tmp_path / "failed"
    while not (failed.exists() and failed.read_text()):
        time.sleep(0.01)
    ends = wait_for_ends(ranks, float(failed.read_text()))
    assert process.wait(30) != 0
    lines = (tmp_path / "stderr").read_text().splitlines()
    ours = [line for line in lines if line.startswith("autoptd:")]
    assert len(ours) == 3
    assert all(re.search(describe(victim, place), line) for line in ours)
    assert max(ends.values()) < limit
    print(f"gone after {max(ends.values()):.2f} s")
    print(f"{len(lines)} lines with torchrun's own")


@pytest.mark.slow
def test_no_rank_outlives_torchrun(tmp_path: Path) -> None:
    process, ranks = launch_job(tmp_path, "none", "loss", "SIGKILL")
    time.sleep(1)
    process.kill()
    ends = wait_for_ends(ranks, time.time())
    process.wait()
    assert max(ends.values()) < 2
    print(f"gone after {max(ends.values()):.2f} s")


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


WATCHED = """
import sys, threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from torch.distributed import TCPStore
from autoptd.runtime.health.failure_record import FailureRecord
from autoptd.runtime.health.activity import Position
from autoptd.runtime.health.watchdog import Watchdog

asked = threading.Event()

class Slow(TCPStore):
    def check(self, keys):
        asked.set()
        try:
            self.wait(["nothing"], timedelta(seconds=0.5))
        except RuntimeError:
            return False

store = Slow("127.0.0.1", 0, is_master=True, wait_for_workers=False)
roster = SimpleNamespace(processes={}, rank=0)
record = FailureRecord(Path(sys.argv[1]) / "failure.json", store)
Watchdog(None, roster, record, Position(None, {}), 60.0).start(launched=True)
print(asked.wait(20))
"""


def test_a_rank_ends_well_while_its_watchdog_asks_other_machines(tmp_path: Path) -> None:
    """The thread would come back from C++ into an interpreter that is gone, which ends the process by SIGABRT."""
    command = [sys.executable, "-c", WATCHED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "True\n"


ENDING = """
import atexit, os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from autoptd.runtime.health.failure_record import FailureRecord
from autoptd.runtime.health.activity import CALLS, SLOTS, Position
from autoptd.runtime.health.watchdog import Watchdog
from tests.runtime.chain import Chain

what, folder = sys.argv[1:]
reading, writing = os.pipe()
slots = memoryview(bytearray(8 * SLOTS)).cast("q")
roster = SimpleNamespace(processes={1: reading}, rank=0, slots=lambda rank: slots)
position = Position(None, {})
position.slots[CALLS] = 5

def end():
    if what == "peer":
        os.close(writing)  # as a process that ends: its handle can be read
    else:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)

atexit.register(end)
record = FailureRecord(Path(folder) / "failure.json")
Watchdog(Chain((1, 2, 1)).manifest, roster, record, position, 60.0).start(launched=True)
if what == "error":
    raise ValueError("my own error")
"""


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("SIGTERM", -signal.SIGTERM, []),
        ("peer", 1, ["autoptd: rank 0 stopped in the time before its first step: rank 1 failed first"]),
        ("error", 1, ["autoptd: rank 0 failed in"]),
    ],
)
def test_a_rank_is_watched_while_it_ends(what: str, status: int, said: list[str], tmp_path: Path) -> None:
    """What it has registered for its end may wait for others: SIGTERM and a failure of a peer end it all the same."""
    command = [sys.executable, "-c", ENDING, what, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    began = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == status, ended.stderr
    assert time.monotonic() - began < 30
    lines = [line for line in ended.stderr.splitlines() if line.startswith("autoptd:")]
    assert len(lines) == len(said), ended.stderr
    assert all(map(str.startswith, lines, said)), ended.stderr
