"""The collector pauses while a program is made, and is left as it was found."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import autoptd
from autoptd.gc_pause import paused_collector
from samples.gpt import GPT, GPTConfig


@pytest.fixture(params=[True, False], ids=["on", "off"], autouse=True)
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    found = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if found else gc.disable)()


def test_the_collector_is_restored_when_a_call_ends_or_fails(collecting: bool) -> None:
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() is collecting
    with pytest.raises(KeyError), paused_collector():
        raise KeyError("anything")
    assert gc.isenabled() is collecting


def test_the_collector_pauses_while_a_model_is_compiled(collecting: bool) -> None:
    seen: set[bool] = set()  # a list would be put back as it was before the trace

    class Watched(GPT):
        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> object:  # type: ignore[override]
            seen.add(gc.isenabled())
            return super().forward(idx, targets)

    model = Watched(GPTConfig(vocab_size=16, block_size=8, n_layer=2, n_head=2, n_embd=8))
    inputs = {name: torch.zeros(1, 8, dtype=torch.long) for name in ("idx", "targets")}
    program = autoptd.compile(model, (1, 1, 1), example_inputs=inputs)
    assert seen == {False}
    assert gc.isenabled() is collecting
    program.check()
    program.simulate("dgx-a100")
    assert gc.isenabled() is collecting
