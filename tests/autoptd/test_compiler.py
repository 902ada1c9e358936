"""compile and load: the whole road, from a plain model to texts, and back from edited texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.weights import read_weights
from samples.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=96, block_size=16, n_layer=2, n_head=4, n_embd=32)


def compile_small(**options: Any) -> CompiledProgram:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_microbatches": 4, "microbatch_size": 2, "num_model_chunks": 1, **options}
    program: CompiledProgram = autoptd.compile(GPT(CONFIG), (2, 2, 1), **settings)
    return program


@pytest.mark.parametrize("rank", [0, 1])
def test_the_programs_of_a_two_layer_gpt(rank: int, golden: Callable[[str, str], None]) -> None:
    golden(f"gpt_program_{rank:02}.py", compile_small().texts[rank])


def test_compiling_twice_gives_the_same_bytes() -> None:
    assert compile_small().texts == compile_small().texts


def test_the_model_is_left_as_it_was() -> None:
    model = GPT(CONFIG).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    autoptd.compile(model, (2, 2, 1), num_microbatches=4)
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_defaults_are_eight_microbatches_a_rank_and_two_chunks() -> None:
    program = autoptd.compile(GPT(CONFIG), (1, 2, 1))
    assert (program.manifest.num_microbatches, program.manifest.num_model_chunks) == (16, 2)
    assert program.manifest.microbatch_size == 1
    assert len(program.stages) == 4


def test_a_saved_program_loads_as_the_same_texts(tmp_path: Path) -> None:
    program = compile_small()
    program.save(tmp_path / "out")
    loaded = autoptd.load(tmp_path / "out")
    assert loaded.texts == program.texts
    assert loaded.manifest == program.manifest
    assert loaded.schedule == program.schedule


def test_an_edit_is_what_check_judges(tmp_path: Path) -> None:
    compile_small().save(tmp_path / "out")
    file = tmp_path / "out" / "program_00.py"
    text = file.read_text()
    line = next(one for one in text.splitlines() if "h0_attn_c_proj_g = " in one)
    file.write_text(text.replace(line, "    h0_attn_c_proj_g = h0_attn_c_proj"))
    with pytest.raises(autoptd.ProgramError, match="partial sum"):
        autoptd.load(tmp_path / "out")


def test_bind_without_a_launcher_is_the_plain_model() -> None:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    program = autoptd.compile(model, (1, 1, 1), num_microbatches=2)
    parallel = program.bind(device="cpu")
    batch = {"idx": torch.randint(96, (2, 16)), "targets": torch.randint(96, (2, 16))}
    loss = parallel(**batch)[1]
    loss.backward()
    expected = torch.stack([model(**{k: v[i : i + 1] for k, v in batch.items()})[1] for i in range(2)]).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    gradients = dict(parallel.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, msg=name)


def test_weights_come_from_a_module_a_state_dict_or_safetensors(tmp_path: Path) -> None:
    model = GPT(CONFIG)
    state = {n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    save_file(state, str(tmp_path / "model.safetensors"))
    program = autoptd.compile(GPT(CONFIG), (1, 1, 1), num_microbatches=1)
    for weights in (model, model.state_dict(), tmp_path, tmp_path / "model.safetensors"):
        bound = program.bind(device="cpu", weights=weights).full_state_dict()
        assert bound.keys() == model.state_dict().keys()
        assert all(torch.equal(bound[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_that_are_none_or_nowhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model to take weights from; pass weights="):
        read_weights(None, {})
    with pytest.raises(ValueError, match=r"has no safetensors; expected a file, or a folder"):
        read_weights(tmp_path, {})
    with pytest.raises(TypeError, match="weights is a int; expected a module"):
        read_weights(3, {})  # type: ignore[arg-type]


def test_a_meta_model_compiles_and_asks_for_weights() -> None:
    with torch.device("meta"):
        model: nn.Module = GPT(CONFIG)
    program = autoptd.compile(model, (1, 1, 1), num_microbatches=1)
    with pytest.raises(ValueError, match="is on the meta device and has no values"):
        program.bind(device="cpu")
    real = program.bind(device="cpu", weights=GPT(CONFIG))
    assert sum(p.numel() for p in real.parameters()) == sum(p.numel() for p in model.parameters())


def test_printing_a_program_says_what_was_decided() -> None:
    text = str(compile_small())
    assert "mesh tensor=2 pipeline=2 data=1" in text
    assert "wte.weight" in text
