"""Saving a checkpoint: each rank writes its pieces in a thread, then rank 0 commits them as one checkpoint."""

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoptd.runtime.checkpoint import files, record
from autoptd.runtime.checkpoint.error import CheckpointError, agreed
from autoptd.runtime.checkpoint.optimizer_state import NamedOptimizer
from autoptd.runtime.checkpoint.record import RankRecord, Record, StoredPiece, read_rank_record, write_record
from autoptd.runtime.checkpoint.regions import FlatRange, assign_pieces, list_whole
from autoptd.runtime.checkpoint.schedulers import Stateful
from autoptd.runtime.checkpoint.tensor_file import check_dtype, write_tensors
from autoptd.runtime.comm.agreement import share_text
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.optimizer.loss_scale import LossScale
from autoptd.runtime.optimizer.zero1 import FlatShard, is_shaped
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.tagged_json import encode_value

# A loader reads whole files, so it may read one too much at each end of its part. A GPU's tensors are copied by files.
FILE_BYTES = 1 << 26
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.25  # between looks for another rank's file
# At the end of the program, rank 0 waits for the files of other ranks for as long as these still grow.
_LAST_WAIT_SECONDS = 30.0
TensorsOfFile = list[tuple[StoredPiece, Tensor]]


@dataclass(frozen=True)
class Training:
    """The training state of one rank: `slices` by the user's names, and the objects that train them.

    `shards` are the replicas' parts of slices, which a sharded optimizer steps in place of the slices.
    """

    manifest: Manifest
    rank: Rank
    slices: Mapping[str, Tensor]
    shards: Sequence[FlatShard]
    optimizer: NamedOptimizer | None
    schedulers: Mapping[str, Stateful]
    loss_scale: LossScale | None

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the parameters of each group of the optimizer, in its order; none without an optimizer."""
        return () if self.optimizer is None else tuple(group.params for group in self.optimizer.groups())

    @property
    def whole(self) -> Mapping[str, bool]:
        """The parameters that the optimizer steps whole, and whether on this rank."""
        return {} if self.optimizer is None else self.optimizer.whole

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type in which each slice is stored, which is the one it is stepped in."""
        stepped = {name: shard.own.dtype for shard in self.shards for name in shard.names}
        return {name: stepped.get(name, x.dtype) for name, x in self.slices.items()}

    @property
    def flats(self) -> dict[str, FlatRange]:
        """The range that this replica has of each slice that shards divide."""
        flats = {}
        for shard in self.shards:
            held = shard.ranges()
            for name, shape in zip(shard.names, shard.shapes, strict=True):
                part = held[name][1] if name in held else slice(0, 0)
                flats[name] = FlatRange(tuple(shape), part.start, part.stop)
        return flats


def _make_record(training: Training, data: Any, keep: int | None) -> Record:
    """Return the part that is the same on all ranks; CheckpointError or TypeError for values that cannot be stored."""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep is {keep!r}, expected a number of checkpoints above 0, or None for all")
    scale = training.loss_scale
    return Record(
        number=0,
        seed=training.rank.randomness.seed,
        call=training.rank.randomness.call,
        mesh=training.manifest.mesh,
        ranks=(),
        tensors={},
        aliases=training.manifest.aliases,
        optimizer=None,
        schedulers=(),
        loss_scale=None if scale is None else record.StoredScale(scale.value, scale.finite_steps),
        data=encode_value(data, "data"),
    )


def _collect(training: Training, copied: bool) -> tuple[RankRecord, list[TensorsOfFile]]:
    """Return the data that this rank writes: the record, without its files, and the tensors of each file.

    The tensors are `copied` to the CPU where the save is asynchronous.
    """
    rank, flats, optimizer = training.rank, training.flats, training.optimizer
    states = {} if optimizer is None else optimizer.states()
    stored = None if optimizer is None else optimizer.describe(states)
    schedulers = {
        name: {"kind": type(item).__name__, "state": encode_value(item.state_dict(), f"scheduler {name}")}
        for name, item in training.schedulers.items()
    }
    weights = dict(training.slices)
    for shard in training.shards:
        weights |= shard.split_own(shard.own)  # the slices may be rounded copies of them
    # Files of their own for each state and for pieces that several ranks hold: a rank reads no others with them.
    groups: dict[tuple[str, bool, bool], TensorsOfFile] = {}
    shaped = {name: {key: x for key, x in of.items() if is_shaped(x)} for name, of in states.items()}
    whole = {name: shaped.pop(name) for name in shaped.keys() & training.whole}
    held = [
        (piece, state, x)
        for piece in assign_pieces(training.manifest, rank, flats)
        for state, x in {"": weights[piece.name], **shaped.get(piece.name, {})}.items()
    ]
    for name, of in sorted(whole.items()):
        held += [(piece, state, x) for state, x in of.items() for piece in list_whole(name, x.shape)]
    for piece, state, source in held:
        check_dtype(source.dtype, f"{state or 'the tensor'} of {piece.name}")
        flat, known = flats.get(piece.name), training.manifest.parameters[piece.name].shape
        view = piece.view(source.detach(), flat)
        kept = view.to("cpu", copy=True) if copied else view
        shape = tuple(source.shape) if state in whole.get(piece.name, ()) and source.shape != known else None
        group = groups.setdefault((state, piece.shared, flat is None), [])
        group.append((StoredPiece(piece.name, state, view.dtype, piece.region, shape), kept))
    # On the other ranks of this stage they are the same, but for what this one steps whole.
    speaks = rank.coordinates.tensor == rank.coordinates.data == 0
    filled = [file for group in groups.values() for file in _fill_files(group)]
    scheduled = record.StoredSchedulers(training.groups, schedulers) if schedulers and speaks else None
    return RankRecord(rank.number, (), stored if speaks or whole else None, scheduled), filled


class Saving:
    """A running save: a thread writes this rank's files and, on rank 0, commits when all ranks have written theirs."""

    def __init__(self, training: Training, folder: Path, data: Any, keep: int | None, copied: bool) -> None:
        """Begin a checkpoint in `folder`. Every rank must call it; CheckpointError on all ranks if one fails."""
        self._manifest, self._rank, self._keep = training.manifest, training.rank, keep
        with agreed(self._rank):
            self._whole = _make_record(training, data, keep)
            self._own, self._files = _collect(training, copied)
        self._written, self._committed = Future[None](), Future[None]()
        self._given_up = threading.Event()
        name = ""
        with agreed(self._rank):
            if self._rank.number == 0:
                name = files.make_step(folder, self._whole.call).name
        self.path = folder / share_text(self._rank, name)
        # Not a daemon, so that the interpreter waits for it at the program's end.
        self._thread = threading.Thread(target=self._work, name=f"checkpoint {self.path.name}")
        atexit.register(self._raise_at_exit)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the commit. Every rank must call it; CheckpointError on all if one failed."""
        atexit.unregister(self._raise_at_exit)
        try:
            with agreed(self._rank):
                self._written.result()
        except BaseException:  # also if a peer is lost, whose file will not come
            self._given_up.set()
            raise
        finally:
            self._thread.join()
        with agreed(self._rank):
            self._committed.result()

    def _work(self) -> None:
        for run, done in ((self._write, self._written), (self._commit, self._committed)):
            try:
                run()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            self._files = []  # frees the copies of an asynchronous save

    def _raise_at_exit(self) -> None:
        error = self._written.exception() or self._committed.exception()
        if error is not None:
            raise CheckpointError(f"{self.path} was not saved: {error}") from error

    def _write(self) -> None:
        written = []
        for number, tensors in enumerate(self._files):
            path = files.rank_file(self.path, self._own.rank, number)
            digest = write_tensors(path, {piece.key: tensor for piece, tensor in tensors})
            written.append(record.StoredFile(digest, tuple(piece for piece, _ in tensors)))
        path = files.rank_file(self.path, self._own.rank)
        files.write_file(path, write_record(replace(self._own, files=tuple(written)), path))

    def _commit(self) -> None:
        if self._rank.number or self._written.exception():
            return
        paths = [files.rank_file(self.path, rank) for rank in range(self._manifest.mesh.size)]
        for path in paths:
            self._await(path)
        if self._given_up.is_set():
            return
        ranks = [read_rank_record(self.path, rank) for rank in range(len(paths))]
        hashes = tuple(sha256(path.read_bytes()).hexdigest() for path in paths)
        number = files.next_number(self.path.parent)
        whole = record.join_records(self._manifest, replace(self._whole, ranks=hashes, number=number), ranks)
        files.commit_step(self.path, write_record(whole, self.path), number)
        if self._keep is not None:
            files.remove_old(self.path, self._keep)

    def _await(self, path: Path) -> None:
        """Wait for a file of another rank, since a thread cannot call collectives."""
        seen: object = None
        since, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while not path.exists():
            if self._given_up.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if threading.main_thread().is_alive():
                since = time.monotonic()
            elif seen != (now := _list_sizes(self.path)):
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _LAST_WAIT_SECONDS:
                raise CheckpointError(f"{path} is missing: its rank has ended without writing it")


def _fill_files(tensors: TensorsOfFile) -> list[TensorsOfFile]:
    files: list[TensorsOfFile] = []
    room = 0
    for piece, tensor in tensors:
        if not files or tensor.nbytes > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append((piece, tensor))
        room -= tensor.nbytes
    return files


def _list_sizes(folder: Path) -> list[tuple[str, int]]:
    sizes = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # it has just been renamed
            sizes.append((path.name, path.stat().st_size))
    return sorted(sizes)
