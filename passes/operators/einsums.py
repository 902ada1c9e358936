"""Einsums and convolutions: products of two factors that have no plain matrix for a weight."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import called, shape_of
from autoptd.passes.ir.products import CONVOLUTIONS, MatrixProduct, find_factors, read_einsum
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axis_map import OF_ACTIVATIONS, AxisMap, opaque
from autoptd.passes.operators.products import multiply_as, product_gradients
from autoptd.passes.operators.quantities import Product, Value, Work, compute, differentiate
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.runtime import aten


def einsum_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Relate a product by its equation: equal letters are one axis; with a weight, a summed letter is a contraction."""
    einsum = read_einsum(node)
    if not einsum.is_plain:
        return opaque(axis_map, node)
    named: dict[str, ax.Axis] = {}
    for operand, letters in zip(einsum.operands, einsum.groups, strict=True):
        for letter, axis in zip(letters, axis_map.of(operand), strict=True):
            known = named.setdefault(letter, axis)
            if known.size != axis.size:
                return opaque(axis_map, node)
            ax.unify(known, axis)
    result = einsum.result or ""
    summed = [axis for letter, axis in named.items() if letter not in result]
    weighted = not axis_map.weights.isdisjoint(einsum.operands)
    if len(summed) == 1 and len(einsum.operands) == 2 and weighted:
        axis_map.sum_over(node, summed[0])
    else:
        reason = f"sums over it and {len(summed) - 1} more at once" if weighted else OF_ACTIVATIONS
        for axis in summed:
            ax.block(axis, f"{called(node)} {reason}")
        shared = [letter for letter in result if all(letter in group for group in einsum.groups)]
        if len(shared) > 1:
            axis_map.heads.append((node, named[shared[-1]]))
    return tuple(named[letter] for letter in result)


def _einsum(node: fx.Node, value: Value) -> Product:
    """Letters of both operands and the result are a batch, of one operand its rows or columns, the others summed.

    What is in one operand alone, and not in the result, is summed before.
    """
    einsum = read_einsum(node)
    pairs = zip(einsum.groups, einsum.operands, strict=True)
    exact = [list(_letters(group, shape_of(x))) for group, x in pairs]
    sizes: dict[Any, tuple[int, Any]] = {}
    for letters, x in zip(exact, einsum.operands, strict=True):
        for letter, extent, number in zip(letters, shape_of(x), value.shape(x), strict=True):
            sizes[letter] = max(sizes.get(letter, (1, 1)), (extent, number), key=lambda pair: pair[0])
    kept = set() if einsum.result is None else set(_letters(einsum.result, shape_of(node)))
    first, others = set(exact[0]), {letter for letters in exact[1:] for letter in letters}

    def size(letters: set[Any]) -> Any:
        return prod(number for letter, (_, number) in sizes.items() if letter in letters)

    shared = first & others
    return Product(size(kept & shared), size(kept - others), size(kept - first), size(shared - kept))


def _letters(group: str, shape: Sequence[int]) -> Iterator[Any]:
    """The letters of an operand; dimensions of "..." are numbered from the right, as they broadcast."""
    head, _, tail = group.partition("...")
    rest = range(len(head), len(shape) - len(tail))
    yield from (*head, *(index - rest.stop for index in rest), *tail)


def _costs(gemm: Callable[[fx.Node, Value], Product]) -> dict[str, Any]:
    """The costs of an operator that multiplies two factors as `gemm` says, and may add a bias."""

    def read(node: fx.Node) -> MatrixProduct | None:
        factors = find_factors(node)
        bias = next((source for source in node.all_input_nodes if source not in factors), None)
        return MatrixProduct(node, factors[0], factors[1], bias) if factors else None

    def work(node: fx.Node, value: Value) -> Work:
        product = read(node)
        return multiply_as(gemm(node, value), product, value) if product else compute(node, value)

    def backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
        product = read(node)
        if product is None:
            return differentiate(node, value, wanted, node.all_input_nodes)
        return sum(product_gradients(product, value, wanted, gemm(node, value)), Work())

    return {"work": work, "backward": backward}


def _convolution(node: fx.Node, value: Value) -> Product:
    """[.., in, places] x [out, in / groups, kernel]: the result's channels, of what the kernel covers, everywhere.

    A transposed one is that of the result by [in, out / groups, kernel].
    """
    x, weight = find_factors(node)
    shape, (_, *covered) = value.shape(x if "transpose" in str(node.target) else node), value.shape(weight)
    channels = len(shape) - len(covered)
    places = prod(shape[:channels]) * prod(shape[channels + 1 :])
    return Product(1, places, shape[channels], prod(covered))


def _bilinear(node: fx.Node, value: Value) -> Product:
    """[.., i] x [out, i, j] x [.., j]: for each row and output a sum over both."""
    weight, shape = value.shape(node.args[2]), value.shape(node)  # type: ignore[arg-type]
    return Product(1, prod(shape[:-1]), shape[-1], prod(weight[1:]))


# Of products that have no more rules, too.
EQUATION = OperatorRules(**_costs(_einsum))
RULES: Mapping[Any, OperatorRules] = {
    aten.einsum: replace(EQUATION, axes=einsum_axes, traits=Trait.PADDING_SAFE),
    **{getattr(aten, name): OperatorRules(**_costs(_convolution)) for name in CONVOLUTIONS},
    aten.bilinear: OperatorRules(**_costs(_bilinear)),
}
