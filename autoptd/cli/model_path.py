"""Find a model by its name on the command line: "package.module:callable", called without arguments."""

import inspect
import os
import pkgutil
import sysconfig
import traceback
from importlib import import_module
from types import ModuleType

import torch
from torch import nn

from autoptd.capture.source_lines import user_line
from autoptd.passes.cost.cluster_file import suggest

EXAMPLE = "expected module:callable, e.g. samples.gpt:make_model"
LIBRARIES = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib"))


def make_model(name: str, device: str = "meta") -> nn.Module:
    """Import the module, call the callable on `device`, and return the model.

    Weights on the meta device cost nothing. Raises ValueError, with the nearest name, for a name that does not exist,
    for a callable that needs arguments, and for what the user's code raises, with its place; TypeError for others.
    """
    path, colon, attribute = name.partition(":")
    if not (path and colon and attribute):
        raise ValueError(f"model {name!r}: {EXAMPLE}")
    module = _import(path, name)
    if not hasattr(module, attribute):
        known = [own for own in vars(module) if not own.startswith("_")]
        raise ValueError(f"model {name!r}: {path} has no {attribute!r}{suggest(attribute, known)}; {EXAMPLE}")
    found = getattr(module, attribute)
    if callable(found) and not isinstance(found, nn.Module):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            way = "name a function that takes none and returns the model"
            raise ValueError(f"model {name!r} is called without arguments: {error}; {way}") from None
        try:
            with torch.device(device):
                found = found()
        except Exception as error:
            raise _failed(name, error) from error
    if not isinstance(found, nn.Module):
        raise TypeError(f"model {name!r} returned a {type(found).__name__}; expected an nn.Module")
    return found


def _import(path: str, name: str) -> ModuleType:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if path != missing and not path.startswith(f"{missing}."):
            raise _failed(name, error) from error  # the module exists, but one of its imports does not
        parent = missing.rpartition(".")[0]
        places = list(import_module(parent).__path__) if parent else ["."]
        known = [f"{parent}.{found.name}".lstrip(".") for found in pkgutil.iter_modules(places)]
        raise ValueError(
            f"model {name!r}: there is no module {missing!r}{suggest(missing, known)}; {EXAMPLE}"
        ) from None
    except Exception as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> ValueError:
    """Return the error of the user's own code with its place, which a SyntaxError has itself."""
    frames = traceback.extract_tb(error.__traceback__)
    line = user_line([frame for frame in frames if not frame.filename.startswith(LIBRARIES)])
    place = "" if isinstance(error, SyntaxError) or not line else f", at {line}"
    kind = type(error).__name__
    return ValueError(f"model {name!r} cannot be built: {kind}: {error}{place}; correct it there")
