"""Normalisation: functional aten operators, the same numbers, dropout numbered."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoptd.capture.export import capture
from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import Program
from autoptd.passes.normal_form.normalize import normalize
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.mesh import Mesh
from tests.interpret import run_graph
from tests.plain_models import HEADS, HIDDEN, LENGTH, VOCABULARY, PlainGPT

Forward = Callable[[Any, Tensor], Any]


class Small(nn.Module):
    """An embedding and a projection [2, 4, 6], then whatever `body` does with it."""

    def __init__(self, body: Forward) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.linear = nn.Linear(6, 6)
        self.body = body

    def forward(self, idx: Tensor) -> Tensor:
        result: Tensor = self.body(self, self.linear(self.embedding(idx))).square().mean()
        return result


def program_of(body: Forward) -> tuple[Small, dict[str, Tensor], Program]:
    torch.manual_seed(0)
    model = Small(body)
    inputs = {"idx": torch.randint(0, 10, (2, 4))}
    return model, inputs, normalize(capture(model, mesh=Mesh(1, 1, 1), example_inputs=inputs))


def operators(program: Program) -> list[Any]:
    return [node.target for node in program.stages[0].graph.nodes if node.op == "call_function"]


def matrix_transposes(m: Any, x: Tensor) -> Any:
    return (x @ x.mT) @ x + x.mH.adjoint()


def no_grad(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        scale = m.linear(x).abs()
        with torch.enable_grad():
            inner = m.linear(x)
    return x * scale + inner


def write_views(m: Any, x: Tensor) -> Any:
    x = x * 1.5
    early = x[:, 1:3]
    q, k, v = (x.view(2, 4, 3, 2).select(2, i) for i in range(3))
    k += 1
    q.mul_(2)
    x[:, 0] = 0
    x[:, 2:] *= 3
    rows = x.view(8, 6)
    rows[1].fill_(0.5)
    x[..., 3:].add_(x[..., :3])
    x.transpose(1, 2)[0].neg_()
    return x + early.sum() + v.sum() + q.exp().sum()


def write_pieces(m: Any, x: Tensor) -> Any:
    # Autograd refuses to write to one of several views, so that only tensors without gradient come here.
    places = torch.arange(24).view(2, 4, 3)
    first, second = places.split([1, 2], dim=-1)
    second.mul_(first)
    a, b, c, d = places.unbind(1)
    b.copy_(a + c)
    d.zero_()
    return x * places.repeat_interleave(2, -1) + first.sum() + (b - d).sum()


def write_whole(m: Any, x: Tensor) -> Any:
    y = x.clone()
    y += 1
    y.masked_fill_(torch.eye(4, 6, dtype=torch.bool), 0.0)
    y.clamp_(min=-1).relu_()
    z = torch.empty_like(y)
    z.copy_(y[:, :1])
    other = torch.zeros(2, 4, 6)
    other[:, 1] = x[:, 1]
    values, _ = y.topk(6, dim=-1)
    values /= values.sum(-1, keepdim=True) + 9
    return y + values + z * functional.silu(x * 1.0, inplace=True) + other


def reshapes(m: Any, x: Tensor) -> Any:
    flat = x.reshape(-1, 6).contiguous().view(2, -1, 6).expand(2, 4, 6).to(torch.float32)
    return flat.flatten(0, 1).unflatten(0, (2, 4))[:, :, :].float() + x[..., -3:].repeat(1, 1, 2) + x.new_ones(6)


def checkpointed(m: Any, x: Tensor) -> Any:
    first = checkpoint(m.linear, x, use_reentrant=True)
    return checkpoint(lambda y: m.linear(y).tanh(), first, use_reentrant=False)


def weight_transposed(m: Any, x: Tensor) -> Any:
    return x @ m.linear.weight.t() + x @ m.linear.weight.T


def grouped_attention(m: Any, x: Tensor) -> Any:
    q = x.view(2, 4, 3, 2).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q[:, :1], q[:, 1:2], is_causal=True, enable_gqa=True)


def several_products(m: Any, x: Tensor) -> Any:
    y = torch.einsum("bsh,hr,ro->bso", x, m.linear.weight, m.linear.weight)
    y = y + torch.einsum("...h, hr, r", x, m.linear.weight, m.linear.bias)[..., None]
    y = y + torch.ops.aten.einsum.default("bsh,hr,bsh->bsr", [x, m.linear.weight, x], path=[1, 2, 0, 1])
    y = y + torch.tensordot(x, m.linear.weight, ([2], [1])) + torch.einsum("...ij->...ji", x.mT)
    y = y + torch.einsum("...z, za", x, m.linear.weight)
    return y + torch.einsum("...a, a...", x, x.mT[0])[..., None]


def autocast_off(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return m.linear(x)


@pytest.mark.parametrize(
    "body",
    [
        matrix_transposes,
        no_grad,
        write_views,
        write_pieces,
        write_whole,
        reshapes,
        checkpointed,
        weight_transposed,
        grouped_attention,
        autocast_off,
        several_products,
    ],
)
def test_same_numbers(body: Forward) -> None:
    model, inputs, program = program_of(body)
    loss = model(**inputs)
    loss.backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    found = run_graph(program, weights, inputs)
    found.backward()
    assert torch.equal(found, loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name].grad, parameter.grad, rtol=1e-6, atol=1e-7, msg=name)
    for target in operators(program):
        schema = getattr(target, "_schema", None)
        assert schema is None or not schema.is_mutable, target
    program.stages[0].graph.lint()


def test_no_effect_operators_vanish() -> None:
    _, _, program = program_of(lambda m, x: functional.dropout(x.to(x.dtype).contiguous().view(2, 4, 6), 0.0) * 1.0)
    assert operators(program) == [
        aten.embedding.default,
        aten.linear.default,
        *([aten.pow.Tensor_Scalar] if aten.pow.Tensor_Scalar in operators(program) else [aten.square.default]),
        aten.mean.default,
    ]


def test_matmul_with_a_transposed_weight_is_linear() -> None:
    _, _, program = program_of(weight_transposed)
    assert operators(program).count(aten.linear.default) == 3
    assert aten.matmul.default not in operators(program)


def dora(m: Any, x: Tensor) -> Any:
    weight, eye = m.linear.weight, torch.eye(6)
    turned = functional.linear(eye, weight) + m.linear(eye)
    norms = torch.linalg.norm(weight.detach(), dim=1) + torch.linalg.norm(weight, dim=1)
    others = torch.linalg.norm(weight.detach(), 1.0, 1) + torch.linalg.norm(weight.detach(), "fro", (0, 1))
    return x @ turned * norms + others


def test_products_of_an_identity_and_norms_without_gradients_are_written_out() -> None:
    """A product with a bias stays, and so do a norm with a gradient, which is 0 at 0, and norms of another order."""
    model, inputs, program = program_of(dora)
    found = operators(program)
    assert found.count(aten.linear.default) == 2  # one before `dora`
    assert found.count(aten.sqrt.default) == 1
    assert found.count(aten.linalg_norm.default) == 2
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    run_graph(program, weights, inputs).backward()
    model(**inputs).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name].grad, parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_dropouts_are_numbered_in_order() -> None:
    model = PlainGPT(dropout=0.1)
    inputs = {name: torch.randint(0, VOCABULARY, (2, LENGTH)) for name in ("idx", "targets")}
    program = normalize(capture(model, mesh=Mesh(1, 1, 1), example_inputs=inputs))
    drops = (kernels.dropout, kernels.scaled_softmax)
    nodes = [n for n in program.stages[0].graph.nodes if n.target in drops]
    numbers = [n.args[3] if n.target is kernels.dropout else n.kwargs["operator"] for n in nodes]
    assert numbers == list(range(7))
    assert [n.target is drops[1] for n in nodes] == [False, True, False, False, True, False, False]
    scale = 1 / math.sqrt(HIDDEN // HEADS)
    assert nodes[1].kwargs == {"is_causal": True, "scale": scale, "p": 0.1, "operator": 1}
    (weights,) = nodes[1].users
    assert [n.target for n in (nodes[1].args[1], weights)] == [aten.matmul.default] * 2
    assert all(node.args[0].name == "rank" for node in nodes)
    assert program.log[-1].endswith("7 dropouts")


def test_dropout_is_identity_outside_training() -> None:
    model, inputs, program = program_of(lambda m, x: functional.dropout(x, 0.5, m.training))
    weights = dict(model.named_parameters())
    assert torch.equal(run_graph(program, weights, inputs, training=False), model.eval()(**inputs))
    assert not torch.equal(run_graph(program, weights, inputs), model(**inputs))


def test_attention_dropout_repeats_grouped_heads() -> None:
    def body(m: Any, x: Tensor) -> Any:
        q = x.view(2, 4, 3, 2).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, q[:, :1], q[:, 1:2], dropout_p=0.5, enable_gqa=True)

    _, _, program = program_of(body)
    (node,) = [n for n in program.stages[0].graph.nodes if n.target is kernels.scaled_softmax]
    q, transposed = node.args[1].args
    (product,) = node.users
    shapes = [list(n.meta["val"].shape) for n in (q, transposed.args[0], product.args[1], product)]
    assert shapes == [[2, 3, 4, 2]] * 4


def test_a_learned_mask_is_added_outside_of_the_kernel() -> None:
    """Masks get no gradient in it. Their -inf still hide keys there, so that a blind query gives zeros, not nan."""
    hidden = torch.ones(4, 4, dtype=torch.bool).triu()

    def body(m: Any, x: Tensor) -> Any:
        q = x.view(2, 4, 3, 2).transpose(1, 2)
        mask = m.linear.weight[:4, :4].masked_fill(hidden, -math.inf)
        return functional.scaled_dot_product_attention(q, q, q, mask, dropout_p=0.5)

    model, inputs, program = program_of(body)
    (node,) = [n for n in program.stages[0].graph.nodes if n.target is kernels.scaled_softmax]
    assert node.args[1].target is aten.add.Tensor
    assert node.args[2].meta["val"].dtype == torch.bool
    weights = dict(model.named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", without_dropout)
        expected = model(**inputs)
    found = run_graph(program, weights, inputs, training=False)
    torch.testing.assert_close(found, expected)
    own, plain = (torch.autograd.grad(loss, list(weights.values())) for loss in (found, expected))
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(one, other)


def without_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout_p: float) -> Tensor:
    """A blind query gives zeros."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask
    blind = (mask == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0) @ v


def test_deterministic() -> None:
    texts = []
    for _ in range(2):
        inputs = {name: torch.randint(0, VOCABULARY, (2, LENGTH)) for name in ("idx", "targets")}
        program = normalize(capture(PlainGPT(dropout=0.1), mesh=Mesh(1, 1, 1), example_inputs=inputs))
        texts.append([(n.name, str(n.target), n.args, info(n).line) for n in program.stages[0].graph.nodes])
    assert str(texts[0]).split(" at 0x")[0] == str(texts[1]).split(" at 0x")[0]


def test_pure() -> None:
    model, inputs, program = program_of(write_views)
    captured = capture(model, mesh=Mesh(1, 1, 1), example_inputs=inputs)
    text = str(captured.stages[0].graph)
    normalize(captured)
    assert str(captured.stages[0].graph) == text
    assert isinstance(program.stages[0].graph, fx.Graph)


def test_parameters_without_gradient_are_named() -> None:
    _, _, program = program_of(lambda m, x: m.embedding.weight.detach().sum() + m.linear.bias)
    assert "no gradient reaches embedding.weight, linear.weight (2 parameters)" in program.log[-1]


def noise(m: Any, x: Tensor) -> Any:
    return x[:, torch.randperm(x.shape[1])]


def overlapping(m: Any, x: Tensor) -> Any:
    x = x * 2
    x.as_strided((2, 2), (1, 1)).zero_()
    return x


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (noise, ["test_normalize.py:", "randperm", "dropout"]),
        (overlapping, ["test_normalize.py:", "in place", "as_strided"]),
    ],
)
def test_refusals(body: Forward, words: list[str]) -> None:
    with contextlib.suppress(KeyError), pytest.raises(ValueError, match=words[0]) as found:
        program_of(body)
    for word in words:
        assert word in str(found.value)


@pytest.mark.parametrize("times", [(1, 1, 1), (1, 2, 1), (2, 1, 3), (3, 1, 1, 1), (2, 2, 2, 2)])
def test_tiles_are_expanded(times: tuple[int, ...]) -> None:
    """``repeat`` has no sharding rule; what it is made of has. Its result is memory of its own."""

    def body(m: Any, x: Tensor) -> Any:
        tiled = x.repeat(*times)
        tiled.mul_(torch.arange(tiled.numel()).view(tiled.shape).cos())
        return tiled.sum() * x

    model, inputs, program = program_of(body)
    assert aten.repeat.default not in operators(program)
    weights = dict(model.named_parameters())
    torch.testing.assert_close(run_graph(program, weights, inputs), model(**inputs))
