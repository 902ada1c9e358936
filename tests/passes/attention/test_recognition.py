"""Attention found by its dataflow: the same numbers, and torch's fused attention only where that is proved."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autoptd.passes.attention.recognition import Finding, find_attentions, recognize_attention
from autoptd.passes.fusion.rules import fuse_operators
from autoptd.passes.ir.program import Program
from autoptd.runtime import aten, kernels
from autoptd.verification.float64 import Promotion
from samples.attention_coverage import CLASSES, EXPERTS, fold_model, make_inputs, make_model, measure_error, randomize
from tests.interpret import run_graph, run_stage
from tests.marks import slow_but
from tests.plain_models import LENGTH, PLAIN, VOCABULARY

SDPA = aten.scaled_dot_product_attention.default
S, HEADS, SIZE = 8, 2, 4
LEAST = torch.finfo(torch.float64).min


def run(program: Program, model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a program, in float64: what its operators cast to fewer bits is promoted."""
    weights = {n: p.detach().double().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    with Promotion():
        loss = run_graph(program, weights, widen(inputs))
        loss.backward()
    return loss.detach(), {n: w.grad for n, w in weights.items() if w.grad is not None}


def widen(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}


def assert_same(program: Program, model: nn.Module, inputs: Mapping[str, Tensor], limit: float = 1e-12) -> Program:
    """Rewrite, compare loss, logits and every gradient, and return what was rewritten."""
    rewritten = recognize_attention(program)
    assert_same_meaning(program, rewritten, model, inputs, limit)
    return rewritten


def assert_same_meaning(
    program: Program, rewritten: Program, model: nn.Module, inputs: Mapping[str, Tensor], limit: float = 1e-12
) -> None:
    (loss, gradients), (found, own) = run(program, model, inputs), run(rewritten, model, inputs)
    assert abs(found - loss) <= limit * abs(loss)
    assert own.keys() == gradients.keys()
    scale = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        error = float((own[name] - gradient).abs().max())
        assert error <= limit * max(float(gradient.abs().max()), 1e-3 * scale), name
    rewritten.stages[0].graph.lint()
    rewritten.stages[0].constants.lint()


def targets(program: Program) -> list[Any]:
    return [n.target for n in program.stages[0].graph.nodes if n.op == "call_function"]


# Models of transformers

CAUSAL, WINDOW = ("sdpa", "causal"), ("sdpa", "constant")
RULES: dict[str, list[tuple[str, str]]] = {
    **{name: [CAUSAL, CAUSAL] for name in CLASSES},
    "GPTNeoForCausalLM": [CAUSAL, WINDOW],
    "BloomForCausalLM": [("sdpa", "additive bias, causal")] * 2,
    "MistralForCausalLM": [WINDOW, WINDOW],
    "Gemma2ForCausalLM": [("softmax", "constant"), ("softmax", "causal")],
    "BertForMaskedLM": [("sdpa", "no mask")] * 2,
    "ViTForImageClassification": [("sdpa", "no mask")] * 2,
    "T5ForConditionalGeneration": [*[("softmax", "no mask")] * 2, *[("softmax", "causal"), ("sdpa", "no mask")] * 2],
}


# Learned positions, ALiBi, two rules in one model, latent attention, and an encoder with a decoder.
QUICK = (
    "GPT2LMHeadModel",
    "BloomForCausalLM",
    "Gemma2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "T5ForConditionalGeneration",
)


def check_class(name: str, implementation: str) -> None:
    model = make_model(name, implementation)
    if model is None:
        pytest.skip("transformers has no such implementation of it")
    randomize(model)
    inputs = make_inputs(name)
    program = fold_model(model, inputs)
    findings = find_attentions(program)[1]
    learned = implementation == "sdpa" and name.startswith("T5")
    wanted = [("sdpa", "computed in the step")] * 2 + [("sdpa", "computed in the step"), ("sdpa", "no mask")] * 2
    assert [(f.rule, f.mask) for f in findings] == (wanted if learned else RULES[name])
    rewritten = recognize_attention(program)
    assert_same(program, model, inputs)
    assert measure_error(rewritten, model, inputs) <= 1e-12
    assert aten.softmax.int not in targets(rewritten) or name == "MixtralForCausalLM"


@pytest.mark.parametrize("name", slow_but(QUICK, CLASSES))
def test_every_class_of_transformers_written_out(name: str) -> None:
    check_class(name, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_transformers_with_fused_attention(name: str) -> None:
    check_class(name, "sdpa")


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_multiplied_by_group_leave_the_attention_as_it_is(name: str) -> None:
    model = make_model(name, "eager")
    assert model is not None
    randomize(model).set_experts_implementation("grouped_mm")  # type: ignore[operator]
    inputs = make_inputs(name)
    program = fold_model(model, inputs)
    assert [(f.rule, f.mask) for f in find_attentions(program)[1]] == RULES[name]
    weights = dict(model.named_parameters())
    losses = [run_graph(p, weights, inputs) for p in (program, recognize_attention(program))]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def test_the_measure_sees_what_float32_would_hide() -> None:
    model = make_model("GPT2LMHeadModel", "eager")
    assert model is not None
    inputs = make_inputs("GPT2LMHeadModel")
    program = recognize_attention(fold_model(randomize(model), inputs))
    for node in program.stages[0].graph.nodes:
        if node.target is SDPA:
            node.kwargs = {**node.kwargs, "scale": 8**-0.5 * (1 + 1e-9)}
    assert 1e-12 < measure_error(program, model, inputs) < 1e-7


def packed_positions() -> Tensor:
    return torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).expand(2, LENGTH).contiguous()


def padding() -> Tensor:
    """The first sample's first rows see no key at all."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, 11:] = 0
    return mask


BATCHES: list[tuple[str, dict[str, Callable[[], Tensor]]]] = [
    *[(name, {"attention_mask": padding}) for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "BloomForCausalLM")],
    *[(name, {"attention_mask": padding}) for name in ("GPTNeoForCausalLM", "BertForMaskedLM")],
    *[(name, {"position_ids": packed_positions}) for name in ("LlamaForCausalLM", "MistralForCausalLM")],
]


FUSED_BATCHES: list[tuple[str, dict[str, Callable[[], Tensor]]]] = [
    *[
        (name, {"attention_mask": padding})
        for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "Gemma2ForCausalLM")
    ],
    *[(name, {"position_ids": packed_positions}) for name in ("LlamaForCausalLM", "Qwen2ForCausalLM")],
]


@pytest.mark.parametrize(("name", "more"), FUSED_BATCHES, ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_masks_of_the_batch_keep_their_meaning_in_torchs_attention(
    name: str, more: Mapping[str, Callable[[], Tensor]]
) -> None:
    model = make_model(name, "sdpa") or make_model(name, "eager")  # where it caps its scores
    assert model is not None
    randomize(model)
    inputs = make_inputs(name) | {key: make() for key, make in more.items()}
    program = fold_model(model, inputs)
    rewritten = recognize_attention(program)
    everything = {key: x if key in ("input_ids", "labels") else x * 0 + 1 for key, x in inputs.items()}
    weights = dict(model.named_parameters())
    loss, own = run_graph(rewritten, weights, inputs), model(**inputs).loss
    torch.testing.assert_close(loss, own)
    assert abs(loss - run_graph(rewritten, weights, everything)) > 1e-4 * loss, "the mask did nothing"


@pytest.mark.parametrize(("name", "more"), BATCHES, ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_masks_of_the_batch_keep_their_meaning(name: str, more: Mapping[str, Callable[[], Tensor]]) -> None:
    model = make_model(name, "eager")
    assert model is not None
    randomize(model)
    inputs = make_inputs(name) | {key: make() for key, make in more.items()}
    program = fold_model(model, inputs)
    rewritten = assert_same(program, model, inputs)
    assert {(f.rule, f.mask) for f in find_attentions(program)[1]} == {("softmax", "from the batch")}
    assert all("batch" in f.reason or "computed in the step" in f.reason for f in find_attentions(program)[1])
    assert SDPA not in targets(rewritten)
    everything = {key: x if key in ("input_ids", "labels") else x * 0 + 1 for key, x in inputs.items()}
    loss = run(rewritten, model, inputs)[0]
    assert abs(loss - run(rewritten, model, everything)[0]) > 1e-4 * loss, "the mask did nothing"
    own = model(**inputs)
    torch.testing.assert_close(run_graph(rewritten, dict(model.named_parameters()), inputs), own.loss)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BloomForCausalLM", "GPTNeoForCausalLM"])
def test_dropout_keeps_its_bits(name: str) -> None:
    option = "attn_pdrop" if name.startswith("GPT2") else "attention_dropout"
    model = make_model(name, "eager", **{option: 0.4})
    assert model is not None
    inputs = make_inputs(name)
    program = fold_model(randomize(model), inputs)
    before = [n for n in program.stages[0].graph.nodes if n.target is kernels.dropout]
    rewritten = assert_same(program, model, inputs)
    after = [n for n in rewritten.stages[0].graph.nodes if n.target is kernels.scaled_softmax]
    assert [(n.kwargs["p"], n.kwargs["operator"]) for n in after] == [n.args[2:4] for n in before]
    assert {f.reason for f in find_attentions(program)[1]} == {"of dropout"}
    assert kernels.dropout not in targets(rewritten)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GPTNeoForCausalLM", "LlamaForCausalLM", "BloomForCausalLM"])
def test_half_precision_is_no_worse_than_written_out(name: str) -> None:
    model = make_model(name, "eager")
    assert model is not None
    randomize(model).bfloat16()
    inputs = make_inputs(name)
    program = fold_model(model, inputs)
    assert {f.rule for f in find_attentions(program)[1]} == {"sdpa"}
    exact = run(program, model, inputs)[0]  # as if no cast were there
    weights = dict(model.named_parameters())
    usual, found = (run_graph(p, weights, inputs) for p in (program, recognize_attention(program)))
    assert abs(found - exact) <= 2 * abs(usual - exact) + 1e-3 * exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_grouped_heads_are_handed_over_as_they_are(implementation: str, dtype: torch.dtype) -> None:
    model = make_model("LlamaForCausalLM", implementation)
    assert model is not None
    inputs = make_inputs("LlamaForCausalLM")
    program = fold_model(randomize(model).to(dtype), inputs)
    rewritten = assert_same(program, model, inputs)
    nodes = [n for n in rewritten.stages[0].graph.nodes if n.target is SDPA]
    assert [n.kwargs.get("enable_gqa", False) for n in nodes] == [True, True]
    assert aten.expand.default not in targets(rewritten)
    fused = fuse_operators(rewritten)
    assert "2 grouped_attention" in fused.log[-1]
    assert_same_meaning(rewritten, fused, model, inputs)


# Attention as anyone may write it


class Written(nn.Module):
    """One attention in float64, `body` of (the module, q, k, v, ids)."""

    def __init__(self, body: Callable[..., Tensor], heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, heads * SIZE)
        self.c_attn = nn.Linear(heads * SIZE, 3 * heads * SIZE)
        self.bias = nn.Parameter(torch.randn(1, heads, S, S))
        self.memory = nn.Parameter(torch.randn(1, heads, S, SIZE))
        self.temperature = nn.Parameter(torch.rand(heads, 1, 1) + 0.5)
        self.register_buffer("seen", torch.ones(1, 1, S, S).tril(), persistent=False)
        self.register_buffer("factor", torch.tensor(0.3), persistent=False)
        self.heads, self.body = heads, body
        with torch.no_grad():
            self.embedding.weight.mul_(3)
        self.double()

    def forward(self, idx: Tensor) -> Tensor:
        qkv = self.c_attn(self.embedding(idx)).view(*idx.shape, 3, self.heads, SIZE)
        q, k, v = (x.squeeze(2).transpose(1, 2) for x in qkv.split(1, 2))
        result: Tensor = self.body(self, q, k, v, idx)
        return (result * torch.arange(result.numel()).view(result.shape).cos()).square().mean()


def recognize(
    body: Callable[..., Tensor], ids: Tensor | None = None, limit: float = 1e-12
) -> tuple[Program, list[Finding]]:
    """The rewritten program of one attention, proved the same, and what was found; `limit` 0: it is not the model."""
    model = Written(body)
    torch.manual_seed(1)
    inputs = {"idx": torch.randint(1, 10, (2, S)) if ids is None else ids}
    program = fold_model(model, inputs)
    rewritten = assert_same(program, model, inputs)
    if limit:
        torch.testing.assert_close(run(rewritten, model, inputs)[0], model(**inputs).detach(), rtol=limit, atol=0)
    return rewritten, list(find_attentions(program)[1])


def tril() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Callable[[Tensor], Tensor], scale: float = 0.3) -> Tensor:
    return mask(q @ k.transpose(-2, -1) * scale).softmax(-1) @ v


def options_of(program: Program) -> tuple[bool, dict[str, Any]]:
    """Whether the only fused attention has a mask, and its options."""
    (node,) = [n for n in program.stages[0].graph.nodes if n.target is SDPA]
    return len(node.args) > 3, dict(node.kwargs)


def causal_fill(m: Written, s: Tensor) -> Tensor:
    return s.masked_fill(~tril(), -math.inf)


FORMS: dict[str, Callable[..., Tensor]] = {
    "masked_fill": lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, s)),
    "buffer": lambda m, q, k, v, i: attend(q, k, v, lambda s: s.masked_fill(m.seen == 0, -math.inf)),
    "where seen": lambda m, q, k, v, i: attend(q, k, v, lambda s: torch.where(tril(), s, LEAST)),
    "where hidden": lambda m, q, k, v, i: attend(q, k, v, lambda s: torch.where(~tril(), LEAST, s)),
    "where tensor": lambda m, q, k, v, i: attend(
        q, k, v, lambda s: torch.where(tril(), s, torch.full([], LEAST, dtype=s.dtype))
    ),
    "add": lambda m, q, k, v, i: attend(
        q, k, v, lambda s: torch.zeros(S, S).double().masked_fill(~tril(), -math.inf) + s
    ),
    "two masks": lambda m, q, k, v, i: attend(
        q, k, v, lambda s: causal_fill(m, s) + torch.full((S, S), LEAST, dtype=s.dtype).triu(1)
    ),
    "scaled twice": lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, 2 * s / 4), 0.6),
    "scaled queries": lambda m, q, k, v, i: attend(q * 0.6, k / 2, v, lambda s: causal_fill(m, s), 1),
    "scaled by a tensor": lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, s * torch.tensor(0.3)), 1),
    "keys transposed": lambda m, q, k, v, i: (
        causal_fill(m, torch.matmul(q, k.permute(0, 1, 3, 2)) * 0.3).softmax(-1).matmul(v)
    ),
    "einsum": lambda m, q, k, v, i: torch.einsum(
        "bhqk,bkhd->bqhd",
        causal_fill(m, torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)) * 0.3).softmax(-1),
        v.transpose(1, 2),
    ).transpose(1, 2),
    "einsum, swapped": lambda m, q, k, v, i: torch.einsum(
        "bhkd,bhqk->bhdq", v, causal_fill(m, torch.einsum("bhkd,bhqd->bhqk", k, q) * 0.3).softmax(-1)
    ).transpose(2, 3),
    "heads merged": lambda m, q, k, v, i: torch.bmm(
        causal_fill(
            m,
            torch.baddbmm(
                torch.zeros(1, 1, S).double(), q.reshape(-1, S, SIZE), k.reshape(-1, S, SIZE).transpose(1, 2), alpha=0.3
            ).view(2, HEADS, S, S),
        )
        .softmax(-1)
        .view(-1, S, S),
        v.reshape(-1, S, SIZE),
    ).view(2, HEADS, S, SIZE),
    "into a buffer": lambda m, q, k, v, i: (
        causal_fill(
            m,
            torch.baddbmm(
                torch.empty(2 * HEADS, S, S).double(),
                q.reshape(-1, S, SIZE),
                k.reshape(-1, S, SIZE).transpose(1, 2),
                beta=0,
                alpha=0.3,
            ).view(2, HEADS, S, S),
        ).softmax(-1)
        @ v
    ),
}


@pytest.mark.parametrize("lead", [(2, 1), (1, HEADS), (2, HEADS), (1, 1)], ids=str)
def test_masks_of_regrouped_scores_keep_their_rows(lead: tuple[int, int]) -> None:
    """As many sequences as groups of heads: a mask that went by its place would meet the wrong ones."""
    mask = torch.arange(lead[0] * lead[1] * S).view(*lead, 1, S).double().cos()

    def body(m: Written, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        grouped = (2, 2, HEADS // 2, S)
        keys, values = (x[:, :2].unsqueeze(2).expand(*grouped, SIZE) for x in (k, v))
        scores = (q.view(*grouped, SIZE) @ keys.transpose(-2, -1)).reshape(2, HEADS, S, S)
        weights = (scores * 0.3 + mask).softmax(-1).reshape(*grouped, S)
        return (weights @ values).reshape(2, HEADS, S, SIZE)

    program, (finding,) = recognize(body)
    assert finding.rule == "sdpa"
    assert targets(program).count(SDPA) == 1


@pytest.mark.parametrize("form", FORMS)
def test_causal_attention_is_recognised(form: str) -> None:
    program, (finding,) = recognize(FORMS[form])
    assert (finding.rule, finding.mask) == CAUSAL
    masked, options = options_of(program)
    assert not masked
    assert options["is_causal"] is True
    assert options["scale"] == pytest.approx(0.3, rel=1e-7)
    assert not {aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default} & {*targets(program)}
    assert not [n for n, p in program.stages[0].parameters.items() if p.kind == "constant" and "cos" not in n]


def one_off(value: bool) -> Callable[[], Tensor]:
    def make() -> Tensor:
        seen = tril().clone()
        seen[(0, S - 1) if value else (S - 1, 1)] = value
        return seen

    return make


MASKED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "one key less": (lambda m, s: s.masked_fill(~one_off(False)(), -math.inf), "constant"),
    "one key more": (lambda m, s: torch.where(one_off(True)(), s, LEAST), "constant"),
    "window": (lambda m, s: s.masked_fill(~tril().triu(-2), -math.inf), "constant"),
    "window, added": (lambda m, s: s + torch.zeros(S, S).double().masked_fill(~tril().triu(-2), LEAST), "constant"),
    "two heads, two masks": (lambda m, s: s.masked_fill(~torch.stack([tril(), tril() | True]), -math.inf), "constant"),
    "alibi": (
        lambda m, s: causal_fill(m, s + torch.arange(S).double() * torch.tensor([0.5, 0.25]).view(2, 1, 1)),
        "additive bias, causal",
    ),
    "low but finite": (lambda m, s: s + torch.full((S, S), -5.0).double().triu(1), "additive bias"),
}


@pytest.mark.parametrize("name", MASKED)
def test_other_constant_masks_are_passed(name: str) -> None:
    mask, words = MASKED[name]
    program, (finding,) = recognize(lambda m, q, k, v, i: attend(q, k, v, lambda s: mask(m, s)))
    assert (finding.rule, finding.mask) == ("sdpa", words)
    masked, options = options_of(program)
    assert masked
    assert "is_causal" not in options


def test_a_mask_that_hides_nothing_is_dropped() -> None:
    program, (finding,) = recognize(lambda m, q, k, v, i: attend(q, k, v, lambda s: s + torch.zeros(S, S).double()))
    assert (finding.rule, finding.mask) == ("sdpa", "no mask")
    assert options_of(program) == (False, {"scale": 0.3})


def other_lengths(m: Written, q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
    return attend(q[:, :, : S - 2], k, v, lambda s: s.masked_fill(~tril()[: S - 2], -math.inf))


def test_only_a_square_mask_is_causal() -> None:
    program, (finding,) = recognize(other_lengths)
    assert (finding.rule, finding.mask) == ("sdpa", "constant")
    assert options_of(program)[0]


# What is not the whole: the softmax kernel, or nothing


def returned_scores(m: Written, q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    return causal_fill(m, scores * 0.3).softmax(-1) @ v + scores.mean()


def returned_weights(m: Written, q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
    weights = causal_fill(m, q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v + weights.square().mean()


def dropped_scores(m: Written, q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
    return attend(q, k, v, lambda s: causal_fill(m, functional.dropout(s, 0.5, m.training)))


def soft_cap(s: Tensor) -> Tensor:
    return torch.tanh(s / 5) * 5


PARTS: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "soft cap": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, soft_cap(s))),
        "causal",
        "its scores pass aten.tanh",
    ),
    "learned bias": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, s + m.bias)),
        "causal",
        "aten.add (test_recognition.py:N) adds a learned value to its scores",
    ),
    "learned temperature": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, s * m.temperature)),
        "causal",
        "its scores pass aten.mul",
    ),
    "scale that may be loaded": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, s * m.factor)),
        "causal",
        "its scores pass aten.mul",
    ),
    "negative scale": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, s), -0.3),
        "causal",
        "its scores pass aten.mul",
    ),
    "scaled after the mask": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, s) * 0.5),
        "no mask",
        "its scores are scaled after they are masked",
    ),
    "learned keys": (
        lambda m, q, k, v, i: attend(q, m.memory, v, lambda s: causal_fill(m, s)),
        "causal",
        "a factor of aten.matmul (test_recognition.py:N) is a parameter",
    ),
    "scores read": (returned_scores, "causal", "aten.mean (test_recognition.py:N) reads its scores too"),
    "weights read": (returned_weights, "causal", "2 operators read its weights"),
    "scores dropped": (dropped_scores, "causal", "its scores pass kernels.dropout"),
    "values multiplied": (
        lambda m, q, k, v, i: attend(q, k, v * 0, lambda s: causal_fill(m, s)).add(
            (causal_fill(m, q @ k.transpose(-2, -1)).softmax(-1) * 2) @ v
        ),
        "causal",
        "its weights pass aten.mul",
    ),
    "subtracted mask": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: causal_fill(m, s - torch.arange(S * S).view(S, S) / 50)),
        "causal",
        "its scores pass aten.sub",
    ),
    "low score for hidden keys": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: s.masked_fill(~tril(), -3.0)),
        "",
        "it hides keys by the score -3.0, which may count",
    ),
    "row without keys, filled": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: s.masked_fill(~tril().tril(-1), LEAST)),
        "",
        "its mask leaves a query no key",
    ),
    "row without keys, added": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: s + torch.full((S, S), LEAST, dtype=s.dtype).triu(0)),
        "",
        "its mask leaves a query no key",
    ),
    "filled by the batch": (
        lambda m, q, k, v, i: attend(q, k, v, lambda s: s.masked_fill((i == 0)[:, None, None], LEAST)),
        "",
        "the batch decides which keys are hidden, and may leave a query none",
    ),
    "added by the batch": (
        lambda m, q, k, v, i: attend(
            q, k, v, lambda s: s + torch.where((i == 0)[:, None, None], LEAST, torch.zeros([], dtype=s.dtype))
        ),
        "from the batch",
        "the batch may leave a query no key",
    ),
    "-inf by the batch": (
        lambda m, q, k, v, i: attend(
            q, k, v, lambda s: s + torch.where((i == 1)[:, None, None], -math.inf, torch.zeros([], dtype=s.dtype))
        ),
        "",
        "the batch may leave a query no key, by -inf",
    ),
    "computed in float32": (
        lambda m, q, k, v, i: causal_fill(m, q @ k.transpose(-2, -1)).softmax(-1, torch.float32).double() @ v,
        "",
        "computes torch.float64 scores in torch.float32",
    ),
    "over queries": (
        lambda m, q, k, v, i: causal_fill(m, q @ k.transpose(-2, -1)).transpose(-2, -1).softmax(-2) @ v,
        "",
        "aten.softmax (test_recognition.py:N) runs over dimension -2 of 4",
    ),
    "weights on the right": (
        lambda m, q, k, v, i: v.transpose(-2, -1) @ causal_fill(m, q @ k.transpose(-2, -1)).softmax(-1),
        "causal",
        "its weights pass aten.matmul",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_attentions_that_differ_from_sdpa_are_left(name: str) -> None:
    body, mask, reason = PARTS[name]
    ids = torch.tensor([[0] * S, [0, 2, 3, 0, 5, 6, 7, 8]])  # the first sample's queries see no key
    limit = {"scores dropped": 0.0, "computed in float32": 1e-6}.get(name, 1e-12)
    program, findings = recognize(body, ids, limit)
    finding = findings[-1]
    assert finding.rule != "sdpa"
    assert finding.mask == mask
    line = finding.place.rpartition("(test_recognition.py:")[2].rstrip(")")
    assert reason.replace(":N)", f":{line})") in finding.reason or reason in finding.reason
    assert finding.reason in recognize_attention(program).log[-2] or finding.rule == "softmax"
    if mask:
        assert finding.rule == "softmax"
        assert kernels.scaled_softmax in targets(program)


def test_an_unknown_buffer_is_no_proof() -> None:
    with torch.device("meta"):
        model = Written(FORMS["buffer"])
    program = fold_model(model, {"idx": torch.randint(0, 10, (2, S))})
    (finding,) = find_attentions(program)[1]
    assert finding.rule == ""
    assert finding.reason == "its mask, seen, has no known values"


def test_a_mask_of_more_digits_than_its_scores_stays_outside() -> None:
    """Its float32 numbers would be rounded; where they only hide, there is nothing to round."""
    places = torch.arange(S).float() / 3

    def cast(bias: Tensor) -> Callable[..., Tensor]:
        def body(m: Written, q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
            scores = (q @ k.transpose(-2, -1)).float() + bias
            return (scores.softmax(-1).bfloat16() @ v).double()

        return body

    program, (finding,) = recognize(cast(places), limit=0)
    assert (finding.rule, finding.reason) == ("softmax", "its mask is torch.float32, its scores torch.bfloat16")
    (kernel,) = [n for n in program.stages[0].graph.nodes if n.target is kernels.scaled_softmax]
    assert kernel.args[1].meta["val"].dtype == torch.float32
    _, (finding,) = recognize(cast(torch.full((S, S), torch.finfo(torch.float32).min).triu(1)), limit=0)
    assert (finding.rule, finding.mask) == CAUSAL


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("way", ["scores", "weights"])
def test_attentions_that_round_in_between_stay_rounded(way: str, dropout: float) -> None:
    """float32 -> bfloat16 -> float32 is no attention in float32: the numbers are the model's, bit for bit."""

    def body(m: Written, q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
        scores = causal_fill(m, q.float() @ k.float().transpose(-2, -1))
        if way == "scores":
            return functional.dropout(scores.bfloat16().float().softmax(-1), dropout) @ v.float()
        return functional.dropout(scores.softmax(-1).bfloat16(), dropout).float() @ v.float()

    inputs = {"idx": torch.randint(1, 10, (2, S))}
    model = Written(body)
    program = fold_model(model, inputs)
    rewritten = recognize_attention(program)
    (finding,) = find_attentions(program)[1]
    assert finding.rule != "sdpa"
    casts = [n.meta["val"].dtype for n in rewritten.stages[0].graph.nodes if n.target is aten.to.dtype]
    assert torch.bfloat16 in casts, finding
    weights = dict(model.named_parameters())
    found, own = (run_graph(each, weights, inputs) for each in (rewritten, program))
    torch.testing.assert_close(found, own, rtol=1e-6, atol=0)


def test_weights_in_the_dtype_of_the_scores_are_fused() -> None:
    """The usual: a softmax in float32, then back."""

    def body(m: Written, q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        scores = causal_fill(m, q @ k.transpose(-2, -1))
        return (scores.softmax(-1, dtype=torch.float32).bfloat16() @ v).double()

    program = fold_model(Written(body), {"idx": torch.randint(1, 10, (2, S))})
    assert [(f.rule, f.mask) for f in find_attentions(program)[1]] == [CAUSAL]


def test_a_router_is_no_attention() -> None:
    def route(m: Written, q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
        gates: Tensor = m.c_attn(m.embedding(i)).softmax(-1)
        return v * gates.square().mean()

    program, findings = recognize(route)
    assert findings == []
    assert program.log[-1] == "recognize_attention no attention"


# The whole pass


@pytest.mark.parametrize("name", ["nanogpt-slow", "mingpt"])
def test_models_with_their_mask_in_a_buffer(name: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    model = PLAIN[name]()
    inputs = {"idx": ids, "targets": ids.roll(-1, 1)}
    rewritten = assert_same(fold_model(model, inputs), model, inputs)
    entry, _, saved = rewritten.log[-1].partition("; ")
    assert entry == "recognize_attention 2 attentions: 2 sdpa causal"
    launches = re.match(r"(\d+) -> (\d+) launches, ", saved)
    assert launches is not None
    assert int(launches[1]) - int(launches[2]) >= 2 * 4, "product, scale, mask, softmax, product become one"


def test_before_and_after(golden: Callable[[str, str], None]) -> None:
    """The lines of GPT-Neo's attentions, and what the log says."""
    model = make_model("GPTNeoForCausalLM", "eager")
    assert model is not None
    program = fold_model(model, make_inputs("GPTNeoForCausalLM"))
    rewritten = recognize_attention(program)
    lines = [rewritten.log[-1]]
    words = ("matmul", "where", "add", "softmax", "sdpa", "bias", "mask", "and", "gt")
    for graph in (program.stages[0].graph, rewritten.stages[0].graph, rewritten.stages[0].constants):
        named = ((line, line.partition(" :")[0]) for line in str(graph).splitlines())
        shown = [line for line, name in named if any(name.endswith(word) for word in words)]
        lines += ["", *(line for line in shown if "attn" in line or "where" in line)]
    golden("gpt_neo_attention.txt", "\n".join([*lines, ""]))


def test_pure() -> None:
    model = make_model("MistralForCausalLM", "eager")
    assert model is not None
    program = fold_model(model, make_inputs("MistralForCausalLM"))
    texts = [str(program.stages[0].graph), str(program.stages[0].constants)]
    parameters = dict(program.stages[0].parameters)
    first, second = recognize_attention(program), recognize_attention(program)
    assert [str(program.stages[0].graph), str(program.stages[0].constants)] == texts
    assert program.stages[0].parameters == parameters
    assert str(first.stages[0].graph) == str(second.stages[0].graph)


def test_new_constants_are_loaded_once_and_old_ones_dropped() -> None:
    model = make_model("MistralForCausalLM", "eager")
    assert model is not None
    (stage,) = recognize_attention(fold_model(model, make_inputs("MistralForCausalLM"))).stages
    loads = [str(n.target) for n in stage.graph.nodes if n.op == "get_attr"]
    assert len(loads) == len(set(loads))
    constants = {name: p for name, p in stage.parameters.items() if p.kind == "constant"}
    assert [p.dtype for name, p in constants.items() if "mask" in name] == [torch.bool]
    (output,) = [n for n in stage.constants.nodes if n.op == "output"]
    assert set(output.args[0]) == set(constants) <= set(loads)
    made = run_stage(stage.constants, dict(model.named_buffers()), {})
    assert {n: (tuple(x.shape), x.dtype) for n, x in made.items()} == {
        n: (p.shape, p.dtype) for n, p in constants.items()
    }
    assert isinstance(stage.graph, fx.Graph)
