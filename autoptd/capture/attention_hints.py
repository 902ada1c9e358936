"""Keep torch's encoders and decoders from reading the values of their masks while they are traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn.modules import transformer


@contextmanager
def unread_masks() -> Iterator[None]:
    """Let ``nn.TransformerEncoder`` take a mask as causal only if the user says so; the passes prove it later."""
    reads = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = _as_said
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = reads


def _as_said(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True
