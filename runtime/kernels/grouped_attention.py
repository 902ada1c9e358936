"""Fused attention in which several query heads share a key and a value head."""

from torch import Tensor
from torch.nn import functional

from autoptd.runtime.kernels.operands import HALF, check_operands


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention of `q` [b, a, s, d] with `k` and `v` [b, g, s, d]: query head i sees head i // (a / g).

    On a GPU only flash attention, in half precision, takes fewer heads: there the others are repeated first, where
    torch would write the scores out. Raises ValueError where g does not divide a, for other dtypes and two devices.
    """
    check_operands("grouped_attention", q=q, k=k, v=v)
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and k.shape[1] > 0
    if not fits or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"grouped_attention was given q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}, expected "
            "[b, a, s, d] and [b, g, s, d] with a multiple of g heads in q"
        )
    repeats = q.shape[1] // k.shape[1]
    if q.is_cuda and q.dtype not in HALF:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
