"""Text without a network: the sources of Python's standard library, as tokens of a byte-level BPE.

``python -m samples.corpus`` trains the tokenizer, encodes the text and keeps both in out/corpus, in seconds.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

FOLDER = Path("out/corpus")
VOCAB_SIZE = 4096


def list_sources() -> list[Path]:
    """List the standard library's .py files outside its tests, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts))


def read_sources(paths: list[Path]) -> list[str]:
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens; it has every byte, so it encodes any text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> NDArray[np.uint16]:
    """Encode all texts as one row of tokens, with the end-of-text token after each."""
    end = tokenizer.token_to_id("<|endoftext|>")
    rows = [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate(rows)


def load_corpus(folder: Path = FOLDER, vocab_size: int = VOCAB_SIZE) -> NDArray[np.uint16]:
    """Return the tokens of the standard library, from `folder` if an earlier call has left them there.

    The file is named after the Python version, as another library is another text, and put in place whole, so that
    ranks which start together may all call this.
    """
    if not 257 <= vocab_size <= 65536:
        raise ValueError(f"vocab_size {vocab_size}: a byte-level BPE kept as 16-bit tokens has 257 to 65536")
    stem = folder / f"stdlib-{platform.python_version()}-{vocab_size}"
    tokens_file = stem.with_name(stem.name + ".npy")
    if not tokens_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        texts = read_sources(list_sources())
        tokenizer = train_tokenizer(texts, vocab_size)
        mine = stem.with_name(f"{stem.name}.{os.getpid()}")
        tokenizer.save(str(mine))
        mine.replace(stem.with_name(stem.name + ".json"))
        with mine.open("wb") as file:
            np.save(file, encode_texts(tokenizer, texts))
        mine.replace(tokens_file)
    tokens: NDArray[np.uint16] = np.load(tokens_file, mmap_mode="r")
    return tokens


def batches(
    tokens: NDArray[np.uint16], num_sequences: int, length: int, *, seed: int, replica: int = 0, replicas: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (idx, targets), each [num_sequences, length], for one of `replicas` data-parallel replicas.

    Each step draws the batch of all replicas from `seed` and cuts it in their order: with replicas=1 and
    num_sequences times as large, one device gets the same sequences in the same order.
    """
    rng = np.random.default_rng(seed)
    mine = slice(replica * num_sequences, (replica + 1) * num_sequences)
    while True:
        starts = rng.integers(0, len(tokens) - length - 1, size=num_sequences * replicas)[mine]
        rows = torch.from_numpy(np.stack([tokens[i : i + length + 1] for i in starts]).astype(np.int64))
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


if __name__ == "__main__":
    print(f"{len(load_corpus()):,} tokens of {VOCAB_SIZE} kinds in {FOLDER}")
