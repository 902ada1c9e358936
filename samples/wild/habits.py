"""Habits of forwards: functions with their own backward, what they leave behind, mixtures, and errors of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from samples.wild.decoder import HIDDEN, VOCABULARY, Attention, Block, Case, Decoder

EXPERTS = 4


class Clamp(Function):
    """A clamp with a straight-through backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-0.5, 0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


clamp = Clamp.apply  # kept before, as many do


class StraightThrough(Decoder):
    def run(self, x: Tensor) -> Tensor:
        return super().run(clamp(x))  # type: ignore[no-untyped-call]


class Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Reversed(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.reverse = Reverse.apply  # an attribute
        self.domain = nn.Linear(HIDDEN, HIDDEN)

    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        return x + self.domain(self.reverse(x, 0.3))  # type: ignore[no-untyped-call, no-any-return]


class AddLoss(Function):
    """An auxiliary loss that enters by the backward, as DeepSeek's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=ctx.like, device=gradient.device)


class LossByBackward(Decoder):
    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        return AddLoss.apply(x, 1e-2 * x.square().mean())  # type: ignore[no-untyped-call, no-any-return]


class FusedLoss(Function):
    """A cross-entropy that computes its gradient in forward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        found = logits.log_softmax(-1)
        gradient = (found.exp() - F.one_hot(targets, VOCABULARY)) / targets.numel()
        ctx.save_for_backward(gradient)
        return -found.gather(-1, targets[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None


class GradientInForward(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        return FusedLoss.apply(logits.flatten(0, 1), targets.flatten())  # type: ignore[no-untyped-call, no-any-return]


class Mixture(nn.Module):
    """Two of four experts for each token, by a dense sum over stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN) * 0.05)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN) * 0.05)

    def route(self, x: Tensor) -> Tensor:
        """Return the weight of each expert for each token, [b, s, experts]; of two of them it is not 0."""
        scores = self.router(x).softmax(-1)
        best, chosen = scores.topk(2, dim=-1)
        return torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bsh,ehf->besf", x, self.up)
        y = torch.einsum("besf,efh->besh", F.gelu(y), self.down)
        return torch.einsum("besh,bse->bsh", y, self.route(x))


class Looped(Mixture):
    """The same by a loop over the tokens of each expert, whose number depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        weights, out = self.route(x).flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        for expert in range(EXPERTS):
            (rows,) = torch.where(weights[:, expert] > 0)
            y = F.gelu(x.flatten(0, 1)[rows] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, rows, y * weights[rows, expert, None])
        return out.view_as(x)


class KeptLoss(Mixture):
    """Leaves its balance loss on the module, where a training loop reads it."""

    def forward(self, x: Tensor) -> Tensor:
        self.balance = self.route(x).mean((0, 1)).square().sum()
        return super().forward(x)


class Logging(Decoder):
    """Keeps a number for a log."""

    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = super().compare(logits, targets)
        self.last = loss.detach()
        return loss  # type: ignore[no-any-return]


class Frozen(Decoder):
    @torch.no_grad()
    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        return super().forward(idx, targets)


class Asserting(Decoder):
    def embed(self, idx: Tensor) -> Tensor:
        assert idx.max() < VOCABULARY, "a token that the table lacks"
        return super().embed(idx)


class Raising(Decoder):
    def embed(self, idx: Tensor) -> Tensor:
        raise NotImplementedError("only with inputs_embeds")


class LastLoss(Decoder):
    """Keeps its loss, and returns logits."""

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        logits = self.head(self.norm(self.run(self.embed(idx))))
        self.last_loss = self.compare(logits, targets)
        return logits


class Logits(Decoder):
    def forward(self, idx: Tensor) -> Any:  # type: ignore[override]
        return self.head(self.norm(self.run(self.embed(idx))))


def wanted_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Noisy(Decoder):
    """Noise on the embeddings, as NEFTune adds it."""

    def embed(self, idx: Tensor) -> Tensor:
        x = super().embed(idx)
        return x + torch.zeros_like(x).uniform_(-0.1, 0.1) if self.training else x


class Returned(Decoder):
    """Returns logits beside the loss."""

    def compare(self, logits: Tensor, targets: Tensor) -> Any:
        return super().compare(logits, targets), logits


class Pair(nn.Module):
    """A sequence of blocks: pytorch/examples build models of nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Block(Attention(), Mixture()) for _ in range(2)))
        self.tokens, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.tokens(idx))).flatten(0, 1), targets.flatten())


def vary(mlp: type[nn.Module]) -> Any:
    """Return a decoder class with another MLP."""
    return type("Varied", (Decoder,), {"mlp": mlp})


CASES = (
    Case("a straight-through clamp by an alias", "modded-nanogpt", StraightThrough),
    Case("reversed gradients", "pytorch/examples", Reversed, share=0.53),  # a linear alone in the residual stays whole
    Case("a loss that enters by the backward", "DeepSeek", LossByBackward),
    Case("a loss with its gradient in forward", "Liger", GradientInForward, share=0.54),  # no rule divides the loss
    Case("a dense mixture", "transformers", vary(Mixture)),
    Case("a mixture that loops over tokens", "Mixtral before v5", vary(Looped)),
    Case("a balance loss on a module", "OLMoE", vary(KeptLoss), refused=r"balance, a tensor with a gradient"),
    Case("a number kept for a log", "nanoGPT", Logging),
    Case("a forward without gradients", "lingua", Frozen, refused="the loss has no gradient"),
    Case("an assertion on tokens", "nanoGPT", Asserting),
    Case("an error of the model's own", "transformers", Raising, refused="only with inputs_embeds"),
    Case("a loss that forward keeps", "minGPT", LastLoss, refused="last_loss"),
    Case("a loss_fn", "torchtitan", Logits, {"loss_fn": wanted_loss}, written=1),
    Case("noise on embeddings", "TRL", Noisy),
    Case("logits beside the loss", "LLMs-from-scratch", Returned, {"outputs": True}, written=1),
    Case("blocks in a Sequential", "pytorch/examples", Pair),
)
