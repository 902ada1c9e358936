"""The signature of a parallel model's forward: that of the model that was compiled."""

from __future__ import annotations

from typing import Any

from autoptd.runtime.engine.batch import call_signature
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.manifest import Manifest


def signed(manifest: Manifest) -> type[Parallel]:
    """Give `Parallel` the signature of the model's own forward, which the Trainer reads for columns and labels."""

    @leave_uncompiled
    def forward(self: Parallel, *args: Any, **kwargs: Any) -> Any:
        return Parallel.forward(self, *args, **kwargs)

    forward.__doc__ = Parallel.forward.__doc__
    forward.__signature__ = call_signature(manifest)  # type: ignore[attr-defined]
    return type("Parallel", (Parallel,), {"forward": forward, "__module__": Parallel.__module__})
