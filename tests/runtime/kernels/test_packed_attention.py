"""Attention inside of packed documents is that of a mask, however the documents lie."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime import kernels
from autoptd.runtime.kernels import fused_attention

DOCUMENTS = {
    "of several lengths": [[4, 4, 4, 7, 1, 1], [2, 3, 3, 3, 3, 3]],
    "all of one": [[0] * 6, [5] * 6],
    "one for each token": [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]],
    "for all samples": [0, 0, 1, 1, 1, 2],
    "one row": [[0, 0, 1, 1, 1, 2]],
}


def draw(heads: int = 2, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 6, 8, **options) for n in (4, heads, heads))
    return q, k, v


def attend_densely(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    documents = documents.expand(len(q), q.shape[2])
    hidden = (documents[:, None, :, None] != documents[:, None, None, :]) | torch.ones(
        6, 6, dtype=torch.bool, device=q.device
    ).triu(1)
    scores = (q @ k.transpose(-2, -1) * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def compare(tensors: tuple[Tensor, Tensor, Tensor], documents: Tensor, rtol: float, atol: float) -> None:
    for x in tensors:
        x.requires_grad_()
    found, wanted = (call(*tensors, documents, scale=0.3) for call in (kernels.packed_attention, attend_densely))
    weight = torch.randn_like(wanted)
    for own, other in zip(
        (found, *torch.autograd.grad((found * weight).sum(), tensors)),
        (wanted, *torch.autograd.grad((wanted * weight).sum(), tensors)),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_do_not_see_each_other(name: str, heads: int) -> None:
    documents = torch.tensor(DOCUMENTS[name])
    compare(draw(heads=heads, dtype=torch.float64), documents, 1e-12, 1e-14)
    lengths = fused_attention._find_runs(documents.expand(2, 6))
    assert lengths is not None
    assert sum(lengths) == 12


def test_a_number_in_two_runs_is_one_document() -> None:
    documents = torch.tensor([[1, 1, 2, 1, 1, 2], [0, 0, 0, 1, 1, 1]])
    assert fused_attention._find_runs(documents) is None
    compare(draw(dtype=torch.float64), documents, 1e-12, 1e-14)


def test_a_sample_may_begin_with_the_number_that_another_has() -> None:
    assert fused_attention._find_runs(torch.tensor([[1, 1, 2], [2, 1, 1]])) == [2, 1, 1, 2]


def test_flash_attention_gets_all_samples_in_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where runs begin, and which rows they are: computed here by what stands for the kernel of a GPU."""

    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, longest: int, *more: int, **options: Any
    ) -> Tensor:
        assert options == {"scale": 0.3, "window_size": (-1, 0)}
        assert (ends is key_ends, more, ends.dtype) == (True, (longest,), torch.int32)
        lengths = ends.diff().tolist()
        assert max(lengths) == longest
        parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True)
        attend: Any = functional.scaled_dot_product_attention
        return torch.cat([attend(*part, is_causal=True, scale=0.3) for part in parts], 1).transpose(0, 1)

    module = "torch.nn.attention.varlen"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(varlen_attn=varlen_attn))
    monkeypatch.setattr(fused_attention, "_attend_by_run", fused_attention._attend_on_gpu)
    documents = torch.tensor(DOCUMENTS["of several lengths"])
    compare(draw(heads=4, dtype=torch.float64), documents, 1e-12, 1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu(card: str, dtype: torch.dtype, heads: int) -> None:
    for name in DOCUMENTS:
        tensors = draw(heads=heads, dtype=dtype, device=card)
        compare(tensors, torch.tensor(DOCUMENTS[name], device=card), 2e-2, 2e-2)


def test_the_shape_is_known_without_values() -> None:
    tensors = draw(dtype=torch.bfloat16, device="meta")
    assert kernels.packed_attention(*tensors, torch.empty(2, 6, device="meta")).shape == (2, 4, 6, 8)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = draw()
    with pytest.raises(ValueError, match="given 6 queries, 6 keys and 5 numbers of documents, expected"):
        kernels.packed_attention(q, k, v, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="given 6 queries, 5 keys and"):
        kernels.packed_attention(q, k[:, :, :5], v[:, :, :5], torch.zeros(2, 6))
    with pytest.raises(ValueError, match=r"packed_attention was given q .* with a multiple of g heads in q"):
        kernels.packed_attention(q[:, :3], k, v, torch.zeros(2, 6))
