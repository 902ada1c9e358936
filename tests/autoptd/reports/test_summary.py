"""What ``print(program)`` shows: the plan in numbers, as plain text that does not change from run to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.reports.overview import Overview
from autoptd.reports.summary import format_number, format_seconds, summarize
from autoptd.runtime import collectives
from autoptd.text.comments import write_bytes
from samples.benchmarks.uniform_cut import uniform_cuts
from samples.gpt import GPT, GPTConfig


def compile_gpt(mesh: tuple[int, int, int], layers: int = 4, **options: Any) -> CompiledProgram:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=layers, n_head=4, n_embd=32))
    with uniform_cuts():  # one value of [s, b, h] crosses
        return autoptd.compile(model, mesh=mesh, microbatch_size=2, **options)


def test_the_plan_is_shown_in_numbers() -> None:
    program = compile_gpt((2, 2, 3), num_microbatches=8)
    text = str(program)
    lines = text.splitlines()
    assert lines[0] == program.title
    assert "mesh tensor=2 pipeline=2 data=3: 12 ranks" in lines
    assert "8 microbatches of 2 per replica and step, 48 sequences in all; 2 model chunks" in text
    assert "ideal bubble (p-1)/(v*m) = 1/16 = 6.2%" in lines
    head = lines.index(next(line for line in lines if line.startswith("stage  rank")))
    rows = [line.split() for line in lines[head + 1 : head + 5]]
    assert [row[:2] for row in rows] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    assert rows[0][2] == "wte"
    assert rows[3][3] == "lm_head"
    # b * s * h float32 values, half of them on each tensor rank.
    assert rows[1][-4:] == ["2.05", "kB", "4.1", "kB"]
    held = sum(int(row[4].replace(",", "")) for row in rows)
    local = [
        torch.Size(p.placement["tensor"].local_shape(p.shape, 2)).numel() * len(program.manifest.owners(name))
        for name, p in program.manifest.parameters.items()
        if p.kind == "parameter"
    ]
    assert held == sum(local)
    targets = [node.target for stage in program.stages for node in stage.graph.nodes]
    forward, backward = (
        sum(map(targets.count, each))
        for each in ([collectives.reduce_from_tensor], [collectives.copy_to_tensor, *collectives.COPIED])
    )
    assert f"tensor collectives per microbatch: forward {forward} (" in text
    assert f"backward {backward} (" in text
    assert "tied: wte.weight (also lm_head.weight) on pipeline ranks 0, 1, gradients summed" in text
    assert "gradients are summed over 3 replicas once a step, then divided" in lines
    assert all(entry.split()[0] in text for entry in program.log)


def test_the_summary_fits_a_terminal_and_is_deterministic() -> None:
    first, second = str(compile_gpt((2, 8, 1), layers=16)), str(compile_gpt((2, 8, 1), layers=16))
    assert first == second
    assert max(map(len, first.splitlines())) <= 110
    assert first.isascii()


def test_equal_stages_of_a_long_table_are_left_out() -> None:
    lines = str(compile_gpt((1, 16, 1), layers=32, num_microbatches=16)).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("stage  rank"))
    table = lines[head + 1 : lines.index("", head)]
    assert len(table) < 32
    assert any(line.split()[:2] == ["...", "..."] for line in table)
    assert table[0].split()[0] == "0"
    assert table[-1].split()[0] == "31"


def test_one_rank_sends_nothing() -> None:
    program = compile_gpt((1, 1, 1))
    text = str(program)
    assert "data=1: 1 rank\n" in text
    assert "tensor collectives" not in text
    assert "tied" not in text
    assert "replicas" not in text
    bare = summarize(replace(program.overview, title="a title", log=()))
    assert bare.startswith("a title\n")
    assert "passes" not in bare


def test_without_scatter_gather_all_is_sent() -> None:
    program = compile_gpt((2, 2, 1), scatter_gather=False)
    assert "4.1 kB       4.1 kB" in str(program)
    assert "2.05 kB" not in str(program)


def test_gradients_summed_over_tensor_ranks_are_named() -> None:
    program = compile_gpt((2, 1, 1))
    parameters = dict(program.manifest.parameters)
    for name in list(parameters)[:5]:
        parameters[name] = replace(
            parameters[name], placement=parameters[name].placement.with_partial_gradient("tensor")
        )
    text = summarize(
        Overview.of(replace(program.manifest, parameters=parameters), program.stages, program.schedule, (), "")
    )
    assert "once a step: the gradients of wte.weight, wpe.weight, h.0.ln_1.weight and 2 more" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(94.58, "94.6 s"), (1234.5, "1,234 s"), (0.0307, "30.7 ms"), (0.622, "622 ms"), (4.6e-5, "46 µs"), (0, "0 µs")],
)
def test_seconds_are_written_in_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_numbers_are_written_in_three_digits() -> None:
    assert [format_number(rate) for rate in (1234.5, 176.93, 10, 0.0095)] == ["1,234", "177", "10", "0.0095"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2048, "2.05 kB"), (999_600, "1 MB"), (4 * 10**13, "40 TB")],
)
def test_bytes_are_written_in_three_digits(count: int, text: str) -> None:
    assert write_bytes(count) == text
