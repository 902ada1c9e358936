"""Write the body of a stage function: a heading per module, and a function for each recomputed group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from autoptd.passes.cost.saved_tensors import find_repeated
from autoptd.passes.ir.node_info import info
from autoptd.passes.ir.nodes import values_given, values_taken
from autoptd.passes.ir.program import Stage
from autoptd.runtime.program.mesh import Mesh
from autoptd.text.comments import Headings, write_value_shape
from autoptd.text.expressions import Names
from autoptd.text.statements import INDENT, write_calls, write_heading, write_statement


def write_body(stage: Stage, names: Names, headings: Headings, mesh: Mesh, device: str) -> Iterator[str]:
    """Return the lines between the signature and the ``return`` of a stage; `device` is how a device is written."""
    writer = _Writer(names, headings, mesh.tensor, device, find_repeated(stage, mesh))
    calls = [node for node in stage.graph.nodes if node.op == "call_function"]
    for number, (label, run) in enumerate(groupby(calls, lambda node: info(node).recompute)):
        if number:
            yield ""
        nodes = list(run)
        yield from writer.write_modules(nodes) if label is None else writer.write_group(label, nodes)


@dataclass(frozen=True)
class _Writer:
    names: Names
    headings: Headings
    tensor: int
    device: str
    repeated: Collection[fx.Node]

    def write_modules(self, nodes: Sequence[fx.Node], indent: str = INDENT) -> Iterator[str]:
        groups = groupby(nodes, lambda node: self.headings.group(info(node).path))
        for number, (path, run) in enumerate(groups):
            members = list(run)
            if number:
                yield ""
            own = next((n for n in members if path and info(n).path == path), members[0])
            yield write_heading(self.headings.heading(path, members), info(own).line, indent)
            yield from write_calls(members, self.names, self.tensor, self.device, indent, self.repeated)

    def write_group(self, label: str, nodes: Sequence[fx.Node]) -> Iterator[str]:
        """Write a function and its call: it takes ``rank`` and values, and reads ``p`` from outside."""
        function = self.names.take(label)
        paths = dict.fromkeys(path for node in nodes if (path := info(node).path))
        title = next(iter(paths)) if len(paths) == 1 else self.headings.path_range(paths) or function
        taken = [self.names[node] for node in values_taken(nodes)]
        given = values_given(nodes)
        results = ", ".join(self.names[node] for node in given)
        shapes = ", ".join(dict.fromkeys(write_value_shape(node, self.tensor) for node in given))
        yield f"{INDENT}# {title}, recomputed in the backward"
        yield from write_statement(f"def {function}", ["rank", *taken], "", "", INDENT, "):")
        yield from self.write_modules(nodes, 2 * INDENT)
        yield from ("", f"{2 * INDENT}return {results}", "")
        yield from write_statement(f"{results} = recompute", ["rank", function, *taken], shapes, "", INDENT)
