"""Dropout under tensor parallelism: the same mask on every mesh, in replicated and in divided regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autoptd
from autoptd.runtime import kernels
from samples.gpt import GPT, GPTConfig
from tests.marks import slow
from tests.passes.tensor_parallel.test_sharding import (
    GPT2,
    LLAMA,
    SIZES,
    SequenceFirst,
    join_gradients,
    largest_error,
    prepare,
    run_sharded,
    tokens,
)

OPT: dict[str, Any] = {**SIZES, "ffn_dim": 48, "max_position_embeddings": 16, "word_embed_proj_dim": 32, "dropout": 0.3}


def with_dropout(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    if name == "gpt":
        model: nn.Module = GPT(GPTConfig(vocab_size=67, block_size=16, n_layer=2, n_head=4, n_embd=32, dropout=0.3))
        ids = tokens()
        return model.double(), {"idx": ids["input_ids"], "targets": ids["labels"]}
    if name == "gpt2":  # its attention is written out
        options: dict[str, Any] = {"attn_pdrop": 0.3, "attn_implementation": "eager", "use_cache": False}
        eager = transformers.GPT2Config(**GPT2 | options)
        return transformers.GPT2LMHeadModel(eager).double(), tokens()
    if name == "opt":  # folds [b, s, h] to [b * s, h] in its MLP
        return transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, use_cache=False)).double(), tokens()
    heads: dict[str, Any] = {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    }  # groups are divided
    config = transformers.LlamaConfig(**LLAMA | heads, attention_dropout=0.3, use_cache=False)
    return transformers.LlamaForCausalLM(config).double(), tokens()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["gpt", "gpt2", "opt", "llama"])
def test_masks_are_those_of_one_device(name: str, batch: int) -> None:
    model, inputs = with_dropout(name)
    inputs = {key: value[:batch] for key, value in inputs.items()}
    weights = dict(model.named_parameters())
    programs = [prepare(model, tensor, inputs) for tensor in (1, 2)]
    assert any(n.target in (kernels.dropout, kernels.scaled_softmax) for n in programs[0].stages[0].graph.nodes)
    losses, shards = zip(*(run_sharded(p, weights, inputs) for p in programs), strict=True)
    assert float((losses[0][0] - losses[1][0]).abs()) < 2e-6
    found, wanted = (join_gradients(p, s) for p, s in zip(programs, shards, strict=True))
    assert largest_error(found, wanted) < 2e-6
    model.eval()
    plain = model(**inputs)
    without = plain[1] if isinstance(plain, tuple) else plain.loss
    assert abs(float(without - losses[0][0])) > 1e-4, "dropout did nothing"


def test_each_row_has_the_mask_of_its_sample_whatever_the_microbatch_size() -> None:
    model, inputs = with_dropout("gpt")
    whole = prepare(model, 1, inputs)
    single = prepare(model, 1, {key: value[:1] for key, value in inputs.items()})
    keyed = [n.kwargs for p in (whole, single) for n in p.stages[0].graph.nodes if n.target is kernels.dropout]
    assert {k["sample"] for k in keyed} == {0}


PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "new_ones": lambda x: x.new_ones(x.shape[0], 1, 1),
    "ones": lambda x: torch.ones(x.shape[0], 1, 1, dtype=x.dtype),
    "ones of tokens": lambda x: x.new_ones(x.shape[:2])[..., None],
    "ones_like": lambda x: torch.ones_like(x[:, :1, :1]),
}


@pytest.mark.parametrize("size", [1, slow(2)])
@pytest.mark.parametrize("layout", ["sbh", "bsh"])
@pytest.mark.parametrize("name", PATHS)
def test_a_dropped_mask_of_ones_is_each_samples_own_whatever_the_microbatch_size(
    name: str, layout: str, size: int
) -> None:
    """Stochastic depth: of one sequence, nothing but the ones says that the batch is in their shape."""

    class Paths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            x = self.table(idx)
            for _ in range(3):
                mask = nn.functional.dropout(PATHS[name](x), 0.5, self.training)
                x = x + self.layer(x) * mask
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model, ids = Paths().double(), torch.randint(16, (4, 6))
    losses = [
        autoptd.compile(
            model,
            (1, 1, 1),
            example_inputs={"idx": ids[:b], "targets": ids[:b]},
            num_microbatches=4 // b,
            layout=layout,
        ).bind("cpu")(idx=ids, targets=ids)
        for b in (4, size)
    ]
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(2), rtol=1e-14, atol=0.0)


class DroppingSequenceFirst(SequenceFirst):
    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        return super().forward(idx, targets) + self.drop(idx)

    def drop(self, idx: Tensor) -> Tensor:
        return nn.functional.dropout(self.embed(idx), 0.3, self.training).square().mean()


@pytest.mark.parametrize("batch", [1, 2])
def test_the_samples_of_a_sequence_first_model_are_its_second_dimension(batch: int) -> None:
    """One sequence, too, of which nothing but attention tells which dimension is the batch."""
    ids = {name: torch.zeros((8, batch), dtype=torch.long) for name in ("idx", "targets")}
    program = prepare(DroppingSequenceFirst(), 2, ids)
    (dropout,) = (n for n in program.stages[0].graph.nodes if n.target is kernels.dropout)
    assert dropout.meta["val"].shape == (8, batch, 16)
    assert dropout.kwargs["sample"] == 1


def test_a_dropped_loss_needs_microbatches_of_one_sequence() -> None:
    """A scalar has no batch; of one sequence it is that sample's."""

    class Dropped(DroppingSequenceFirst):
        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.dropout(self.embed(idx).square().mean(), 0.3, self.training)

    ids = {name: torch.zeros((2, 8), dtype=torch.long) for name in ("idx", "targets")}
    with pytest.raises(ValueError, match=r"in which the batch is no dimension of its own.* microbatch_size=1"):
        autoptd.compile(Dropped(), (1, 1, 1), example_inputs=ids)
    program = autoptd.compile(Dropped(), (1, 1, 1), example_inputs={n: x[:1] for n, x in ids.items()})
    (dropout,) = (n for n in program.stages[0].graph.nodes if n.target is kernels.dropout)
    assert dropout.kwargs == {"sample": 0, "shape": [1]}
