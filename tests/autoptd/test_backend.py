"""torch.compile of each stage: the same numbers."""

from __future__ import annotations

import pytest
import torch

import autoptd
from samples.gpt import GPT, GPTConfig


@pytest.mark.parametrize(
    ("backend", "dropout"),
    [
        ("aot_eager", 0.0),
        ("aot_eager", 0.1),
        pytest.param("inductor", 0.0, marks=pytest.mark.slow),
        pytest.param("inductor", 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_stage_gives_the_same_numbers(backend: str, dropout: float) -> None:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_embd=32, n_head=4, dropout=dropout)
    ).double()
    program = autoptd.compile(model, mesh=(1, 1, 1), microbatch_size=2, num_microbatches=2)
    plain, compiled = program.bind(), program.bind(backend=backend)
    for _ in range(3):  # masks of later calls too: what changes from call to call is no constant
        idx, targets = torch.randint(0, 64, (2, 4, 16)).unbind()
        losses = [each(idx, targets)[1] for each in (plain, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
        for one, two in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert one.grad is not None
            torch.testing.assert_close(two.grad, one.grad, rtol=1e-12, atol=1e-14)
            one.grad = two.grad = None


def test_an_unknown_backend_is_refused() -> None:
    program = autoptd.compile(GPT(GPTConfig(n_layer=1)), mesh=(1, 1, 1), num_microbatches=1)
    with pytest.raises(ValueError, match=r"no torch\.compile backend 'inductr'; did you mean 'inductor'"):
        program.bind(backend="inductr")
