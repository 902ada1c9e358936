"""The keyed masks: Random123's known answers, and the same bits however the tensor is cut."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autoptd.runtime.randomness import DRAWS, Randomness, draw_mask, draw_uniform, mask_key, philox
from tests.masks import keep_mask

CPU = torch.device("cpu")


# kat_vectors of Random123, philox4x32 with 7 rounds: counter, key, answer.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, (0, 0), [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: list[int], key: tuple[int, int], answer: list[int]) -> None:
    words = philox([torch.tensor([word]) for word in counter], key)
    assert [int(word) for word in words] == answer


def written_out(state: Randomness, p: float, operator: int, shape: tuple[int, ...]) -> Tensor:
    """The mask of a whole [batch, ...] tensor, an element at a time."""
    kept = []
    for sample, element in itertools.product(range(shape[0]), range(math.prod(shape[1:]))):
        counter = (element // 8, operator, state.sample + sample, state.call)
        words = philox([torch.tensor([word]) for word in counter], (state.seed & 0xFFFFFFFF, state.seed >> 32))
        word = int(words[element % 8 // 2])
        kept.append((word >> 16 if element % 2 else word & 0xFFFF) >= p * 2**16)
    return torch.tensor(kept).view(shape)


@pytest.mark.parametrize("shape", [(2, 3), (3, 4, 5), (2, 2, 3, 3)])
def test_a_mask_is_what_its_definition_says(shape: tuple[int, ...]) -> None:
    state = Randomness(seed=(5 << 32) + 7, call=3, sample=11)
    assert torch.equal(keep_mask(state, 0.25, 9, shape, CPU), written_out(state, 0.25, 9, shape))


def cases() -> list[tuple[tuple[int, ...], int, int]]:
    """(shape, batch dim, divided dim)"""
    shapes = [(4, 12), (4, 1, 12), (2, 3, 12), (2, 12, 3), (2, 12, 5, 5), (6, 12, 4, 4), (1, 12, 1), (2, 3, 24, 2)]
    return [
        (shape, batch, divided)
        for shape in shapes
        for batch, divided in itertools.permutations(range(len(shape)), 2)
        if shape[divided] % 12 == 0
    ]


@pytest.mark.parametrize(("shape", "batch", "divided"), cases())
def test_a_mask_does_not_depend_on_the_cut(shape: tuple[int, ...], batch: int, divided: int) -> None:
    state = Randomness(seed=1, call=2, sample=30)
    whole = keep_mask(state, 0.5, 4, shape, CPU, sample=batch)
    for size in (1, 2, 3, 4, 6, 12):
        local = list(shape)
        local[divided] //= size
        parts = [
            keep_mask(state, 0.5, 4, local, CPU, sample=batch, divided=divided, size=size, index=index)
            for index in range(size)
        ]
        assert torch.equal(torch.cat(parts, divided), whole)
        # negative dims count from the end, as everywhere
        dims = {"sample": batch - len(shape), "divided": divided - len(shape)}
        assert torch.equal(keep_mask(state, 0.5, 4, local, CPU, **dims, size=size, index=size - 1), parts[-1])
    rows = list(shape)
    rows[batch] = 1
    one_by_one = [
        keep_mask(Randomness(seed=1, call=2, sample=30 + row), 0.5, 4, rows, CPU, sample=batch)
        for row in range(shape[batch])
    ]
    assert torch.equal(torch.cat(one_by_one, batch), whole)
    first = keep_mask(state, 0.5, 4, shape, CPU, sample=batch).movedim(batch, 0)
    assert torch.equal(keep_mask(state, 0.5, 4, first.shape, CPU), first)  # the layout is no part of it


def test_a_mask_elsewhere_than_on_a_cpu_needs_no_values_on_the_host() -> None:
    """A device with no values at all stands for one whose values are there later, and in a CUDA graph never."""
    moment = torch.empty(3, dtype=torch.int64, device="meta")
    assert draw_mask(mask_key(4, (1, 2, 16, 16)), moment, 0.25, (1, 2, 16, 16)).is_meta


def test_large_masks_are_made_in_pieces_without_seams() -> None:
    state = Randomness(seed=8)
    whole = keep_mask(state, 0.1, 1, (3, 70_003), CPU)
    parts = [keep_mask(state, 0.1, 1, (3, 10_001), CPU, divided=1, size=7, index=index) for index in range(7)]
    longer = keep_mask(state, 0.1, 1, (3, 70_007), CPU)
    assert torch.equal(torch.cat(parts, 1), longer)
    assert torch.equal(longer[:, :70_003], whole)


def test_every_field_of_the_state_matters() -> None:
    states = [
        Randomness(),
        Randomness(seed=1),
        Randomness(seed=1 << 32),
        Randomness(seed=-1),
        Randomness(call=1),
        Randomness(sample=1),
    ]
    masks = [keep_mask(state, 0.5, 0, (1, 64), CPU) for state in states]
    masks.append(keep_mask(states[0], 0.5, 1, (1, 64), CPU))
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


def test_a_scalar_has_the_mask_of_sample_zero() -> None:
    masks = [keep_mask(Randomness(seed, sample=seed), 0.5, 0, (), CPU) for seed in range(64)]
    assert masks == [keep_mask(Randomness(seed), 0.5, 0, (1,), CPU)[0] for seed in range(64)]
    assert 0 < sum(map(bool, masks)) < 64


def test_without_a_batch_dimension_the_mask_is_sample_zeros() -> None:
    at_nine = keep_mask(Randomness(sample=9), 0.5, 0, (3, 7), CPU, sample=None)
    assert torch.equal(at_nine, keep_mask(Randomness(sample=0), 0.5, 0, (1, 3, 7), CPU)[0])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_drop_the_right_share_independently(p: float) -> None:
    mask = keep_mask(Randomness(seed=42), p, 3, (8, 1 << 16), CPU).double()
    spread = math.sqrt(p * (1 - p))
    assert abs(mask.mean().item() - (1 - p)) < 5 * spread / math.sqrt(mask.numel())
    centred = (mask - (1 - p)) / spread
    for lag in (1, 2, 3, 4, 8, 1024):
        correlation = (centred[:, lag:] * centred[:, :-lag]).mean().item()
        assert abs(correlation) < 5 / math.sqrt(mask.numel())
    assert abs((centred[1:] * centred[:-1]).mean().item()) < 5 / math.sqrt(mask.numel())


def test_an_empty_tensor_has_an_empty_mask() -> None:
    assert keep_mask(Randomness(), 0.5, 0, (2, 0), CPU).shape == (2, 0)


def draw(state: Randomness, operator: int, *shape: int, **place: Any) -> Tensor:
    key = mask_key(DRAWS + operator, shape, **place)
    return draw_uniform(key, state.locate(CPU), shape, torch.float64)


@pytest.mark.parametrize(("shape", "batch", "divided"), cases())
def test_a_number_is_that_of_its_words_and_does_not_depend_on_the_cut(
    shape: tuple[int, ...], batch: int, divided: int
) -> None:
    state = Randomness(seed=(5 << 32) + 7, call=2, sample=30)
    whole = draw(state, 4, *shape, sample=batch)
    rows = whole.movedim(batch, 0)
    words = philox([torch.tensor([word]) for word in (0, DRAWS + 4, 30, 2)], (7, 5))
    first = torch.stack(words).double().flatten()[: rows[0].numel()]
    assert torch.equal(rows[0].flatten()[:4], (first + 0.5) / 2**32)
    for size in (2, 3, 12):
        cut = [
            draw(state, 4, *part.shape, sample=batch, divided=divided, size=size, index=index)
            for index, part in enumerate(whole.chunk(size, divided))
        ]
        assert torch.equal(torch.cat(cut, divided), whole)
    alone = [draw(replace(state, sample=30 + row), 4, 1, *rows.shape[1:]) for row in range(len(rows))]
    assert torch.equal(torch.cat(alone), rows)


def test_numbers_are_spread_evenly_and_no_two_tensors_share_them() -> None:
    states = [Randomness(seed, call, sample) for seed, call, sample in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    drawn = torch.stack([draw(state, operator, 1, 5000) for state in states for operator in (0, 1)]).flatten()
    assert len(drawn.unique()) > 0.99999 * len(drawn)
    counts = torch.histc(drawn, 20, 0, 1) - len(drawn) / 20
    assert float(counts.abs().max()) < 5 * (len(drawn) / 20) ** 0.5
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        some = draw_uniform(mask_key(DRAWS, (1 << 16,)), states[0].locate(CPU), (1 << 16,), dtype)
        assert 0 < float(some.min()) < 0.01
        assert 0.99 < float(some.max()) < 1
