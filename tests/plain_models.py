"""Models as people write them, in tiny sizes: what the compiler is tried on. None of them knows of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from samples.attention_coverage import make_model

VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS = 61, 16, 32, 4, 2


class FlashAttention(nn.Module):
    """nanoGPT's attention: one packed projection; torch's fused attention, or a mask kept in a buffer."""

    bias: Tensor

    def __init__(self, flash: bool, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.c_proj = nn.Linear(HIDDEN, HIDDEN)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.dropout = dropout
        self.flash = flash
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.c_attn(x).split(HIDDEN, dim=2))
        if self.flash:
            p = self.dropout if self.training else 0
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = self.attn_dropout(functional.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        output: Tensor = self.resid_dropout(self.c_proj(y))
        return output


class WrittenGELU(nn.Module):
    """The tanh approximation, written out as in minGPT."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    def __init__(self, flash: bool, dropout: float, activation: nn.Module) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(HIDDEN)
        self.attn = FlashAttention(flash, dropout)
        self.ln_2 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), activation, nn.Linear(4 * HIDDEN, HIDDEN), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        output: Tensor = x + self.mlp(self.ln_2(x))
        return output


class PlainGPT(nn.Module):
    """nanoGPT's whole: returns (logits, loss); the head is tied to the embedding, or not (minGPT)."""

    def __init__(
        self, flash: bool = True, tied: bool = True, dropout: float = 0.0, activation: nn.Module | None = None
    ) -> None:
        super().__init__()
        blocks = [Block(flash, dropout, activation or nn.GELU()) for _ in range(LAYERS)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, HIDDEN),
                "wpe": nn.Embedding(LENGTH, HIDDEN),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.shape[1], dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](pos))
        for block in self.transformer["h"].children():
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits, None
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def _config(name: str, **options: Any) -> Any:
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return getattr(transformers, f"{name}Config")(**{**tokens, **options})


def _llama_like(name: str, **options: Any) -> nn.Module:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    }
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(_config(name, **{**sizes, **options}))
    return model


def _gpt2(dropout: float = 0.0) -> nn.Module:
    config = _config(
        "GPT2",
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=LENGTH,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def _opt() -> nn.Module:
    sizes = {"ffn_dim": 64, "word_embed_proj_dim": HIDDEN, "dropout": 0.0, "num_key_value_heads": HEADS}
    return _llama_like("OPT", **sizes)


def _gpt_neo() -> nn.Module:
    config = _config(
        "GPTNeo",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        window_size=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=LENGTH,
        attention_dropout=0.0,
        embed_dropout=0.0,
        resid_dropout=0.0,
    )
    return transformers.GPTNeoForCausalLM(config)


def _gptj() -> nn.Module:
    config = _config(
        "GPTJ",
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=LENGTH,
        rotary_dim=4,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        tie_word_embeddings=False,
    )
    return transformers.GPTJForCausalLM(config)


def _bloom() -> nn.Module:
    config = _config(
        "Bloom",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return transformers.BloomForCausalLM(config)


def _falcon() -> nn.Module:
    return _llama_like("Falcon", multi_query=True, hidden_dropout=0.0, attention_dropout=0.0, ffn_hidden_size=64)


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "nanogpt": PlainGPT,
    "nanogpt-slow": lambda: PlainGPT(flash=False),
    "mingpt": lambda: PlainGPT(flash=False, tied=False, activation=WrittenGELU()),
}
HUGGING_FACE: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "gpt-neox": lambda: _llama_like("GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0),
    "gpt-j": _gptj,
    "gpt-neo": _gpt_neo,
    "bloom": _bloom,
    "llama": lambda: _llama_like("Llama"),
    "mistral": lambda: _llama_like("Mistral", sliding_window=4),
    "qwen2": lambda: _llama_like("Qwen2"),
    "qwen3": lambda: _llama_like("Qwen3", head_dim=8),
    "phi3": lambda: _llama_like("Phi3", resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    "falcon": _falcon,
    "gemma2": lambda: _llama_like("Gemma2", head_dim=8, sliding_window=4),
}


def _other(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = make_model(name, "sdpa")
        assert model is not None
        return model

    return make


FURTHER: dict[str, Callable[[], nn.Module]] = {
    "stablelm": lambda: _llama_like("StableLm"),
    "olmo2": lambda: _llama_like("Olmo2"),
    "mixtral": _other("MixtralForCausalLM"),
    "deepseek-v3": _other("DeepseekV3ForCausalLM"),
    "bert": _other("BertForMaskedLM"),
    "t5": _other("T5ForConditionalGeneration"),
    "vit": _other("ViTForImageClassification"),
}
