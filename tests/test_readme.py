"""The code in the README and its pages is what the program does, and what they link to is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import autoptd
from samples import attention_coverage, corpus, model_coverage, train
from samples.gpt import GPT, GPTConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "samples").rglob("*.md"))]


def read_code(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


EXCERPT, EXAMPLE, SIMULATED = read_code("README.md")
LOOP, SHAPES, RECOMPUTED = read_code("samples/training.md")


def test_ten_lines_train() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line]) == 10
    tokens = np.arange(4096, dtype=np.uint16)
    scope = {"batches": islice(corpus.batches(tokens, 8, 128, seed=0), 2)}
    exec(EXAMPLE.replace("mesh=(2, 2, 2)", "mesh=(1, 1, 1)"), scope)
    assert scope["loss"].item() == pytest.approx(np.log(4096), rel=0.1)  # type: ignore[attr-defined]


def test_a_loop_of_whole_steps_trains() -> None:
    tokens = np.arange(4096, dtype=np.uint16)
    program = autoptd.compile(GPT(GPTConfig()), mesh=(1, 1, 1), num_microbatches=2)
    parallel, logged = program.bind("cpu"), list[dict[str, float]]()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-4)
    scope = {
        "loader": [
            dict(zip(("idx", "targets"), batch, strict=True))
            for batch in islice(corpus.batches(tokens, 2, 128, seed=0), 2)
        ],
        "logger": SimpleNamespace(log=logged.append),
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "parallel": parallel,
        "optimizer": optimizer,
    }
    exec(LOOP, scope)
    assert [step["loss"] for step in logged] == pytest.approx([np.log(4096)] * 2, rel=0.1)
    assert all(step["gradient_norm"] > 0 for step in logged)


def test_both_shapes_train() -> None:
    scope: dict[str, Any] = {"torch": torch, "autoptd": autoptd, "GPT": GPT, "GPTConfig": GPTConfig}
    *lines, call = SHAPES.splitlines()
    exec("\n".join(lines).replace("mesh=(2, 2, 2)", "mesh=(1, 1, 1)"), scope)
    for shape in ((8, 128), (32, 32)):
        scope |= dict.fromkeys(("idx", "targets"), torch.zeros(shape, dtype=torch.long))
        with torch.no_grad():
            exec(call, scope)
        assert scope["loss"].isfinite()


def test_excerpt_is_in_the_demos_program() -> None:
    args = train.parse_arguments(["--mesh", "2,2,2", "--chunks", "2"])
    assert EXCERPT in train.compile_program(train.make_model(args), args).rank(0).code


def test_recomputed_excerpt_is_in_the_demos_program() -> None:
    args = train.parse_arguments([])
    tokens = [torch.zeros(2, 128, dtype=torch.long) for _ in range(2)]
    program = autoptd.compile(train.make_model(args), (2, 1, 1), example_inputs=tokens, recompute="full")
    before, after = RECOMPUTED.split("        …\n")
    assert before in program.rank(0).code
    assert after in program.rank(0).code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^    )make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} < targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


def test_a_step_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = train.parse_arguments(["--mesh", "2,2,2", "--chunks", "2"])
    scope = {"program": train.compile_program(train.make_model(args), args)}
    exec(SIMULATED, scope)
    assert (tmp_path / "step.json.gz").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "list_rows", "errors"),
    [
        ("attention_coverage.md", attention_coverage.list_rows, {3}),
        ("model_coverage.md", model_coverage.list_rows, {4, 5}),
    ],
)
def test_a_table_is_that_of_this_version(
    page: str, list_rows: Callable[[], Iterator[tuple[str, ...]]], errors: set[int]
) -> None:
    """But for the columns of `errors`, which are rounding."""
    transformers = pytest.importorskip("transformers")
    text = (ROOT / "samples" / page).read_text()
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the table is of another version of transformers")
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"]

    def leave_out(row: Sequence[str]) -> list[str]:
        return [cell for i, cell in enumerate(row) if i not in errors]

    assert [leave_out(row) for row in rows[2:]] == [leave_out(row) for row in list_rows()]
