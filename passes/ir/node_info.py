"""The facts that passes keep about a node of a stage's graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from autoptd.runtime.program.placement import REPLICATED, Placement

_KEY = "info"
Role = Literal["rank", "input", "boundary"]


@dataclass(frozen=True)
class NodeInfo:
    """The facts about one node besides ``node.meta["val"]``, torch's own key for its meta tensor(s).

    - `path`: the path of the module that calls it, as the user knows it ("h.0.attn"), and `line` of its code
      ("gpt.py:52"); either may be empty.
    - `role` of a placeholder: the "rank", a batch "input", or a value from the stage before ("boundary").
    - `requires_grad` of a boundary: whether a gradient goes back; None where its dtype decides.
    - `placement` of the value on the mesh axes; of several results a tuple of these.
    - `layer`: the stack of layers that the call belongs to, and the number of the layer in it.
    - `recompute`: the label of the group that the backward computes again; None where the result is kept.
    - `region`: the graph of a higher-order operator, in a captured graph only.
    - `name`: the name that `rename_nodes` gives the node; empty where it has that already.
    - `items`: the positions in the order before fusion that the call stands for, and `value` that of its result.
    """

    path: str = ""
    line: str = ""
    role: Role | None = None
    requires_grad: bool | None = None
    placement: Placement | tuple[Placement, ...] = REPLICATED
    layer: tuple[int, int] | None = None
    recompute: str | None = None
    region: fx.Graph | None = None
    name: str = ""
    items: tuple[int, ...] = ()
    value: int | None = None

    @property
    def place(self) -> NodeInfo:
        """Nothing but the place in the user's code."""
        return NodeInfo(self.path, self.line)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement of each result."""
        return (self.placement,) if isinstance(self.placement, Placement) else self.placement

    @property
    def is_divided(self) -> bool:
        return any(placement.is_divided for placement in self.placements)

    @property
    def is_partial(self) -> bool:
        return any(placement.is_partial for placement in self.placements)

    @property
    def has_partial_gradient(self) -> bool:
        return any(placement.has_partial_gradient for placement in self.placements)

    def at(self, other: NodeInfo) -> NodeInfo:
        """Return the same facts at the place of `other` in the user's code: one heading for several results."""
        return replace(self, path=other.path, line=other.line)


def info(node: fx.Node) -> NodeInfo:
    """Return what the compiler knows about `node`. Raises KeyError for a node that no pass described."""
    found: NodeInfo = node.meta[_KEY]
    return found


def require_info(graph: fx.Graph, at: str) -> None:
    """Raise ValueError if a node of `graph` has no `NodeInfo` or no meta tensor; `at` names the graph."""
    for node in graph.nodes:
        if _KEY not in node.meta or "val" not in node.meta:
            raise ValueError(
                f"{at}: nothing is known about {node.format_node()}; expected every node to be described by the pass "
                "that writes it (passes.ir.node_info.describe)"
            )


def require_reduced(graph: fx.Graph, at: str) -> None:
    """Raise ValueError if a partial sum is read by a call that is neither partial itself nor a collective."""
    for node in graph.nodes:
        for user in node.users if info(node).is_partial else ():
            collective = getattr(user.target, "__module__", "").startswith("autoptd.runtime.collectives")
            if not (collective or info(user).is_partial):
                raise ValueError(
                    f"{at}: {user.format_node()} reads {node}, whose terms are not summed over the tensor ranks; "
                    "expected an all-reduce between the two"
                )


def describe(node: fx.Node, val: Any, about: NodeInfo, **changes: Any) -> None:
    """Set the ``meta`` of `node`: its meta tensor(s) `val`, and `about` with `changes`."""
    node.meta = {"val": val, _KEY: replace(about, **changes) if changes else about}


def change_info(node: fx.Node, **changes: Any) -> None:
    """Replace fields of what the compiler knows about `node`."""
    node.meta[_KEY] = replace(info(node), **changes)
