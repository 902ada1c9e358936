"""Find the operators of an attention by following values from its softmax.

product of two activations -> scale, mask, views, casts -> softmax -> cast, dropout, views -> product with values
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.attention.products import Product, Result, Step, call_name, read_result, read_scores
from autoptd.passes.ir.nodes import called, shape_of
from autoptd.passes.operators.table import Trait, has_trait, strip
from autoptd.runtime import kernels
from autoptd.runtime.kernels.operands import HALF

Number = Callable[[Any], "float | None"]
SHAPED = Trait.RESHAPES | Trait.LAYS_OUT


@dataclass(frozen=True)
class Chain:
    """The operators found around one softmax, or texts that say why there is no `product` or no `result`.

    `steps` are in the order of computation, `weights` the nodes from the softmax up to the `result`.
    """

    softmax: fx.Node
    steps: tuple[Step, ...]
    product: Product | str
    weights: tuple[fx.Node, ...]
    result: Result | str


def read_chain(softmax: fx.Node, number: Number, learned: set[fx.Node]) -> Chain:
    """Follow values from a softmax back to its scores, and on to the product of its weights with the values.

    `number` reads an argument that is one number; `learned` are the nodes that depend on parameters.
    """
    steps: list[Step] = []
    scores: Any = softmax.args[0]
    reader = softmax
    product: Product | str | None = None
    while product is None:
        others = [user for user in scores.users if user is not reader]
        product = f"{_name(others[0])} reads its scores too" if others else read_scores(scores)
        step = _read_step(scores, number, learned) if product is None else None
        if step is not None:
            steps.insert(0, step)
            scores, reader = step.source, scores
        elif product is None:
            product = _explain(scores, learned)
    if isinstance(product, Product):
        moves = Trait.REARRANGES | Trait.REPEATS
        if any(strip(factor.node, moves).op == "get_attr" for factor in (product.queries, product.keys)):
            product = f"a factor of {_name(scores)} is a parameter"
    return Chain(softmax, tuple(steps), product, *_follow(softmax))


def _name(node: fx.Node) -> str:
    return called(node) if node.op == "call_function" else f"the {node.op} {node.target}"


def _explain(node: fx.Node, learned: set[fx.Node]) -> str:
    if call_name(node) == "aten.add" and learned.issuperset(node.args):
        return f"{called(node)} adds a learned value to its scores"
    made, *given = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    scores = [v.dtype for v in given if isinstance(v, Tensor) and v.dim() > 2 and v.is_floating_point()]
    if not isinstance(made, Tensor) or all(dtype == made.dtype for dtype in scores):
        return f"its scores pass {_name(node)}"
    return f"its scores pass {_name(node)}, which makes them {made.dtype}"


# Back, to the scores


def _read_step(node: fx.Node, number: Number, learned: set[fx.Node]) -> Step | None:
    """Read a node as a step, which keeps the dtype and, except for a view, the shape of the scores."""
    step = _read_kind(node, number, learned)
    if step is None or not isinstance(step.source, fx.Node):
        return None
    given, val = step.source.meta["val"], node.meta["val"]
    same_dtype = given.dtype == val.dtype or step.kind == "cast"
    same_shape = given.shape == val.shape or step.kind == "view"
    return replace(step, frame=tuple(given.shape)) if same_dtype and same_shape else None


def _read_kind(node: fx.Node, number: Number, learned: set[fx.Node]) -> Step | None:
    source: Any = node.args[0] if node.args else None
    if has_trait(node, SHAPED):
        return Step(source, "view", ()) if keeps_rows(source, node) else None
    match call_name(node):
        case "aten.add":
            return _read_addition(node, learned)
        case "aten.masked_fill":
            return _read_fill(source, node.args[1], node.args[2], number, learned, hides=True)
        case "aten.where":
            mask, *pair = node.args[:3]
            hides = number(pair[0]) is not None
            value, source = pair if hides else reversed(pair)
            return _read_fill(source, mask, value, number, learned, hides=hides)
        case "aten.to" if source.meta["val"].dtype in HALF and node.meta["val"].dtype == torch.float32:
            return Step(source, "cast", ())
    return read_scale(node, number)


def read_scale(node: fx.Node, number: Number) -> Step | None:
    """Read a product with, or a division by, one positive number; return None for any other operator."""
    name = call_name(node)
    pairs = {"aten.mul": [node.args[:2], node.args[1::-1]], "aten.div": [node.args[:2]]}
    for source, other in pairs.get(name, []):
        factor = number(other) if isinstance(source, fx.Node) and not node.kwargs else None
        if isinstance(source, fx.Node) and factor is not None and 0 < factor < float("inf"):
            return Step(source, "scale", (), factor if name == "aten.mul" else 1 / factor)
    return None


def _read_addition(node: fx.Node, learned: set[fx.Node]) -> Step | None:
    """Read the addition of a mask: a value without parameters, and not the scores."""
    given: Any = node.args
    for source, mask in () if node.kwargs else (given[:2], given[1::-1]):
        both = isinstance(source, fx.Node) and isinstance(mask, fx.Node)
        if both and source in learned and mask not in learned and mask.meta["val"].is_floating_point():
            return Step(source, "add", (), mask=mask)
    return None


def _read_fill(source: Any, mask: Any, value: Any, number: Number, known: set[fx.Node], *, hides: bool) -> Step | None:
    """Read one number in place of the scores that a mask `hides`, or does not show."""
    factor = number(value)
    if factor is None or mask in known or not isinstance(mask, fx.Node) or not isinstance(source, fx.Node):
        return None
    return Step(source, "fill", (), factor, mask, hides) if mask.meta["val"].dtype == torch.bool else None


def keeps_rows(source: fx.Node, node: fx.Node) -> bool:
    """Return whether a view leaves the last two dimensions, queries and keys, as they are."""
    return shape_of(source)[-2:] == shape_of(node)[-2:] and len(shape_of(source)) > 2 < len(shape_of(node))


# On, from the weights


def _follow(softmax: fx.Node) -> tuple[tuple[fx.Node, ...], Result | str]:
    """Return the operators on the weights, and the product that they end in or why there is none."""
    weights, rounded = [softmax], None
    while True:
        readers = list(weights[-1].users)
        if len(readers) != 1:
            return tuple(weights), f"{len(readers)} operators read its weights"
        (reader,) = readers
        result = read_result(reader, weights[-1])
        if result is not None:
            return tuple(weights), result
        if reader.target is kernels.dropout:
            fits = reader.args[1] is weights[-1]
        else:
            same = has_trait(reader, SHAPED) and keeps_rows(weights[-1], reader)
            fits = same or (has_trait(reader, Trait.CASTS) and reader.meta["val"].is_floating_point())
        dtypes = [node.meta["val"].dtype for node in (weights[-1], reader)] if fits else []
        if not fits or (rounded is not None and dtypes[1] != rounded):
            after = f", after they were rounded to {rounded}" if fits else ""
            return tuple(weights), f"its weights pass {_name(reader)}{after}"
        # Fused operators give half precision from a softmax in float32, but would forget such a cast in between.
        rounded = dtypes[1] if torch.promote_types(*dtypes) != dtypes[1] else rounded
        weights.append(reader)
