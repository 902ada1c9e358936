"""The Triton kernels compiled for GPUs that need not be here: what the compiler makes of them.

Triton's interpreter, which runs the kernels in tests, takes what the compiler may not. Here each case is launched with
a stand-in for the driver: the kernel is compiled to machine code for the architecture that is asked for, and not run.
A memory-bound kernel keeps its registers, reads 16 bytes at a time, and has fewer instructions than memory gives time
for; all three are in the machine code. Exits with an error where a kernel does not compile or spills registers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from autoptd.runtime.kernels import registration
from autoptd.runtime.kernels.triton import tiles
from samples.benchmarks.kernel_cases import CASES, Case, Maker, Sizes
from samples.benchmarks.kernels import CPU_SIZES, DROPOUT, make_rank, mark, run_backward, run_forward
from samples.benchmarks.report import publish

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LANES = 32  # of a warp
ISSUED, SPECIAL = (4 * LANES, 16)  # instructions of a lane that an SM begins a clock; of exp, 1 / x and the like
ENOUGH = 0.85  # of the memory's bandwidth
# Of the instructions of a norm's backward, whose sums are to fill a processor's registers; the form that was found
# fastest on an H100 had 7 % that save or restore one.
SPILLED = 0.05


@dataclass(frozen=True)
class Target:
    """A GPU by its data sheet: compute capability, SMs, boost clock in Hz, and bytes a second."""

    name: str
    capability: int
    processors: int
    clock: float
    bandwidth: float


TARGETS = (
    Target("A100 80 GB", 80, 108, 1.41e9, 2.04e12),
    Target("H100 SXM", 90, 132, 1.83e9, 3.35e12),
    Target("H200", 90, 132, 1.83e9, 4.8e12),
    Target("B200", 100, 148, 1.85e9, 8.0e12),
)


class Driver:
    """What Triton asks of a driver: which device to compile for, and launches, which do nothing."""

    utils = SimpleNamespace(
        load_binary=lambda *_: (None, None, 0, 0, 1024),
        unload_module=lambda _: None,
        get_device_properties=lambda _: {"max_shared_mem": 232_448},
    )

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        return lambda *_: None

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._capability, LANES)

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code: registers of a thread, accesses of spilled ones, instructions in all and of a kind.

    `accesses` are of global memory, and `wide` those of 16 bytes. `elements` are those of a tile that a thread has;
    each loop goes over the tiles once.
    """

    registers: int
    spilled: int
    instructions: int
    special: int
    accesses: int
    wide: int
    elements: float

    @property
    def clocks(self) -> float:
        """Of an SM, for one element: to begin the instructions, and those that a smaller unit has."""
        return max(self.instructions / ISSUED, self.special / SPECIAL) / self.elements


def read_code(code: bytes, elements: float) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        usage, listing = (
            subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout
            for tool, option in (
                (knobs.nvidia.cuobjdump.path, "--dump-resource-usage"),
                (knobs.nvidia.nvdisasm.path, "-c"),
            )
        )
    (registers,) = re.findall(r"\bREG:(\d+)", usage)
    # An instruction's line: its place in a comment, perhaps a predicate, its name.
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", listing, re.MULTILINE)
    names = [name for name in names if name != "NOP"]
    accesses = [each for each in names if each.startswith(("LDG", "STG"))]
    return Compiled(
        int(registers),
        sum(each.startswith(("STL", "LDL")) for each in names),
        len(names),
        sum(each.startswith("MUFU") for each in names),
        len(accesses),
        sum(".128" in each for each in accesses),
        elements,
    )


@contextmanager
def compile_only(capability: int) -> Iterator[list[Compiled]]:
    """Launches of tensors on the CPU compile for `capability` and do no more; what they made is in the list.

    Triton's driver is another one for the rest of the process: the real one may have no device to go back to.
    """
    made = set[str]()
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in made:
            columns = options["COLUMNS"] if "COLUMNS" in options else 2 * options["PAIRS"]
            tile = options.get("ROWS", 1) * options.get("BLOCKS", 1) * columns
            elements = tile / (LANES * kernel.metadata.num_warps)
            made.add(kernel.hash)
            found.append(read_code(kernel.asm["cubin"], elements))
        return kernel

    driver.set_active(Driver(capability))
    with (
        patch.dict(tiles._compiled, clear=True),  # else what was compiled for another is launched again
        patch.object(JITFunction, "run", compile_kernel),
        patch.object(registration, "kernel_devices", {"cpu"}),
    ):
        yield found


def compile_case(case: Case, sizes: Sizes, dtype: torch.dtype, targets: Sequence[Target]) -> Iterator[list[str]]:
    """A row for each kernel of its forward and backward; the `targets` have the same capability."""
    rank = make_rank(torch.device("cpu"))
    operands = case.make(sizes, Maker(dtype, rank.device))
    count = max(operand.numel() for operand in operands)
    with compile_only(targets[0].capability) as forward:
        results = run_forward(case.ours, rank, DROPOUT, operands)
    with compile_only(targets[0].capability) as backward:
        run_backward(results, operands, [torch.ones_like(result) for result in results])
    for way, found, least in (("forward", forward, case.forward), ("backward", backward, case.backward)):
        for kernel in found:
            yield describe(f"{case.name}: {way}", kernel, least(sizes) / count, targets)


def describe(name: str, kernel: Compiled, moved: float, targets: Sequence[Target]) -> list[str]:
    """A row, with how many times what memory gives, of `moved` bytes an element, the instructions have time for."""
    shares = [target.processors * target.clock / kernel.clocks * moved / target.bandwidth for target in targets]
    may_spill = SPILLED * kernel.instructions if "norm" in name and name.endswith("backward") else 0
    return [
        name,
        str(targets[0].capability),
        str(kernel.registers),
        mark(str(kernel.spilled), kernel.spilled > may_spill),
        f"{kernel.wide} of {kernel.accesses}",
        f"{kernel.instructions / kernel.elements:.0f}",
        ", ".join(
            mark(f"{target.name} {share:.1f}", share < ENOUGH) for target, share in zip(targets, shares, strict=True)
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--capability", type=int, choices=sorted({each.capability for each in TARGETS}))
    parser.add_argument("--write", action="store_true", help="keep the table under results/")
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: the interpreter compiles nothing; unset it")
    dtype = DTYPES[given.dtype]
    sizes = replace(CPU_SIZES, item=dtype.itemsize)
    capabilities = [given.capability] if given.capability else sorted({each.capability for each in TARGETS})
    rows = [
        row
        for case in CASES
        if given.only in case.name
        for capability in capabilities
        for row in compile_case(case, sizes, dtype, [t for t in TARGETS if t.capability == capability])
    ]
    publish(
        "compiled_kernels",
        f"Kernels compiled for GPUs, {given.dtype}: what they are made of, not how fast they ran",
        ["kernel", "sm_", "registers", "spills", "accesses of 16 bytes", "instructions an element",
         "time for, of the bandwidth"],
        rows,
        [
            f"Triton {triton.__version__}. {sizes}, dropout {DROPOUT}. Nothing ran: no GPU is needed.",
            "instructions an element: of a thread's, each loop's body counted once for a tile.",
            "time for: how many times the data sheet's bytes a second could be asked for, were the issue of "
            f"instructions ({ISSUED} lanes a clock of an SM, {SPECIAL} for exp and the like) all that takes time. "
            f"(!): under {ENOUGH}, or what is spilled, in backwards of norms over {SPILLED:.0%} of the instructions.",
        ],
        given.write,
    )  # fmt: skip
    if spilling := [row[0] for row in rows if "(!)" in row[3]]:
        raise SystemExit(f"registers are spilled: {', '.join(spilling)}")


if __name__ == "__main__":
    main()
