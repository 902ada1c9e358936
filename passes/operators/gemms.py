"""The costs of products: GEMMs of matrices in a batch, einsums and convolutions among them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import aten_name, shape_of
from autoptd.passes.ir.products import CONVOLUTIONS, MatrixProduct, find_factors, read_einsum, read_products
from autoptd.passes.operators.quantities import Number, Product, Value, Work, compute, differentiate
from autoptd.runtime import collectives, kernels

_ACTIVATED = (kernels.linear_gelu, collectives.copied_linear_gelu)


def _gemm(product: MatrixProduct, value: Value) -> Product:
    """Matrices in a batch, or the rows of all leading dimensions times one matrix."""
    node = product.node
    if read_einsum(node).operands:
        return _einsum(node, value)
    if aten_name(node.target) in (*CONVOLUTIONS, "bilinear"):
        return _convolution(product, value)
    shape, inner = product.pick(value.shape(node)), value.shape(product.x)[-1]
    if len(shape_of(product.weight)) > 2 and len(shape_of(product.x)) > 1:
        return Product(prod(shape[:-2]), shape[-2], shape[-1], inner)
    many = len(shape_of(product.weight)) > 1
    return Product(1, prod(shape[:-1] if many else shape), shape[-1] if many else 1, inner)


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


def _convolution(product: MatrixProduct, value: Value) -> Product:
    """[.., in, places] x [out, in / groups, kernel]: the result's channels, of what the kernel covers, everywhere.

    A transposed one is that of the result by [in, out / groups, kernel], and ``bilinear`` [.., i] x [out, i, j] x
    [.., j]: for each row and output a sum over both.
    """
    name, (_, *covered) = str(product.node.target), value.shape(product.weight)
    shape = value.shape(product.x if "transpose" in name else product.node)
    channels = len(shape) - (1 if "bilinear" in name else len(covered))
    places = prod(shape[:channels]) * prod(shape[channels + 1 :])
    return Product(1, places, shape[channels], prod(covered))


def _read(node: fx.Node) -> Sequence[MatrixProduct]:
    """Return the products of a call, of which one of two factors that are no plain matrices may add a bias."""
    if (found := read_products(node)) or not (factors := find_factors(node)):
        return found
    bias = next((source for source in node.all_input_nodes if source not in factors), None)
    return [MatrixProduct(node, factors[0], factors[1], bias)]


def multiply(node: fx.Node, value: Value) -> Work:
    """Each GEMM reads its arguments and writes its result; a kernel behind it adds a GELU's bias and activates."""
    works = []
    for product in _read(node):
        taken = sum(map(value.bytes, dict.fromkeys([product.x, *product.parameters])))
        written = _result_size(product, value)[1]
        works.append(Work((_gemm(product, value),), read=taken, written=written, launches=1))
    if node.target in _ACTIVATED:
        size = value.bytes(node)
        works.append(Work(elementwise=value.count(node), read=size, written=size, launches=1))
    return sum(works[1:], works[0]) if works else compute(node, value)


def _result_size(product: MatrixProduct, value: Value) -> tuple[Number, Number]:
    """Return the elements and the bytes of a product's result."""
    count = prod(product.pick(value.shape(product.node)))
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

    A GELU's backward comes first, with the bias's gradient; that of what is added to is the result's own.
    """
    work, others, found = Work(), Work(), _read(node)
    if node.target in _ACTIVATED:
        size = value.bytes(node)
        written = size + sum(value.bytes(source) for source in wanted if source not in found[0].factors)
        work += Work(elementwise=value.count(node), read=2 * size, written=written, launches=1)
    for index, product in enumerate(found):
        own = replace(product, bias=None) if node.target in (*_ACTIVATED, kernels.add_linear) else product
        of_x, of_weight = _product_gradients(own, value, wanted)
        work += of_x + Work(read=value.bytes(own.x) if index and own.x in wanted else 0)
        others += of_weight
    return work, others


def multiply_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    if not _read(node):
        return differentiate(node, value, wanted, node.all_input_nodes)
    return sum(find_gradients(node, value, wanted), Work())
