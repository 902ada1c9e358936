"""FlexAttention is written out as torch defines it, divided over heads, and refused where it is something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import autoptd
from autoptd.capture.flex_attention import write_flex_attention
from autoptd.capture.source_lines import CaptureError
from samples.wild.decoder import LENGTH, Attention, make_inputs
from samples.wild.flex import Biased, Documents, MaskedAttention, Relative, Windowed, causal, vary

SLOW = ((2, 2, 1), (1, 2, 2), (4, 1, 1))
MESHES = [(2, 1, 1), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in SLOW)]
BIAS = torch.randn(1, 2, LENGTH, LENGTH, dtype=torch.float64)
SLOPES, TABLE = torch.rand(3, 4), torch.randn(LENGTH, 2, 4)
DOCUMENTS = (torch.arange(LENGTH) // torch.tensor([[3], [5]])).long()

SCORE_MODS: list[Any] = [
    flex._identity,
    lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    lambda s, b, h, q, k: 20 * torch.tanh(s / 20) + BIAS[0][h % 2][q][k],
    lambda s, b, h, q, k: s + SLOPES[k % 3, h] * TABLE[q - k, 1, h] + SLOPES[0, h],
    lambda s, b, h, q, k: s * (h + 1) - (q // 3 - k).abs().to(s.dtype) + b,
]
MASK_MODS: list[Any] = [
    flex.noop_mask,
    causal,
    lambda b, h, q, k: (q > k) | (h == 0),  # the first query of most heads sees none
    lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & ~(q < k),
]


@pytest.mark.parametrize("score_mod", SCORE_MODS)
@pytest.mark.parametrize("mask_mod", MASK_MODS)
def test_it_is_what_torch_defines(score_mod: Any, mask_mod: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, LENGTH, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    )
    mask = create_block_mask(mask_mod, 2, 4, LENGTH, LENGTH, device="cpu")
    found: list[Tensor] = []
    with write_flex_attention():
        own = flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
    real, lse, _ = math_attention(q, k, v, score_mod, mask.as_tuple(), 8**-0.5, {})
    for out, sums in ((own[0], own[1].lse), (real, lse * math.log(2))):
        assert sums is not None
        total = out.square().sum() + sums.nan_to_num(neginf=0).sum()
        found += [out, sums, *torch.autograd.grad(total, (q, k, v))]
    for one, other in zip(found[:5], found[5:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        pytest.param(Windowed, "2 sdpa with mask (constant)", marks=pytest.mark.slow),
        (Biased, "2 sdpa with mask (additive bias, causal)"),
        (Relative, "2 softmax only causal because aten.add"),
        pytest.param(MaskedAttention, "2 sdpa with mask (causal inside of documents)", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mesh", MESHES)
def test_its_mask_is_proved_and_its_heads_divided(
    attention: type[nn.Module], words: str, mesh: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    model = vary(attention, Documents)() if attention is MaskedAttention else vary(attention)()
    program = autoptd.compile(model, mesh, example_inputs=make_inputs(), num_microbatches=2)
    assert any(words in line for line in program.log), program.log
    assert program.verify().ok()
    rows = program.rank(0).parameters["blocks.0.attention.query.weight"]
    assert rows[0][0] == mesh[0] * rows[1][0]


def refuse(attend: Callable[..., Tensor], match: str) -> None:
    attention = type("Refused", (Attention,), {"attend": staticmethod(attend)})
    with pytest.raises(CaptureError, match=match):
        autoptd.compile(vary(attention)(), (1, 1, 1), example_inputs=make_inputs())


@pytest.mark.parametrize(
    ("mod", "match"),
    [
        (lambda s, b, h, q, k: s + k.sum(), "calls sum, which does not work element by element"),
        (lambda s, b, h, q, k: s + s.softmax(0), "calls softmax"),
        (lambda s, b, h, q, k: s + torch.ones(2, 3)[q], "index tensors by a number for each dimension"),
        (lambda s, b, h, q, k: s + torch.ones(3)[q > k], "indexes by something else"),
        (lambda s, b, h, q, k: s[q], "indexes by something else"),
    ],
)
def test_what_is_not_of_one_score_is_refused(mod: Any, match: str) -> None:
    refuse(lambda q, k, v: flex_attention(q, k, v, score_mod=mod), match)


@pytest.mark.parametrize("hidden", [False, True])
def test_blocks_must_hide_what_the_mask_does(hidden: bool) -> None:
    count = torch.tensor([[[1, 1 if hidden else 2]]], dtype=torch.int32)
    order = torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=LENGTH // 2, mask_mod=causal)
    if hidden:
        refuse(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), "hide other keys than its mask_mod")
        return
    attention = type("Given", (Attention,), {"attend": lambda _, q, k, v: flex_attention(q, k, v, block_mask=mask)})
    program = autoptd.compile(vary(attention)(), (1, 1, 1), example_inputs=make_inputs())
    assert any("2 sdpa causal" in line for line in program.log)


def test_blocks_of_the_batch_are_refused() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count = torch.full((1, 1, 2), 2, dtype=torch.int32)
        order = (q[:1, :1, :2, :2] * 0).to(torch.int32)
        mask = BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=LENGTH // 2, mask_mod=causal)
        out: Tensor = flex_attention(q, k, v, block_mask=mask)
        return out

    refuse(attend, "blocks cannot be compared with its mask_mod")
