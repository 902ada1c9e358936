"""Losses in the forms that people write: each divides the head and the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samples.wild.decoder import HIDDEN, VOCABULARY, Case, Decoder


class LogSoftmaxNll(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(logits, dim=-1).flatten(0, 1), targets.flatten())


class LogSoftmaxGather(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


class ZLoss(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = torch.logsumexp(logits, dim=-1)
        return (total - logits.gather(-1, targets[..., None])[..., 0]).mean() + 1e-4 * total.square().mean()


class Smoothed(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


class Weighted(Decoder):
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 2, VOCABULARY))

    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), self.weights, reduction="none")
        return losses.mean()


class Masked(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        mask = (targets.flatten() >= 0).to(losses.dtype)
        return (losses * mask).sum() / targets.numel()


class ClassesInTheMiddle(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.transpose(1, 2), targets)


class MovedDim(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(torch.movedim(logits, -1, 1), targets)


class ChunkedLogits(Decoder):
    """The chunked cross-entropy of torchtune: the head is one product, its loss is taken in chunks."""

    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(logits.chunk(4, dim=1), targets.chunk(4, dim=1), strict=True)
        losses = [F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") for x, y in pairs]
        return torch.stack(losses).sum() / targets.numel()


class ChunkedHead(Decoder):
    """The chunked head of litgpt: hidden states are split, and each part has its logits and its loss."""

    def find_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        parts = zip(self.norm(x).split(4, dim=1), targets.split(4, dim=1), strict=True)
        losses = [F.cross_entropy(self.head(y).flatten(0, 1), t.flatten(), reduction="none") for y, t in parts]
        return torch.cat(losses).mean()


class LoopedHead(Decoder):
    def find_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        x, total = self.norm(x), torch.zeros((), dtype=x.dtype, device=x.device)
        for start in range(0, targets.shape[1], 8):
            part = self.head(x[:, start : start + 8]).flatten(0, 1)
            total = total + F.cross_entropy(part, targets[:, start : start + 8].flatten(), reduction="sum")
        return total / targets.numel()


class Distilled(Decoder):
    """A teacher's logits, divided too, and the student's: KL between both, and the labels' loss."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)

    def find_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits, wanted = self.head(self.norm(x)), self.teacher(self.tokens(targets).detach())
        student, teacher = logits.log_softmax(-1), wanted.log_softmax(-1)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + F.kl_div(student.flatten(0, 1), teacher.flatten(0, 1), log_target=True, reduction="batchmean")


class SoftTargets(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        wanted = F.one_hot(targets, VOCABULARY).to(logits.dtype) * 0.9 + 0.1 / VOCABULARY
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))


class WithAccuracy(Decoder):
    """The loss, and how many labels are the most likely class."""

    def compare(self, logits: Tensor, targets: Tensor) -> Any:
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss, "accuracy": (logits.argmax(-1) == targets).float().mean()}


class Softcapped(Decoder):
    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy((30 * torch.tanh(logits / 30)).flatten(0, 1), targets.flatten())


class OneHotProduct(Decoder):
    """Written as the mean over classes with a one-hot vector, as JAX users do."""

    def compare(self, logits: Tensor, targets: Tensor) -> Tensor:
        return -(F.one_hot(targets, VOCABULARY) * logits.log_softmax(-1)).sum(-1).mean()


CASES = (
    Case("log_softmax and nll_loss", "pytorch/examples", LogSoftmaxNll),
    Case("log_softmax and gather", "TRL", LogSoftmaxGather),
    Case("logsumexp with a z-loss", "OLMo", ZLoss),
    Case("label smoothing", "torchtune", Smoothed),
    Case("class weights", "x-transformers", Weighted),
    Case("reduction none and a mask", "llm.c", Masked),
    Case("classes in the middle", "x-transformers", ClassesInTheMiddle),
    Case("movedim to the classes", "x-transformers", MovedDim),
    Case("logits in chunks", "torchtune", ChunkedLogits),
    Case("a head in chunks", "litgpt", ChunkedHead),
    Case("a head in a loop", "nanochat", LoopedHead),
    Case("distillation by KL", "torchtune", Distilled),
    Case("soft targets", "pytorch/examples", SoftTargets),
    Case("accuracy by argmax", "minGPT", WithAccuracy),
    Case("capped logits", "modded-nanogpt", Softcapped),
    Case("one-hot labels", "LLMs-from-scratch", OneHotProduct),
)
