"""Weights and models that are not those of the program are refused, or what is left of them is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import autoptd
from samples.gpt import GPT
from tests.models import SMALL, compile_tiny, make_gpt, tiny

compile_gpt = partial(tiny, (1, 1, 1), num_microbatches=1)


def quantize(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    name = "h.0.mlp.c_fc.weight"
    return state | {name: (state[name] * 50).round().to(dtype), f"{name}_scale": torch.tensor(0.02)}


@pytest.mark.parametrize("stored", [False, True], ids=["state", "folder"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_numbers_of_a_quantized_model_are_refused(dtype: torch.dtype, stored: bool, tmp_path: Path) -> None:
    given: Any = quantize(make_gpt().state_dict(), dtype)
    if stored:
        save_file({n: x.contiguous() for n, x in given.items() if n != "lm_head.weight"}, tmp_path / "m.safetensors")
        given = tmp_path / "m.safetensors"
    with pytest.raises(ValueError, match=r"h\.0\.mlp\.c_fc\.weight is torch\..* give them dequantized"):
        compile_gpt().bind(weights=given)


def test_weights_that_the_program_lacks_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"12 of the tensors given are not in the program.*h\.2\."):
        compile_gpt().bind(weights=make_gpt(replace(SMALL, n_layer=3)).state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_gpt().bind(weights=make_gpt(seed=1))


def test_two_tensors_for_a_tied_one_are_refused() -> None:
    untied = make_gpt(replace(SMALL, tie_weights=False))
    tied = r"(wte|lm_head)\.weight and (wte|lm_head)\.weight are one tensor in the program, and differ"
    for given in (untied, untied.state_dict()):
        with pytest.raises(ValueError, match=tied):
            compile_gpt().bind(weights=given)
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.wte.weight)
    compile_gpt().bind(weights=untied.state_dict())


@pytest.mark.parametrize("value", [[1.0], torch.eye(8).to_sparse()], ids=["list", "sparse"])
def test_weights_that_are_no_dense_tensors_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"weights\['h\.0\.ln_1\.weight'\] is a .* expected a dense tensor"):
        compile_gpt().bind(weights={**make_gpt().state_dict(), "h.0.ln_1.weight": value})


def freeze(model: GPT) -> None:
    model.h[0].requires_grad_(False)


def extend(model: GPT) -> None:
    model.extra = nn.Parameter(torch.zeros(8))


def untie(model: GPT) -> None:
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())


def shorten(model: GPT) -> None:
    del model.h[1]


def tie(model: GPT) -> None:
    model.get_submodule("h.1.ln_1").weight = model.get_parameter("h.0.ln_1.weight")


every_change = pytest.mark.parametrize(
    ("change", "message"),
    [
        (freeze, r"h\.0\.ln_1\.weight requires no gradient now"),
        (extend, r"the model has extra, which the program lacks \(1 more, 0 fewer\)"),
        (untie, r"lm_head\.weight is tied to wte\.weight in the program, but not in the model"),
        (shorten, r"the model lacks h\.1\.ln_1\.weight, which the program has \(0 more, 12 fewer\)"),
        (tie, r"h\.1\.ln_1\.weight is tied to h\.0\.ln_1\.weight in the model, but not in the program"),
    ],
)


@every_change
def test_verify_refuses_another_model(change: Callable[[GPT], None], message: str, tmp_path: Path) -> None:
    compile_gpt().save(tmp_path)
    other = make_gpt()
    change(other)
    with pytest.raises(ValueError, match=message):
        autoptd.load(tmp_path).verify(model=other)


@every_change
def test_bind_refuses_a_model_that_was_changed_since(change: Callable[[GPT], None], message: str) -> None:
    program = compile_tiny((1, 1, 1), num_microbatches=1)
    assert isinstance(program.model, GPT)
    change(program.model)
    with pytest.raises(ValueError, match=message):
        program.bind()


class Buffered(nn.Module):
    """Two names of one buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gpt = make_gpt(replace(SMALL, n_layer=1))
        self.register_buffer("scale", torch.ones(()))
        self.gpt.register_buffer("scale", self.scale)

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        return self.gpt(idx, targets)[1] * self.scale * self.gpt.get_buffer("scale")


def test_a_buffer_with_two_values_is_refused() -> None:
    """One that was moved, which makes two tensors of it, is still one; and neither becomes a parameter."""
    idx, model = torch.zeros(1, 8, dtype=torch.long), Buffered()
    example = {"idx": idx, "targets": idx}
    program = autoptd.compile(model, (1, 1, 1), example_inputs=example, num_microbatches=1)
    model.gpt.scale = model.scale.clone()
    program.bind()
    model.gpt.scale = torch.zeros(())
    uses: tuple[Callable[[], object], ...] = (program.bind, program.verify)
    for use in uses:
        with pytest.raises(ValueError, match=r"^scale and gpt\.scale are one tensor in the program, and differ"):
            use()
    del model.gpt.scale
    model.gpt.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"gpt\.scale is tied to scale in the program, but not in"):
        program.bind()
