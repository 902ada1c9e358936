"""Random numbers by a key, the same on every mesh; programs make other distributions of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.kernels.keyed_dropout import place_key
from autoptd.runtime.kernels.registration import define_operator
from autoptd.runtime.randomness import DRAWS, Dim, Key, Shape, draw_uniform


def uniform(
    rank: Rank, x: Tensor, operator: int, sample: Dim = None, divided: Dim = None, shape: Shape = None
) -> Tensor:
    """Draw a number between 0 and 1, both excluded, for each element of `x`, of which only shape and dtype count.

    They are keyed as the mask of `dropout` is, but drawn in evaluation too; None `sample`: all samples share them.
    """
    key, moment = place_key(rank, x, DRAWS + operator, shape, sample=sample, divided=divided)
    return uniform_operator(moment, key, list(x.shape), x.dtype)  # type: ignore[no-any-return]


@define_operator("uniform", lambda moment, _, shape, dtype: moment.new_empty(shape, dtype=dtype))
def uniform_operator(moment: Tensor, key: Key, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Compute `uniform`, contiguous."""
    return draw_uniform(key, moment, shape, dtype)
