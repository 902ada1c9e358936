"""A node of a graph: what passes know about it, its call's arguments, and its value on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from autoptd.runtime import kernels
from autoptd.runtime.comm.rank import CPU, Rank
from autoptd.runtime.kernels.autograd_function import AutogradFunction
from autoptd.runtime.program.manifest import Result
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import REPLICATED, Placement

_KEY = "info"
REQUIRED = inspect.Parameter.empty  # in place of a default
Role = Literal["rank", "input", "boundary"]


class NodeInfo(NamedTuple):
    """The facts about one node besides ``node.meta["val"]``, torch's own key for its meta tensor(s).

    - `path` of the module that calls it ("h.0.attn"), and `line` of its code ("gpt.py:52"); either may be empty.
    - `role` of a placeholder: the "rank", a batch "input", or a value from the stage before ("boundary").
    - `requires_grad` of a boundary: whether a gradient goes back; None where its dtype decides.
    - `placement` of the value on the mesh axes; of several results a tuple of these.
    - `layer`: the stack of layers that the call belongs to, and the number of the layer in it.
    - `recompute`: the label of the group that the backward computes again; None where the result is kept.
    - `region`: the graph of a higher-order operator, in a captured graph only.
    - `name`: the name that `rename_nodes` gives the node; empty where it has that already.
    - `items`: the positions in the order before fusion that the call stands for, and `value` that of its result.
    - `outputs` of the output node: what its last results are, those that a call returns besides the loss.
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
    outputs: tuple[Result, ...] = ()

    @property
    def place(self) -> NodeInfo:
        """Nothing but the place in the user's code, and in the model's layers."""
        return NodeInfo(self.path, self.line, layer=self.layer)

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


def info(node: fx.Node) -> NodeInfo:
    """Return what the compiler knows about `node`. Raises KeyError for a node that no pass described."""
    found: NodeInfo = node.meta[_KEY]
    return found


def require_info(graph: fx.Graph, at: str) -> None:
    """Raise ValueError if a node of `graph` has no `NodeInfo` or no meta tensor; `at` names the graph.

    Or if a partial sum is read by a call that is neither partial itself nor a collective.
    """
    for node in graph.nodes:
        if _KEY not in node.meta or "val" not in node.meta:
            raise ValueError(
                f"{at}: nothing is known about {node.format_node()}; expected every node to be described by the pass "
                "that writes it (passes.ir.nodes.describe)"
            )
    for value, user in ((n, user) for n in graph.nodes if info(n).is_partial for user in n.users):
        collective = getattr(user.target, "__module__", "").startswith("autoptd.runtime.collectives")
        if not (collective or info(user).is_partial):
            raise ValueError(
                f"{at}: {user.format_node()} reads {value}, whose terms are not summed over the tensor ranks; "
                "expected an all-reduce between the two"
            )


def add_node(
    graph: fx.Graph, op: str, target: Any, args: Any = (), kwargs: Any = (), name: str | None = None, meta: Any = ()
) -> fx.Node:
    """Write a node at the insert point of `graph`, with a ``meta`` dict of its own.

    Takes less than half the time of ``graph.create_node``, which looks for symbolic numbers in all arguments, and of an
    assignment to ``meta``, which enters the node into tables anew. The arguments are set as an assignment sets them.
    """
    node = graph.create_node(op, target, name=name)
    node._update_args_kwargs(tuple(args), dict(kwargs))
    node.meta.update(meta)
    return node


def copy_node(graph: fx.Graph, node: fx.Node, value_of: Callable[[fx.Node], Any] = lambda node: node) -> fx.Node:
    """Copy a node into `graph`, its arguments as `value_of` gives them; the values of its ``meta`` are shared."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    return add_node(graph, node.op, node.target, args, kwargs, node.name, node.meta)


def describe(node: fx.Node, val: Any, about: NodeInfo, **changes: Any) -> None:
    """Set the ``meta`` of `node`: its meta tensor(s) `val`, and `about` with `changes`."""
    node.meta.clear()
    node.meta.update({"val": val, _KEY: about._replace(**changes) if changes else about})


def change_info(node: fx.Node, **changes: Any) -> None:
    """Replace fields of what the compiler knows about `node`."""
    node.meta[_KEY] = info(node)._replace(**changes)


def refuse_random(node: fx.Node, target: Any) -> None:
    """Raise ValueError where the operator that `node` calls draws numbers."""
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        raise ValueError(
            f"{where(node)}: {target} draws random numbers in a way that no program repeats on every mesh: draw with "
            "dropout, rand, randn, randint, normal, bernoulli or one of uniform_, exponential_, or pass the numbers in "
            "as an input"
        )


@cache
def parameters_of(target: Any) -> Sequence[tuple[str, Any, bool]]:
    """Return the parameters of an operator of torch, or of a Python function, in order.

    Of each there are its name, its default, and whether a call may give it by position or by name, as it likes.
    """
    if isinstance(target, OpOverload):
        rows = ((a, a.default_value if a.has_default_value() else REQUIRED) for a in target._schema.arguments)
        return [(a.name, default, not a.kwarg_only) for a, default in rows]
    own = inspect.signature(target).parameters.values()
    return [(p.name, p.default, p.kind is p.POSITIONAL_OR_KEYWORD) for p in own]


def place_of(target: Any, name: str) -> int | None:
    """Return the position of a parameter of an operator or a function; None if it has none of that name."""
    return next((i for i, (own, *_) in enumerate(parameters_of(target)) if own == name), None)


def name_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator of torch, or of a Python function, by name, defaults included.

    A pass writes them by position or by keyword, and a text is read back with all by position: read one that has a
    default here, not in ``node.args`` or ``node.kwargs``.
    """
    known = parameters_of(target)
    defaults = {name: default for name, default, _ in known if default is not REQUIRED}
    return {**defaults, **{name: value for (name, *_), value in zip(known, args, strict=False)}, **kwargs}


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of the node's call by name, defaults included."""
    return name_arguments(node.target, node.args, node.kwargs)


def argument(node: fx.Node, name: str, absent: Any = None) -> Any:
    """Return an argument of the node's call, or its default; `absent` where the operator has no such parameter."""
    return arguments(node).get(name, absent)


def nodes_in(value: Any) -> list[fx.Node]:
    """Return the nodes in nested arguments, in order and with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def results_of(node: fx.Node) -> Sequence[Any]:
    """Return the meta tensors of a call's results; of one result, that alone."""
    value = node.meta["val"]
    return value if isinstance(value, (tuple, list)) else [value]


def as_results(node: fx.Node, found: Iterable[Any]) -> Any:
    """Return what was `found` of each of a call's results: a tuple where it has several, else the only one."""
    return tuple(found) if isinstance(node.meta["val"], (tuple, list)) else next(iter(found))


def has_gradients(value: object) -> bool:
    """Return whether such a result, or one of several, can have a gradient: floating or complex numbers."""
    results = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in results)


def wants_gradient(node: fx.Node) -> bool:
    """Return whether the gradient of a boundary's value goes back to the stage before."""
    wanted = info(node).requires_grad
    return has_gradients(node.meta["val"]) if wanted is None else wanted


def where(node: fx.Node) -> str:
    """Return the node's place in the user's model: "h.0.attn.c_attn (gpt.py:52)"."""
    path, line = info(node).path or node.name, info(node).line
    return f"{path} ({line})" if line else str(path)


def module_path(node: fx.Node) -> str:
    """Return the module path of a call; in a stage traced from its text, that of its parameter."""
    if node.op != "call_function":
        return ""
    names = [str(taken.target) for taken in node.all_input_nodes if taken.op == "get_attr"]
    return str(info(node).path or next((n.rpartition(".")[0] for n in names if not n.startswith("constant.")), ""))


def walk(
    nodes: Iterable[fx.Node], parts: Callable[[fx.Node], Iterable[fx.Node]] = attrgetter("all_input_nodes")
) -> Iterator[fx.Node]:
    """Yield `nodes`, their `parts`, theirs and so on, each once; by default all that `nodes` are computed from."""
    pending = list(dict.fromkeys(nodes))
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        fresh = [part for part in parts(node) if part not in seen]
        seen.update(fresh)
        pending += fresh


def is_lifted(name: str) -> bool:
    """Return whether a tensor stems from the forward's code, not from the user's modules."""
    return name.rpartition(".")[2].startswith("lifted_tensor_")


def aten_name(target: Any) -> str:
    """Return "linear" of ``aten.linear.default``; "" for a target that is not an operator of torch's dispatcher."""
    return target._schema.name.removeprefix("aten::") if isinstance(target, OpOverload) else ""


def operator_name(target: Any) -> str:
    """Return the key of an operator's rules: "aten.linear", "kernels.dropout", "mylib.op", "module:Class"."""
    packet = getattr(target, "overloadpacket", target)
    if isinstance(packet, AutogradFunction):
        return packet.path
    if isinstance(packet, OpOverloadPacket):
        return str(packet)
    name: str = target.__name__
    return f"kernels.{name}" if getattr(kernels, name, None) is target else f"{target.__module__}.{name}"


def called(node: fx.Node) -> str:
    """Return the call's name in messages, alike in all layers: "aten.cumsum (gpt.py:52)"."""
    line = info(node).line
    return operator_name(node.target) + (f" ({line})" if line else "")


def shaping_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a call without the number of a dropout, which says nothing about shapes or costs."""
    place = place_of(node.target, "operator") if inspect.isfunction(node.target) else None
    return node.args if place is None else (*node.args[:place], *node.args[place + 1 :])


class Propagation:
    """Runs nodes on their arguments' ``meta["val"]``; equal calls of repeated layers share one result."""

    def __init__(self, mesh: Mesh, device: torch.device = CPU) -> None:
        self.rank = Rank.local(mesh, device=device)
        self.known: dict[tuple[Any, ...], Any] = {}

    def run(self, node: fx.Node) -> Any:
        """Return the meta value of a ``call_function`` node, from its arguments' values."""
        key = node.target, self._key((shaping_arguments(node), tuple(sorted(node.kwargs.items()))))
        if key not in self.known:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            with torch.no_grad():
                self.known[key] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.known[key]

    def write(self, at: fx.Node, target: Any, args: Any, kwargs: Any, like: fx.Node, **about: Any) -> fx.Node:
        """Write a call before the node `at`, with the facts of `like` but for those in `about`."""
        with at.graph.inserting_before(at):
            made = add_node(at.graph, "call_function", target, args, kwargs)
        describe(made, self.run(made), info(like), **about)
        return made

    def _value(self, node: fx.Node) -> Any:
        return self.rank if info(node).role == "rank" else node.meta["val"]

    def _key(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, fx.Node):
            found = self._value(value)
            return ("rank",) if found is self.rank else self._key(found)
        if isinstance(value, torch.Tensor):
            return (tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, (tuple, list)):
            return tuple(self._key(v) for v in value)
        return (type(value), value if value.__hash__ else str(value))
