"""The normalised graph while it is written, and a call as rewrite rules see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.ir.gradients import may_be_trained
from autoptd.passes.ir.node_info import NodeInfo, describe
from autoptd.passes.ir.nodes import name_arguments


class Writer:
    """A writer of the normalised graph; `trained` holds the nodes through which a gradient reaches a parameter."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.trained: set[fx.Node] = set()
        self.dropouts = 0
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.rank = self.graph.placeholder("rank")
        describe(self.rank, None, NodeInfo(role="rank"))

    def emit(
        self,
        target: Any,
        args: tuple[Any, ...],
        meta: Mapping[str, Any],
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Append a call of `target`, its ``meta`` taken from the operator it replaces."""
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        node.meta = dict(meta)
        if may_be_trained(node) and not self.trained.isdisjoint(node.all_input_nodes):
            self.trained.add(node)
        return node

    def next_dropout(self) -> int:
        """Return the number of the next operator that draws a mask."""
        self.dropouts += 1
        return self.dropouts - 1


@dataclass(frozen=True)
class Call:
    """One call of the exported graph, `node`, with arguments of the new graph and the ``meta`` of its result."""

    writer: Writer
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    meta: Mapping[str, Any]

    @property
    def source(self) -> fx.Node:
        """Return the first argument, a node of the new graph."""
        node: fx.Node = self.args[0]
        return node

    @property
    def given(self) -> Tensor:
        """Return the first argument's shape and dtype."""
        val: Tensor = self.source.meta["val"]
        return val

    @property
    def val(self) -> Any:
        """Return the result's shape and dtype: a meta tensor, or a list of them."""
        return self.meta["val"]

    def argument(self, name: str) -> Any:
        """Return the argument `name`, by position, keyword or default."""
        return name_arguments(self.node.target, self.args, self.kwargs)[name]

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call of `target` in its place."""
        return self.writer.emit(target, args, self.meta, kwargs)
