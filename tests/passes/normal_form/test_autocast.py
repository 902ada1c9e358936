"""Autocast as casts: torch's own lists of operators, regions inside forward, and the same numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoptd.capture.export import capture
from autoptd.passes.ir.autocast import KERNELS, POLICIES, Autocast
from autoptd.passes.ir.program import Program
from autoptd.passes.normal_form.autocast import enter_region
from autoptd.passes.normal_form.normalize import normalize
from autoptd.runtime import aten
from autoptd.runtime.program.mesh import Mesh
from tests.interpret import run_graph

Forward = Callable[[Any, Tensor], Any]
BF16 = torch.bfloat16
NAMED = re.compile(r"[Dd]imname|\.names_")


class Small(nn.Module):
    """An embedding and a projection [2, 4, 6], then whatever `body` does with it."""

    def __init__(self, body: Forward) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.body = body

    def forward(self, idx: Tensor) -> Tensor:
        loss: Tensor = self.body(self, self.linear(self.embedding(idx))).float().square().mean()
        return loss


def make_small(body: Forward) -> tuple[Small, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Small(body), {"idx": torch.randint(0, 10, (2, 4))}


def normalized(model: nn.Module, inputs: dict[str, Tensor]) -> Program:
    return normalize(capture(model, mesh=Mesh(1, 1, 1), example_inputs=inputs))


def casts(program: Program) -> list[tuple[str, str]]:
    """What is cast, and to what, in order."""
    nodes = [n for n in program.stages[0].graph.nodes if n.target is aten.to.dtype]
    return [(str(n.args[0]), str(n.args[1]).removeprefix("torch.")) for n in nodes]


def check_same(
    model: nn.Module, inputs: dict[str, Tensor], program: Program, plain: Tensor, tolerance: float = 0.0
) -> None:
    """The loss is the bits of the plain run's, and so are the gradients, or within `tolerance` of the largest."""
    plain.backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    found = run_graph(program, weights, inputs)
    found.backward()
    assert torch.equal(found, plain)
    for name, parameter in model.named_parameters():
        expected, own = parameter.grad, weights[name].grad
        assert (expected is None) == (own is None), name
        if expected is not None and own is not None:
            assert own.dtype is torch.float32
            assert float((own - expected).abs().max()) <= tolerance * float(expected.abs().max()), name


# The lists

# The kernels that all take float32, in every version of torch that is tested.
FLOAT32 = {
    "cpu": """
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
    "cuda": """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d acos asin binary_cross_entropy binary_cross_entropy_with_logits cdist cosh
        cosine_embedding_loss cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm
        hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_sqrth log log10 log1p log2 logsumexp
        margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d
        norm.Scalar norm.ScalarOpt_dim nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar
        pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan
        triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """,
}


def listed(device: str) -> list[str]:
    return [name for row in (*KERNELS[device].values(), FLOAT32[device]) for name in row.split()]


def list_kernels(device: str) -> set[str]:
    """The operators that torch has an autocast kernel of; not those of named tensors, which torch 2.11 still has."""
    key = f"Autocast{device.upper()}"
    names = {n[6:] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    return {
        n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{n}", key) and not NAMED.search(n)
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_has_no_other_kernels_than_these(device: str) -> None:
    table = listed(device)
    kernels = list_kernels(device)
    assert len(set(table)) == len(table)
    assert kernels <= set(table)
    missing, of_later_versions, of_cuda_builds = (
        set(table) - kernels,
        {"linalg_matrix_sqrth", "rms_norm"},
        {"_cudnn_rnn"},
    )
    assert missing <= of_later_versions | of_cuda_builds
    assert missing.isdisjoint(POLICIES[device])
    rest = [name for name in FLOAT32[device].split() if name in kernels]
    assert {POLICIES[device][name] for name in rest} == {"float32"}


def test_cuda_policies_are_those_of_the_header() -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    macros = {
        "LOWER_PRECISION_FP": "lower",
        "FP32": "float32",
        "FP32_SET_OPT_DTYPE": "sum",
        "DIFFERENT_REDISPATCH_SIGNATURE": "float32",
        "PROMOTE": "widest",
    }
    seen = set()
    for macro, policy in macros.items():
        found = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*\n)", header)
        assert found is not None
        calls = re.findall(r"_\((\w+)(?:, (\w+))?\)", found[1]) + [
            tuple(n.split(".")) for n in re.findall(r'"(norm\.\w+)"', found[1])
        ]
        for name, overload in calls:
            full = f"{name}.{overload}" if overload else name
            if NAMED.search(full):
                continue
            assert POLICIES["cuda"][full] == policy, full
            seen.add(full)
    own = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"}
    own |= {"binary_cross_entropy", "linalg_matrix_sqrth", "rms_norm"}
    assert seen | own == set(listed("cuda"))


def image(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))


X, V, LABELS = image(6, 6), image(6), torch.arange(6)
ONE_ARGUMENT = """
    prod trace inverse pinverse linalg_inv linalg_svdvals linalg_eigvals linalg_matrix_rank linalg_cond fft_fft fft_ifft
    fft_rfft fft_fft2 fft_fftn fft_ihfft
"""
TWO_ARGUMENTS = "matmul mm linear linalg_vecdot cdist mse_loss l1_loss smooth_l1_loss huber_loss kl_div"


def call_with(name: str, *args: Tensor) -> Callable[[torch.dtype], Any]:
    return lambda dtype: getattr(torch.ops.aten, name)(*(x.to(dtype) for x in args))


CALLS: dict[str, Callable[[torch.dtype], Any]] = {
    **{name: call_with(name, X) for name in ONE_ARGUMENT.split()},
    **{name: call_with(name, X, X) for name in TWO_ARGUMENTS.split()},
    "addmm": call_with("addmm", X, X, X),
    "baddbmm": call_with("baddbmm", X[None], X[None], X[None]),
    "bmm": lambda t: torch.bmm(X[None].to(t), X[None].to(t)),
    "addbmm": lambda t: torch.addbmm(X.to(t), X[None].to(t), X[None].to(t)),
    "prelu": lambda t: functional.prelu(X.to(t), V[:1].to(t)),
    "conv1d": lambda t: functional.conv1d(image(1, 2, 6).to(t), image(3, 2, 1).to(t)),
    "conv2d": lambda t: functional.conv2d(image(1, 2, 6, 6).to(t), image(3, 2, 1, 1).to(t)),
    "conv_transpose2d.input": lambda t: functional.conv_transpose2d(image(1, 2, 6, 6).to(t), image(2, 3, 1, 1).to(t)),
    "scaled_dot_product_attention": call_with("scaled_dot_product_attention", *[image(1, 2, 4, 6)] * 3),
    "cross_entropy_loss": lambda t: functional.cross_entropy(X.to(t), LABELS),
    "nll_loss_nd": lambda t: functional.nll_loss(X.to(t), LABELS),
    "binary_cross_entropy": lambda t: functional.binary_cross_entropy(X.to(t), X.to(t)),
    "binary_cross_entropy_with_logits": lambda t: functional.binary_cross_entropy_with_logits(X.to(t), X.to(t)),
    "soft_margin_loss": lambda t: functional.soft_margin_loss(X.to(t), X.to(t)),
    "quantile": lambda t: torch.quantile(X.to(t), 0.5),
    "avg_pool3d": lambda t: functional.avg_pool3d(image(1, 2, 4, 4, 4).to(t), 2),
    "reflection_pad1d": lambda t: functional.pad(X.to(t), (1, 1), "reflect"),
    "replication_pad1d": lambda t: functional.pad(X.to(t), (1, 1), "replicate"),
    "grid_sampler": lambda t: functional.grid_sample(
        image(1, 2, 4, 4).to(t), image(1, 2, 2, 2).to(t), align_corners=False
    ),
    "cat": lambda t: torch.cat([X.to(t), X]),
    "stack": lambda t: torch.stack([X.to(t), X]),
    "einsum": lambda t: torch.einsum("ij,jk->ik", X.to(t), X.to(t)),
    "inner": lambda t: torch.inner(X.to(t), X.to(t)),
    "tensordot": lambda t: torch.tensordot(X.to(t), X.to(t), 1),
    "linalg_multi_dot": lambda t: torch.linalg.multi_dot([X.to(t)] * 3),
    "chain_matmul": lambda t: torch.ops.aten.chain_matmul([X.to(t)] * 3),
}
LEFT_ALONE: dict[str, Callable[[torch.dtype], Any]] = {
    "softmax.int": lambda t: X.to(t).softmax(-1),
    "log_softmax.int": lambda t: X.to(t).log_softmax(-1),
    "layer_norm": lambda t: functional.layer_norm(X.to(t), (6,), V, V),
    "rms_norm": lambda t: functional.rms_norm(X.to(t), (6,), V.to(t)),
    "sum": lambda t: X.to(t).sum(),
    "pow.Tensor_Scalar": lambda t: X.to(t) ** 2,
    "exp": lambda t: X.to(t).exp(),
    "rsqrt": lambda t: X.to(t).rsqrt(),
    "cumsum": lambda t: X.to(t).cumsum(0),
    "gelu": lambda t: functional.gelu(X.to(t)),
    "embedding": lambda t: functional.embedding(LABELS, X.to(t)),
    "mv": lambda t: X.to(t).mv(V.to(t)),
    "bilinear": lambda t: functional.bilinear(X.to(t), X.to(t), image(3, 6, 6).to(t)),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*CALLS, *LEFT_ALONE])
def test_torch_computes_on_the_cpu_as_the_lists_say(name: str, dtype: torch.dtype) -> None:
    policy = POLICIES["cpu"].get(name)
    if policy in ("lower", "inside"):
        expected = BF16
    elif policy is not None:
        expected = torch.float32
    else:
        expected = dtype
    assert (policy is None) == (name in LEFT_ALONE)
    if policy == "widest" and dtype is torch.float16:
        with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            CALLS[name](dtype)
        return
    with torch.autocast("cpu", BF16):
        found = {**CALLS, **LEFT_ALONE}[name](dtype)
    real = {torch.complex64: torch.float32, torch.int64: torch.float32}
    assert real.get(found.dtype, found.dtype) is expected


# Around compile and inside forward


def plain_body(m: Any, x: Tensor) -> Any:
    return m.norm(x) + m.linear(x.softmax(-1))


def nested(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", BF16):
        y = m.linear(x)
        with torch.autocast("cpu", enabled=False):
            y = m.linear(y.float()) + x
        with torch.autocast("cpu", torch.float16):
            z = y @ y.mT @ y
        y = m.linear(z) + torch.cat([x, y], 1)[:, :4]
    return y + m.linear(x)


def without_gradient(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", BF16):
        with torch.no_grad():
            scale = m.linear(x).abs()
        return m.linear(x) * scale


def written_in_place(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", BF16):
        y = x * 1.5
        first = m.linear(y)
        y += first
        y[:, :2] = first[:, :2]
        first *= 2.5 * x
        return m.linear(y) + first


def attend(m: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", BF16):
        q = x.view(2, 4, 3, 2).transpose(1, 2)
        mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
        y = functional.scaled_dot_product_attention(q, q * 2, q * 3, attn_mask=mask)
        return torch.einsum("bhsd,bhtd->bhst", y, y).sum((1, 3))


@pytest.mark.parametrize("body", [nested, without_gradient, written_in_place, attend])
def test_regions_are_casts(body: Forward) -> None:
    model, inputs = make_small(body)
    program = normalized(model, inputs)
    assert casts(program)
    # The gradient of what is written in place in two dtypes, or of a weight that torch casts once for several uses, is
    # rounded at another place.
    tolerance = 0.01 if body in (written_in_place, nested) else 0.0
    check_same(model, inputs, program, model(**inputs), tolerance)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_autocast_around_capture_holds_for_the_whole_program(dtype: torch.dtype) -> None:
    model, inputs = make_small(plain_body)
    with torch.autocast("cpu", dtype):
        program = normalized(model, inputs)
        loss = model(**inputs)
    name = str(dtype).removeprefix("torch.")
    assert casts(program)[:3] == [("embedding", name), ("linear_weight", name), ("linear_bias", name)]
    dtypes = {n.meta["val"].dtype for n in program.stages[0].graph.nodes if n.target is aten.linear.default}
    assert dtypes == {dtype}
    check_same(model, inputs, program, loss, tolerance=0.02)


def test_float64_is_left_alone() -> None:
    model, inputs = make_small(lambda m, x: torch.cat([x, m.norm(x)], 1))
    model.double()
    with torch.autocast("cpu", BF16):
        program = normalized(model, inputs)
    assert {dtype for _, dtype in casts(program)} <= {"float32"}  # its own .float()
    assert normalized(model, inputs).log == program.log


def on_cuda(body: Forward) -> Program:
    """The program captured under autocast of CUDA devices, which no device is needed for."""
    model, inputs = make_small(body)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        return normalized(model, inputs)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def test_cuda_norms_and_softmax_in_float32() -> None:
    program = on_cuda(plain_body)
    dtypes = {n.target: n.meta["val"].dtype for n in program.stages[0].graph.nodes if n.op == "call_function"}
    assert dtypes[aten.linear.default] is BF16
    assert dtypes[aten.softmax.int] is dtypes[aten.layer_norm.default] is torch.float32
    graph = program.stages[0].graph
    weights = dict(make_small(plain_body)[0].named_parameters())
    run_graph(program, weights, {"idx": torch.zeros(2, 4, dtype=torch.int64)})
    assert all(n.meta["val"].dtype is n.args[1] for n in graph.nodes if n.target is aten.to.dtype)


def test_a_region_of_the_inputs_device_is_of_the_programs() -> None:
    """Traced on the CPU, ``x.device.type`` is "cpu"."""

    def body(m: Any, x: Tensor) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return m.norm(x.float()) @ m.linear.weight

    program = on_cuda(body)
    product = next(n for n in program.stages[0].graph.nodes if n.target is aten.matmul.default)
    assert product.meta["val"].dtype is torch.float32


def test_states_of_two_devices() -> None:
    cpu, cuda = Autocast("cpu", BF16), Autocast("cuda", BF16)
    assert enter_region(cpu, "cuda", BF16, False) is cpu
    assert enter_region(cuda, "cpu", torch.float16, True) == Autocast("cuda", torch.float16)
    assert enter_region(None, "cuda", BF16, True) == cuda
    assert enter_region(None, "mps", BF16, False) is None
    with pytest.raises(ValueError, match="'mps'"):
        enter_region(None, "mps", BF16, True)


def test_an_operator_that_autocast_refuses_takes_float32() -> None:
    program = on_cuda(lambda m, x: functional.binary_cross_entropy(m.linear(x).sigmoid(), x.sigmoid()))
    (entropy,) = program.stages[0].graph.find_nodes(op="call_function", target=aten.binary_cross_entropy.default)
    assert {n.meta["val"].dtype for n in entropy.all_input_nodes} == {torch.float32}


def test_operators_that_cast_inside_are_named() -> None:
    def body(m: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            y, _ = torch.ops.aten.gru.input(
                x, x.new_zeros(1, 4, 2), [x.new_ones(6, 6), x.new_ones(6, 2)], False, 1, 0.0, True, False, False
            )
            return y

    model, inputs = make_small(body)
    with pytest.raises(ValueError, match="autocast"):
        normalized(model, inputs)
