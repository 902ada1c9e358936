"""Keep ``torch.compile`` out of a parallel model."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

REASON = "a parallel model runs a schedule of stages, which its rank program has already"

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def leave_uncompiled(function: FunctionT) -> FunctionT:
    """Let compilers call `function`, and the functions it calls, as they are; return it.

    ``torch.compiler.disable`` is for that, but imports torch._dynamo: 2 s in every process, also without compiling.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    return function
