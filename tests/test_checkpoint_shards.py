"""Checkpoints of sharded optimizers: each rank writes and reads what it steps, and any layout loads any other's."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import autoptd
from autoptd.runtime.checkpoint import loading, regions, saving
from autoptd.runtime.checkpoint.tensor_file import open_tensors
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.comm.groups import ThreadGroup
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.optimizer import gradient_buckets
from tests.checkpoints import CONFIGS, OPTIMIZERS, SEQUENCES, assert_same, bind_thread, compile_config, train_steps
from tests.counting import elements
from tests.generated_models import make_batch
from tests.marks import cover_pairs
from tests.runtime.chain import Chain
from tests.test_checkpoint_precision import start, step

MeshShape = tuple[int, int, int]
# Small pieces and files, so that what is read too much with them is little of these small models.
PIECE = 64  # elements
FILE_BYTES = 8 * PIECE


@dataclass
class Bytes:
    """What one rank has of weights and states that it steps, and what it wrote and read of them."""

    own: int
    written: int = 0
    read: int = 0


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes of tensors in the files read, by the thread that read them, which is a rank."""
    counts: Counter[int] = Counter()

    def count(path: Path, digest: str) -> Any:
        counts[threading.get_ident()] += data_bytes(path)
        return open_tensors(path, digest)

    monkeypatch.setattr(loading, "open_tensors", count)
    return counts


def data_bytes(path: Path) -> int:
    """Bytes of the tensors in a safetensors file."""
    data = path.read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


@pytest.fixture(autouse=True)
def several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few parameters each, whose bounds fall elsewhere on each mesh."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 20_000)
    monkeypatch.setattr(regions, "PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr(saving, "FILE_BYTES", FILE_BYTES)


def read_logical(folder: Path) -> tuple[dict[str, Tensor], Any]:
    """The whole tensors of the one step in `folder`, put together from its files alone, and the optimizer's values."""
    (path,) = folder.glob("step_*")
    record = json.loads((path / "checkpoint.json").read_text())
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for file in sorted(path.glob("rank_*.json")):
        for number, entry in enumerate(json.loads(file.read_text())["files"]):
            stored = load_file(file.with_name(f"{file.stem}_{number:03}.safetensors"))
            for piece in entry["pieces"]:
                key, shape = f"{piece['name']}:{piece['state']}", record["tensors"][piece["name"]]["shape"]
                into = whole.setdefault(key, torch.zeros(shape, dtype=getattr(torch, piece["dtype"])))
                times = seen.setdefault(key, torch.zeros(shape, dtype=torch.int))
                offsets, sizes = piece["region"]["offsets"], piece["region"]["sizes"]
                region = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
                state = ":" * bool(piece["state"]) + piece["state"]
                into[region] = stored[f"{piece['name']}{state}@{','.join(map(str, offsets))}"]
                times[region] += 1
    assert all(bool((times == 1).all()) for times in seen.values())
    return whole, record["optimizer"]["values"]


def own_bytes(parallel: Parallel, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what this rank steps, and of its states."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    states = [x for of in optimizer.state.values() for x in of.values() if isinstance(x, Tensor)]
    buffers = list(parallel.buffers())
    return sum(x.nbytes for x in (*stepped, *states, *buffers))


def measure(connection: Connection, parallel: Parallel, optimizer: Any, folder: Path, reads: Counter[int]) -> Bytes:
    """Save, load, and count."""
    parallel.save_checkpoint(folder, optimizer)
    before = reads[threading.get_ident()]
    parallel.load_checkpoint(folder, optimizer)
    files = folder.glob(f"step_*/rank_{connection.rank.number:05}_*.safetensors")
    written = sum(map(data_bytes, files))
    return Bytes(own_bytes(parallel, optimizer), written, reads[threading.get_ident()] - before)


@pytest.mark.parametrize("mesh", [(1, 1, 4), (2, 1, 2), (1, 2, 2)], ids=str)
def test_a_rank_writes_and_reads_what_it_steps(mesh: MeshShape, tmp_path: Path, read_bytes: Counter[int]) -> None:
    kind = "tied"
    program = compile_config(kind, mesh)

    def work(connection: Connection) -> Bytes:
        parallel = bind_thread(program, connection)
        optimizer = parallel.shard_optimizer(OPTIMIZERS["adam"](list(parallel.parameters())))
        train_steps(parallel, optimizer, [make_batch(CONFIGS[kind], SEQUENCES)], connection.rank.coordinates.data)
        return measure(connection, parallel, optimizer, tmp_path, read_bytes)

    ranks = run_threads(program.manifest, work)
    whole, _ = read_logical(tmp_path)
    assert sum(rank.written for rank in ranks) >= sum(x.nbytes for x in whole.values())
    for rank in ranks:
        assert rank.written <= rank.own
        # Replicas of the other pipeline rank have divided a tied parameter at other places.
        assert rank.read <= rank.own + (8 * 8 * PIECE if mesh[1] > 1 else 0)
    if mesh == (1, 1, 4):
        assert max(rank.read for rank in ranks) <= 1.1 * sum(x.nbytes for x in whole.values()) / 4


def test_float32_weights_of_half_precision_are_not_gathered(tmp_path: Path, read_bytes: Counter[int]) -> None:
    chain = Chain((1, 1, 4), "gpipe", 2, 2, dtype=torch.bfloat16)

    def work(connection: Connection) -> tuple[Bytes, int]:
        parallel, optimizer = start(chain, connection, True)
        step(chain, connection, parallel, optimizer, 0)
        list(parallel.parameters())  # the step's own gathers end
        group = connection.rank.group("data")
        assert isinstance(group, ThreadGroup)
        before = elements(group)["all_gather"]
        parallel.save_checkpoint(tmp_path, optimizer)
        gathered = elements(group)["all_gather"] - before
        parallel.load_checkpoint(tmp_path, optimizer)
        read = read_bytes[threading.get_ident()]
        return Bytes(own_bytes(parallel, optimizer), read=read), gathered

    for rank, gathered in run_threads(chain.manifest, work):
        assert rank.read <= rank.own
        assert gathered < 10


def save(
    kind: str, mesh: MeshShape, optimizer: str, shard: bool, origin: Path | None, folder: Path
) -> list[list[float]]:
    """Save after two steps, or what was loaded from `origin`; losses of two further steps, by rank."""
    program = compile_config(kind, mesh)
    batches = [make_batch(CONFIGS[kind], SEQUENCES, seed) for seed in range(4)]

    def work(connection: Connection) -> list[float]:
        parallel = bind_thread(program, connection)
        own, at = OPTIMIZERS[optimizer](list(parallel.parameters())), connection.rank.coordinates.data
        if shard:
            parallel.shard_optimizer(own)
        if origin is None:
            train_steps(parallel, own, batches[:2], at)
        else:
            parallel.load_checkpoint(origin, own)
        parallel.save_checkpoint(folder, own, asynchronous=True)
        losses = train_steps(parallel, own, batches[2:], at)  # beside the thread that writes
        parallel.finish_checkpoint()
        return losses

    return run_threads(program.manifest, work)


WAYS = [(True, True), (True, False), (False, True)]
MOVES: list[tuple[str, MeshShape, MeshShape, str]] = [
    ("packed", (1, 1, 4), (2, 1, 4), "adamw"),
    ("packed", (2, 1, 2), (1, 2, 2), "adam"),
    ("tied", (1, 2, 2), (1, 1, 4), "nadam"),
    ("tied", (4, 1, 1), (2, 2, 2), "sgd"),
    ("grouped", (2, 2, 2), (1, 1, 1), "rmsprop"),
    ("grouped", (1, 1, 2), (1, 1, 2), "adamw"),
]


@pytest.mark.parametrize(
    ("kind", "saved", "loaded", "optimizer", "first", "second"),
    [
        pytest.param(*move, *way, marks=[pytest.mark.slow] * ((i + j) % len(WAYS) > 0))
        for i, move in enumerate(MOVES)
        for j, way in enumerate(WAYS)
    ],
)
def test_a_sharded_checkpoint_moves(
    kind: str, saved: MeshShape, loaded: MeshShape, optimizer: str, first: bool, second: bool, tmp_path: Path
) -> None:
    """The files of all layouts are the same logical tensors, those of an optimizer that is not sharded among them."""
    whole, there, here = tmp_path / "whole", tmp_path / "there", tmp_path / "here"
    save(kind, saved, optimizer, False, None, whole)
    before = save(kind, saved, optimizer, first, None, there)
    after = save(kind, loaded, optimizer, second, there, here)
    expected, values = read_logical(whole)
    for folder in (there, here):
        found, its_values = read_logical(folder)
        assert_same(found, expected)
        assert its_values == values
    for a, b in zip(before[0], after[0], strict=True):
        assert a == b if saved == loaded else abs(a - b) <= 1e-12 * abs(a)


def test_a_rank_reads_little_more_of_a_checkpoint_of_another_layout(tmp_path: Path, read_bytes: Counter[int]) -> None:
    save("packed", (1, 1, 1), "adamw", False, None, tmp_path)
    program = compile_config("packed", (1, 1, 4))

    def work(connection: Connection) -> Bytes:
        parallel = bind_thread(program, connection)
        optimizer = parallel.shard_optimizer(OPTIMIZERS["adamw"](list(parallel.parameters())))
        parallel.load_checkpoint(tmp_path, optimizer)
        return Bytes(own_bytes(parallel, optimizer), read=read_bytes[threading.get_ident()])

    for rank in run_threads(program.manifest, work):
        assert rank.read <= 1.25 * rank.own


class Odd(nn.Module):
    """Parameters of no, one and three dimensions, none of them a multiple of the replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.cube = nn.Parameter(torch.linspace(-1, 1, 3 * 5 * 7).reshape(3, 5, 7))
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bi,ijk->bjk", x, self.cube) * self.scale
        loss: Tensor = self.out(hidden).square().mean()
        return loss


class Nothing(nn.Module):
    """A parameter without elements beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.scale = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x * self.scale).square().mean() + self.nothing.sum()
        return loss


class Numbers(nn.Module):
    """Parameters without dimensions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x * self.scale + self.offset).square().mean()
        return loss


STATES: list[tuple[type[nn.Module], str, int]] = [
    *((Odd, "adam", replicas) for replicas in (1, 2, 3)),
    *((make, optimizer, 2) for make in (Nothing, Numbers) for optimizer in ("adam", "sgd")),
]


@pytest.mark.parametrize(("state", "first", "second"), cover_pairs(STATES, [True, False], [True, False]))
def test_states_of_a_number_or_of_nothing_are_kept(
    state: tuple[type[nn.Module], str, int], first: bool, second: bool, tmp_path: Path
) -> None:
    """A state of one element looks like a count of steps where the optimizer is not sharded."""
    make, optimizer, replicas = state
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 3)}
    programs = [
        autoptd.compile(make(), (1, 1, d), example_inputs={"x": torch.randn(1, 3)}, num_microbatches=1)
        for d in (2, replicas)
    ]

    def work(connection: Connection, shard: bool, load: bool) -> dict[str, Tensor]:
        parallel = bind_thread(programs[load], connection)
        own = OPTIMIZERS[optimizer](list(parallel.parameters()))
        if shard:
            parallel.shard_optimizer(own)
        if load:
            parallel.load_checkpoint(tmp_path, own)
        else:
            train_whole(parallel, own, batch, 2)
            parallel.save_checkpoint(tmp_path, own)
        train_whole(parallel, own, batch, 2)
        return {name: p.detach().clone() for name, p in parallel.named_parameters()}

    expected = run_threads(programs[0].manifest, lambda connection: work(connection, first, False))
    found = run_threads(programs[1].manifest, lambda connection: work(connection, second, True))
    for name, weight in expected[0].items():
        torch.testing.assert_close(found[0][name], weight, rtol=1e-5, atol=1e-7)


def train_whole(parallel: Parallel, optimizer: Any, batch: dict[str, Tensor], steps: int) -> None:
    """Steps of which every replica has the same batch."""
    for _ in range(steps):
        parallel(x=batch["x"][:1]).backward()
        optimizer.step()
        optimizer.zero_grad()
