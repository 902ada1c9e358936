"""The norm of the whole model's gradient, and clipping by it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.guards.torch_clipping import ModelGradients, refuse_nonfinite
from autoptd.runtime.module.step_runner import StepRunner
from autoptd.runtime.module.trained_weights import TrainedWeights
from autoptd.runtime.optimizer.clipping import check_norm_type, global_norm, scale_gradients
from autoptd.runtime.program.manifest import Manifest


@dataclass(frozen=True, eq=False)
class GradientNorm:
    """The norm of the gradient that the last call left, over all ranks."""

    manifest: Manifest
    connection: Connection
    weights: TrainedWeights
    runner: StepRunner

    def for_torch(self) -> ModelGradients:
        """Return the gradients as torch's clipping is to see them."""
        return ModelGradients(
            self.weights.leaves,
            self.weights.sharded,
            self.measure,
            lambda: self.runner.gradients_everywhere,
        )

    @leave_uncompiled
    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the gradients to `max_norm`; return their norm before. As `Parallel.clip_grad_norm_`."""
        norm = self.measure(norm_type)
        if error_if_nonfinite:
            refuse_nonfinite(norm, norm_type)
        gradients = (leaf.grad for leaf in self.weights.leaves().values())
        scale_gradients((gradient for gradient in gradients if gradient is not None), norm, max_norm)
        dtypes = {p.dtype for p in self.manifest.parameters.values() if p.kind == "parameter"}
        return norm.to(torch.float64 if torch.float64 in dtypes else torch.float32)

    @leave_uncompiled
    def measure(self, norm_type: float, of: Container[str | int] | None = None) -> Tensor:
        """Return the norm of the whole gradient, or of that of the leaves `of`, in float64: a collective of all ranks.

        Raises ValueError for a `norm_type` that is not positive.
        """
        check_norm_type(norm_type)
        gradients = {
            name: p.grad
            for name, p in self.weights.leaves().items()
            if isinstance(name, str) and p.grad is not None and (of is None or name in of)
        }
        position, shards = self.connection.position, self.weights.shards
        with position.collective_call("clip_grad_norm_"), position.during("norm of the gradient"):
            norm = global_norm(self.manifest, self.connection.rank, gradients, shards, norm_type)
        self.runner.norm = norm
        return norm
