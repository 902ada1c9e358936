"""Experts as a trace takes them: those of transformers by our operators, and loops over those with tokens over all.

The modules of transformers' experts all compute by one interface, and are traced by it, or run as written. How many
experts have tokens depends on data, and a program takes all.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dis import opmap
from operator import getitem
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autoptd.capture.expert_loops import PICKS, depends_on_data
from autoptd.capture.known_values import KnownValues, find_memory, find_node
from autoptd.capture.side_effects import NUMBERS
from autoptd.capture.source_lines import CaptureError, user_frame, user_line
from autoptd.passes.ir.nodes import aten_name
from autoptd.passes.normal_form.writer import is_mutation
from autoptd.passes.operators.table import Trait, has_trait, strip
from autoptd.runtime import aten, kernels

Forward = Callable[..., Tensor]


def write_experts() -> AbstractContextManager[Any]:
    """Compute experts in this block by operators that know experts, whichever the model's config names.

    Others name no expert, take no float64 (``grouped_mm``), or loop over data ("eager").
    """
    return _choose(lambda written: _compute_experts)


def loop_over_experts() -> AbstractContextManager[Any]:
    """Compute experts in this block as their class is written, which any dtype can be."""
    return _choose(lambda written: written)


def _choose(choose: Callable[[Forward], Forward]) -> AbstractContextManager[Any]:
    """Let `choose` pick the forward of all experts, given that of their class; not one that the user wrote."""
    moe = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
    if interface is None:
        return nullcontext()
    named = interface.get_interface

    def find(implementation: str | None, written: Forward) -> Forward:
        theirs: Forward = named(implementation, written)
        return choose(written) if theirs.__module__.startswith("transformers.") else theirs

    return patch.object(interface, "get_interface", find)


def _compute_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute what transformers' own forwards of its experts do, for the rows of all experts together."""

    def multiply(rows: Tensor, name: str) -> Tensor:
        weight, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return kernels.grouped_linear(rows, weight, counts, bias, module.is_transposed)

    weight = module.down_proj
    order, counts = torch.ops.autoptd.route(top_k_index, 0, len(weight))
    rows = kernels.dispatch(hidden_states, order, top_k_index.shape[1])
    rows = multiply(rows, "gate_up_proj" if module.has_gate else "up_proj")
    rows = multiply(module._apply_gate(rows) if module.has_gate else module.act_fn(rows), "down_proj")
    if getattr(module, "has_post_expert_norm", False):  # since transformers 5.20
        rows = module.post_expert_norm(rows)
    return kernels.combine(rows, top_k_weights, order).to(hidden_states.dtype)


class KnownExperts(KnownValues):
    """A mode that gives a forward known values, and all experts where its `loops` are over those that have tokens.

    A run of the same forward without a trace is given as many.
    """

    def __init__(self, traced: nn.Module) -> None:
        super().__init__(traced)
        self.loops: list[ExpertLoop] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.unbind and isinstance(args[0].shape[0], NUMBERS):
            given = self.given[f"{func} {user_line()}"]
            if get_proxy_mode() is None and given:
                return torch.arange(given.popleft()).split(1)
            if get_proxy_mode() is not None and (mask := _find_mask(find_node(args[0]))) is not None:
                self.loops.append(loop := ExpertLoop(mask))
                given.append(loop.number)
                return loop.run()
        if func is Tensor.__getitem__ and self.loops and isinstance(args[1], Tensor) and args[1].shape == ():
            number = self.compute(args[1]) if get_proxy_mode() is not None else None
            args = args if number is None or number.is_floating_point() else (args[0], number.item())
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def notes(self) -> dict[str, None]:
        """A line for the log of each loop."""
        said = "takes all experts: one without tokens has a gradient of 0, where the plain model's may have none"
        return dict.fromkeys(f"{loop.line} {said}" for loop in self.loops)


class ExpertLoop:
    """The loop ``for expert in (mask.sum((1, 2)) > 0).nonzero()``, at a `line` of the user's, over all experts.

    One without tokens adds no rows; its gradients are then 0, where the plain model may have none. `check` refuses a
    loop that does anything else.
    """

    def __init__(self, mask: fx.Node) -> None:
        self.line, self.number = user_line(), mask.meta["val"].shape[0]
        frame, _ = user_frame()
        # At the head of a plain ``for``; enumerate, zip and list would number what they are given.
        plain = frame is not None and frame.f_code.co_code[frame.f_lasti] == opmap["GET_ITER"]
        self._mask, self._counts = mask, not plain
        self._bodies: list[list[fx.Node]] = []  # what was traced for each expert

    def run(self) -> Iterator[Tensor]:
        """Yield the number of each expert; note what is traced for it."""
        graph, numbers = self._mask.graph, _read_numbers()
        for expert in range(self.number):
            before = len(graph.nodes)
            yield torch.arange(expert, expert + 1)
            self._bodies.append([*graph.nodes][before:])
        self._counts |= not numbers.items() <= _read_numbers().items()

    def check(self) -> None:
        """Raise CaptureError if what was traced for an expert does more than to add rows of its own tokens."""
        found = "counts its turns" if self._counts else "is left early" * (len(self._bodies) < self.number)
        written = (n.args[0] for n in self._mask.graph.nodes if is_mutation(n.target))
        if any(find_memory(x) & find_memory(self._mask) for x in written):
            found = "has a mask that is written to"
        for number, body in enumerate(self._bodies):
            own = (aten.index.Tensor, (self._mask, [body[0]])), (aten.select.int, (self._mask, 0, number))
            for node in body:
                writes = is_mutation(node.target) and not depends_on_data(node.args[0])  # type: ignore[arg-type]
                if (writes or not node.users.keys() <= {*body}) and not _adds_rows(node, own):
                    found = f"makes a value ({node.target}) that is read although an expert has no tokens"
        if found:
            raise CaptureError(
                f"{self.line}: this loop over the experts that have tokens {found}, and a program takes all experts: "
                "loop over all of them, and only add rows of their own tokens to a result"
            )


def _adds_rows(node: fx.Node, own: Collection[Any]) -> bool:
    """Return whether a node adds or puts rows to the tokens of one of the masks that are an expert's `own`."""
    given: Any = node.args
    name = aten_name(node.target).removesuffix("_")
    if name not in ("index_add", "index_put"):
        return False
    pick = given[2] if name == "index_add" else given[1][0]
    where = pick.args[0] if pick.target is getitem else pick
    mask = strip(where.args[0], Trait.RESHAPES | Trait.SQUEEZES) if aten_name(where.target) in PICKS else where
    return (mask.target, mask.args) in own


def _find_mask(hits: Any) -> fx.Node | None:
    """Return the mask, of zeros and ones, of which `hits` are the experts with tokens along its first dimension."""
    given: list[Any] = []
    for names in (["nonzero"], ["gt", "greater"], ["sum"]):
        if aten_name(getattr(hits, "target", None)) not in names:
            return None
        hits, *rest = hits.args
        given += rest
    rank = hits.meta["val"].dim()
    counted = len(given) == 2 and given[0] == 0 and {dim % rank for dim in given[1]} == {*range(1, rank)}
    return hits if counted and _is_mask(hits) else None


def _is_mask(value: Any) -> bool:
    """Return whether each element of a value is 0 or 1."""
    if not isinstance(value, fx.Node) or value.meta["val"].dtype == torch.bool or aten_name(value.target) == "one_hot":
        return isinstance(value, fx.Node)
    own = value.args[:1] if has_trait(value, Trait.VIEWS | Trait.CASTS) else (None,)
    return all(map(_is_mask, value.args if aten_name(value.target) == "mul" else own))


def _read_numbers() -> dict[str, Any]:
    """Return the numbers among the user's local variables, and how many items those have that are lists or the like."""
    frame, _ = user_frame()
    held = {} if frame is None else frame.f_locals
    counted = {name: len(value) for name, value in held.items() if type(value) in (list, set, dict)}
    return counted | {name: value for name, value in held.items() if type(value) in (int, float)}
