"""Fusion: what is joined, that it means the same, and what is left alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autoptd
from autoptd.passes.cost.work import forward_work
from autoptd.passes.fusion import rules
from autoptd.passes.fusion.patterns import Call, Match, is_call
from autoptd.passes.fusion.rules import fuse_operators
from autoptd.passes.ir.names import operator_word
from autoptd.passes.ir.nodes import change_info, info
from autoptd.passes.ir.program import Program
from autoptd.passes.operators.table import OPERATORS
from autoptd.runtime import aten, kernels
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.mesh import Mesh
from samples.gpt import GPT, GPTConfig
from tests.generated_graphs import GraphWriter
from tests.interpret import run_stage
from tests.marks import cover_pairs, name_case, slow

QUICK, ALL = 150, 500
STEPS = 12


def targets(program: Program | autoptd.CompiledProgram) -> Counter[Any]:
    return Counter(n.target for s in program.stages for n in s.graph.nodes if n.op == "call_function")


def run(program: Program, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """The loss of a generated program and every gradient, training, on weights drawn from `seed` in float64."""
    (stage,) = program.stages
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: Any) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {n: draw(p.shape).requires_grad_(p.requires_grad) for n, p in stage.parameters.items()}
    x = draw(next(n for n in stage.graph.nodes if info(n).role == "input").meta["val"].shape)
    x.requires_grad_()
    loss = run_stage(stage.graph, tensors, {"rank": Rank.local(Mesh(1, 1, 1)), "x": x})
    loss.backward()
    zeros = {name: torch.zeros_like(t) for name, t in tensors.items() if t.grad is None}
    found = {name: t.grad for name, t in tensors.items() if t.grad is not None}
    return {"loss": loss.detach(), "x": x.grad if x.grad is not None else torch.zeros_like(x), **found, **zeros}


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    scale = max(float(value.abs().max()) for name, value in expected.items() if name != "loss")
    worst = max(float((found[n] - expected[n]).abs().max()) for n in expected if n != "loss") / max(scale, 1e-300)
    loss = float((found["loss"] - expected["loss"]).abs()) / max(1.0, float(expected["loss"].abs()))
    return max(worst, loss)


# Meaning


@pytest.mark.parametrize("start", range(0, QUICK, 50))
def test_generated_graphs_mean_the_same(start: int) -> None:
    check_generated(range(start, start + 50))


@pytest.mark.slow
def test_all_generated_graphs_mean_the_same() -> None:
    check_generated(range(QUICK, ALL))


def check_generated(seeds: range) -> None:
    fused: Counter[Any] = Counter()
    for seed in seeds:
        program = GraphWriter(seed, torch.float64).program(STEPS)
        rewritten = fuse_operators(program)
        fused.update(targets(rewritten))
        error = largest_error(run(rewritten, torch.float64), run(program, torch.float64))
        assert error < 1e-12, f"seed {seed}: {error:.1e}\n{program.stages[0].graph}\n{rewritten.stages[0].graph}"
    for kernel in (
        kernels.bias_gelu,
        kernels.bias_dropout_add,
        kernels.layer_norm,
        kernels.add_layer_norm,
        kernels.gated_product,
        kernels.rotary_embedding,
        kernels.rms_norm,
        kernels.add_rms_norm,
    ):
        assert fused[kernel], f"{kernel.__name__} was never tried"


@pytest.mark.parametrize("count", [QUICK, slow(ALL)])
def test_bfloat16_is_no_worse_than_the_unfused_chains(count: int) -> None:
    """Errors against float64, summed over graphs: each alone is chance."""
    plain = fused = 0.0
    for seed in range(count):
        exact = run(GraphWriter(seed, torch.float64).program(STEPS), torch.float64)
        program = GraphWriter(seed, torch.bfloat16).program(STEPS)
        rewritten = fuse_operators(program)
        if targets(rewritten) == targets(program):
            continue
        errors = [
            largest_error({n: v.double() for n, v in run(each, torch.bfloat16).items()}, exact)
            for each in (program, rewritten)
        ]
        if errors[0] < 1:  # else the unfused one is lost already
            plain, fused = plain + errors[0], fused + errors[1]
    assert 0 < fused <= plain


# What is joined


class Small(nn.Module):
    """Two projections [2, 4, 8] of an embedding, and what `body` makes of them."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.body = body

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedding(idx)
        return self.body(self, self.one(x), self.two(x)).square().mean()


def fused(body: Callable[[Any, Tensor, Tensor], Tensor], **options: Any) -> Counter[Any]:
    inputs = {"idx": torch.randint(0, 10, (2, 4))}
    program = autoptd.compile(Small(body), mesh=(1, 1, 1), example_inputs=inputs, num_microbatches=1, **options)
    return Counter(n.target for n in program.stages[0].graph.nodes if n.op == "call_function")


def mean_square(x: Tensor, power: float = 2) -> Tensor:
    return x.pow(power).mean(-1, keepdim=True)


def narrow(m: Any, x: Tensor, width: int = 2) -> Tensor:
    """A product of `width` inputs and eight outputs."""
    return functional.linear(x[..., :width], m.one.weight[:, :width])


def turn(x: Tensor) -> Tensor:
    return torch.cat([-x[..., 4:], x[..., :4]], -1)


def turn_chunks(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotary(*shape: int, turn: Callable[[Tensor], Tensor] = turn) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """A rotary embedding by tables of this shape, of the numbers 0, 1, ..."""

    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        angles = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
        return x * angles.cos() + turn(x) * angles.sin() + y

    return body


def rounded_gelu(x: Tensor, constant: float = 0.79788456, cube: float = 0.044715) -> Tensor:
    """As BLOOM writes it."""
    return x * 0.5 * (1.0 + torch.tanh(constant * x * (1 + cube * x * x)))


JOINED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], Any]] = {
    "gelu": (lambda m, x, y: functional.gelu(x) + y, kernels.bias_gelu),
    "gelu written with erf": (lambda m, x, y: x * 0.5 * (1 + torch.erf(x / 2**0.5)) + y, kernels.bias_gelu),
    "gelu of a matrix of rows": (
        lambda m, x, y: functional.gelu(torch.addmm(m.scale, x.view(-1, 8), m.one.weight).view(x.shape)) + y,
        kernels.bias_gelu,
    ),
    "gelu of a sum": (lambda m, x, y: functional.gelu(x + m.scale) + y, kernels.bias_gelu),
    "silu and product": (lambda m, x, y: functional.silu(x) * y, kernels.gated_product),
    "product and written silu": (lambda m, x, y: y * (torch.sigmoid(x) * x), kernels.gated_product),
    "gelu and product": (lambda m, x, y: y * functional.gelu(x, approximate="tanh"), kernels.gated_product),
    "dropout and add": (lambda m, x, y: functional.dropout(x, 0.1) + y, kernels.bias_dropout_add),
    "add and dropout": (lambda m, x, y: y + functional.dropout(x, 0.1), kernels.bias_dropout_add),
    "norm": (lambda m, x, y: m.norm(x) * y, kernels.layer_norm),
    "norm of a sum with a factor": (lambda m, x, y: m.norm(torch.add(x, y, alpha=2)), kernels.layer_norm),
    "add and norm": (lambda m, x, y: m.norm(x + y), kernels.add_layer_norm),
    "add and norm of its rows": (lambda m, x, y: m.norm((x + y).reshape(-1, 8)), kernels.add_layer_norm),
    "dropout of a sum": (lambda m, x, y: functional.dropout(x.exp() + m.scale, 0.1) * y, kernels.bias_dropout_add),
    "norm of dropout and add": (lambda m, x, y: m.norm(functional.dropout(x, 0.1) + y) + y, kernels.add_layer_norm),
    "rms norm": (lambda m, x, y: m.scale * (x * torch.rsqrt(mean_square(x) + 1e-6)) + y, kernels.rms_norm),
    "torch's rms norm": (lambda m, x, y: functional.rms_norm(x, (8,), m.scale) + y, kernels.rms_norm),
    "add and torch's rms norm": (
        lambda m, x, y: functional.rms_norm(x + y, (8,), m.scale, 1e-3) + y,
        kernels.add_rms_norm,
    ),
    "rotary": (rotary(1, 4, 8), kernels.rotary_embedding),
    "rotary by tables of fewer dimensions": (rotary(4, 8), kernels.rotary_embedding),
    "rotary by one row for all": (rotary(8), kernels.rotary_embedding),
    "rotary of chunks": (rotary(4, 8, turn=turn_chunks), kernels.rotary_embedding),
    "a low-rank product and add": (lambda m, x, y: narrow(m, x) * 0.5 + y, kernels.add_linear),
    "add and a low-rank product": (lambda m, x, y: y + narrow(m, x), kernels.add_linear),
    "add and rms norm": (lambda m, x, y: (x + y) + m.scale * ((x + y) * torch.rsqrt(mean_square(x + y) + 1e-6)), None),
}


@pytest.mark.parametrize("name", JOINED)
def test_a_chain_becomes_one_kernel(name: str) -> None:
    body, kernel = JOINED[name]
    found = fused(body)
    if kernel is None:  # three sums that are equal, and no one value: each norm would be of another
        assert not any(found[k] for k in (kernels.add_rms_norm, kernels.rms_norm))
    else:
        assert found[kernel] == 1, found


APART: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "another approximation": lambda m, x, y: x * torch.sigmoid(1.702 * x) + y,
    "another constant": lambda m, x, y: rounded_gelu(x, 0.8) + y,
    "another cube": lambda m, x, y: rounded_gelu(x, cube=0.0447) + y,
    "a rounded constant without a bias": lambda m, x, y: rounded_gelu(x * y) + y,
    "a rounded constant of what two read": lambda m, x, y: rounded_gelu(x) * x + y,
    "a gate read twice": lambda m, x, y: (lambda g: g * y + g)(functional.silu(x)),
    "a mean of cubes": lambda m, x, y: m.scale * (x * torch.rsqrt(mean_square(x, 4) + 1e-6)) + y,
    "a mean over tokens": lambda m, x, y: m.scale * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)) + y,
    "rotary by larger tables": lambda m, x, y: rotary(2, 4, 8)(m, x[:1], y),
    "rotary by one column": rotary(4, 1),
    "halves of another tensor": lambda m, x, y: rotary(4, 8, turn=lambda z: turn_chunks(z + 1))(m, x, y),
    "halves in their order": rotary(4, 8, turn=lambda x: torch.cat([-x.chunk(2, -1)[0], x.chunk(2, -1)[1]], -1)),
    "a norm of two dimensions": lambda m, x, y: functional.layer_norm(x + y, (4, 8)),
    "a product of full rank and add": lambda m, x, y: narrow(m, x, 8) * 0.5 + y,
    "a low-rank product that two read": lambda m, x, y: (lambda z: z.exp() + (z + y))(narrow(m, x)),
    "a low-rank product times a tensor": lambda m, x, y: narrow(m, x) * m.scale + y,
    "a norm without a weight": lambda m, x, y: functional.layer_norm(x + y, (8,)),
}


@pytest.mark.parametrize("constant", [0.79788456, 0.7978845608, 0.7979])
@pytest.mark.parametrize(
    "source",
    [
        lambda m, x: x,
        lambda m, x: torch.addmm(m.scale, x.view(-1, 8), m.one.weight).view(x.shape),
        lambda m, x: m.norm(x) + m.scale,
    ],
    ids=["linear", "addmm", "sum"],
)
def test_a_rounded_constant_is_not_replaced(source: Callable[[Any, Tensor], Tensor], constant: float) -> None:
    torch.manual_seed(0)
    model = Small(lambda m, x, y: rounded_gelu(source(m, x), constant) + m.norm(y) * m.scale)
    inputs = {"idx": torch.randint(0, 10, (2, 4))}
    program = autoptd.compile(model, mesh=(1, 1, 1), example_inputs=inputs, num_microbatches=1)
    (node,) = (n for n in program.stages[0].graph.nodes if n.target is kernels.bias_gelu)
    assert node.kwargs == {"approximate": "tanh", "coefficient": constant}
    report = program.verify()
    assert report.loss_error <= 1e-12, report
    assert report.worst[1] <= 1e-12, report


@pytest.mark.parametrize("name", APART)
def test_near_chains_are_not_fused(name: str) -> None:
    body = APART[name]
    found = fused(body)
    assert found == fused(body, fuse=False), found


@pytest.mark.parametrize(
    ("turn", "shape", "layout"),
    cover_pairs([turn, turn_chunks], [(8,), (4, 8), (1, 8), (1, 4, 8)], ["sbh", "bsh"]),
    ids=name_case,
)
def test_rotary_tables_are_broadcast(turn: Callable[[Tensor], Tensor], shape: tuple[int, ...], layout: str) -> None:
    """Over sequences and heads: q and k are [2, 1 head, 4 tokens, 8]."""

    def heads(m: Any, x: Tensor, y: Tensor) -> Tensor:
        q, k = (z.view(2, 4, 1, 8).transpose(1, 2) for z in (x, y))
        zero = torch.zeros(())
        return rotary(*shape, turn=turn)(m, q, zero) @ rotary(*shape, turn=turn)(m, k, zero).transpose(-2, -1)

    torch.manual_seed(0)
    inputs = {"idx": torch.randint(0, 10, (2, 4))}
    program = autoptd.compile(Small(heads), (1, 1, 1), example_inputs=inputs, num_microbatches=1, layout=layout)
    assert [n.target for n in program.stages[0].graph.nodes].count(kernels.rotary_embedding) == 2
    assert program.verify().passed


def test_whole_numbers_are_no_activation() -> None:
    class Hashed(Small):
        def forward(self, idx: Tensor) -> Tensor:
            return super().forward((idx * 3 + 1) % 10)

    inputs = {"idx": torch.randint(0, 10, (2, 4))}
    model = Hashed(lambda m, x, y: functional.gelu(x) + y)
    program = autoptd.compile(model, mesh=(1, 1, 1), example_inputs=inputs, num_microbatches=1)
    assert program.verify().passed
    (entry,) = [line for line in program.log if line.startswith("fuse_operators")]
    assert entry.startswith("fuse_operators 1 bias_gelu; ")


def test_a_bias_that_two_read_stays_in_its_linear() -> None:
    found = fused(lambda m, x, y: functional.gelu(x) * functional.gelu(x).detach() + x + y)
    assert not found[kernels.bias_gelu]
    assert found[aten.gelu.default] >= 1


def test_half_precision_statistics_keep_their_dtype() -> None:
    """A norm that sums in bfloat16 is another than ours, which sums in float32."""

    def narrow(m: Any, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = m.scale * (x * torch.rsqrt(mean_square(x) + 1e-6)) + y
        return result

    def wide(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = x.float()
        result: Tensor = m.scale * (z * torch.rsqrt(mean_square(z) + 1e-6)).to(x.dtype) + y
        return result

    for body, expected in ((narrow, 0), (wide, 1)):
        model = Small(body).to(torch.bfloat16)
        inputs = {"idx": torch.randint(0, 10, (2, 4))}
        program = autoptd.compile(model, mesh=(1, 1, 1), example_inputs=inputs, num_microbatches=1)
        found = [n for n in program.stages[0].graph.nodes if n.target is kernels.rms_norm]
        assert len(found) == expected


@pytest.mark.parametrize("tensor", [1, 2])
def test_parameters_in_half_precision_are_read_by_what_adds_to_their_sums(tensor: int) -> None:
    """Transposed weights as well, and the table of positions, which every tensor rank has whole."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(10, 8), nn.Embedding(4, 8)
            self.weight, self.bias = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8))

        def forward(self, idx: Tensor) -> Tensor:
            x = self.tokens(idx) + self.positions(torch.arange(4))
            x = torch.addmm(self.bias, x.view(-1, 8), self.weight)
            return ((x @ self.weight) @ self.tokens.weight.t()).float().square().mean()

    torch.manual_seed(0)
    inputs = {"idx": torch.randint(0, 10, (2, 4))}
    for dtype, wanted in ((torch.bfloat16, True), (torch.float32, False)):
        program = autoptd.compile(Model().to(dtype), mesh=(tensor, 1, 1), example_inputs=inputs, num_microbatches=1)
        found = {operator_word(n.target) for n in program.stages[0].graph.nodes if n.op == "call_function"}
        assert ("lookup" in found) == wanted
        assert not wanted or not {"addmm", "mm", "matmul"} & found, found
        assert program.verify().passed


@pytest.mark.parametrize("tensor", [1, 2])
def test_no_float32_copy_of_half_precision_logits_is_made(tensor: int) -> None:
    """The loss, float32 as the model's, comes from the logits as they are."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

        def forward(self, idx: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.embedding(idx)).float()
            return functional.cross_entropy(logits.view(-1, 50), labels.view(-1))

    torch.manual_seed(0)
    model = Cast().to(torch.bfloat16)
    batch = {name: torch.randint(0, 50, (2, 4)) for name in ("idx", "labels")}
    program = autoptd.compile(model, mesh=(tensor, 1, 1), example_inputs=batch, num_microbatches=1)
    nodes = [n for n in program.stages[0].graph.nodes if n.op == "call_function"]
    assert not [n for n in nodes if n.target is aten.to.dtype]
    (loss,) = (n for n in nodes if n.target is kernels.cross_entropy)
    assert loss.meta["val"].dtype == torch.float32
    if tensor == 1:
        expected, found = model(**batch), program.bind()(**batch)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "ours"), [({}, True), ({"reduction": "sum"}, True), ({"label_smoothing": 0.1}, False)], ids=str
)
def test_a_whole_loss(options: dict[str, Any], ours: bool) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

        def forward(self, idx: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.embedding(idx))
            return functional.cross_entropy(logits.view(-1, 50), labels.view(-1), **options)

    torch.manual_seed(0)
    model = Head().double()
    batch = {name: torch.randint(0, 50, (2, 4)) for name in ("idx", "labels")}
    batch["labels"][0, 1] = -100
    program = autoptd.compile(model, mesh=(1, 1, 1), example_inputs=batch, num_microbatches=1)
    assert any(n.target is kernels.cross_entropy for n in program.stages[0].graph.nodes) is ours
    parallel = program.bind()
    expected, found = model(**batch), parallel(**batch)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for one, other in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)


def test_nothing_is_joined_across_regions_of_recomputation() -> None:
    """A bias with its GeLU inside a region, yes; a sum with a norm of the next region, no."""
    writer = GraphWriter(0, torch.float64)
    x = writer.values[0]
    inside = writer.call(aten.gelu.default, writer.call(aten.add.Tensor, x, writer.weight(8)))
    total = writer.call(aten.add.Tensor, inside, x)
    norm = writer.call(aten.layer_norm.default, total, [8], writer.weight(8))
    writer.values.append(norm)
    program = writer.program(0)
    for node in (n for n in program.stages[0].graph.nodes if n.op == "call_function"):
        change_info(node, recompute="second" if node is norm else "first")
    found = targets(fuse_operators(program))
    assert found[kernels.bias_gelu] == 1
    assert found[kernels.layer_norm] == 1
    assert not found[kernels.add_layer_norm]


@pytest.mark.parametrize(("layers", "tied", "dropout"), [(0, True, 0.0), (1, True, 0.1), (2, False, 0.1)])
def test_a_sum_without_gradient_is_not_joined_with_a_trained_norm(layers: int, tied: bool, dropout: float) -> None:
    """Of frozen embeddings and first layers: the kernel would hand the sum the norm's gradient, which is partial."""
    torch.manual_seed(0)
    config = GPTConfig(64, 16, n_layer=layers + 2, n_head=4, n_embd=32, dropout=dropout, tie_weights=tied)
    trained, frozen = GPT(config), GPT(config)
    for part in (frozen.wte, frozen.wpe, *list(frozen.h)[:layers]):
        part.requires_grad_(False)
    programs = [autoptd.compile(model, mesh=(2, 1, 1), num_microbatches=2) for model in (trained, frozen)]
    joined, left = (targets(program)[kernels.add_layer_norm] for program in programs)
    assert left == joined - 1, "every other sum is joined with its norm"
    for program in (programs[1], autoptd.compile(frozen, mesh=(2, 2, 1), num_microbatches=2)):
        report = program.verify()
        assert report.passed, report


def test_a_kernel_that_gives_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(x: Tensor, bias: Tensor) -> Tensor:
        return x[..., :1]

    monkeypatch.setattr(kernels, "bias_gelu", narrow)
    with pytest.raises(ValueError, match=r"returns .* for gelu.*expected"):
        fused(lambda m, x, y: functional.gelu(x) + y)


def test_a_new_kernel_is_one_function_one_rule_and_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def double_tanh(x: Tensor) -> Tensor:
        return 2 * torch.tanh(x)

    def match(node: fx.Node) -> Match | None:
        x: Any = node.args[0]
        if not (node.args[1] == 2 and is_call(x, aten.tanh.default)):
            return None
        return Match(Call(double_tanh, (x.args[0],), node), (x,))

    double_tanh.__module__ = kernels.__name__
    monkeypatch.setattr(kernels, "double_tanh", double_tanh, raising=False)
    monkeypatch.setattr(rules, "RULES", (*rules.RULES, ((aten.mul.Tensor,), match)))
    monkeypatch.setitem(OPERATORS, double_tanh, OPERATORS[kernels.bias_gelu])
    model, inputs = Small(lambda m, x, y: torch.tanh(x) * 2 + y), {"idx": torch.randint(0, 10, (2, 4))}
    program = autoptd.compile(model, mesh=(1, 1, 1), example_inputs=inputs, num_microbatches=1)
    assert "kernels.double_tanh(one)" in program.texts[0]
    assert program.simulate("dgx-a100").step_seconds > 0
    assert program.verify().passed


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_fusion_logs_saved_launches_and_bytes(mesh: tuple[int, int, int]) -> None:
    """The launches that are counted where each operator is one, and bytes that no longer move."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=4, n_embd=32)
    plain, program = (autoptd.compile(GPT(config), mesh=mesh, num_microbatches=2, fuse=f) for f in (False, True))
    (entry,) = [line for line in program.log if line.startswith("fuse_operators")]
    found = re.search(r"; (\d+) -> (\d+) launches, ([\d,]+) -> ([\d,]+) bytes moved a microbatch$", entry)
    assert found is not None
    before, after, *moved = (int(number.replace(",", "")) for number in found.groups())
    assert (before, after) == tuple(
        sum(forward_work(n).launches for s in p.stages for n in s.graph.nodes) for p in (plain, program)
    )
    assert before - after >= 2 * 2, "a residual sum and a GeLU in each layer"
    assert moved[1] < moved[0]


# Texts


def test_golden(golden: Callable[[str, str], None]) -> None:
    """One layer of a GPT on two tensor ranks: biases stand behind the all-reduce, inside the kernels."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=4, n_embd=32, dropout=0.1)
    texts = {
        fuse: autoptd.compile(GPT(config), mesh=(2, 1, 1), num_microbatches=1, fuse=fuse).texts[0]
        for fuse in (False, True)
    }
    golden("fusion_before.txt", texts[False])
    golden("fusion_after.txt", texts[True])


def test_names_stay_those_of_the_model() -> None:
    program = GraphWriter(5, torch.float64).program(STEPS)
    before = {node.name for node in program.stages[0].graph.nodes}
    after = {node.name for node in fuse_operators(program).stages[0].graph.nodes}
    assert all(name in before or name.endswith("_pair") for name in after)
    assert isinstance(program.stages[0].graph, fx.Graph)
