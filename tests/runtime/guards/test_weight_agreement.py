"""Ranks with different weights are told apart by some elements of each tensor, whatever its dtype and layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.guards.weight_agreement import compare_weights
from autoptd.runtime.weights.file_tensor import FileTensor, Weights
from tests.runtime.chain import Chain

CHAIN = Chain((1, 1, 3), "gpipe", 1, 1, dtype=torch.float32)
NAME = "layer.0.row.bias"


def in_file(weights: Mapping[str, Tensor]) -> Weights:
    """Tensors that nobody can read to compare them: there is no such file."""
    return {name: FileTensor(Path("nowhere"), name, tuple(x.shape), x.dtype) for name, x in weights.items()}


def compare(change: Callable[[int, dict[str, Tensor]], Weights]) -> list[str]:
    """What each of three ranks says to weights that ``change(rank, weights)`` gives; "" for agreement."""

    def body(connection: Connection) -> str:
        given = change(connection.world.index, {name: x.clone() for name, x in CHAIN.weights().items()})
        try:
            compare_weights(CHAIN.manifest, connection, given)
        except RuntimeError as error:
            return str(error)
        return ""

    return run_threads(CHAIN.manifest, body)


def test_equal_weights_agree_in_any_layout_and_dtype() -> None:
    """A rank may have a copy that is laid out otherwise, and one in a wider dtype of the same values."""

    def change(rank: int, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        if rank == 1:
            return {name: x.t().contiguous().t() if x.dim() == 2 else x for name, x in weights.items()}
        return {name: x.double() for name, x in weights.items()} if rank == 2 else weights

    assert compare(change) == [""] * 3


@pytest.mark.parametrize("place", [0, -1])
def test_the_first_tensor_and_the_ranks_are_named(place: int) -> None:
    def change(rank: int, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        if rank == 2:
            weights[NAME].view(-1)[place] += 1e-3
        return weights

    for said in compare(change):
        assert f"{NAME} has other values on rank 2 than on rank 0; ranks [2] of 3 differ" in said
        assert "bind(weights=folder)" in said


def test_exchanged_elements_differ() -> None:
    def change(rank: int, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return {**weights, NAME: weights[NAME].flip(0) if rank == 0 else weights[NAME]}

    assert all("on rank 0 than on rank 1" in said for said in compare(change))


def test_values_differ_from_none_and_none_agree() -> None:
    def change(rank: int, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return {**weights, NAME: weights[NAME].to("meta") if rank == 1 else weights[NAME]}

    assert all(f"{NAME} has other values on rank 1" in said for said in compare(change))
    assert compare(lambda rank, weights: {n: x.to("meta") for n, x in weights.items()}) == [""] * 3


def test_files_are_not_read_and_agree_with_any() -> None:
    assert compare(lambda rank, weights: in_file(weights)) == [""] * 3
    assert compare(lambda rank, weights: weights if rank else in_file(weights)) == [""] * 3

    def change(rank: int, weights: dict[str, Tensor]) -> Weights:
        weights[NAME] += rank
        return weights if rank else in_file(weights)

    assert all("on rank 2 than on rank 1; ranks [2] of 3" in said for said in compare(change))
