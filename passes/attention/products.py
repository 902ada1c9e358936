"""Read the two products of an attention, written as matmul, bmm, baddbmm or einsum."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal

from torch import fx

from autoptd.passes.ir.nodes import argument, operator_name, shape_of
from autoptd.passes.ir.products import read_einsum, read_product
from autoptd.passes.ir.views import dim_map
from autoptd.runtime import aten


@dataclass(frozen=True)
class Step:
    """One operator between the product and the softmax, applied to the scores `source` of shape `frame`.

    "scale": times `factor`; "add": plus `mask`; "fill": `factor` where `mask` `hides`, or not; "view", "cast".
    """

    source: fx.Node
    kind: Literal["scale", "add", "fill", "view", "cast"]
    frame: tuple[int, ...]
    factor: float = 1.0
    mask: fx.Node | None = None
    hides: bool = False


@dataclass(frozen=True)
class Factor:
    """A factor of a product, its dimensions in the order `dims` (None: as they are)."""

    node: fx.Node
    dims: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Product:
    """Scores: queries [.., queries, size] by keys [.., keys, size]; `steps` are the operator's own further steps."""

    node: fx.Node
    queries: Factor
    keys: Factor
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Result:
    """The product of the weights with `values` [.., keys, size], given in the order `dims` (None: as it is)."""

    node: fx.Node
    values: Factor
    dims: tuple[int, ...] | None = None


def call_name(node: fx.Node) -> str:
    return operator_name(node.target) if node.op == "call_function" else ""


def read_scores(node: fx.Node) -> Product | None:
    """Read scores as a product over one dimension of queries and keys, such as the last of both."""
    parsed = _parse(node)
    if parsed is None:
        return None
    groups, out, operands = parsed
    *batch, row, column = list(out)
    (summed, *others) = sorted({*groups[0], *groups[1]} - {*out}) or [""]
    if row in groups[1]:
        groups, operands = groups[::-1], operands[::-1]
    fits = set(groups[0]) == {*batch, row, summed} and set(groups[1]) == {*batch, column, summed}
    steps = _read_sum(node) if node.target is aten.baddbmm.default else ()
    if others or not fits or steps is None:
        return None
    factors = zip(operands, groups, (row, column), strict=True)
    queries, keys = (_read_factor(x, group, (*batch, letter, summed)) for x, group, letter in factors)
    return Product(node, queries, keys, steps)


def _read_sum(node: fx.Node) -> tuple[Step, ...] | None:
    """Read ``beta * bias + alpha * (queries @ keys)`` as a scale and, unless beta is 0, a mask."""
    bias, frame, beta = node.args[0], shape_of(node), argument(node, "beta")
    scale = Step(node, "scale", frame, float(argument(node, "alpha")))
    if beta not in (0, 1) or not isinstance(bias, fx.Node) or scale.factor <= 0:
        return None
    return (scale, Step(node, "add", frame, mask=bias)) if beta else (scale,)


def _parse(node: fx.Node) -> tuple[Sequence[str], str, Sequence[fx.Node]] | None:
    """Return the letters of two factors and the result, as an einsum such as "bqhd,bkhd->bhqk" gives them."""
    if node.target is aten.einsum.default:
        einsum = read_einsum(node)
        out = einsum.result or ""
        plain = einsum.is_plain and len(einsum.operands) == len(einsum.groups) == 2 and len(out) > 2
        return (einsum.groups, out, einsum.operands) if plain else None
    product = read_product(node)
    if product is None or not all(isinstance(factor, fx.Node) for factor in product.factors):
        return None
    rank = len(shape_of(node))
    if rank < 3 or any(len(shape_of(factor)) != rank for factor in product.factors):
        return None
    batch = ascii_uppercase[: rank - 2]
    return (f"{batch}qs", f"{batch}sk"), f"{batch}qk", product.factors


def _read_factor(node: fx.Node, letters: str, wanted: Sequence[str]) -> Factor:
    """Return a factor with its dimensions as `wanted`; one that is transposed for that as it was before."""
    order = _order(letters, wanted)
    if node.target is aten.transpose.int and dim_map(node) == order:
        return Factor(node.all_input_nodes[0])
    return Factor(node, order)


def _order(letters: str, wanted: Sequence[str]) -> tuple[int, ...] | None:
    """Return the place of each wanted dimension among the letters; None if they are in order."""
    order = tuple(letters.index(letter) for letter in wanted)
    return None if order == tuple(range(len(order))) else order


def read_result(node: fx.Node, weights: fx.Node) -> Result | None:
    """Read the product of the weights with values over the keys."""
    parsed = _parse(node) if node.target is not aten.baddbmm.default else None
    if parsed is None:
        return None
    groups, out, operands = parsed
    if operands[0] is operands[1] or weights not in operands:
        return None
    if operands[1] is weights:
        groups, operands = groups[::-1], operands[::-1]
    *batch, row, column = list(groups[0])
    size = sorted(set(out) - {*batch, row})
    fits = len(size) == 1 and set(out) == {*batch, row, *size} and set(groups[1]) == {*batch, column, *size}
    if not fits or column in out:
        return None
    made = "".join((*batch, row, *size))
    return Result(node, Factor(operands[1], _order(groups[1], (*batch, column, *size))), _order(made, out))
