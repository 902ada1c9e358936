"""Packed projections taken apart: a linear whose output is split into query, key and value.

In [s, b, 3 * heads * size] the heads of one tensor are no even steps apart once there are several sequences, so that
no batched product can read them in place. Linears of the weight's parts lie apart. Fused attention needs none of this.
"""

import operator
from functools import partial
from typing import Any

from torch import fx

from autoptd.passes.ir.names import final_name, rename_nodes
from autoptd.passes.ir.nodes import Propagation, aten_name, shape_of
from autoptd.passes.ir.products import read_product, read_products
from autoptd.passes.ir.program import copy_graph
from autoptd.passes.ir.views import read_cut
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten
from autoptd.runtime.program.mesh import Mesh


def unpack_projections(graph: fx.Graph, mesh: Mesh) -> fx.Graph:
    """Return `graph`, or a copy with one linear for each part of its packed projections, for attention as two products.

    Packed projections are linears (or ``addmm``, with or without a reshape of its rows) whose only reader splits them
    into equal parts, each of which is split further, into heads.
    """
    products = filter(None, map(read_product, graph.nodes))
    if not any(all(len(shape_of(factor)) > 2 for factor in product.factors) for product in products):
        return graph
    copy, propagation = copy_graph(graph), Propagation(mesh)
    for node in list(copy.nodes):
        if chain := _chain(node):
            _take_apart(propagation, node, *chain)
    return rename_nodes(copy)


def _take_apart(propagation: Propagation, split: fx.Node, linear: fx.Node, *reshaped: fx.Node) -> None:
    """Write a linear for each part in place of `linear`, which is split behind a reshape, if any."""
    (product,), sections = read_products(linear), len(split.meta["val"])
    write = partial(propagation.write, linear)
    parts: dict[fx.Node, list[fx.Node]] = {}
    for own, dim in ((product.weight, 1 - product.contracted), (product.bias, 0)):
        if own is not None:
            name = f"{final_name(split)}_{'bias' if own is product.bias else 'weight'}"
            size = shape_of(own)[dim] // sections
            cut = write(aten.split.Tensor, (own, size, dim), {}, linear, name=name)
            items = [(cut, index) for index in range(sections)]
            parts[own] = [write(operator.getitem, item, {}, linear, name=f"{name}_{item[1]}") for item in items]
    for piece in list(split.users):
        index: Any = piece.args[1]
        args = [parts[source][index] if source in parts else source for source in linear.all_input_nodes]
        made = write(linear.target, args, {}, linear, name=final_name(piece))
        for view in reshaped:
            made = write(view.target, (made, list(shape_of(piece))), {}, view, name=final_name(piece))
        piece.replace_all_uses_with(made)
        split.graph.erase_node(piece)
    for node in (split, *reversed(reshaped), linear):
        split.graph.erase_node(node)


def _chain(split: fx.Node) -> list[fx.Node]:
    """Return the linear that `split` takes apart, and the reshape of its rows behind it, if any; else nothing."""
    if aten_name(split.target) not in ("split", "split_with_sizes", "chunk"):
        return []
    chain: list[Any] = [split.args[0]]
    if has_trait(chain[0], Trait.RESHAPES):
        chain.insert(0, chain[0].args[0])
    source, cut = chain[0], read_cut(split)
    adds = source.target is aten.addmm.default and len(shape_of(source.args[0])) == 1
    plain = not source.kwargs and (source.target is aten.linear.default or adds)
    alone = all(len(node.users) == 1 and shape_of(node)[-1] == shape_of(source)[-1] for node in chain)
    equal = cut.dim == len(shape_of(chain[-1])) - 1 and len(set(cut.lengths)) == 1 < len(cut.lengths)
    heads = all(any(_is_heads(user) for user in piece.users) for piece in split.users)
    return chain if plain and alone and equal and heads else []


def _is_heads(node: fx.Node) -> bool:
    """Return whether the call splits the last dimension of its argument, and no other."""
    if not has_trait(node, Trait.RESHAPES):
        return False
    before, after = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
    return len(after) == len(before) + 1 and after[: len(before) - 1] == before[:-1]
