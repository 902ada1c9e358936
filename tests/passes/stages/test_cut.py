"""Stages in a row mean what the whole graph means; what crosses a cut; refusals."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn

import autoptd
from autoptd.options import Options
from autoptd.pass_list import run_passes, select_passes
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.cost.durations import Durations, Precision
from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.cost.work import forward_work
from autoptd.passes.ir.nodes import NodeInfo, describe, info
from autoptd.passes.ir.program import Program, Stage, recomputed_groups
from autoptd.passes.normal_form.constants import fold_constants
from autoptd.passes.normal_form.normalize import normalize
from autoptd.passes.recompute import recompute_activations
from autoptd.passes.stages.cut import boundaries, cut_at
from autoptd.passes.structure.layers import label_layers
from autoptd.passes.tensor_parallel.sharding import shard_tensors
from autoptd.progress import show_progress
from autoptd.runtime import aten, collectives
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.manifest import Input, Output
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import PARTIAL_SUM, Parameter
from samples.gpt import GPT, GPTConfig
from tests.captures import shared_capture
from tests.cuts import cut_stages, finish_uncut, time_uncut
from tests.interpret import run_stage
from tests.marks import slow_rows_but
from tests.plain_models import _gpt2, _llama_like

HIDDEN = 8
MODELS: dict[str, Callable[[], nn.Module]] = {
    "sample": lambda: GPT(GPTConfig(61, 16, 2, 4, 16, dropout=0.1)),
    "gpt2": lambda: _gpt2(0.1),
    "llama": lambda: _llama_like("Llama", attention_dropout=0.1),
}


def prepare(model: nn.Module, pipeline: int, inputs: Mapping[str, Tensor], tensor: int = 1) -> Program:
    program = shared_capture(model, mesh=Mesh(tensor, pipeline, 1), example_inputs=dict(inputs))
    return shard_tensors(label_layers(fold_constants(normalize(program))))


def with_memory(count: int) -> Cluster:
    cluster = Cluster.load("dgx-a100")
    return replace(cluster, device=replace(cluster.device, memory_bytes=count, reserved_bytes=0.0))


def run_stages(program: Program, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    """The loss of all stages in a row, each given just what its graph asks for."""
    received: tuple[Tensor, ...] = ()
    for stage in program.stages:
        whole = {**program.buffers, **weights}
        constants = run_stage(stage.constants, whole, {}) if len(stage.constants.nodes) else {}
        own = {name: value for name, value in {**whole, **constants}.items() if name in stage.parameters}
        names = [str(n.target) for n in stage.graph.nodes if info(n).role == "boundary"]
        given = {"rank": Rank.local(Mesh(1, 1, 1)), **inputs, **dict(zip(names, received, strict=True))}
        result = run_stage(stage.graph, own, given)
        received = result if isinstance(result, tuple) else (result,)
    (loss,) = received
    return loss


def gradients(program: Program, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """The loss, and the gradient of every parameter."""
    kinds = {name: p.kind for stage in program.stages for name, p in stage.parameters.items()}
    leaves = {name: value.detach().requires_grad_(kinds.get(name) == "parameter") for name, value in weights.items()}
    loss = run_stages(program, leaves, inputs)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]


def check_equal(program: Program, model: nn.Module, inputs: Mapping[str, Tensor], num_stages: int) -> Program:
    """Cut, and compare loss and gradients bitwise with the uncut graph."""
    cut = cut_stages(program, num_stages=num_stages)
    assert len(cut.stages) == num_stages
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for found, wanted in zip(gradients(cut, weights, inputs), gradients(program, weights, inputs), strict=True):
        assert torch.equal(found, wanted)
    return cut


def tokens(vocabulary: int = 67) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(vocabulary, (2, 16), generator=generator) for name in ("input_ids", "labels")}


def build_gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = tokens()
    config = GPTConfig(vocab_size=67, block_size=16, n_layer=4, n_head=2, n_embd=16, dropout=0.0)
    return GPT(config).double(), {"idx": ids["input_ids"], "targets": ids["labels"]}


@pytest.mark.parametrize(("pipeline", "num_stages"), [(1, 1), (2, 2), (2, 4), (3, 9), (4, 4), (1, 3)])
def test_a_plain_gpt(pipeline: int, num_stages: int) -> None:
    model, inputs = build_gpt()
    check_equal(prepare(model, pipeline, inputs), model, inputs, num_stages)


def test_between_tensor_ranks_only_whole_values_cross() -> None:
    model, inputs = build_gpt()
    program = prepare(model, 1, inputs, tensor=2)
    cut = cut_stages(program, num_stages=time_uncut(program).units)
    crossing = [n for s in cut.stages for n in s.graph.nodes if info(n).role == "boundary"]
    assert crossing
    assert not any(info(n).is_partial or info(n).has_partial_gradient for n in crossing)
    divided = {b.name for received in boundaries(cut) for b in received if b.placement.is_divided}
    assert divided == {n.name for n in crossing if info(n).is_divided} != set()


def test_behind_frozen_embeddings_a_residual_stream_is_cut() -> None:
    """Its gradients were partial from end to end, which saves one sum, and the first rank had the whole model."""
    model, _ = build_gpt()
    model.get_submodule("wte").requires_grad_(False)
    program, uncut = (autoptd.compile(model, mesh=(2, p, 1), num_microbatches=4) for p in (2, 1))
    assert all(stage.parameters for stage in program.stages)
    assert len(program.stages) == 4
    assert any("9 all-reduces forward, 9 backward" in line for line in program.log)
    assert any("9 all-reduces forward, 8 backward" in line for line in uncut.log)
    report = program.verify()
    assert report.passed, report


def test_every_unit_can_be_a_stage() -> None:
    model, inputs = build_gpt()
    program = prepare(model, 1, inputs)
    units = time_uncut(program).units
    assert units > 30
    check_equal(program, model, inputs, units)
    with pytest.raises(ValueError, match=f"cannot be cut into {units + 1} stages: it has {units} cuttable units"):
        cut_stages(program, num_stages=units + 1)


def test_a_padding_mask_is_made_where_it_is_read() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=67, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    inputs = {**tokens(), "attention_mask": (torch.arange(16) < torch.tensor([[16], [11]])).long()}
    cut = check_equal(prepare(model, 4, inputs), model, inputs, 4)
    for stage in cut.stages:
        assert "attention_mask" in [n.target for n in stage.graph.nodes if info(n).role == "input"]
    assert all(boundary.requires_grad for received in boundaries(cut) for boundary in received)


def test_a_tied_table_is_at_home_in_two_stages() -> None:
    model, inputs = build_gpt()
    cut = cut_stages(prepare(model, 2, inputs), num_stages=2)
    first, last = (set(stage.parameters) for stage in cut.stages)
    (tied,) = first & last
    assert "wte" in tied or "lm_head" in tied
    assert {name for name, _ in model.named_parameters()} <= first | last


def test_the_text_of_every_cut_is_the_same() -> None:
    model, inputs = build_gpt()
    cuts = [cut_stages(prepare(model, 2, inputs), num_stages=4) for _ in range(2)]
    texts = [[str(stage.graph) for stage in cut.stages] for cut in cuts]
    assert texts[0] == texts[1]
    assert cuts[0].log == cuts[1].log
    assert cuts[0].log[-1].startswith("cut_stages 4 stages on 2 pipeline ranks, the slowest ")


class Sketch:
    """A graph by hand, in the conventions of the passes: nodes are run once on the CPU for their shapes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.tensors: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.parameters: dict[str, Parameter] = {}
        self.known: dict[fx.Node, Any] = {}
        self.rank = self.graph.placeholder("rank")
        describe(self.rank, None, NodeInfo(role="rank"))
        self.known[self.rank] = Rank.local(Mesh(1, 1, 1))
        torch.manual_seed(0)

    def _keep(self, node: fx.Node, value: Any, **meta: Any) -> fx.Node:
        self.known[node] = value
        val = fx.map_arg(value, lambda n: n) if isinstance(value, tuple) else value
        metas = tuple(v.to("meta") for v in val) if isinstance(val, tuple | list) else val.to("meta")
        describe(node, metas, NodeInfo(**meta))
        return node

    def input(self, name: str, value: Tensor) -> fx.Node:
        self.inputs[name] = value
        return self._keep(self.graph.placeholder(name), value, role="input")

    def parameter(self, name: str, *shape: int) -> fx.Node:
        self.tensors[name] = torch.randn(shape, dtype=torch.float64)
        self.parameters[name] = Parameter(name, shape, torch.float64)
        node = self.graph.create_node("get_attr", name, name=name.replace(".", "_"))
        return self._keep(node, self.tensors[name])

    def call(self, target: Any, *args: Any, **meta: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        return self._keep(node, target(*fx.map_arg(args, self.known.__getitem__)), **meta)

    def linears(self, x: fx.Node, count: int, stem: str) -> fx.Node:
        for i in range(count):
            x = self.call(aten.linear.default, x, self.parameter(f"{stem}.{i}", HIDDEN, HIDDEN))
        return x

    def program(self, loss: fx.Node, pipeline: int) -> Program:
        describe(self.graph.output(loss), None, NodeInfo())
        self.graph.lint()
        inputs = tuple(Input(n, tuple(v.shape), v.dtype, 0) for n, v in self.inputs.items())
        stage = Stage(self.graph, self.parameters, fx.Graph())
        return Program(Mesh(1, pipeline, 1), (stage,), inputs, Output("tensor"))

    def check(self, program: Program, num_stages: int) -> Program:
        cut = cut_stages(program, num_stages=num_stages)
        pairs = zip(
            gradients(cut, self.tensors, self.inputs), gradients(program, self.tensors, self.inputs), strict=True
        )
        assert all(torch.equal(found, wanted) for found, wanted in pairs)
        return cut


def start(sketch: Sketch) -> fx.Node:
    return sketch.input("x", torch.randn(4, HIDDEN, dtype=torch.float64))


def test_a_value_needed_later_is_passed_on() -> None:
    sketch = Sketch()
    first = sketch.linears(start(sketch), 1, "a")
    rest = sketch.linears(first, 7, "b")
    loss = sketch.call(aten.sum.default, sketch.call(aten.add.Tensor, rest, first))
    cut = sketch.check(sketch.program(loss, 4), 4)
    names = [[boundary.name for boundary in received] for received in boundaries(cut)]
    assert [len(n) for n in names] == [0, 2, 2, 2]
    assert all(received[0] == first.name for received in names[1:])
    middle = next(n for n in cut.stages[2].graph.nodes if n.op == "output").args[0]
    assert middle[0].op == "placeholder"


def test_values_cross_in_the_order_of_their_definition_behind_the_rank() -> None:
    sketch = Sketch()
    x = sketch.linears(start(sketch), 1, "a")
    mask = sketch.call(aten.gt.Scalar, x, 0.0)
    y = sketch.linears(x, 3, "b")
    kept = sketch.call(aten.where.self, mask, y, x)
    cut = sketch.check(sketch.program(sketch.call(aten.sum.default, kept), 2), 2)
    (_, received) = boundaries(cut)
    assert [b.name for b in received[:2]] == [x.name, mask.name]
    assert [b.requires_grad for b in received] == [True, False, True]
    placeholders = [n.target for n in cut.stages[1].graph.nodes if n.op == "placeholder"]
    assert placeholders[:3] == ["rank", x.name, mask.name]


def test_boundaries_without_gradient_say_so() -> None:
    sketch = Sketch()
    x = sketch.linears(start(sketch), 1, "a")
    fixed = sketch.call(aten.detach.default, x)
    y = sketch.linears(x, 3, "b")
    cut = sketch.check(sketch.program(sketch.call(aten.sum.default, sketch.call(aten.mul.Tensor, y, fixed)), 2), 2)
    received = {b.name: b.requires_grad for b in boundaries(cut)[1]}
    assert received[fixed.name] is False


def test_no_cut_through_pieces_or_partial_sums() -> None:
    sketch = Sketch()
    x = sketch.linears(start(sketch), 1, "a")
    pieces = sketch.call(lambda v: v.split(4, -1), x)
    left = sketch.call(operator.getitem, pieces, 0)
    between = sketch.call(aten.relu.default, left)
    right = sketch.call(operator.getitem, pieces, 1)
    product = sketch.call(aten.mul.Tensor, between, right, placement=PARTIAL_SUM)
    total = sketch.call(collectives.reduce_from_tensor, sketch.rank, product)
    program = sketch.program(sketch.call(aten.sum.default, total), 1)
    # linear + split + both getitems | relu | mul + reduce | sum
    cut = sketch.check(program, time_uncut(program).units)
    for stage in cut.stages:
        for node in stage.graph.nodes:
            if info(node).role == "boundary":
                assert isinstance(node.meta["val"], torch.Tensor)
                assert not info(node).is_partial
    assert time_uncut(program).units == 5
    with_pieces = next(s for s in cut.stages if any(n.target is operator.getitem for n in s.graph.nodes))
    assert [n.target for n in with_pieces.graph.nodes].count(operator.getitem) == 2


def test_values_of_the_batch_alone_are_never_sent() -> None:
    sketch = Sketch()
    x = start(sketch)
    doubled = sketch.call(aten.mul.Tensor, x, 2.0)
    y = sketch.linears(doubled, 6, "a")
    loss = sketch.call(aten.sum.default, sketch.call(aten.mul.Tensor, y, doubled))
    cut = sketch.check(sketch.program(loss, 3), 3)
    for (boundary,) in boundaries(cut)[1:]:
        assert boundary.name.startswith("linear")
    copies = [sum(n.target is aten.mul.Tensor for n in stage.graph.nodes) for stage in cut.stages]
    assert copies == [1, 0, 2]
    assert [[n.target for n in s.graph.nodes if info(n).role == "input"] for s in cut.stages] == [["x"], [], ["x"]]


def test_constants_go_with_their_readers() -> None:
    model, inputs = build_gpt()
    program = prepare(model, 2, inputs)
    made = {n for n, p in program.stages[0].parameters.items() if p.kind == "constant"}
    cut = cut_stages(program, num_stages=4)
    for stage in cut.stages:
        loads = {n.target for n in stage.graph.nodes if n.op == "get_attr"}
        outputs = [n.args[0] for n in stage.constants.nodes if n.op == "output"]
        assert (set(outputs[0]) if outputs else set()) == loads & made
    assert made <= {name for stage in cut.stages for name in stage.parameters}


def test_an_unused_parameter_keeps_a_home() -> None:
    sketch = Sketch()
    loss = sketch.call(aten.sum.default, sketch.linears(start(sketch), 4, "a"))
    sketch.parameters["spare"] = Parameter("spare", (3,), torch.float64)
    cut = cut_stages(sketch.program(loss, 2), num_stages=2)
    assert ["spare" in stage.parameters for stage in cut.stages] == [True, False]


def test_stages_within_memory() -> None:
    sketch = Sketch()
    loss = sketch.call(aten.sum.default, sketch.linears(start(sketch), 8, "a"))
    program = sketch.program(loss, 4)
    matrix, value = HIDDEN * HIDDEN * 32, 4 * HIDDEN * 8
    limit = 2 * (matrix + 4 * value) + matrix  # a backward holds gradients too
    cut = cut_stages(program, num_stages=4, cluster=with_memory(limit))
    linears = [sum(n.target is aten.linear.default for n in stage.graph.nodes) for stage in cut.stages]
    assert linears == [2, 2, 2, 2]
    assert "does not fit" not in cut.log[-1]
    entry = cut_stages(program, num_stages=4, cluster=with_memory(limit // 2)).log[-1]
    assert "does not fit" in entry


def test_recomputation_leaves_room() -> None:
    """What only fits with the layers recomputed is cut with it, and said not to fit without."""
    model = GPT(GPTConfig(vocab_size=64, block_size=64, n_layer=8, n_embd=32, n_head=4))
    ids = torch.zeros(4, 64, dtype=torch.long)
    program = prepare(model, 4, {"idx": ids, "targets": ids.clone()})
    limit = 2 * 10**6
    assert "does not fit" in cut_stages(program, num_stages=4, cluster=with_memory(limit)).log[-1]
    cut = cut_stages(program, num_stages=4, cluster=with_memory(limit), recompute="full")
    assert "does not fit" not in cut.log[-1]
    for stage, count in zip(recompute_activations(cut, recompute="full").stages, (4, 3, 2, 1), strict=True):
        held = count_bytes(Ledger(stage, cut.mesh).kept(recomputed_groups(stage.graph)))
        states = 16 * sum(math.prod(p.shape) for p in stage.parameters.values() if p.kind == "parameter")
        assert states + count * held < limit


def test_recomputed_layers_weigh_more_than_the_head() -> None:
    """Layers cost four passes and the head three: with recomputation the first stage has fewer operators."""
    model = GPT(GPTConfig(vocab_size=1536, block_size=64, n_layer=8, n_embd=64, n_head=4))
    ids = torch.zeros(4, 64, dtype=torch.long)
    program = prepare(model, 2, {"idx": ids, "targets": ids.clone()})
    cluster = Cluster.load("laptop-cpu")
    counts = []
    for recompute in ("none", "full"):
        first, _ = cut_stages(program, num_stages=2, cluster=cluster, recompute=recompute).stages
        counts.append(sum(n.op == "call_function" for n in first.graph.nodes))
    none, full = counts
    assert full < none


@pytest.mark.parametrize(("schedule", "fits"), [("gpipe", False), ("1f1b", True)])
def test_memory_is_that_of_the_schedule(schedule: str, fits: bool) -> None:
    """GPipe holds every microbatch, 1F1B no more than there are ranks."""
    model = GPT(GPTConfig(vocab_size=64, block_size=64, n_layer=8, n_embd=32, n_head=4))
    ids = torch.zeros(4, 64, dtype=torch.long)
    program = prepare(model, 4, {"idx": ids, "targets": ids.clone()})
    options: dict[str, Any] = {"num_stages": 4, "num_microbatches": 16, "cluster": with_memory(4 * 10**6)}
    entry = cut_stages(program, schedule=schedule, **options).log[-1]
    assert ("does not fit" not in entry) is fits


def test_128_layers_are_cut_into_128_stages_none_empty() -> None:
    sketch = Sketch()
    x = start(sketch)
    for layer in range(128):
        x = sketch.call(aten.add.Tensor, x, sketch.linears(x, 12, f"h.{layer}"))
        x = sketch.call(aten.relu.default, sketch.call(aten.mul.Tensor, x, 0.1))
    program = sketch.program(sketch.call(aten.sum.default, x), 64)
    cut = cut_stages(program, num_stages=128)
    calls = [sum(n.op == "call_function" for n in stage.graph.nodes) for stage in cut.stages]
    assert len(calls) == 128
    assert min(calls) > 0
    assert sum(calls) == sum(n.op == "call_function" for n in program.stages[0].graph.nodes)


def test_a_cut_within_a_kernel_costs_what_its_parts_take() -> None:
    """Wherever a cut stands, both sides' forwards take what they are said to, once they are finished."""
    inputs = {"idx": torch.zeros(2, 16, dtype=torch.long), "targets": torch.zeros(2, 16, dtype=torch.long)}
    program = prepare(GPT(GPTConfig(16, 16, 2, 2, 32, dropout=0.1)), 2, inputs)
    cluster = Cluster.load("dgx-a100")
    times = time_uncut(program, cluster).pipeline(program.mesh, "1f1b", 1, 1).times
    durations = Durations(cluster, program.mesh, Precision("fp32"))
    within = 0
    for at in (place for place, fit in enumerate(times.may_cut) if fit):
        cut = cut_at(program, [at], "")
        for _, step in select_passes(Options(), "finish"):
            cut = step(cut)
        works = (map(forward_work, stage.graph.nodes) for stage in cut.stages)
        taken = [sum(1e9 * durations.seconds(work).total for work in own) for own in works]
        penalty = times.split_penalty[0][at]
        within += penalty > 0
        assert [sum(own) + penalty for own in (times.forward[:at], times.forward[at:])] == pytest.approx(taken, 1e-3)
    assert within == 3  # between a sum and its norm


@pytest.mark.parametrize(
    ("name", "recompute"),
    slow_rows_but([("gpt2", "none"), ("llama", "full")], product(("sample", "gpt2", "llama"), ("none", "full"))),
)
def test_no_cut_changes_a_bit(name: str, recompute: str) -> None:
    """Of the loss or a gradient, whatever kernels were made of the operators on either side."""
    torch.manual_seed(0)
    model, ids = MODELS[name]().double().train(), tokens(61)
    inputs = {"idx": ids["input_ids"], "targets": ids["labels"]} if name == "sample" else ids
    captured = shared_capture(model, mesh=Mesh(1, 2, 1), example_inputs=inputs)
    with show_progress("test") as say:
        program = run_passes(select_passes(Options(), "arrange", "divide"), captured, say)
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def finish(positions: list[int]) -> list[Tensor]:
        cut = cut_at(program, positions, "")
        for _, step in select_passes(Options(recompute), "finish"):
            cut = step(cut)
        return gradients(cut, weights, inputs)

    whole = finish([])
    places = [place for place, fit in enumerate(finish_uncut(program, recompute).may_cut) if fit]
    assert len(places) > 30
    for place in places[:: 1 if name == "sample" else 5]:
        assert all(map(torch.equal, finish([place]), whole)), place


class Skip(nn.Module):
    """A short chain that waits for all layers before it goes on."""

    def __init__(self, chain: str) -> None:
        super().__init__()
        self.table, self.side, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6)
        )
        self.chain = chain

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.table(idx)
        side = self.side(x)
        side = nn.functional.dropout(side, 0.1) if self.chain == "dropout" else nn.functional.silu(side)
        for layer in self.layers:
            x = x + layer(x)
        x = x * side if self.chain == "silu" else x + side
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("chain", ["dropout", "silu"])
def test_a_chain_over_a_long_skip_lets_stages_end(chain: str) -> None:
    ids = torch.zeros(2, 8, dtype=torch.long)
    program = prepare(Skip(chain), 4, {"idx": ids, "targets": ids.clone()})
    assert len(cut_stages(program, num_stages=8).stages) == 8


def test_parts_of_kernels_are_finished_once_whatever_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    order = finish_uncut(prepare(MODELS["sample"](), 2, {"idx": tokens()["input_ids"], "targets": tokens()["labels"]}))
    first = order.divide(lambda work: (float(work.moved),))
    monkeypatch.setattr(order, "_finish", None)  # which cannot be called
    again = order.divide(lambda work: (float(work.moved), float(work.launches)))
    for own, both in zip(first, again, strict=True):
        assert own.any()
        assert (own[..., 0] == both[..., 0]).all()
