"""The memory of a pipeline rank in the course of a simulated step."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoptd.passes.cost.cluster import ITEM_BYTES
from autoptd.passes.cost.durations import Precision
from autoptd.passes.cost.schedule_times import live_microbatches
from autoptd.passes.ir.program import Stage, find_reached, find_trained, split_results
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.program.schedule import Action, Kind, Schedule, last_gradients
from autoptd.simulate.stage_times import StageTimes


@dataclass(frozen=True)
class Owned:
    """Elements of the tensors of one rank: all, the trained ones, and those whose gradients are partial sums.

    `stepped` are the trained ones, those of experts once for each data rank that has others: d shards of equal size
    would have as many. Integers and buffers take `fixed` bytes in any precision. `tied` counts the trained elements
    that other pipeline ranks own too, by those ranks; `after` the others, by the stage whose last backward completes
    their gradients: those of experts as far as they are summed over data ranks.
    """

    elements: int
    fixed: int
    trained: int
    stepped: int
    partial: int
    tied: Mapping[tuple[int, ...], int]
    after: Mapping[int, int]


def freeze_idle(manifest: Manifest, stages: Sequence[Stage]) -> Manifest:
    """Mark as frozen the parameters that no gradient of the loss reaches, which need no states."""
    reached: set[str] = set()
    for stage, interface in zip(stages, manifest.stages, strict=True):
        results, _ = split_results(stage.graph)
        if interface.sends:
            crossing = zip(results, interface.sends, strict=True)
            results = [node for node, boundary in crossing if boundary.requires_grad]
        reached |= {str(n.target) for n in find_reached(results, find_trained(stage)) if n.op == "get_attr"}
    return replace(manifest, parameters=freeze_others(manifest.parameters, reached))


def freeze_others(parameters: Mapping[str, Parameter], reached: Container[str]) -> Mapping[str, Parameter]:
    """Return the parameters, with all but `reached` frozen."""
    return {n: replace(p, requires_grad=p.requires_grad and n in reached) for n, p in parameters.items()}


def count_owned(manifest: Manifest, rank: int) -> Owned:
    """Count the elements that a pipeline rank owns; a parameter of several of its stages counts once."""
    own = manifest.stages[rank :: manifest.mesh.pipeline]
    # Of a rank's stages the first is the last to run backwards.
    first = {name: stage.index for stage in reversed(own) for name in stage.parameters}
    elements = fixed = trained = stepped = partial = 0
    mesh = manifest.mesh
    tied: dict[tuple[int, ...], int] = {}
    after: dict[int, int] = {}
    for name in sorted(first):
        parameter = manifest.parameters[name]
        size = prod(parameter.local_shape(manifest.mesh.sizes))
        if parameter.kind == "parameter" and parameter.dtype.is_floating_point:
            elements += size
        else:
            fixed += size * parameter.dtype.itemsize
        if parameter.is_trained:
            trained += size
            replicas = mesh.sizes[parameter.placement.replicas]
            stepped += size * mesh.data // replicas
            partial += size * parameter.placement.has_partial_gradient
            if replicas < mesh.data:  # a ring of fewer ranks sends less
                size = round(size * (1 - 1 / replicas) / (1 - 1 / mesh.data))
            owners = manifest.owners(name)
            if len(owners) > 1:
                tied[owners] = tied.get(owners, 0) + size
            else:
                after[first[name]] = after.get(first[name], 0) + size
    return Owned(elements, fixed, trained, stepped, partial, tied, after)


def count_outputs(manifest: Manifest, rank: int) -> dict[str, int]:
    """Return the bytes of what a call returns besides the loss that a pipeline rank makes, if any, as "outputs"."""
    p, axes = manifest.mesh.pipeline, manifest.mesh.sizes
    made = [result for stage in manifest.stages[rank::p] for result in stage.outputs]
    sizes = (prod(r.placement.local_shape(r.shape, axes)) * r.dtype.itemsize for r in made)
    return {"outputs": manifest.num_microbatches * total} if (total := sum(sizes)) else {}


@dataclass(frozen=True)
class States:
    """Bytes of gradients and of Adam's states in a `precision`.

    `shards` replicas divide the optimizer's states (ZeRO-1); 0: none. Gradients are at least float32 if `wide`.
    """

    precision: Precision
    shards: int = 0
    wide: bool = True

    @property
    def _item(self) -> float:
        return ITEM_BYTES[self.precision.dtype]

    @property
    def _moment(self) -> float:
        return max(ITEM_BYTES["fp32"], self._item)

    @property
    def gradient(self) -> float:
        """The bytes of one element's gradient."""
        return self._moment if self.wide else self._item

    def held(self, owned: Owned) -> dict[str, float]:
        """Return the bytes held throughout a step.

        Adam has two moments, and a copy of narrower weights and of those that are divided, even among one replica.
        """
        numbers = 3 if self.shards or self._item < self._moment else 2
        return {
            "parameters": owned.elements * self._item + owned.fixed,
            "gradients": owned.trained * self.gradient,
            "optimizer": self._stepped(owned) * numbers * self._moment,
        }

    def _stepped(self, owned: Owned) -> float:
        """Return the elements that a rank steps."""
        return owned.stepped / self.shards if self.shards else owned.trained

    def scattered(self, elements: float, copied: bool) -> float:
        """Return the bytes of the sums of `elements` that are scattered; gloo sums what it has `copied`.

        One replica has no sums besides its gradients.
        """
        return elements * self.gradient * (1 / self.shards + copied) if self.shards > 1 else 0.0

    def copied(self, owned: Owned) -> float:
        """Return the bytes of the float32 copies of narrow gradients while the optimizer steps."""
        return self._stepped(owned) * (self._moment if self.gradient < self._moment else 0)

    def moved(self, owned: Owned) -> float:
        """Return the bytes that clipping by the global norm and an Adam step read and write.

        The norm reads the gradients; Adam reads gradient, moments and weights and writes all but the gradient. Narrow
        gradients are converted to float32 first, and new weights to half precision at the end.
        """
        each = self.gradient + 7 * self._moment
        each += sum(narrow + self._moment for narrow in (self.gradient, self._item) if narrow < self._moment)
        return self._stepped(owned) * each


def add_up_slots(schedule: Schedule, sizes: Sequence[float]) -> list[float]:
    """Return the bytes of each rank's slots, from those of a slot of each stage."""
    (counts,) = live_microbatches(schedule, len(sizes), lasting=True)
    held, p = [count * size for count, size in zip(counts, sizes, strict=True)], len(schedule)
    return [sum(held[rank::p]) for rank in range(p)]


def trace_memory(
    actions: Sequence[Action], times: Sequence[StageTimes], scattered: Mapping[int, float]
) -> Iterator[tuple[int, float, float]]:
    """Yield (moment, activation bytes, buffer bytes) at every change of a rank's schedule.

    Moment 2i + 1 is the begin of its i-th forward or backward, and 2i + 2 its end. A posted receive holds its buffers
    until it is used, a forward what the stage keeps for its backward, and a backward what it computes again. After a
    stage's last one its gradients are `scattered`, into so many bytes.
    """
    ends = last_gradients(actions)
    activations = buffers = 0.0
    moment = 0
    for position, (stage, kind, _) in enumerate(actions):
        own = times[stage]
        if kind.receives:
            buffers += own.arriving[kind.compute]
            yield moment, activations, buffers
        elif kind.computes:
            if kind is Kind.FORWARD:
                activations += own.kept
                yield moment + 1, activations, buffers
            else:
                yield moment + 1, activations + own.working, buffers
                activations -= own.kept
            buffers -= own.arriving[kind]
            moment += 2
            if ends.get(stage) == position:
                buffers += scattered.get(stage, 0.0)
            yield moment, activations, buffers
