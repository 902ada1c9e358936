"""Masks of packed documents, however written: attention inside of each document, the same loss and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoptd
from autoptd.passes.attention.recognition import find_attentions
from autoptd.passes.ir.program import Program
from autoptd.runtime import kernels
from samples.attention_coverage import fold_model
from samples.gpt import GPTConfig
from samples.huggingface import make_llama
from tests.interpret import run_graph
from tests.marks import slow

S, B, HEADS = 8, 2, 2
Mask = Callable[[Tensor], Tensor]
IDS = torch.tensor([[1, 2, 9, 9, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8]])  # documents of 2, 1, 5 tokens, and of all


def causal() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def count(ids: Tensor) -> Tensor:
    return (ids == 9).cumsum(-1)


def same(documents: Tensor) -> Tensor:
    return documents[:, None, :, None] == documents[:, None, None, :]


def rows_of(documents: Tensor) -> Tensor:
    """Return [b, s, s], or [s, s] of documents that all samples share."""
    return documents.unsqueeze(-1) == documents.unsqueeze(-2)


def indexed(documents: Tensor) -> Tensor:
    """As a function of indices writes it (transformers, FlexAttention)."""
    batch, queries, keys = torch.arange(B).view(B, 1, 1, 1), torch.arange(S).view(S, 1), torch.arange(S)
    return documents[batch, queries] == documents[batch, keys]


def in_order(ids: Tensor, append: bool = False) -> Tensor:
    """Documents that begin where positions do not count on, which then say what comes first."""
    positions = torch.where(ids == 9, 0, ids)
    edge: dict[str, Any] = {"append" if append else "prepend": positions[:, :1]}
    documents = (positions.diff(**edge) != 1).cumsum(-1)
    return same(documents) & (positions[:, None, None, :] <= positions[:, None, :, None])


class Written(nn.Module):
    """One attention with a `mask` of the ids: fused, or a softmax of what `fill` makes of the scores."""

    def __init__(self, mask: Mask, fill: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv = nn.Embedding(10, 8), nn.Linear(8, 24)
        self.mask, self.fill = mask, fill
        self.double()

    def forward(self, idx: Tensor) -> Tensor:
        qkv = self.qkv(self.embedding(idx)).view(B, S, 3, HEADS, 4).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        y = self.attend(q, k, v, self.mask(idx))
        return (y * torch.arange(y.numel()).view(y.shape).cos()).square().mean()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if self.fill is None:
            return functional.scaled_dot_product_attention(q, k, v, mask, scale=0.4)
        return self.fill(q @ k.transpose(-2, -1) * 0.4, mask).softmax(-1) @ v


def find(model: nn.Module, ids: Tensor = IDS) -> tuple[list[Any], str]:
    """What the attention has become, and its mask in words; its loss and gradients are the plain model's."""
    program = fold_model(model, {"idx": ids})
    found, (finding,) = find_attentions(program)
    weights = dict(model.named_parameters())
    loss, plain = run_graph(found, weights, {"idx": ids}), model(ids)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
    for own, wanted in zip(*(torch.autograd.grad(x, [*weights.values()]) for x in (loss, plain)), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-15)
    return calls(found), finding.mask


def calls(program: Program) -> list[Any]:
    return [n.target for n in program.stages[0].graph.nodes if n.op == "call_function"]


PACKED: dict[str, Mask] = {
    "an input": lambda ids: same(ids // 4) & causal(),
    "counted": lambda ids: same(count(ids)).tril(),
    "three dimensions": lambda ids: (rows_of(count(ids)) & causal()).unsqueeze(1),
    "by index": lambda ids: indexed(count(ids)) & causal(),
    "for all heads": lambda ids: (causal() & same(count(ids))).expand(B, HEADS, S, S),
    "one row for all": lambda ids: rows_of(count(ids[0])) & causal(),
    "what is not hidden": lambda ids: ~(~causal() | ~same(count(ids))),
    "what is 0": lambda ids: (~(same(count(ids)) & causal())) == 0,
    "other numbers": lambda ids: (
        ~((lambda documents: documents[:, None, :, None] != documents[:, None, None, :])(count(ids)) | ~causal())
    ),
    "positions": in_order,
}
EVERY = torch.eye(S, dtype=torch.bool)  # so that each query sees a key
OTHER: dict[str, Mask] = {
    "not causal": lambda ids: same(count(ids)),
    "of two tensors": lambda ids: (count(ids)[:, None, :, None] == (ids // 4)[:, None, None, :]).tril() | EVERY,
    "of other places": lambda ids: (
        (lambda documents: documents[:, None, :, None] == documents.flip(-1)[:, None, None, :])(count(ids)).tril()
        | EVERY
    ),
    "of each head": lambda ids: rows_of(count(ids)) & causal(),
    "and keys of one row": lambda ids: same(count(ids)).tril() & (ids < 20)[0],
    "one key more": lambda ids: same(count(ids)) & causal().index_fill(1, torch.tensor([S - 1]), True),
    "to the left": lambda ids: (same(count(ids)) & causal()).transpose(-1, -2),
    "to the left, as one": lambda ids: same(count(ids)).tril().mT,
    "positions that go on": lambda ids: in_order(ids, append=True),
    "other positions": lambda ids: same(count(ids)) & (ids[:, None, None, :] <= ids[:, None, :, None]),
}


@pytest.mark.parametrize("form", PACKED)
def test_masks_of_documents_are_recognised(form: str) -> None:
    targets, words = find(Written(PACKED[form]))
    assert words == "causal inside of documents"
    assert kernels.packed_attention in targets
    assert not [t for t in targets if str(t).startswith(("aten.eq.Tensor", "aten.bitwise_and", "aten.tril"))]


@pytest.mark.parametrize("form", OTHER)
def test_other_masks_of_the_batch_stay_dense(form: str) -> None:
    targets, words = find(Written(OTHER[form]))
    assert words == "computed in the step"
    assert kernels.packed_attention not in targets


@pytest.mark.parametrize("hides", [True, False])
def test_attention_written_out_is_packed(hides: bool) -> None:
    def fill(scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(~mask, -math.inf) if hides else torch.where(mask, scores, -math.inf)

    targets, words = find(Written(PACKED["an input"], fill))
    assert words == "causal inside of documents"
    assert kernels.packed_attention in targets
    targets, words = find(Written(PACKED["an input"], lambda s, mask: s.masked_fill(~mask, -9.0)))
    assert kernels.packed_attention not in targets


def test_keys_that_all_heads_share_beside_values_of_each_stay_dense() -> None:
    """Torch spreads one over the other where it adds a mask; attention inside of documents has as many of both."""

    class OneKey(Written):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            if self.fill is None:
                return functional.scaled_dot_product_attention(q, k[:, :1], v, mask)
            return self.fill(q @ k[:, :1].transpose(-2, -1), mask).softmax(-1) @ v

    for fill in (None, lambda scores, mask: scores.masked_fill(~mask, -math.inf)):
        assert kernels.packed_attention not in find(OneKey(PACKED["an input"], fill))[0]


def test_two_masks_are_one() -> None:
    def fill(scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(~causal(), -math.inf).masked_fill(~mask, -math.inf)

    assert find(Written(lambda ids: same(count(ids)), fill))[1] == "causal inside of documents"


@pytest.mark.parametrize("mesh", [(2, 1, 1), slow((1, 2, 2))])
def test_packed_documents_on_a_mesh(mesh: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    model = make_llama(GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=4, n_embd=32)).double()
    ids = torch.randint(3, 64, (4, 16))
    lengths = ((16,), (1, 6, 9), (15, 1), (4, 4, 4, 4))
    positions = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in lengths])
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    example = {name: rows[:2] for name, rows in batch.items()}
    program = autoptd.compile(model, mesh, example_inputs=example, num_microbatches=2 // mesh[2], schedule="1f1b")
    assert "kernels.packed_attention(" in program.rank(0).code
    assert "2 sdpa with mask (causal inside of documents)" in "".join(program.log)
    report = program.verify(batch=batch)
    assert report.passed, report
    assert report.loss_error <= 1e-12
