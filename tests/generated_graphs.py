"""Random graphs of the operators that fusion reads: its chains, chains that are nearly them, and shared values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoptd.passes.ir.nodes import NodeInfo, Propagation, Role, describe
from autoptd.passes.ir.program import Program, Stage
from autoptd.runtime import aten, kernels
from autoptd.runtime.program.manifest import Output
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter

B, S, HEADS, SIZE = 2, 3, 2, 4
H = HEADS * SIZE


class GraphWriter:
    """Writes one random graph: values [b, s, h] are made from each other by `steps`."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.random = random.Random(seed)
        self.dtype = dtype
        self.graph = fx.Graph()
        self.parameters: dict[str, Parameter] = {}
        self.propagation = Propagation(Mesh(1, 1, 1))
        self.dropouts = 0
        self.rank = self.placeholder("rank", "rank", None)
        self.values = [self.placeholder("x", "input", self.meta(B, S, H))]

    def program(self, steps: int) -> Program:
        """A program of one stage whose loss reads some of the values it makes."""
        for _ in range(steps):
            make = self.random.choice(self.STEPS)
            source = self.values[-1] if self.random.random() < 0.7 else self.random.choice(self.values)
            self.values.append(make(self, source))
        total = self.call(aten.sum.default, self.values[-1])
        if self.random.random() < 0.5:
            total = self.call(aten.add.Tensor, total, self.call(aten.sum.default, self.random.choice(self.values)))
        describe(self.graph.output(total), None, NodeInfo())
        empty = fx.Graph()
        describe(empty.output({}), None, NodeInfo())
        return Program(Mesh(1, 1, 1), (Stage(self.graph, self.parameters, empty),), (), Output("tensor"), {}, (), {})

    def meta(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def placeholder(self, name: str, role: Role, val: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        describe(node, val, NodeInfo(role=role))
        return node

    def weight(self, *shape: int, trained: bool = True) -> fx.Node:
        name = f"w{len(self.parameters)}"
        self.parameters[name] = Parameter(name, shape, self.dtype, requires_grad=trained)
        node = self.graph.get_attr(name)
        describe(node, self.meta(*shape), NodeInfo())
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        describe(node, self.propagation.run(node), NodeInfo())
        return node

    def two(self, target: Any, one: Any, other: Any) -> fx.Node:
        """A commutative call, its arguments in either order."""
        args = (one, other) if self.random.random() < 0.5 or not isinstance(other, fx.Node) else (other, one)
        return self.call(target, *args)

    # Steps: [b, s, h] -> [b, s, h]

    def linear(self, x: fx.Node) -> fx.Node:
        if self.random.random() < 0.3:
            flat = self.call(aten.reshape.default, x, [B * S, H])
            made = self.call(aten.addmm.default, self.weight(H), flat, self.weight(H, H))
            return self.call(aten.reshape.default, made, [B, S, H])
        bias = (self.weight(H),) if self.random.random() < 0.7 else ()
        return self.call(aten.linear.default, x, self.weight(H, H), *bias)

    def bias(self, x: fx.Node) -> fx.Node:
        return self.two(aten.add.Tensor, x, self.weight(H))

    def gelu(self, x: fx.Node) -> fx.Node:
        return self.call(aten.gelu.default, x, **self.random.choice(({}, {"approximate": "tanh"})))

    def written_gelu(self, x: fx.Node) -> fx.Node:
        scale = self.random.choice((0.044715, 0.044715, 0.0447))
        root = self.random.choice((math.sqrt(2 / math.pi), 0.79788456))  # BLOOM's has eight digits
        cube = self.call(aten.mul.Tensor, self.call(aten.pow.Tensor_Scalar, x, 3.0), scale)
        inner = self.call(aten.mul.Tensor, self.two(aten.add.Tensor, x, cube), root)
        one = self.call(aten.add.Tensor, self.call(aten.tanh.default, inner), 1.0)
        return self.two(aten.mul.Tensor, self.call(aten.mul.Tensor, x, 0.5), one)

    def exact_gelu(self, x: fx.Node) -> fx.Node:
        root = self.random.choice((math.sqrt(2), 1.4142))
        error = self.call(aten.erf.default, self.call(aten.div.Tensor, x, root))
        return self.call(aten.mul.Tensor, self.two(aten.mul.Tensor, x, self.call(aten.add.Tensor, error, 1)), 0.5)

    def silu(self, x: fx.Node) -> fx.Node:
        if self.random.random() < 0.5:
            return self.call(aten.silu.default, x)
        scaled = x if self.random.random() < 0.7 else self.call(aten.mul.Tensor, x, 1.702)
        return self.two(aten.mul.Tensor, x, self.call(aten.sigmoid.default, scaled))

    def dropout(self, x: fx.Node) -> fx.Node:
        self.dropouts += 1
        return self.call(kernels.dropout, self.rank, x, self.random.choice((0.1, 0.5)), self.dropouts)

    def residual(self, x: fx.Node) -> fx.Node:
        return self.two(aten.add.Tensor, x, self.random.choice(self.values))

    def scaled_residual(self, x: fx.Node) -> fx.Node:
        return self.call(aten.add.Tensor, x, self.random.choice(self.values), alpha=0.5)

    def product(self, x: fx.Node) -> fx.Node:
        return self.two(aten.mul.Tensor, x, self.random.choice(self.values))

    def layer_norm(self, x: fx.Node) -> fx.Node:
        shift = self.weight(H) if self.random.random() < 0.7 else None
        flat = self.random.random() < 0.3
        source = self.call(aten.reshape.default, x, [B * S, H]) if flat else x
        made = self.call(aten.layer_norm.default, source, [H], self.weight(H), shift)
        return self.call(aten.reshape.default, made, [B, S, H]) if flat else made

    def rms_norm(self, x: fx.Node) -> fx.Node:
        power = self.random.random() < 0.5
        square = self.call(aten.pow.Tensor_Scalar, x, 2) if power else self.call(aten.mul.Tensor, x, x)
        mean = self.call(aten.mean.dim, square, [self.random.choice((-1, -1, 1))], True)
        root = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, mean, 1e-3))
        return self.two(aten.mul.Tensor, self.weight(H), self.two(aten.mul.Tensor, x, root))

    def rotary(self, x: fx.Node) -> fx.Node:
        heads = self.call(aten.reshape.default, x, [B, S, HEADS, SIZE])
        part = self.random.choice((SIZE, SIZE // 2))
        turned = heads if part == SIZE else self.call(aten.slice.Tensor, heads, 3, 0, part)
        rest = [] if part == SIZE else [self.call(aten.slice.Tensor, heads, 3, part, SIZE)]
        trained = self.random.random() < 0.1  # then they are no constant tables
        cos, sin = (self.weight(1, S, 1, part, trained=trained) for _ in range(2))
        first = self.call(aten.mul.Tensor, turned, cos)
        rotate = self.random.choice((self.halves, self.pairs))
        second = self.call(aten.mul.Tensor, rotate(turned, part), sin)
        made = self.two(aten.add.Tensor, first, second)
        joined = self.call(aten.cat.default, [made, *rest], -1) if rest else made
        return self.call(aten.reshape.default, joined, [B, S, H])

    def halves(self, x: fx.Node, size: int) -> fx.Node:
        low = self.call(aten.slice.Tensor, x, 3, 0, size // 2)
        high = self.call(aten.slice.Tensor, x, 3, size // 2, size)
        if self.random.random() < 0.2:  # not a rotation
            low, high = high, low
        return self.call(aten.cat.default, [self.call(aten.neg.default, high), low], -1)

    def pairs(self, x: fx.Node, size: int) -> fx.Node:
        even = self.call(aten.slice.Tensor, x, 3, 0, size, 2)
        odd = self.call(aten.slice.Tensor, x, 3, 1, size, 2)
        stack = self.call(aten.stack.default, [self.call(aten.neg.default, odd), even], -1)
        return self.call(aten.reshape.default, stack, [B, S, HEADS, size])

    STEPS: tuple[Callable[[GraphWriter, fx.Node], fx.Node], ...] = (
        linear,
        linear,
        bias,
        gelu,
        written_gelu,
        exact_gelu,
        silu,
        dropout,
        residual,
        residual,
        scaled_residual,
        product,
        layer_norm,
        rms_norm,
        rotary,
    )
