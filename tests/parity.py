"""The comparison that all parity tests use: a compiled program on real ranks against the plain model.

`train_plain` is the plain model in the plain loop; `train_compiled` runs the program in one gloo process per
rank, joins what the ranks hold, and insists that copies of one tensor are the same bits; `compare` judges.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.compiled import CompiledProgram
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import Parameter
from tests.ranks import run_ranks

Batch = Mapping[str, Tensor]
Gradients = dict[str, Tensor]

LOSS_TOLERANCE = 1e-14
GRADIENT_TOLERANCE = 1e-12
# A gradient this much smaller than the model's largest is zero but for rounding (softmax takes no notice of
# a key bias); its own size is noise, so it is held against the largest.
ZERO = 1e-12


class ParityError(AssertionError):
    """The compiled program did not do what the plain model does."""


@dataclass
class Step:
    """What one training step gave: the loss, the gradients by name, and their norm if they were clipped."""

    loss: Tensor
    gradients: Gradients
    norm: Tensor | None = None


@dataclass
class Run:
    """All steps, the whole model's state after them, and what `probe` saw on every rank."""

    steps: list[Step]
    state: dict[str, Tensor]
    probes: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Training:
    """How both are trained: SGD by `lr` after each batch (0: the weights stay), clipped to `max_norm`."""

    lr: float = 0.0
    max_norm: float | None = None


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returns."""
    if isinstance(output, tuple):
        (output,) = (x for x in output if isinstance(x, Tensor) and x.dim() == 0)
    loss: Tensor = output if isinstance(output, Tensor) else output["loss"]
    return loss


def train_plain(
    model: nn.Module, batches: Sequence[Batch], microbatches: int, training: Training = Training(), batch_dim: int = 0
) -> Run:
    """Train a copy of `model`; each batch's loss is the mean over its `microbatches` (of all replicas)."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=training.lr)
    steps = []
    for batch in batches:
        losses = []
        for microbatch in split_batch(batch, microbatches, batch_dim):
            loss = loss_of(model(**microbatch)) / microbatches
            loss.backward()
            losses.append(loss.detach())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = None
        if training.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
        steps.append(Step(torch.stack(losses).sum(), gradients, norm))
        optimizer.step()
        optimizer.zero_grad()
    return Run(steps, {n: x.clone() for n, x in model.state_dict().items()})


def split_batch(batch: Batch, count: int, dim: int = 0) -> list[dict[str, Tensor]]:
    """`count` equal parts of a batch, in order."""
    return [{n: x.chunk(count, dim)[i].contiguous() for n, x in batch.items()} for i in range(count)]


def train_compiled(
    program: CompiledProgram,
    batches: Sequence[Batch],
    training: Training = Training(),
    *,
    prepare: Callable[[], None] | None = None,
    probe: Callable[[Any], Any] | None = None,
    timeout: float = 60,
) -> Run:
    """Train `program` on its whole mesh, a forked process per rank; `batches` are those of all replicas.

    `prepare` runs in every rank before it binds (a seeded fault, say); ``probe(parallel)`` after the last
    step.
    """
    mesh, dims = program.mesh, {i.name: i.batch_dim or 0 for i in program.manifest.inputs}
    (batch_dim,) = set(dims.values())

    def work(rank: int) -> tuple[list[Step], dict[str, Tensor], Any]:
        if prepare is not None:
            prepare()
        parallel = program.bind()
        # A rank may have no parameters at all, and then torch makes no optimizer.
        trained = list(parallel.parameters())
        optimizer = torch.optim.SGD(trained, lr=training.lr) if trained else None
        steps = []
        for batch in batches:
            own = split_batch(batch, mesh.data, batch_dim)[mesh.coordinates(rank).data]
            loss = loss_of(parallel(**own))
            loss.backward()
            gradients = {n: p.grad.clone() for n, p in parallel.named_parameters() if p.grad is not None}
            norm = None
            if training.max_norm is not None:
                norm = parallel.clip_grad_norm_(training.max_norm)
            steps.append(Step(loss.detach(), gradients, norm))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        state = parallel.full_state_dict()
        return steps, state, None if probe is None else probe(parallel)

    results = run_ranks(work, mesh.size, timeout=timeout)
    steps = [join_step(program.manifest, own) for own in zip(*(steps for steps, _, _ in results), strict=True)]
    return Run(steps, results[0][1], [seen for _, _, seen in results])


def join_step(manifest: Manifest, ranks: Sequence[Step]) -> Step:
    """One step from what each rank has of it; ParityError where two ranks disagree on what they share."""
    first = ranks[0]
    for rank, step in enumerate(ranks):
        if not torch.equal(step.loss, first.loss):
            raise ParityError(f"rank {rank} has loss {step.loss.item()!r}, rank 0 {first.loss.item()!r}")
        if (step.norm is None) != (first.norm is None) or (
            step.norm is not None and first.norm is not None and not torch.equal(step.norm, first.norm)
        ):
            raise ParityError(f"rank {rank} has gradient norm {step.norm}, rank 0 {first.norm}")
    gradients = {}
    for name, parameter in manifest.parameters.items():
        if parameter.kind != "parameter":
            continue
        whole = _join_gradient(manifest, parameter, ranks)
        if whole is not None:
            gradients[name] = whole
    return Step(first.loss, gradients, first.norm)


def _join_gradient(manifest: Manifest, parameter: Parameter, ranks: Sequence[Step]) -> Tensor | None:
    """The whole gradient of one parameter; None where no rank has one."""
    mesh, name, placement = manifest.mesh, parameter.name, parameter.placement
    on_axis = placement[placement.axis]
    copies: list[Tensor] = []
    for pipeline in manifest.owners(name):
        for members in dict.fromkeys(
            mesh.group(placement.axis, mesh.rank_of(d, pipeline, 0)) for d in range(mesh.data)
        ):
            shards = [ranks[rank].gradients.get(name) for rank in members]
            held = [shard for shard in shards if shard is not None]
            if not held:
                continue
            if len(held) < len(shards):
                raise ParityError(f"{name} has a gradient on some of the ranks {members} only")
            shared = [on_axis.split(shard, len(members), divided=False) for shard in held]
            for rank, rows in zip(members, shared, strict=True):
                if not all(map(torch.equal, rows, shared[0])):
                    raise ParityError(f"the undivided gradient of {name} differs on rank {rank} of {members}")
            _check_padding(parameter, held)
            copies.append(on_axis.join(held))
    for other in copies[1:]:
        if not torch.equal(other, copies[0]):
            raise ParityError(f"the gradient of {name} differs between its replicas or owners")
    return copies[0] if copies else None


def _check_padding(parameter: Parameter, shards: Sequence[Tensor]) -> None:
    """Rows that exist in memory only get no gradient: they would count in the norm."""
    padding, dim = parameter.placement["tensor"].padding, parameter.placement["tensor"].dim
    if padding and dim is not None:
        rows = torch.cat(list(shards), dim)
        if rows.narrow(dim, rows.shape[dim] - padding, padding).count_nonzero():
            raise ParityError(f"the padding of {parameter.name} has a gradient")


def gradient_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Each gradient's largest error, relative to its largest element (but see ZERO)."""
    if set(found) != set(expected):
        raise ParityError(
            f"gradients of {sorted(set(found) - set(expected))} are too many, "
            f"of {sorted(set(expected) - set(found))} are missing"
        )
    largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
    errors = {}
    for name, reference in expected.items():
        gradient = found[name]
        if gradient.shape != reference.shape or gradient.dtype != reference.dtype:
            raise ParityError(
                f"the gradient of {name} is {gradient.dtype}{list(gradient.shape)}, "
                f"expected {reference.dtype}{list(reference.shape)}"
            )
        scale = float(reference.abs().max())
        scale = scale if scale > ZERO * largest else largest or 1.0
        error = float((gradient - reference).abs().max()) / scale
        errors[name] = error if error == error else float("inf")
    return errors


def compare(
    found: Step, expected: Step, loss_tolerance: float = LOSS_TOLERANCE, gradient_tolerance: float = GRADIENT_TOLERANCE
) -> None:
    """Raise ParityError, naming the worst parameter, unless loss, norm and every gradient agree."""
    error = abs(float(found.loss) - float(expected.loss)) / abs(float(expected.loss))
    if not error <= loss_tolerance:
        raise ParityError(
            f"loss {float(found.loss)!r}, the plain model's is {float(expected.loss)!r}: error {error:.1e}"
        )
    errors = gradient_errors(found.gradients, expected.gradients)
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= gradient_tolerance:
        above = sum(error > gradient_tolerance for error in errors.values())
        raise ParityError(f"{above} of {len(errors)} gradients are off, {worst} by {errors[worst]:.1e}")
    if expected.norm is not None:
        assert found.norm is not None
        error = abs(float(found.norm) - float(expected.norm)) / float(expected.norm)
        if not error <= gradient_tolerance:
            raise ParityError(f"gradient norm {float(found.norm)!r}, the plain model's is {float(expected.norm)!r}")


def compare_states(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Raise ParityError unless both states have the same names and, nearly, the same values."""
    if set(found) != set(expected):
        raise ParityError(f"the states differ in {sorted(set(found) ^ set(expected))}")
    for name, tensor in expected.items():
        if found[name].dtype is not tensor.dtype or found[name].shape != tensor.shape:
            raise ParityError(f"{name} is {found[name].dtype}{list(found[name].shape)} after training")
        reference = tensor.double()
        scale = float(reference.abs().max()) or 1.0
        error = float((found[name].double() - reference).abs().max()) / scale
        if not error <= tolerance:
            raise ParityError(f"{name} is off by {error:.1e} after training")
