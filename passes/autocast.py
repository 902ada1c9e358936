"""What ``torch.autocast`` does at each operator, as casts: which operators compute in fewer bits, which in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoptd.passes.calls import where
from autoptd.passes.functionalize import is_mutation
from autoptd.passes.rewrites import Writer
from autoptd.runtime import aten

Policy = Literal["lower", "float32", "sum", "widest", "inside", "refused"]
"""What becomes of an operator's floating arguments, float64 left alone.

"lower": all take autocast's dtype. "float32": all take float32. "sum": the first takes float32, unless the call names a
dtype. "widest": all take float32 if one has it. "inside": no kernel of its own casts; what it calls does, so that its
arguments are cast where torch's own result is in autocast's dtype. "refused": torch refuses it.
"""

_CPU: dict[Policy, str] = {
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
_CUDA: dict[Policy, str] = {
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
KERNELS: dict[str, dict[Policy, str]] = {"cpu": _CPU, "cuda": _CUDA}
"""The operators that torch has an autocast kernel of, by device; not every version has them all."""

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
    """The policy of each operator that this version of torch has an autocast kernel of, or makes of some."""
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
        """What becomes of the arguments of `target`; None: nothing."""
        if not self.enabled or not isinstance(target, OpOverload) or target.namespace != "aten":
            return None
        overload = target._overloadname
        name = target._opname if overload == "default" else f"{target._opname}.{overload}"
        return POLICIES[self.device].get(name)


def enter_region(outer: Autocast | None, device: str, dtype: torch.dtype, enabled: bool) -> Autocast | None:
    """The state inside a region ``torch.autocast(device, dtype, enabled)`` of the forward, in one where `outer` holds.

    Models are traced on the CPU, so that a region of ``x.device.type`` says "cpu" whatever the program will run on: it
    speaks of the device that `outer` is of. A region of CUDA devices has no say in a model that autocasts on the CPU.
    Raises ValueError for an enabled region of other devices.
    """
    if device not in KERNELS:
        if enabled:
            raise ValueError(
                f"torch.autocast({device!r}) inside forward is not supported, only 'cpu' and 'cuda': cast explicitly, "
                "or leave it out of the model"
            )
        return outer
    if outer is None:
        return Autocast(device, dtype, enabled)
    if device == "cuda" and outer.device == "cpu":
        return outer
    return Autocast(outer.device, dtype, enabled)


def find_casts(
    state: Autocast, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[frozenset[fx.Node], torch.dtype] | None:
    """Which arguments of the call `node`, of the new graph, autocast casts, and to what; None: none.

    Raises ValueError, with file and line, for what torch refuses under autocast.
    """
    policy = state.policy(node.target)
    eligible = [n for n in _nodes((args, kwargs)) if is_eligible(n.meta["val"])]
    if policy is None or not eligible:
        return None
    dtype = torch.float32
    if policy == "refused":
        raise ValueError(
            f"{where(node)}: {node.target} is unsafe to autocast, torch says: use the form with_logits, or disable "
            "autocast there"
        )
    if policy == "lower" or (policy == "inside" and node.meta["val"].dtype == state.dtype):
        dtype = state.dtype
    elif policy == "inside":
        return None
    elif policy == "widest":
        dtypes = {n.meta["val"].dtype for n in eligible}
        if len(dtypes) == 1:
            return None
        if not dtypes <= {torch.float32, state.dtype}:
            raise ValueError(
                f"{where(node)}: {node.target} gets {', '.join(sorted(map(str, dtypes)))} under autocast of "
                f"{state.dtype}, which torch does not join; cast its arguments explicitly"
            )
    elif policy == "sum":
        first = args[0]
        if first not in eligible or _says_dtype(node.target, args, kwargs):
            return None
        eligible = [first]
    cast = frozenset(n for n in eligible if n.meta["val"].dtype != dtype)
    return (cast, dtype) if cast else None


def is_eligible(value: object) -> bool:
    """Whether autocast may cast a value: floating and not float64."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return list(dict.fromkeys(found))


def _says_dtype(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call says in which dtype its result is."""
    names = [argument.name for argument in target._schema.arguments]
    if "dtype" not in names:
        return False
    place = names.index("dtype")
    return (args[place] if place < len(args) else kwargs.get("dtype")) is not None


class Casts:
    """Writes autocast's casts into a normalised graph: of each value once per dtype, where it is first used so.

    A parameter is cast at each of its uses, which may be in several stages: there it is, and its cast need not be sent.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._known: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def cast(
        self, state: Autocast, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments, of the new graph, of the exported call `node`, cast as `state` has it.

        Raises ValueError as `find_casts` does.
        """
        found = find_casts(state, node, args, kwargs)
        if found is None:
            return args, kwargs
        cast, dtype = found

        def read(source: fx.Node) -> fx.Node:
            return self._take(source, dtype, node) if source in cast else source

        return fx.map_arg(args, read), fx.map_arg(kwargs, read)

    def _take(self, source: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        known = self._known.get((source, dtype))
        if known is not None:
            return known
        meta = {**user.meta, "val": _retype(source.meta["val"], dtype)}
        made = self.writer.emit(aten.to.dtype, (source, dtype), meta)
        if source.op != "get_attr":
            self._known[source, dtype] = made
        return made


def describe_result(
    state: Autocast | None, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The ``meta`` of the exported call `node`, which becomes `target` of `args`, with the dtypes that it gives.

    The model was traced under autocast on the CPU, so that there another dtype than the traced one means that torch
    casts inside of the operator: ValueError.
    """
    traced = node.meta["val"]
    given = [n.meta["val"] for n in _nodes((args, kwargs))]
    same = [n.meta["val"] for n in _nodes((node.args, node.kwargs))]
    enabled = state is not None and state.enabled
    if not any(isinstance(v, Tensor) and v.is_floating_point() for v in given) or not (
        enabled or is_mutation(node.target) or _dtypes(given) != _dtypes(same)
    ):
        return node.meta
    try:
        with torch.no_grad():
            found = target(*_meta_values(args), **_meta_values(kwargs))
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{where(node)}: under autocast {node.target} gets {_names(given)}, which it does not take "
            f"({str(error).splitlines()[0]}); cast its arguments explicitly"
        ) from error
    checked = state is not None and state.enabled and state.device == "cpu" and not is_mutation(node.target)
    if checked and _dtypes(found) != _dtypes(traced):
        raise ValueError(
            f"{where(node)}: under autocast torch casts inside of {node.target}, which then gives {_names(traced)}, "
            f"here {_names(found)}; call it with autocast disabled, and cast explicitly"
        )
    return {**node.meta, "val": _with_dtypes(traced, found)}


def _meta_values(value: Any) -> Any:
    """Arguments to run an operator with on the meta device."""

    def place(x: Any) -> Any:
        return torch.device("meta") if isinstance(x, torch.device) else x

    return fx.node.map_aggregate(fx.map_arg(value, lambda n: n.meta["val"]), place)


def _dtypes(value: Any) -> list[torch.dtype]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v.dtype for v in values if isinstance(v, Tensor)]


def _names(value: Any) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _dtypes(value))


def _retype(value: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=dtype, device="meta")


def _with_dtypes(traced: Any, found: Any) -> Any:
    if isinstance(traced, (list, tuple)):
        return type(traced)(_with_dtypes(t, f) for t, f in zip(traced, found, strict=True))
    if not isinstance(traced, Tensor) or traced.dtype == found.dtype:
        return traced
    return _retype(traced, found.dtype)
