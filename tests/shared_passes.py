"""The planner's passes over a shared capture, run once for all tests: most of the time of an estimate."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from autoptd.pass_list import run_passes
from autoptd.passes.ir.program import Passes, Program
from autoptd.passes.stages.fused_order import FusedOrder
from autoptd.progress import Say
from tests.captures import UnknownError, freeze

MOST = 200  # results that are held
ResultT = TypeVar("ResultT")
_results: OrderedDict[Hashable, tuple[Program, Any]] = OrderedDict()


def run_passes_once(passes: Passes, program: Program, say: Say) -> Program:
    """`run_passes`, or the result of an earlier call with the same graphs and equal passes."""
    return _once(program, passes, lambda: run_passes(passes, program, say))


def order_once(program: Program, finishing: Passes) -> FusedOrder:
    """`FusedOrder`, or the one that an earlier call made of the same graphs with equal passes."""
    return _once(program, finishing, lambda: FusedOrder(program, finishing))


def _once(program: Program, passes: Passes, make: Callable[[], ResultT]) -> ResultT:
    try:
        key = id(program.stages), program.mesh, program.inputs, freeze(passes)
    except UnknownError:
        return make()
    if key not in _results:
        _results[key] = program, make()  # the program, too, so that no other gets its id
        if len(_results) > MOST:
            _results.popitem(last=False)
    result: ResultT = _results[key][1]
    return result
