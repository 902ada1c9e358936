"""The record of one operator: everything that the compiler knows of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, Literal

from torch import fx

from autoptd.passes.operators.axis_map import AxisMap, opaque
from autoptd.passes.operators.layout import LayoutWriter, Written
from autoptd.passes.operators.localizer import LocalRule, same_call
from autoptd.passes.operators.proof import Rule, refuse_partial
from autoptd.passes.operators.quantities import Value, Work


class Trait(Flag):
    """Facts about an operator that several passes ask for."""

    NONE = 0
    PADDING_SAFE = auto()  # rows of zeros behind the end of its arguments mean nothing to it
    KNOWS_SIZE = auto()  # a contraction that knows its true size, and so may be padded
    NUMBERS = auto()  # a contraction that knows each row by its number: a rank must have consecutive ones
    RESHAPES = auto()  # its result has the elements of its argument in the same order, in another shape
    SQUEEZES = auto()  # adds or drops dimensions of size 1
    PERMUTES = auto()  # moves dimensions
    LAYS_OUT = auto()  # writes its argument to memory anew
    CASTS = auto()
    REARRANGES = RESHAPES | SQUEEZES | PERMUTES | LAYS_OUT | CASTS  # the elements of its argument, each once
    TAKES = auto()  # its result is a part of its argument, or all of it
    REPEATS = auto()  # its result has elements of its argument several times
    VIEWS = RESHAPES | SQUEEZES | PERMUTES | LAYS_OUT | TAKES | REPEATS  # elements of its argument, unchanged
    PADS = auto()  # adds constant elements to its argument
    FILLS = auto()  # makes a tensor of one constant, from its shape alone
    SCALES = auto()  # multiplies or divides its argument by another, or by a number
    LINEAR = auto()  # none of these, and linear in its arguments
    FREE = auto()  # its forward only looks at its argument in another way, though torch calls it no view
    SOFTMAX = auto()
    LOG_SOFTMAX = auto()
    FUSED_ATTENTION = auto()  # keeps arguments, result and a statistic; writes in the order of the queries
    SUMS_RANKS = auto()  # its result is a sum over the tensor ranks, and has a whole gradient
    SUMS_GRADIENTS = auto()  # f: it sums the gradient of its argument, which all tensor ranks have, over them
    OWN_BACKWARD = auto()  # which is the user's, and may not be linear in its gradient
    ANY_PLACEMENT = auto()  # `placed` judges whole arguments and partial sums, too


@dataclass(frozen=True, kw_only=True)
class OperatorRules:
    """The rules of one operator; each default is right for an operator of which nothing more is known.

    `axes` relates the axes of arguments and results: it unifies equal ones, blocks those that must stay whole, and
    records a contraction. `local` writes the call on one tensor rank. `placed` is the proof's own rule: the placement
    of the result from those of the arguments, of which at least one is not whole and none a partial sum (`of_partial`
    has these); None: the proof does not cover it. `order` writes the call for the sequence-first layout; None: on
    arguments in the user's order. `work` and `backward` are the costs of both directions; None: bound by memory,
    where the backward reads what the forward `keeps`. `copies` counts the bytes that it copies for bad strides.
    """

    axes: Callable[[AxisMap, fx.Node], Any] = opaque
    local: LocalRule = same_call
    placed: Rule | None = None
    of_partial: Rule = refuse_partial
    order: Callable[[LayoutWriter, fx.Node], Written] | None = None
    work: Callable[[fx.Node, Value], Work] | None = None
    backward: Callable[[fx.Node, Value, Sequence[fx.Node]], Work] | None = None
    keeps: Literal["arguments", "result", "nothing"] = "arguments"
    copies: Callable[[Sequence[Any], Any], int] | None = None
    traits: Trait = Trait.NONE


Records = Mapping[str, OperatorRules]  # of the user's operators, by name
