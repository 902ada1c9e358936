"""All that one rank executes: the mesh, the collectives, the kernels, the schedule and the loop over it."""

import torch

if not __name__.startswith("autoptd."):
    raise ImportError("this folder is imported as autoptd.runtime")

aten = torch.ops.aten
