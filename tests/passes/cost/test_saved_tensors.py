"""The ledger, taken on meta tensors, is what autograd saves when the program runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.passes.cost.saved_tensors import Ledger, count_bytes, find_repeated
from autoptd.passes.ir.program import recomputed_groups
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.program_text import read_program
from samples.benchmarks.activation_memory import SavedTensors
from samples.gpt import GPT, GPTConfig
from tests.generated_models import ModelConfig, make_batch, make_model
from tests.marks import cover_pairs
from tests.plain_models import HUGGING_FACE, LENGTH, VOCABULARY

B = 2


def count_running(program: autoptd.CompiledProgram, model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """The bytes that tensor rank 0 of a one-stage program saves in the forward of a microbatch."""
    text = read_program(program.texts[0], "program_00.py")
    manifest, weights = program.manifest, {**program.buffers, **model.state_dict()}

    def step(connection: Connection) -> int:
        parallel = Parallel(connection, ShapeFunctions(manifest, text, weights))
        with torch.no_grad():
            parallel(**batch)  # which makes the slot's copy of the batch
        slots = parallel._runner.shape.stages[0]._slots
        own = {f"{i}": value for i, value in enumerate(slots[0].values)}
        held = {**dict(parallel.named_parameters()), **dict(parallel.named_buffers()), **own}
        saved = SavedTensors(held)
        with saved:
            parallel(**batch)
        return saved.nbytes

    return run_threads(manifest, step)[0]


def sample(dropout: float) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = GPT(GPTConfig(VOCABULARY, LENGTH, 2, 4, 32, dropout))
    return model, {name: torch.randint(0, VOCABULARY, (B, LENGTH)) for name in ("idx", "targets")}


def hugging_face(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCABULARY, (B, LENGTH))
    return HUGGING_FACE[name](), {"input_ids": ids, "labels": ids.clone()}


def generated(**options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = ModelConfig(**options)
    return make_model(config), make_batch(config, B)


MODELS = {
    "sample": lambda: sample(0.0),
    "dropout": lambda: sample(0.1),
    "gpt2": lambda: hugging_face("gpt2"),
    "gpt-neo": lambda: hugging_face("gpt-neo"),
    "rotary": lambda: generated(rotary=True, gated=True, rms_norm=True, kv_heads=2, bias=False),
    "written": lambda: generated(attention="written", vocabulary=67, tied=True),
}


@pytest.mark.parametrize(
    ("name", "recompute", "fuse", "tensor"), cover_pairs(MODELS, ["none", "selective", "full"], [True, False], [1, 2])
)
def test_the_ledger_is_what_is_saved(name: str, recompute: str, fuse: bool, tensor: int) -> None:
    model, batch = MODELS[name]()
    if (name, recompute) == ("gpt-neo", "full"):
        pytest.skip("a global layer and a local one: no two are alike")
    program = autoptd.compile(
        model, (tensor, 1, 1), example_inputs=batch, num_microbatches=1, recompute=recompute, fuse=fuse
    )
    (stage,) = program.stages
    groups = recomputed_groups(stage.graph)
    kept = count_bytes(Ledger(stage, program.mesh).kept(groups))
    assert kept == count_running(program, model, batch)
    if recompute != "none" and not fuse:  # the log says what is kept before operators are joined
        (said,) = [entry for entry in program.log if "keeps " in entry]
        assert said.split("keeps ")[1].startswith(f"{kept:,} of ")


def test_repeated_are_the_calls_up_to_the_last_that_saves() -> None:
    model, batch = sample(0.0)
    program = autoptd.compile(model, (2, 1, 1), example_inputs=batch, recompute="full")
    (stage,) = program.stages
    repeated = find_repeated(stage, program.mesh)
    for group in recomputed_groups(stage.graph):
        names = [node.name.split("_", 1)[1] for node in group if node not in repeated]
        assert names == ["mlp_c_proj_g", "add_1"]
