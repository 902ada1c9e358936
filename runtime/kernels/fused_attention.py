"""Fused attention in which several query heads share a key and a value head, and inside of packed documents."""

from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoptd.runtime.kernels.operands import HALF, check_operands

FLASH_SIZE = 256  # the largest head that torch's flash attention takes


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """Compute attention of `q` [b, a, s, d] with `k` and `v` [b, g, s, d]: query head i sees head i // (a / g).

    On a GPU only flash attention, in half precision, takes fewer heads: there the others are repeated first, where
    torch would write the scores out. Raises ValueError where g does not divide a, for other dtypes and two devices.
    """
    _check("grouped_attention", q, k, v)
    repeats = q.shape[1] // k.shape[1]
    if q.is_cuda and q.dtype not in HALF:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)


def _check(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    check_operands(kernel, q=q, k=k, v=v)
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and k.shape[1] > 0
    if not fits or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{kernel} was given q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}, expected "
            "[b, a, s, d] and [b, g, s, d] with a multiple of g heads in q"
        )


def packed_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float | None = None) -> Tensor:
    """Compute causal attention inside of documents: a query sees keys up to its own, of its number in `documents`.

    `q` is [b, a, s, d], `k` and `v` [b, g, s, d], `documents` [b, s], [1, s] or [s]. Where each number of a sample
    stands in one run, the scores of each run are computed alone. On a GPU torch's varlen attention does so, in half
    precision; the host waits there, as it reads where runs begin. Elsewhere the mask is written out.
    """
    _check("packed_attention", q, k, v)
    (b, heads, s, d), keys, numbers = q.shape, k.shape[2], documents.shape[-1]
    if not s == keys == numbers:
        given = f"{s} queries, {keys} keys and {numbers} numbers of documents"
        raise ValueError(f"packed_attention was given {given}, expected as many of each")
    documents = documents.expand(b, s)
    fits = q.dtype in HALF and d % 8 == 0 and d == v.shape[3] <= FLASH_SIZE
    alone = not q.is_cuda or (fits and torch.cuda.get_device_capability(q.device) >= (8, 0))
    lengths = _find_runs(documents) if alone else None
    if q.is_cuda:  # neither with a mask nor in torch 2.11's varlen attention do heads share keys there
        k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    if lengths is None:
        seen = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        return functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    found: Tensor = (_attend_on_gpu if q.is_cuda else _attend_by_run)(rows, lengths, scale)
    return found.view(b, s, heads, v.shape[3]).transpose(1, 2)


def _find_runs(documents: Tensor) -> list[int] | None:
    """Return the lengths of the samples' runs of one number; None if one stands in two runs, and without values."""
    if documents.is_meta:
        return None
    begins = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True).flatten().nonzero()[:, 0]
    numbers, first = documents.flatten()[begins].tolist(), begins.tolist()
    alone = {(begin // documents.shape[1], number) for begin, number in zip(first, numbers, strict=True)}
    ends = pairwise([*first, documents.numel()])
    return [end - begin for begin, end in ends] if len(alone) == len(first) else None


def _attend_by_run(rows: list[Tensor], lengths: list[int], scale: float | None) -> Tensor:
    options: dict[str, Any] = {"is_causal": True, "scale": scale, "enable_gqa": True}
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in rows), strict=True)
    return torch.cat([functional.scaled_dot_product_attention(*x, **options)[0].transpose(0, 1) for x in parts])


def _attend_on_gpu(rows: list[Tensor], lengths: list[int], scale: float | None) -> Tensor:
    attend = import_module("torch.nn.attention.varlen").varlen_attn  # which takes 3 s, for torch's compiler
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=rows[0].device)
    longest = max(lengths)
    return attend(*rows, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))  # type: ignore[no-any-return]
