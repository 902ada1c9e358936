"""Rules of operators written as text, such as ``"b s h!, h f -> b s f"``: the ``rules=`` of `autoptd.compile`.

One group of names per tensor argument and result. Equal names are one axis, ``!`` keeps an axis whole, and over a name
that only arguments have is summed. A text gives the axes, the call on one rank, and the proof.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch.autograd import Function

from autoptd.passes.ir.nodes import as_results, info, nodes_in, operator_name, results_of, shape_of, where
from autoptd.passes.operators import axes as ax
from autoptd.passes.operators import proof
from autoptd.passes.operators.axis_map import AxisMap
from autoptd.passes.operators.record import OperatorRules
from autoptd.runtime.kernels.autograd_function import AutogradFunction
from autoptd.runtime.program.placement import Replicate

Names = Sequence[str]


@dataclass(frozen=True)
class TextRule:
    """The names of the dimensions of an operator's tensors; `marked` are those with ``!``."""

    text: str
    arguments: tuple[Names, ...]
    results: tuple[Names, ...]
    marked: frozenset[str]

    @property
    def kept(self) -> set[str]:
        """The names that some result has."""
        return {name for group in self.results for name in group}

    @property
    def whole(self) -> dict[str, str]:
        """The names that may not be divided: what the rule does with each, for a message."""
        partly = (name for name in self.kept if not all(name in group for group in self.results))
        marked = dict.fromkeys(self.marked, "keeps it whole")
        return dict.fromkeys(partly, "has it in some results only") | marked

    def shapes(self, node: fx.Node, tensors: Sequence[fx.Node]) -> list[tuple[int, ...]]:
        """Return the shapes of a call's arguments and results. Raises ValueError where the text does not fit them."""
        found = [[*map(shape_of, tensors)], [tuple(value.shape) for value in results_of(node)]]
        wanted = [[*map(len, side)] for side in (self.arguments, self.results)]
        if [[*map(len, side)] for side in found] != wanted:
            raise ValueError(
                f"the rule {self.text!r} for {node.target} does not fit the call at {where(node)}: its tensors are "
                f"{found[0]} -> {found[1]}; write one group of names per tensor, one name per dimension"
            )
        return [*found[0], *found[1]]

    def sizes(self, node: fx.Node, tensors: Sequence[fx.Node]) -> dict[str, int]:
        """Return the size of each name in a call. Raises ValueError where a name has two."""
        sizes: dict[str, int] = {}
        for shape, group in zip(self.shapes(node, tensors), (*self.arguments, *self.results), strict=True):
            for size, name in zip(shape, group, strict=True):
                known = sizes.setdefault(name, size)
                if known != size:
                    raise ValueError(
                        f"the rule {self.text!r} for {node.target} calls dimensions of sizes {known} and {size} both "
                        f"{name!r} at {where(node)}; give them different names"
                    )
        return sizes

    def axes(self, axis_map: AxisMap, node: fx.Node) -> Any:
        """Unify the axes of one name, block those that stay whole, and record the one that is summed over."""
        tensors = [n for n in nodes_in((node.args, node.kwargs)) if n in axis_map.axes]
        sizes = self.sizes(node, tensors)
        named: dict[str, ax.Axis] = {}
        for tensor, group in zip(tensors, self.arguments, strict=True):
            for axis, name in zip(axis_map.of(tensor), group, strict=True):
                ax.unify(named.setdefault(name, axis), axis)
        summed = [name for name in named if name not in self.kept and named[name].size != 1]
        for name in (name for name in named if name in self.whole):
            ax.block(named[name], f"the rule {self.text!r} {self.whole[name]}")
        if len(summed) == 1 and isinstance(node.meta["val"], Tensor):
            axis_map.sum_over(node, named[summed[0]])
        else:
            for name in summed:
                ax.block(named[name], f"the rule {self.text!r} sums over several axes")
        results = (tuple(named.setdefault(n, ax.Axis(sizes[n])) for n in own) for own in self.results)
        return as_results(node, results)

    def placed(self, node: fx.Node, placements: proof.Placements) -> proof.Found:
        """Require a divided name to be divided alike in all its arguments; summed over, it gives a partial sum."""
        tensors = [n for n in nodes_in((node.args, node.kwargs)) if info(n).role != "rank"]
        try:
            self.shapes(node, tensors)
        except ValueError as error:
            raise proof.PlacementError(f"contradicts its rule: {error}") from None
        given = [proof.read(tensor, placements) for tensor in tensors]
        if any(not isinstance(placement, Replicate) and placement.dim is None for placement in given):
            return proof.UNKNOWN
        pairs = list(zip(tensors, self.arguments, given, strict=True))
        names = {group[placement.dim] for _, group, placement in pairs if placement.dim is not None}
        for tensor, group, placement in pairs:
            for name in names.intersection(group):
                self._check(name, tensor, placement.dim is not None and group[placement.dim] == name)
        name = min(names)
        if len(names) > 1:
            raise proof.PlacementError(f"has arguments divided along {' and '.join(sorted(names))}: expected one")
        one = proof.merge([(t, replace(p, dim=0)) for t, _, p in pairs if p.dim is not None], [1])
        if name not in self.kept:
            return proof.PARTIAL
        return as_results(node, [replace(one, dim=list(group).index(name)) for group in self.results])  # type: ignore[no-any-return]

    def _check(self, name: str, tensor: fx.Node, divided: bool) -> None:
        """Refuse a divided `name` that must be whole, or that one argument has whole."""
        rule = f"by its rule {self.text!r}"
        if name in self.whole:
            raise proof.PlacementError(f"needs {name} of {tensor} whole {rule}; each rank holds a part")
        if not divided:
            raise proof.PlacementError(
                f"has {name} divided in one argument and not in {tensor} {rule}: expected both divided alike; "
                f"collectives.take_own(rank, {tensor}, dim) takes this rank's part"
            )


def read_rule(text: str) -> TextRule:
    """Return the rule that a text stands for. Raises ValueError where the text is not of that form."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f'a sharding rule reads "b s h!, h f -> b s f"; found {text!r}, without one "->"')
    groups = [[group.split() for group in side.split(",")] for side in sides]
    whole = frozenset(name[:-1] for side in groups for group in side for name in group if name.endswith("!"))
    arguments, results = (tuple([name.rstrip("!") for name in group] for group in side) for side in groups)
    return TextRule(text, arguments, results, whole)


def read_rules(rules: Mapping[Any, str] | None) -> dict[str, OperatorRules]:
    """Return the records of the user's ``rules=``, by operator name.

    Keys are operators (``torch.ops.mylib.op``), autograd functions (classes), or their names ("mylib.op", "mylib::op",
    "module:Class"), values texts. Raises TypeError or ValueError for others.
    """
    found = {name: read_rule(text) for name, text in name_rules(rules).items()}
    return {name: OperatorRules(axes=rule.axes, placed=rule.placed) for name, rule in found.items()}


def name_rules(rules: Mapping[Any, str] | None) -> dict[str, str]:
    """Return `rules` with the names of their operators for keys. Raises TypeError for other keys and values."""
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rules is {rules!r}; expected a dict from an operator, or its name, to a text")
    named = {}
    for key, text in (rules or {}).items():
        operator = getattr(key, "_opoverload", key)  # of what torch.library.custom_op gives
        if not isinstance(operator, str) and not hasattr(operator, "__name__"):
            raise TypeError(f'rules has the key {key!r}; expected an operator, or its name, as "mylib.op"')
        if not isinstance(text, str):
            raise TypeError(f'the rule of {operator} must be a text such as "b s h -> b s h", not {text!r}')
        if isinstance(operator, type) and issubclass(operator, Function):
            operator = AutogradFunction.of(operator)
        name = operator.replace("::", ".") if isinstance(operator, str) else operator_name(operator)
        named[name] = text
    return named
