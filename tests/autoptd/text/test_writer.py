"""The program text: golden, deterministic, and meaning what the graph means, bit for bit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autoptd.passes.ir.program import Program, Stage
from autoptd.runtime import aten, kernels
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Input, Manifest, Output, StageInterface
from autoptd.runtime.program.mesh import Coordinates, Mesh
from autoptd.runtime.program.program_text import read_program
from autoptd.runtime.program.schedule import make_schedule
from autoptd.text.call_arguments import shorten_call
from autoptd.text.reader import trace_program
from autoptd.text.writer import emit_texts
from tests.interpret import run_stage
from tests.two_stages import GraphMaker, random_tensors, two_stages

F32, F64, I64 = torch.float32, torch.float64, torch.int64
META = torch.device("meta")


@torch.library.custom_op("autoptd_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def emit_two_stages(tensor: int = 2) -> tuple[str, ...]:
    program, manifest, schedule = two_stages(tensor)
    return emit_texts(program, manifest, schedule, title="tiny GPT")


def one_stage(maker: GraphMaker, inputs: dict[str, Tensor]) -> tuple[Program, Manifest]:
    """The graph of `maker` as a whole program on one device."""
    mesh, output = Mesh(1, 1, 1), Output("tensor")
    stage = Stage(maker.graph, {name: maker.parameters[name] for name in maker.used}, fx.Graph())
    listed = tuple(Input(name, tuple(x.shape), x.dtype, None) for name, x in inputs.items())
    interface = StageInterface(0, (), (), tuple(inputs), tuple(maker.used))
    manifest = Manifest(mesh, "1f1b", 1, 1, 1, True, 0, listed, (interface,), maker.parameters, {}, output)
    return Program(mesh, (stage,), listed, output), manifest


def on_cpu(*graphs: fx.Graph) -> None:
    """Let the factories of captured graphs make real tensors."""
    for graph in graphs:
        for node in graph.nodes:
            node.kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in node.kwargs.items()}


def emit_one_stage(program: Program, manifest: Manifest) -> str:
    (text,) = emit_texts(program, manifest, make_schedule("1f1b", 1, 1), title="")
    return text


@pytest.mark.parametrize("rank", [0, 1])
def test_golden(rank: int, golden: Callable[[str, str], None]) -> None:
    golden(f"two_stages_program_{rank:02}.py", emit_two_stages()[rank])


def test_is_deterministic() -> None:
    assert emit_two_stages() == emit_two_stages()


def test_stays_under_the_width() -> None:
    assert max(len(line) for text in emit_two_stages() for line in text.splitlines()) <= 110


def test_text_means_the_graph_bitwise() -> None:
    program, manifest, _ = two_stages(tensor=1)
    texts = emit_two_stages(tensor=1)
    tensors = random_tensors(manifest)
    stages = [read_program(text, f"bitwise_{i}.py") for i, text in enumerate(texts)]
    ids = torch.randint(0, 30, (1, 8))
    rank = Rank.local(manifest.mesh, Coordinates(0, 0, 0))
    constants = stages[0].constants(tensors)
    on_cpu(program.stages[0].constants, program.stages[1].graph)
    expected = run_stage(program.stages[0].constants, tensors, {})
    assert torch.equal(constants["constant.bias"], expected["constant.bias"])

    p = {**tensors, **constants}
    sent = stages[0].stages[0](rank, p, ids)
    loss = stages[1].stages[1](rank, p, *sent, ids)
    graph_sent = run_stage(program.stages[0].graph, p, {"rank": rank, "ids": ids})
    boundary = dict(zip(("h", "q"), graph_sent, strict=True))
    graph_loss = run_stage(program.stages[1].graph, p, {"rank": rank, **boundary, "targets": ids})
    assert all(torch.equal(a, b) for a, b in zip(sent, graph_sent, strict=True))
    assert torch.equal(loss, graph_loss)


def test_edited_text_runs() -> None:
    _, manifest, _ = two_stages(tensor=1)
    _, other = emit_two_stages(tensor=1)
    line = next(line for line in other.splitlines() if line.startswith("    new = "))
    edited = other.replace(line, line.replace("1.5", "0.0"))
    p = random_tensors(manifest)
    rank = Rank.local(manifest.mesh)
    ids, h, q = torch.arange(8)[None], torch.randn(1, 8, 16), torch.randn(1, 4, 8, 4)
    loss = read_program(edited, "edited.py").stages[1](rank, p, h, q, ids)
    plain = torch.nn.functional.cross_entropy(h[0] @ p["wte.weight"].T, ids[0])
    torch.testing.assert_close(loss, plain)
    assert not torch.equal(read_program(other, "other.py").stages[1](rank, p, h, q, ids), loss)


CALLS: list[tuple[str, Any, list[Any], dict[str, Any]]] = [
    ("aten.add(x, 2)", aten.add.Tensor, ["x", 2], {}),
    ("aten.add(x, 1, alpha=3)", aten.add.Tensor, ["x", 1], {"alpha": 3}),
    ("aten.pow(x, 3.0)", aten.pow.Tensor_Scalar, ["x", 3.0], {}),
    ("aten.pow(2.0, x)", aten.pow.Scalar, [2.0, "x"], {}),
    ('aten.masked_fill(x, mask, float("-inf"))', aten.masked_fill.Scalar, ["x", "mask", -torch.inf], {}),
    ('aten.masked_fill(x, mask, float("nan"))', aten.masked_fill.Scalar, ["x", "mask", torch.nan], {}),
    ("aten.full([2, 3], -0.0, dtype=torch.float64, device=rank.device)",
     aten.full.default, [[2, 3], -0.0], {"dtype": F64, "device": META, "pin_memory": False}),
    ("aten.arange(4, device=rank.device)", aten.arange.default, [4], {"device": META}),
    ("aten.cat([x, x], dim=-1)", aten.cat.default, [["x", "x"], -1], {}),
    ("aten.split(x, [1, 2], dim=1)[1]", aten.split.sizes, ["x", [1, 2], 1], {}),
    ("aten.sum(x, [0], dtype=torch.float64)", aten.sum.dim_IntList, ["x", [0]], {"dtype": F64}),
    ("aten.mean(x, [0], keepdim=True)", aten.mean.dim, ["x", [0], True], {}),
    ("aten.index(x, [None, ids])", aten.index.Tensor, ["x", [None, "ids"]], {}),
    ("aten.to(x, torch.float64)", aten.to.dtype, ["x", F64], {}),
    ("aten.clone(x, memory_format=torch.contiguous_format)",
     aten.clone.default, ["x"], {"memory_format": torch.contiguous_format}),
    ('aten.einsum("ij,kj->ik", [x, x])', aten.einsum.default, ["ij,kj->ik", ["x", "x"]], {}),
    ("aten.pad(x, [0, 1], value=-100.0)", aten.pad.default, ["x", [0, 1], "constant", -100.0], {}),
    ("aten.slice(x, dim=1, start=1, end=9223372036854775807)", aten.slice.Tensor, ["x", 1, 1, 2**63 - 1], {}),
    ("torch.ops.autoptd_test.twice(x)", torch.ops.autoptd_test.twice.default, ["x"], {}),
    ("kernels.dropout(rank, x, p=0.5, operator=7)", kernels.dropout, ["rank", "x", 0.5, 7], {"sample": 0}),
    ("x[0]", operator.getitem, ["x", 0], {}),
]  # fmt: skip


@pytest.mark.parametrize(("written", "target", "args", "kwargs"), CALLS, ids=[c[0] for c in CALLS])
def test_call(written: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Each kind of argument is written as expected, runs to the same bits, and is read back as it was."""
    inputs = {"x": torch.randn(2, 3), "mask": torch.rand(2, 3) > 0.5, "ids": torch.tensor([2, 0])}
    maker = GraphMaker(Mesh(1, 1, 1), {})
    nodes = {"rank": maker.argument("rank", "rank")}
    nodes |= {name: maker.argument(name, "input", tuple(x.shape), x.dtype) for name, x in inputs.items()}

    def find_node(arg: Any) -> Any:
        if isinstance(arg, list):
            return [find_node(item) for item in arg]
        return nodes.get(arg, arg) if isinstance(arg, str) else arg

    result = maker.call("result", target, *map(find_node, args), **kwargs)
    if isinstance(result.meta["val"], (list, tuple)):
        result = maker.call("part", operator.getitem, result, 1)
        written = written.removesuffix("[1]")
    maker.graph.output(result)
    program, manifest = one_stage(maker, inputs)
    text = emit_one_stage(program, manifest)
    assert f"result = {written}" in text

    rank = Rank.local(manifest.mesh)
    got = read_program(text, "call.py").stages[0](rank, {}, *inputs.values())
    (made,) = [node for node in program.stages[0].graph.nodes if node.name == "result"]
    on_cpu(program.stages[0].graph)
    expected = run_stage(program.stages[0].graph, {}, {"rank": rank, **inputs})
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)

    (traced,) = trace_program([text], manifest).stages
    (again,) = [node for node in traced.graph.nodes if node.name == "result"]
    assert again.target is target
    made.kwargs = {k: META if k == "device" else v for k, v in made.kwargs.items() if k != "pin_memory"}
    assert str(shorten_call(target, again.args, again.kwargs)) == str(shorten_call(target, made.args, made.kwargs))


def test_ambiguous_overload_is_named() -> None:
    """Where the packet would choose another overload, the overload is written."""
    maker = GraphMaker(Mesh(1, 1, 1), {})
    maker.argument("rank", "rank")
    x = maker.argument("x", "input", (2,))
    maker.graph.output(maker.call("y", aten.add.Scalar, x, 2))
    program, manifest = one_stage(maker, {"x": torch.ones(2)})
    text = emit_one_stage(program, manifest)
    assert "y = aten.add.Scalar(x, 2)" in text
    (stage,) = trace_program([text], manifest).stages
    assert len(stage.graph.find_nodes(op="call_function", target=aten.add.Scalar)) == 1


def test_names_collide_with_nothing() -> None:
    maker = GraphMaker(Mesh(1, 1, 1), {})
    maker.argument("rank", "rank")
    inputs = {"p": torch.ones(2), "torch": torch.ones(2) * 2, "lambda": torch.ones(2) * 3}
    p, torch_, lambda_ = (maker.argument(name, "input", (2,)) for name in inputs)
    x = maker.call("aten", aten.add.Tensor, p, torch_)
    x = maker.call("float", aten.mul.Tensor, x, lambda_)
    x = maker.call("rank", aten.mul.Tensor, x, 2)
    maker.graph.output(maker.call("aten_1", aten.stack.default, [x, p, lambda_]))
    program, manifest = one_stage(maker, inputs)
    text = emit_one_stage(program, manifest)
    result = read_program(text, "names.py").stages[0](Rank.local(manifest.mesh), {}, *inputs.values())
    assert torch.equal(result, torch.stack([torch.full((2,), 18.0), inputs["p"], inputs["lambda"]]))


def test_refuses_a_foreign_function() -> None:
    maker = GraphMaker(Mesh(1, 1, 1), {})
    maker.argument("rank", "rank")
    x = maker.argument("x", "input", (2,))
    maker.graph.output(maker.call("y", torch.nn.functional.mish, x, path="h.0.mlp", line=7))
    with pytest.raises(ValueError, match=r"cannot write .*mish.* of node y at h\.0\.mlp \(gpt\.py:7\); expected"):
        emit_one_stage(*one_stage(maker, {"x": torch.ones(2)}))
