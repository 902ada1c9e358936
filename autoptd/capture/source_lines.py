"""The user's own code: its frames in a stack, and the error for what no program can do of it."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class CaptureError(ValueError):
    """A call or an effect of a forward that no traced program can hold or repeat."""


def user_line(frames: Sequence[traceback.FrameSummary] | None = None) -> str:
    """Return the innermost of the running `frames` outside torch and this package: "/me/gpt.py:52: y = f(x)", or ""."""
    for frame in reversed(traceback.extract_stack() if frames is None else frames):
        if not is_foreign(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def user_frame() -> tuple[FrameType | None, list[str]]:
    """Return the innermost running frame outside torch and this package, and the functions within, outermost last."""
    frame: FrameType | None = sys._getframe(1)
    calls = []
    while frame is not None and is_foreign(frame.f_code.co_filename):
        calls.append(frame.f_code.co_name)
        frame = frame.f_back
    return frame, calls


def short_line(stack_trace: str) -> str:
    """Return the user's place in a graph node's recorded stack, without folder and code: "gpt.py:52", or ""."""
    frames = [(file, line) for file, line in _FRAME.findall(stack_trace) if not is_foreign(file)]
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def is_foreign(filename: str) -> bool:
    """Return whether a file is none of the user's: of torch, of this package, or no file."""
    return filename.startswith((_TORCH, _HERE, "<")) or filename == contextlib.__file__
