"""Write the comments of a program: shapes, bytes, communication, module headings."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.cost.work import forward_work
from autoptd.passes.ir.nodes import argument, info, results_of
from autoptd.passes.ir.program import Stage
from autoptd.runtime import collectives
from autoptd.runtime.collectives import COPIED
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import REPLICATED, Placement, Ragged

# A module with fewer calls of its own than this, and no module inside, goes under its parent's heading.
_OWN_HEADING = 8


def write_shape(dtype: torch.dtype, shape: Sequence[int], on: Placement = REPLICATED, mesh: Mesh | None = None) -> str:
    """Write ``bf16[256, 1, 3072/4]``: a rank's share, its divided dimension as the whole over the ranks of `mesh`.

    Rows that are divided by experts are ``<=512``, as many as a rank has room for, and behind an all-to-all ``*``.
    """
    sizes, axis, dim = [str(size) for size in shape], on.axis, on[on.axis].dim
    ranks = 1 if mesh is None else mesh.sizes[axis]
    if dim is not None and ranks > 1 and sizes:
        ragged = "*" if axis == "expert" else f"<={shape[dim]}"
        sizes[dim] = ragged if isinstance(on[axis], Ragged) else f"{shape[dim] * ranks}/{ranks}"
    name = str(dtype).removeprefix("torch.").replace("float", "f").replace("uint", "u").replace("int", "i")
    return f"{name}[{', '.join(sizes)}]"


def write_bytes(count: int) -> str:
    """Write ``524 kB``: three digits, decimal units."""
    value = float(count)
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}B"


def write_value_shape(node: fx.Node, mesh: Mesh) -> str:
    """Write the shape of a node's value, or of each part; empty if it is unknown."""
    values, placements = results_of(node), info(node).placements
    pairs = zip(values, placements * (len(values) // len(placements)), strict=True)
    parts = [write_shape(x.dtype, x.shape, on, mesh) if isinstance(x, Tensor) else "" for x, on in pairs]
    return f"{len(parts)} x {parts[0]}" if len(parts) > 1 and len(set(parts)) == 1 else ", ".join(parts)


def write_communication(node: fx.Node, tensor: int) -> str:
    """Write what the call sends to other ranks of its stage, forward or backward; empty if nothing (torch's own)."""
    value: Any = node.meta.get("val")
    if node.target in (collectives.send_to_experts, collectives.return_from_experts):
        return f"all-to-all, {write_bytes(forward_work(node).dispatched)} over experts"
    own = isinstance(value, Tensor) or node.target is collectives.copied_linears
    if tensor == 1 or not own or isinstance(node.target, torch._ops.OpOverload):
        return ""
    if node.target is collectives.copy_to_tensor:  # f: identity forward
        return f"backward: all-reduce, {write_bytes(value.nbytes)} over tensor"
    work = forward_work(node)
    kind = "all-reduce" if work.reduced else "all-gather"
    kind = "reduce-scatter" if node.target in collectives.SCATTERED else kind
    return f"{kind}, {write_bytes(work.exchanged)} over tensor" if work.exchanged else ""


def write_hidden(node: fx.Node, tensor: int) -> str:
    """Write what the call's backward sends to the other tensor ranks while it computes; empty if nothing."""
    if tensor == 1 or node.target not in COPIED:
        return ""
    size, gathered = node.args[1].meta["val"].nbytes, argument(node, "gathered")  # type: ignore[union-attr]
    kind = "all-gather and reduce-scatter, each" if gathered else "all-reduce,"
    whose = "the weights' gradients" if node.target is collectives.copied_linears else "the weight's gradient"
    return f"backward: {kind} {write_bytes(size * tensor if gathered else size)} over tensor, beside {whose}"


def find_headings(stages: Iterable[Stage]) -> dict[str, str]:
    """Return the path of the module whose heading covers each module path: itself, or its parent if a small leaf."""
    nodes = (node for stage in stages for node in stage.graph.nodes)
    calls = Counter(info(node).path for node in nodes if node.op == "call_function")
    outer = {path[:i] for path in calls for i, letter in enumerate(path) if letter == "."}
    headed = {path for path, count in calls.items() if path in outer or count >= _OWN_HEADING}
    return {path: path if path in headed else _caller(path, calls) for path in calls}


def name_modules(path: str, nodes: Sequence[fx.Node]) -> str:
    """Return the words of the heading over a run of `nodes` under `path`."""
    if path:
        return path
    leaves = dict.fromkeys(info(node).path.rpartition(".")[2] for node in nodes)
    value = nodes[-1].meta.get("val")
    whole = "loss" if isinstance(value, Tensor) and value.dim() == 0 else "model"
    return ", ".join(leaf for leaf in leaves if leaf) or whole


def _caller(path: str, calls: Mapping[str, int]) -> str:
    """Return the module around a leaf; if that is a container (a ModuleDict), the model."""
    parent = path.rpartition(".")[0]
    return parent if parent in calls or any(part.isdigit() for part in parent.split(".")) else ""
