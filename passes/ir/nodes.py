"""Reading a node: its call's arguments, its shape, its place in the user's code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from autoptd.passes.ir.node_info import info
from autoptd.runtime import kernels


def refuse_random(node: fx.Node, target: Any) -> None:
    """Raise ValueError where the operator that `node` calls draws numbers."""
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        raise ValueError(
            f"{where(node)}: {target} draws random numbers, which would differ between meshes; only dropout and "
            "attention dropout are supported: draw a mask as the dropout of ones, or pass the numbers in as an input"
        )


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of the node's call, by position or by its schema name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def name_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator of torch by name, defaults included."""
    arguments = target._schema.arguments
    values = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return values | {a.name: value for a, value in zip(arguments, args, strict=False)} | dict(kwargs)


def arguments_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among the call's arguments, in order and with repetitions."""
    return nodes_in((node.args, node.kwargs))


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
    """Return whether such a result, or the first of several, can have a gradient: floating or complex numbers."""
    first = value[0] if isinstance(value, (tuple, list)) else value
    return isinstance(first, torch.Tensor) and (first.is_floating_point() or first.is_complex())


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
    return str(info(node).path or next((name.rpartition(".")[0] for name in names), ""))


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
    """Return the key of an operator's rules: "aten.linear", "kernels.dropout", "mylib.op"."""
    packet = getattr(target, "overloadpacket", target)
    if isinstance(packet, OpOverloadPacket):
        return str(packet)
    name: str = target.__name__
    return f"kernels.{name}" if getattr(kernels, name, None) is target else f"{target.__module__}.{name}"


def called(node: fx.Node) -> str:
    """Return the call's name in messages, alike in all layers: "aten.cumsum (gpt.py:52)"."""
    line = info(node).line
    return operator_name(node.target) + (f" ({line})" if line else "")
