"""One state of ``torch.autocast``: which operators compute in fewer bits, and which in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch._ops import OpOverload

Policy = Literal["lower", "float32", "sum", "widest", "inside", "refused"]
"""What becomes of an operator's floating arguments, float64 left alone.

"lower": all take autocast's dtype. "float32": all take float32. "sum": the first takes float32, unless the call names a
dtype. "widest": all take float32 if one has it. "inside": no kernel of its own casts; what it calls does, so that its
arguments are cast where torch's own result is in autocast's dtype. "refused": torch refuses it.
"""

KERNELS: dict[str, dict[Policy, str]] = {}
"""The operators that torch has an autocast kernel of, by device; not every version has them all."""

KERNELS["cpu"] = {
    "lower": """
        _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
        conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention
    """,
    "float32": """
        _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d
        binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve
        cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine
        fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn
        fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d
        grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex
        linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product
        linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_matrix_sqrth linalg_qr linalg_solve
        linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d
        max_unpool2d max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
        nanquantile nanquantile.scalar nll_loss nll_loss2d orgqr ormqr pinverse poisson_nll_loss polar prod
        prod.dim_int qr quantile quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center svd trace triangular_solve
        triplet_margin_loss view_as_complex
    """,
    "widest": "cat index_copy stack",
}

KERNELS["cuda"] = {
    "lower": """
        _convolution _convolution.deprecated _cudnn_rnn _scaled_dot_product_flash_attention _thnn_fused_gru_cell
        _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
        cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu
        rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """,
    "float32": """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
        cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div
        l1_loss layer_norm linalg_matrix_sqrth log log10 log1p log2 logsumexp margin_ranking_loss mse_loss
        multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d norm.Scalar norm.ScalarOpt_dim
        nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal
        renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d
        upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
        upsample_trilinear3d
    """,
    "sum": """
        cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod
        prod.dim_int softmax.int sum sum.dim_IntList
    """,
    "widest": """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
    """,
    "refused": "binary_cross_entropy",
}

# Operators that are made of those. On CUDA torch rounds log-probabilities to fewer bits between the two halves of
# cross_entropy_loss; here it is in float32 as on CPUs.
_COMPOSED: dict[str, dict[Policy, str]] = {
    "cpu": {"inside": "chain_matmul einsum inner linalg_multi_dot tensordot", "float32": "nll_loss_nd"},
    "cuda": {
        "float32": "cross_entropy_loss nll_loss_nd square linalg_norm linalg_norm.ord_str pairwise_distance",
        "widest": "inner",
    },
}


def _index(device: str) -> dict[str, Policy]:
    """Return the policy of each operator that this version of torch has an autocast kernel of, or makes of some."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    kernels = {name.removeprefix("aten::") for name in found}
    policies = {name: policy for policy, names in KERNELS[device].items() for name in names.split()}
    composed = {name: policy for policy, names in _COMPOSED[device].items() for name in names.split()}
    return {name: policy for name, policy in policies.items() if name in kernels} | composed


POLICIES: dict[str, dict[str, Policy]] = {device: _index(device) for device in KERNELS}


@dataclass(frozen=True)
class Autocast:
    """One state of autocast: whose lists of operators hold ("cpu", "cuda"), and the dtype of fewer bits."""

    device: str
    dtype: torch.dtype
    enabled: bool = True

    def policy(self, target: object) -> Policy | None:
        """Return how autocast treats the arguments of `target`; None if it does not."""
        if not self.enabled or not isinstance(target, OpOverload) or target.namespace != "aten":
            return None
        overload = target._overloadname
        name = target._opname if overload == "default" else f"{target._opname}.{overload}"
        return POLICIES[self.device].get(name)
