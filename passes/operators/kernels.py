"""Our functions: linears, dropout and norms of sums, and the collectives f and g with their readers (SC21 §2.3)."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, arguments, called, shape_of
from autoptd.passes.ir.products import MatrixProduct, read_products
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import products, proof
from autoptd.passes.operators.attention import keyed_local
from autoptd.passes.operators.axis_map import AxisMap, broadcast, regroup
from autoptd.passes.operators.pointwise import elementwise_order
from autoptd.passes.operators.products import find_gradients, multiply
from autoptd.passes.operators.quantities import Number, Product, Value, Work, differentiate, tensor_arguments
from autoptd.passes.operators.record import OperatorRules, Trait
from autoptd.passes.operators.reductions import over_placed
from autoptd.passes.operators.views import view_backward
from autoptd.runtime import collectives, kernels
from autoptd.runtime.program.placement import AxisPlacement, Partial, Replicate, Segment, Shard

# Linears


def _added_partial(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """What is added to must be a partial sum, and so must the product: of one and a whole matrix, or as others are."""
    total, x, weight = (proof.read(given, placements) for given in node.args[:3])
    if x is proof.PARTIAL:
        kept = weight is proof.WHOLE
    else:
        product = replace(read_products(node)[0], bias=None)
        kept = products.place_product(product, placements) is proof.PARTIAL
    return proof.PARTIAL if kept and total is proof.PARTIAL else proof.refuse_partial(node, placements)


# Linears of quantized weights


def _quantized_axes(axis_map: AxisMap, node: fx.Node) -> ax.Axes:
    """Relate [.., blocks * size] x [out, blocks, bytes] -> [.., out], with the scales [out, blocks] of whole blocks."""
    x, packed, absmax, table = (axis_map.of(given) for given in node.args[:4])
    sizes = packed[1].size, x[-1].size // packed[1].size
    blocks, inner = regroup(node, x[-1:], sizes, "takes it apart, into blocks of one scale")
    for axis in (inner, packed[2], *table):
        ax.block(axis, f"{called(node)} has one scale for a block of it")
    for one, other in ((blocks, packed[1]), *zip(packed, absmax, strict=False)):
        ax.unify(one, other)
    axis_map.sum_over(node, blocks)
    return (*x[:-1], packed[0])


def _quantized_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """Like a product with the scales, which are divided as the blocks are."""
    x, packed, absmax = tensor_arguments(node)[:3]
    left, right, scales = (proof.read(given, placements) for given in (x, packed, absmax))
    if (right.dim, proof.describe_runs(right)) != (scales.dim, proof.describe_runs(scales)):
        raise proof.PlacementError(
            f"reads {proof.describe(packed, placements)}, and the scales {proof.describe(absmax, placements)}: "
            "expected both divided alike, into whole blocks"
        )
    (*rows, width), count = shape_of(x), shape_of(packed)[1]
    if left.dim == len(rows) and right.dim == 1:
        left = proof.regroup(left, (*rows, width), (*rows, count, width // count))
        if left.dim != len(rows):
            return proof.UNKNOWN
    return products.place_product(MatrixProduct(node, x, absmax, contracted=1), {x: left, absmax: scales})


def _quantized_work(node: fx.Node, value: Value, wanted: Sequence[fx.Node] = ()) -> Work:
    """The weight is made first, by way of indices and of numbers as wide as scales; the backward makes it again."""
    x, packed, absmax, table = tensor_arguments(node)
    (*rows, inner), columns = value.shape(x), value.shape(node)[-1]
    given, made, sizes = (node, x, (inner, columns)) if wanted else (x, node, (columns, inner))
    wide, narrow = (source.meta["val"].element_size() for source in (absmax, x))
    moved = 4 * value.count(packed) + inner * columns * (2 * wide + narrow)
    read = sum(map(value.bytes, (given, packed, absmax, table))) + moved
    gemm = Product(1, prod(rows), *sizes)
    return Work((gemm,), inner * columns, read=read, written=moved + value.bytes(made), launches=5)


# Dropout


def _sum_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """dropout(x), dropout(x + bias) + residual, and perhaps the norm of it, over the last dimension; numbers like x."""
    proof.refuse_partial(node, placements)
    given = arguments(node)
    terms = [given[name] for name in ("x", "bias", "residual") if isinstance(given.get(name), fx.Node)]
    shape = shape_of(given["x"])
    placement = proof.merge([(term, proof.aligned(term, shape, placements)) for term in terms], shape)
    if given.get("p", node.target is kernels.uniform):
        proof.check_key(placement, given.get("divided"), given.get("shape"))
    if "weight" in given:
        proof.check_whole(given["x"], placement, [len(shape) - 1])
    return placement if placement is proof.WHOLE else proof.spread(node, placement)


def _sum_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The gradients of the residual, and of x without a dropout, are the result's own."""
    given = arguments(node)
    dropped, shape = bool(given.get("p", 0.0)), shape_of(node)
    made = [s for s in wanted if shape_of(s) != shape or (dropped and s is not given.get("residual"))]
    return differentiate(node, value, made, ())


def _norm_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """Of a sum and its norm: reads both gradients and the sum; x and the residual share theirs but for a dropout."""
    given = arguments(node)
    x = given["x"]
    large = [source for source in wanted if shape_of(source) == shape_of(x)]
    made = large if given.get("p", 0.0) else large[:1]
    return differentiate(node, value, made + [source for source in wanted if source not in large], [x])


# Collectives


def _reduce_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    made = node.target is collectives.scattered_linear  # of its own product
    placement = products.product_placed(node, placements) if made else proof.read(node.args[1], placements)
    if isinstance(placement, Replicate):
        raise proof.PlacementError(
            f"all-reduces {node.args[1]}, which is whole on every tensor rank already, and so multiplies it "
            f"by their number: leave this {node.target.__name__} out"  # type: ignore[union-attr]
        )
    if isinstance(placement, Shard):
        raise proof.PlacementError(
            f"all-reduces {node.args[1]}, of which each tensor rank holds another part: expected a partial "
            "sum, such as a product over a divided dimension"
        )
    return proof.WHOLE


def _copied_placed(node: fx.Node, placements: proof.Placements) -> proof.Found:
    """f, and the linears that read it, or a gather."""
    if argument(node, "gathered"):
        x: Any = node.args[1]
        gathered: proof.Found = _gathered_placed(node, placements)
        return products.product_placed(node, ChainMap({x: gathered}, placements))  # type: ignore[arg-type]
    placement, alone = proof.read(node.args[1], placements), node.target is collectives.copy_to_tensor
    if isinstance(placement, Shard | Partial):
        linear = node.target.__name__.removeprefix("copied_")  # type: ignore[union-attr]
        way = "leave this copy_to_tensor out" if alone else f"compute the {linear} without an all-reduce"
        raise proof.PlacementError(
            f"hands {proof.describe(node.args[1], placements)}, to a divided region: expected a whole value; {way}, or "
            "all-reduce its argument first"
        )
    proof.refuse_partial(node, placements)
    return placement if alone else products.product_placed(node, placements)


def _scattered_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """A partial sum that is reduce-scattered, of which each rank then has a part."""
    _reduce_placed(node, placements)
    return _part_of(node)


def _gathered_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    """Parts along the dimension that is gathered, of which each rank has one run."""
    placement, dim = proof.read(node.args[1], placements), 0 if node.target in collectives.COPIED else node.args[2]
    if isinstance(placement, proof.Unknown) or (
        placement.dim == dim and all(part.divided and part.outer == 1 for part in placement.segments)
    ):
        return proof.WHOLE
    raise proof.misplaced("gathers", node.args[1], placements, f"parts along dimension {dim}, in rank order")


def _own_placed(node: fx.Node, placements: proof.Placements) -> AxisPlacement:
    placement = proof.read(node.args[1], placements)
    if isinstance(placement, Shard | Partial):
        raise proof.misplaced("takes this rank's part of", node.args[1], placements, "a whole value")
    return _part_of(node)


def _part_of(node: fx.Node) -> AxisPlacement:
    """Of a result of which each rank has a run along the dimension that its call names."""
    shape = shape_of(node)
    dim = 0 if node.target is collectives.scattered_linear else int(argument(node, "dim")) % len(shape)
    return Shard(dim, (Segment(1, shape[dim], 1, True),))


def _all_reduce(node: fx.Node, value: Value, *_: Any) -> Work:
    size = value.bytes(node)
    return Work(read=size, written=size, reduced=size, launches=2)


def _move(node: fx.Node, value: Value, *_: Any) -> Work:
    """A reduce-scatter or an all-gather."""
    x: Any = node.args[1]
    whole = value.bytes(x if node.target is collectives.reduce_scatter else node)
    return Work(read=value.bytes(x), written=value.bytes(node), gathered=whole, launches=2)


def _copied_work(node: fx.Node, value: Value) -> Work:
    """The products, behind the gather of x or beside it."""
    x: Any = node.args[1]
    whole = _gathered_bytes(node, value)
    gather = Work(read=value.bytes(x), written=whole, gathered=whole, launches=2) if whole else Work()
    in_pieces = argument(node, "gathered") == "in pieces"
    return gather + (_divide_rows(node, value, multiply(node, value)) if in_pieces else multiply(node, value))


def _divide_rows(node: fx.Node, value: Value, work: Work) -> Work:
    """Return the work of products with a t-th of the rows at a time, all but one of them beside a message."""
    found = read_products(node)
    rows = shape_of(found[0].x)[0], found[0].pick(node.meta["val"]).shape[0]
    tensor = max(rows) // min(rows)
    pieces = tuple(
        replace(p, rows=p.rows // tensor if isinstance(p.rows, int) else p.rows / tensor) for p in work.products
    )
    again = (tensor - 1) * sum(value.bytes(product.weight) for product in found)
    launches = tensor * work.launches + 2 * (tensor - 1)  # and a message and a sum, or a copy
    overlapped = Work(products=pieces * (tensor - 1), launches=(tensor - 1) * work.launches)
    return replace(work, products=pieces * tensor, read=work.read + again, launches=launches, overlapped=overlapped)


def _scattered_work(node: fx.Node, value: Value) -> Work:
    """The pieces of the product, to each of which but the first what comes is added."""
    work = multiply(node, value)
    return _divide_rows(node, value, work) + Work(read=2 * work.written, written=work.written, gathered=work.written)


def _scattered_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The pieces of the gradient of x, beside the gather of the result's, and then that of the weight."""
    of_x, of_weight = find_gradients(node, value, wanted)
    whole = multiply(node, value).written
    gather = Work(read=value.bytes(node), written=whole, gathered=whole)
    return _divide_rows(node, value, of_x) + of_weight + gather


def _gathered_bytes(node: fx.Node, value: Value) -> Number:
    """Return the bytes of x of all tensor ranks together, where it is gathered first; else 0."""
    x: Any = node.args[1]
    if not argument(node, "gathered"):
        return 0
    rows = value.shape(node)[0][:-1] if isinstance(node.meta["val"], tuple) else value.shape(node)[:-1]
    return prod(rows) * value.shape(x)[-1] * x.meta["val"].itemsize


def _copied_backward(node: fx.Node, value: Value, wanted: Sequence[fx.Node]) -> Work:
    """The gradient of x, and its sum, beside which the others are computed; x is gathered again beside the former."""
    x: Any = node.args[1]
    work, overlapped = find_gradients(node, value, wanted)
    if x not in wanted:
        return work + overlapped
    whole = _gathered_bytes(node, value)
    summed = Work(gathered=2 * whole, launches=2) if whole else Work(reduced=value.bytes(x), launches=1)
    return replace(work + overlapped + summed, overlapped=overlapped)


_NORM = OperatorRules(placed=over_placed(lambda node, rank: [rank - 1]))
_ANY = Trait.ANY_PLACEMENT
_F = _ANY | Trait.SUMS_GRADIENTS
_SUM = OperatorRules(placed=_sum_placed, backward=_norm_backward, traits=_ANY)
_COPIED = OperatorRules(placed=_copied_placed, work=_copied_work, backward=_copied_backward, traits=_F)

RULES: Mapping[Any, OperatorRules] = {
    kernels.linear: products.PRODUCT,
    kernels.add_linear: replace(products.PRODUCT, of_partial=_added_partial),
    kernels.quantized_linear: OperatorRules(
        axes=_quantized_axes,
        placed=_quantized_placed,
        order=products.rows_order,
        work=_quantized_work,
        backward=_quantized_work,
        copies=products.row_copies,
    ),
    **dict.fromkeys((kernels.bias_gelu, kernels.gated_product), OperatorRules(placed=proof.elementwise)),
    kernels.dropout: replace(
        _SUM, axes=broadcast, local=keyed_local, order=elementwise_order, backward=None, keeps="nothing"
    ),
    kernels.uniform: replace(_SUM, axes=broadcast, local=keyed_local, backward=None),
    kernels.bias_dropout_add: replace(_SUM, backward=_sum_backward),
    **dict.fromkeys((kernels.add_layer_norm, kernels.add_rms_norm), _SUM),
    **dict.fromkeys((kernels.layer_norm, kernels.rms_norm), _NORM),
    **dict.fromkeys(collectives.COPIED, _COPIED),
    collectives.copy_to_tensor: replace(_COPIED, work=None, backward=_all_reduce, traits=_F | Trait.FREE),
    collectives.reduce_from_tensor: OperatorRules(
        placed=_reduce_placed, work=_all_reduce, backward=lambda *_: Work(), traits=_ANY | Trait.SUMS_RANKS
    ),
    collectives.reduce_scatter: OperatorRules(placed=_scattered_placed, work=_move, backward=_move, traits=_ANY),
    collectives.scattered_linear: replace(
        products.PRODUCT, placed=_scattered_placed, work=_scattered_work, backward=_scattered_backward, traits=_ANY
    ),
    collectives.gather_to_tensor: OperatorRules(placed=_gathered_placed, work=_move, backward=_move, traits=_F),
    collectives.all_gather: OperatorRules(
        placed=_gathered_placed, work=_move, backward=lambda *_: Work(), traits=_ANY | Trait.SUMS_RANKS
    ),
    collectives.take_own: OperatorRules(placed=_own_placed, backward=view_backward, traits=_ANY | Trait.FREE),
}
