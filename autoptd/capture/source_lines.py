"""Find the frame of a stack that lies in the user's own code."""

import contextlib
import os
import re
from collections.abc import Sequence
from traceback import FrameSummary

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def user_line(frames: Sequence[FrameSummary]) -> str:
    """Return the innermost frame outside torch and this package: "/home/me/gpt.py:52: y = f(x)", or ""."""
    for frame in reversed(frames):
        if not _is_foreign(frame.filename):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def short_line(stack_trace: str) -> str:
    """Return the user's place in a graph node's recorded stack, without folder and code: "gpt.py:52", or ""."""
    frames = [(file, line) for file, line in _FRAME.findall(stack_trace) if not _is_foreign(file)]
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def _is_foreign(filename: str) -> bool:
    return filename.startswith((_TORCH, _HERE, "<")) or filename == contextlib.__file__
