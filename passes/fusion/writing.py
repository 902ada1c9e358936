"""Write calls in place of chains of operators."""

import operator
from collections.abc import Iterable

from torch import fx

from autoptd.passes.fusion.patterns import Call, Match, alike, is_reshape
from autoptd.passes.ir.names import final_name
from autoptd.passes.ir.nodes import Propagation, add_node, called, change_info, describe, info, nodes_in, results_of


class ChainWriter:
    """A writer of calls in place of chains; those `written`, but for reshapes, stand for some."""

    def __init__(self, propagation: Propagation) -> None:
        self._propagation = propagation
        self.written: set[fx.Node] = set()

    def replace(self, match: Match, name: str = "") -> None:
        """Write the call at its first result, and remove the chain; `name` it if it has several results.

        Raises ValueError if a result has another shape or dtype than what it stands for.
        """
        first = match.results[0]
        made = self._write(match.call, first)
        if not is_reshape(made):
            self.written.add(made)
        values = [made]
        if match.several:
            placements = tuple(placement for old in match.several for placement in info(old).placements)
            change_info(made, name=name or f"{final_name(match.call.like)}_pair", placement=placements)
            graph, count = first.graph, len(match.several)
            with graph.inserting_before(first):
                values = [add_node(graph, "call_function", operator.getitem, (made, i)) for i in range(count)]
        for index, (old, new) in enumerate(zip(match.results, values, strict=True)):
            val = made.meta["val"] if new is made else made.meta["val"][index]
            place = info(made)  # one heading for several results
            describe(new, val, info(old), path=place.path, line=place.line, name=final_name(old))
            if not all(map(alike, results_of(new), results_of(old))):
                raise ValueError(f"{called(made)} returns {val} for {old}; expected {old.meta['val']}")
            old.replace_all_uses_with(new)
        items: set[int] = set()
        for node in sorted({*match.members, *match.results, *values}, reverse=True):
            if not node.users:
                items.update(info(node).items)
                node.graph.erase_node(node)
        change_info(made, items=tuple(sorted(items)))

    def _write(self, call: Call, place: fx.Node) -> fx.Node:
        """Write the call before `place`, after its arguments."""
        args = tuple(self._write(a, place) if isinstance(a, Call) else a for a in call.args)
        _bring_before(place, nodes_in(args))
        about = {"name": final_name(call.like), "value": None}
        made = self._propagation.write(place, call.target, args, call.kwargs, call.like, **about)
        if call.like in self.written and not is_reshape(made):
            self.written.add(made)
        return made


def _bring_before(place: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Move `nodes`, and what they are computed from, before `place` where they are behind."""
    for node in nodes:
        if place < node:
            _bring_before(place, node.all_input_nodes)
            place.prepend(node)
