"""The files of checkpoints: each written whole or not at all, the commit last; finding and removing them.

A folder has a folder for each step, ``step_00000042``, or ``step_00000042_2`` if the step was saved before. COMMIT
is written into it when all other files are on disk; it has the number of the commit in their order, the SHA-256 of
checkpoint.json, and the SHA-256 of both. A folder without COMMIT is an unfinished save.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from autoptd.runtime.checkpoint.error import CheckpointError

COMMIT, RECORD = "COMMIT", "checkpoint.json"
_STEP = re.compile(r"step_(\d{8,18})(?:_([1-9]\d{0,8}))?", re.ASCII)
_TEXT_LIMIT = 16 << 20  # bytes of JSON, which takes up to 44 times as much once it is parsed


@dataclass(frozen=True)
class StepFolder:
    """The folder of a step. `number` counts the commits from 1; 0 for no commit or, with a `problem`, a damaged one."""

    path: Path
    order: tuple[int, int]
    number: int = 0
    digest: str = ""
    problem: str = ""


@contextmanager
def create_file(path: Path) -> Iterator[Path]:
    """Yield a name to write a file under, which then becomes `path`: it is whole and on disk, or does not exist."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    yield unfinished
    sync(unfinished)
    os.replace(unfinished, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the contents of a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to the new file `path`, as `create_file` does."""
    with create_file(path) as unfinished:
        unfinished.write_bytes(data)


def open_file(path: Path) -> BufferedReader:
    """Open the regular file `path` for reading; CheckpointError if it cannot be read, or is something else."""
    try:
        # Opening a pipe would wait otherwise.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; the checkpoint is not whole") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} is no regular file")
    return file


def read_text(path: Path, digest: str | None = None) -> bytes:
    """Return the bytes of a JSON file; CheckpointError if it is too large, or its SHA-256 is not `digest`."""
    with open_file(path) as file:
        text = file.read(_TEXT_LIMIT + 1)
    check_length(text, path)
    found = hashlib.sha256(text).hexdigest()
    if digest is not None and found != digest:
        raise CheckpointError(f"{path} has the SHA-256 {found}, expected {digest}: the file is damaged")
    return text


def check_length(text: bytes, path: Path) -> None:
    """Raise CheckpointError for a JSON `text` that is longer than readers accept."""
    if len(text) > _TEXT_LIMIT:
        raise CheckpointError(f"{path} is longer than {_TEXT_LIMIT} bytes, which no checkpoint's JSON may be")


def make_step(folder: Path, step: int) -> Path:
    """Make a new folder for `step` and return it; existing ones are left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = 1 + max((f.order[1] for f in list_steps(folder) if f.order[0] == step), default=0)
    path = folder / (f"step_{step:08}" + (f"_{attempt}" if attempt > 1 else ""))
    path.mkdir()
    sync(folder)
    return path


def rank_file(folder: Path, rank: int, number: int | None = None) -> Path:
    """Return the path of a rank's JSON file in a step's folder, or of its safetensors file `number`."""
    return folder / (f"rank_{rank:05}" + (".json" if number is None else f"_{number:03}.safetensors"))


def commit_step(path: Path, record: bytes, number: int) -> None:
    """Write checkpoint.json and, when it and all other names are on disk, COMMIT."""
    write_file(path / RECORD, record)
    write_file(path / COMMIT, _write_commit(number, hashlib.sha256(record).hexdigest()))


def list_steps(folder: Path) -> list[StepFolder]:
    """Return the step folders in `folder`, by step, and ignore everything else there."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _STEP.fullmatch(path.name)) and path.is_dir():
            found.append(_read_step(path, (int(match[1]), int(match[2] or 1))))
    return sorted(found, key=lambda step: step.order)


def next_number(folder: Path) -> int:
    """Return the number of the next commit in `folder`."""
    return max((step.number for step in list_steps(folder)), default=0) + 1


def find_step(folder: Path) -> StepFolder:
    """Return the last committed checkpoint in `folder`, or `folder` itself if it is a step's.

    CheckpointError, which names the newest good one, if there is none or a COMMIT is damaged.
    """
    if _STEP.fullmatch(folder.name) or (folder / COMMIT).exists():
        steps, own = list_steps(folder.parent), _read_step(folder, (0, 0))
        if not own.number:
            reason = own.problem or f"{folder} was not committed (no {COMMIT}): the save did not finish"
            raise CheckpointError(f"{reason}; {_name_newest(steps)}")
        return own
    steps = list_steps(folder)
    damaged = [step.problem for step in steps if step.problem]
    if damaged:
        raise CheckpointError(f"{damaged[0]}; {_name_newest(steps)}, or remove the damaged folder")
    if committed := _sort_committed(steps):
        return committed[-1]
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: give the one that save_checkpoint was given")
    if (folder / ".metadata").exists():
        raise CheckpointError(
            f"{folder} was written by torch.distributed.checkpoint, whose index is a pickle: convert it with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and give the model's part of the file to "
            "parallel.load_full_state_dict, or to bind(weights=...)"
        )
    unfinished = f"{len(steps)} unfinished saves (no {COMMIT})" if steps else "no step folder"
    raise CheckpointError(f"{folder} has no committed checkpoint, but {unfinished}")


def name_earlier(step: StepFolder) -> str:
    """Return words that name the good checkpoint before `step`, a way out if this one is damaged; "" for none."""
    earlier = [s for s in _sort_committed(list_steps(step.path.parent)) if s.number < step.number]
    return f"; the good one before it is {earlier[-1].path}" if earlier else ""


def remove_old(current: Path, keep: int) -> None:
    """Remove all but the `keep` last committed checkpoints beside `current`, and unfinished ones of earlier steps."""
    steps = list_steps(current.parent)
    (own,) = (step for step in steps if step.path.name == current.name)
    old = _sort_committed(steps)[:-keep]
    old += [s for s in steps if not s.number and not s.problem and s.order < own.order]
    for step in old:
        # Without its COMMIT it is no checkpoint, even if the removal breaks off.
        (step.path / COMMIT).unlink(missing_ok=True)
        sync(step.path)
        shutil.rmtree(step.path)


def _read_step(path: Path, order: tuple[int, int]) -> StepFolder:
    file = path / COMMIT
    if not file.exists():
        return StepFolder(path, order)
    try:
        text = read_text(file)
    except CheckpointError as error:
        return StepFolder(path, order, problem=str(error))
    match = re.fullmatch(rb"([1-9]\d{0,17}) ([0-9a-f]{64}) [0-9a-f]{64}\n", text)
    if match is None or text != _write_commit(int(match[1]), match[2].decode()):
        return StepFolder(path, order, problem=f"{file} is damaged: its hash is not that of its contents")
    return StepFolder(path, order, int(match[1]), match[2].decode())


def _write_commit(number: int, digest: str) -> bytes:
    line = f"{number} {digest}"
    return f"{line} {hashlib.sha256(line.encode()).hexdigest()}\n".encode()


def _sort_committed(steps: list[StepFolder]) -> list[StepFolder]:
    return sorted((s for s in steps if s.number), key=lambda s: s.number)


def _name_newest(steps: list[StepFolder]) -> str:
    committed = _sort_committed(steps)
    return f"the newest good one is {committed[-1].path}" if committed else "there is no good one beside it"
