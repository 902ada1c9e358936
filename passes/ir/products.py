"""Matrix products, read from the calls that compute them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, arguments, aten_name, shape_of
from autoptd.runtime import collectives, kernels


@dataclass(frozen=True)
class MatrixProduct:
    """``x @ weight + bias``: the last dimension of `x` is contracted with dimension `contracted` of `weight`.

    `node` computes it; of several products it is the result number `index`.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None
    contracted: int = 0
    index: int | None = None

    @property
    def transposed(self) -> bool:
        """Whether the weight is [in, out]."""
        return self.contracted == 0

    @property
    def options(self) -> dict[str, Any]:
        """The keyword of our kernels that says so."""
        return {"transposed": True} if self.transposed else {}

    @property
    def factors(self) -> tuple[fx.Node, fx.Node]:
        return self.x, self.weight

    @property
    def parameters(self) -> list[fx.Node]:
        """The weight, and the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def pick(self, results: Any) -> Any:
        """Return the product's own among the `results` of its node, such as ``node.meta["val"]``."""
        return results if self.index is None else results[self.index]


def read_products(node: fx.Node) -> tuple[MatrixProduct, ...]:
    """Return the products of two tensors that a call computes: one, several of `copied_linears`, or none."""
    ours = (kernels.add_linear, kernels.linear, collectives.scattered_linear)
    if node.target in (*ours, *collectives.COPIED):
        return _read_ours(node, arguments(node))
    given: Any = node.args
    match aten_name(node.target):
        case "linear":
            return (MatrixProduct(node, given[0], given[1], argument(node, "bias"), contracted=1),)
        case "addmm" | "baddbmm":
            bias, x, weight = given[:3]
        case "mm" | "matmul" | "bmm":
            (x, weight), bias = given[:2], None
        case _:
            return ()
    return (MatrixProduct(node, x, weight, bias, contracted=max(0, len(shape_of(weight)) - 2)),)


def read_product(node: fx.Node) -> MatrixProduct | None:
    """Return the product that a call computes; None for several, and for other operators."""
    found = read_products(node)
    return found[0] if len(found) == 1 and found[0].index is None else None


def find_products(node: fx.Node) -> tuple[MatrixProduct, ...]:
    """Return the products of a call; that of all experts is one, and so is an einsum of two operands."""
    given: Any = node.args
    if node.target is kernels.grouped_linear:  # whose weight has one matrix for each expert
        contracted = 1 if argument(node, "transposed") else 2
        return (MatrixProduct(node, given[0], given[1], argument(node, "bias"), contracted),)
    einsum = read_einsum(node)
    plain = len(einsum.operands) == 2 and einsum.is_plain
    return (MatrixProduct(node, einsum.operands[0], einsum.operands[1]),) if plain else read_products(node)


def find_factors(node: fx.Node) -> Sequence[fx.Node]:
    """Return the two tensors that the only product of a call multiplies; none for other calls."""
    found = find_products(node)
    return found[0].factors if len(found) == 1 and found[0].index is None else ()


def _read_ours(node: fx.Node, given: Mapping[str, Any]) -> tuple[MatrixProduct, ...]:
    contracted = 0 if given.get("transposed", False) else 1
    if "weights" not in given:
        bias = given.get("bias", given.get("total"))
        return (MatrixProduct(node, given["x"], given["weight"], bias, contracted),)
    biases = given.get("biases") or [None] * len(given["weights"])
    return tuple(
        MatrixProduct(node, given["x"], weight, bias, contracted, index=index)
        for index, (weight, bias) in enumerate(zip(given["weights"], biases, strict=True))
    )


@dataclass(frozen=True)
class Einsum:
    """``einsum``: the letters of each operand and of the result (None where the equation leaves it out)."""

    operands: Sequence[fx.Node]
    groups: Sequence[str]
    result: str | None

    @property
    def is_plain(self) -> bool:
        """Whether the result is written out, and no letter is repeated in an operand or left out by dots."""
        groups = (*self.groups, self.result or "")
        return self.result is not None and all("." not in g and len(set(g)) == len(g) for g in groups)


def read_einsum(node: fx.Node) -> Einsum:
    """Return the equation of an einsum, and its operands; none of these for other calls."""
    if aten_name(node.target) != "einsum":
        return Einsum((), (), None)
    equation, operands, *_ = node.args
    groups, arrow, result = str(equation).replace(" ", "").partition("->")
    return Einsum(operands, groups.split(","), result if arrow else None)  # type: ignore[arg-type]
