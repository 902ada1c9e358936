"""Bytes that a transformer layer keeps for its backward, beside the formulas of the paper.

The layer is the paper's: layer norm, packed query/key/value, attention written out with dropout, an MLP of 4h with
GeLU, dropout before each residual sum; activations of 2 bytes (bfloat16). A step of the compiled program runs on
this machine, a thread per rank; whatever autograd saves is counted, each storage once, parameters and batch inputs
left out. A layer is the difference between three layers and two; over several sizes the differences are solved for
the coefficients of sbh, of a s^2 b and of sb, exactly or not at all.

The formulas are those of V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
which count a dropout's mask with one byte an element, and leave the statistics of layer norms out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn

import autoptd
from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.ir.nodes import info
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.program_text import read_program
from samples.benchmarks.report import publish

MODES = ("none", "selective", "full")
TENSOR = (1, 2, 4)


@dataclass(frozen=True)
class Sizes:
    """Letters as in the paper: s tokens, b sequences, h hidden, a heads."""

    s: int
    b: int
    h: int
    a: int
    layers: int = 2
    vocabulary: int = 32
    dropout: float = 0.1


SIZES = (
    Sizes(8, 2, 32, 4),
    Sizes(16, 2, 32, 4),
    Sizes(8, 2, 64, 4),
    Sizes(16, 4, 32, 8),
    Sizes(24, 2, 64, 8),
    Sizes(16, 2, 32, 8),
)
UNITS: Mapping[str, Callable[[Sizes], int]] = {
    "sbh": lambda z: z.s * z.b * z.h,
    "as²b": lambda z: z.a * z.s * z.s * z.b,
    "sb": lambda z: z.s * z.b,
    "asb": lambda z: z.a * z.s * z.b,
    "": lambda z: 1,
}
NOTES = (
    "s tokens, b sequences, h hidden, a heads, t tensor ranks; 5 as²b are sbh * 5as/h.",
    "Of the paper's figure masks of dropout, a byte an element, are 2 sbh and as²b, which are drawn again here; the "
    "attention weights before and behind their dropout are 2 as²b each.",
    "16 sb: mean and reciprocal deviation of two layer norms, 4 bytes each for each token, which the paper leaves out.",
)

Terms = Mapping[str, float]


class Layer(nn.Module):
    mask: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.dropout, h = sizes.a, sizes.dropout, sizes.h
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.project = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        mask = torch.ones(sizes.s, sizes.s, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (y.view(b, s, self.heads, h // self.heads).transpose(1, 2) for y in self.qkv(x).split(h, dim=2))
        scores = q @ k.transpose(2, 3) / math.sqrt(h // self.heads)
        weights = self.drop(scores.masked_fill(self.mask, -torch.inf).softmax(-1))
        out: Tensor = self.project((weights @ v).transpose(1, 2).reshape(b, s, h))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attend(self.norm_1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class PaperGPT(nn.Module):
    """``model(ids, labels)`` gives the mean loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.h)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.h, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """While entered, writes down the storage of each tensor that autograd saves, once; `held` are not counted."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        self._held = {tensor.untyped_storage() for tensor in held.values()}
        self._saved: set[UntypedStorage] = set()
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._saved.add(tensor.untyped_storage())
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._saved - self._held)


def make_batch(sizes: Sizes) -> dict[str, Tensor]:
    return {name: torch.randint(0, sizes.vocabulary, (sizes.b, sizes.s)) for name in ("ids", "labels")}


def compile_program(sizes: Sizes, recompute: str, tensor: int) -> autoptd.CompiledProgram:
    model = PaperGPT(sizes).to(torch.bfloat16)
    batch = make_batch(sizes)
    return autoptd.compile(model, (tensor, 1, 1), example_inputs=batch, num_microbatches=1, recompute=recompute)


def measure(sizes: Sizes, recompute: str, tensor: int = 1) -> int:
    """Bytes that one rank of a (tensor, 1, 1) mesh keeps of a microbatch, in bfloat16."""
    program = compile_program(sizes, recompute, tensor)
    text = read_program(program.texts[0], "program_00.py")
    assert program.model is not None
    weights = {**program.model.state_dict(), **program.buffers}
    batch = make_batch(sizes)

    def step(connection: Connection) -> int:
        manifest = program.manifest
        parallel = Parallel(connection, ShapeFunctions(manifest, text, weights))
        held = {**dict(parallel.named_parameters()), **dict(parallel.named_buffers()), **batch}
        # The weights in half precision that the stages compute with are held beside the float32 ones.
        narrow = {f"{name}, narrow": weight for name, weight in parallel._weights.narrow.items()}
        saved = SavedTensors({**held, **narrow})
        with saved:
            parallel(**batch)
        return saved.nbytes

    return run_threads(program.manifest, step)[0]


def solve(found: Sequence[int]) -> Terms:
    """Numbers of bytes, one for each of SIZES, as terms. Raises ValueError where no terms give them exactly."""
    features = np.array([[unit(z) for unit in UNITS.values()] for z in SIZES], dtype=float)
    solved, *_ = np.linalg.lstsq(features, np.array(found, dtype=float), rcond=None)
    terms = {name: round(float(number), 6) for name, number in zip(UNITS, solved, strict=True)}
    wrong = [z for z, n in zip(SIZES, found, strict=True) if abs(evaluate(terms, z) - n) > 1e-3]
    if wrong:
        raise ValueError(f"{list(found)} bytes are no sum of {', '.join(UNITS)}: not exact at {wrong[0]}")
    return {name: number for name, number in terms.items() if number}


def evaluate(terms: Terms, sizes: Sizes) -> float:
    return sum(number * UNITS[name](sizes) for name, number in terms.items())


def write_terms(terms: Terms) -> str:
    """``34 sbh + 5 as²b``."""
    return " + ".join(f"{number:g} {name}" for name, number in terms.items()).replace("+ -", "- ") or "0"


def subtract(terms: Terms, other: Terms) -> Terms:
    difference = {name: terms.get(name, 0) - other.get(name, 0) for name in UNITS}
    return {name: round(number, 6) for name, number in difference.items() if abs(number) > 1e-6}


def expect(recompute: str, tensor: int) -> Terms:
    """The paper's figure: sbh (10 + 24/t + 5as/(ht)) a layer, without the second term, or 2 sbh."""
    if recompute == "full":
        return {"sbh": 2}
    scores = {"as²b": 5 / tensor} if recompute == "none" else {}
    return {"sbh": 10 + 24 / tensor, **scores}


def measure_layer(recompute: str, tensor: int) -> Terms:
    """What the third layer adds to two."""
    return solve([measure(replace(z, layers=3), recompute, tensor) - measure(z, recompute, tensor) for z in SIZES])


def list_operators() -> dict[str, Terms]:
    """What each operator of a layer saves that none before it did, on one device, by the package's ledger."""
    columns: list[dict[str, int]] = []
    for sizes in SIZES:
        program = compile_program(sizes, "none", 1)
        (stage,) = program.stages
        ledger = Ledger(stage, program.mesh)
        seen: set[UntypedStorage] = set()
        columns.append({})
        for node in ledger.nodes:
            new = ledger.saved([node]) - seen
            seen |= new
            path = str(info(node).path)
            if new and path.startswith("layers.1"):
                columns[-1][node.name.removeprefix("layers1_")] = count_bytes(new)
    return {name: solve([column[name] for column in columns]) for name in columns[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the tables in samples/benchmarks/results")
    args = parser.parse_args()
    rows = []
    for tensor in TENSOR:
        for mode in MODES:
            found, paper = measure_layer(mode, tensor), expect(mode, tensor)
            more = write_terms(subtract(found, paper))
            rows.append([mode, tensor, write_terms(found), write_terms(paper), more])
    publish(
        "activation_memory",
        "Bytes a transformer layer keeps for its backward, activations of 2 bytes",
        ["recompute", "t", "kept", "paper", "difference"],
        rows,
        NOTES,
        args.write,
    )
    publish(
        "activation_memory_operators",
        "The same by operator, one device, nothing recomputed",
        ["operator", "saves"],
        [[name, write_terms(terms)] for name, terms in list_operators().items()],
        ["Each storage stands where it is saved first."],
        args.write,
        script="activation_memory",
    )


if __name__ == "__main__":
    main()
