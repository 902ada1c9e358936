"""Torch's operators, each on a small model's activations: divided or laid out anew, it takes the plain model's step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoptd

VOCABULARY, LENGTH, WIDTH = 32, 8, 8
Operator = Callable[[Tensor, Tensor], Any]  # of activations [b, s, 8] and a parameter [8]

ELEMENTWISE = """
    abs acos asinh atan ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac i0 isnan lgamma log
    log10 log1p log2 logit nan_to_num neg positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc
    sinh sqrt square tan tanh trunc
""".split()  # noqa: SIM905
ACTIVATIONS = """
    celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus
    softshrink softsign tanhshrink
""".split()  # noqa: SIM905
WITH_ANOTHER = """
    add sub mul div maximum minimum max min atan2 copysign fmax fmin fmod remainder hypot logaddexp ldexp xlogy pow
    nextafter gt ge lt le eq ne logical_and logical_or
""".split()  # noqa: SIM905
REDUCTIONS = """
    sum mean prod std var amax amin logsumexp norm median max min any all argmax count_nonzero nansum nanmean nanmedian
    mode softmax log_softmax cumsum cumprod logcumsumexp cummax cummin sort argsort
""".split()  # noqa: SIM905
OVER_ALL = """
    sum mean prod std var amax amin norm median max min any all argmax count_nonzero nansum nanmean
""".split()  # noqa: SIM905
OVER_SEVERAL = ("sum", "mean", "std", "var", "amax", "amin", "logsumexp")
# Wrong once.
FIRST = ("std unbiased", "var unbiased", "repeat_interleave all")


def apply(function: Callable[..., Tensor], x: Tensor, p: Tensor) -> Tensor:
    return function(x.sigmoid()).to(x.dtype)


def activate(function: Callable[..., Tensor], x: Tensor, p: Tensor) -> Tensor:
    return function(x)


def combine(function: Callable[..., Tensor], x: Tensor, p: Tensor) -> Tensor:
    return function(x.sigmoid(), p.abs()).to(x.dtype)


def reduce(name: str, dim: Any, x: Tensor, p: Tensor) -> Tensor:
    found = getattr(torch, name)(x) if dim is None else getattr(torch, name)(x, dim=dim)
    first: Tensor = found if isinstance(found, Tensor) else found[0]
    return first.to(x.dtype)


def spread(name: str, x: Tensor, p: Tensor) -> Tensor:
    kept = getattr(torch, name)(x, -1, keepdim=True)
    return x * (kept if isinstance(kept, Tensor) else kept[0])


OPERATORS: dict[str, Operator] = {
    **{n: partial(apply, getattr(torch, n)) for n in ELEMENTWISE},
    **{n: partial(activate, getattr(F, n)) for n in ACTIVATIONS},
    **{f"{n} of two": partial(combine, getattr(torch, n)) for n in WITH_ANOTHER},
    **{f"{n} {d}": partial(reduce, n, d) for n in REDUCTIONS for d in (0, 1, 2)},
    **{f"{n} of all": partial(reduce, n, None) for n in OVER_ALL},
    **{f"{n} {d}": partial(reduce, n, d) for n in OVER_SEVERAL for d in ((0, 1), (1, 2), (0, 2), (0, 1, 2))},
    **{f"{n} kept": partial(spread, n) for n in ("sum", "mean", "var", "amax", "median", "max", "logsumexp")},
    # Statistics
    "std unbiased": lambda x, p: x.std(unbiased=False),
    "var unbiased": lambda x, p: x.var(True),
    "std corrected": lambda x, p: x.std(correction=0),
    "var unbiased of a row": lambda x, p: x.var(-1, False),
    "var_mean": lambda x, p: torch.var_mean(x, -1)[0],
    "std_mean": lambda x, p: torch.std_mean(x, (0, 1))[1],
    "quantile": lambda x, p: x.quantile(0.5, -1),
    "norm 1": lambda x, p: x.norm(1),
    "vector_norm": lambda x, p: torch.linalg.vector_norm(x, dim=(1, 2)),
    "aminmax": lambda x, p: torch.aminmax(x, dim=-1)[1],
    # Elements of several
    "addcmul": lambda x, p: torch.addcmul(x, x, p),
    "addcdiv": lambda x, p: torch.addcdiv(x, x, p),
    "lerp": lambda x, p: torch.lerp(x, x * 2, p),
    "clamp": lambda x, p: x.clamp(-0.1, 0.1),
    "clamp of two": lambda x, p: torch.clamp(x, min=-p, max=p),
    "where": lambda x, p: torch.where(x > 0, x, p),
    "where number": lambda x, p: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x, p: x.masked_fill(x > 0, 0.0),
    "tril": lambda x, p: x.tril(),
    "float": lambda x, p: x.float().to(x.dtype),
    "in place": lambda x, p: (x * 1).add_(1).mul_(p),
    "detach": lambda x, p: x.detach() * x,
    "numel": lambda x, p: x / x.numel(),
    "one minus": lambda x, p: 1 - x,
    "two to": lambda x, p: 2**x,
    "positions": lambda x, p: x.cumsum(1) / torch.arange(1, LENGTH + 1)[None, :, None],
    "isin": lambda x, p: torch.isin(x, p).to(x.dtype),
    # Products
    "matmul": lambda x, p: x @ x.mT,
    "matmul vector": lambda x, p: x @ p,
    "inner": lambda x, p: torch.inner(x, p),
    "outer": lambda x, p: torch.outer(p, p),
    "tensordot": lambda x, p: torch.tensordot(x, p, 1),
    "vecdot": lambda x, p: torch.linalg.vecdot(x, x),
    "cross": lambda x, p: torch.linalg.cross(x[..., :3], x[..., 3:6]),
    "baddbmm": lambda x, p: torch.baddbmm(x @ x.mT, x, x.mT),
    "addmm": lambda x, p: torch.addmm(p, x[0], x[0].T @ x[0]),
    "bilinear": lambda x, p: F.bilinear(x, x, p.view(1, 1, WIDTH).expand(WIDTH, WIDTH, WIDTH)),
    "einsum weight": lambda x, p: torch.einsum("bsh,h->bs", x, p),
    "einsum pair": lambda x, p: torch.einsum("bsh,bth->bst", x, x),
    "einsum rest": lambda x, p: torch.einsum("...h,h->...h", x, p),
    "triangle": lambda x, p: torch.ones(LENGTH, LENGTH).tril().double() @ x,
    "cdist": lambda x, p: torch.cdist(x, x),
    "det": lambda x, p: torch.linalg.det(x),
    "matrix_exp": lambda x, p: torch.matrix_exp(x),
    "rfft": lambda x, p: torch.fft.rfft(x, dim=-1).abs(),
    "rfft positions": lambda x, p: torch.fft.irfft(torch.fft.rfft(x, dim=1), dim=1),
    # Shapes
    "squeeze": lambda x, p: x[:, :, :1].squeeze(-1),
    "squeeze all": lambda x, p: x[:, None].squeeze(),
    "movedim": lambda x, p: x.movedim(-1, 0).movedim(0, -1),
    "swapaxes": lambda x, p: x.swapaxes(1, 2).swapdims(1, 2),
    "unflatten": lambda x, p: x.unflatten(-1, (2, 4)).flatten(-2),
    "ravel": lambda x, p: x.ravel().view_as(x),
    "expand": lambda x, p: x[:, :, None].expand(-1, -1, 3, -1),
    "as_strided": lambda x, p: x.contiguous().as_strided(x.shape, x.stride()),
    "complex": lambda x, p: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * 1j).flatten(2),
    "unfold": lambda x, p: x.unfold(1, 3, 1),
    "diff": lambda x, p: x.diff(dim=1),
    "diagonal": lambda x, p: torch.diagonal(x, dim1=1, dim2=2),
    # Parts
    "roll": lambda x, p: x.roll(1, 1),
    "roll two": lambda x, p: x.roll((1, 2), (1, 2)),
    "roll all": lambda x, p: x.roll(1),
    "flip": lambda x, p: x.flip(1, 2),
    "rot90": lambda x, p: torch.rot90(x, 1, (1, 2)),
    "tile": lambda x, p: x.tile(2),
    "repeat": lambda x, p: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x, p: x.repeat_interleave(2, 1),
    "repeat_interleave all": lambda x, p: x.repeat_interleave(2),
    "pad": lambda x, p: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "pad circular": lambda x, p: F.pad(x, (1, 1), mode="circular"),
    "pad reflect": lambda x, p: F.pad(x, (1, 1), mode="reflect"),
    "chunk": lambda x, p: torch.cat(x.chunk(2, -1)[::-1], -1),
    "split": lambda x, p: torch.cat(x.split([3, 5], -1)[::-1], -1),
    "tensor_split": lambda x, p: x.tensor_split(3, -1)[1],
    "unbind": lambda x, p: torch.stack(x.unbind(1), 1),
    "stack": lambda x, p: torch.stack([x, x], 2).flatten(1, 2),
    "cat a parameter": lambda x, p: torch.cat([p[None, None].expand(x.shape[0], 1, -1), x], 1)[:, 1:],
    "positions one by one": lambda x, p: sum(x[:, i] for i in range(LENGTH)),
    "step": lambda x, p: x[..., ::2],
    "from the end": lambda x, p: x[:, -3:],
    "rows": lambda x, p: x[:, [1, 0]],
    "columns": lambda x, p: x[..., [1, 0, 3]],
    "index_select": lambda x, p: x.index_select(-1, torch.tensor([1, 0, 3])),
    "gather": lambda x, p: x.gather(-1, (x > 0).long()),
    "take_along_dim": lambda x, p: torch.take_along_dim(x, x.argsort(-1), -1),
    "topk": lambda x, p: x.topk(2, -1)[0],
    "kthvalue": lambda x, p: x.kthvalue(2, -1)[0],
    "scatter": lambda x, p: torch.zeros_like(x).scatter(-1, (x > 0).long(), x),
    "scatter_add": lambda x, p: torch.zeros_like(x).scatter_add(-1, (x > 0).long(), x),
    "index_add": lambda x, p: x.index_add(-1, torch.tensor([1, 0]), x[..., :2]),
    "index_fill": lambda x, p: x.index_fill(-1, torch.tensor([1]), 0.0),
    "index_copy": lambda x, p: x.index_copy(-1, torch.tensor([1, 0]), x[..., :2]),
    "select_scatter": lambda x, p: x.select_scatter(x[..., 1], -1, 0),
    "slice_scatter": lambda x, p: x.slice_scatter(x[..., :2], -1, 2, 4),
    "masked_scatter": lambda x, p: x.masked_scatter(x > 0, x * 2),
    "look up": lambda x, p: p[x.argmax(-1)],
    "bucketize": lambda x, p: torch.bucketize(x, p.sort()[0]).to(x.dtype),
    "one_hot": lambda x, p: F.one_hot((x > 0).long(), 2)[..., 0].to(x.dtype),
    # Layers
    "layer_norm": lambda x, p: F.layer_norm(x, (WIDTH,), p),
    "layer_norm of two": lambda x, p: F.layer_norm(x, (LENGTH, WIDTH)),
    "rms_norm": lambda x, p: F.rms_norm(x, (WIDTH,), p),
    "group_norm": lambda x, p: F.group_norm(x.transpose(1, 2), 2).transpose(1, 2),
    "normalize": lambda x, p: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x, p: F.cosine_similarity(x, p, dim=-1),
    "prelu": lambda x, p: F.prelu(x.transpose(1, 2), p).transpose(1, 2),
    "conv1d": lambda x, p: F.conv1d(x.transpose(1, 2), p.view(WIDTH, 1, 1), groups=WIDTH).transpose(1, 2),
    "avg_pool1d": lambda x, p: F.avg_pool1d(x, 2),
    "max_pool1d": lambda x, p: F.max_pool1d(x, 2),
    "interpolate": lambda x, p: F.interpolate(x, scale_factor=2),
    # Losses
    "mse_loss": lambda x, p: F.mse_loss(x, x * 2),
    "l1_loss": lambda x, p: F.l1_loss(x, p.expand_as(x)),
    "huber_loss": lambda x, p: F.huber_loss(x, x * 3),
    "kl_div": lambda x, p: F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
    "bce": lambda x, p: F.binary_cross_entropy_with_logits(x, x.sigmoid()),
    "nll_loss": lambda x, p: F.nll_loss(x.log_softmax(-1).flatten(0, 1), (x[..., 0] > 0).long().flatten()),
    "triplet": lambda x, p: F.triplet_margin_loss(x, x * 2, x * 3),
}


class Model(nn.Module):
    """An operator between two linears, or behind them; its result is added, or the mean of it."""

    def __init__(self, operator: Operator, between: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.operator, self.between = nn.Parameter(torch.rand(WIDTH) + 0.5), operator, between

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        y = self.up(x)
        x = x + self.down(self.operate(y) if self.between else F.gelu(y))
        x = x if self.between else self.operate(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    def operate(self, x: Tensor) -> Tensor:
        found: Tensor = self.operator(x, self.scale)
        return x + (found if found.shape == x.shape else found.mean())


@pytest.mark.parametrize(("layout", "between"), [("bsh", False), ("sbh", False), ("sbh", True)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (i % 10 > 0 and name not in FIRST))
        for i, name in enumerate(OPERATORS)
    ],
)
def test_a_model_with_it_takes_the_plain_models_step(name: str, layout: str, between: bool) -> None:
    torch.manual_seed(0)
    model, ids = Model(OPERATORS[name], between).double(), torch.randint(0, VOCABULARY, (2, LENGTH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the batch is joined, where it is
        examples = {"ids": ids, "labels": ids}
        program = autoptd.compile(model, (2, 1, 1), example_inputs=examples, num_microbatches=2, layout=layout)
    program.check()
    report = program.verify()
    assert report.passed, report
