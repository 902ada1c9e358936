"""Warn at the user's own line of code."""

import sys
import warnings

# Packages between the user's line and this one: torch calls hooks, others run context managers and imports.
INNER = {"autoptd", "torch", "contextlib", "importlib", "_frozen_importlib", "_frozen_importlib_external"}


def warn_caller(text: str) -> None:
    """Warn of `text` at the line outside of the library and torch that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in INNER:
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__", ""))
    warnings.warn_explicit(text, UserWarning, *place, frame.f_globals.setdefault("__warningregistry__", {}))
