"""The proof that t tensor ranks compute what one device would: every sum summed once, forward and backward.

Experts that are divided over data ranks too are followed like those of tensor ranks, up to the return of their rows.

Forward, each value has a `AxisPlacement` (see `proof`). Backward, a whole value's gradient is either whole, the
same on all ranks, or partial: each rank has one term of it, as behind a divided reader. Backwards are linear,
so whole operators hand on what they get; f (`collectives.copy_to_tensor`, alone or with the linears that read it)
makes a partial gradient whole. The two never mix at one value, and a partial one ends only in a parameter marked so.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from torch import fx
from torch._ops import OpOverload

from autoptd.passes.ir.nodes import info, operator_name, where
from autoptd.passes.ir.products import read_products
from autoptd.passes.ir.program import Stage, find_trained, split_results
from autoptd.passes.operators import proof
from autoptd.passes.operators.experts import EXCHANGES
from autoptd.passes.operators.record import OperatorRules, Records
from autoptd.passes.operators.table import Trait, find_record, has_trait, rules_of
from autoptd.passes.operators.views import reshape_placed
from autoptd.passes.tensor_parallel.text_rule import read_rules
from autoptd.runtime import aten, collectives
from autoptd.runtime.kernels.autograd_function import AutogradFunction
from autoptd.runtime.program.manifest import Boundary, Manifest, StageInterface
from autoptd.runtime.program.placement import Partial, Replicate, Shard

Gradient = Literal["whole", "partial"]


def prove_tensor_parallel(manifest: Manifest, stages: Sequence[Stage]) -> tuple[str, ...]:
    """Raise `PlacementError` for the first value, in stage order, that the tensor ranks would get wrong.

    Gives a line for each operator that the proof does not cover, where a divided value gets lost to it. The stages'
    boundaries must fit together (`autoptd.check.program` proves that before).
    """
    mesh = manifest.mesh
    if mesh.expert == 1:
        return ()
    rules = read_rules(manifest.rules)
    alone = mesh.tensor == 1
    walks = [StageWalk(index, stage, rules, find_trained(stage), alone) for index, stage in enumerate(stages)]
    arriving: list[proof.Found] = []
    for walk in walks:
        walk.forward(arriving, manifest.stages[walk.index], mesh.sizes)
        arriving = [walk.placements[n] for n in walk.results]
    leaving: list[Gradient | None] = ["whole"]
    for walk in reversed(walks):
        leaving = walk.backward(leaving, manifest.stages[walk.index].receives)
    return tuple(line for walk in walks for line in walk.uncovered)


def _is_copied_part(node: fx.Node) -> bool:
    """Whether it is the result of one of several linears that read f together."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is collectives.copied_linears


def _is_lost(found: proof.Found) -> bool:
    """Whether a placement says too little to prove more from it."""
    several = found if isinstance(found, tuple) else (found,)
    return any(p == proof.UNKNOWN or (isinstance(p, Shard) and p.dim is None) for p in several)


@dataclass
class StageWalk:
    """One stage's placements, found forward, and its gradients, found backward; `trained` values have one.

    Where a tensor rank is `alone`, only rows of experts are divided, over data ranks, which add up all gradients.
    """

    index: int
    stage: Stage
    rules: Records
    trained: set[fx.Node]
    alone: bool
    placements: dict[fx.Node, proof.Found] = field(default_factory=dict)
    results: Sequence[fx.Node] = ()  # for the next stage, or the loss
    gradients: dict[fx.Node, Gradient] = field(default_factory=dict)
    uncovered: list[str] = field(default_factory=list)
    # Where a value's partial gradient comes from: a divided operator, and the whole argument it reads.
    terms: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)

    def forward(self, arriving: Sequence[proof.Found], interface: StageInterface, sizes: Mapping[str, int]) -> None:
        received = iter(arriving)
        for node in self.stage.graph.nodes:
            if node.op == "call_function":
                try:
                    given = [self.placements[n] for n in node.all_input_nodes]
                    whole = self.alone and node.target not in EXCHANGES and all(p is proof.WHOLE for p in given)
                    self.placements[node] = proof.WHOLE if whole else placement_after(node, self.placements, self.rules)
                except proof.PlacementError as error:
                    raise proof.PlacementError(f"stage {self.index}: {where(node)} {error}") from None
                self._note_uncovered(node)
            elif node.op == "get_attr":
                self.placements[node] = proof.place_parameter(self.stage.parameters[str(node.target)], sizes)
            elif node.op == "placeholder":
                self.placements[node] = next(received) if info(node).role == "boundary" else proof.WHOLE
        self.results, outputs = split_results(self.stage.graph)
        self._check_results(interface.sends)
        for value, result in zip(outputs, interface.outputs, strict=True):
            found, expected = self.placements[value], result.placement["tensor"]
            alike = type(found) is type(expected) and found.dim in (None, expected.dim)
            use = f"is the output {result.name}"
            self._require(value, alike or found == proof.UNKNOWN, use, f"{expected.word}, as in the manifest")

    def _note_uncovered(self, node: fx.Node) -> None:
        """Say where a divided value's dimension gets lost: behind it the proof knows less, or nothing."""
        if [n for n in (node, *node.all_input_nodes) if _is_lost(self.placements[n])] != [node]:
            return
        what = (
            "makes of a divided value what the proof has no rule for"
            if self.placements[node] == proof.UNKNOWN
            else "leaves each tensor rank one row among other dimensions of size 1: which is divided, cannot be told"
        )
        name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
        self.uncovered.append(f"stage {self.index}: {name}, {where(node)}, {what}; verify() runs it")

    def _check_results(self, sends: Sequence[Boundary]) -> None:
        if not sends:
            (loss,) = self.results
            whole = self.placements[loss] in (proof.WHOLE, proof.UNKNOWN)
            self._require(loss, whole, "is the loss", "a whole one, equal on all ranks")
            return
        for value, boundary in zip(self.results, sends, strict=True):
            placement = self.placements[value]
            right: tuple[type, ...] = (Replicate, proof.Unknown)
            right += (Shard,) * boundary.placement.is_divided
            expected = "a whole value, or a placement in the manifest's boundary that divides it"
            if isinstance(placement, Partial):
                expected = f"collectives.reduce_from_tensor(rank, {value}) before it is sent"
            use = f"is sent to stage {self.index + 1} as {boundary.name}"
            self._require(value, isinstance(placement, right), use, expected)

    def _require(self, node: fx.Node, right: bool, use: str, expected: str) -> None:
        if not right:
            placement = self.placements[node]
            kind = "a tuple" if isinstance(placement, tuple) else placement.word
            raise proof.PlacementError(f"stage {self.index}: {where(node)} {use} and is {kind}: expected {expected}")

    def backward(self, leaving: Sequence[Gradient | None], receives: Sequence[Boundary]) -> list[Gradient | None]:
        """Find every whole value's gradient, given that of each output; give that of each received value."""
        given: dict[fx.Node, list[Gradient]] = {}
        for node, gradient in zip(self.results, leaving, strict=True):
            if gradient is not None:
                given.setdefault(node, []).append(gradient)
        for node in reversed(self.stage.graph.nodes):
            if self.placements.get(node) is proof.WHOLE and node in self.trained:
                gradient = self._find_gradient(node, given.get(node, []))
                if gradient is not None:
                    self.gradients[node] = gradient
                    self._check_gradient(node, gradient)
        arrived = [n for n in self.stage.graph.nodes if info(n).role == "boundary"]
        for node, boundary in zip(arrived, receives, strict=True):
            if self.gradients.get(node) == "partial" and not boundary.placement.is_divided:
                self._refuse(node, f"{node}, which goes back to the stage before")
        return [self.gradients.get(node) for node in arrived]

    def _find_gradient(self, node: fx.Node, sent: Sequence[Gradient]) -> Gradient | None:
        """What a whole value's readers give it; None where nothing is known, or none reads it."""
        readers: dict[Gradient, fx.Node | None] = dict.fromkeys(sent)
        for reader in node.users:
            if reader.op != "output" and reader in self.trained:
                gradient = self._gradient_from(reader, node)
                if gradient is not None:
                    readers.setdefault(gradient, reader)
        partial = readers.get("partial")
        if partial is not None and self.placements[partial] is not proof.WHOLE:
            self.terms[node] = partial, node
        elif partial in self.terms:
            self.terms[node] = self.terms[partial]
        if len(readers) > 1:
            whole = readers["whole"]
            source = where(whole) if whole is not None else "outside this stage"
            self._refuse(node, f"{where(node)}, which has a whole gradient from {source}")
        return next(iter(readers), None)

    def _gradient_from(self, reader: fx.Node, value: fx.Node) -> Gradient | None:
        """What one reader gives a whole argument, its `value`."""
        if has_trait(reader, Trait.SUMS_GRADIENTS) and reader.args[1] is value:
            return "whole"
        if reader.target is collectives.copied_linears:
            own = {product.index for product in read_products(reader) if value in product.parameters}
            made = next((n for n in reader.users if n.target is operator.getitem and n.args[1] in own), None)
            return None if made is None else self._gradient_from(made, reader)
        if self.placements[reader] is proof.WHOLE:
            return self.gradients.get(reader)
        if self.placements[reader] is proof.UNKNOWN:
            return None
        return "whole" if self.alone else "partial"

    def _check_gradient(self, node: fx.Node, gradient: Gradient) -> None:
        if node.op == "get_attr":
            marked = self.stage.parameters[str(node.target)].placement.has_partial_gradient
            if gradient == "partial" and not marked:
                self._refuse(node, f"{node.target}, a parameter whose placement has no partial gradient")
            if gradient == "whole" and marked:
                raise proof.PlacementError(
                    f"stage {self.index}: {node.target} has a partial gradient in its placement, although every tensor "
                    "rank has its whole gradient, and would be multiplied by their number: correct the manifest"
                )
        elif has_trait(node, Trait.SUMS_RANKS | Trait.OWN_BACKWARD):
            if gradient == "partial":
                sums = has_trait(node, Trait.SUMS_RANKS)
                what = "is a sum over the tensor ranks" if sums else "has a backward of its own"
                self._refuse(node, f"{where(node)}, which {what}")
        elif has_trait(node, Trait.SUMS_GRADIENTS) or _is_copied_part(node):
            if gradient == "whole":
                way = "compute this linear without its all-reduce"
                if node.target is collectives.copy_to_tensor:
                    way = "leave this copy_to_tensor out"
                raise proof.PlacementError(
                    f"stage {self.index}: {where(node)} all-reduces a gradient that is whole on every tensor "
                    f"rank, and so multiplies it by their number: only divided operators may read it; {way}"
                )
        elif gradient == "whole" and any(self.placements[n] is not proof.WHOLE for n in node.all_input_nodes):
            raise proof.PlacementError(
                f"stage {self.index}: {where(node)} takes whole rows out of a tensor whose other rows are divided, and "
                f"gets a whole gradient: expected {node} to be read through collectives.copy_to_tensor(rank, {node})"
            )

    def _refuse(self, node: fx.Node, reached: str) -> None:
        """Say where f is missing, if a partial gradient has `reached` where it may not."""
        if node in self.terms:
            reader, value = self.terms[node]
            found = f"{where(reader)} is divided and reads {value} as it is"
            expected = f"{reader} to read collectives.copy_to_tensor(rank, {value})"
        else:
            found = f"a later stage hands back one term of the gradient of {where(node)}"
            expected = "it to read the value through collectives.copy_to_tensor"
        raise proof.PlacementError(
            f"stage {self.index}: {found}, so that each tensor rank has one term of the gradient only, up to "
            f"{reached}: expected {expected}"
        )


# Forward, of one call

# Rules of operators that an edit may call as functions: x / y, x.view(...).
_FUNCTIONS = (proof.elementwise, reshape_placed)


def placement_after(node: fx.Node, placements: proof.Placements, rules: Records) -> proof.Found:
    """Return the placement of a call's result, by the `placed` rule of its operator; the user's `rules` go before ours.

    Whole arguments give a whole result, unless the rule judges these too, and no rule an unknown placement. Raises
    PlacementError, which says what is wrong and not where, for what differs from the undivided program.
    """
    record = _find_rules(node, rules)
    if Trait.ANY_PLACEMENT in record.traits and record.placed is not None:
        return record.placed(node, placements)
    found = [placements[n] for n in node.all_input_nodes]
    if all(placement is proof.WHOLE for placement in found):
        return proof.WHOLE
    if any(proof.PARTIAL in (p if isinstance(p, tuple) else (p,)) for p in found):
        return record.of_partial(node, placements)
    return record.placed(node, placements) if record.placed is not None else proof.UNKNOWN


def _find_rules(node: fx.Node, rules: Records) -> OperatorRules:
    if isinstance(node.target, OpOverload | AutogradFunction):
        return rules.get(operator_name(node.target)) or rules_of(node)
    return find_record(node.target) or _rules_of_function(node.target)


@cache
def _rules_of_function(function: Any) -> OperatorRules:
    """The record of the operator that a Python function is named like."""
    packet: Any = getattr(aten, str(getattr(function, "__name__", "")).replace("truediv", "div"), None)
    overloads = () if packet is None else (getattr(packet, overload) for overload in packet.overloads())
    record = next(filter(None, map(find_record, overloads)), OperatorRules())
    return record if record.placed in _FUNCTIONS else OperatorRules()
