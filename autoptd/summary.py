"""What ``print(program)`` shows: what was decided, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import fx

from autoptd.passes.cost import COLLECTIVES, node_flops
from autoptd.passes.ledger import Ledger, count_bytes, find_repeated
from autoptd.passes.program import Stage, recomputed_groups
from autoptd.runtime import collectives, kernels
from autoptd.runtime.manifest import Boundary, Manifest, StageInterface
from autoptd.runtime.transfer import is_scattered

SHOWN_STAGES = 16  # of a longer table, equal neighbours are left out
PATH_WIDTH = 22
WIDTH = 110

Row = tuple[str, ...]


def summarize(manifest: Manifest, stages: Sequence[Stage], log: Sequence[str], title: str) -> str:
    """Mesh, schedule, stages, communication, tied parameters and what the passes said, as plain text.

    Bytes and FLOPs are one rank's, of one microbatch; FLOPs of the forward alone.
    """
    mesh, m, v = manifest.mesh, manifest.num_microbatches, manifest.num_model_chunks
    sequences = manifest.microbatch_size * m * mesh.data
    lines = [
        title,
        f"{mesh}: {mesh.size} rank{'s' * (mesh.size > 1)}",
        f"schedule {manifest.schedule}: {m} microbatches of {manifest.microbatch_size} per replica and "
        f"step, {sequences} sequences in all; {v} model chunk{'s' * (v > 1)} per pipeline rank",
        f"ideal bubble (p-1)/{'(v*m)' if v > 1 else 'm'} = {mesh.pipeline - 1}/{v * m} = "
        f"{(mesh.pipeline - 1) / (v * m):.1%}",
        "",
        *_table(manifest, stages),
        "",
        *_communication(manifest, stages),
        *_tied(manifest),
        *_recomputation(manifest, stages),
    ]
    if log:
        lines += ["", "passes", *(f"  {entry}" for entry in log)]
    return "\n".join(line.rstrip() for long in lines for line in _wrap(long))


# Stages


def _table(manifest: Manifest, stages: Sequence[Stage]) -> Iterator[str]:
    head = ("stage", "rank", "modules", "", "parameters", "GFLOP", "sends", "unscattered")
    rows = [
        _row(manifest, stage, interface) for stage, interface in zip(stages, manifest.stages, strict=True)
    ]
    shown: list[Row] = [head]
    for index, row in enumerate(rows):
        edge = index == 0 or index == len(rows) - 1
        alike = not edge and row[4:] == rows[index - 1][4:] == rows[index + 1][4:]
        if len(rows) <= SHOWN_STAGES or not alike:
            shown.append(row)
        elif shown[-1] != ("...",) * len(head):
            shown.append(("...",) * len(head))
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    for row in shown:
        cells = [
            cell.ljust(width) if column in (2, 3) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells)


def _row(manifest: Manifest, stage: Stage, interface: StageInterface) -> Row:
    tensor = manifest.mesh.tensor
    parameters = sum(
        prod(p.placement.local_shape(p.shape, tensor))
        for name in interface.parameters
        if (p := manifest.parameters[name]).kind == "parameter"
    )
    paths = [str(n.meta["path"]) for n in stage.graph.nodes if n.op == "call_function" and n.meta.get("path")]
    sent = sum(_crossing(b, manifest) for b in interface.sends)
    crosses = bool(interface.sends) and manifest.mesh.pipeline > 1
    gflop = sum(map(node_flops, stage.graph.nodes)) / 1e9
    return (
        str(interface.index),
        str(interface.index % manifest.mesh.pipeline),
        _shorten(paths[0]) if paths else "",
        _shorten(paths[-1]) if paths else "",
        f"{parameters:,}",
        f"{gflop:,.0f}" if gflop >= 100 else f"{gflop:.3g}",
        format_bytes(sent) if crosses else "",
        format_bytes(sum(map(_bytes, interface.sends))) if crosses else "",
    )


def _shorten(path: str) -> str:
    return path if len(path) <= PATH_WIDTH else f"..{path[2 - PATH_WIDTH :]}"


def _bytes(boundary: Boundary) -> int:
    return prod(boundary.shape) * boundary.dtype.itemsize


def _crossing(boundary: Boundary, manifest: Manifest) -> int:
    """Bytes that one tensor rank sends of a boundary value."""
    tensor = manifest.mesh.tensor
    scattered = is_scattered(boundary, tensor, manifest.scatter_gather)
    return _bytes(boundary) // (tensor if scattered else 1)


def format_bytes(count: int) -> str:
    """ "1.50 MB": powers of ten, three digits."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


# Communication


def _communication(manifest: Manifest, stages: Sequence[Stage]) -> Iterator[str]:
    nodes = [node for stage in stages for node in stage.graph.nodes]
    if manifest.mesh.tensor > 1:
        forward = [node for node in nodes if node.target is collectives.reduce_from_tensor]
        repeated = {node for stage in stages for node in find_repeated(stage, manifest.mesh)}
        again = [node for node in forward if node in repeated]
        backward = [node for node in nodes if node.target is collectives.copy_to_tensor] + again
        loss = any(node.target is kernels.cross_entropy for node in nodes)
        yield (
            f"tensor all-reduces per microbatch: forward {_count(forward)}, backward {_count(backward)}"
            + f", of which recomputation repeats {_count(again)}" * bool(again)
            + "; the loss reduces three numbers a token" * loss
        )
    partial = [n for n, p in manifest.parameters.items() if p.partial_gradient and manifest.owners(n)]
    if partial and manifest.mesh.tensor > 1:
        yield f"summed over the tensor ranks once a step: the gradients of {_list(partial)}"
    if manifest.mesh.data > 1:
        yield f"gradients are summed over {manifest.mesh.data} replicas once a step, then divided"


def _count(nodes: Sequence[fx.Node]) -> str:
    found = [COLLECTIVES[node.target](node) for node in nodes]
    return f"{len(found)} ({format_bytes(sum(found))})"


def _tied(manifest: Manifest) -> Iterator[str]:
    for name, parameter in manifest.parameters.items():
        owners = manifest.owners(name)
        if parameter.kind != "parameter" or len(owners) < 2:
            continue
        aliases = [alias for alias, stored in manifest.aliases.items() if stored == name]
        also = f" (also {', '.join(aliases)})" if aliases else ""
        ranks = ", ".join(map(str, owners))
        yield f"tied: {name}{also} on pipeline ranks {ranks}, gradients summed over them"


def _recomputation(manifest: Manifest, stages: Sequence[Stage]) -> Iterator[str]:
    groups = [recomputed_groups(stage.graph) for stage in stages]
    count = sum(map(len, groups))
    if count:
        ledgers = [Ledger(stage, manifest.mesh) for stage in stages]
        kept, whole = (
            sum(count_bytes(ledger.kept(own)) for ledger, own in zip(ledgers, chosen, strict=True))
            for chosen in (groups, [()] * len(stages))
        )
        yield (
            f"recomputed in the backward: {count} groups; all stages keep {format_bytes(kept)} of "
            f"{format_bytes(whole)} of activations for it"
        )


def _list(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _wrap(line: str) -> Iterator[str]:
    """The line in pieces of at most `WIDTH`, broken between words, the rest indented."""
    while len(line) > WIDTH:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        cut = line.rfind(" ", len(indent) + 1, WIDTH + 1)
        cut = cut if cut > 0 else WIDTH
        yield line[:cut]
        line = indent + line[cut:].lstrip()
    yield line
