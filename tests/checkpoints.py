"""What the tests of checkpoints share: tiny trained models on meshes of threads, and their logical tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.program_text import read_program
from tests.generated_models import ModelConfig, make_batch, make_model
from tests.parity import Batch, split_batch

MeshShape = tuple[int, int, int]
SEQUENCES = 4  # of a step, over all replicas
Optimizers = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

CONFIGS = {
    # An odd vocabulary is padded where it is divided; a packed projection is three runs of rows.
    "packed": ModelConfig(projection="packed", vocabulary=53),
    "tied": ModelConfig(tied=True, projection="per_head", vocabulary=51),
    "grouped": ModelConfig(
        kv_heads=2, projection="unequal", rms_norm=True, rotary=True, gated=True, packed_gate=True, bias=False
    ),
}
OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


@dataclass
class Seen:
    """What one rank saw: losses, and on rank 0 the logical tensors of the model and, by state, its optimizer."""

    losses: list[float]
    model: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    options: list[Any]
    given: Any = None


@cache
def compile_config(kind: str, mesh: MeshShape) -> CompiledProgram:
    config = CONFIGS[kind]
    microbatches = SEQUENCES // mesh[2]
    return autoptd.compile(
        make_model(config), mesh, example_inputs=make_batch(config, 1), num_microbatches=microbatches, schedule="1f1b"
    )


def bind_thread(program: CompiledProgram, connection: Connection) -> Parallel:
    """The rank of a thread."""
    at = connection.rank.coordinates.pipeline
    text = read_program(program.texts[at], "text")
    assert program.model is not None
    weights = {**program.model.state_dict(), **program.buffers}
    return Parallel(connection, ShapeFunctions(program.manifest, text, weights))


def train_steps(
    parallel: Parallel, optimizer: torch.optim.Optimizer | None, batches: Sequence[Batch], at: int
) -> list[float]:
    """Losses of a step on each batch, of which this is replica `at`'s part."""
    losses = []
    replicas = parallel._manifest.mesh.data
    for batch in batches:
        loss = parallel(**split_batch(batch, replicas)[at])
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def look(parallel: Parallel, optimizer: torch.optim.Optimizer | None, losses: list[float]) -> Seen:
    """Everything logical that the ranks hold together."""
    model = parallel.full_state_dict()
    names = {id(p): n for n, p in parallel.named_parameters()}
    own = {names[id(p)]: state for p, state in optimizer.state.items()} if optimizer else {}
    # Joined as the weights are, in their place.
    states: dict[str, dict[str, Tensor]] = {}
    kept = {n: p.detach().clone() for n, p in parallel.named_parameters()}
    for state in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"):
        with torch.no_grad():
            for name, parameter in parallel.named_parameters():
                value = own.get(name, {}).get(state)
                parameter.copy_(torch.full_like(parameter, -1.0) if value is None else value)
        states[state] = {n: x.clone() for n, x in parallel.full_state_dict().items()}
    with torch.no_grad():
        for name, parameter in parallel.named_parameters():
            parameter.copy_(kept[name])
    steps = {name: {s: v for s, v in of.items() if not (isinstance(v, Tensor) and v.dim())} for name, of in own.items()}
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] if optimizer else []
    return Seen(losses, model, states, [options, steps])


def run_mesh(kind: str, mesh: MeshShape, optimizer: str, body: Callable[[Parallel, Any, int], Seen]) -> list[Seen]:
    """``body(parallel, optimizer, replica)`` on every rank of `mesh`, a thread each."""
    program = compile_config(kind, mesh)

    def work(connection: Connection) -> Seen:
        parallel = bind_thread(program, connection)
        trained = list(parallel.parameters())
        own = OPTIMIZERS[optimizer](trained) if trained else None
        return body(parallel, own, connection.rank.coordinates.data)

    return run_threads(program.manifest, work)


def move(kind: str, saved: MeshShape, loaded: MeshShape, optimizer: str, folder: Path) -> None:
    """Save on one mesh, load on another: the same bits, and a step as near as the meshes' own."""
    config = CONFIGS[kind]
    batches = [make_batch(config, SEQUENCES, seed) for seed in range(4)]

    def save(parallel: Parallel, own: Any, at: int) -> Seen:
        train_steps(parallel, own, batches[:2], at)
        parallel.save_checkpoint(folder, own, data={"batch": 2})
        before = look(parallel, own, [])
        before.losses = train_steps(parallel, own, batches[2:], at)
        return before

    def load(parallel: Parallel, own: Any, at: int) -> Seen:
        given = parallel.load_checkpoint(folder, own)
        after = look(parallel, own, [])
        after.given = given
        assert parallel._connection.rank.randomness.call == 2
        after.losses = train_steps(parallel, own, batches[2:], at)
        return after

    before = run_mesh(kind, saved, optimizer, save)
    after = run_mesh(kind, loaded, optimizer, load)
    assert_same(before[0].model, after[0].model)
    for state, tensors in before[0].states.items():
        assert_same(tensors, after[0].states[state])
    steps = {name: of for seen in before for name, of in seen.options[1].items()}
    for seen in after:
        assert seen.given == {"batch": 2}
        for name, of in seen.options[1].items():
            assert {k: v if v is None else float(v) for k, v in of.items()} == {
                k: v if v is None else float(v) for k, v in steps[name].items()
            }
        if seen.options[0]:
            assert seen.options[0] == next(s.options[0] for s in before if s.options[0])
    # The second step's loss is of weights that the loaded states have moved.
    for a, b in zip(before[0].losses, after[0].losses, strict=True):
        assert abs(a - b) <= 1e-12 * abs(a)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names and the same bits."""
    assert set(found) == set(expected)
    differing = [n for n, x in expected.items() if not torch.equal(x, found[n]) or x.dtype is not found[n].dtype]
    assert not differing
