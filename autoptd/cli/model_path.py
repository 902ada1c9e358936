"""Find a model by its name on the command line: "package.module:callable", called without arguments."""

import os
import sysconfig
import traceback
from pkgutil import resolve_name

import torch
from torch import nn

from autoptd.capture.source_lines import user_line
from autoptd.passes.cost.cluster import suggest

EXAMPLE = "expected module:callable, e.g. samples.gpt:make_model, that takes no arguments and returns the model"
LIBRARIES = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib"))


def make_model(name: str, device: str = "meta") -> nn.Module:
    """Import the module, call the callable on `device`, and return the model.

    Weights on the meta device cost nothing. Raises ValueError for a name that does not exist, and for what the user's
    code raises, with its place; TypeError for what is no model.
    """
    try:
        found = resolve_name(name)
        if callable(found) and not isinstance(found, nn.Module):
            with torch.device(device):
                found = found()
    except Exception as error:  # anything that a user's module raises
        hint = suggest(error.name, dir(error.obj)) if isinstance(error, AttributeError) and error.name else ""
        frames = traceback.extract_tb(error.__traceback__)
        line = user_line([frame for frame in frames if not frame.filename.startswith(LIBRARIES)])
        place = f", at {line}" if line and not isinstance(error, SyntaxError) else ""  # which says it itself
        what = f"{type(error).__name__}: {error}{hint}{place}"
        raise ValueError(f"model {name!r} cannot be built: {what}; {EXAMPLE}") from error
    if not isinstance(found, nn.Module):
        raise TypeError(f"model {name!r} is or returned a {type(found).__name__}; {EXAMPLE}")
    return found
