"""Warn of mixed precision asked for around a call: a program keeps the precision that it was captured with."""

from __future__ import annotations

import sys

import torch

from autoptd.runtime.program.manifest import Manifest

MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def describe_unheeded(manifest: Manifest, device: torch.device) -> str:
    """Return a warning where autocast, or the precision given to Accelerate, is not the program's, else ""."""
    if torch.is_autocast_enabled(device.type):
        if torch.get_autocast_dtype(device.type) == manifest.autocast:
            return ""
        asked, dtype = "autocast", torch.get_autocast_dtype(device.type)
    else:
        # It leaves a parallel model without autocast, as it is prepared already; so does the Trainer, which has it.
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        name = str(getattr(state, "_shared_state", {}).get("_mixed_precision"))
        found = MIXED.get(name)
        if found in (None, manifest.autocast) or found in {p.dtype for p in manifest.parameters.values()}:
            return ""
        asked, dtype = f"Accelerate's mixed_precision={name!r} (the Trainer's {name}=True)", found
    return (
        f"{asked} has no effect inside a compiled program, which keeps the precision it was captured with: call "
        f"autoptd.compile under torch.autocast({device.type!r}, {dtype}), or convert the model first"
    )
