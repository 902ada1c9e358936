"""The files of checkpoints: written whole or not at all, committed last, listed, and the oldest removed.

A folder has a folder for each step, ``step_00000042``, or ``step_00000042_2`` where the step was saved before. COMMIT
is written into it when everything else is on disk: its number in the order of commits, the SHA-256 of checkpoint.json,
and the SHA-256 of both. What has no COMMIT was never finished.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from autoptd.runtime.checkpoint.error import CheckpointError

COMMIT, RECORD = "COMMIT", "checkpoint.json"
_STEP = re.compile(r"step_(\d{8,18})(?:_([1-9]\d{0,8}))?", re.ASCII)
_TEXT_LIMIT = 16 << 20  # bytes of JSON: what it becomes in memory is up to 44 times as much


@dataclass(frozen=True)
class StepFolder:
    """One step's folder. `number` counts the commits; None: there is none, or, with a `problem`, a damaged one."""

    path: Path
    order: tuple[int, int]
    number: int | None
    digest: str = ""
    problem: str = ""


def write_file(path: Path, blocks: Iterable[Any]) -> None:
    """Write the `blocks` of bytes to `path`: it has all of them, on disk, or does not exist."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Have the names in the folder `path` on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path, size: int | None = None) -> BinaryIO:
    """The regular file `path`, of `size` bytes where that is known, for reading; else CheckpointError."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # a pipe would else be waited for
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; the checkpoint is not whole") from error
    status = os.fstat(file.fileno())
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "is no regular file"
    elif size is not None and status.st_size != size:
        problem = f"has {status.st_size} bytes, expected {size}: the file is damaged"
    if problem:
        file.close()
        raise CheckpointError(f"{path} {problem}")
    return file


def read_text(path: Path, digest: str | None = None) -> bytes:
    """The bytes of a JSON file; CheckpointError where it is too large, or its SHA-256 is not `digest`."""
    with open_file(path) as file:
        text = file.read(_TEXT_LIMIT + 1)
    check_length(text, path)
    found = hashlib.sha256(text).hexdigest()
    if digest is not None and found != digest:
        raise CheckpointError(f"{path} has the SHA-256 {found}, expected {digest}: the file is damaged")
    return text


def check_length(text: bytes, path: Path) -> None:
    """CheckpointError for a JSON `text` that no reader would take."""
    if len(text) > _TEXT_LIMIT:
        raise CheckpointError(f"{path} is longer than {_TEXT_LIMIT} bytes, which no checkpoint's JSON may be")


def make_step_folder(folder: Path, step: int) -> Path:
    """Make and give a new folder for `step`: none that is there is touched."""
    folder.mkdir(parents=True, exist_ok=True)
    attempts = [f.order[1] for f in list_steps(folder) if f.order[0] == step]
    attempt = max(attempts, default=0) + 1
    path = folder / (f"step_{step:08}" + (f"_{attempt}" if attempt > 1 else ""))
    path.mkdir()
    sync_folder(folder)
    return path


def commit_step(path: Path, record: bytes, number: int) -> None:
    """Write checkpoint.json and, when it and all other names are on disk, COMMIT."""
    write_file(path / RECORD, [record])
    write_file(path / COMMIT, [_write_commit(number, hashlib.sha256(record).hexdigest())])


def list_steps(folder: Path) -> list[StepFolder]:
    """The step folders in `folder`, by step; others are none of ours."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            found.append(_read_step(path, (int(match[1]), int(match[2] or 1))))
    return sorted(found, key=lambda step: step.order)


def next_number(folder: Path) -> int:
    """The number of the next commit in `folder`."""
    return max((step.number for step in list_steps(folder) if step.number is not None), default=0) + 1


def find_step(folder: Path) -> StepFolder:
    """The last committed checkpoint in `folder`, or `folder` itself where it is a step's.

    CheckpointError, naming the newest good one, where there is none or a COMMIT is damaged.
    """
    match = _STEP.fullmatch(folder.name)
    if match or (folder / COMMIT).exists():
        steps, own = list_steps(folder.parent), _read_step(folder, (0, 0))
        if own.problem or own.number is None:
            reason = own.problem or f"{folder} was not committed (no {COMMIT}): the save did not finish"
            raise CheckpointError(f"{reason}; {_name_newest(steps)}")
        return own
    steps = list_steps(folder)
    damaged = [step.problem for step in steps if step.problem]
    if damaged:
        raise CheckpointError(f"{damaged[0]}; {_name_newest(steps)}, or remove the damaged folder")
    committed = _sort_committed(steps)
    if committed:
        return committed[-1]
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: give the one that save_checkpoint was given")
    unfinished = f"{len(steps)} unfinished saves (no {COMMIT})" if steps else "no step folder"
    raise CheckpointError(f"{folder} has no committed checkpoint, but {unfinished}")


def name_earlier(step: StepFolder) -> str:
    """Words for the good checkpoint before `step`, to be tried where this one is damaged; "" where there is none."""
    earlier = [
        s for s in _sort_committed(list_steps(step.path.parent)) if (s.number or 0) < (step.number or 0)
    ]
    return f"; the good one before it is {earlier[-1].path}" if earlier else ""


def remove_old(current: Path, keep: int) -> None:
    """Remove all but the `keep` last committed checkpoints beside `current`, and unfinished ones of earlier steps."""
    steps = list_steps(current.parent)
    (own,) = (step for step in steps if step.path.name == current.name)
    old = _sort_committed(steps)[:-keep]
    old += [s for s in steps if s.number is None and not s.problem and s.order < own.order]
    for step in old:
        # Without its COMMIT it is no checkpoint, however far the removal comes.
        (step.path / COMMIT).unlink(missing_ok=True)
        sync_folder(step.path)
        shutil.rmtree(step.path)


def _read_step(path: Path, order: tuple[int, int]) -> StepFolder:
    file = path / COMMIT
    if not file.exists():
        return StepFolder(path, order, None)
    try:
        text = read_text(file)
    except CheckpointError as error:
        return StepFolder(path, order, None, problem=str(error))
    match = re.fullmatch(rb"([1-9]\d{0,17}) ([0-9a-f]{64}) [0-9a-f]{64}\n", text)
    if match is None or text != _write_commit(int(match[1]), match[2].decode()):
        return StepFolder(
            path, order, None, problem=f"{file} is damaged: it has not the hash of what it says"
        )
    return StepFolder(path, order, int(match[1]), match[2].decode())


def _write_commit(number: int, digest: str) -> bytes:
    line = f"{number} {digest}"
    return f"{line} {hashlib.sha256(line.encode()).hexdigest()}\n".encode()


def _sort_committed(steps: list[StepFolder]) -> list[StepFolder]:
    return sorted((s for s in steps if s.number is not None), key=lambda s: s.number or 0)


def _name_newest(steps: list[StepFolder]) -> str:
    committed = _sort_committed(steps)
    return f"the newest good one is {committed[-1].path}" if committed else "there is no good one beside it"
