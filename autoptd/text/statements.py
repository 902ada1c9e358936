"""Write the lines of a rank program: a heading per module, a statement per call, a comment at the side."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

from torch import fx

from autoptd.passes.cost.saved_tensors import find_repeated
from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import Stage, values_given, values_taken
from autoptd.runtime.collectives import copy_to_tensor, reduce_from_tensor
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule_text import wrap_words
from autoptd.text.comments import name_modules, write_communication, write_hidden, write_value_shape
from autoptd.text.expressions import Names, is_index, write_call, write_value

WIDTH = 110
COMMENT_COLUMN = 76
INDENT = " " * 4
_SHAPE_WIDTH = 20
_PARAMETER = re.compile(r" (?=p\[)")
_SHAPE_KEPT = (copy_to_tensor, reduce_from_tensor)  # their comments have no room for it


def write_body(stage: Stage, names: Names, headings: Mapping[str, str], mesh: Mesh) -> Iterator[str]:
    """Write the lines between the signature and the ``return`` of a stage."""
    repeated = find_repeated(stage, mesh)

    def write_modules(nodes: Sequence[fx.Node], indent: str = INDENT) -> Iterator[str]:
        for number, (path, run) in enumerate(groupby(nodes, lambda node: headings[info(node).path])):
            members = list(run)
            if number:
                yield ""
            own = next((n for n in members if path and info(n).path == path), members[0])
            yield write_heading(name_modules(path, members), info(own).line, indent)
            yield from write_calls(members, names, mesh, indent, repeated)

    def write_group(label: str, nodes: Sequence[fx.Node]) -> Iterator[str]:
        """Write a function and its call: it takes ``rank`` and values, and reads ``p`` from outside."""
        function = names.take(label)
        taken = [names[node] for node in values_taken(nodes)]
        given = values_given(nodes)
        results = ", ".join(names[node] for node in given)
        shapes = ", ".join(dict.fromkeys(write_value_shape(node, mesh) for node in given))
        yield f"{INDENT}# recomputed in the backward"
        yield from write_statement(f"def {function}", ["rank", *taken], "", "", INDENT, "):")
        yield from write_modules(nodes, 2 * INDENT)
        yield from ("", f"{2 * INDENT}return {results}", "")
        yield from write_statement(f"{results} = recompute", ["rank", function, *taken], shapes, "", INDENT)

    calls = [node for node in stage.graph.nodes if node.op == "call_function"]
    for number, (label, run) in enumerate(groupby(calls, lambda node: info(node).recompute)):
        if number:
            yield ""
        yield from write_modules(list(run)) if label is None else write_group(label, list(run))


def write_heading(name: str, line: str, indent: str = INDENT) -> str:
    """Write ``# h.6.attn ... gpt.py:52``: the module of the lines below, and its line in the source."""
    text = f"{indent}# {name}"
    return f"{text:<{COMMENT_COLUMN + 1}} {line}" if line else text


def write_calls(
    nodes: list[fx.Node], names: Names, mesh: Mesh, indent: str = INDENT, repeated: Collection[fx.Node] = ()
) -> Iterator[str]:
    """Write the lines of consecutive calls on one rank of `mesh`; the backward runs those `repeated` again.

    A split is unpacked if its parts are taken at once.
    """
    position = 0
    while position < len(nodes):
        node = nodes[position]
        parts = _parts_taken(node, nodes, position + 1)
        position += 1 + len(parts)
        target = ", ".join(names[part] for part in parts or [node])
        note = "partial" if info(node).is_partial else write_communication(node, mesh.tensor)
        shape = "" if note and node.target in _SHAPE_KEPT else write_value_shape(node, mesh)
        if node in repeated and " over " in note and not note.startswith("backward"):
            note += ", and again"
        if is_index(node):
            value, index = (write_value(arg, names) for arg in node.args)
            yield beside(f"{indent}{target} = {value}[{index}]", write_comment(shape, note))
        else:
            function, args = write_call(node, names)
            after = write_comment(write_hidden(node, mesh.tensor))
            yield from write_statement(f"{target} = {function}", args, shape, note, indent, after=after)


def write_comment(shape: str, note: str = "", columns: bool = True) -> str:
    """Write a shape and a note in two columns; empty if there is neither."""
    if not (shape and note):
        return f"# {shape or note}" if shape or note else ""
    wide = f"# {shape:<{_SHAPE_WIDTH}}  {note}"
    return wide if columns and COMMENT_COLUMN + len(wide) <= WIDTH else f"# {shape}  {note}"


def beside(code: str, comment: str, column: int = COMMENT_COLUMN) -> str:
    """Write code and its comment, which starts at `column` unless that exceeds the width."""
    if not comment:
        return code
    column = min(column, WIDTH - len(comment))
    return f"{code:<{max(column, len(code) + 2)}}{comment}"


def align(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Write lines of code, each with its comment, all comments at one column."""
    column = min(COMMENT_COLUMN, *(WIDTH - len(comment) for _, comment in rows))
    return [beside(code, comment, column) for code, comment in rows]


def _take_apart(arg: str) -> list[str]:
    """Return the parts of an argument that may stand on lines of their own: a list too long for one."""
    return _PARAMETER.split(arg) if arg.startswith("[") and len(arg) > WIDTH // 2 else [arg]


def _parts_taken(node: fx.Node, nodes: Sequence[fx.Node], position: int) -> Sequence[fx.Node]:
    """Return the nodes from `position` on that take part 0, 1, ... of `node`'s value as its only users."""
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)) or len(node.users) != len(value) or len(value) < 2:
        return ()
    parts = nodes[position : position + len(value)]
    taken = all(is_index(part) and part.args == (node, number) for number, part in enumerate(parts))
    return parts if taken and len(parts) == len(value) else ()


def write_statement(
    start: str, args: list[str], shape: str, note: str, indent: str = INDENT, end: str = ")", after: str = ""
) -> Iterator[str]:
    """Write ``start(args)`` on one line if it fits, else the arguments on lines of their own below the comment.

    A comment `after` them also puts the arguments on lines of their own.
    """
    code = f"{indent}{start}({', '.join(args)}{end}"
    comment = write_comment(shape, note, columns=len(code) + 2 <= COMMENT_COLUMN)
    if not after and len(code) + 2 + len(comment) <= WIDTH:
        yield beside(code, comment)
        return
    yield beside(f"{indent}{start}(", write_comment(shape, note))
    *words, last = (word for arg in args for word in _take_apart(f"{arg},"))
    margin = indent + INDENT
    yield from (margin + line for line in wrap_words([*words, last[:-1]], WIDTH - len(margin)))
    yield beside(f"{indent}{end}", after)
