"""Ends the values of a program's functions after their last use, not when the function returns.

A stage's forward computes much that no backward needs, such as a product before its sum over the tensor ranks. Its
text names every value, and Python would hold them all until the end.
"""

import ast
from collections.abc import Iterator

_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def end_values(tree: ast.Module) -> ast.Module:
    """Insert ``del`` into the functions of `tree`, in place, and into those inside them; lines stay as they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = list(_with_ends(node.body))
    return tree


def _with_ends(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, each followed by the ``del`` of the names that it is the last to mention.

    Deleted are names that these statements assign in any case, and that no inner function reads and none deletes.
    """
    assigned: set[str] = set()
    last: dict[str, ast.stmt] = {}
    shared: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.Assign):
            assigned.update(name for target in statement.targets for name in _names(target, ast.Store))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                last[node.id] = statement
            elif isinstance(node, (*_SCOPES, ast.Delete)):
                shared.update(_names(node))
    ends: dict[ast.stmt, list[str]] = {}
    for name in sorted(assigned - shared):
        ends.setdefault(last[name], []).append(name)
    for statement in body:
        yield statement
        if statement in ends and not isinstance(statement, ast.Return):
            targets: list[ast.expr] = [ast.Name(name, ast.Del()) for name in ends[statement]]
            yield ast.fix_missing_locations(ast.copy_location(ast.Delete(targets), statement))


def _names(node: ast.AST, use: type[ast.expr_context] = ast.expr_context) -> Iterator[str]:
    return (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, use))
