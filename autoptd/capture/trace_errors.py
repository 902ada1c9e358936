"""Why a model cannot be traced, and the ways out that work."""

import re
import traceback
from collections.abc import Callable

from torch import nn

from autoptd.capture.objective import DataDependentError, Objective
from autoptd.capture.side_effects import keeping_attributes
from autoptd.capture.source_lines import user_line


def explain(error: Exception, objective: Objective, run: Callable[[], object]) -> str:
    """Say why the trace ended with `error`: by the model's own code, values that are not known, or torch.export.

    `run` calls the model without data, and without a trace.
    """
    unknown = isinstance(error, DataDependentError)
    place, found = describe_error(error.__cause__ or error if unknown else error, objective.captured)
    wants = "cuda" in found.lower() and objective.device == "cpu"
    way = ', or trace it as on a card, with device="cuda"' if wants else ""
    if unknown:
        return (
            f"{place}: control flow depends on a tensor's values, which one traced program cannot follow ({found}). "
            "Ways out: take the condition from shapes, the config or buffers that have values; use torch.where or a "
            f"mask instead of the branch; pass a module without that branch{find_way(objective.captured)}"
        )
    try:
        with keeping_attributes(objective):
            run()
    except Exception as plain:
        # Torch raises its own errors for what cannot run without data.
        own = not re.search("torch|meta|fake|subclass|storage", f"{type(plain).__module__} {plain}".lower())
        if own and type(plain) is type(error):
            given = ", ".join(f"{i.name} {list(i.shape)} of {i.dtype}" for i in objective.inputs)
            said = f"{place}: the model itself raises {found} with these inputs: {given}"
            return f"{said}. Make it run with them first{way}"
    written = f"Write that call with torch operators, or move it out of forward{way}"
    return f"{place}: the model cannot be traced ({found}). {written}"


def find_way(model: nn.Module) -> str:
    """Return how a loop over experts is written for any tokens, where `model` has experts."""
    named = (item for module in model.modules() for item in module.named_children())
    experts = next((n for n, part in named if "expert" in n.lower() and list(part.children())), None)
    if experts is None:
        return ""
    return (
        f"; a loop over self.{experts} may take rows, slots = torch.where(chosen == e) of each, without asking whether "
        "there are any, and out.index_add_(0, rows, gates[rows, slots, None] * expert(x[rows]))"
    )


def describe_error(error: BaseException, model: nn.Module) -> tuple[str, str]:
    """Return the error's place in the user's code, and its first line."""
    place = user_line(traceback.extract_tb(error.__traceback__)) or type(model).__name__
    return place, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
