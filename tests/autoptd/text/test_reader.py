"""Texts read back: the same graph, edits included, and errors that name the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import Stage
from autoptd.runtime import aten, collectives
from autoptd.runtime.program.manifest import Manifest
from autoptd.text import reader
from autoptd.text.call_arguments import shorten_call
from autoptd.text.reader import program_filename, trace_program
from autoptd.text.writer import emit_texts
from tests.two_stages import two_stages


def emit() -> tuple[tuple[str, ...], Manifest, tuple[Stage, ...]]:
    program, manifest, schedule = two_stages()
    return emit_texts(program, manifest, schedule, title="tiny GPT"), manifest, program.stages


def edit(old: str, new: str) -> tuple[list[str], Manifest]:
    texts, manifest, _ = emit()
    assert sum(text.count(old) for text in texts) == 1, f"{old!r} is to be found once"
    return [text.replace(old, new) for text in texts], manifest


def describe(graph: fx.Graph) -> list[Any]:
    """Operators, arguments and values; arguments numbered by their node, parameters by their name."""
    numbers: dict[fx.Node, str] = {}
    rows: list[Any] = []
    for node in graph.nodes:
        if node.op == "get_attr":
            numbers[node] = f"p[{node.target}]"
            continue
        numbers[node] = f"%{len(rows)}"
        args, kwargs = shorten_call(node.target, node.args, node.kwargs)
        options = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        target = node.target if node.op != "output" else "output"
        value = node.meta["val"] if node.op == "call_function" else []
        shapes = [tuple(x.shape) for x in (value if isinstance(value, (tuple, list)) else [value])]
        rows.append((target, _numbered((args, options), numbers), shapes))
    return rows


def _numbered(value: Any, numbers: dict[fx.Node, str]) -> Any:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, (tuple, list)):
        return [_numbered(item, numbers) for item in value]
    if isinstance(value, dict):
        return {name: _numbered(item, numbers) for name, item in value.items()}
    return value


def test_text_gives_the_graph_back() -> None:
    texts, manifest, stages = emit()
    traced = trace_program(texts, manifest).stages
    for before, after in zip(stages, traced, strict=True):
        assert describe(after.graph) == describe(before.graph)
        assert after.parameters == before.parameters
    assert describe(traced[0].constants) == describe(stages[0].constants)
    assert len(traced[1].constants.nodes) == 0


def test_whole_parameters_are_made_once_for_all_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model has thousands of parameters, and hundreds of texts."""
    texts, manifest, _ = emit()
    made: list[tuple[int, ...]] = []
    real = reader._meta

    def count(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(tuple(shape))
        return real(shape, dtype)

    monkeypatch.setattr(reader, "_meta", count)
    trace_program(texts, manifest)
    uses = sum(len(own.parameters) + len(own.receives) + len(own.inputs) for own in manifest.stages)
    whole = sum(parameter.kind != "constant" for parameter in manifest.parameters.values())
    assert len(made) == whole + uses


def test_nodes_keep_names_roles_and_lines() -> None:
    texts, manifest, stages = emit()
    traced = trace_program(texts, manifest).stages[0].graph
    names = {node.name for node in stages[0].graph.nodes if node.op == "call_function"} - {"split"}
    assert names <= {node.name for node in traced.nodes}
    assert [info(node).role for node in traced.nodes if node.op == "placeholder"] == ["rank", "input"]
    (add,) = [node for node in traced.nodes if node.name == "h_0"]
    file, line = info(add).line.split(":")
    assert file == program_filename(0, 2) == "program_00.py"
    assert "h_0 = aten.add(" in texts[0].splitlines()[int(line) - 1]


def test_emitting_again_gives_the_same_code() -> None:
    texts, manifest, _ = emit()
    again = emit_texts(trace_program(texts, manifest), manifest, two_stages()[2], title="tiny GPT")

    def code(text: str) -> str:
        return "".join(line.partition("#")[0] for line in text.split("SCHEDULE")[1].split("\n")).replace(" ", "")

    assert [code(text) for text in again] == [code(text) for text in texts]


@pytest.mark.parametrize(
    "new",
    [
        "h_0 = drop + c_proj_biased * 0.5",
        "h_0 = torch.lerp(drop, c_proj_biased, 0.5)",
        "h_0 = c_proj_biased.view(drop.shape[0], -1, drop.size(-1)) + drop.numel() * 0",
        "h_0 = residual(drop, c_proj_biased)",
        "h_0, _ = [drop + x for x in (c_proj_biased, drop)]",
    ],
)
def test_edit_is_traced(new: str) -> None:
    texts, manifest = edit("h_0 = aten.add(drop, c_proj_biased)", new)
    head = "import torch\n\ndef residual(x, y):\n    return x + y\n\n"
    texts[0] = texts[0].replace("\nfrom autoptd", head + "from autoptd", 1)
    graph = trace_program(texts, manifest).stages[0].graph
    graph.lint()
    (output,) = graph.find_nodes(op="output")
    assert [tuple(x.shape) for x in output.meta["val"]] == [(1, 8, 16), (1, 2, 8, 4)]


def test_a_dropped_collective_is_gone() -> None:
    texts, manifest = edit("c_proj_g = collectives.reduce_from_tensor(rank, c_proj)", "c_proj_g = c_proj")
    graph = trace_program(texts, manifest).stages[0].graph
    assert len(graph.find_nodes(op="call_function", target=collectives.reduce_from_tensor)) == 1


def test_imports_of_single_functions_are_seen() -> None:
    texts, manifest = edit("wte_g = collectives.reduce_from_tensor(", "wte_g = reduce_from_tensor(")
    line = "from autoptd.runtime.collectives import reduce_from_tensor\n"
    texts[0] = texts[0].replace("\nfrom autoptd", f"\n{line}from autoptd", 1)
    graph = trace_program(texts, manifest).stages[0].graph
    assert len(graph.find_nodes(op="call_function", target=collectives.reduce_from_tensor)) == 2


def test_overloads_are_resolved() -> None:
    texts, manifest = edit("aten.add(drop, c_proj_biased)", "aten.add(aten.mul(drop, 2), c_proj_biased)")
    graph = trace_program(texts, manifest).stages[0].graph
    assert len(graph.find_nodes(op="call_function", target=aten.mul.Tensor)) == 1


SUM = "aten.add(drop, c_proj_biased)"
ERRORS = [
    ('p["h.0.ln_1.bias"]', 'p["h.0.ln_1.bais"]',
     r'p\["h\.0\.ln_1\.bais"\] is not .*did you mean p\["h\.0\.ln_1\.bias"\]'),
    (SUM, "aten.add(drop, drop)[3]", r"getitem failed: index 3"),
    (SUM, "aten.add(drop, nothing)", "in stage_0: name 'nothing' is not defined"),
    (SUM, "aten.plus(drop)", "in stage_0: .*has no attribute 'plus'"),
    (SUM, "drop if drop.sum() > 0 else ids", "in stage_0: .*depend on shapes only"),
    ("aten.reshape(transpose_y, [1, 8, 8])", "aten.reshape(transpose_y, [1, 8, 9])",
     r"aten\.reshape.* failed: .*invalid"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), ERRORS, ids=[e[1] for e in ERRORS])
def test_error_names_the_line(old: str, new: str, message: str) -> None:
    texts, manifest = edit(old, new)
    line = next(i for i, x in enumerate(texts[0].splitlines(), 1) if new in x)
    with pytest.raises(ValueError, match=message) as caught:
        trace_program(texts, manifest)
    file, number, _ = str(caught.value).split(":", 2)
    assert file == "program_00.py"
    # A call over several lines is at its first.
    assert 0 <= line - int(number) <= 1


def test_wrong_arguments() -> None:
    texts, manifest = edit("def stage_0(rank, p, ids):", "def stage_0(rank, p):")
    message = r"program_00\.py:\d+: stage_0 takes \(rank, p\); expected 3 .*\(rank, p, ids\)"
    with pytest.raises(ValueError, match=message):
        trace_program(texts, manifest)


def test_wrong_stages() -> None:
    texts, manifest, _ = emit()
    message = r"program_00\.py has stage_1; expected stage_0 on pipeline rank 0"
    with pytest.raises(ValueError, match=message):
        trace_program(texts[::-1], manifest)
