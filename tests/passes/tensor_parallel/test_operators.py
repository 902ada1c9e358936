"""Operators that models have now and then: divided where each element is for itself, else every tensor rank's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import autoptd

WIDTH = 8
ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("atan", "sinh", "cosh", "asinh", "sinc", "sgn")},
    **{name: partial(getattr(F, name)) for name in ("hardshrink", "softshrink", "hardswish")},
    "asin": lambda x: torch.asin(x.tanh() / 2) + torch.acos(x.tanh() / 2) + torch.atanh(x.tanh() / 2),
    "acosh": lambda x: torch.acosh(1.5 + x.square()),
    "erfinv": lambda x: torch.erfinv(x.tanh() / 2),
    "logit": lambda x: torch.logit(x.sigmoid()),
    "expit": torch.special.expit,
    "hypot": lambda x: torch.hypot(x, x.cos()),
    "copysign": lambda x: torch.copysign(x, x.cos()),
    "logaddexp": lambda x: torch.logaddexp(x, x.cos()) + torch.logaddexp2(x, x.sin()),
    "xlogy": lambda x: torch.xlogy(x, 1 + x.square()),
    "heaviside": lambda x: x * torch.heaviside(x.detach(), torch.tensor(0.5, dtype=x.dtype)),
    "isclose": lambda x: x * torch.isclose(x, x.abs()),
    "special functions": lambda x: (
        torch.special.ndtr(x) + torch.special.i0e(x) + torch.special.xlogy(x, 1 + x.square())
    ),
    "gammas": lambda x: torch.lgamma(1 + x.square()) + torch.ldexp(x, torch.tensor([1])),
    "bitwise_xor": lambda x: x * ((x > 0) ^ (x < 1)),
    "other names": lambda x: (
        torch.clip(torch.multiply(x, 3).subtract(1, alpha=2).divide(2), -1, 1).absolute().negative()
    ),
    "comparisons by other names": lambda x: x.where(
        x.greater(0) | x.less_equal(-1), x.arctan() + torch.fmin(x, x.cos())
    ),
    "norm of heads": lambda x: F.normalize(x.unflatten(2, (4, 4)), dim=-1).flatten(2),
    "old norm of heads": lambda x: (x.unflatten(2, (4, 4)) / x.unflatten(2, (4, 4)).norm(3, 3, True)).flatten(2),
}


def assign(x: Tensor, index: int) -> Tensor:
    x = x.clone()
    x[:, index] = x[:, 1] * 2
    return x


WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "select_scatter": lambda x: assign(x, 0),
    "select_scatter, last": lambda x: assign(x, -1),
    "select_scatter of a feature": lambda x: assign(x.transpose(1, 2), 3).transpose(1, 2),
    "add in place": lambda x: assign(x, 2).select(1, 0).mul_(2)[:, None] + x,
    "conv1d": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(16, 1, 3).to(x) / 3, padding=1, groups=16).transpose(
        1, 2
    ),
    "a matrix by a batch": lambda x: x + (torch.ones(16, 16).to(x).tril() @ x.transpose(1, 2)).transpose(1, 2),
    "a matrix by a batch of one": lambda x: x + (torch.ones(6, 6).to(x).tril() @ x[:1]),
    "glu": lambda x: F.glu(x).repeat(1, 1, 2),
    "group_norm": lambda x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "triangles": lambda x: torch.tril(x) + torch.triu(x, 1) * 2,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.2]).to(x)),
    "products": lambda x: torch.cumprod(x.tanh(), 1) + x.tanh().prod(2, keepdim=True),
    "running": lambda x: torch.logcumsumexp(x, 1) + torch.cummax(x, 1)[0] + torch.cummin(x, 1)[0],
    "diff": lambda x: F.pad(x.diff(dim=1), (0, 0, 1, 0)),
    "var_mean": lambda x: x + sum(torch.var_mean(x, 2, keepdim=True)),
    "ranked": lambda x: x + x.median(2, keepdim=True)[0] + x.kthvalue(3, 2, keepdim=True)[0],
    "tile": lambda x: torch.tile(x[:, :1], (1, 6, 1)),
    "unfold": lambda x: x + x.unfold(2, 4, 4).mean((2, 3))[..., None],
    "diagonal": lambda x: x + x.diagonal(0, 1, 2).sum(1)[:, None, None],
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.cos()),
    "scatter_reduce": lambda x: x.scatter_reduce(2, torch.zeros_like(x, dtype=torch.long), x.sin(), "sum"),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 3, 1, 1),
    "cosine_similarity": lambda x: x * F.cosine_similarity(x, x.cos(), 2)[..., None],
    **{
        name: lambda x, name=name: x * (1 + getattr(F, name)(x, x.flip(1)))  # type: ignore[misc]
        for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss")
    },
    "binary_cross_entropy": lambda x: x * F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "kl_div": lambda x: x * (1 + F.kl_div(x.log_softmax(2), x.flip(1).softmax(2), reduction="batchmean")),
}
# Of which the tables say nothing.
UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool1d": lambda x: F.max_pool1d(F.pad(x.transpose(1, 2), (2, 0)), 3, 1).transpose(1, 2),
    "adaptive_avg_pool1d": lambda x: x + F.adaptive_avg_pool1d(x.transpose(1, 2), 1).transpose(1, 2),
    "upsample_nearest1d": lambda x: F.interpolate(x, scale_factor=2.0)[..., ::2],
    "instance_norm": lambda x: F.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    "index_copy": lambda x: x.index_copy(2, torch.tensor([1, 3]), x[..., :2]),
    "index_fill": lambda x: x.index_fill(2, torch.tensor([0]), 0.5),
    "take_along_dim": lambda x: x.take_along_dim(torch.arange(15, -1, -1).expand(x.shape), 2),
    "nanmean": lambda x: x - x.nanmean(2, keepdim=True),
    "nansum": lambda x: x - x.nansum(2, keepdim=True),
    "std_mean": lambda x: x + sum(torch.std_mean(x, 2, keepdim=True)),
    "aminmax": lambda x: x + sum(torch.aminmax(x, dim=2, keepdim=True)),
    "quantile": lambda x: x - x.quantile(0.5, 2, keepdim=True),
    "searchsorted": lambda x: x * torch.searchsorted(torch.linspace(-1, 1, 5).to(x), x.detach()),
    "linalg_cross": lambda x: F.pad(torch.linalg.cross(x[..., :3], x[..., 3:6]), (0, 13)) + x,
    "hstack": lambda x: torch.hstack([x[:, 3:], x[:, :3]]),
    "linalg_vecdot": lambda x: x * torch.linalg.vecdot(x, x.cos())[..., None],
    "diag_embed": lambda x: x + torch.diag_embed(x).sum(2),
    "bilinear": lambda x: F.bilinear(x, x.cos(), torch.ones(16, 16, 16).to(x) / 16),
    "multi_margin_loss": lambda x: x * F.multi_margin_loss(x.flatten(0, 1), torch.zeros(12, dtype=torch.long)),
}

if TorchVersion(torch.__version__) < "2.13":  # 2.11 differentiates not the one, and traces not the other
    del UNKNOWN["aminmax"], UNKNOWN["quantile"]


class Model(nn.Module):
    """A language model of one MLP for each of `insides`, which is another operator inside of it."""

    def __init__(self, insides: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.up = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in insides])
        self.down = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in insides])
        self.insides = insides

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.table(idx)
        for up, inside, down in zip(self.up, self.insides, self.down, strict=True):
            x = x + down(inside(up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def compile_with(*insides: Callable[[Tensor], Tensor]) -> autoptd.CompiledProgram:
    torch.manual_seed(0)
    inputs = {name: torch.zeros(2, 6, dtype=torch.long) for name in ("idx", "targets")}
    return autoptd.compile(Model(insides).double(), (2, 1, 1), example_inputs=inputs, num_microbatches=2)


@pytest.mark.parametrize("names", [list(ELEMENTWISE)[start::4] for start in range(4)], ids=", ".join)
def test_elements_for_themselves_are_divided(names: list[str]) -> None:
    program = compile_with(*(ELEMENTWISE[name] for name in names))
    parameters = program.manifest.parameters
    for number, name in enumerate(names):
        placement = parameters[f"up.{number}.weight"].placement["tensor"]
        assert placement.local_shape((16, 8), 2) == (8, 8), name
    report = program.verify()
    assert report.passed, report


@pytest.mark.parametrize("name", WHOLE)
def test_operators_that_mix_elements_are_right(name: str) -> None:
    program = compile_with(WHOLE[name])
    report = program.verify()
    assert report.passed, report


def test_a_whole_maximum_and_weighted_soft_targets_compile() -> None:
    """A number of all elements of a divided bias, and losses of rows that are no [N, classes] with N labels."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.up(x).relu()).flatten(0, 1)
            soft = F.cross_entropy(y, y.detach().softmax(-1), weight=torch.ones(WIDTH), reduction="none")
            return soft.square().mean() + self.up.bias.abs().max()

    torch.manual_seed(0)
    example = {"x": torch.randn(2, 4, WIDTH)}
    program = autoptd.compile(Both(), (2, 1, 1), example_inputs=example, num_microbatches=2)
    assert program.verify().passed


@pytest.mark.parametrize("names", [list(UNKNOWN)[start::3] for start in range(3)], ids=", ".join)
def test_torchs_operators_without_a_rule_are_each_tensor_ranks_own(names: list[str]) -> None:
    program = compile_with(*(UNKNOWN[name] for name in names))
    report = program.verify()
    assert report.passed, report
    said = ", ".join(sorted(f"aten.{name}" for name in names))
    assert f"no rule divides {said}: every tensor rank does them whole" in "\n".join(program.log)
