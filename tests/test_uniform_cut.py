"""The benchmark's cut by layers: as many layers a stage, the embedding with the first, the head with the last."""

from __future__ import annotations

import pytest

import autoptd
from autoptd.passes.ir.nodes import info
from samples.benchmarks.uniform_cut import uniform_cuts
from samples.gpt import GPT, GPTConfig

MODEL = GPT(GPTConfig(vocab_size=4096, block_size=16, n_layer=6, n_embd=32, n_head=4))


def modules(program: autoptd.CompiledProgram) -> list[set[str]]:
    """The user's modules that each stage has calls of: "h.3", "wte"."""
    paths = [[str(info(n).path) for n in stage.graph.nodes if n.op == "call_function"] for stage in program.stages]
    return [{".".join(path.split(".")[: 2 if path.startswith("h.") else 1]) for path in own if path} for own in paths]


def test_stages_have_equally_many_layers() -> None:
    with uniform_cuts():
        program = autoptd.compile(MODEL, mesh=(1, 3, 1), num_model_chunks=1)
    first, middle, last = modules(program)
    assert first == {"wte", "wpe", "h.0", "h.1"}
    assert middle == {"h.2", "h.3"}
    assert last >= {"h.4", "h.5", "ln_f", "lm_head"}
    assert program.verify().passed


def test_our_cut_is_another() -> None:
    assert "by layers" not in str(autoptd.compile(MODEL, mesh=(1, 3, 1), num_model_chunks=1).log)


def test_more_stages_than_layers_are_refused() -> None:
    with uniform_cuts(), pytest.raises(ValueError, match="6 layers found for 8 stages"):
        autoptd.compile(MODEL, mesh=(1, 8, 1), num_model_chunks=1)
