"""Names for nodes from their module paths: ``h6_attn_c_attn``, ``layers3_self_attn_q_proj``."""

import itertools
import operator
import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import add_node, change_info, info, walk

SHORTER = {"scaled_dot_product_attention": "sdpa", "scaled_softmax": "softmax", "cross_entropy_loss": "loss"}
RESULTS = {"route": ("order", "counts")}  # that have names of their own
_INDEX = re.compile(r"_(\d+)(?=_|$)")


def name_nodes(graph: fx.Graph, buffers: Container[str]) -> fx.Graph:
    """Copy `graph` without dead nodes, each node named after its module path and operator.

    Values that depend on no more than `buffers` come in the order of their uses, whatever the model's own order: some
    models of transformers make tables in a set's order, which differs from process to process.

    The last node of a leaf module's call is named after the module itself; containers around the first indexed list
    ("transformer", "model") are left out. Equal graphs get equal names.
    """
    needed = set(walk(node for node in graph.nodes if node.op in ("output", "placeholder")))
    live = [node for node in graph.nodes if node in needed]
    containers = find_containers(info(node).path for node in live)
    heads = _module_results(live)
    named, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in _order_constants(live, buffers):
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        name = _candidate(node, node in heads, containers, values)
        values[node] = add_node(named, node.op, node.target, args, kwargs, name, node.meta)
    return named


def rename_nodes(graph: fx.Graph) -> fx.Graph:
    """Name each rewritten node of a graph after the one that it replaces."""
    taken: set[str] = set()
    for node in graph.nodes:
        taken.add(name := free_name(final_name(node), taken))
        if name != node.name or info(node).name:
            node.name = name
            change_info(node, name="")
    return graph


def final_name(node: fx.Node) -> str:
    """Return the name that `rename_nodes` gives a node, or that it has already."""
    return info(node).name or node.name


def short_path(path: str, containers: tuple[str, ...]) -> str:
    """Return a module path as an identifier: "transformer.h.6.attn" -> "h6_attn"."""
    outer = next((container for container in containers if f"{path}.".startswith(f"{container}.")), None)
    path = path if outer is None else path[len(outer) + 1 :]
    return _INDEX.sub(r"\1", re.sub(r"\W", "_", path))


def _order_constants(nodes: list[fx.Node], buffers: Container[str]) -> Iterator[fx.Node]:
    constant: set[fx.Node] = set()
    for node in nodes:
        fixed = node.target in buffers if node.op == "get_attr" else node.op == "call_function"
        if fixed and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    ordered: dict[fx.Node, None] = {}
    pending = [node for node in reversed(nodes) if node not in constant]
    while pending:
        missing = [n for n in pending[-1].all_input_nodes if n in constant and n not in ordered]
        pending += missing[:1]
        if not missing:
            ordered[pending.pop()] = None
    # No use comes before as many of the constants' places as it and those before it need.
    constants = (node for node in ordered if node in constant)
    return (next(constants) if node in constant else node for node in nodes)


def find_containers(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths around a list's own name, longest first: "transformer" of "transformer.h.6"."""
    found: set[str] = set()
    for path in dict.fromkeys(paths):
        parts = path.split(".")
        index = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
        found.update(".".join(parts[:end]) for end in range(1, index))
    return tuple(sorted(found, key=lambda path: (-len(path), path)))


def _module_results(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the last node of each call of a module that calls no other and gives one result."""
    paths = {info(node).path for node in nodes}
    inner = {path[: dot.start()] for path in paths for dot in re.finditer(r"\.", path)} | {""}
    results: set[fx.Node] = set()
    calls = [node for node in nodes if node.op == "call_function"]
    for path, run in itertools.groupby(calls, key=lambda node: info(node).path):
        if path not in inner:
            *others, last = run
            members = {*others, last}
            if last.target is not operator.getitem and all(members.issuperset(node.users) for node in others):
                results.add(last)
    return results


def _candidate(node: fx.Node, result: bool, containers: tuple[str, ...], values: dict[fx.Node, fx.Node]) -> str:
    if node.op in ("placeholder", "output"):
        return node.name
    if node.op == "get_attr":
        return short_path(str(node.target), containers)
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        source, index = values[node.args[0]], int(node.args[1])  # type: ignore[arg-type]
        words = RESULTS.get(operator_word(source.target))
        return source.name.replace("route", words[index]) if words else f"{source.name}_{index}"
    path = short_path(info(node).path, containers)
    word = operator_word(node.target)
    name = path if result else f"{path}_{word}" if path else word
    return name if name.isidentifier() else f"x_{name}"


def free_name(name: str, taken: Container[str]) -> str:
    """Return `name`, or the first of name_1, name_2 and so on that is not `taken`."""
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(own for own in itertools.chain((name,), numbered) if own not in taken)


def operator_word(target: Any) -> str:
    """Return an operator's plain name: aten.add.Tensor -> "add"."""
    packet = getattr(target, "overloadpacket", target)
    word = str(getattr(packet, "__name__", packet)).strip("_")
    return SHORTER.get(word, word)
