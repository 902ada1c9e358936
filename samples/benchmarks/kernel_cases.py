"""The kernels of a Transformer layer at a size: their operands, the same chain in plain torch, and the fewest bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoptd.runtime import kernels
from autoptd.runtime.comm.rank import Rank

HEAD = 128
EPS = 1e-5
FLOAT, INTEGER, BOOL = 4, 8, 1  # bytes of statistics, targets and masks


@dataclass(frozen=True)
class Sizes:
    """`rows` are s * b, in `batch` sequences; score matrices are [matrices, length, length]; dtype has `item` bytes."""

    rows: int
    batch: int
    hidden: int
    matrices: int
    length: int
    vocabulary: int
    item: int = 2

    @property
    def small(self) -> int:
        """Bytes of a [s, b, h]."""
        return self.item * self.rows * self.hidden

    @property
    def large(self) -> int:
        """Bytes of a [s, b, 4h]."""
        return 4 * self.small

    @property
    def vector(self) -> int:
        """Bytes of a [h]: a weight or a bias."""
        return self.item * self.hidden

    @property
    def tables(self) -> int:
        """Bytes of the cosines and sines."""
        return 2 * self.item * (self.rows // self.batch) * HEAD

    @property
    def scores(self) -> int:
        return self.item * self.matrices * self.length**2

    @property
    def seen(self) -> int:
        """Bytes of what a causal mask lets see of the scores."""
        return self.item * self.matrices * self.length * (self.length + 1) // 2

    @property
    def logits(self) -> int:
        return self.item * self.rows * self.vocabulary


@dataclass(frozen=True)
class Case:
    """A kernel: `ours` and `plain` take (rank, p, *operands), and `make` the operands of a size.

    `forward` and `backward` count what must move: inputs once and outputs once, with the row statistics that
    backward needs.
    """

    name: str
    make: Callable[[Sizes, Maker], list[Tensor]]
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    forward: Callable[[Sizes], int]
    backward: Callable[[Sizes], int]


@dataclass(frozen=True)
class Maker:
    """Random operands of one dtype on one device."""

    dtype: torch.dtype
    device: torch.device

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).requires_grad_()

    def draw_rows(self, sizes: Sizes, count: int, factor: int = 1) -> list[Tensor]:
        """Tensors [s, b, factor * h]."""
        shape = (sizes.rows // sizes.batch, sizes.batch, factor * sizes.hidden)
        return [self.draw(*shape) for _ in range(count)]

    def draw_scores(self, sizes: Sizes) -> Tensor:
        return self.draw(sizes.matrices, sizes.length, sizes.length)

    def draw_rotation(self, sizes: Sizes) -> list[Tensor]:
        """Queries [b, heads, s, d] as a projection leaves them in memory, and their tables [s, d]."""
        length = sizes.rows // sizes.batch
        flat = self.draw(sizes.batch, length, sizes.hidden // HEAD, HEAD)
        angles = torch.rand(length, HEAD // 2, device=self.device).repeat(1, 2) * 6
        return [
            flat.detach().transpose(1, 2).requires_grad_(),
            angles.cos().to(self.dtype),
            angles.sin().to(self.dtype),
        ]

    def draw_mask(self, sizes: Sizes) -> Tensor:
        """A bool mask [length, length], shared by all matrices; every query sees a key."""
        seen = torch.rand(sizes.length, sizes.length, device=self.device) < 0.5
        return seen.fill_diagonal_(True)

    def draw_targets(self, sizes: Sizes) -> Tensor:
        return torch.randint(sizes.vocabulary, (sizes.rows,), device=self.device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As Hugging Face's Llama does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * scaled.to(x.dtype)


def _softmax(scores: Tensor, seen: Tensor, p: float) -> Tensor:
    scores = (scores * HEAD**-0.5).masked_fill(~seen, -torch.inf)
    return F.dropout(scores.softmax(-1), p)


def _softmax_causally(rank: Rank, p: float, scores: Tensor) -> Tensor:
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return _softmax(scores, seen, p)


def _norm_layer(
    rank: Rank, p: float, x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor
) -> tuple[Tensor, Tensor]:
    added = F.dropout(x + bias, p) + residual
    return added, F.layer_norm(added, weight.shape, weight, norm_bias, EPS)


def _compare_columns(rank: Rank, p: float, logits: Tensor, target: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), target).to(logits.dtype)


CASES = (
    Case(
        "bias_gelu, 4h",
        lambda sizes, maker: [*maker.draw_rows(sizes, 1, 4), maker.draw(4 * sizes.hidden)],
        lambda rank, p, x, bias: kernels.bias_gelu(x, bias),
        lambda rank, p, x, bias: F.gelu(x + bias),
        lambda sizes: 2 * sizes.large + 4 * sizes.vector,  # x, bias -> result
        lambda sizes: 3 * sizes.large + 8 * sizes.vector,  # gradient, x, bias -> of x, of bias
    ),
    Case(
        "gated_product, 4h",
        lambda sizes, maker: maker.draw_rows(sizes, 2, 4),
        lambda rank, p, gate, up: kernels.gated_product(gate, up),
        lambda rank, p, gate, up: F.silu(gate) * up,
        lambda sizes: 3 * sizes.large,  # gate, up -> result
        lambda sizes: 5 * sizes.large,  # gradient, gate, up -> of gate, of up
    ),
    Case(
        "bias_dropout_add",
        lambda sizes, maker: [*maker.draw_rows(sizes, 2), maker.draw(sizes.hidden)],
        lambda rank, p, x, residual, bias: kernels.bias_dropout_add(rank, x, bias, residual, p, sample=1),
        lambda rank, p, x, residual, bias: F.dropout(x + bias, p) + residual,
        lambda sizes: 3 * sizes.small + sizes.vector,  # x, residual, bias -> result
        lambda sizes: 2 * sizes.small + sizes.vector,  # gradient, which is the residual's -> of x, of bias
    ),
    Case(
        "dropout",
        lambda sizes, maker: maker.draw_rows(sizes, 1),
        lambda rank, p, x: kernels.dropout(rank, x, p, 0, sample=1),
        lambda rank, p, x: F.dropout(x, p),
        lambda sizes: 2 * sizes.small,
        lambda sizes: 2 * sizes.small,
    ),
    Case(
        "rotary_embedding",
        lambda sizes, maker: maker.draw_rotation(sizes),
        lambda rank, p, x, cos, sin: kernels.rotary_embedding(x, cos, sin),
        lambda rank, p, x, cos, sin: _rotate(x, cos, sin),
        lambda sizes: 2 * sizes.small + sizes.tables,
        lambda sizes: 2 * sizes.small + sizes.tables,
    ),
    Case(
        "add_layer_norm, bias, dropout",
        lambda sizes, maker: [*maker.draw_rows(sizes, 2), *(maker.draw(sizes.hidden) for _ in range(3))],
        lambda rank, p, x, residual, bias, weight, norm_bias: kernels.add_layer_norm(
            rank, x, weight, norm_bias, EPS, bias, residual, p, sample=1
        ),
        _norm_layer,
        # x, residual, three vectors -> sum, normed, means and scales
        lambda sizes: 4 * sizes.small + 3 * sizes.vector + 2 * FLOAT * sizes.rows,
        # two gradients, sum, weight, means and scales -> of residual, of x, of three vectors
        lambda sizes: 5 * sizes.small + 4 * sizes.vector + 2 * FLOAT * sizes.rows,
    ),
    Case(
        "add_rms_norm",
        lambda sizes, maker: [*maker.draw_rows(sizes, 2), maker.draw(sizes.hidden)],
        lambda rank, p, x, residual, weight: kernels.add_rms_norm(rank, x, weight, EPS, residual=residual),
        lambda rank, p, x, residual, weight: (x + residual, _rms_norm(x + residual, weight)),
        # x, residual, weight -> sum, normed, scales
        lambda sizes: 4 * sizes.small + sizes.vector + FLOAT * sizes.rows,
        # two gradients, sum, weight, scales -> of both addends, of weight
        lambda sizes: 4 * sizes.small + 2 * sizes.vector + FLOAT * sizes.rows,
    ),
    Case(
        "layer_norm",
        lambda sizes, maker: [*maker.draw_rows(sizes, 1), *(maker.draw(sizes.hidden) for _ in range(2))],
        lambda rank, p, x, weight, bias: kernels.layer_norm(x, weight, bias, EPS),
        lambda rank, p, x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        # x, two vectors -> normed, means and scales
        lambda sizes: 2 * sizes.small + 2 * sizes.vector + 2 * FLOAT * sizes.rows,
        # gradient, x, weight, means and scales -> of x, of two vectors
        lambda sizes: 3 * sizes.small + 3 * sizes.vector + 2 * FLOAT * sizes.rows,
    ),
    Case(
        "rms_norm",
        lambda sizes, maker: [*maker.draw_rows(sizes, 1), maker.draw(sizes.hidden)],
        lambda rank, p, x, weight: kernels.rms_norm(x, weight, EPS),
        lambda rank, p, x, weight: _rms_norm(x, weight),
        lambda sizes: 2 * sizes.small + sizes.vector + FLOAT * sizes.rows,  # x, weight -> normed, scales
        # gradient, x, weight, scales -> of x, of weight
        lambda sizes: 3 * sizes.small + 2 * sizes.vector + FLOAT * sizes.rows,
    ),
    Case(
        "scaled_softmax, causal, dropout",
        lambda sizes, maker: [maker.draw_scores(sizes)],
        lambda rank, p, scores: kernels.scaled_softmax(rank, scores, None, True, HEAD**-0.5, p),
        _softmax_causally,
        lambda sizes: sizes.seen + 2 * sizes.scores,  # scores -> dropped softmax, softmax
        lambda sizes: 2 * sizes.seen + sizes.scores,  # gradient, softmax -> of scores
    ),
    Case(
        "scaled_softmax, mask, dropout",
        lambda sizes, maker: [maker.draw_scores(sizes), maker.draw_mask(sizes)],
        lambda rank, p, scores, seen: kernels.scaled_softmax(rank, scores, seen, False, HEAD**-0.5, p),
        lambda rank, p, scores, seen: _softmax(scores, seen, p),
        lambda sizes: 3 * sizes.scores + BOOL * sizes.length**2,  # scores, mask -> dropped softmax, softmax
        lambda sizes: 3 * sizes.scores,  # gradient, softmax -> of scores
    ),
    Case(
        "cross_entropy",
        lambda sizes, maker: [maker.draw(sizes.rows, sizes.vocabulary), maker.draw_targets(sizes)],
        lambda rank, p, logits, target: kernels.cross_entropy(rank, logits, target, logits.shape[1]),
        _compare_columns,
        # logits, target -> maxima and sums
        lambda sizes: sizes.logits + (INTEGER + 2 * FLOAT) * sizes.rows,
        # logits, target, maxima, sums and the row's factor -> of logits
        lambda sizes: 2 * sizes.logits + (INTEGER + 3 * FLOAT) * sizes.rows,
    ),
)
