"""The norm of the whole model's gradient, and clipping by it."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.guards.torch_clipping import refuse_nonfinite
from autoptd.runtime.module.step_runner import StepRunner
from autoptd.runtime.module.trained_weights import TrainedWeights
from autoptd.runtime.optimizer.clipping import check_norm_type, global_norm, scale_gradients
from autoptd.runtime.program.manifest import Manifest


class GradientNorm:
    """The norm of the gradient that the last call left, over all ranks, as torch's clipping asks for it too."""

    def __init__(
        self, manifest: Manifest, connection: Connection, weights: TrainedWeights, runner: StepRunner
    ) -> None:
        self._manifest = manifest
        self._connection = connection
        self._weights = weights
        self._runner = runner

    @property
    def is_everywhere(self) -> bool:
        """Whether the last training call gave every rank gradients."""
        return self._runner.gradients_everywhere

    def leaves(self) -> Mapping[str | int, nn.Parameter]:
        """As `TrainedWeights.leaves`."""
        return self._weights.leaves()

    def sharded(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        """As `TrainedWeights.sharded`."""
        return self._weights.sharded()

    @leave_uncompiled
    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the gradients to `max_norm`; return their norm before. As `Parallel.clip_grad_norm_`."""
        norm = self.measure(norm_type)
        if error_if_nonfinite:
            refuse_nonfinite(norm, norm_type)
        gradients = (leaf.grad for leaf in self.leaves().values())
        scale_gradients((gradient for gradient in gradients if gradient is not None), norm, max_norm)
        dtypes = {p.dtype for p in self._manifest.parameters.values() if p.kind == "parameter"}
        return norm.to(torch.float64 if torch.float64 in dtypes else torch.float32)

    @leave_uncompiled
    def measure(self, norm_type: float, of: Container[str | int] | None = None) -> Tensor:
        """Return the norm of the whole gradient, or of that of the leaves `of`, in float64: a collective of all ranks.

        Raises ValueError for a `norm_type` that is not positive.
        """
        check_norm_type(norm_type)
        gradients = {
            name: p.grad
            for name, p in self.leaves().items()
            if isinstance(name, str) and p.grad is not None and (of is None or name in of)
        }
        position, shards = self._connection.position, self._weights.shards
        with position.collective_call("clip_grad_norm_"), position.during("norm of the gradient"):
            norm = global_norm(self._manifest, self._connection.rank, gradients, shards, norm_type)
        self._runner.norm = norm
        return norm
