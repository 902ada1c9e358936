"""Checkpoints under kills, flipped bits, cut files and hostile contents: refused by name, and nothing is touched."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.runtime.checkpoint import files
from autoptd.runtime.checkpoint.files import RECORD, find_step
from autoptd.runtime.checkpoint.loading import read_step
from autoptd.runtime.checkpoint.record import read_rank_record
from autoptd.runtime.checkpoint.regions import Region
from autoptd.runtime.checkpoint.tensor_file import open_tensors, read_region
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.module.parallel import Parallel
from samples.benchmarks.process_memory import begin_peak, read_memory
from tests.checkpoints import CONFIGS, assert_same, bind_thread, compile_config, run_mesh, train_steps
from tests.generated_models import make_batch
from tests.jobs import mark, run_job

ONE, TWO = (1, 1, 1), (2, 1, 1)


@cache
def bind() -> tuple[Parallel, torch.optim.Optimizer]:
    parallel = compile_config("packed", ONE).bind()
    return parallel, torch.optim.SGD(parallel.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


def save_trained(folder: Path) -> Path:
    """A checkpoint of two ranks; gives its step's folder."""

    def save(parallel: Parallel, own: Any, at: int) -> Any:
        train_steps(parallel, own, [make_batch(CONFIGS["packed"], 4)], at)
        parallel.save_checkpoint(folder, own)

    run_mesh("packed", TWO, "sgd", save)
    (step,) = folder.iterdir()
    return step


# Killed while it saves


def fill_and_save(parallel: Parallel, folder: Path, first: int, asynchronous: bool) -> None:
    """Save for ever; every tensor of save n is n."""
    for number in range(first, first + 10_000):
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.fill_(number)
        parallel.save_checkpoint(folder, data=number, keep=2, asynchronous=asynchronous)


def save_alone(folder: Path, first: int) -> None:
    fill_and_save(bind()[0], folder, first, False)


def save_aside(folder: Path, first: int) -> None:
    fill_and_save(bind()[0], folder, first, True)


def save_together(folder: Path, first: int) -> None:
    program = compile_config("packed", TWO)

    def body(connection: Connection) -> None:
        fill_and_save(bind_thread(program, connection), folder, first, False)

    run_threads(program.manifest, body)


def kill_saves(folder: Path, kills: int, save: Callable[[Path, int], None], draw: random.Random) -> int:
    """Kill `save` so many times, at random moments; the newest checkpoint loads each time. How many it got to save."""
    parallel, newest = bind()[0], 0
    context = multiprocessing.get_context("fork")
    for _ in range(kills):
        process = context.Process(target=_save_quietly, args=(save, folder, newest + 1))
        process.start()
        begun = time.monotonic()
        while not any(folder.glob("*")) and time.monotonic() - begun < 20:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.5))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        committed = [path for path in folder.iterdir() if (path / "COMMIT").exists()]
        if not committed and newest == 0:
            continue
        found = parallel.load_checkpoint(folder)
        assert found >= newest
        assert all(bool((p == found).all()) for p in parallel.parameters())
        newest = found
    return newest


def _save_quietly(save: Callable[[Path, int], None], folder: Path, first: int) -> None:
    torch.set_num_threads(1)
    save(folder, first)


SAVES = {"alone": save_alone, "aside": save_aside, "together": save_together}


@pytest.mark.parametrize(("way", "kills"), [("alone", 4), ("aside", 3), ("together", 3)])
def test_a_killed_save_loses_nothing(way: str, kills: int, tmp_path: Path) -> None:
    bind(), compile_config("packed", TWO)
    kill_saves(tmp_path, kills, SAVES[way], random.Random(kills))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("way", "kills"), [("alone", 80), ("aside", 60), ("together", 60)])
def test_two_hundred_kills(way: str, kills: int, tmp_path: Path) -> None:
    bind(), compile_config("packed", TWO)
    assert kill_saves(tmp_path, kills, SAVES[way], random.Random(0)) > kills // 4


def kill_a_rank(folder: Path, asynchronous: bool, kills: int, draw: random.Random) -> int:
    """As `kill_saves`, of one of two processes, the first and the second in turn; the other ends by itself."""
    parallel, program, saved = bind()[0], compile_config("packed", TWO), folder / "saved"
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.fill_(1)
    parallel.save_checkpoint(saved, data=1)
    newest = 1
    for victim in (kill % 2 for kill in range(kills)):
        pause = draw.uniform(0, 0.5)

        def die(pause: float = pause) -> None:
            time.sleep(pause)
            mark(folder)
            os.kill(os.getpid(), signal.SIGKILL)

        def work(rank: int, victim: int = victim, first: int = newest + 1) -> None:
            own = program.bind("cpu")
            if rank == victim:
                threading.Thread(target=die).start()
            fill_and_save(own, saved, first, asynchronous)

        ended = run_job(work, 2, folder, {"AUTOPTD_TIMEOUT": "5"})
        assert ended.statuses[victim] == signal.SIGKILL
        assert ended.statuses[1 - victim] not in (0, signal.SIGKILL)
        assert re.search(rf"rank {victim}|ranks \[{victim}\]", ended.stderr[1 - victim])
        found = parallel.load_checkpoint(saved)
        assert found >= newest
        assert all(bool((p == found).all()) for p in parallel.parameters())
        newest = found
    return newest


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_killed_in_a_save_loses_nothing(asynchronous: bool, tmp_path: Path) -> None:
    kill_a_rank(tmp_path, asynchronous, 2, random.Random(0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_forty_ranks_killed_in_a_save(asynchronous: bool, tmp_path: Path) -> None:
    assert kill_a_rank(tmp_path, asynchronous, 40, random.Random(1)) > 10


# Damaged


def damage_files(folder: Path, times: int, draw: random.Random) -> None:
    """Flip one bit of a file or cut it, load, and put it back."""
    step = save_trained(folder)
    parallel, optimizer = bind()
    parallel.load_checkpoint(folder, optimizer)
    with torch.no_grad():
        for weight in parallel.parameters():
            weight.add_(1)
    before = {n: x.clone() for n, x in parallel.state_dict().items()}
    moments = {id(p): s["momentum_buffer"] for p, s in optimizer.state.items()}
    kept = {number: moment.clone() for number, moment in moments.items()}
    files = sorted(step.iterdir())
    assert len(files) == 12
    for _ in range(times):
        file = draw.choice(files)
        whole = file.read_bytes()
        if draw.random() < 0.3:
            damaged = bytearray(whole[: draw.randrange(len(whole))])
        else:
            place = draw.randrange(8 * len(whole))
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(autoptd.CheckpointError) as caught:
            parallel.load_checkpoint(folder, optimizer)
        assert file.name in str(caught.value)
        file.write_bytes(whole)
    assert_same({n: x.clone() for n, x in parallel.state_dict().items()}, before)
    for parameter, momentum in optimizer.state.items():
        assert momentum["momentum_buffer"] is moments[id(parameter)]
        assert torch.equal(momentum["momentum_buffer"], kept[id(parameter)])
    parallel.load_checkpoint(folder, optimizer)


def test_damage_is_seen(tmp_path: Path) -> None:
    damage_files(tmp_path, 40, random.Random(1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_damages_are_seen(tmp_path: Path) -> None:
    damage_files(tmp_path, 500, random.Random(0))


def test_a_damaged_one_names_the_good_one_before_it(tmp_path: Path) -> None:
    parallel = bind()[0]
    for _ in range(2):
        parallel.save_checkpoint(tmp_path)
    first, second = sorted(tmp_path.iterdir())
    (second / RECORD).write_text("{}")
    with pytest.raises(autoptd.CheckpointError, match=f"checkpoint.json has .* the good one before it is {first}"):
        parallel.load_checkpoint(tmp_path)
    (second / "COMMIT").write_text("1")
    for folder in (tmp_path, second):
        with pytest.raises(autoptd.CheckpointError, match=f"COMMIT is damaged: .* newest good one is {first}"):
            parallel.load_checkpoint(folder)


@pytest.mark.parametrize("name", ["COMMIT", RECORD, "rank_00001.json", "rank_00001_000.safetensors"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    step = save_trained(tmp_path)
    (step / name).unlink()
    with pytest.raises(autoptd.CheckpointError, match=name):
        bind()[0].load_checkpoint(step)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    step = save_trained(tmp_path)
    (step / "rank_00001_000.safetensors").unlink()
    os.mkfifo(step / "rank_00001_000.safetensors")
    with pytest.raises(autoptd.CheckpointError, match="is no regular file"):
        bind()[0].load_checkpoint(step)


# Hostile: the hashes are right, what they are of is not


HOSTILE: list[Any] = [
    *(0, 1, -1, 2**31, 2**60, 2**63, 2**70, 10**400, 0.5, 1e308, True, None, "", "F32", "../../etc/passwd", "/", "\0"),
    *("a" * 5000, [], {}, [2**60, 2**60], [-1], [[[]]], {"!": "tuple"}, {"!": "float", "of": "nan"}, "rank_00000"),
]


INSERTED = [b"", b"0", b"}", b"[" * 2000, b'"', b"\xff", b"9" * 5000]


def change_value(value: Any, draw: random.Random) -> Any:
    """`value` with something hostile in one place of it."""
    if not value or not isinstance(value, (list, dict)) or draw.random() < 0.1:
        return nest(draw) if draw.random() < 0.02 else draw.choice(HOSTILE)
    value = dict(value) if isinstance(value, dict) else list(value)
    key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    kind = draw.random()
    if kind < 0.1:
        del value[key]
    elif kind < 0.2 and isinstance(value, list):
        value.append(value[key])
    elif kind < 0.2:
        value[draw.choice(["../x", "step", "\u2028", "!"])] = value[key]
    else:
        value[key] = change_value(value[key], draw)
    return value


def nest(draw: random.Random) -> Any:
    value: Any = []
    for _ in range(draw.choice([100, 480, 900])):
        value = [value]
    return value


def change_text(text: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.7:
        return json.dumps(change_value(json.loads(text), draw)).encode()
    data = bytearray(text)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(data))
        data[place : place + draw.randrange(3)] = draw.choice(INSERTED)
    return bytes(data)


def fuzz_headers(step: Path, times: int, draw: random.Random) -> int:
    """How many changed headers were refused."""
    data = (step / "rank_00000_000.safetensors").read_bytes()
    pieces = read_rank_record(step, 0).files[0].pieces
    length = int.from_bytes(data[:8], "little")
    refused = 0
    for _ in range(times):
        digest = write_hostile(step / "hostile", change_text(data[8 : 8 + length], draw), data[8 + length :])
        try:
            with open_tensors(step / "hostile", digest) as reader:
                for piece in pieces:
                    sizes = piece.region.sizes
                    whole = Region((0,) * len(sizes), sizes)
                    read_region(reader, piece.key, (piece.dtype, sizes), whole)
        except autoptd.CheckpointError:
            refused += 1
    return refused


def write_hostile(path: Path, header: bytes, data: bytes) -> str:
    """A safetensors file with any header; its SHA-256."""
    text = len(header).to_bytes(8, "little") + header + data
    path.write_bytes(text)
    return sha256(text).hexdigest()


def fuzz_records(step: Path, times: int, draw: random.Random) -> int:
    """How many changed JSON files were refused, the hashes made right."""
    parallel, optimizer = bind()
    training = parallel._training(optimizer, None)
    names = [RECORD, "rank_00000.json", "rank_00001.json"]
    texts = {name: (step / name).read_bytes() for name in names}
    before = {n: x.clone() for n, x in parallel.state_dict().items()}
    refused = 0
    for _ in range(times):
        name = draw.choice(names)
        changed = dict(texts)
        changed[name] = change_text(texts[name], draw)
        if name != RECORD:
            old, new = (sha256(of[name]).hexdigest().encode() for of in (texts, changed))
            changed[RECORD] = texts[RECORD].replace(old, new)
        changed["COMMIT"] = files._write_commit(1, sha256(changed[RECORD]).hexdigest())
        for file, text in changed.items():
            (step / file).write_bytes(text)
        try:
            read_step(training, find_step(step))
        except autoptd.CheckpointError:
            refused += 1
    assert_same(dict(parallel.state_dict()), before)
    return refused


def fuzz(folder: Path, times: int, seed: int) -> None:
    """Only CheckpointErrors, and under 1 GB, of which the process has about 0.6 before it begins."""
    step = save_trained(folder)
    copy = folder / "copy"
    shutil.copytree(step, copy)
    before = begin_peak()
    draw = random.Random(seed)
    assert fuzz_headers(step, times // 2, draw) > 0.8 * (times // 2)
    assert fuzz_records(copy, times - times // 2, draw) > 0.6 * (times - times // 2)
    assert read_memory("VmHWM") - before < 400e6


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    fuzz(tmp_path, 500, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_hostile_files(tmp_path: Path) -> None:
    fuzz(tmp_path, 20_000, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["{}", "[[[[[[[[[[]]]]]]]]]]", '""', '{"":{}}', "1"], ids=["tables", "lists", "texts", "keys", "numbers"]
)
def test_a_long_text_takes_bounded_memory(unit: str, tmp_path: Path) -> None:
    """What JSON of the greatest length becomes in memory."""
    before = begin_peak()
    count = (files._TEXT_LIMIT - 2) // (len(unit) + 1)
    (tmp_path / "rank_00000.json").write_bytes(b"[" + b",".join([unit.encode()] * count) + b"]")
    with pytest.raises(autoptd.CheckpointError, match="its format is 'None'"):
        read_rank_record(tmp_path, 0)
    assert read_memory("VmHWM") - before < 800e6


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 16]}},
        {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in "ab"},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a": {"dtype": "F32", "shape": [-4], "data_offsets": [16, 0]}},
        {"a": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}},
        {"a": 3},
        [],
    ],
)
def test_a_hostile_header_is_refused(header: Any, tmp_path: Path) -> None:
    digest = write_hostile(tmp_path / "file", json.dumps(header).encode(), bytes(16))
    with (
        pytest.raises(autoptd.CheckpointError, match=r"^.*file is no safetensors file of this checkpoint"),
        open_tensors(tmp_path / "file", digest) as reader,
    ):
        reader.get_tensor("a")
