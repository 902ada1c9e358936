"""The last step in a few numbers, for a logger."""

import resource
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from autoptd.runtime.comm.timings import Measured
from autoptd.runtime.program.manifest import Manifest, count_tokens
from autoptd.runtime.program.schedule import Kind


@dataclass(frozen=True)
class LastStep:
    """The last call of the parallel model, as THIS rank saw it; `loss` and `gradient_norm` are the whole model's.

    `gradient_norm` is None unless the gradients of this call were clipped: by the parallel model, or by torch's own
    function where ranks have shares of them, as tensor and pipeline ranks do. `step_seconds` is the call alone, without
    the optimizer and the data; `tokens_per_second` is of all replicas (None where no input is one of tokens).
    `bubble` is the time up to this rank's last forward or backward in which it ran none of them, over the time in which
    it did, as `Simulation.bubble_fraction` is; messages of tensor ranks are part of a forward or backward.
    `exposed_communication_seconds` is time that nothing hides: the tensor ranks' messages in these, less computation
    beside them, and the rest of the call (sums of gradients, sends, the loss's broadcast).
    `peak_memory_bytes` is the most since the process began: of tensors on a GPU, of everything on a CPU.
    """

    loss: float
    gradient_norm: float | None
    step_seconds: float
    tokens_per_second: float | None
    bubble: float
    exposed_communication_seconds: float
    peak_memory_bytes: int

    def as_dict(self) -> dict[str, float]:
        """Return the known numbers by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_last_step(manifest: Manifest, measured: Measured, loss: Tensor, norm: Tensor | None) -> LastStep:
    """Read the last whole step from `measured`; wait for the device. No collective."""

    def seconds(*kinds: Kind | str) -> float:
        return float(sum(stop - start for kind, _, _, start, stop in spans if kind in kinds))

    begin, end, spans = measured.read()
    work = seconds(Kind.FORWARD, Kind.BACKWARD)
    computed_last = max(stop for kind, *_, stop in spans if isinstance(kind, Kind))
    sequences = manifest.microbatch_size * manifest.num_microbatches * manifest.mesh.data
    return LastStep(
        loss=loss.item(),
        gradient_norm=None if norm is None else norm.item(),
        step_seconds=end - begin,
        tokens_per_second=count_tokens(manifest.inputs) * sequences / (end - begin) or None,
        bubble=(computed_last - begin - work) / work,
        exposed_communication_seconds=end - computed_last + seconds("tensor") - seconds("products"),
        peak_memory_bytes=peak_memory(measured.device),
    )


def peak_memory(device: torch.device) -> int:
    """Return the peak so far in bytes: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
