"""Constants: made once, shared, and masks dropped only where they are exactly causal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autoptd
from autoptd.capture.export import capture
from autoptd.passes.attention.recognition import recognize_attention
from autoptd.passes.ir.program import Program
from autoptd.passes.normal_form import constant_masks
from autoptd.passes.normal_form.constants import fold_constants
from autoptd.passes.normal_form.normalize import normalize
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.mesh import Mesh
from tests.interpret import run_graph
from tests.plain_models import HUGGING_FACE, LENGTH, VOCABULARY

S, HEADS, SIZE = 8, 2, 4


class Attention(nn.Module):
    """One attention whose mask is what `make` says, of (the module, input ids)."""

    def __init__(self, make: Callable[[Any, Tensor], Tensor | None], dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, HEADS * SIZE)
        self.c_attn = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)
        self.make = make
        self.dropout = dropout
        self.register_buffer("seen", torch.ones(S, S, dtype=torch.bool).tril(), persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        qkv = self.c_attn(self.embedding(idx)).view(*idx.shape, 3, HEADS, SIZE)
        q, k, v = (x.squeeze(2).transpose(1, 2) for x in qkv.split(1, 2))
        p = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.make(self, idx), dropout_p=p)
        return y.square().mean()


def program_of(model: nn.Module) -> tuple[Program, dict[str, Tensor]]:
    torch.manual_seed(0)
    inputs = {"idx": torch.randint(0, 10, (2, S))}
    folded = fold_constants(normalize(capture(model, mesh=Mesh(1, 1, 1), example_inputs=inputs)))
    return recognize_attention(folded), inputs


def attention_of(program: Program) -> tuple[bool, bool]:
    """Whether the only attention has a mask, and whether it is causal."""
    (node,) = [
        n
        for n in program.stages[0].graph.nodes
        if n.target in (aten.scaled_dot_product_attention.default, kernels.scaled_softmax)
    ]
    plain = 2 if node.target is kernels.scaled_softmax else 3
    return len(node.args) > plain, bool(node.kwargs.get("is_causal", False))


def tril(m: Any, idx: Tensor) -> Tensor:
    return torch.tril(torch.ones(S, S, dtype=torch.bool))


def buffer(m: Any, idx: Tensor) -> Tensor:
    return m.seen[: idx.shape[1], : idx.shape[1]][None, None]  # type: ignore[no-any-return]


def compared(m: Any, idx: Tensor) -> Tensor:
    places = torch.arange(S, device=idx.device)
    return (places[None, :] <= places[:, None]).expand(2, 1, S, S)


def additive(value: float) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, idx: torch.full((S, S), value).triu(1)


def like_ids(m: Any, idx: Tensor) -> Tensor:
    return torch.ones_like(idx)[:1, None, :].expand(1, S, S).bool().tril()[None]


def everything(m: Any, idx: Tensor) -> Tensor:
    return torch.ones(1, 1, S, S, dtype=torch.bool)


def window(m: Any, idx: Tensor) -> Tensor:
    return tril(m, idx).triu(-3)


def strict(m: Any, idx: Tensor) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril(-1)


def one_off(m: Any, idx: Tensor) -> Tensor:
    mask = tril(m, idx).clone()
    mask[S - 1, 0] = False
    return mask


def one_head_off(m: Any, idx: Tensor) -> Tensor:
    return torch.stack([tril(m, idx), everything(m, idx)[0, 0]])[None]


def alibi(m: Any, idx: Tensor) -> Tensor:
    places = torch.arange(S)
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    return (slopes * (places[None, :] - places[:, None])).masked_fill(~tril(m, idx), float("-inf"))[None]


def large_but_finite(m: Any, idx: Tensor) -> Tensor:
    return torch.full((S, S), -1e4).triu(1)


def padding(m: Any, idx: Tensor) -> Tensor:
    return tril(m, idx)[None, None] & (idx != 0)[:, None, None, :]


def by_sample(m: Any, idx: Tensor) -> Tensor:
    places = torch.arange(S).expand(2, S)
    return places[:, None, None, :] <= places[:, None, :, None]


def one_sample_off(m: Any, idx: Tensor) -> Tensor:
    places = torch.arange(S) + torch.tensor([[0], [1]])
    return torch.arange(S).expand(2, S)[:, None, None, :] <= places[:, None, :, None]


CAUSAL = [
    tril,
    buffer,
    compared,
    by_sample,
    like_ids,
    additive(float("-inf")),
    additive(torch.finfo(torch.float32).min),
]
KEPT = [window, one_off, one_head_off, one_sample_off, alibi, large_but_finite, padding]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("make", CAUSAL)
def test_causal_masks_are_proved(make: Callable[[Any, Tensor], Tensor], dropout: float) -> None:
    program, _ = program_of(Attention(make, dropout))
    assert attention_of(program) == (False, True)
    assert f"1 {'softmax only' if dropout else 'sdpa'} causal" in program.log[-1]
    assert not len(program.stages[0].constants.nodes)


@pytest.mark.parametrize("make", [*CAUSAL, *KEPT, everything, strict])
def test_same_numbers(make: Callable[[Any, Tensor], Tensor]) -> None:
    model = Attention(make)
    program, inputs = program_of(model)
    found = run_graph(program, dict(model.named_parameters()), inputs)
    torch.testing.assert_close(found, model(**inputs), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", [*KEPT, strict])
def test_other_masks_are_kept(make: Callable[[Any, Tensor], Tensor]) -> None:
    program, _ = program_of(Attention(make))
    assert attention_of(program) == (True, False)


def test_open_mask_is_dropped() -> None:
    assert attention_of(program_of(Attention(everything))[0]) == (False, False)


def test_mask_of_a_buffer_without_data_is_kept() -> None:
    with torch.device("meta"):
        model = Attention(buffer)
    program, _ = program_of(model)
    assert attention_of(program) == (True, False)
    assert "1 sdpa with mask (constant)" in program.log[-1]


@pytest.mark.parametrize("make", [tril, compared, by_sample, window, one_off, one_sample_off, everything])
def test_large_masks_are_compared_in_blocks(
    make: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = attention_of(program_of(Attention(make))[0])
    monkeypatch.setattr(constant_masks, "_BLOCK", 3 * S)
    blocks = attention_of(program_of(Attention(make))[0])
    assert blocks == ((True, False) if make is one_off else whole)  # what is written into is not followed


@pytest.mark.parametrize(("make", "samples"), [(compared, 1), (by_sample, 1), (one_sample_off, 2)])
def test_samples_that_are_alike_are_computed_once(
    make: Callable[[Any, Tensor], Tensor], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: set[int] = set()
    real = constant_masks.MaskJudge.blocks

    def watch(self: constant_masks.MaskJudge, mask: fx.Node) -> Iterator[tuple[int, Tensor | None]]:
        for start, block in real(self, mask):
            assert block is not None
            sizes.add(block.numel())
            yield start, block

    monkeypatch.setattr(constant_masks, "_BLOCK", 3 * S)  # one row of two samples
    monkeypatch.setattr(constant_masks.MaskJudge, "blocks", watch)
    program_of(Attention(make))
    assert sizes == {samples * S}


def test_constants_are_shared_and_loaded_once() -> None:
    inputs = {name: torch.randint(0, VOCABULARY, (2, LENGTH)) for name in ("input_ids", "labels")}
    model = HUGGING_FACE["mistral"]()
    (stage,) = fold_constants(normalize(capture(model, mesh=Mesh(1, 1, 1), example_inputs=inputs))).stages
    constants = {name: p for name, p in stage.parameters.items() if p.kind == "constant"}
    assert sorted(constants)[1:] == ["constant.rotary_emb_cos", "constant.rotary_emb_sin"]
    assert all(not p.requires_grad for p in constants.values())
    (output,) = [n for n in stage.constants.nodes if n.op == "output"]
    assert list(output.args[0]) == list(constants)
    loads = [n.target for n in stage.graph.nodes if n.op == "get_attr"]
    assert len(loads) == len(set(loads))
    assert set(loads) <= set(stage.parameters)
    assert {n.op for n in stage.constants.nodes} == {"get_attr", "call_function", "output"}
    assert [n.target for n in stage.constants.nodes if n.op == "get_attr"] == ["model.rotary_emb.inv_freq"]
    for name, parameter in constants.items():
        assert tuple(output.args[0][name].meta["val"].shape) == parameter.shape
    stage.graph.lint()
    stage.constants.lint()


def test_constants_have_no_order_of_their_own() -> None:
    """A model that walks through a set makes its tables in another order in each process (Gemma 3 does)."""

    class Tables(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            self.order, self.linear = order, nn.Linear(S, 10)
            self.register_buffer("first", torch.ones(S), persistent=False)
            self.register_buffer("second", torch.ones(S), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            own = {name: self.get_buffer(name) for name in ("first", "second")}
            tables = {name: (own[name] * torch.arange(S)).sin() for name in self.order.split()}
            loss: Tensor = (self.linear(x * tables["second"]) + self.linear(x * tables["first"])).mean()
            return loss

    one, other = (
        autoptd.compile(Tables(order), mesh=(1, 1, 1), num_microbatches=1, example_inputs=(torch.ones(2, S),))
        for order in ("first second", "second first")
    )
    assert one.texts == other.texts
    assert one.manifest == other.manifest
    assert "constant.sin" in one.texts[0]


def test_a_constant_may_be_called_as_a_method_of_modules() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, S)
            self.register_buffer("table", torch.arange(S, dtype=torch.float64), persistent=False)

        def forward(self, idx: Tensor) -> Tensor:
            loss: Tensor = (self.embedding(idx) * self.table.float()).square().mean()  # a constant named "to"
            return loss

    model, inputs = Cast(), {"idx": torch.zeros(1, S, dtype=torch.long)}
    program = autoptd.compile(model, (1, 1, 1), example_inputs=inputs, num_microbatches=1)
    torch.testing.assert_close(program.bind()(**inputs), model(**inputs))


def test_constant_indices_are_slices() -> None:
    def body(m: Any, idx: Tensor) -> Tensor | None:
        return None

    class Indexed(Attention):
        def forward(self, idx: Tensor) -> Tensor:
            x = self.c_attn(self.embedding(idx))
            round_the_end = x[..., [-1, 0]]  # of which a slice would have one
            result: Tensor = (x[..., [-2, -1]] + x[..., [3, 4]] + x[:, :, [0, 5]] + round_the_end).square().mean()
            return result

    model = Indexed(body)
    program, inputs = program_of(model)
    nodes = [n for n in program.stages[0].graph.nodes if n.op == "call_function"]
    assert [n.args[1:] for n in nodes if n.target is aten.slice.Tensor] == [(2, 22, 24), (2, 3, 5)]
    assert len([n for n in nodes if n.target is aten.index.Tensor]) == 2
    assert torch.equal(run_graph(program, dict(model.named_parameters()), inputs), model(**inputs))


def test_pure() -> None:
    inputs = {"idx": torch.randint(0, 10, (2, S))}
    program = normalize(capture(Attention(tril), mesh=Mesh(1, 1, 1), example_inputs=inputs))
    text = str(program.stages[0].graph)
    fold_constants(program)
    assert str(program.stages[0].graph) == text


@pytest.mark.parametrize(("rows", "start", "found"), [(7, 0, "0 to 7"), (20, -2, "-2 to 5"), (8, 0, ""), (20, 12, "")])
def test_positions_that_a_table_lacks_are_refused(rows: int, start: int, found: str) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(10, 4), nn.Embedding(rows, 4)

        def forward(self, idx: Tensor) -> Tensor:
            x: Tensor = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]) + start)
            return x.square().mean()

    if not found:
        program_of(Positions())
        return
    with pytest.raises(ValueError, match=rf"positions \(.*\): rows {found} are looked up in a table of {rows};"):
        program_of(Positions())
