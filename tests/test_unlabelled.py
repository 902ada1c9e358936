"""Microbatches without a valid label count nothing: the step's loss is the mean over all valid labels that it has."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.compiled import CompiledProgram
from tests.marks import slow_rows_but
from tests.parity import Batch, Training, compare, loss_of, split_batch, train_compiled, train_plain
from tests.plain_models import LENGTH, VOCABULARY, PlainGPT

MESHES = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]
UNLABELLED = [0], [2, 3], list(range(4))
QUICK = [
    ((1, 1, 1), [0]),
    ((2, 1, 1), [2, 3]),
    ((2, 2, 1), [0]),
    ((2, 2, 1), [2, 3]),
    ((1, 2, 2), [2, 3]),
    ((1, 2, 2), list(range(4))),
    ((2, 1, 2), [0]),
    ((2, 1, 2), list(range(4))),
]
MICROBATCHES = 4
IGNORED = -1  # PlainGPT's


@cache
def compile_gpt(mesh: tuple[int, int, int]) -> CompiledProgram:
    torch.manual_seed(0)
    example = {name: torch.zeros(1, LENGTH, dtype=torch.long) for name in ("idx", "targets")}
    return autoptd.compile(PlainGPT().double(), mesh, example_inputs=example, num_microbatches=MICROBATCHES)


def make_batch(replicas: int, unlabelled: list[int]) -> Batch:
    """A batch of all replicas, whose sequences `unlabelled` have no label, and the others unlike counts."""
    generator = torch.Generator().manual_seed(1)
    shape = (replicas * MICROBATCHES, LENGTH)
    idx, targets = (torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
    targets[1, 3:] = IGNORED
    targets[unlabelled] = IGNORED
    return {"idx": idx, "targets": targets}


@pytest.mark.parametrize(("mesh", "unlabelled"), slow_rows_but(QUICK, product(MESHES, UNLABELLED)), ids=str)
def test_the_loss_is_the_mean_over_all_labels(mesh: tuple[int, int, int], unlabelled: list[int]) -> None:
    """Training and evaluation; the last case leaves the first of two replicas without any label."""
    if mesh[2] == 1 and len(unlabelled) == MICROBATCHES:
        unlabelled = [0, 2, 3]
    program, batch = compile_gpt(mesh), make_batch(mesh[2], unlabelled)
    assert program.model is not None

    def evaluate(parallel: Any) -> Tensor:
        with torch.no_grad():
            return loss_of(parallel(**split_batch(batch, mesh[2])[parallel.coordinates.data]))

    found = train_compiled(program, [batch, batch], Training(lr=0.1), probe=evaluate)
    expected = train_plain(program.model, [batch, batch, batch], 1, Training(lr=0.1))
    for own, plain in zip(found.steps, expected.steps, strict=False):
        compare(own, plain, loss_tolerance=1e-12)
    for loss in found.probes:
        assert loss.item() == pytest.approx(expected.steps[2].loss.item(), rel=1e-12)


def test_verify_leaves_them_out_of_both() -> None:
    program = compile_gpt((1, 1, 2))
    report = program.verify(batch=make_batch(2, [1, 4, 5, 6, 7]))
    assert report.passed, report
    assert math.isfinite(report.loss)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 1), (1, 2, 2)], ids=str)
def test_a_step_without_labels_is_nan_and_not_trained_on(mesh: tuple[int, int, int]) -> None:
    batch = make_batch(1, list(range(MICROBATCHES)))

    def evaluate(parallel: Any) -> tuple[Tensor, str]:
        with torch.no_grad():
            loss = loss_of(parallel(**batch))
        with pytest.raises(FloatingPointError) as caught:
            parallel(**batch)
        return loss, str(caught.value)

    for loss, text in train_compiled(compile_gpt(mesh), [], probe=evaluate).probes:
        assert loss.isnan()
        assert "microbatch 0 of replica 0 has no label: all of targets" in text
