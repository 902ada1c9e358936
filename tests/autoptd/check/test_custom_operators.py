"""The proof of custom operators, by the text of the user's rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.check.program import ProgramError


@torch.library.custom_op("autoptd_check_test::scale", mutates_args=())
def scale(x: Tensor, factors: Tensor) -> Tensor:
    return x * factors


@torch.library.custom_op("autoptd_check_test::contract", mutates_args=())
def contract(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


scale.register_fake(lambda x, factors: torch.empty_like(x))
scale.register_autograd(lambda ctx, gradient: (gradient, gradient.sum(0)))
contract.register_fake(lambda x, weight: x @ weight)
contract.register_autograd(lambda ctx, gradient: (gradient, gradient))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.factors = nn.Linear(16, 32), nn.Parameter(torch.ones(32))
        self.down = nn.Parameter(torch.ones(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = contract(scale(self.up(x), self.factors), self.down).square().mean()
        return loss


RULES = {"autoptd_check_test::scale": "b f, f -> b f", contract: "b f, f h -> b h"}


@pytest.fixture(scope="module")
def program() -> autoptd.CompiledProgram:
    return autoptd.compile(Scaled(), mesh=(2, 1, 1), example_inputs={"x": torch.zeros(2, 16)}, rules=RULES)


def test_a_rule_covers_its_operator(program: autoptd.CompiledProgram) -> None:
    assert program.manifest.parameters["factors"].placement["tensor"].dim == 0
    assert program.check() == ()
    assert not any("check does not cover" in line for line in program.log)


def test_a_saved_program_is_proved_by_the_rules_it_was_made_with(
    program: autoptd.CompiledProgram, tmp_path: Path
) -> None:
    program.save(tmp_path)
    loaded = autoptd.load(tmp_path)
    assert loaded.manifest.rules == {
        "autoptd_check_test.scale": "b f, f -> b f",
        "autoptd_check_test.contract": "b f, f h -> b h",
    }
    assert loaded.check() == ()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("autoptd_check_test.scale", "b f!, f! -> b f"), r"needs f of \w+ whole by its rule 'b f!, f! -> b f'"),
        (("autoptd_check_test.scale", "b f, g -> b g"), "contradicts its rule|divided along f and g: expected one"),
        (("autoptd_check_test.contract", "b f, g h -> b h"), "divided along f and g: expected one"),
    ],
)
def test_a_program_that_contradicts_a_rule_is_refused(
    program: autoptd.CompiledProgram, rule: tuple[str, str], message: str
) -> None:
    rules = {**program.manifest.rules, rule[0]: rule[1]}
    other = replace(program, manifest=replace(program.manifest, rules=rules))
    with pytest.raises(ProgramError, match=message):
        other.check()
