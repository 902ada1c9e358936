"""report.html: one file that needs no network, stays small, escapes names, and draws what was simulated."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.reports.page import LEVELS, MOMENTS, TICKS, write_page
from autoptd.reports.summary import list_cells
from autoptd.runtime.program.schedule import COMPUTING
from samples.gpt import GPT, GPTConfig

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Elements(HTMLParser):
    """Holds every element against its end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: Path) -> Elements:
    elements = Elements()
    elements.feed(page.read_text(encoding="utf-8"))
    elements.close()
    assert elements.open == []
    assert len(elements.ids) == len(set(elements.ids))
    return elements


def unpack(page: Path, name: str) -> Any:
    found = re.search(rf'<script type="text/plain" id="{name}">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=4, n_head=4, n_embd=32))
    return autoptd.compile(model, mesh=(2, 2, 2), num_microbatches=4, num_model_chunks=2, recompute="full")


@pytest.fixture(scope="module")
def page(program: CompiledProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    program.save_report(path, "dgx-a100", "bf16")
    return path


def test_one_file_is_all(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 50_000
    assert not re.search(r"https?:|//\w|@import|url\(|fetch\(|\{\{", re.sub(r"[\w+/=]{200,}", "", text))
    assert {"canvas", "table", "select", "noscript"} <= set(read(page).tags)


def test_the_numbers_are_on_it(page: Path, program: CompiledProgram) -> None:
    shown = read(page).text
    step = program.simulate("dgx-a100", "bf16")
    assert f"{step.mfu:.1%}" in shown
    assert "DGX A100 (Selene)" in shown
    assert "fits in 75.2 GB" in shown
    assert all(f"{stage.parameters:,}" in shown for stage in program.overview.stages)
    assert all(entry in shown for entry in program.log)
    assert all(name in shown for name in (*step.breakdown, *step.held_bytes))
    assert "tied: wte.weight (also lm_head.weight)" in shown


def test_the_critical_rank_stays_in_view(page: Path, program: CompiledProgram) -> None:
    text, critical = page.read_text(encoding="utf-8"), program.simulate("dgx-a100", "bf16").critical_rank
    (row,) = re.findall('<tr class="critical">(.*)</tr>', text)
    index, rank = re.findall(r"<td class=.number.>(\d+)</td>", row)[:2]
    assert int(rank) == critical
    assert program.overview.stages[int(index)].pipeline_rank == critical
    assert re.search(r"\.critical td \{ position: sticky; top: [^;]+; bottom: 0;", text)  # wherever it is scrolled to


def test_a_stage_reads_alike_on_the_page_and_in_print(page: Path, program: CompiledProgram) -> None:
    rows = re.findall(r"<tr[^>]*>(<td class=.number.>\d+</td><td class=.number.>\d+</td>.*)</tr>", page.read_text())
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    assert cells == [list(list_cells(stage)) for stage in program.overview.stages]


def test_the_page_shows_the_explanation(page: Path, program: CompiledProgram) -> None:
    shown, explained = read(page).text, program.explain("dgx-a100", "bf16")
    assert explained.changes
    assert all(line in shown for line in explained.lines)


def test_the_texts_are_the_programs(page: Path, program: CompiledProgram) -> None:
    assert unpack(page, "texts") == list(program.texts)


def test_every_box_is_where_it_was_simulated(page: Path, program: CompiledProgram) -> None:
    step, data = program.simulate("dgx-a100", "bf16"), unpack(page, "data")
    assert len({fill for fill, _ in data["colours"]}) == 2 * 2
    for rank, row in enumerate(data["rows"]):
        entries = [entry for entry in step.timeline[rank] if entry.action.kind.computes]
        ends = list(accumulate(gap + length for gap, length in zip(row["gap"], row["length"], strict=True)))
        assert row["microbatch"] == [entry.action.microbatch for entry in entries]
        drawn = [(2 * (code // 2) + rank, COMPUTING[code % 2]) for code in row["code"]]
        assert drawn == [(entry.action.stage, entry.action.kind) for entry in entries]
        wanted = [entry.end / step.step_seconds * TICKS for entry in entries]
        assert ends == pytest.approx(wanted, abs=0.51)
    optimizer = [phase for phase in data["phases"] if phase[1] == "optimizer"]
    assert {phase[0] for phase in optimizer} == {0, 1}
    assert max(end for *_, end in optimizer) == TICKS


def test_memory_is_the_peak_of_each_moment(page: Path, program: CompiledProgram) -> None:
    step, data = program.simulate("dgx-a100", "bf16"), unpack(page, "data")
    for course, peak, drawn in zip(step.memory, step.memory_bytes, data["memory"], strict=True):
        assert len(drawn) == MOMENTS
        assert max(drawn) == round(peak / data["unit"])
        for at, held in course:
            place = min(int(at / step.step_seconds * MOMENTS), MOMENTS - 1)
            assert drawn[place] >= round(held / data["unit"])
    assert data["unit"] * LEVELS == max(step.memory_bytes)


def test_a_users_names_are_no_markup(program: CompiledProgram, tmp_path: Path) -> None:
    bad = '<script>alert("1")</script>&amp;'
    first = replace(program.overview.stages[0], first=bad)
    tied = replace(program.overview.tied[0], name=bad)
    hurt = replace(program.overview, title=bad, log=(bad,), tied=(tied,), stages=(first, *program.overview.stages[1:]))
    explained = replace(program.explain("dgx-a100"), modules=bad)
    write_page(tmp_path / "page.html", hurt, explained.simulation, explained.lines, [f"# {bad}"])
    elements = read(tmp_path / "page.html")
    assert elements.tags.count("script") == 3  # the page's own
    assert elements.text.count(bad) == 6  # the title twice


def test_64_ranks_stay_small(program: CompiledProgram, tmp_path: Path) -> None:
    explained = program.explain("dgx-a100")
    rows = autoptd.simulate_schedule(
        "interleaved_1f1b", p=64, m=128, v=2, forward_seconds=0.0123, backward_seconds=0.0371
    )
    course = [tuple((e.start, 10**9 + 10**7 * e.action.microbatch) for e in row) for row in rows.timeline]
    wide = replace(
        explained.simulation,
        step_seconds=rows.step_seconds,
        timeline=rows.timeline,
        memory=tuple(course),
        memory_bytes=(7 * 10**9,) * 64,
    )
    texts = [f"# rank {rank}\n{program.texts[0]}" for rank in range(64)]
    write_page(tmp_path / "page.html", program.overview, wide, replace(explained, simulation=wide).lines, texts)
    assert (tmp_path / "page.html").stat().st_size < 600_000


def test_the_page_marks_ranks_that_do_not_fit_in_memory(program: CompiledProgram, tmp_path: Path) -> None:
    cluster = autoptd.Cluster.load("dgx-a100")
    small = replace(cluster, device=replace(cluster.device, memory_bytes=1e4, reserved_bytes=0.0))
    program.save_report(tmp_path / "page.html", small)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<div class="bad">' in text
    assert "does not fit in 10 kB" in text


@torch.library.custom_op("autoptd_page_test::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, g: g * 2)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(double(self.up(x))).square().mean()
        return loss


def test_a_program_with_rules_of_the_users_own(tmp_path: Path) -> None:
    """What other settings would do is estimated with the same rules."""
    program = autoptd.compile(
        Doubled(),
        mesh=(2, 1, 1),
        example_inputs={"x": torch.zeros(2, 16)},
        rules={"autoptd_page_test::double": "b f -> b f"},
    )
    program.save_report(tmp_path / "page.html", "dgx-a100")
    text = read(tmp_path / "page.html").text
    assert "with 9 microbatches for 8 (a larger batch)" in text
    assert "other settings" not in text
