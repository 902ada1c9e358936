"""Arguments that are no tensors are a part of the program: verified, kept in its folder, refused with other values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from samples.gpt import GPT, GPTConfig


class Tempered(nn.Module):
    """A loss that depends on a number, on words and on a pair, none of them a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(GPTConfig(40, 8, 2, 2, 8))

    def forward(
        self,
        idx: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        mode: str = "plain",
        window: tuple[int, int] = (0, 8),
    ) -> Tensor:
        logits = self.model(idx)[0] * sum(window) / temperature
        if mode == "squared":
            logits = logits.square()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def compile_tempered(**arguments: Any) -> tuple[Tempered, autoptd.CompiledProgram]:
    torch.manual_seed(0)
    model = Tempered()
    tokens = {name: torch.zeros(1, 8, dtype=torch.long) for name in ("idx", "targets")}
    program = autoptd.compile(model, mesh=(1, 1, 1), num_microbatches=2, example_inputs={**tokens, **arguments})
    return model, program


ARGUMENTS = {"temperature": 2.5, "mode": "squared", "window": (2, 6)}


def test_verify_gives_the_plain_model_what_the_program_was_compiled_with(tmp_path: Path) -> None:
    model, program = compile_tempered(**ARGUMENTS)
    program.verify()
    program.save(tmp_path)
    autoptd.load(tmp_path).verify(model=model)


def test_a_call_may_repeat_them_or_leave_them_out() -> None:
    model, program = compile_tempered(**ARGUMENTS)
    parallel = program.bind()
    idx = torch.randint(40, (2, 8))
    expected = model(idx, idx, **ARGUMENTS)
    assert torch.isclose(parallel(idx, idx), expected)
    assert torch.isclose(parallel(idx, idx, 2.5, "squared", window=(2, 6)), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 2.0), ("temperature", None), ("mode", "plain"), ("window", (0, 8)), ("window", object())],
)
def test_a_call_with_another_value_is_refused(name: str, value: Any) -> None:
    _, program = compile_tempered(**ARGUMENTS)
    parallel = program.bind()
    idx = torch.randint(40, (2, 8))
    with pytest.raises(ValueError, match=rf"argument {name} is .*, but the program was compiled with .*leave"):
        parallel(idx, idx, **{name: value})


def test_arguments_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(TypeError, match=r"example input 'mode' is a builtins\.object, which JSON cannot hold"):
        compile_tempered(mode=object())


def test_explained_changes_are_of_the_program_with_its_arguments() -> None:
    _, program = compile_tempered(**ARGUMENTS)
    assert program.explain("dgx-a100").changes


def weighted(output: Tensor, labels: Tensor, weight: Tensor | None = None, power: float = 1.0) -> Tensor:
    losses = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses.view(labels.shape) ** power * (1 if weight is None else weight)).mean()


def compile_sequential(loss_fn: Any, **inputs: Any) -> autoptd.CompiledProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40))
    given = {"input": torch.zeros(1, 8, dtype=torch.long), **inputs}
    return autoptd.compile(model, (1, 1, 1), num_microbatches=2, example_inputs=given, loss_fn=loss_fn)


def test_a_loss_may_have_more_than_it_must() -> None:
    labels = torch.zeros(1, 8, dtype=torch.long)
    program = compile_sequential(weighted, labels=labels, weight=torch.ones(1, 8), power=2.0)
    assert program.verify().passed
    ids, weight = torch.randint(40, (2, 8)), torch.rand(2, 8)
    model: Any = program.model
    expected = weighted(model(ids), ids, weight, 2.0)
    assert torch.isclose(program.bind()(ids, labels=ids, weight=weight), expected)


def test_a_name_that_the_loss_shares_with_forward_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_fn and forward both take input"):
        compile_sequential(lambda output, input: output.sum() * input.sum())
