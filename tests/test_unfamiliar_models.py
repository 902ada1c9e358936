"""Small GPTs written in ways of their own: each compiles, divides its heads, and has the plain model's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import autoptd
from autoptd.compiled import CompiledProgram
from tests.marks import slow, slow_but

VOCABULARY, LENGTH, HIDDEN, HEADS, SIZE = 64, 16, 32, 4, 8
MESHES = [(2, 1, 1), (1, 2, 1), (2, 2, 1)]
Attend = Callable[[Any, Tensor], Tensor]


class Attention(nn.Module):
    """What `attend` makes of one packed projection [b, s, width]; out again by a projection, or (`out` 0) as it is."""

    seen: Tensor
    window: Tensor

    def __init__(self, attend: Attend, width: int = 3 * HIDDEN, out: int = HIDDEN) -> None:
        super().__init__()
        self.attend = attend
        self.packed = nn.Linear(HIDDEN, width)
        self.out = nn.Linear(out, HIDDEN) if out else nn.Identity()
        self.slopes = nn.Parameter(torch.rand(HEADS, 1, 1))
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self.register_buffer("seen", seen, persistent=False)
        self.register_buffer("window", seen & ~seen.tril(-4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.attend(self, self.packed(x)))
        return result


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], parallel: bool = False) -> None:
        super().__init__()
        self.attention, self.parallel = attention(), parallel
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.norms
        if self.parallel:
            y = one(x)
            both: Tensor = x + self.attention(y) + self.mlp(y)
            return both
        x = x + self.attention(one(x))
        return x + self.mlp(two(x))

    def mlp(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(functional.gelu(self.up(x)))
        return result


class Model(nn.Module):
    """Positions are the first rows of a longer parameter [64, h], or [1, 64, h] with `batched`."""

    def __init__(self, blocks: list[nn.Module], batched: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(1, 64, HIDDEN) if batched else torch.randn(64, HIDDEN))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        s = idx.shape[1]
        x = self.tokens(idx) + (self.positions[:, :s] if self.positions.dim() == 3 else self.positions[:s])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def split_heads(x: Tensor, count: int) -> Tensor:
    """[b, s, count * size] -> [b, count, s, size]"""
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    y = functional.scaled_dot_product_attention(q, k, v, **options or {"is_causal": True})
    return y.transpose(1, 2).flatten(2)


def written(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    weights = change(q @ k.transpose(-2, -1) / math.sqrt(SIZE)).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def plain(m: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (split_heads(y, HEADS) for y in x.chunk(3, -1))
    return q, k, v


def multi_query(m: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of one projection: q [h], one head of keys, one of values."""
    q, k, v = x[..., :HIDDEN], x[..., HIDDEN : HIDDEN + SIZE], x[..., HIDDEN + SIZE :]
    return split_heads(q, HEADS), split_heads(k, 1), split_heads(v, 1)


def grouped(m: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with two heads of each, values first."""
    v, q, k = x.split([2 * SIZE, HIDDEN, 2 * SIZE], -1)
    k, v = (split_heads(y, 2).repeat_interleave(2, 1) for y in (k, v))
    return split_heads(q, HEADS), k, v


def learned_alibi(m: Attention, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    distances = places[None] - places[:, None]
    return written(*plain(m, x), lambda s: (s + m.slopes * distances).masked_fill(~m.seen, float("-inf")))


def sliding(m: Attention, x: Tensor) -> Tensor:
    least = torch.finfo(x.dtype).min
    return written(*plain(m, x), lambda s: s + torch.zeros(s.shape[-2:]).masked_fill(~m.window, least))


def single_head_written(m: Attention, x: Tensor) -> Tensor:
    return written(*multi_query(m, x), lambda s: s.masked_fill(~m.seen, float("-inf")))


def repeated(m: Attention, x: Tensor) -> Tensor:
    """Keys as a new dimension of heads, values as packed ones."""
    q, k, _ = multi_query(m, x)
    v = x[..., HIDDEN + SIZE :].repeat(1, 1, HEADS)
    return fused(q, k.repeat(1, HEADS, 1, 1), split_heads(v, HEADS))


def other_order(m: Attention, x: Tensor) -> Tensor:
    """[size, 3, heads], as no one packs them."""
    q, k, v = x.view(*x.shape[:2], SIZE, 3, HEADS).permute(3, 0, 4, 1, 2)
    return fused(q, k, v)


def differential(m: Attention, x: Tensor) -> Tensor:
    q, k, v = x.chunk(3, -1)
    pairs = [y.view(*y.shape[:2], HEADS // 2, 2, SIZE).permute(3, 0, 2, 1, 4) for y in (q, k)]
    one, two = (
        (q @ k.transpose(-2, -1)).masked_fill(~m.seen, float("-inf")).softmax(-1) for q, k in zip(*pairs, strict=True)
    )
    y: Tensor = (one - m.slopes[:2] * two) @ split_heads(v, HEADS // 2)
    return y.transpose(1, 2).flatten(2)


def sink(m: Attention, x: Tensor) -> Tensor:
    """A learned score that takes weight from all keys."""
    q, k, v = plain(m, x)
    scores = (q @ k.transpose(-2, -1)).masked_fill(~m.seen, float("-inf"))
    beside = m.slopes.expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, beside], -1).softmax(-1)[..., :-1]
    return (weights @ v).transpose(1, 2).flatten(2)


def multi_query_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x[..., :HIDDEN], x[..., HIDDEN : HIDDEN + SIZE], x[..., HIDDEN + SIZE :]


def scaled_by(divisor: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Scores divided by a constant that is made in the scores' dtype, in which it is rounded."""

    def attend(m: Attention, x: Tensor) -> Tensor:
        q, k, v = plain(m, x)
        scores = q @ k.transpose(-2, -1) / divisor(q)
        return (scores.masked_fill(~m.seen, float("-inf")).softmax(-1) @ v).transpose(1, 2).flatten(2)

    return lambda: Attention(attend)


def complex_rotary(m: Attention, x: Tensor, heads: int = HEADS) -> Tensor:
    """Positions as turns of complex numbers."""
    q, k, v = (y.unflatten(-1, (-1, SIZE)) for y in (x.chunk(3, -1) if heads == HEADS else multi_query_rows(x)))
    angles = torch.outer(torch.arange(x.shape[1]), 1.0 / 10 ** torch.arange(0, SIZE, 2)[: SIZE // 2])
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]  # in complex64, which verify promotes
    q, k = (
        torch.view_as_real(torch.view_as_complex(y.reshape(*y.shape[:3], -1, 2)) * turns).flatten(3) for y in (q, k)
    )
    return fused(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True, enable_gqa=heads < HEADS)


def sink_below_its_largest(m: Attention, x: Tensor) -> Tensor:
    """As `sink`, every score less the largest, none beyond a bound that is a tensor."""
    q, k, v = plain(m, x)
    scores = (q @ k.transpose(-2, -1)).masked_fill(~m.seen, float("-inf"))
    scores = torch.cat([torch.min(scores, torch.tensor(3.0)), m.slopes.expand(*scores.shape[:3], 1)], -1)
    weights = (scores - scores.max(-1, keepdim=True).values).softmax(-1)[..., :-1]
    return (torch.cat([torch.zeros(0), weights], -1) @ v).transpose(1, 2).flatten(2)


ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "multi-query": lambda: Attention(lambda m, x: fused(*multi_query(m, x), is_causal=True, enable_gqa=True), 48),
    "multi-query written out": lambda: Attention(single_head_written, 48),
    "multi-query repeated": lambda: Attention(repeated, 48),
    "grouped": lambda: Attention(lambda m, x: fused(*grouped(m, x)), 64),
    "learned ALiBi": lambda: Attention(learned_alibi),
    "sliding window": lambda: Attention(lambda m, x: fused(*plain(m, x), attn_mask=m.window)),
    "sliding window written out": lambda: Attention(sliding),
    "another order": lambda: Attention(other_order),
    "differential": lambda: Attention(differential),
    "sink": lambda: Attention(sink),
    "sink below its largest": lambda: Attention(sink_below_its_largest),
    "scaled by a tensor": scaled_by(lambda q: torch.full([], SIZE**0.5, dtype=q.dtype)),
    "scaled by a tensor's root": scaled_by(lambda q: torch.sqrt(torch.tensor(SIZE, dtype=torch.float32))),
    "scaled by a literal's root": scaled_by(lambda q: torch.tensor(float(SIZE)).to(q.dtype).sqrt()),
    "complex rotary": lambda: Attention(complex_rotary),
    "complex rotary, multi-query": lambda: Attention(lambda m, x: complex_rotary(m, x, 1), 48),
}


class Turned(nn.Module):
    """Complex numbers on the way through all layers: divided regions are behind them, and no cut is at them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        turn = torch.polar(torch.ones(HIDDEN // 2), torch.linspace(0, 3, HIDDEN // 2))
        x = self.tokens(idx)
        for layer in self.layers:
            x = torch.view_as_real(torch.view_as_complex(layer(x).unflatten(-1, (-1, 2))) * turn).flatten(-2)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def compile_model(model: nn.Module, mesh: tuple[int, int, int]) -> CompiledProgram:
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    inputs = {"idx": ids, "targets": ids}
    return autoptd.compile(model, mesh, example_inputs=inputs, num_microbatches=2)


def check(model: nn.Module, mesh: tuple[int, int, int] = (2, 1, 1)) -> str:
    """Compile and verify; give the log."""
    program = compile_model(model, mesh)
    report = program.verify()
    assert report.passed, report
    assert max(report.gradient_errors.values()) < 1e-12
    return "\n".join(program.log)


@pytest.mark.parametrize("mesh", slow_but([(2, 2, 1)], MESHES))
def test_gradients_go_through_complex_numbers(mesh: tuple[int, int, int]) -> None:
    check(Turned(), mesh)


class Halves(nn.Module):
    """Turned by halves where there are no heads: what is read behind it divides the halves alike."""

    cos: Tensor
    sin: Tensor

    def __init__(self, spared: int = 0) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.scale = nn.Parameter(torch.rand(HIDDEN))
        self.turned = HIDDEN - spared
        angles = torch.outer(torch.arange(LENGTH), 1 / 10 ** torch.linspace(0, 1, self.turned // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx)
        x, rest = x[..., : self.turned], x[..., self.turned :]
        x = x * self.cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * self.sin
        x = torch.cat((x, rest), -1) * self.scale
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("spared", [0, 8])
@pytest.mark.parametrize("mesh", slow_but([(2, 2, 1)], MESHES))
def test_halves_that_turn_may_be_divided_alike(spared: int, mesh: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    check(Halves(spared), mesh)


@pytest.mark.parametrize("empty", [torch.float32, torch.bfloat16])
def test_the_dtype_of_an_empty_part_counts(empty: torch.dtype) -> None:
    """In bfloat16 with an empty float32, what is joined is float32; verify promotes both, so the bits are compared."""

    class Joined(Model):
        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            logits = self.head(self.tokens(idx))
            joined = torch.cat([torch.zeros(0, dtype=empty), logits], -1)
            return functional.cross_entropy(joined.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model = Joined([]).bfloat16()
    model.positions.requires_grad_(False)
    ids = torch.randint(0, VOCABULARY, (1, LENGTH))
    example = {"idx": ids, "targets": ids}
    program = autoptd.compile(model, (1, 1, 1), example_inputs=example, num_microbatches=1)
    loss, plain = program.bind("cpu")(**example), model(**example)
    assert loss.dtype == plain.dtype == (torch.float32 if empty is torch.float32 else torch.bfloat16)
    assert torch.equal(loss, plain)


@pytest.mark.parametrize(
    "name",
    slow_but(
        [
            "multi-query written out",
            "grouped",
            "learned ALiBi",
            "another order",
            "differential",
            "complex rotary, multi-query",
        ],
        ATTENTIONS,
    ),
)
@pytest.mark.parametrize("mesh", [slow((1, 1, 1)), (2, 2, 1)])
def test_an_attention_is_divided_and_has_the_plain_models_gradients(name: str, mesh: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    log = check(Model([Block(ATTENTIONS[name], parallel=i == 1) for i in range(2)]), mesh)
    assert "attention replicated" not in log


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_positions_may_be_the_first_rows_of_a_parameter(batched: bool, tied: bool) -> None:
    """What is past them nobody reads; to divide only that would leave the gradient of the others partial."""
    torch.manual_seed(0)
    model = Model([Block(lambda: Attention(lambda m, x: fused(*plain(m, x))))], batched, tied)
    check(model)
    placement = compile_model(model, (2, 1, 1)).manifest.parameters["positions"].placement["tensor"]
    assert placement.dim is None


@pytest.mark.parametrize("batch", [1, 2])
def test_positions_may_be_expanded_to_the_batch(batch: int) -> None:
    """The dimension that a batch of one adds has a stride, unlike that of a larger one."""

    class Expanded(Model):
        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            x = self.tokens(idx) + self.positions[:LENGTH].expand(len(idx), -1, -1)
            for block in self.blocks:
                x = block(x)
            return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model = Expanded([Block(lambda: Attention(lambda m, x: fused(*plain(m, x))))])
    inputs = dict.fromkeys(("idx", "targets"), torch.zeros(batch, LENGTH, dtype=torch.long))
    report = autoptd.compile(model, (2, 1, 1), example_inputs=inputs).verify()
    assert report.passed, report
    assert max(report.gradient_errors.values()) < 1e-12


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("packed", ["by head", "by kind"])
def test_heads_may_be_merged_with_the_sequences(packed: str, tensor: int) -> None:
    """Megatron's own form. A rank's only head may then be counted to either, in a shape that stays."""

    class Merged(Model):
        def __init__(self) -> None:
            super().__init__([])
            self.packed, self.output = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            x = self.tokens(idx).transpose(0, 1)
            rows, batch = x.shape[:2]
            merged = batch * HEADS
            if packed == "by head":
                q, k, v = self.packed(x).view(rows, merged, 3 * SIZE).transpose(0, 1).chunk(3, -1)
            else:
                q, k, v = (y.reshape(rows, merged, SIZE).transpose(0, 1) for y in self.packed(x).chunk(3, -1))
            buffer = torch.empty(merged, rows, rows)
            scores = torch.baddbmm(buffer, q, k.transpose(1, 2), beta=0, alpha=SIZE**-0.5)
            seen = torch.ones(rows, rows, dtype=torch.bool).tril()
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            y = torch.bmm(weights, v).transpose(0, 1).reshape(rows, batch, HIDDEN)
            x = (x + self.output(y)).transpose(0, 1)
            return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model = Merged()
    check(model, (tensor, 1, 1))
    assert compile_model(model, (tensor, 1, 1)).manifest.parameters["output.weight"].placement["tensor"].dim == 1


@pytest.mark.parametrize("mesh", [slow((2, 1, 1)), (2, 2, 1)])
def test_positions_may_be_the_first_rows_of_what_is_computed_of_a_parameter(mesh: tuple[int, int, int]) -> None:
    class Scaled(Model):
        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            x = self.tokens(idx) + (self.positions * 0.5)[:LENGTH]
            for block in self.blocks:
                x = block(x)
            return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model = Scaled([Block(lambda: Attention(lambda m, x: fused(*plain(m, x)))) for _ in range(2)])
    check(model, mesh)
    assert compile_model(model, mesh).manifest.parameters["positions"].placement["tensor"].dim is None


@pytest.mark.parametrize("mesh", [slow((2, 1, 1)), (2, 2, 1)])
def test_positions_may_share_a_parameter_with_rows_that_are_divided(mesh: tuple[int, int, int]) -> None:
    """Then their gradient is partial, and made whole behind them."""

    class Packed(Model):
        def __init__(self) -> None:
            super().__init__([Block(lambda: Attention(lambda m, x: fused(*plain(m, x))))])
            self.down = nn.Linear(64 - LENGTH, HIDDEN)

        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            x = self.tokens(idx) + self.positions[:LENGTH]
            y = functional.gelu(functional.linear(x, self.positions[LENGTH:]))
            x = self.blocks[0](functional.layer_norm(x + self.down(y), [HIDDEN]))
            return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model = Packed()
    check(model, mesh)
    placement = compile_model(model, mesh).manifest.parameters["positions"].placement["tensor"]
    assert [segment.divided for segment in placement.segments] == [False, True]


def test_a_layer_that_is_used_several_times_has_one_gradient_on_all_its_stages() -> None:
    """Its owners meet its parameters in orders of their own, where a stage begins inside it."""
    torch.manual_seed(0)
    block = Block(ATTENTIONS["learned ALiBi"])
    model = Model([block] * 3)
    before = dict(model.named_parameters())
    for mesh in ((1, 2, 1), (2, 2, 1)):
        check(model, mesh)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before), "verify changed the model"


def test_the_epsilon_of_a_norm_that_has_none_is_that_of_the_dtype_it_runs_in() -> None:
    """In float64, where programs are verified, another one than in float32."""

    class Normed(Attention):
        def __init__(self) -> None:
            super().__init__(lambda m, x: fused(*plain(m, m.norm(x * 1e-4) + m.norm(m.norm(x) + x))))
            self.norm = nn.RMSNorm(3 * HIDDEN)

    torch.manual_seed(0)
    check(Model([Block(Normed)]), (1, 1, 1))


@pytest.mark.parametrize(("attend", "width"), [(plain, 96), (multi_query, 48), (grouped, 64)])
def test_heads_that_meet_another_divided_dimension_are_replicated_with_the_cause(attend: Any, width: int) -> None:
    """Without a projection behind it, the attention's heads and the vocabulary are dimensions of one weight."""

    def body(m: Attention, x: Tensor) -> Tensor:
        q, k, v = attend(m, x)
        return fused(q, k.expand_as(q), v.expand_as(q))

    torch.manual_seed(0)
    model = Model([Attention(body, width, out=0)], tied=True)
    log = check(model)
    assert "because a tensor has 4 twice, or another dimension beside it that saves more" in log
    with pytest.raises(ValueError, match=r"4 heads do not divide over tensor=3 .* use tensor=1, 2 or 4"):
        compile_model(model, (3, 1, 1))


@pytest.mark.parametrize(("heads", "groups", "tensor"), [(8, 4, 2), (12, 4, 2), (16, 8, 4)])
@pytest.mark.parametrize("fuse", [True, False])
def test_several_key_heads_on_each_rank_serve_several_query_heads(
    heads: int, groups: int, tensor: int, fuse: bool
) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=4 * heads, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    inputs = {name: torch.zeros(1, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    program = autoptd.compile(model, mesh=(tensor, 1, 1), example_inputs=inputs, num_microbatches=1, fuse=fuse)
    assert program.verify().passed


HALF = HIDDEN // 2
JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "whole and divided": lambda x, y: torch.cat([x, y], -1),
    "twice, and the middle": lambda x, y: torch.cat([y, y], -1)[..., HALF : HALF + HIDDEN],
    "a half twice": lambda x, y: torch.cat([y[..., :HALF], y[..., :HALF]], -1),
    "turned": lambda x, y: torch.cat([y[..., 2:], y[..., :2]], -1),
    "a part of itself": lambda x, y: torch.cat([y, y[..., 2:4]], -1),
    "beside nothing at all": lambda x, y: torch.cat([*torch.split(y[..., :0], [0, 0, 0], -1), y], -1),
    "repeated": lambda x, y: y.repeat(1, 1, 2),
    "each repeated": lambda x, y: y.repeat_interleave(2, -1),
    "copies summed": lambda x, y: y * x[..., None].expand(-1, -1, -1, 4).sum(-1),
    "with nothing after it": lambda x, y: torch.cat(torch.split(y, [HIDDEN, 0], -1), -1),
    "with nothing before it": lambda x, y: torch.split(y, [0, HIDDEN], -1)[1],
    "with nothing in it": lambda x, y: torch.cat(torch.split(y, [4, 0, HIDDEN - 4], -1)[::-1], -1),
}


WHOLE = {"whole and divided", "copies summed"}  # the latter's weight is divided by what comes out


@pytest.mark.parametrize("joined", JOINED)
def test_parts_of_dimensions_join_in_any_way(joined: str) -> None:
    """What is divided is divided alike on both sides of a product; where whole rows meet it, none is."""
    double = {"whole and divided", "repeated", "each repeated"}
    width = 2 * HIDDEN if joined in double else HIDDEN + 2 if joined == "a part of itself" else HIDDEN

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.packed = nn.Linear(HIDDEN, HIDDEN), nn.Linear(width, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.packed(JOINED[joined](x, functional.relu(self.inner(x))))
            return result

    torch.manual_seed(0)
    check(Model([Joined()]), (1, 1, 1))
    program = compile_model(Model([Joined()]), (2, 1, 1))
    assert program.verify().passed
    divided = program.manifest.parameters["blocks.0.packed.weight"].placement["tensor"].dim
    assert (divided == 1) == (joined not in WHOLE)


def test_layers_beside_a_whole_dimension_are_divided() -> None:
    """The first and the last layer could be divided by the width between, but that is summed with whole rows."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.packed = nn.LayerNorm(HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
            self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            y = functional.relu(self.second(functional.relu(self.first(x))))
            result: Tensor = self.packed(torch.cat([x, y], -1))
            return result

    torch.manual_seed(0)
    program = compile_model(Model([Joined()]), (2, 1, 1))
    assert program.verify().passed
    parameters = program.manifest.parameters
    assert parameters["blocks.0.first.weight"].placement["tensor"].dim == 0
    assert parameters["blocks.0.second.weight"].placement["tensor"].dim == 1


def test_an_attention_that_is_joined_with_whole_rows_is_replicated() -> None:
    class Joined(Attention):
        def __init__(self) -> None:
            super().__init__(lambda own, packed: fused(*plain(own, packed)), out=2 * HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.out(torch.cat([x, self.attend(self, self.packed(x))], -1))
            return result

    torch.manual_seed(0)
    log = check(Model([Joined()]))
    assert "attention replicated" in log
    assert "sums over it and over rows that every rank has" in log


@pytest.mark.parametrize("packed", [False, True])
def test_heads_that_whole_rows_lie_between_are_replicated(packed: bool) -> None:
    """Their number is not the reason."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed = nn.Linear(HIDDEN, 3 * HIDDEN)
            self.parts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
            self.out = nn.Linear(2 * HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.packed(x).chunk(3, -1) if packed else [part(x) for part in self.parts]
            y = fused(*(split_heads(part, HEADS) for part in parts))
            result: Tensor = self.out(torch.cat([y[..., :HALF], x, y[..., HALF:]], -1))
            return result

    torch.manual_seed(0)
    assert "attention replicated" in check(Model([Joined()]))


def test_an_einsum_of_one_operand_compiles() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bsh->bsh", x) + torch.einsum("bsh->bs", x)[..., None]

    check(Model([Turned()]), (1, 2, 1))


def test_rows_are_joined_behind_an_operator_that_says_nothing_of_its_batch() -> None:
    """Of one sequence, the joined rows meet the batch and length of the labels."""

    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.mixed(x.transpose(1, 2)).transpose(1, 2)
            return torch.cat([y[:, LENGTH // 2 :], y[:, : LENGTH // 2]], 1)

    torch.manual_seed(0)
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    example = {"idx": ids, "targets": ids}
    program = autoptd.compile(Model([Convolved()]), (1, 2, 1), example_inputs=example, num_microbatches=2)
    assert program.verify().passed


def balanced(gates: Tensor) -> Tensor:
    """Each gate by how many tokens like it best, as a loss that balances experts has it."""
    return gates * functional.one_hot(gates.argmax(-1), gates.shape[-1]).to(gates.dtype).mean((0, 1))


@pytest.mark.parametrize(
    "change",
    [
        balanced,
        lambda x: x * torch.bucketize(x.detach(), torch.tensor([-1.0, 1.0])),
        lambda x: x.movedim(-1, 1).swapdims(1, 2),
    ],
    ids=["argmax", "bucketize", "movedim"],
)
def test_operators_that_every_tensor_rank_does_whole(change: Callable[[Tensor], Tensor]) -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + self.down(change(self.up(x)))
            return result

    torch.manual_seed(0)
    check(Model([Changed()]), (2, 1, 1))


@pytest.mark.parametrize("wrap", [weight_norm, orthogonal], ids=["weight_norm", "orthogonal"])
def test_parametrized_weights_train_on_tensor_ranks(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    check(Model([wrap(nn.Linear(HIDDEN, HIDDEN))]), (2, 1, 1))


class Products(nn.Module):
    """Two projections by tensordot, and two at once by an einsum of three operands."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation
        self.up, self.down = (
            nn.Parameter(torch.randn(shape) * 0.1) for shape in ((HIDDEN, 4 * HIDDEN), (HIDDEN, 4 * HIDDEN))
        )
        self.turned = nn.Parameter(torch.randn(SIZE, HIDDEN, HEADS) * 0.1)
        self.first, self.second = (nn.Parameter(torch.randn(shape) * 0.1) for shape in ((HIDDEN, 8), (8, HIDDEN)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tensordot(functional.gelu(torch.tensordot(x, self.up, 1)), self.down, ([-1], [1]))
        x = x + torch.einsum(self.equation, x, self.first, self.second)
        heads: Tensor = x.unflatten(-1, (HEADS, SIZE))
        result: Tensor = x + torch.tensordot(heads, self.turned, ([3, -2], [0, 2]))
        return result


@pytest.mark.parametrize("equation", ["bsh,hr,ro->bso", "...h,hr,ro->...o", "...h, hr, rz"])
@pytest.mark.parametrize("mesh", slow_but([(2, 2, 1)], [(1, 1, 1), (2, 1, 1), (2, 2, 1)]))
def test_products_of_tensordot_and_of_three_operands_are_divided_and_counted(
    equation: str, mesh: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    model = Model([Products(equation) for _ in range(2)])
    check(model, mesh)
    program = compile_model(model, mesh)
    down = program.manifest.parameters["blocks.0.down"].placement["tensor"]
    assert down.dim == (1 if mesh[0] > 1 else None)
    products = VOCABULARY * HIDDEN + 2 * ((2 * 4 + mesh[0]) * HIDDEN * HIDDEN + 2 * 8 * HIDDEN)
    assert program.cost.evaluate(program.cost.flops) == 6 * (2 * 2 * LENGTH) * products


class Encoder(Model):
    """Torch's own encoder, which looks whether its mask is causal."""

    def __init__(self, window: int) -> None:
        super().__init__([])
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.window = window

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx) * math.sqrt(HIDDEN) + self.positions[: idx.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1]).to(x.dtype)
        x = self.encoder(x, mask.masked_fill(torch.ones_like(mask).tril(-self.window) > 0, float("-inf")))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(("window", "found"), [(LENGTH, "causal"), (3, "with mask (constant)")])
@pytest.mark.parametrize("mesh", [slow((1, 1, 1)), (2, 2, 1)])
def test_torchs_encoder_takes_any_mask(window: int, found: str, mesh: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    assert f"2 attentions: 2 softmax only {found} because of dropout" in check(Encoder(window), mesh)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Embedding(HIDDEN, HIDDEN, max_norm=1.0), "weight"),
        (lambda: spectral_norm(nn.Linear(HIDDEN, HIDDEN)), "parametrizations.weight.0._u"),
    ],
    ids=["max_norm", "spectral_norm"],
)
def test_modules_that_write_to_their_own_weights_are_refused_by_the_weight(
    make: Callable[[], nn.Module], name: str
) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x if name != "weight" else x.argmax(-1))
            return result

    with pytest.raises(ValueError, match=rf"blocks\.0\.inner.* forward writes to 'blocks\.0\.inner\.{name}'"):
        compile_model(Model([Writing()]), (1, 1, 1))


@pytest.mark.parametrize("assigned", [False, True])
def test_a_cache_that_a_first_call_fills_is_taken_once_it_is_full(assigned: bool) -> None:
    class Caching(nn.Module):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(LENGTH, HIDDEN), persistent=False)
            self.filled = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.filled:
                rows = torch.arange(LENGTH)[:, None].expand(-1, HIDDEN) / LENGTH
                self.cache = rows if assigned else self.cache.copy_(rows)
                self.filled = True
            return x * self.cache

    model = Model([Caching()])
    with pytest.raises(ValueError, match=r"blocks\.0\.cache'.* only the first call fills it, make that call"):
        compile_model(model, (1, 1, 1))
    model.blocks[0](torch.zeros(1, LENGTH, HIDDEN))
    check(model)
