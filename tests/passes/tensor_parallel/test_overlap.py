"""All-reduces beside gradients of weights: which are, that they mean the same, and which are left alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autoptd
from autoptd.check.program import check_program
from autoptd.check.tensor_parallel import prove_tensor_parallel
from autoptd.passes.fusion.rules import fuse_operators
from autoptd.passes.ir.nodes import change_info
from autoptd.passes.ir.program import Program, copy_graph
from autoptd.passes.operators.proof import PlacementError
from autoptd.passes.tensor_parallel.overlap import overlap_reductions
from autoptd.runtime import aten, collectives
from autoptd.runtime.program.schedule import make_schedule
from samples.gpt import GPT, GPTConfig
from tests.autoptd.check.test_program import PLAIN, one_stage
from tests.passes.tensor_parallel.test_sharding import (
    MODELS,
    build,
    join_gradients,
    largest_error,
    prepare,
    run_sharded,
    tokens,
)

F = collectives.copy_to_tensor
NAMES = {each: each.__name__ for each in (F, *collectives.COPIED)}


def targets(program: Program) -> list[str]:
    """f, and what it was joined to, in the order of the graph."""
    nodes = [node for stage in program.stages for node in stage.graph.nodes]
    return [NAMES[node.target] for node in nodes if node.target in NAMES]


def overlap(program: Program) -> Program:
    return overlap_reductions(fuse_operators(program))


# Meaning


@pytest.mark.parametrize(
    ("name", "tensor"), [*((n, 2) for n in MODELS), *((n, 4) for n in ("phi3", "falcon", "llama"))]
)
def test_overlapping_reductions_changes_no_gradient(name: str, tensor: int) -> None:
    """Losses and gradients of real models; and the proof accepts it, and misses the sum where it is left out."""
    model = build(name).float().double()
    program = fuse_operators(prepare(model, tensor, tokens()))
    made = overlap_reductions(program)
    assert targets(program).count("copy_to_tensor") == len(targets(made))
    weights = dict(model.named_parameters())
    (losses, shards), (expected, wanted) = (run_sharded(each, weights, tokens()) for each in (made, program))
    for one, other in zip(losses, expected, strict=True):
        assert torch.equal(one, other)
    error = largest_error(join_gradients(made, shards), join_gradients(program, wanted))
    assert error <= (1e-5 if name in FLOAT32 else 1e-12)
    manifest = one_stage(made)
    check_program(manifest, made.stages, make_schedule("1f1b", 1, 1))
    for node in made.stages[0].graph.nodes:
        if node.target in PLAIN:
            graph = copy_graph(made.stages[0].graph)
            _leave_out(graph, node.name)
            with pytest.raises(PlacementError, match="has one term of the gradient only"):
                prove_tensor_parallel(manifest, [replace(made.stages[0], graph=graph)])


# Gradients of several readers are added up in another order, and a part of the model computes in float32.
FLOAT32 = ("falcon", "gptj", "opt")


def _leave_out(graph: fx.Graph, name: str) -> None:
    (node,) = (n for n in graph.nodes if n.name == name)
    if node.kwargs.get("transposed"):
        _, x, weight, *bias = node.args
        target = aten.addmm.default if bias else aten.mm.default
        node.target, node.args, node.kwargs = target, (*bias, x, weight), {}
    else:
        node.target, node.args = PLAIN[node.target], node.args[1:]


class Attention(nn.Module):
    """Queries, keys and values of one input, each with a layer of its own, and a gated MLP behind."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(3)])
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=bias) for _ in range(3))
        self.out, self.down = nn.Linear(32, 32), nn.Linear(48, 32, bias=False)
        self.gate, self.up = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.norms[0](x)
        q, k, v = (each(y).unflatten(-1, (4, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return functional.cross_entropy(self.head(self.norms[2](x)).flatten(0, 1), labels.flatten())


def compile_attention(bias: bool = False, freeze: Callable[[Any], Any] | None = None) -> Program:
    torch.manual_seed(0)
    model = Attention(bias).double()
    for parameter in freeze(model) if freeze is not None else ():
        parameter.requires_grad_(False)
    example = {name: torch.zeros(2, 16, dtype=torch.long) for name in ("ids", "labels")}
    return overlap(prepare(model, 2, example))


@pytest.mark.parametrize("bias", [False, True])
def test_linears_of_one_input_are_joined(bias: bool) -> None:
    program = compile_attention(bias)
    assert targets(program) == ["copied_linears", "copied_linears", "copied_linear"]
    assert program.log[-1] == "overlap_reductions 3 of 3 sums backward beside weight gradients"
    joined = next(n for n in program.stages[0].graph.nodes if n.target is collectives.copied_linears)
    assert len(joined.args[2]) == 3
    assert len(joined.args) == (4 if bias else 3)
    assert [user.name for user in joined.users] == ["q", "k", "v"]


# What is left alone


def test_one_tensor_rank_has_nothing_to_sum() -> None:
    model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=4, n_embd=32))
    program = prepare(model, 1, {name: torch.zeros(2, 16, dtype=torch.long) for name in ("idx", "targets")})
    assert overlap_reductions(program) is program


def test_frozen_weights_hide_nothing() -> None:
    frozen = compile_attention(
        freeze=lambda model: (*model.q.parameters(), *model.k.parameters(), *model.v.parameters())
    )
    assert targets(frozen) == ["copy_to_tensor", "copied_linears", "copied_linear"]
    assert frozen.log[-1].endswith("2 of 3 sums backward beside weight gradients, not: 1 with weights that are frozen")
    adapted = compile_attention(freeze=lambda model: (*model.q.parameters(), *model.k.parameters()))
    assert targets(adapted) == ["copied_linears", "copied_linears", "copied_linear"]


def change(program: Program, rewrite: Callable[[fx.Graph, fx.Node], None]) -> Program:
    """The program with its first f changed."""
    (stage,) = program.stages
    graph = copy_graph(stage.graph)
    rewrite(graph, next(node for node in graph.nodes if node.target is F))
    return replace(program, stages=(replace(stage, graph=graph),))


def add_reader(graph: fx.Graph, f: fx.Node) -> None:
    with graph.inserting_after(f):
        reader = graph.call_function(aten.mul.Tensor, (f, 2.0))
    reader.meta = dict(f.meta)
    first = next(user for user in f.users if user is not reader)
    first.update_arg(0, reader)
    with graph.inserting_before(first):
        other = graph.call_function(aten.linear.default, (f, *first.args[1:]))
    other.meta = dict(first.meta)


def compute_weight(graph: fx.Graph, f: fx.Node) -> None:
    """A weight that depends on what is multiplied with it."""
    reader = next(iter(f.users))
    with graph.inserting_before(reader):
        scale = graph.call_function(aten.sum.default, (f.args[1],))
        weight = graph.call_function(aten.mul.Tensor, (reader.args[1], scale))
    scale.meta = f.meta | {"val": f.meta["val"].new_empty(())}
    weight.meta = f.meta | {"val": reader.args[1].meta["val"]}  # type: ignore[union-attr]
    reader.update_arg(1, weight)


def recompute_one(graph: fx.Graph, f: fx.Node) -> None:
    change_info(next(iter(f.users)), recompute="group")


@pytest.mark.parametrize(
    ("rewrite", "reason"),
    [
        (add_reader, "1 read by aten.mul (test_overlap.py:"),
        (compute_weight, "1 read by aten.linear (test_overlap.py:"),
        (recompute_one, "1 read inside and outside of what is recomputed"),
    ],
)
def test_other_readers_are_left_alone(rewrite: Callable[[fx.Graph, fx.Node], None], reason: str) -> None:
    torch.manual_seed(0)
    example = {name: torch.zeros(2, 16, dtype=torch.long) for name in ("ids", "labels")}
    program = change(prepare(Attention(False), 2, example), rewrite)
    made = overlap_reductions(program)
    assert targets(made) == ["copy_to_tensor", "copied_linears", "copied_linear"]
    assert f"2 of 3 sums backward beside weight gradients, not: {reason}" in made.log[-1]


# The text


def test_golden(golden: Callable[[str, str], None]) -> None:
    torch.manual_seed(0)
    example = {name: torch.zeros(2, 16, dtype=torch.long) for name in ("ids", "labels")}
    program = autoptd.compile(Attention(False), (2, 1, 1), example_inputs=example, num_microbatches=2, recompute="none")
    golden("overlap.py", re.sub(r"test_overlap.py:\d+", "test_overlap.py:N", program.texts[0]))


def test_a_saved_text_is_the_same_program(tmp_path: Any) -> None:
    example = {name: torch.zeros(2, 16, dtype=torch.long) for name in ("ids", "labels")}
    program = autoptd.compile(Attention(True), (2, 1, 1), example_inputs=example, num_microbatches=2)
    program.save(tmp_path)
    loaded = autoptd.load(tmp_path)
    first, second = (
        [str(n.target) for s in each.stages for n in s.graph.nodes if n.op == "call_function"]
        for each in (program, loaded)
    )
    assert first == second
    assert loaded.simulate("dgx-a100").step_seconds == program.simulate("dgx-a100").step_seconds
