"""What a rank program computes beyond torch's own operators; each in plain torch."""

from autoptd.runtime.kernels.attention import attention
from autoptd.runtime.kernels.cross_entropy import cross_entropy
from autoptd.runtime.kernels.dropout import dropout
from autoptd.runtime.kernels.embedding import embedding

__all__ = ["attention", "cross_entropy", "dropout", "embedding"]
