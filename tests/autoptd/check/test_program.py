"""The static proof: it accepts what the compiler makes, and names what a fault breaks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

import autoptd
from autoptd.check.program import ProgramError, check_program
from autoptd.check.tensor_parallel import prove_tensor_parallel
from autoptd.compiled import CompiledProgram
from autoptd.gc_pause import paused_collector
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.ir.program import Program, Stage, copy_graph
from autoptd.passes.operators.proof import PlacementError
from autoptd.runtime import aten, collectives
from autoptd.runtime.program.manifest import Manifest, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import REPLICATED, Partial, Placement, Replicate, Segment, Shard
from autoptd.runtime.program.schedule import Action, Kind, make_schedule
from autoptd.text.reader import trace_program
from samples.gpt import GPT, GPTConfig
from tests.passes.tensor_parallel.test_sharding import MODELS, build, prepare, tokens

SELENE = Cluster.load("dgx-a100")
F, G = collectives.copy_to_tensor, collectives.reduce_from_tensor
Change = Callable[[fx.Graph], None]


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return compile_gpt((2, 2, 1))


@cache
def compile_gpt(mesh: tuple[int, int, int], **options: Any) -> CompiledProgram:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=67, block_size=16, n_layer=2, n_head=4, n_embd=32, dropout=0.1))
    # Where messages take long, stages end where one value lives.
    cluster = replace(SELENE, devices_per_node=2, network=replace(SELENE.network, latency_seconds=1e-3))
    given = {"num_microbatches": 4, "num_model_chunks": 1, "schedule": "1f1b", "cluster": cluster}
    options = {**given, **options}
    return autoptd.compile(model, mesh=mesh, microbatch_size=2, **options)


def refusal(program: CompiledProgram, **changes: Any) -> str:
    """What the proof says of the program with another manifest, stages or schedule; lines as N."""
    given = {"manifest": program.manifest, "stages": program.stages, "schedule": program.schedule, **changes}
    with pytest.raises(ProgramError) as caught:
        check_program(**given)
    return re.sub(r"\.py:\d+", ".py:N", str(caught.value))


def edit(program: CompiledProgram, index: int, change: Change) -> tuple[Stage, ...]:
    """The stages, with the graph of one changed."""
    graph = copy_graph(program.stages[index].graph)
    change(graph)
    graph.lint()
    return tuple(replace(s, graph=graph) if i == index else s for i, s in enumerate(program.stages))


def named(graph: fx.Graph, name: str) -> fx.Node:
    nodes: list[fx.Node] = [node for node in graph.nodes if node.name == name]
    (found,) = nodes
    return found


def without(name: str) -> Change:
    """Leave a collective out."""

    def change(graph: fx.Graph) -> None:
        node = named(graph, name)
        node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]
        graph.erase_node(node)

    return change


def twice(name: str) -> Change:
    """Apply a collective to its own result."""

    def change(graph: fx.Graph) -> None:
        node = named(graph, name)
        with graph.inserting_after(node):
            again = graph.create_node("call_function", node.target, (node.args[0], node), {}, f"{name}_again")
        again.meta = dict(node.meta)
        node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)

    return change


def apart(name: str, change: Change) -> Change:
    """The linears that read f, and f, by themselves again, before `change`."""

    def apply(graph: fx.Graph) -> None:
        node = named(graph, name)
        args: tuple[Any, ...] = node.args
        rank, x, *rest = args
        with graph.inserting_after(x):
            copy = graph.create_node("call_function", F, (rank, x), {}, f"{x.name}_f")
        copy.meta = dict(x.meta)
        if node.target is collectives.copied_linears:
            for result, weight, bias in zip(list(node.users), *rest, strict=True):
                result.target, result.args = aten.linear.default, (copy, weight, bias)
            graph.erase_node(node)
        else:
            node.target, node.args = PLAIN[node.target], (copy, *rest)
        change(graph)

    return apply


PLAIN: Mapping[Any, Any] = {collectives.copied_linear: aten.linear.default}


def reading(name: str, position: int, source: str) -> Change:
    """Let a node read another value."""

    def change(graph: fx.Graph) -> None:
        node = named(graph, name)
        args = list(node.args)
        args[position] = named(graph, source)
        node.args = tuple(args)

    return change


def with_stage(manifest: Manifest, index: int, **fields: Any) -> Manifest:
    stages = [replace(s, **fields) if s.index == index else s for s in manifest.stages]
    return replace(manifest, stages=tuple(stages))


def with_parameter(program: CompiledProgram, name: str, **fields: Any) -> dict[str, Any]:
    """A manifest, and stages, that describe one parameter otherwise."""
    other = replace(program.manifest.parameters[name], **fields)

    def changed(parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {**parameters, **({name: other} if name in parameters else {})}

    stages = tuple(replace(s, parameters=changed(s.parameters)) for s in program.stages)
    return {"manifest": replace(program.manifest, parameters=changed(program.manifest.parameters)), "stages": stages}


# What is right


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 1), (4, 2, 1)], ids=str)
def test_a_compiled_program_and_its_text_are_accepted(mesh: tuple[int, int, int]) -> None:
    program = compile_gpt(mesh)
    program.check()
    traced = trace_program(program.texts, program.manifest, buffers=program.buffers)
    check_program(program.manifest, traced.stages, program.schedule)


def one_stage(program: Program) -> Manifest:
    (stage,) = program.stages
    names = tuple(i.name for i in program.inputs)
    interface = StageInterface(0, (), (), names, tuple(stage.parameters))
    placed = (program.mesh, "1f1b", 1, 1, 2, True, 0, program.inputs, (interface,))
    return Manifest(*placed, stage.parameters, program.aliases, program.output)


# With 4 tensor ranks each has one head, and key-value heads are replicated.
@pytest.mark.parametrize(("name", "tensor"), [*((n, 2) for n in MODELS), *((n, 4) for n in ("gpt2", "phi3", "falcon"))])
def test_every_models_collectives_are_accepted_and_needed(name: str, tensor: int) -> None:
    program = prepare(build(name), tensor, tokens())
    manifest = one_stage(program)
    check_program(manifest, program.stages, make_schedule("1f1b", 1, 1))
    (stage,) = program.stages
    collective = [n.name for n in stage.graph.nodes if n.target in (F, G)]
    assert collective
    for fault in (without, twice):
        for node in collective[:4] + collective[-2:]:
            graph = copy_graph(stage.graph)
            fault(node)(graph)
            with pytest.raises(PlacementError):
                prove_tensor_parallel(manifest, [replace(stage, graph=graph)])


def count_calls(function: Callable[[], object]) -> int:
    """How many Python functions it calls, itself and others."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    with paused_collector():  # what it finds of other tests calls back, and would be counted
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(before)
    return count


def test_a_graph_of_twice_the_layers_takes_twice_the_work() -> None:
    def check(layers: int) -> int:
        config = GPTConfig(vocab_size=64, block_size=16, n_layer=layers, n_head=4, n_embd=32)
        with torch.device("meta"):
            model: nn.Module = GPT(config)
        inputs = {name: torch.zeros(2, 16, dtype=torch.long) for name in ("idx", "targets")}
        program = prepare(model, 2, inputs)
        manifest, schedule = one_stage(program), make_schedule("1f1b", 1, 1)
        return count_calls(lambda: check_program(manifest, program.stages, schedule))

    short, middle, long = map(check, (4, 8, 16))
    assert 0 < long - middle <= 2.1 * (middle - short)


# Tensor parallel

COLLECTIVES = [
    (
        without("h0_attn_c_proj_g"),
        "stage 0: h.0.ln_2 (gpt.py:N) uses the partial sum h0_attn_c_proj before its "
        "all-reduce: expected collectives.reduce_from_tensor(rank, h0_attn_c_proj)",
    ),
    (
        apart("h0_attn_split_0_together", without("h0_ln1_f")),
        "stage 0: h.0.attn.c_attn (gpt.py:N) is divided and reads h0_ln1 as it is, so "
        "that each tensor rank has one term of the gradient only, up to h.0.ln_1.bias, a parameter whose "
        "placement has no partial gradient: expected h0_attn_split_0 to read collectives.copy_to_tensor(rank, h0_ln1)",
    ),
    (
        twice("h0_attn_c_proj_g"),
        "stage 0: h.0.attn.c_proj (gpt.py:N) all-reduces h0_attn_c_proj_g, "
        "which is whole on every tensor rank already, and so multiplies it by their number: leave this "
        "reduce_from_tensor out",
    ),
    (
        apart("h0_attn_split_0_together", twice("h0_ln1_f")),
        "stage 0: h.0.ln_1 (gpt.py:N) all-reduces a gradient that is whole on every tensor "
        "rank, and so multiplies it by their number: only divided operators may read it; leave this "
        "copy_to_tensor out",
    ),
    (
        apart("h0_mlp_c_fc", reading("h0_mlp_c_fc", 0, "wte")),
        "stage 0: h.0.mlp.c_fc (gpt.py:N) uses the partial sum wte before its all-reduce: "
        "expected collectives.reduce_from_tensor(rank, wte)",
    ),
    (
        apart("h0_attn_split_0_together", reading("h0_add", 1, "h0_ln1_f")),
        "stage 0: h.0.attn.c_attn (gpt.py:N) is divided and reads h0_ln1_f as it is, so "
        "that each tensor rank has one term of the gradient only, up to h.0.ln_1 (gpt.py:N), "
        "which has a whole gradient from h.0.ln_2 (gpt.py:N): expected h0_attn_split_0 to read "
        "collectives.copy_to_tensor(rank, h0_ln1_f)",
    ),
    (
        reading("h0_mlp_c_fc", 1, "wte"),
        "stage 0: h.0.mlp.c_fc (gpt.py:N) hands wte, which is a partial sum, to a divided region: expected a "
        "whole value; compute the linear without an all-reduce, or all-reduce its argument first",
    ),
]


@pytest.mark.parametrize(("change", "message"), COLLECTIVES, ids=[message[9:40] for _, message in COLLECTIVES])
def test_a_wrong_collective_is_named(program: CompiledProgram, change: Change, message: str) -> None:
    assert refusal(program, stages=edit(program, 0, change)) == message


EDITS = [
    (
        'aten.linear(h0_attn_reshape_3, p["h.0.attn.c_proj.weight"])',
        'aten.linear(h0_attn_reshape_3, p["h.0.attn.c_proj.weight"], p["h.0.attn.c_proj.bias"])',
        "h0_attn_c_proj (program_00.py:N) adds the bias h_0_attn_c_proj_bias to a partial sum, so that it "
        "would be counted on every tensor rank",
    ),
    (
        "operator=1, divided=1",
        "operator=1",
        "h0_attn_softmax (program_00.py:N) draws for a value that is divided, with divided=None",
    ),
    (
        "aten.linear(h0_mlp_gelu,",
        "aten.linear(aten.softmax(h0_mlp_gelu, -1),",
        "runs over dimension 2 of h0_mlp_gelu, of which each tensor rank holds another part: expected it whole",
    ),
    (
        "aten.linear(h0_mlp_gelu,",
        "collectives.copied_linear(rank, h0_mlp_gelu,",
        "h0_mlp_c_proj (program_00.py:N) hands h0_mlp_gelu, which is divided along dimension 2, to a divided region: "
        "expected a whole value; compute the linear without an all-reduce, or all-reduce its argument first",
    ),
    (
        "rank, h0_ln2, ",
        "rank, collectives.copy_to_tensor(rank, h0_ln2), ",
        "all-reduces a gradient that is whole on every tensor rank, and so multiplies it by their number: only "
        "divided operators may read it; leave this copy_to_tensor out",
    ),
    (
        'aten.linear(h0_mlp_gelu, p["h.0.mlp.c_proj.weight"])',
        'aten.linear(aten.cat([h0_mlp_gelu, h0_ln2], -1), aten.cat([p["h.0.mlp.c_proj.weight"], '
        'aten.expand(aten.unsqueeze(p["h.0.ln_1.weight"], 1), [32, 32])], 1))',
        "sums over a dimension of which every tensor rank holds some rows whole, in h0_mlp_c_proj: the all-reduce "
        "would count these t times; multiply the whole rows apart, after it",
    ),
    (
        "return h0_add_1",
        'return h0_add_1 * collectives.copied_linear(rank, h0_add_1, p["wpe.weight"]).sum()',
        "copied_linear (program_00.py:N) all-reduces a gradient that is whole on every tensor rank, and so "
        "multiplies it by their number: only divided operators may read it; compute this linear without its "
        "all-reduce",
    ),
    (
        "return h0_add_1",
        'return h0_add_1 * collectives.scattered_linear(rank, h0_add_1, p["wpe.weight"]).sum()',
        "scattered_linear (program_00.py:N) all-reduces h0_add_1, which is whole on every tensor rank already, and so "
        "multiplies it by their number: leave this scattered_linear out",
    ),
    (
        "return h0_add_1",
        "return h0_mlp_c_proj",
        "h0_mlp_c_proj (program_00.py:N) is sent to stage 1 as h0_add_1 and is a partial sum: expected "
        "collectives.reduce_from_tensor(rank, h0_mlp_c_proj) before it is sent",
    ),
    (
        "h0_mlp_c_proj_g = collectives.reduce_from_tensor(rank, h0_mlp_c_proj) ",
        "h0_mlp_c_proj_g = collectives.reduce_from_tensor(rank, h0_mlp_c_proj * 0.5 - h0_mlp_c_proj)",
        None,
    ),
    (
        "h0_mlp_c_proj_g = collectives.reduce_from_tensor(rank, h0_mlp_c_proj) ",
        "h0_mlp_c_proj_g = collectives.reduce_from_tensor(rank, h0_mlp_c_proj).view(16, 2, 32) / 2",
        None,
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), EDITS, ids=[new for _, new, _ in EDITS])
def test_an_edited_text_is_judged(program: CompiledProgram, old: str, new: str, message: str | None) -> None:
    assert program.texts[0].count(old) == 1
    texts = (program.texts[0].replace(old, new), *program.texts[1:])
    stages = trace_program(texts, program.manifest, buffers=program.buffers).stages
    if message is None:
        check_program(program.manifest, stages, program.schedule)
    else:
        assert message in refusal(program, stages=stages)


def test_a_marked_gradient_must_be_partial(program: CompiledProgram) -> None:
    message = refusal(
        program, **with_parameter(program, "h.1.ln_1.weight", placement=REPLICATED.with_partial_gradient("tensor"))
    )
    assert message.startswith(
        "stage 1: h.1.ln_1.weight has a partial gradient in its placement, although every tensor rank has"
    )


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ("bsh", "h.0.attn (gpt.py:N) takes rows 0 to 15 along dimension 2 of h0_attn_c_attn"),
        ("sbh", "h.0.attn.c_attn (gpt.py:N) takes rows 0 to 15 along dimension 0 of h0_attn_c_attn_weight"),
    ],
)
def test_rows_that_no_two_ranks_share_are_refused(layout: str, where: str) -> None:
    program = compile_gpt((2, 2, 1), layout=layout)
    unpacked = Placement(tensor=Shard(0, (Segment(1, 96, 1, True),)))
    changes = with_parameter(program, "h.0.attn.c_attn.weight", placement=unpacked)
    manifest = changes.pop("manifest")
    other = with_parameter(replace_manifest(program, manifest, **changes), "h.0.attn.c_attn.bias", placement=unpacked)
    assert refusal(program, **other).startswith(
        f"stage 0: {where}, where a tensor rank holds 1 x 48 rows: these rows are other ones on each rank"
    )


def replace_manifest(program: CompiledProgram, manifest: Manifest, stages: tuple[Stage, ...]) -> CompiledProgram:
    return replace(program, manifest=manifest, stages=stages)


# Parameters


def test_a_wrong_placement_is_named(program: CompiledProgram) -> None:
    name = "h.0.mlp.c_fc.weight"
    short = Placement(tensor=Shard(0, (Segment(1, 126, 1, True),)))
    assert refusal(program, **with_parameter(program, name, placement=short)) == (
        "parameter h.0.mlp.c_fc.weight[128, 32]: its placement has 126 rows, 0 of padding, "
        "expected 128 of dimension 0; correct its placement in the manifest"
    )
    odd = Placement(tensor=Shard(0, (Segment(1, 127, 1, True), Segment(1, 1, 1, False))))
    assert "a segment of 1 x 127 x 1 rows does not divide over tensor=2" in refusal(
        program, **with_parameter(program, name, placement=odd)
    )
    rows = (Segment(1, 126, 1, True),)
    assert "its placement has 126 rows, -2 of padding" in refusal(
        program, **with_parameter(program, name, placement=Placement(tensor=Shard(0, rows, 128)))
    )
    for wrong in (
        Placement(tensor=Replicate(0, rows)),
        Placement(tensor=Shard()),
        Placement(tensor=Partial()),
        Placement(expert=Shard(0, rows)),
    ):
        assert "expected one of data, pipeline, tensor, and on it a shard" in refusal(
            program, **with_parameter(program, name, placement=wrong)
        )
    nowhere = Placement(tensor=Shard(2, (Segment(1, 128, 1, True),)))
    assert "is divided along dimension 2, which does not exist" in refusal(
        program, **with_parameter(program, name, placement=nowhere)
    )


def test_a_missing_parameter_is_named(program: CompiledProgram) -> None:
    manifest = program.manifest
    names = tuple(name for name in manifest.stages[1].parameters if name != "ln_f.bias")
    with pytest.raises(ValueError, match=r'program_01\.py:\d+: .* p\["ln_f\.bias"\] is not a parameter, buffer or'):
        trace_program(program.texts, with_stage(manifest, 1, parameters=names), buffers=program.buffers)
    empty = (replace(program.stages[0], constants=fx.Graph()), *program.stages[1:])
    assert refusal(program, stages=empty) == (
        "stage 0 reads the constant constant.arange; constants(p) of its text makes none"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatch_size": 0}, "microbatch_size is 0; expected a positive integer"),
        ({"microbatch_size": -3}, "microbatch_size is -3; expected a positive integer"),
        ({"num_shapes": -1}, "num_shapes is -1; expected a positive integer"),
        ({"seed": 10**30}, f"seed is {10**30}; expected an integer of 64 bits"),
        ({"schedule": "x"}, "unknown schedule 'x'; did you mean"),
        ({"mesh": Mesh(0, 2, 1)}, "tensor of the mesh is 0; expected a positive integer"),
        ({"mesh": Mesh(2, 2, 1, (0, 1, 2, 2))}, r"ranks of the mesh are \(0, 1, 2, 2\); expected each of 0 to 3"),
    ],
    ids=str,
)
def test_an_edited_manifest_is_refused_by_name(program: CompiledProgram, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=f"{message}.*; correct it in the manifest, or save"):
        trace_program(program.texts, replace(program.manifest, **change), buffers=program.buffers)


def test_an_alias_must_lead_somewhere(program: CompiledProgram) -> None:
    manifest = replace(program.manifest, aliases={"lm_head.weight": "wte.wieght"})
    assert refusal(program, manifest=manifest) == (
        "lm_head.weight is an alias of wte.wieght, which is not a parameter in the manifest"
    )


# Boundaries


def test_both_ends_of_a_boundary_must_agree(program: CompiledProgram) -> None:
    manifest = program.manifest
    (sent,) = manifest.stages[0].sends
    narrow = (replace(sent, dtype=torch.bfloat16),)
    half = with_stage(with_stage(manifest, 0, sends=narrow), 1, receives=narrow)
    assert refusal(program, manifest=half) == (
        "stage 0: h.0 (gpt.py:N) is float32[16, 2, 32]; stage 1 takes h0_add_1 as bfloat16[16, 2, 32]"
    )
    other = replace(sent, placement=Placement(tensor=Shard(0)))
    received = with_stage(manifest, 1, receives=(other,))
    assert refusal(program, manifest=received) == (
        f"stage 0 sends {sent}, and stage 1 receives {other}; correct one of the two in the manifest"
    )
    nothing = with_stage(manifest, 0, sends=())
    message = f"stage 0 sends nothing, and stage 1 receives {sent}"
    assert refusal(program, manifest=nothing).startswith(message)
    assert refusal(program, manifest=with_stage(nothing, 1, receives=())) == (
        "stage 0 returns 1 values (h0_add_1); expected none"
    )
    unasked = with_stage(manifest, 1, receives=())
    with pytest.raises(ValueError, match=r"stage_1 takes \(rank, p, h0_add_1, targets\); expected 3 arguments"):
        trace_program(program.texts, unasked, buffers=program.buffers)


def test_the_last_stage_returns_the_loss(program: CompiledProgram) -> None:
    def change(graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        output.args = (named(graph, "lm_head"),)

    assert refusal(program, stages=edit(program, 1, change)) == (
        "stage 1: lm_head (gpt.py:N) is float32[16, 2, 34]; expected a scalar floating-point loss"
    )


# The schedule


def with_row(program: CompiledProgram, rank: int, change: Callable[[list[Action]], None]) -> Any:
    row = list(program.schedule[rank])
    change(row)
    return tuple(tuple(row) if r == rank else own for r, own in enumerate(program.schedule))


def test_swapped_receives_are_named(program: CompiledProgram) -> None:
    def swap(row: list[Action]) -> None:
        first, second = row.index(Action(1, Kind("RECV_F"), 0)), row.index(Action(1, Kind("RECV_F"), 1))
        row[first], row[second] = row[second], row[first]

    message = refusal(program, schedule=with_row(program, 1, swap))
    assert message.startswith("schedule: rank 1: 1F0 comes too early: expected 1RECV_F0 before it")
    assert message.endswith("; correct SCHEDULE in the program texts, or compile again")


def test_stages_must_be_as_many_as_the_ranks_run(program: CompiledProgram) -> None:
    message = refusal(program, manifest=replace(program.manifest, num_model_chunks=2))
    assert message == "the manifest lists 2 stages; expected 4: 2 model chunks on each of 2 pipeline ranks"


def test_one_head_a_rank_and_a_batch_of_one_is_no_contradiction() -> None:
    """A dimension of one row beside others of one row: which of them is divided cannot be told, nor refused."""
    ids = {name: torch.zeros(1, 16, dtype=torch.long) for name in ("input_ids", "labels")}
    program = autoptd.compile(build("bloom"), (4, 2, 1), example_inputs=ids, num_microbatches=4)
    program.check()
