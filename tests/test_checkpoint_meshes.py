"""A checkpoint of any mesh loads on any mesh: the logical tensors are the same bits, and training goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoints import CONFIGS, OPTIMIZERS, move

MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (2, 2, 2)]
DIVIDED = {"grouped": 2}  # the key/value heads there are


@pytest.mark.parametrize(
    ("kind", "saved", "loaded", "optimizer"),
    [
        ("packed", (1, 1, 1), (2, 1, 1), "adamw"),
        ("packed", (2, 2, 1), (1, 1, 1), "sgd"),
        ("packed", (4, 1, 1), (2, 1, 2), "adam"),
        ("tied", (1, 2, 1), (2, 1, 1), "adamw"),
        ("tied", (2, 1, 2), (1, 2, 2), "nadam"),
        ("grouped", (1, 2, 1), (2, 1, 1), "rmsprop"),
    ],
)
def test_a_checkpoint_moves(
    kind: str, saved: tuple[int, int, int], loaded: tuple[int, int, int], optimizer: str, tmp_path: Path
) -> None:
    move(kind, saved, loaded, optimizer, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_random_pairs(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(100):
        kind = draw.choice(sorted(CONFIGS))
        meshes = [mesh for mesh in MESHES if mesh[0] <= DIVIDED.get(kind, 4)]
        saved, loaded = draw.choice(meshes), draw.choice(meshes)
        move(kind, saved, loaded, draw.choice(sorted(OPTIMIZERS)), tmp_path / str(number))
