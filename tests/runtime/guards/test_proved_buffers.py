"""Buffers that a program was proved of, and those that it only reads: what may be loaded into them later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.program_text import read_program
from tests.plain_models import LENGTH, PLAIN

S, HEADS, SIZE = 8, 2, 4
BATCH = {"idx": torch.arange(2 * S).reshape(2, S) % 10}
BIAS = "transformer.h.1.attn.bias"
REFUSED = r"the buffer {} is given other values than it had when the program was compiled.* compile again"


class Small(nn.Module):
    """One attention with a rotary table, slopes and a mask in buffers, put together by `body`."""

    table: Tensor
    slopes: Tensor
    mask: Tensor
    order: Tensor

    def __init__(self, body: Callable[[Any, Tensor, Tensor, Tensor], Tensor], persistent: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, HEADS * SIZE)
        self.projections = nn.ModuleList(nn.Linear(HEADS * SIZE, HEADS * SIZE) for _ in range(4))
        self.body = body
        self.register_buffer("table", torch.rand(S, SIZE), persistent)
        self.register_buffer("slopes", torch.rand(HEADS, 1, 1), persistent)
        self.register_buffer("mask", torch.ones(S, S).tril(), persistent)
        self.register_buffer("order", torch.arange(S), persistent)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedding(idx)
        *qkv, out = self.projections
        q, k, v = (p(x).view(*idx.shape, HEADS, SIZE).transpose(1, 2) for p in qkv)
        y: Tensor = out(self.body(self, q, k, v).transpose(1, 2).flatten(2))
        return y.square().mean()


def rotate(m: Small, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Reads the table through a constant: its cosine."""
    cos = m.table.cos()
    return functional.scaled_dot_product_attention(q * cos, k * cos, v, is_causal=True)


def scale(m: Small, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Reads the slopes as they are, divided by heads, and through a constant."""
    y = functional.scaled_dot_product_attention(q * m.slopes, k, v, is_causal=True)
    return y * m.slopes.exp()


def hide(m: Small, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hides keys in scores that are written out."""
    scores = (q @ k.transpose(-2, -1)).masked_fill(m.mask == 0, float("-inf"))
    return scores.softmax(-1) @ v


def add(m: Small, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Adds to scores that are written out."""
    return (q @ k.transpose(-2, -1) + m.slopes).softmax(-1) @ v


def pick(m: Small, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Takes what is a slice, with these numbers."""
    return q[:, :, m.order] * k * v


def hand_over(m: Small, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Leaves the mask to torch's attention, which takes any."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=m.slopes * m.mask)


def compile_nano() -> CompiledProgram:
    example = torch.zeros(1, LENGTH, dtype=torch.long)
    torch.manual_seed(0)
    model = PLAIN["nanogpt-slow"]()
    return autoptd.compile(model, (1, 1, 1), example_inputs={"idx": example, "targets": example})


def compile_small(model: nn.Module, mesh: tuple[int, int, int] = (1, 1, 1)) -> CompiledProgram:
    return autoptd.compile(model, mesh, example_inputs={"idx": BATCH["idx"]}, num_microbatches=1)


def load_saved(program: CompiledProgram, state: dict[str, Tensor], folder: Path) -> object:
    program.save(folder)
    return autoptd.load(folder).bind(weights=state)


def write(program: CompiledProgram, state: dict[str, Tensor], folder: Path) -> object:
    parallel = program.bind()
    tokens = torch.zeros(program.manifest.num_microbatches, LENGTH, dtype=torch.long)
    parallel.get_buffer(BIAS).copy_(state[BIAS])
    return parallel(tokens, tokens)


WAYS: dict[str, Callable[[CompiledProgram, dict[str, Tensor], Path], object]] = {
    "bind": lambda program, state, _: program.bind(weights=state),
    "verify": lambda program, state, _: program.verify(weights=state),
    "load_full_state_dict": lambda program, state, _: program.bind().load_full_state_dict(state),
    "load_state_dict": lambda program, state, _: program.bind().load_state_dict(state, strict=False),
    "load": load_saved,
    "written in place": write,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_that_was_proved_takes_its_own_values_only(way: str, tmp_path: Path) -> None:
    program = compile_nano()
    assert program.model is not None
    state = {name: tensor.clone() for name, tensor in program.model.state_dict().items()}
    WAYS[way](program, state, tmp_path / "same")
    state[BIAS][..., 0] = 0
    with pytest.raises(ValueError, match=REFUSED.format(BIAS)):
        WAYS[way](program, state, tmp_path / "other")


def test_a_refused_state_changes_nothing() -> None:
    parallel = compile_nano().bind()
    before = parallel.full_state_dict()
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for load in (parallel.load_full_state_dict, parallel.load_state_dict):
        with pytest.raises(ValueError, match="compile again"):
            load(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in parallel.full_state_dict().items())


def test_a_mask_that_changed_in_the_model_is_refused() -> None:
    program = compile_nano()
    assert program.model is not None
    program.model.get_buffer(BIAS).fill_(1)
    with pytest.raises(ValueError, match=REFUSED.format(BIAS)):
        program.bind()


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("body", "name"), [(hide, "mask"), (add, "slopes"), (pick, "order")])
def test_buffers_that_a_pass_decided_by_keep_their_values(body: Any, name: str, persistent: bool) -> None:
    model = Small(body, persistent)
    program = compile_small(model)
    assert [*program.manifest.proved] == [name]
    other = Small(body, persistent)
    program.bind(weights=other)
    program.bind(weights=other.double())  # the same values
    with torch.no_grad():
        other.get_buffer(name).mul_(2)
    with pytest.raises(ValueError, match=REFUSED.format(name)):
        program.bind(weights=other)


def run_all(program: CompiledProgram, state: dict[str, Tensor], load: str) -> list[float]:
    """The loss on every rank after `state` was loaded into the bound program."""

    def body(connection: Connection) -> float:
        at = connection.rank.coordinates.pipeline
        text = read_program(program.texts[at], "text")
        assert program.model is not None
        weights = {**program.model.state_dict(), **program.buffers}
        parallel = Parallel(connection, ShapeFunctions(program.manifest, text, weights))
        if load == "load_full_state_dict":
            parallel.load_full_state_dict(state)
        else:
            own = {n: p.placement["tensor"] for n, p in program.manifest.parameters.items()}
            tensor = connection.rank.group("tensor")
            kept = parallel.state_dict()
            parallel.load_state_dict({n: own[n].take(state[n], tensor.size, tensor.index) for n in kept})
        with torch.no_grad():
            return float(parallel(**BATCH))

    return run_threads(program.manifest, body)


@pytest.mark.parametrize("load", ["load_full_state_dict", "load_state_dict"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("body", [rotate, scale, hand_over])
def test_buffers_that_are_only_read_may_be_loaded(body: Any, mesh: tuple[int, int, int], load: str) -> None:
    """Constants that the program computed from it follow."""
    program = compile_small(Small(body), mesh)
    assert program.manifest.proved == {}
    other = Small(body)
    with torch.no_grad():
        other.table.mul_(2)
        other.slopes.mul_(3)
        other.mask.add_(1)
        expected = float(other(**BATCH))
    for loss in run_all(program, dict(other.state_dict()), load):
        assert loss == pytest.approx(expected, rel=1e-6)
