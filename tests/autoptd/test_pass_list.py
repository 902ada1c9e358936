"""The list of passes: all of them in order, and what must hold after each."""

from __future__ import annotations

from functools import partial

import pytest

from autoptd.options import Options
from autoptd.pass_list import PASSES, select_passes
from autoptd.passes.ir.nodes import change_info, info, require_info
from autoptd.passes.ir.program import Program, copy_graph
from autoptd.runtime import collectives
from autoptd.runtime.program.placement import REPLICATED
from tests.models import tiny


def test_options_leave_passes_out_and_keep_the_order() -> None:
    names = [row.name for row in PASSES]
    every = [name for name, _ in select_passes(Options(), "arrange", "divide", "finish")]
    assert every == names
    fewer = [name for name, _ in select_passes(Options(fuse=False, layout="bsh"), "arrange", "finish")]
    left_out = {"rewrite layout", "shard tensors", "fuse operators"}
    assert fewer == [name for name in names if name not in left_out]


def test_a_pass_that_forgets_to_describe_a_node_is_named() -> None:
    graph = copy_graph(tiny((1, 1, 1)).stages[0].graph)
    node = next(node for node in graph.nodes if node.op == "call_function")
    node.meta = {"val": node.meta["val"]}
    with pytest.raises(ValueError, match=rf"after fusion: nothing is known about %{node.name} .*described by the pass"):
        require_info(graph, "after fusion")


def test_a_partial_sum_read_as_if_it_were_whole_is_named() -> None:
    stage = tiny((2, 1, 1)).stages[0]
    require_info(stage.graph, "after compile")
    graph = copy_graph(stage.graph)
    reduced = next(node for node in graph.nodes if node.target is collectives.reduce_from_tensor)
    partial_sum = reduced.args[1]
    reduced.replace_all_uses_with(partial_sum)
    assert info(partial_sum).is_partial
    with pytest.raises(ValueError, match=rf"reads {partial_sum.name}, whose terms are not summed"):
        require_info(graph, "after sharding")
    change_info(partial_sum, placement=REPLICATED)
    require_info(graph, "after sharding")


def test_the_result_of_every_selected_pass_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that loses the facts about its nodes does not leave the pass."""
    program: Program = tiny_program()
    for name, step in select_passes(Options(), "arrange"):
        assert isinstance(step, partial)
        with pytest.raises(ValueError, match=f'after the pass "{name}"'):
            step.func(step.args[0], forget, program)


def tiny_program() -> Program:
    compiled = tiny((1, 1, 1))
    return Program(compiled.manifest.mesh, compiled.stages, compiled.manifest.inputs, compiled.manifest.output)


def forget(program: Program) -> Program:
    (stage,) = program.stages
    graph = copy_graph(stage.graph)
    for node in graph.nodes:
        node.meta = {"val": node.meta.get("val")}
    return program.replace_stages((type(stage)(graph, stage.parameters, stage.constants),), "")
