"""Save a compiled program as a folder: texts, manifest.json, schedule.txt, and the values of buffers."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from autoptd.passes.cost.schedule_times import ActionTimes, walk, walking_order
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.manifest_json import FORMAT, from_json, to_json
from autoptd.runtime.program.schedule import Kind, Schedule
from autoptd.text.reader import program_filename

MANIFEST, SCHEDULE, BUFFERS = "manifest.json", "schedule.txt", "buffers.safetensors"
_PROGRAM, _SHAPE = re.compile(r"program_\d+\.py"), re.compile(r"shape_\d+")


def save_folder(
    folder: Path, texts: Sequence[str], manifest: Manifest, schedule: Schedule, buffers: Mapping[str, Tensor]
) -> None:
    """Write a program, with its further input shapes, into `folder`, replacing one saved there before.

    Raises ValueError if `folder` is a file, or has anything but a saved program in it.
    """
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if _PROGRAM.fullmatch(old.name):
            old.unlink()
        elif _SHAPE.fullmatch(old.name) and _is_ours(old):
            shutil.rmtree(old)
    for rank, text in enumerate(texts):
        _write(folder / program_filename(rank, len(texts)), text)
    _write(folder / MANIFEST, to_json(manifest))
    rows = [f"rank {rank}: {' '.join(map(str, actions))}\n" for rank, actions in enumerate(schedule)]
    _write(folder / SCHEDULE, "\n".join([*rows, schedule_grid(schedule)]))
    # Copies: two names may share one tensor's memory, which the file format refuses.
    plain = torch.contiguous_format
    copies = {name: buffer.detach().cpu().clone(memory_format=plain) for name, buffer in buffers.items()}
    save_file(copies, folder / BUFFERS)


def load_folder(folder: Path) -> tuple[tuple[str, ...], Manifest, dict[str, Tensor]]:
    """Return the texts, manifest and buffers of a saved program. ValueError or OSError names the file that is wrong."""
    manifest = from_json(_read(folder / MANIFEST), str(folder / MANIFEST))
    count = manifest.mesh.pipeline
    texts = tuple(_read(folder / program_filename(rank, count)) for rank in range(count))
    try:
        return texts, manifest, load_file(folder / BUFFERS)
    except SafetensorError as error:
        raise ValueError(f"{folder / BUFFERS}: {error}; save the program again") from error


def schedule_grid(schedule: Schedule) -> str:
    """Draw the field's grid of a schedule, with a column per pipeline rank and a row per step.

    A forward and a backward take one step each, values travel in no time; sends and receives are left out.
    """
    order = walking_order(schedule)
    count = max((action.stage + 1 for _, action in order), default=0)
    walked = walk(order, len(schedule), ActionTimes({kind: [int(kind.computes)] * count for kind in Kind}))
    starts = {(start, rank): str(action) for rank, action, start, _ in walked if action.kind.computes}
    rows = [["step", *(f"rank {rank}" for rank in range(len(schedule)))]]
    for step in range(max((step for step, _ in starts), default=-1) + 1):
        rows.append([str(step), *(starts.get((step, rank), "") for rank in range(len(schedule)))])
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ("  ".join([row[0].rjust(first), *map(str.ljust, row[1:], others)]) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def program_hash(texts: Sequence[str], manifest: Manifest) -> str:
    """Return the SHA-256 of texts and manifest, on which all ranks must agree before they run."""
    # No Python source and no JSON holds the character between them.
    return hashlib.sha256("\0".join((*texts, to_json(manifest))).encode()).hexdigest()


def check_free(folder: Path) -> None:
    """Raise ValueError, or OSError, if no program can be saved into `folder`."""
    near = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not near.is_dir():
        raise ValueError(f"{near} is a file; give a folder to save the program into")
    if not os.access(near, os.W_OK):
        raise ValueError(f"{near} is not writable; give another folder to save the program into")
    if near == folder and any(folder.iterdir()) and not _is_ours(folder):
        raise ValueError(f"{folder} holds files, but no saved program; give an empty or a new folder")


def _is_ours(folder: Path) -> bool:
    try:
        found: object = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("format")
    except (OSError, ValueError, AttributeError):  # no manifest.json, or another tool's
        return False
    return found == FORMAT


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", newline="\n")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error}); convert it, or save the program again") from error
