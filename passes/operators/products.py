"""Products: ``linear``, ``addmm``, ``matmul`` and their like, and einsums."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import getitem
from typing import Any

from torch import Tensor, fx

from autoptd.passes.ir.nodes import as_results, called, shape_of, where
from autoptd.passes.ir.products import MatrixProduct, find_products, read_einsum, read_products
from autoptd.passes.ir.views import float_bytes, is_matrix, is_view
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.attention import attention_local
from autoptd.passes.operators.axis_map import OF_ACTIVATIONS, AxisMap, opaque
from autoptd.passes.operators.layout import LayoutWriter, Written, users_order
from autoptd.passes.operators.localizer import Localizer, keep_partial, same_call
from autoptd.passes.operators.quantities import Number, Product, Value, Work
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.unfamiliar import count_backward, count_work
from autoptd.runtime import aten, collectives, kernels
from autoptd.runtime.program.placement import AxisPlacement, Replicate

# Axes


def linear_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Relate [.., in] x weight -> [.., out]; `in` is contracted (SC21 §2.3: row-parallel if it is divided)."""
    (product,) = read_products(node)
    x, weight = axis_map.of(product.x), axis_map.of(product.weight)
    inner = x[-1], weight[product.contracted]
    axis_map.sum_over(node, *inner)
    ax.unify(*inner)
    return _with_bias(axis_map, product, (*x[:-1], weight[1 - product.contracted]))


def _with_bias(axis_map: AxisMap, product: MatrixProduct, result: ax.Axes) -> ax.Axes:
    bias = () if product.bias is None else axis_map.of(product.bias)
    for own, axis in zip(reversed(bias), reversed(result), strict=False):
        if own.size != 1:
            ax.unify(own, axis)
    return result


def matmul_axes(axis_map: AxisMap, node: fx.Node) -> Any:
    """Relate a product with a weight as a ``linear``, and one of two activations as attention: heads outside."""
    (product,) = read_products(node)
    x, y = (axis_map.of(factor) for factor in product.factors)
    if len(y) == 1 or len(x) == 1:
        return opaque(axis_map, node)
    weighted = not axis_map.weights.isdisjoint(product.factors)
    if len(y) == 2:
        result = linear_axes(axis_map, node)
        if not weighted:
            ax.block(x[-1], f"{called(node)} {OF_ACTIVATIONS}")
        return result
    ax.unify(x[-1], y[-2])
    if weighted and product.bias is None and [a.size for a in x[:-2]] == [a.size for a in y[:-2]]:  # one for an expert
        axis_map.sum_over(node, x[-1])
        for pair in zip(x[:-2], y[:-2], strict=True):
            ax.unify(*pair)
        return (*x[:-1], y[-1])
    ax.block(x[-1], f"{called(node)} {'contracts it with many matrices' if weighted else OF_ACTIVATIONS}")
    lead = axis_map.align_leading(node, [(product.x, x[:-2]), (product.weight, y[:-2])])
    return _with_bias(axis_map, product, (*lead, x[-2], y[-1]))


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


# One rank's call


def linear_local(localizer: Localizer, node: fx.Node) -> fx.Node:
    """Row-parallel: the bias leaves the product, to be added once, behind the all-reduce."""
    (product,) = read_products(node)
    if not localizer.contracted(node):
        return keep_partial(localizer, node, product.x) or localizer.copy(node)
    if node.kwargs.keys() & {"alpha", "beta"}:
        raise ValueError(f"addmm with alpha or beta at {where(node)} cannot be row-parallel; use tensor=1")
    target = aten.mm.default if product.transposed else aten.linear.default
    factors = (localizer.whole(product.x), localizer.whole(product.weight))
    new = localizer.add(target, factors, node, name=node.name, partial=True)
    if product.bias is not None:
        localizer.biases[new] = [(node, product.bias)]
    return new


# The proof


def product_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """Each product of the call; what is contracted over a divided dimension is a partial sum."""
    found = [place_product(product, placements) for product in read_products(node)]
    whole = all(placement is proof.WHOLE for placement in found)
    return proof.WHOLE if whole else as_results(node, found)


def place_product(product: MatrixProduct, placements: proof.Placements) -> AxisPlacement:
    x, weight = product.factors
    result = tuple(product.pick(product.node.meta["val"]).shape)
    left, right = proof.read(x, placements), proof.read(weight, placements)
    own, last = len(shape_of(weight)), len(result) - 1
    if own < 2 or (len(shape_of(x)) < 2 < own):
        return proof.UNKNOWN
    over_left, over_right = left.dim == len(shape_of(x)) - 1, right.dim == product.contracted
    if over_left or over_right:
        _check_contraction((x, left, over_left), (weight, right, over_right))
        _check_summed(product, left, right)
        return proof.PARTIAL
    if right.dim is not None:
        right = replace(right, dim=last if right.dim >= own - 2 else right.dim + len(result) - own)
    aligned = (x, proof.aligned(x, result, placements)), (weight, right)
    factors = [pair for pair in aligned if pair[1] is not proof.WHOLE]
    bias = product.bias
    terms = [(bias, proof.aligned(bias, result, placements))] if isinstance(bias, fx.Node) else []
    return proof.merge([*factors, *terms], result)


def _check_summed(product: MatrixProduct, left: AxisPlacement, right: AxisPlacement) -> None:
    """Refuse what would be counted on every tensor rank: a bias, and rows that all ranks hold."""
    if product.bias is not None:
        raise proof.PlacementError(
            f"adds the bias {product.bias} to a partial sum, so that it would be counted on every tensor rank: "
            "add it after collectives.reduce_from_tensor(rank, ...)"
        )
    for factor, placement in ((product.x, left), (product.weight, right)):
        if proof.is_mixed(placement):
            raise proof.PlacementError(
                f"sums over a dimension of which every tensor rank holds some rows whole, in {factor}: the all-reduce "
                "would count these t times; multiply the whole rows apart, after it"
            )


def _check_contraction(left: tuple[Any, AxisPlacement, bool], right: tuple[Any, AxisPlacement, bool]) -> None:
    """Refuse a product over a divided dimension whose factors are not divided alike there."""
    (x, first, over_first), (y, second, over_second) = left, right
    if over_first and over_second:
        proof.merge([(x, first), (y, replace(second, dim=first.dim))], shape_of(x))
        return
    name, placement, other = (y, second, x) if over_first else (x, first, y)
    if isinstance(placement, Replicate) or placement.dim is not None:
        raise proof.PlacementError(
            f"sums over a dimension that is divided in {other} and not in {name}, which is {placement.word}: "
            f"expected both divided; collectives.take_own(rank, {name}, dim) takes this rank's part"
        )


# The sequence-first layout


def rows_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """Transform the last dimensions of a factor, or of the first argument, row by row, with one bias for all rows."""
    at = node.args.index(read_products(node)[0].x) if read_products(node) else 0
    order, widths = writer.order(node.args[at]), node.args[at + 1]
    width = len(widths) if isinstance(widths, (list, tuple)) else 1
    alike = not at or len(shape_of(node.args[0])) == 1  # type: ignore[arg-type]
    if not alike or any(order.holds(-back) for back in range(1, width + 1)):
        return None
    before, behind, kwargs = fx.map_arg((node.args[:at], node.args[at + 1 :], node.kwargs), writer.restore)
    return writer.write((*before, writer.value(node.args[at]), *behind), kwargs), order.transposed


def _matmul_order(writer: LayoutWriter, node: fx.Node) -> Written:
    """With a matrix a ``linear``; the product of two batches keeps the user's order, in strided views."""
    ranks = [len(shape_of(factor)) for factor in read_products(node)[0].factors]
    by_rows = rows_order(writer, node) if ranks[0] > 1 and ranks[1] == 2 else None
    return by_rows or users_order(writer, node)


# Copies


def row_copies(given: Sequence[Any], value: Any) -> int:
    """``linear``: all but the last dimension become rows of one matrix."""
    x = given[0]
    return 0 if is_view(x, (-1, x.shape[-1])) and is_matrix(x) else float_bytes(x)


def _batch_copies(given: Sequence[Any], value: Any) -> int:
    """Of the last two arguments the dimensions before the last two become one batch."""
    x, y = given[-2:]
    if x.dim() > 2 >= y.dim():
        return row_copies([x], value) + _operand_copies(y, ())
    batch = value.shape[: -2 if x.dim() > 1 and y.dim() > 1 else -1]
    return sum(_operand_copies(operand, batch) for operand in (x, y))


def _operand_copies(x: Tensor, batch: Sequence[int]) -> int:
    if x.dim() < 2:
        return 0
    whole = x.expand(*batch, *x.shape[-2:])
    merges = len(batch) < 2 or is_view(whole, (-1, *x.shape[-2:]))
    return 0 if merges and is_matrix(x) else float_bytes(whole)


# Costs


def _gemm(product: MatrixProduct, value: Value) -> Product:
    """Matrices in a batch, or the rows of all leading dimensions times one matrix."""
    node = product.node
    if read_einsum(node).operands:
        return _einsum(node, value)
    shape, inner = _result_shape(product, value), value.shape(product.x)[-1]
    if node.target is kernels.grouped_linear:
        return Product(1, expect_rows(node.args[2], product.x, value), shape[-1], inner)
    if len(shape_of(product.weight)) > 2 and len(shape_of(product.x)) > 1:
        return Product(prod(shape[:-2]), shape[-2], shape[-1], inner)
    many = len(shape_of(product.weight)) > 1
    return Product(1, prod(shape[:-1] if many else shape), shape[-1] if many else 1, inner)


def expect_rows(counts: Any, rows: Any, value: Value) -> Number:
    """Return how many rows a rank's own experts have if all have as many; all `rows` if nothing is known.

    They are as many before and after they are sent to other ranks.
    """
    while counts.target is getitem and counts.args[0].target is collectives.send_to_experts:
        counts = counts.args[0].args[2]
    route = counts.args[0] if counts.target is getitem else counts
    if route.target is not kernels.route:
        return value.shape(rows)[0]
    _, chosen, number, _ = route.args
    (tokens, slots), (own,) = value.shape(chosen), value.shape(counts)
    if getattr(own, "is_number", True):
        return -(-tokens * min(slots, number) * own // number)
    return tokens * slots / own.as_numer_denom()[1]  # E, or E / t


def _einsum(node: fx.Node, value: Value) -> Product:
    """Letters of both operands and the result are a batch, of one operand its rows or columns, the others summed.

    What is in one operand alone, and not in the result, is summed before.
    """
    einsum = read_einsum(node)
    sizes: dict[str, Number] = {}
    for letters, x in zip(einsum.groups, einsum.operands, strict=True):
        sizes.update((letter, number) for letter, number in zip(letters, value.shape(x), strict=True) if number != 1)
    first, others, kept = map(set, (*einsum.groups, einsum.result or ""))

    def size(letters: set[str]) -> Any:
        return prod(number for letter, number in sizes.items() if letter in letters)

    shared = first & others
    return Product(size(kept & shared), size(kept - others), size(kept - first), size(shared - kept))


def multiply(node: fx.Node, value: Value) -> Work:
    """Each GEMM reads its arguments and writes its result."""
    works = []
    for product in find_products(node):
        taken = sum(map(value.bytes, dict.fromkeys([product.x, *product.parameters])))
        written = _result_size(product, value)[1]
        works.append(Work((_gemm(product, value),), read=taken, written=written, launches=1))
    return sum(works[1:], works[0]) if works else count_work(node, value)


def _result_shape(product: MatrixProduct, value: Value) -> Sequence[Number]:
    """Return the shape of a product's result, of which a rank may keep its part of a sum."""
    shape: Sequence[Number] = product.pick(value.shape(product.node))
    scattered = product.node.target is collectives.scattered_linear
    return (*value.shape(product.x)[:-1], shape[-1]) if scattered else shape


def _result_size(product: MatrixProduct, value: Value) -> tuple[Number, Number]:
    """Return the elements and the bytes of a product's result."""
    count = prod(_result_shape(product, value))
    return count, count * product.pick(product.node.meta["val"]).element_size()


def _product_gradients(product: MatrixProduct, value: Value, wanted: Sequence[fx.Node]) -> tuple[Work, Work]:
    """Return the work of the gradient of x, and that of the gradients of weight and bias.

    For each factor it is the gradient of the result times the other one.
    """
    gemm, (count, size) = _gemm(product, value), _result_size(product, value)
    x, weight = product.factors

    def gradient(of: fx.Node, by: fx.Node, *shape: Number) -> Work:
        gemms, read, written = (Product(gemm.batch, *shape),), size + value.bytes(by), value.bytes(of)
        return Work(gemms, read=read, written=written, launches=1) if of in wanted else Work()

    of_x = gradient(x, weight, gemm.rows, gemm.inner, gemm.columns)
    of_weight = gradient(weight, x, gemm.inner, gemm.columns, gemm.rows)
    if product.bias is not None and product.bias in wanted:
        of_weight += Work(elementwise=count, read=size, written=value.bytes(product.bias), launches=1)
    return of_x, of_weight


def find_gradients(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> tuple[Work, Work]:
    """Return the work up to the gradient of x, to which several products add, and that of the other gradients.

    That of what is added to is the result's own.
    """
    work, others = Work(), Work()
    for index, product in enumerate(find_products(node)):
        own = replace(product, bias=None) if node.target is kernels.add_linear else product
        of_x, of_weight = _product_gradients(own, value, wanted)
        work += of_x + Work(read=value.bytes(own.x) if index and own.x in wanted else 0)
        others += of_weight
    return work, others


def multiply_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    work = sum(find_gradients(node, value, wanted), Work())
    return work if find_products(node) else count_backward(node, value, wanted)


_EINSUM = OperatorRules(axes=einsum_axes, work=multiply, backward=multiply_backward, traits=Trait.PADDING_SAFE)
PRODUCT = OperatorRules(
    placed=product_placed, of_partial=proof.linear_in(0), work=multiply, backward=multiply_backward, copies=row_copies
)
_LINEAR = replace(PRODUCT, axes=linear_axes, local=linear_local, order=rows_order, traits=Trait.PADDING_SAFE)
_MATMUL = replace(_LINEAR, axes=matmul_axes, local=attention_local, order=_matmul_order, copies=_batch_copies)
_BATCHED = replace(_MATMUL, order=users_order, traits=Trait.NONE)
RULES: Mapping[Any, OperatorRules] = {
    aten.linear: _LINEAR,
    aten.addmm: replace(_LINEAR, copies=_batch_copies),
    aten.mm: replace(_MATMUL, local=same_call),
    aten.matmul: _MATMUL,
    aten.bmm: _BATCHED,
    aten.baddbmm: replace(_BATCHED, local=same_call),
    aten.einsum: _EINSUM,
}
