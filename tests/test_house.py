"""The house: imports run downwards, everything stays small enough to read, names are the field's."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import autoptd

ROOT = Path(__file__).parents[1]
ROOMS = ("runtime", "passes", "autoptd", "samples")  # from the ground up
FILE_LINES, FUNCTION_LINES, HOUSE_LINES = 400, 70, 33_420
BANNED_WORDS = {"manager", "helper", "helpers", "util", "utils", "handler", "base", "abstract", "data2"}


def list_files() -> list[Path]:
    """The house's Python files relative to the root, each once (autoptd has links to passes and runtime)."""
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    links = (ROOT / "autoptd" / "passes", ROOT / "autoptd" / "runtime")
    return [path.relative_to(ROOT) for path in files if not any(link in path.parents for link in links)]


FILES = list_files()
every_file = pytest.mark.parametrize("file", FILES, ids=str)


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    parts = parts if parts[0] in ("autoptd", "samples") else ("autoptd", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The room a module lives in; None where it is not ours."""
    first, second = (*module.split("."), "")[:2]
    if first == "autoptd":
        return second if second in ("runtime", "passes") else "autoptd"
    return first if first == "samples" else None


def list_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of every import; ``from a import b`` counts as a.b where that is one of our modules."""
    ours = {module_name(file) for file in FILES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write autoptd.<room>.<module>"
            for alias in node.names:
                joined = f"{node.module}.{alias.name}"
                yield node.lineno, joined if joined in ours else str(node.module)


def list_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@every_file
def test_imports_run_downwards(file: Path) -> None:
    room = room_of(module_name(file))
    assert room is not None
    for line, module in list_imports(parse(file)):
        target = room_of(module)
        if target is not None:
            assert ROOMS.index(target) <= ROOMS.index(room), (
                f"{file}:{line}: {room} imports {module} from above"
            )


class RunTimeImports(ast.NodeTransformer):
    """Leaves out what is imported for annotations only."""

    def visit_If(self, node: ast.If) -> ast.AST:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return ast.Pass()
        return self.generic_visit(node)


def test_no_circle_of_imports() -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    names = {module_name(file) for file in FILES}
    for file in FILES:
        imports = list_imports(RunTimeImports().visit(deepcopy(parse(file))))
        graph.add_edges_from((module_name(file), module) for _, module in imports if module in names)
    assert list(nx.simple_cycles(graph)) == []


@every_file
def test_no_function_local_import(file: Path) -> None:
    for function in list_functions(parse(file)):
        for line, module in list_imports(function):
            pytest.fail(f"{file}:{line}: {function.name} imports {module}; import at the head of the file")


@every_file
def test_file_is_short(file: Path) -> None:
    assert len((ROOT / file).read_text().splitlines()) <= FILE_LINES


@every_file
def test_functions_fit_a_screen(file: Path) -> None:
    for function in list_functions(parse(file)):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= FUNCTION_LINES, f"{file}:{function.lineno}: {function.name} has {lines} lines"


def test_house_is_small() -> None:
    """The package's lines with something on them; samples are beside it."""
    texts = [(ROOT / file).read_text() for file in FILES if file.parts[0] != "samples"]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) <= HOUSE_LINES


@every_file
def test_names_are_the_fields(file: Path) -> None:
    tree = parse(file)
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names += [file.stem, *(function.name for function in list_functions(tree))]
    for name in names:
        words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}
        assert not words & BANNED_WORDS, f"{file}: {name}"


@every_file
def test_no_exception_is_swallowed(file: Path) -> None:
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.ExceptHandler):
            name = node.type.id if isinstance(node.type, ast.Name) else None
            broad = node.type is None or name in ("Exception", "BaseException")
            silent = all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
            assert not (broad and silent), f"{file}:{node.lineno}: any exception passes here in silence"


def test_a_table_has_one_place() -> None:
    places: dict[tuple[str, str], list[Path]] = {}
    for file in (file for file in FILES if "scripts" not in file.parts):  # those are copies by intention
        for statement in parse(file).body:
            if isinstance(statement, ast.Assign) and isinstance(
                statement.value, ast.Tuple | ast.Dict | ast.Set
            ):
                values, names = ast.unparse(statement.value), ast.unparse(statement.targets[0])
                places.setdefault((names, values), []).append(file)
    assert {name: files for (name, _), files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize("room", ["passes", "runtime"])
def test_rooms_are_reached_through_the_door(room: str) -> None:
    assert (ROOT / "autoptd" / room).resolve() == ROOT / room
    assert importlib.import_module(f"autoptd.{room}").__name__ == f"autoptd.{room}"
    with pytest.raises(ImportError, match=f"imported as autoptd.{room}"):
        importlib.import_module(room)


@pytest.mark.parametrize("name", autoptd.__all__)
def test_public_name_exists(name: str) -> None:
    assert name in dir(autoptd)
    assert getattr(autoptd, name) is not None
    assert not (ROOT / "autoptd" / f"{name}.py").exists(), f"module {name} would hide the name {name}"


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'complie'; it has .*compile"):
        _ = autoptd.complie


def test_a_rank_imports_no_solver() -> None:
    code = (
        "import sys, autoptd, autoptd.runtime.module\n"
        "rooms = ('autoptd.passes', 'autoptd.compiler', 'ortools', 'transformers')\n"
        "print([name for name in rooms if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
