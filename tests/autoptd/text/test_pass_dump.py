"""AUTOPTD_PASSES: a text of the program after each pass, by which neighbours compare."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autoptd
from samples.gpt import GPT, GPTConfig
from samples.huggingface import make_gpt2

PASSES = [
    *("normalize", "fold_constants", "recognize_attention", "rewrite_layout", "label_layers", "shard_tensors"),
    *("cut_stages", "recompute_activations", "fuse_operators", "overlap_reductions"),
]
SIZES = GPTConfig(40, 8, 2, 2, 8)


def test_each_pass_leaves_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPTD_PASSES", str(tmp_path / "passes"))
    program = autoptd.compile(GPT(SIZES), (2, 2, 1), num_microbatches=2, recompute="full")
    files = sorted((tmp_path / "passes").iterdir())
    assert [file.name for file in files] == [f"{i:02d}_{name}.txt" for i, name in enumerate(PASSES)]
    texts = dict(zip(PASSES, (file.read_text() for file in files), strict=True))
    assert "aten.gelu" in texts["recompute_activations"]
    assert "kernels.bias_gelu" in texts["fuse_operators"]
    assert "collectives.copied_linear" in texts["overlap_reductions"]
    assert "f32[1, 8, 8]" in texts["recognize_attention"]
    assert "f32[8, 1, 8]" in texts["rewrite_layout"]
    assert "stage 3" not in texts["label_layers"]
    assert "stage 3" in texts["cut_stages"]
    for entry in program.log[1:-1]:
        assert entry in texts["overlap_reductions"]
    # The last one has the lines of the rank programs.
    body = [line for line in texts["overlap_reductions"].splitlines() if " = aten.linear(" in line]
    assert body
    assert all(any(line in text for text in program.texts) for line in body)


def test_each_shape_adds_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPTD_PASSES", str(tmp_path))
    examples = [
        {name: torch.zeros(1, length, dtype=torch.long) for name in ("input_ids", "labels")} for length in (8, 4)
    ]
    autoptd.compile(make_gpt2(SIZES), (1, 1, 1), num_microbatches=1, example_inputs=examples)
    assert len(list(tmp_path.iterdir())) == 2 * len(PASSES)


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPTD_PASSES", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    autoptd.compile(GPT(SIZES), (1, 1, 1), num_microbatches=1)
    assert not list(tmp_path.iterdir())
