"""Time products, copies, and launches or small compiled transformers on a device, as `autoptd.calibrate` starts it.

    python -m autoptd.calibration.kernel_timing  RANK WORLD_SIZE SECONDS FOLDER CORES
    python -m autoptd.calibration.message_timing RANK WORLD_SIZE SECONDS FOLDER CORES

Each measurement takes about SECONDS. A process prints all results as JSON, in seconds of the device. Kernels on a CPU
are timed in CPU time, which other processes hardly change; on a CUDA device so many are queued between two
synchronisations that neither these nor the host's launches count.
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import benchmark

from autoptd.compiled import CompiledProgram
from autoptd.compiler import compile

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
# Rows, columns, inner dimension; those that no power of two divides show what tiles waste.
SHAPES = (*((256, 512, 384), (512, 512, 512), (1024, 768, 768)), *((200, 1000, 300), (72, 520, 520), (1000, 136, 712)))
COPIES = tuple(4**power for power in range(9, 13))  # elements
# On a CUDA device. The first product is one that reaches the peak of each dtype; no copy fits into a cache.
LARGE_SHAPES = (
    *((8192, 8192, 8192), (2048, 12288, 4096), (2048, 4096, 16384), (8192, 4096, 4096)),
    *((2048, 1536, 4096), (4096, 4096, 1024), (512, 16384, 4096), (3000, 5000, 4000)),
)
LARGE_COPIES = (2**26, 2**27, 2**28)
GRAPHED = 1000  # kernels of a graph: its own launch hardly counts
STEP_BYTES = 2**26  # of the tensors of a product's calls: more than a core's caches hold
MICROBATCHES = 4
WARM_UPS, LEAST_REPEATS = 2, 3


class Timer(NamedTuple):
    """Times calls on `device`, each kind for about `seconds`."""

    device: torch.device
    seconds: float

    def time(self, call: Callable[[], object], parts: int = 1) -> float:
        """Return the median time of a call, repeated for one of `parts` of `seconds`, in blocks on a CUDA device."""
        for _ in range(WARM_UPS):
            call()
        if self.device.type == "cuda":
            timed = benchmark.Timer("call()", globals={"call": call})
            return float(timed.blocked_autorange(min_run_time=self.seconds / parts).median)
        found: list[float] = []
        until = time.perf_counter() + self.seconds / parts
        while len(found) < LEAST_REPEATS or time.perf_counter() < until:
            start = time.thread_time()
            call()
            found.append(time.thread_time() - start)
        return statistics.median(found)


def start(*, one_core: bool) -> tuple[int, int, str, Timer]:
    """Read rank, world size and folder from the command line, and pin one thread to its cores, or to one of them."""
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    cores = json.loads(sys.argv[5])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [cores[rank % len(cores)]] if one_core else cores)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return rank, world_size, sys.argv[4], Timer(device, float(sys.argv[3]))


def say(results: Iterable[tuple[str, Any]]) -> None:
    """Print all results by their names."""
    found: dict[str, list[Any]] = {}
    for name, value in results:
        found.setdefault(name, []).append(value)
    print(json.dumps(found))


def main_dtype(device: torch.device) -> str:
    """Return the dtype that programs mostly compute in on `device`."""
    return "bf16" if device.type == "cuda" else "fp32"


class Sizes(NamedTuple):
    """The sizes of a transformer of two layers: sequences, tokens, hidden, heads, vocabulary."""

    b: int
    s: int
    h: int
    a: int
    vocabulary: int


# In the first launches take almost all time, in the second elementwise kernels take much.
BLOCKS = (Sizes(1, 4, 8, 2, 16), Sizes(8, 128, 128, 4, 1024))
DIVIDED = Sizes(2, 128, 192, 6, 1024)  # over two tensor ranks
MEASUREMENTS = len(DTYPES) + len(SHAPES) - 1 + len(COPIES) + len(BLOCKS) + 1


class Transformer(nn.Module):
    """A plain decoder."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        h, self.sizes = sizes.h, sizes  # `bind` calls the constructor again, with what is kept of its arguments
        self.table = nn.Embedding(sizes.vocabulary, h)
        linears = {"packed": (h, 3 * h), "joined": (h, h), "up": (h, 4 * h), "down": (4 * h, h)}
        self.layers = nn.ModuleList()
        for _ in range(2):
            norms = {name: nn.LayerNorm(h) for name in ("first", "second")}
            self.layers.append(nn.ModuleDict(norms | {n: nn.Linear(*size) for n, size in linears.items()}))
        self.last = nn.LayerNorm(h)
        self.head = nn.Linear(h, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            (b, s, h), a = x.shape, self.sizes.a
            q, k, v = (
                y.view(b, s, a, h // a).transpose(1, 2) for y in layer["packed"](layer["first"](x)).split(h, dim=2)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["joined"](mixed.transpose(1, 2).reshape(b, s, h))
            x = x + layer["down"](F.gelu(layer["up"](layer["second"](x)), approximate="tanh"))
        logits = self.head(self.last(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


@lru_cache
def compile_block(sizes: Sizes, dtype: str, tensor: int = 1) -> CompiledProgram:
    """Compile a small transformer."""
    with torch.device("meta"):
        model = Transformer(sizes).to(DTYPES[dtype])
    tokens = torch.zeros(sizes.b, sizes.s, dtype=torch.long)
    inputs = {"tokens": tokens, "labels": tokens.clone()}
    return compile(model, (tensor, 1, 1), example_inputs=inputs, num_microbatches=MICROBATCHES)


def block_step(
    model: nn.Module, sizes: Sizes, device: torch.device, microbatches: int = MICROBATCHES
) -> Callable[[], None]:
    """Return a function that runs forward and backward of such a transformer, compiled or not."""
    tokens = torch.zeros(sizes.b * microbatches, sizes.s, dtype=torch.long, device=device)

    def step() -> None:
        model(tokens, tokens).backward()
        model.zero_grad()

    return step


def plain_step(device: torch.device) -> Callable[[], None]:
    """Return a function that runs forward and backward of the uncompiled transformer on one device."""
    model = Transformer(DIVIDED).to(device, DTYPES[main_dtype(device)])
    return block_step(model, DIVIDED, device, microbatches=1)


def time_product(timer: Timer, shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Return the mean of the three products of training: x wᵀ forward, g w and gᵀ x backward.

    Successive calls use different tensors, as a step returns to a layer only after all others.
    """
    m, n, k = shape
    size = dtype.itemsize * (m * k + n * k + m * n)

    def make() -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
        sizes = 2 * ((m, k), (n, k), (m, n))
        x, w, g, dx, dw, y = (torch.randn(*own, device=timer.device).to(dtype) for own in sizes)
        return (x, w.t(), y), (g, w, dx), (g.t(), x, dw)

    turns = itertools.cycle([make() for _ in range(ceil(STEP_BYTES / size / 2))])

    def multiply(kind: int) -> None:
        one, other, out = next(turns)[kind]
        torch.mm(one, other, out=out)

    return statistics.mean(timer.time(partial(multiply, kind), 3) for kind in range(3))


def time_launches(timer: Timer) -> dict[str, float]:
    """Return the seconds of a smallest kernel on a CUDA device: launched by itself, and in a graph."""
    x, graph = torch.zeros(1, device=timer.device), torch.cuda.CUDAGraph()
    alone = timer.time(lambda: x.add_(1))
    with torch.cuda.graph(graph):
        for _ in range(GRAPHED):
            x.add_(1)
    return {"launch_seconds": alone, "graphed_launch_seconds": timer.time(graph.replay) / GRAPHED}


def time_kernels(timer: Timer) -> Iterator[tuple[str, Any]]:
    """Yield ("products", [dtype, rows, columns, inner, seconds]), ("copies", [bytes, seconds]), ("blocks", seconds).

    The last is ("plain", seconds), the time of `plain_step`. In place of steps, which the host would hold up, a CUDA
    device yields ("launches", `time_launches`).
    """
    main, cuda = main_dtype(timer.device), timer.device.type == "cuda"
    shapes = LARGE_SHAPES if cuda else SHAPES
    for name, dtype in DTYPES.items():
        for shape in shapes if name == main else shapes[:1]:
            yield "products", [name, *shape, time_product(timer, shape, dtype)]
    for count in LARGE_COPIES if cuda else COPIES:
        source = torch.zeros(count, device=timer.device)
        copied = torch.empty_like(source)
        yield "copies", [2 * source.nbytes, timer.time(lambda: copied.copy_(source))]  # noqa: B023
    if cuda:
        yield "launches", time_launches(timer)
        return
    for sizes in BLOCKS:
        parallel = compile_block(sizes, main).bind(timer.device)
        yield "blocks", timer.time(block_step(parallel, sizes, timer.device))
    yield "plain", timer.time(plain_step(timer.device))


if __name__ == "__main__":
    say(time_kernels(start(one_core=True)[-1]))
