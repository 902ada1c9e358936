"""One state of ``torch.autocast``: which operators compute in fewer bits, and which in float32."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch._ops import OpOverload

Policy = Literal["lower", "float32", "sum", "widest", "inside"]
"""What becomes of an operator's floating arguments, float64 left alone.

"lower": all take autocast's dtype. "float32": all take float32. "sum": the first takes float32, unless the call names a
dtype. "widest": all take float32 if they have several. "inside": no kernel of its own casts; what it calls does, and so
its arguments are cast where torch's own result has autocast's dtype.
"""

KERNELS: dict[str, dict[Policy, str]] = {}
"""The operators that torch has an autocast kernel of, by device, besides those that all take float32."""

KERNELS["cpu"] = {
    "lower": """
        _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
        conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention
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
    "sum": """
        cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int prod
        prod.dim_int softmax.int sum sum.dim_IntList
    """,
    "widest": """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
    """,
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
    kernels, composed = (
        {name: policy for policy, names in table[device].items() for name in names.split()}
        for table in (KERNELS, _COMPOSED)
    )
    own = [name.removeprefix("aten::") for name in found]
    return {name: kernels.get(name, "float32") for name in own} | composed


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
        return POLICIES[self.device].get(target.__name__.removesuffix(".default"))
