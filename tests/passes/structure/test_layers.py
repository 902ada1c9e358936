"""Layers are found as the period of the graph: whole, cut by stages, round what all of them read; or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn

from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import Program
from autoptd.passes.normal_form.constants import fold_constants
from autoptd.passes.normal_form.normalize import normalize
from autoptd.passes.structure.layers import Layer, find_stacks, label_layers
from autoptd.passes.tensor_parallel.sharding import shard_tensors
from autoptd.runtime.program.mesh import Mesh
from tests.captures import shared_capture
from tests.cuts import cut_stages
from tests.plain_models import HUGGING_FACE, LAYERS, LENGTH, PLAIN

HIDDEN = 16


class Stack(nn.Module):
    """Linear and ReLU in turn, of these widths."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.table = nn.Embedding(32, widths[0])
        pairs = pairwise(widths)
        self.parts = nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())))
        self.head = nn.Linear(widths[-1], 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.parts(self.table(ids))).flatten(0, 1), labels.flatten())


def cut(model: nn.Module, names: Sequence[str], tensor: int = 1, stages: int = 1) -> Program:
    inputs = {name: torch.zeros(2, LENGTH, dtype=torch.long) for name in names}
    program = shared_capture(model, mesh=Mesh(tensor, stages, 1), example_inputs=inputs)
    labelled = shard_tensors(label_layers(fold_constants(normalize(program))))
    return cut_stages(labelled, num_stages=stages)


def find_layers(program: Program) -> list[Layer]:
    """The layers of all stacks."""
    return [layer for stack in find_stacks(program) for layer in stack]


def find_paths(program: Program) -> list[list[str]]:
    """The module paths that each layer's calls are under, in order and without those inside."""
    layers = []
    for layer in find_layers(program):
        nodes = [node for part in layer for node in part]
        paths = [".".join(str(info(node).path).split(".")[:4]) for node in nodes]
        layers.append(list(dict.fromkeys(paths)))
    return layers


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=32,
            hidden_size=HIDDEN,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
        )
    )


def t5(layers: int) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 32, "d_model": HIDDEN, "d_kv": 4, "num_heads": 4, "d_ff": 32}
    config = transformers.T5Config(**sizes, num_layers=layers, num_decoder_layers=layers, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def cut_model(name: str, tensor: int = 1, stages: int = 1) -> Program:
    names = ("idx", "targets") if name in PLAIN else ("input_ids", "labels")
    return cut({**PLAIN, **HUGGING_FACE}[name](), names, tensor, stages)


@pytest.mark.parametrize(("tensor", "stages"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 3)])
@pytest.mark.parametrize("name", [*PLAIN, *HUGGING_FACE])
def test_every_call_of_a_layer_and_no_other(name: str, tensor: int, stages: int) -> None:
    program = cut_model(name, tensor, stages)
    layers = find_layers(program)
    assert len(layers) == LAYERS
    for number, layer in enumerate(layers):
        assert len(layer) == stages
        calls = [node for part in layer for node in part]
        # A gradient's all-reduce, f, stands under the module that makes the value it is put behind.
        own = [node for node in calls if not node.name.endswith("_f")]
        outside = [n for n in own if f".{number}." not in f".{info(n).path}."]
        assert not outside, f"layer {number} has {outside}"
    inside = {node for layer in layers for part in layer for node in part}
    left = [n for stage in program.stages for n in stage.graph.nodes if n.op == "call_function" and n not in inside]
    assert not [n for n in left if any(f".{i}.mlp" in f".{info(n).path}" for i in range(LAYERS))]


def test_layers_of_stages_are_those_of_the_whole() -> None:
    whole, divided = cut_model("gpt2"), cut_model("gpt2", stages=3)

    def names(program: Program) -> list[list[str]]:
        return [[node.name for part in layer for node in part] for layer in find_layers(program)]

    assert names(divided) == names(whole)
    assert any(sum(map(bool, layer)) > 1 for layer in find_layers(divided))  # a layer in two stages


@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_behind_their_norm(tensor: int) -> None:
    layers = find_layers(cut(bert(), ["input_ids", "labels"], tensor))
    assert [layer[0][-1].name for layer in layers] == [f"layer{i}_output_LayerNorm" for i in range(3)]
    assert len({len(layer[0]) for layer in layers}) == 1


def test_two_stacks_and_what_their_layers_share() -> None:
    """The first layer makes the table of positions that all read; the decoder's read the encoder's output."""
    program = cut(t5(3), ["input_ids", "decoder_input_ids", "labels"])
    assert [len(stack) for stack in find_stacks(program)] == [3, 3]
    layers = [layer[0] for layer in find_layers(program)]
    assert [len(layer) for layer in layers] == [45, 42, 42, 70, 67, 67]
    paths = find_paths(program)
    for number, found in enumerate(paths):
        stack = "encoder" if number < 3 else "decoder"
        assert all(path.startswith(f"{stack}.block.{number % 3}") for path in found), found


@pytest.mark.parametrize("width", [8, 12])
def test_a_stack_of_like_linears(width: int) -> None:
    layers = find_layers(cut(Stack([width] * 5), ["ids", "labels"]))
    assert [[node.name for node in layer[0]] for layer in layers] == [
        [f"parts{2 * i}", f"parts{2 * i + 1}"] for i in range(4)
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: cut(Stack([8, 12, 20, 16, 24]), ["ids", "labels"]),
        lambda: cut(t5(1), ["input_ids", "decoder_input_ids", "labels"]),
    ],
    ids=["unlike widths", "one layer each"],
)
def test_no_layers(make: Callable[[], Program]) -> None:
    assert find_layers(make()) == []


def test_other_numbers_are_the_same_layer() -> None:
    """Layers may differ by a factor (GPT-2 can scale its scores by the layer's number)."""
    config = transformers.GPT2Config(n_layer=3, n_embd=HIDDEN, n_head=4, vocab_size=32, n_positions=LENGTH)
    config._attn_implementation = "eager"
    config.scale_attn_by_inverse_layer_idx = True
    program = cut(transformers.GPT2LMHeadModel(config), ["input_ids", "labels"])
    assert len(find_layers(program)) == 3
    assert isinstance(program.stages[0].graph, fx.Graph)
