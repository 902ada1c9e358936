"""What a rank program computes beyond torch's own operators; each in plain torch."""

from autoptd.runtime.kernels.keyed_dropout import dropout
from autoptd.runtime.kernels.softmax_attention import attention
from autoptd.runtime.kernels.vocabulary_loss import cross_entropy
from autoptd.runtime.kernels.vocabulary_table import embedding

__all__ = ["attention", "cross_entropy", "dropout", "embedding"]
