"""Every command of the README, on the saved program of each of five families of models."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autoptd.cli.main import main
from tests.marks import slow_but

transformers = pytest.importorskip("transformers")
README = Path(__file__).parents[3] / "README.md"
SIZES = {"vocab_size": 64, "max_position_embeddings": 16, "use_cache": False}
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = {**SIZES, **LAYERS, "num_key_value_heads": 2}
FAMILIES = ("make_gpt2", "make_llama", "make_mixtral", "make_t5", "make_lora")
NAMES = {"first", "last", "log", "title"}  # of a loaded program others than of a compiled one


def make_gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=4, use_cache=False)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def make_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))  # type: ignore[no-any-return]


def make_mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(  # type: ignore[no-any-return]
        transformers.MixtralConfig(**GROUPED, num_local_experts=4)
    )


def make_t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(  # type: ignore[no-any-return]
        transformers.T5Config(vocab_size=64, use_cache=False, **sizes)
    )


def make_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(make_llama(), config)  # type: ignore[no-any-return]


def read_commands(model: str, folder: Path) -> dict[str, list[str]]:
    """Return the words of the README's commands, on a `model` of this file, with files in `folder`."""
    text = README.read_text()
    lines = re.findall(r"^    autoptd (.+?)(?: +#.*)?$", text, re.MULTILINE)
    given = {"samples.gpt:make_model": f"{__name__}:{model}", "64": "4", "512": "8"}
    files = ("out/", "step.json.gz", "report.html")
    given |= {name: str(folder / name) for name in files}
    return {words[0]: [given.get(word, word) for word in words] for words in map(shlex.split, lines)}


@pytest.mark.parametrize("model", FAMILIES)
def test_the_commands_of_the_readme(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = read_commands(model, tmp_path)

    def run(name: str) -> Any:
        assert main([*commands[name], "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    compiled, loaded = run("compile"), run("inspect")
    assert drop_names(loaded) == drop_names(compiled)
    assert run("simulate")["dtype"] == "bf16"
    assert run("report")["simulation"]["dtype"] == "fp32"
    assert run("verify")["passed"] is True


@pytest.mark.parametrize("model", slow_but(("make_llama",), FAMILIES))
def test_the_plan_of_the_readme(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*read_commands(model, tmp_path)["plan"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["fits"] is True


def drop_names(overview: dict[str, Any]) -> dict[str, Any]:
    stages = [{name: value for name, value in stage.items() if name not in NAMES} for stage in overview["stages"]]
    return {**{name: value for name, value in overview.items() if name not in NAMES}, "stages": stages}
