"""An exact ledger of the tensors that autograd saves for the backward of a stage, without running it.

The stage is run on meta tensors with autograd, and each tensor that an operator saves is written down under the
operator. A storage counts once; parameters and batch inputs, which are held anyway, do not count. The ledger does not
see that on a GPU the gradient of a weight in half precision is added to its sum by what makes it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, fx

from autoptd.passes.ir.nodes import info, wants_gradient
from autoptd.passes.ir.program import Stage, recomputed_groups, values_taken
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import aten
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.operands import widen
from autoptd.runtime.program.mesh import Mesh

META = torch.device("meta")


class Ledger:
    """The storages that each call of `stage` saves, on one rank of `mesh`, for one microbatch.

    `nodes` are the calls; `first_saved` has the call that saves a storage first, and the tensor that it saves.
    """

    def __init__(self, stage: Stage, mesh: Mesh) -> None:
        self.groups = recomputed_groups(stage.graph)
        self._rank = Rank.local(mesh, device=META)
        self._values: dict[fx.Node, Any] = {}
        self._saved: dict[fx.Node, list[UntypedStorage]] = {}  # of every call, in order
        self.nodes: Collection[fx.Node] = self._saved.keys()
        self._held: set[UntypedStorage] = set()
        self.first_saved: dict[UntypedStorage, tuple[fx.Node, Tensor]] = {}
        with torch.enable_grad():
            for node in stage.graph.nodes:
                if node.op == "call_function":
                    self._values[node] = self._run(node)
                elif node.op != "output":
                    self._values[node] = self._give(node, stage)

    def _give(self, node: fx.Node, stage: Stage) -> Any:
        """Make an input of the stage, with a storage of its own."""
        if info(node).role == "rank":
            return self._rank
        value, boundary = node.meta["val"], info(node).role == "boundary"
        received = boundary and self._rank.mesh.pipeline > 1  # packed
        strides = torch.empty(value.shape, device=META).stride() if received else value.stride()
        given = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=META)
        if node.op == "get_attr":
            given.requires_grad_(stage.parameters[str(node.target)].requires_grad)
        elif boundary:
            given.requires_grad_(wants_gradient(node))
            return given
        self._held.add(given.untyped_storage())
        return given

    def _run(self, node: fx.Node) -> Any:
        saved = self._saved[node] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.untyped_storage())
            self.first_saved.setdefault(saved[-1], (node, tensor))
            return tensor

        args: Any = fx.map_arg(node.args, self._values.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, self._values.__getitem__)
        if has_trait(node, Trait.FUSED_ATTENTION):
            return _attend(pack, *args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def saved(self, nodes: Iterable[fx.Node]) -> set[UntypedStorage]:
        """Return the storages that `nodes` save, without parameters and batch inputs."""
        return {s for node in nodes for s in self._saved[node]} - self._held

    def storages(self, nodes: Iterable[fx.Node]) -> set[UntypedStorage]:
        """Return the storages of the values of `nodes`, without parameters and batch inputs."""
        return {t.untyped_storage() for node in nodes for t in self.tensors(node)} - self._held

    def tensors(self, node: fx.Node) -> list[Tensor]:
        """Return the tensors of the value of `node`, on the meta device."""
        value = self._values[node]
        return [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, Tensor)]

    def kept(self, groups: Collection[Sequence[fx.Node]]) -> set[UntypedStorage]:
        """Return the storages that the stage keeps for its backward if `groups` are recomputed."""
        inside = {node for group in groups for node in group}
        taken = {source for group in groups for source in values_taken(group)}
        return self.saved(node for node in self.nodes if node not in inside) | self.storages(taken)

    def first_kept(self) -> Iterator[tuple[fx.Node, set[UntypedStorage]]]:
        """Yield each call of the stage and the storages that it is the first to keep for the backward.

        Of a recomputed group the first call keeps all that the group takes, the others nothing.
        """
        taken = {group[0]: values_taken(group) for group in self.groups}
        inside = {node for group in self.groups for node in group}
        seen: set[UntypedStorage] = set()
        for node in self.nodes:
            found = self.storages(taken.get(node, ())) if node in inside else self.saved([node])
            yield node, found - seen
            seen |= found

    def differentiated(self, node: fx.Node, trained: Collection[fx.Node]) -> int:
        """Return the bytes of the gradients that exist at once while `node` is differentiated, with those of weights.

        `trained` values have gradients, a view's where its source's lies; torch's cross entropy is two halves.
        """
        if node not in trained:
            return 0
        sources = [source for source in node.all_input_nodes if source in trained]
        weights: int = sum(source.meta["val"].nbytes for source in sources if source.op == "get_attr")
        halves = sources if node.target is aten.cross_entropy_loss.default else []
        return weights + count_bytes(self.storages([node, *sources])) + count_bytes(self.storages(halves))

    def repeated(self, group: Sequence[fx.Node]) -> Sequence[fx.Node]:
        """Return the nodes of a recomputed `group` that run again: up to the last one that saves a tensor."""
        last = max((i for i, node in enumerate(group) if self._saved[node]), default=-1)
        return group[: last + 1]

    @property
    def repeated_nodes(self) -> set[fx.Node]:
        """Return the calls of the stage that its backward runs again."""
        return {node for group in self.groups for node in self.repeated(group)}


def count_bytes(storages: Iterable[UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


def find_repeated(stage: Stage, mesh: Mesh) -> set[fx.Node]:
    """Return the calls of a stage that its backward runs again."""
    return Ledger(stage, mesh).repeated_nodes if recomputed_groups(stage.graph) else set()


def _attend(pack: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *_: Any, **__: Any) -> Tensor:
    """Run a fused attention, saving what a device would: its arguments, its result and a number per query and head.

    On meta tensors torch's own would run, and save, the products written out. The result lies in memory in the order of
    the queries; a bool mask is saved as the numbers that it adds to the scores.
    """
    shape, masks = (*q.shape[:-1], v.shape[-1]), [mask] * isinstance(mask, Tensor)  # or it says whether it is causal
    result = torch.empty_like(q) if q.shape == shape else q.new_empty(shape)
    result.requires_grad_(any(x.requires_grad for x in (q, k, v, *masks)))
    sums = q.new_empty(q.shape[:-1], dtype=widen(q.dtype))
    for tensor in (q, k, v, result, sums, *(x.detach().to(q.dtype) for x in masks)) if result.requires_grad else ():
        pack(tensor)
    return result
