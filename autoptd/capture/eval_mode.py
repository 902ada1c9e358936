"""Compare the operators that a model calls in evaluation with those of training: a program has one forward."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoptd.capture.dropout_off import ATTENTIONS, DROPPING, drops
from autoptd.capture.side_effects import keeping_attributes
from autoptd.capture.source_lines import user_line

Call = tuple[Any, tuple[Any, ...]]
# Dropout, and the random numbers by which layers are skipped (in the loss they are refused).
LEFT_OUT = DROPPING | {torch.rand}


class Calls(TorchFunctionMode):
    """A record of the calls that make a floating tensor, with the plain numbers they take; dropouts are left out.

    Compared with the `expected` calls, `found` is the place of the first that differs, and `dropped` the place of the
    first dropout.
    """

    def __init__(self, expected: Sequence[Call] | None = None) -> None:
        super().__init__()
        self.made: list[Call] = []
        self.found: str | None = None
        self.dropped: str | None = None
        self._expected = None if expected is None else list(expected)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if self._expected is not None and self.dropped is None and drops(func, args, options):
            self.dropped = user_line(traceback.extract_stack())
        result = func(*args, **options)
        if isinstance(result, Tensor) and result.is_floating_point() and func not in LEFT_OUT:
            given = () if func in ATTENTIONS else (*args, *options.values())
            call = func, tuple(value for value in given if isinstance(value, (bool, int, float, str)))
            wanted = None if self._expected is None else self._expected[len(self.made) : len(self.made) + 1]
            self.made.append(call)
            if wanted is not None and self.found is None and wanted != [call]:
                self.found = user_line(traceback.extract_stack())
        return result


def compare_evaluation(model: nn.Module, training: Sequence[Call], run: Callable[[], Tensor]) -> Calls:
    """Compare the calls of `run`, which calls `model`, in evaluation mode with those of the `training` forward.

    That one was exported, and a model may take masks under torch.export that it leaves out elsewhere: so `run` is told
    the same.
    """
    calls = Calls(training)
    exporting = patch.multiple(torch.compiler, _is_exporting_flag=True, _is_compiling_flag=True)
    with keeping_attributes(model), exporting, calls:
        for part in model.modules():
            part.training = False
        run()
    if len(calls.made) < len(training):
        calls.found = calls.found or "the end of forward"
    return calls
