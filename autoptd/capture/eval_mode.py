"""Evaluation: dropout switched off, whatever mode modules are in, and the operators compared with those of training."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoptd.capture.side_effects import keeping_attributes, refuse_new_hooks
from autoptd.capture.source_lines import user_line

Call = tuple[Any, tuple[Any, ...]]
aten = torch.ops.aten
# Functions that return their first argument without dropout.
DROPPING = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
    *(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default),
}
SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# The names of arguments of attention.
ATTENTIONS: Mapping[Any, Sequence[str]] = {
    **dict.fromkeys((F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default), SDPA),
    F.multi_head_attention_forward: tuple(inspect.signature(F.multi_head_attention_forward).parameters),
}


class DropoutOff(TorchFunctionMode):
    """A mode in which dropouts return their input and attention drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in DROPPING:
            return args[0] if args else options["input"]
        if func in ATTENTIONS:
            return func(**{**dict(zip(ATTENTIONS[func], args, strict=False)), **options, "dropout_p": 0.0})
        return func(*args, **options)


# Compared with training: a program has one forward

# Dropout, and the random numbers by which layers are skipped.
LEFT_OUT = DROPPING | {torch.rand}


class Calls(TorchFunctionMode):
    """A record of the calls that make a floating tensor, with the plain numbers they take; dropouts are left out.

    Compared with the `expected` calls, `found` is the place of the first that differs.
    """

    def __init__(self, expected: Sequence[Call] | None = None) -> None:
        super().__init__()
        self.made: list[Call] = []
        self.found: str | None = None
        self._expected = None if expected is None else list(expected)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        result = func(*args, **options)
        if isinstance(result, Tensor) and result.is_floating_point() and func not in LEFT_OUT:
            given = () if func in ATTENTIONS else (*args, *options.values())
            self.note([(func, tuple(value for value in given if isinstance(value, (bool, int, float, str))))])
        return result

    def note(self, calls: Sequence[Call]) -> None:
        """Add `calls`, and compare them with those expected."""
        wanted = None if self._expected is None else self._expected[len(self.made) :][: len(calls)]
        self.made += calls
        if wanted is not None and self.found is None and wanted != calls:
            self.found = user_line()


def compare_evaluation(model: nn.Module, training: Sequence[Call], run: Callable[[], Tensor]) -> str | None:
    """Return the first place where the calls of `run`, which calls `model`, in evaluation mode differ from `training`.

    That forward was exported, and a model may take masks then that it leaves out elsewhere: so `run` is told the same.
    """
    calls = Calls(training)
    exporting = patch.multiple(torch.compiler, _is_exporting_flag=True, _is_compiling_flag=True)
    with keeping_attributes(model), refuse_new_hooks(), exporting, calls:
        for part in model.modules():
            part.training = False
        run()
    return calls.found or ("the end of forward" if len(calls.made) < len(training) else None)
