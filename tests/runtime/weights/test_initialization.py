"""First weights: the distributions that are asked for, the same bits however a tensor is divided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.mesh import Coordinates, Mesh
from autoptd.runtime.program.placement import REPLICATED, Draw, Parameter, Placement, Replicate, Segment, Shard
from autoptd.runtime.randomness import CPU_CHUNK, Randomness, philox
from autoptd.runtime.weights import initialization
from autoptd.runtime.weights.initialization import draw_elements, draw_slice
from tests.masks import keep_mask

NORMAL = Draw("normal", mean=0.5, std=0.02)
UNIFORM = Draw("uniform", low=-0.3, high=0.1)
TRUNCATED = Draw("truncated_normal", mean=1.0, std=2.0, low=-1.0, high=3.5)


def rank_of(size: int, index: int) -> Rank:
    return Rank.local(Mesh(size, 1, 1), Coordinates(0, 0, index))


def draw(parameter: Parameter, seed: int = 0) -> Tensor:
    """The whole tensor."""
    return draw_slice(replace(parameter, placement=REPLICATED), rank_of(1, 0), seed)


def make(shape: tuple[int, ...], *draws: Draw, name: str = "weight") -> Parameter:
    return Parameter(name, shape, torch.float64, initial=draws)


def distance(values: Tensor, expected: Tensor) -> float:
    """Kolmogorov and Smirnov's distance of a sample, given its `expected` distribution at its sorted values."""
    count = values.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    return float(torch.maximum((steps[1:] - expected).abs(), (steps[:-1] - expected).abs()).max())


def distribution(draw: Draw, x: Tensor) -> Tensor:
    below: Tensor
    if draw.kind == "uniform":
        return ((x - draw.low) / (draw.high - draw.low)).clamp(0, 1)
    below = torch.special.ndtr((x - draw.mean) / draw.std)
    if draw.kind == "normal":
        return below
    ends: Tensor = torch.special.ndtr((torch.tensor([draw.low, draw.high]).double() - draw.mean) / draw.std)
    return ((below - ends[0]) / (ends[1] - ends[0])).clamp(0, 1)


@pytest.mark.parametrize("wanted", [NORMAL, UNIFORM, TRUNCATED], ids=lambda draw: draw.kind)
def test_the_distribution_is_the_one_asked_for(wanted: Draw) -> None:
    values = draw(make((400, 500), wanted)).flatten().sort().values
    # 1 in 1000 samples of the right distribution is farther off than 1.95 / sqrt(n)
    limit = 1.95 / math.sqrt(values.numel())
    assert distance(values, distribution(wanted, values)) < limit
    other = replace(wanted, std=wanted.std * 1.05, high=wanted.high + 0.05)
    assert distance(values, distribution(other, values)) > limit, "the test could not tell"
    if wanted.kind != "normal":
        assert wanted.low <= float(values[0]) < float(values[-1]) <= wanted.high


def test_elements_are_independent() -> None:
    values = (draw(make((1 << 19,), NORMAL)) - NORMAL.mean) / NORMAL.std
    limit = 5 / math.sqrt(values.numel())
    for lag in (1, 2, 4, 1024):
        assert abs(float((values[lag:] * values[:-lag]).mean())) < limit
        assert abs(float((values[lag:].square() * values[:-lag].square()).mean()) - 1) < 5 * limit
    for other in (draw(make((1 << 19,), NORMAL, name="bias")), draw(make((1 << 19,), NORMAL), seed=1)):
        assert abs(float((values * (other - NORMAL.mean) / NORMAL.std).mean())) < limit


def test_an_element_is_what_the_definition_says() -> None:
    """Written out for one element far up: its counter's third and fourth word, Box and Muller's formula."""
    element, seed = (5 << 32) + 3, (7 << 32) + 9
    parameter = make((1 << 36,), Draw("normal", std=1.0), name="h.0.weight")
    digest = bytes.fromhex("ff6e92107b52f5")  # of SHA-256
    low, high = int.from_bytes(digest[:3], "big"), int.from_bytes(digest[3:], "big")
    counter = [torch.tensor([word]) for word in (3, (5 << 24) + low, high, 0xFFFFFFFF)]
    a, b, c, d = (int(word) for word in philox(counter, (9, 7)))
    first, second = (a << 21 | b >> 11), (c << 21 | d >> 11)
    radius = math.sqrt(-2 * math.log((first + 1) / 2**53))
    expected = radius * math.cos(2 * math.pi * second / 2**53)
    found = float(draw_elements(parameter, seed, torch.tensor([element])))
    assert found == pytest.approx(expected, rel=1e-13)


def test_the_arithmetic_is_exact_to_the_last_bits() -> None:
    x = torch.cat([torch.rand(100_000, dtype=torch.float64), torch.tensor([2.0**-53, 0.5, 1.0]).double()])
    logarithm = initialization._logarithm(x)
    assert float((logarithm - x.log()).abs().max()) < 1e-14
    assert float(logarithm[-1]) == 0
    turns = torch.randint(1 << 53, (100_000,))
    turns[:5] = torch.tensor([0, 1 << 51, 1 << 52, 3 << 51, (1 << 53) - 1])
    found = initialization._shape_normal(torch.zeros_like(turns), turns)
    expected = math.sqrt(106 * math.log(2)) * torch.cos(turns.double() * (math.tau / 2**53))
    assert float((found - expected).abs().max()) < 3e-14  # 2 pi itself is rounded


def test_later_draws_lie_over_earlier_ones() -> None:
    zeros = Draw("constant", value=0.0, run=(10, 15))
    scaled = replace(NORMAL.scaled(0.5), run=(3, 10))
    plain, both = draw(make((4, 5), NORMAL)).flatten(), draw(make((4, 5), NORMAL, zeros, scaled)).flatten()
    assert torch.equal(both[10:15], torch.zeros(5).double())
    torch.testing.assert_close(both[3:10], plain[3:10] * 0.5, rtol=1e-14, atol=0)
    assert torch.equal(both[:3], plain[:3])
    assert torch.equal(both[15:], plain[15:])


PLACEMENTS = {
    "rows": ((24, 10), Shard(0, (Segment(1, 24, 1, True),))),
    "columns": ((10, 24), Shard(1, (Segment(1, 24, 1, True),))),
    "packed qkv": ((72, 10), Shard(0, (Segment(3, 12, 2, True),))),
    "packed qkv, in x out": ((10, 72), Shard(1, (Segment(3, 12, 2, True),))),
    "grouped queries": (
        (48 + 12 + 12, 7),
        Shard(0, (Segment(1, 12, 4, True), Segment(1, 12, 1, True), Segment(1, 12, 1, False))),
    ),
    "padded vocabulary": ((61, 5), Shard(0, (Segment(1, 72, 1, True),), 61)),
    "middle": ((3, 24, 5), Shard(1, (Segment(2, 12, 1, True),))),
    "replicated": ((5, 7), Replicate()),
    "large": ((36, 3000), Shard(1, (Segment(1, 3000, 1, True),))),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_slices_are_cut_from_one_tensor(kind: str, size: int) -> None:
    shape, placement = PLACEMENTS[kind]
    for wanted in (NORMAL, TRUNCATED):
        parameter = Parameter("w", shape, torch.float64, placement=Placement(tensor=placement), initial=(wanted,))
        whole = draw(parameter, seed=3)
        assert len(whole.unique()) == whole.numel()
        slices = [draw_slice(parameter, rank_of(size, index), 3) for index in range(size)]
        for index, own in enumerate(slices):
            assert torch.equal(own, placement.take(whole, size, index))  # with its rows of padding
        assert torch.equal(placement.join(slices), whole)


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    parameter = make((CPU_CHUNK * 2,), TRUNCATED)
    whole = draw(parameter)
    for start, end in pairwise([0, 1, 2, 5, 13, 30, 64, 1000, CPU_CHUNK + 7]):
        assert torch.equal(draw_elements(parameter, 0, torch.arange(start, end)), whole[start:end])
    mixed = torch.randperm(999)
    assert torch.equal(draw_elements(parameter, 0, mixed), whole[mixed])


def test_half_precision_is_rounded_once() -> None:
    parameter = make((100, 10), NORMAL)
    half = draw(replace(parameter, dtype=torch.bfloat16))
    assert half.dtype is torch.bfloat16
    assert torch.equal(half, draw(parameter).bfloat16())


class Storages(TorchDispatchMode):
    """Keeps the size of the largest tensor made, in bytes."""

    largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_never_holds_more_than_its_slice(dim: int) -> None:
    placement = Shard(dim, (Segment(1, 1 << 12, 1, True),))
    parameter = Parameter(
        "w", (1 << 12, 1 << 12), torch.float32, placement=Placement(tensor=placement), initial=(TRUNCATED, NORMAL)
    )
    with Storages() as storages:  # type: ignore[no-untyped-call]
        own = draw_slice(parameter, rank_of(64, 17), 0)
    assert own.numel() == 1 << 18
    assert storages.largest == own.numel() * 4


def test_weights_and_masks_share_no_counter() -> None:
    """The fourth word of dropout's is the number of the call, which counts up from 0."""
    seen: list[int] = []

    def record(counter: list[Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
        seen.extend(counter[3].flatten().tolist())
        return philox(counter, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialization, "philox", record)
        draw(make((CPU_CHUNK,), replace(TRUNCATED, low=1.0, high=1.1)))
    assert max(seen) == 0xFFFFFFFF
    assert 0xFFFFFFFF - 2000 < min(seen) < 0xFFFFFFFF - 10  # an attempt for each word
    assert keep_mask(Randomness(call=3), 0.5, 0, (1, 4), torch.device("cpu")).shape == (1, 4)
