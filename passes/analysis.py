"""The walk that finds the axes of a whole graph (see `axes`), and what it saw on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autoptd.passes import axes as ax
from autoptd.passes.axes import Axes, Axis
from autoptd.passes.axis_rules import RULES, Rule, text_rule
from autoptd.passes.calls import called, operator_name, shape_of, where
from autoptd.passes.shape_rules import opaque
from autoptd.runtime.placement import Parameter


def user_rules(rules: Mapping[Any, str] | None) -> dict[str, Rule]:
    """The user's ``rules=`` by operator name.

    Keys are operators (``torch.ops.mylib.op``) or their names ("mylib.op", "mylib::op"), values texts as
    `axis_rules` describes them. Raises TypeError or ValueError for others.
    """
    table = {}
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rules is {rules!r}; expected a dict from an operator, or its name, to a text")
    for key, text in (rules or {}).items():
        operator = getattr(key, "_opoverload", key)  # of what torch.library.custom_op gives
        if not isinstance(operator, str) and not hasattr(operator, "__name__"):
            raise TypeError(
                f'rules has the key {key!r}; expected an operator, or its name such as "mylib.op"'
            )
        if not isinstance(text, str):
            raise TypeError(
                f'the rule of {operator} must be a text such as "b s h, h f -> b s f", not {text!r}'
            )
        name = operator.replace("::", ".") if isinstance(operator, str) else operator_name(operator)
        table[name] = text_rule(text)
    return table


class Analysis:
    """The axes of every value in a one-stage graph.

    `axes[node]` has one `Axis` per dimension, `results[node]` a tuple of those for several results;
    `contractions[node]` is the axis a node sums over; `heads` pairs each attention with its heads dimension;
    for attentions in `sever` the heads of keys and values are not tied to the queries' (they are replicated, and each
    tensor rank takes its own): `severed` has the dimension for each (attention, its argument).
    """

    def __init__(
        self,
        graph: fx.Graph,
        parameters: Mapping[str, Parameter],
        *,
        tensor: int,
        rules: Mapping[str, Rule],
        sever: frozenset[fx.Node] = frozenset(),
    ) -> None:
        self.parameters = parameters
        self.tensor = tensor
        self.rules = rules
        self.sever = sever
        self.axes: dict[fx.Node, Axes] = {}
        self.results: dict[fx.Node, tuple[Axes, ...]] = {}
        self.contractions: dict[fx.Node, Axis] = {}
        self.heads: list[tuple[fx.Node, Axis]] = []
        self.severed: dict[tuple[fx.Node, fx.Node], int] = {}
        self.rank: fx.Node | None = None
        self.inputs: list[fx.Node] = []
        self.operators: set[str] = set()
        self.repeated: set[str] = set()  # those that every tensor rank does whole, for want of a rule
        self._weights: set[fx.Node] = set()
        self._batch: set[fx.Node] = set()
        self._learned: set[fx.Node] = set()
        for node in graph.nodes:
            self._visit(node)

    def of(self, node: Any) -> Axes:
        return self.axes[node]

    def all_of(self, node: fx.Node) -> tuple[Axes, ...]:
        """All results' axes of a node (none for the rank)."""
        return self.results.get(node) or ((self.axes[node],) if node in self.axes else ())

    def is_weight(self, node: Any) -> bool:
        """Is it a parameter, perhaps transposed or viewed?"""
        return node in self._weights

    def reads_batch(self, node: Any) -> bool:
        """Does it depend on the batch?"""
        return node in self._batch

    def contract(self, node: fx.Node, first: Axis, second: Axis) -> None:
        """Record that `node` sums over one axis of two arguments."""
        self.sum_over(node, first, second)
        ax.unify(first, second)

    def sum_over(self, node: fx.Node, *axes: Axis) -> None:
        """Record that `node` sums over `axes`, which are or become one.

        Copies of a value are summed whole: every rank has it, and nobody a part.
        """
        for leaf in [leaf for axis in axes for leaf in ax.leaves(axis)]:
            if leaf.copied:
                ax.block(leaf, f"{called(node)} sums over copies of a value")
        self.contractions[node] = axes[0]

    def align_leading(self, node: fx.Node, leading: Sequence[tuple[fx.Node, Axes]]) -> Axes:
        """Tie the leading (batch and heads) dimensions of an attention's tensors; the last of them is the heads.

        Grouped queries: where a later tensor has fewer heads, the heads are [its heads, group].
        """
        result = list(leading[0][1])
        for position, (tensor, own) in enumerate(leading[1:], 1):
            for back in range(1, len(own) + 1):
                axis = ax.find(own[-back])
                if axis.size == 1:
                    result[:0] = [axis] * (back > len(result))
                    continue
                is_heads = back == 1 and len(own) >= 2
                if is_heads and node in self.sever and position <= 2 and tensor in self._learned:
                    ax.block(axis, "the key and value heads are replicated")
                    self.severed[node, tensor] = len(own) - 1
                elif back > len(result):
                    result.insert(0, axis)
                else:
                    self._tie(node, result, -back, axis)
        if result:
            self.heads.append((node, result[-1]))
        return tuple(result)

    def _tie(self, node: fx.Node, result: list[Axis], at: int, axis: Axis) -> None:
        mine = ax.find(result[at])
        if mine.size == 1:
            result[at] = axis
        elif mine.size == axis.size:
            ax.unify(mine, axis)
        else:
            pair = ax.split_product(mine, [axis.size, mine.size // axis.size])
            if pair is None:
                ax.block(mine, f"{called(node)} groups it")
                ax.block(axis, f"{called(node)} groups it")
            else:
                ax.unify(pair[0], axis)

    def _visit(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        if node.op == "placeholder" and node.meta.get("role") == "rank":
            self.rank = node
            return
        if node.op in ("placeholder", "get_attr"):
            self.axes[node] = tuple(Axis(size) for size in shape_of(node))
            if node.op == "placeholder":
                for axis in self.axes[node]:
                    axis.kept = axis.size == 1
                self._batch.add(node)
                self.inputs.append(node)
            elif self.parameters[str(node.target)].kind == "parameter":
                self._weights.add(node)
                self._learned.add(node)
            return
        self._mark(node)
        found = self._rule(node)(self, node)
        if isinstance(node.meta["val"], (tuple, list)):
            self.results[node] = found
        else:
            self.axes[node] = found

    def _mark(self, node: fx.Node) -> None:
        sources = node.all_input_nodes
        if any(s in self._batch for s in sources):
            self._batch.add(node)
        if any(s in self._learned for s in sources):
            self._learned.add(node)
        name = operator_name(node.target)
        views = ("aten.t", "aten.numpy_T", "aten.transpose", "aten.reshape", "aten.permute", "aten.to")
        if name in views and node.args[0] in self._weights:
            self._weights.add(node)

    def _rule(self, node: fx.Node) -> Rule:
        name = operator_name(node.target)
        self.operators.add(name)
        rule = self.rules.get(name) or RULES.get(name)
        if rule is not None:
            return rule
        if self.tensor > 1 and node in self._learned:
            if name.startswith("aten."):
                self.repeated.add(name)
                return opaque
            shapes = [list(shape_of(n)) for n in node.all_input_nodes if n in self.axes]
            letters = [" ".join("bsdefgij"[: len(shape)]) for shape in shapes]
            raise ax.IndivisibleError(
                f"no sharding rule for {name} at {where(node)}, whose tensors have shapes {shapes}; give one, e.g. "
                f'autoptd.compile(..., rules={{"{name}": "{", ".join(letters)} -> {max(letters, key=len)}"}}) for one '
                'that works element by element, with a name for each dimension of each tensor and "!" after a name '
                "that must stay whole, or use tensor=1"
            )
        return opaque
