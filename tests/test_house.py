"""The house: wings import only the wings they may, everything stays small enough to read, names are the field's."""

from __future__ import annotations

import ast
import importlib
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import autoptd

ROOT = Path(__file__).parents[1]
ROOMS = ("runtime", "passes", "autoptd", "samples")  # from the ground up
FILE_LINES, FUNCTION_LINES, FOLDER_FILES, MEDIAN_FILE_LINES = 400, 70, 20, 130

# Non-blank lines. The core is what compiles and runs a step; the surroundings plan, simulate, report, calibrate, save
# and guard. Both numbers are lowered whenever lines go, and never raised: a feature that needs more lines pays for them
# by taking others out.
CORE_LINES, SURROUNDING_LINES = 22_732, 6_818
SURROUNDINGS = {
    *("autoptd.calibration", "autoptd.cli", "autoptd.planning", "autoptd.reports", "autoptd.simulate"),
    *("autoptd.verification", "runtime.checkpoint", "runtime.guards", "runtime.health"),
}

BANNED_WORDS = {"manager", "helper", "helpers", "util", "utils", "handler", "base", "abstract", "data2"}

# Which wings of its own room each wing imports; the rooms below are open to it. This is the only place to change when
# that changes. A file that lies in the room itself counts as a wing.
# fmt: off
IMPORTS = {
    "runtime": {
        "checkpoint": "comm guards optimizer program weights",
        "collectives": "comm kernels",
        "comm": "health program randomness",
        "engine": "comm kernels optimizer program randomness user_warnings weights",
        "guards": "comm engine health optimizer program weights",
        "health": "program",
        "kernels": "comm program randomness",
        "launch": "comm health program",
        "module": "checkpoint comm engine guards kernels optimizer program user_warnings weights",
        "optimizer": "comm kernels program",
        "program": "",
        "randomness": "",
        "recomputation": "comm",
        "user_warnings": "",
        "weights": "comm program randomness user_warnings",
    },
    "passes": {
        "attention": "cost ir normal_form operators",
        "cost": "ir operators",
        "fusion": "cost ir operators",
        "ir": "",
        "layout": "ir operators tensor_parallel",
        "normal_form": "ir operators",
        "operators": "ir",
        "recompute": "cost ir operators structure",
        "stages": "cost ir structure",
        "structure": "ir",
        "tensor_parallel": "attention cost fusion ir normal_form operators",
    },
    "autoptd": {
        "__main__": "cli",
        "calibration": "compiled compiler progress simulate",
        "capture": "",
        "check": "options",
        "cli": "calibration capture check compiled compiler "
               "planning reports simulate text verification",
        "compiled": "capture check description gc_pause input_shapes options "
                    "planning reports simulate text verification weights",
        "compiler": "capture compiled description gc_pause input_shapes loss options "
                    "pass_list planning progress simulate text weights",
        "description": "capture loss",
        "difference": "compiled planning text",
        "gc_pause": "",
        "input_shapes": "check",
        "loss": "",
        "options": "",
        "pass_list": "options progress",
        "planning": "capture gc_pause input_shapes options pass_list progress simulate",
        "progress": "",
        "reports": "simulate text",
        "simulate": "options",
        "text": "check",
        "verification": "capture loss text weights",
        "weights": "capture",
    },
}
# fmt: on

# Tables of operators outside of passes/operators, by the reason why they are no rows of its records. They only get
# fewer; at most 9 of them, and 6 files for each of the operators that stand in most.
OPERATOR_TABLES = {
    "one operator written as another": {
        *("passes/fusion/rules.py: RULES", "passes/fusion/rules.py: _ADDED_NORMS"),
        "passes/fusion/activations.py: KNOWN",
        *("passes/normal_form/writer.py: _SCATTERS", "passes/normal_form/operator_rewrites.py: RULES"),
    },
    "a reader of one pattern": {"passes/fusion/activations.py: ANALYTIC"},
    "the user's calls, before there is a graph": {
        *("autoptd/capture/eval_mode.py: DROPPING", "autoptd/verification/float64.py: LITERALS")
    },
    "what an initialisation draws": {"autoptd/weights/init_recorder.py: _DRAWS"},
}
FILES_NAMING = {"reshape": 6, "scaled_dot_product_attention": 4, "linear": 5}


def list_files() -> list[Path]:
    """The house's Python files relative to the root, each once (autoptd has links to passes and runtime)."""
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    links = (ROOT / "autoptd" / "passes", ROOT / "autoptd" / "runtime")
    return [path.relative_to(ROOT) for path in files if not any(link in path.parents for link in links)]


FILES = list_files()
PACKAGE = [file for file in FILES if file.parts[0] != "samples"]


@cache
def read(file: Path) -> str:
    return (ROOT / file).read_text()


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(read(file))


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    parts = parts if parts[0] in ("autoptd", "samples") else ("autoptd", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(file) for file in FILES}


def room_of(module: str) -> str | None:
    """The room that a module lies in; None where it is not ours."""
    first, second = (*module.split("."), "")[:2]
    if first == "autoptd":
        return second if second in ("runtime", "passes") else "autoptd"
    return first if first == "samples" else None


def wing_of(module: str) -> str:
    """The wing that a module lies in: "passes.cost", "autoptd.compiler" for a file of the room, or the room."""
    parts = module.split(".")
    if parts[1:2] in (["passes"], ["runtime"]):
        parts = parts[1:]
    return ".".join(parts[:2])


def list_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of every import; ``from a import b`` counts as a.b where that is one of our modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write autoptd.<room>.<module>"
            for alias in node.names:
                joined = f"{node.module}.{alias.name}"
                yield node.lineno, joined if joined in NAMES else str(node.module)


def list_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def count_lines(file: Path) -> int:
    return sum(bool(line.strip()) for line in read(file).splitlines())


def test_imports_run_downwards() -> None:
    upwards = [
        f"{file}:{line} imports {module}"
        for file in FILES
        for line, module in list_imports(parse(file))
        if (target := room_of(module)) is not None
        and ROOMS.index(target) > ROOMS.index(str(room_of(module_name(file))))
    ]
    assert upwards == []


def test_wings_import_what_the_table_allows() -> None:
    found: dict[str, dict[str, set[str]]] = {room: {} for room in IMPORTS}
    for file in PACKAGE:
        room, _, wing = wing_of(module_name(file)).partition(".")
        if not wing:
            continue  # the rooms' own __init__.py
        targets = {wing_of(module).partition(".") for _, module in list_imports(parse(file)) if module in NAMES}
        own = found[room].setdefault(wing, set())
        own |= {target for other, _, target in targets if other == room and target not in ("", wing)}
    for room, wings in IMPORTS.items():
        assert {wing: " ".join(sorted(targets)) for wing, targets in found[room].items()} == wings


def test_no_circle_of_imports() -> None:
    """Not even for annotations: what only a type checker imports is imported by a reader's head too."""
    modules: nx.DiGraph[str] = nx.DiGraph()
    for file in (file for file in FILES if file != Path("autoptd/__init__.py")):
        own = module_name(file)
        modules.add_edges_from((own, module) for _, module in list_imports(parse(file)) if module in NAMES)
    assert list(nx.simple_cycles(modules)) == []
    for wings in IMPORTS.values():
        assert nx.is_directed_acyclic_graph(
            nx.DiGraph((wing, target) for wing, targets in wings.items() for target in targets.split())
        )


def test_every_wing_says_what_it_is_for() -> None:
    texts = {file: ast.get_docstring(parse(file)) for file in PACKAGE if file.name == "__init__.py"}
    assert [file for file, text in texts.items() if not text or "." not in text] == []


def test_no_function_local_import() -> None:
    found = [
        f"{file}:{line}: {function.name} imports {module}"
        for file in FILES
        for function in list_functions(parse(file))
        for line, module in list_imports(function)
    ]
    assert found == [], "import at the head of the file"


def test_files_are_short() -> None:
    lengths = {file: len(read(file).splitlines()) for file in FILES}
    assert {file: lines for file, lines in lengths.items() if lines > FILE_LINES} == {}
    assert statistics.median(lengths[file] for file in PACKAGE) <= MEDIAN_FILE_LINES


def test_folders_are_small() -> None:
    folders = Counter(file.parent for file in PACKAGE if file.name != "__init__.py")
    assert {folder: count for folder, count in folders.items() if count > FOLDER_FILES} == {}


def test_functions_fit_a_screen() -> None:
    lengths = {
        f"{file}:{function.lineno}: {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for file in FILES
        for function in list_functions(parse(file))
    }
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}


def test_house_is_small() -> None:
    core = surroundings = 0
    for file in PACKAGE:
        if wing_of(module_name(file)) in SURROUNDINGS:
            surroundings += count_lines(file)
        else:
            core += count_lines(file)
    assert core <= CORE_LINES
    assert surroundings <= SURROUNDING_LINES


def test_names_are_the_fields() -> None:
    found = []
    for file in FILES:
        tree = parse(file)
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for name in [*names, file.stem, *(function.name for function in list_functions(tree))]:
            words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}
            found += [f"{file}: {name}"] * bool(words & BANNED_WORDS)
    assert found == []


def test_words_of_a_schedule_stay_in_its_texts() -> None:
    """What an action does is asked of its `Kind`; only a schedule's own files know how it is written."""
    found = [
        f"{file}: {line.strip()}"
        for file in PACKAGE
        if file.parts[:2] != ("runtime", "program")
        for line in read(file).splitlines()
        if re.search('"F"|"B"|"SEND|"RECV', line)
    ]
    assert found == []


def test_no_exception_is_swallowed() -> None:
    silent = [
        f"{file}:{node.lineno}"
        for file in FILES
        for node in ast.walk(parse(file))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]
    assert silent == []


def test_a_table_has_one_place() -> None:
    places: dict[tuple[str, str], list[Path]] = {}
    for file in (file for file in FILES if "scripts" not in file.parts):  # those are copies by intention
        for statement in parse(file).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Tuple | ast.Dict | ast.Set):
                values, names = ast.unparse(statement.value), ast.unparse(statement.targets[0])
                places.setdefault((names, values), []).append(file)
    assert {name: files for (name, _), files in places.items() if len(files) > 1} == {}


def list_operators(tree: ast.AST) -> Iterator[str]:
    """Every operator of torch and function of ours that is named: ``aten.mm``, ``"aten.mm"``, ``kernels.dropout``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr.islower():
            if node.value.id in ("aten", "kernels", "collectives"):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^aten\.\w+$", node.value)


def test_facts_about_operators_stand_in_their_records() -> None:
    tables = {
        f"{file}: {ast.unparse(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)}"
        for file in PACKAGE
        if file.parts[:2] != ("passes", "operators")
        for statement in parse(file).body
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value
        if len(set(list_operators(statement.value))) > 1
    }
    assert tables == set().union(*OPERATOR_TABLES.values()), "a trait or a field of the operators' records instead"
    assert len(tables) <= 9


def test_common_operators_stand_in_few_files() -> None:
    found = {name: sum(f"aten.{name}" in list_operators(parse(file)) for file in PACKAGE) for name in FILES_NAMING}
    assert found == FILES_NAMING


@pytest.mark.parametrize("room", ["passes", "runtime"])
def test_rooms_are_reached_through_the_door(room: str) -> None:
    assert (ROOT / "autoptd" / room).resolve() == ROOT / room
    assert importlib.import_module(f"autoptd.{room}").__name__ == f"autoptd.{room}"
    with pytest.raises(ImportError, match=f"imported as autoptd.{room}"):
        importlib.import_module(room)


def test_public_names_exist() -> None:
    for name in autoptd.__all__:
        assert name in dir(autoptd)
        assert getattr(autoptd, name) is not None
        assert not (ROOT / "autoptd" / f"{name}.py").exists(), f"module {name} would hide the name {name}"
        assert not (ROOT / "autoptd" / name).exists(), f"wing {name} would hide the name {name}"


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'complie'; it has .*compile"):
        _ = autoptd.complie


def test_a_rank_imports_no_solver() -> None:
    code = (
        "import sys, autoptd, autoptd.runtime.module.parallel\n"
        "rooms = ('autoptd.passes', 'autoptd.compiler', 'ortools', 'transformers')\n"
        "print([name for name in rooms if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.strip() == "[]"
