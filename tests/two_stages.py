"""A cut program made by hand: two stages, with a tied table, a constant, and two values that cross."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.ir.nodes import NodeInfo, Propagation, Role, change_info, describe
from autoptd.passes.ir.program import Program, Stage
from autoptd.runtime import aten, collectives, kernels
from autoptd.runtime.program.manifest import Boundary, Input, Manifest, Output, StageInterface
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import PARTIAL_SUM, REPLICATED, Parameter, Placement, Segment, Shard
from autoptd.runtime.program.schedule import Schedule, make_schedule

HIDDEN, HEADS, LENGTH, VOCABULARY = 16, 4, 8, 30
META = torch.device("meta")
F32 = torch.float32


class GraphMaker:
    """Adds nodes with the meta that passes give them."""

    def __init__(self, mesh: Mesh, parameters: dict[str, Parameter]) -> None:
        self.graph = fx.Graph()
        self.parameters = parameters
        self.used: dict[str, fx.Node] = {}
        self._propagation = Propagation(mesh)
        self._tensor = mesh.tensor

    def argument(self, name: str, role: Role, shape: tuple[int, ...] = (), dtype: torch.dtype = F32) -> fx.Node:
        node = self.graph.placeholder(name)
        rank = self._propagation.rank
        val = rank if role == "rank" else torch.empty(shape, dtype=dtype, device=META)
        describe(node, val, NodeInfo(role=role))
        return node

    def parameter(self, name: str) -> fx.Node:
        if name not in self.used:
            parameter = self.parameters[name]
            node = self.used[name] = self.graph.create_node("get_attr", name)
            shape = parameter.placement["tensor"].local_shape(parameter.shape, self._tensor)
            describe(node, torch.empty(shape, dtype=parameter.dtype, device=META), NodeInfo())
        return self.used[name]

    def call(
        self,
        name: str,
        target: Any,
        *args: Any,
        path: str = "",
        line: int = 0,
        divided: int | None = None,
        partial: bool = False,
        **kwargs: Any,
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        where = f"gpt.py:{line}" if line else ""
        placement = REPLICATED if divided is None else Placement(tensor=Shard(divided))
        about = NodeInfo(path, where, placement=PARTIAL_SUM if partial else placement)
        describe(node, self._propagation.run(node), about)
        return node


def two_stages(tensor: int = 2) -> tuple[Program, Manifest, Schedule]:
    """The program, its manifest and its 1F1B schedule on mesh (`tensor`, 2, 1)."""
    mesh = Mesh(tensor, 2, 1)
    parameters = _parameters()
    first, second = GraphMaker(mesh, parameters), GraphMaker(mesh, parameters)
    _first_stage(first, tensor)
    _second_stage(second, tensor)
    stages = (_stage(first, _constants(mesh)), _stage(second, fx.Graph()))
    ids = Input("ids", (1, LENGTH), torch.int64, 0)
    targets = Input("targets", (1, LENGTH), torch.int64, 0)
    between = (
        Boundary("h", (1, LENGTH, HIDDEN), F32, True),
        Boundary("q", (1, HEADS // tensor, LENGTH, HIDDEN // HEADS), F32, True, Placement(tensor=Shard(1))),
    )
    interfaces = (
        StageInterface(0, (), between, ("ids",), tuple(first.used)),
        StageInterface(1, between, (), ("targets",), tuple(second.used)),
    )
    inputs, output = (ids, targets), Output("tensor")
    log = ("capture 40 nodes", "shard_tensors 40 -> 46 nodes", "cut_stages 2 stages")
    program = Program(mesh, stages, inputs, output, {"head.weight": "wte.weight"}, log)
    manifest = Manifest(mesh, "1f1b", 1, 4, 1, True, 0, inputs, interfaces, parameters, program.aliases, output)
    return program, manifest, make_schedule("1f1b", 2, 4, 1)


def random_tensors(manifest: Manifest) -> dict[str, Tensor]:
    """Whole tensors for every parameter; the mask is a causal one."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype).mul_(0.3)
        for name, p in manifest.parameters.items()
        if p.kind == "parameter"
    }
    return {**tensors, "h.0.attn.mask": torch.ones(LENGTH, LENGTH).tril()}


def _parameters() -> dict[str, Parameter]:
    rows = Placement(tensor=Shard(0, (Segment(1, VOCABULARY, 1, True),)))
    packed = Placement(tensor=Shard(0, (Segment(3, HEADS, HIDDEN // HEADS, True),)))
    columns = Placement(tensor=Shard(1, (Segment(1, HIDDEN, 1, True),)))
    listed = [
        Parameter("wte.weight", (VOCABULARY, HIDDEN), F32, placement=rows),
        Parameter("h.0.ln_1.weight", (HIDDEN,), F32),
        Parameter("h.0.ln_1.bias", (HIDDEN,), F32),
        Parameter("h.0.attn.c_attn.weight", (3 * HIDDEN, HIDDEN), F32, placement=packed),
        Parameter("h.0.attn.c_attn.bias", (3 * HIDDEN,), F32, placement=packed),
        Parameter("h.0.attn.c_proj.weight", (HIDDEN, HIDDEN), F32, placement=columns),
        Parameter("h.0.attn.c_proj.bias", (HIDDEN,), F32),
        Parameter("h.0.attn.mask", (LENGTH, LENGTH), F32, kind="buffer", requires_grad=False),
        Parameter("constant.bias", (LENGTH, LENGTH), F32, kind="constant", requires_grad=False),
    ]
    return {parameter.name: parameter for parameter in listed}


def _constants(mesh: Mesh) -> fx.Graph:
    maker = GraphMaker(mesh, _parameters())
    path = "h.0.attn"
    zeros = maker.call("zeros", aten.zeros.default, [LENGTH, LENGTH], path=path, line=40, device=META)
    hidden = maker.call("hidden", aten.eq.Scalar, maker.parameter("h.0.attn.mask"), 0, path=path, line=41)
    filled = maker.call("masked_fill", aten.masked_fill.Scalar, zeros, hidden, -torch.inf, path=path, line=41)
    describe(maker.graph.output({"constant.bias": filled}), None, NodeInfo())
    return maker.graph


def _first_stage(maker: GraphMaker, tensor: int) -> None:
    call, parameter = maker.call, maker.parameter
    rank = maker.argument("rank", "rank")
    ids = maker.argument("ids", "input", (1, LENGTH), torch.int64)
    table = parameter("wte.weight")
    wte = call("wte", kernels.embedding, rank, table, ids, VOCABULARY, path="wte", line=80, partial=True)
    wte = call("wte_g", collectives.reduce_from_tensor, rank, wte, path="wte", line=80)
    drop = call("drop", kernels.dropout, rank, wte, 0.1, 0, path="drop", line=80, sample=0)
    norm = (parameter("h.0.ln_1.weight"), parameter("h.0.ln_1.bias"))
    ln = call("ln_1", aten.layer_norm.default, drop, [HIDDEN], *norm, path="h.0.ln_1", line=60)
    ln = call("ln_1_f", collectives.copy_to_tensor, rank, ln, path="h.0.ln_1", line=60)
    path, width, heads = "h.0.attn", HIDDEN // tensor, HEADS // tensor
    packed = (parameter("h.0.attn.c_attn.weight"), parameter("h.0.attn.c_attn.bias"))
    qkv = call("c_attn", aten.linear.default, ln, *packed, path=f"{path}.c_attn", line=30, divided=2)
    split = call("split", aten.split.Tensor, qkv, width, 2, path=path, line=30, divided=2)
    parts = [call(name, operator.getitem, split, i, path=path, line=30, divided=2) for i, name in enumerate("qkv")]
    shape = [1, LENGTH, heads, HIDDEN // HEADS]
    views = [call("view", aten.view.default, x, shape, path=path, line=31, divided=2) for x in parts]
    q, k, v = (call("transpose", aten.transpose.int, x, 1, 2, path=path, line=31, divided=1) for x in views)
    attention = aten.scaled_dot_product_attention.default
    bias = parameter("constant.bias")
    y = call("attention", attention, q, k, v, bias, path=path, line=33, divided=1)
    y = call("transpose_y", aten.transpose.int, y, 1, 2, path=path, line=34, divided=2)
    y = call("reshape", aten.reshape.default, y, [1, LENGTH, width], path=path, line=34, divided=2)
    weight = parameter("h.0.attn.c_proj.weight")
    y = call("c_proj", aten.linear.default, y, weight, path=f"{path}.c_proj", line=35, partial=True)
    y = call("c_proj_g", collectives.reduce_from_tensor, rank, y, path=f"{path}.c_proj", line=35)
    y = call("c_proj_biased", aten.add.Tensor, y, parameter("h.0.attn.c_proj.bias"), path=path, line=35)
    h = call("h_0", aten.add.Tensor, drop, y, path="h.0", line=61)
    describe(maker.graph.output((h, q)), None, NodeInfo())


def _second_stage(maker: GraphMaker, tensor: int) -> None:
    call = maker.call
    rank = maker.argument("rank", "rank")
    h = maker.argument("h", "boundary", (1, LENGTH, HIDDEN))
    q = maker.argument("q", "boundary", (1, HEADS // tensor, LENGTH, HIDDEN // HEADS))
    change_info(q, placement=Placement(tensor=Shard(1)))
    targets = maker.argument("targets", "input", (1, LENGTH), torch.int64)
    scale = call("mean", aten.mean.default, q, path="gate", line=70, partial=True)
    scale = call("mean_g", collectives.reduce_from_tensor, rank, scale, path="gate", line=70)
    made = call("new", aten.full.default, [], 1.5, path="gate", line=71, dtype=F32, device=META, pin_memory=False)
    h = call("gated", aten.addcmul.default, h, scale, made, path="gate", line=71, value=0.5)
    h = call("gated_f", collectives.copy_to_tensor, rank, h, path="gate", line=71)
    logits = call("head", aten.linear.default, h, maker.parameter("wte.weight"), path="head", line=90, divided=2)
    logits = call("logits", aten.view.default, logits, [LENGTH, VOCABULARY // tensor], line=91, divided=1)
    flat = call("flat", aten.view.default, targets, [LENGTH], line=91)
    loss = call("loss", kernels.cross_entropy, rank, logits, flat, VOCABULARY, line=91)
    describe(maker.graph.output(loss), None, NodeInfo())


def _stage(maker: GraphMaker, constants: fx.Graph) -> Stage:
    return Stage(maker.graph, {name: maker.parameters[name] for name in maker.used}, constants)
