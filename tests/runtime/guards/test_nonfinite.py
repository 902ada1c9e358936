"""A loss or gradient that is not finite: raised on every rank before the gradients are handed over, with its origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.comm.connection import Connection, run_threads
from samples.gpt import GPT, GPTConfig
from tests.models import tiny
from tests.parity import loss_of
from tests.ranks import run_ranks
from tests.runtime.chain import ROWS, Chain

SIZES = GPTConfig(40, 8, 4, 2, 8)
MICROBATCHES = 4


class Break(torch.autograd.Function):
    """Gives x; its gradient is infinite in the rows whose number is 9."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (numbers,) = ctx.saved_tensors
        return gradient / (numbers != 9).to(gradient.dtype).unsqueeze(1), None


compile_gpt = partial(tiny, config=SIZES, num_microbatches=MICROBATCHES, microbatch_size=1, num_model_chunks=1)


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(1, 39, (MICROBATCHES, 8), generator=torch.Generator().manual_seed(seed))


Spoil = Callable[[int, nn.Module, Tensor, Tensor], None]


def refusals(program: CompiledProgram, *spoils: Spoil) -> list[list[str]]:
    """What each rank raises in steps that `spoils` changed; parameters and later steps are as without them."""

    def work(rank: int) -> list[tuple[str, bool, bool]]:
        parallel = program.bind()
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)

        def step(idx: Tensor, targets: Tensor) -> float:
            optimizer.zero_grad()
            loss = loss_of(parallel(idx, targets))
            loss.backward()
            optimizer.step()
            return loss.item()

        def refuse(spoil: Spoil) -> tuple[str, bool, bool]:
            step(tokens(), tokens(1))
            idx, targets = tokens(2), tokens(3)
            saved = {name: x.clone() for name, x in parallel.state_dict().items()}
            optimizer.zero_grad()
            with torch.no_grad():
                spoil(rank, parallel, idx, targets)
            with pytest.raises(FloatingPointError) as caught:
                step(idx, targets)
            empty = all(p.grad is None for p in parallel.parameters())
            parallel.load_state_dict(saved)
            again = step(tokens(4), tokens(5))
            return str(caught.value), empty, again == again

        return [refuse(spoil) for spoil in spoils]

    results = run_ranks(work, program.mesh.size)
    assert all(empty and goes_on for own in results for _, empty, goes_on in own)
    return [[text for text, _, _ in own] for own in results]


def test_a_broken_forward_is_found_on_its_stage() -> None:
    program = compile_gpt((1, 2, 2))
    stage = next(s.index for s in program.manifest.stages if "h.2.ln_1.weight" in s.parameters)

    def spoil(rank: int, parallel: nn.Module, idx: Tensor, targets: Tensor) -> None:
        for name, p in parallel.named_parameters():
            if name == "h.2.ln_1.weight":
                p[0] = torch.inf

    ((text,),) = {tuple(texts) for texts in refusals(program, spoil)}
    assert text.startswith("the loss is nan: it comes up first in the forward of stage")
    assert f"stage {stage} on microbatch 0" in text
    assert "program_0" in text
    assert "norm" in text
    assert "No gradient was handed to .grad" in text


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        distance: Tensor = (self.linear(x) - y).square().mean()
        return distance


def test_a_broken_input_is_named_by_its_first_reader() -> None:
    """Not by the copy into the memory that a stage reads it from."""
    examples = {name: torch.zeros(1, 8) for name in ("x", "y")}
    parallel = autoptd.compile(Distance(), mesh=(1, 1, 1), example_inputs=examples, num_microbatches=2).bind()
    x, y = torch.ones(2, 2, 8).unbind()
    x[1, 3] = torch.nan
    with pytest.raises(FloatingPointError, match=r"on microbatch 1, in aten\.\w+\.default, program_00.py:\d+: .*x"):
        parallel(x=x, y=y)


def test_a_step_without_any_label_says_so() -> None:
    program = compile_gpt((2, 2, 1))

    def spoil(rank: int, parallel: nn.Module, idx: Tensor, targets: Tensor) -> None:
        targets[:] = -100

    ((text,),) = {tuple(texts) for texts in refusals(program, spoil)}
    assert text.startswith("the loss is nan: microbatch 0 of replica 0 has no label")
    assert "all of targets that the loss reads are -100" in text


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (2, 2, 1)], ids=str)
def test_a_microbatch_without_labels_hides_nothing(mesh: tuple[int, int, int]) -> None:
    """Microbatch 2 has no label: what breaks in it is found, and what breaks in another is not laid to it."""
    program = compile_gpt(mesh, config=replace(SIZES, tie_weights=False))

    def spoil(broken: int, rank: int, parallel: nn.Module, idx: Tensor, targets: Tensor) -> None:
        targets[2] = -100
        idx[broken, 0] = 39  # which no other microbatch has
        for name, p in parallel.named_parameters():
            if name == "wte.weight" and (mesh[0] == 1 or rank % mesh[0] == 1):
                p[-1] = torch.nan

    for texts in refusals(program, partial(spoil, 2), partial(spoil, 3)):
        for text, broken in zip(texts, (2, 3), strict=True):
            assert f"it comes up first in the forward of stage 0 on microbatch {broken}, in " in text
            assert "embedding" in text  # not the sum in which the other tensor rank gets it


def test_a_gradient_alone_names_the_backward() -> None:
    chain = Chain((1, 2, 1))
    first = chain.functions[0]

    def broken(rank: Any, p: Any, *values: Tensor) -> Any:
        x, skip, ids = first(rank, p, *values)
        return Break.apply(x, ids), skip, ids  # type: ignore[no-untyped-call]

    chain.functions[0] = broken

    def body(connection: Connection) -> tuple[str, bool]:
        parallel = chain.parallel(connection)
        batch = chain.batch()
        batch["ids"][2 * ROWS] = 9
        with torch.no_grad():
            parallel(**batch)  # no update follows
        with pytest.raises(FloatingPointError) as caught:
            parallel(**batch)
        return str(caught.value), all(p.grad is None for p in parallel.parameters())

    ((text, untouched),) = set(run_threads(chain.manifest, body))
    assert untouched
    assert ", but a gradient is not finite: it comes up first in the backward of stage 0 on microbatch 2" in text
    assert "aten.div" in text


def test_a_loss_that_is_not_finite_is_given_without_gradients() -> None:
    chain = Chain((1, 2, 1))

    def body(connection: Connection) -> float:
        batch = chain.batch()
        batch["target"][0] = torch.inf
        with torch.no_grad():
            return float(chain.parallel(connection)(**batch)["loss"])

    assert run_threads(chain.manifest, body) == [torch.inf] * 2


def test_a_batch_that_is_skipped_leaves_no_trace() -> None:
    """On any rank, and with dropout: the training goes on as if the batch had not been."""
    config = GPTConfig(32, 8, 2, 2, 8, dropout=0.2)
    program = autoptd.compile(GPT(config), (1, 2, 1), microbatch_size=1, num_microbatches=2)

    def work(rank: int, skipped: int) -> list[float]:
        parallel, losses = program.bind(), []
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for step in range(3):
            idx = torch.arange(16).view(2, 8) + step
            if step == skipped:
                with pytest.raises(FloatingPointError):
                    parallel(idx, torch.full_like(idx, -100))
            loss = parallel(idx, idx)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = run_ranks(work, 2, -1)
    assert run_ranks(work, 2, 1) == expected
    assert expected[0] == expected[1]
