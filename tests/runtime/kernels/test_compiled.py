"""Triton's compiler takes the kernels, for GPUs that need not be here; the interpreter takes more than it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")


SCRIPT = ("-m", "samples.benchmarks.compiled_kernels")
# Too few registers for any of the kernels.
STARVED = """
from triton.runtime.jit import JITFunction
run = JITFunction.run
JITFunction.run = lambda self, *args, **options: run(self, *args, **options, maxnreg=32)
from samples.benchmarks import compiled_kernels
compiled_kernels.main(["--only", "gelu", "--capability", "90"])
"""


def run_python(folder: Path, *arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "error::UserWarning", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--only", "gelu", "--capability", "90"),
        pytest.param(("--dtype", "bf16"), marks=pytest.mark.slow),
        pytest.param(("--dtype", "fp16"), marks=pytest.mark.slow),
        pytest.param(("--dtype", "fp32"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_kernels_compile_and_spill_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run_python(tmp_path, *SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr
    assert "bias_gelu, 4h: backward" in done.stdout
    assert any(path.suffix == ".cubin" for path in tmp_path.rglob("*"))


@pytest.mark.slow
def test_each_gpu_has_its_own_code(tmp_path: Path) -> None:
    done = run_python(tmp_path, *SCRIPT, "--only", "rotary")
    assert done.returncode == 0, done.stderr
    described = (json.loads(path.read_text()) for path in tmp_path.rglob("_rotate*.json"))
    found = {kernel["target"]["arch"] for kernel in described if "target" in kernel}
    assert found == {80, 90, 100}


@pytest.mark.slow
def test_the_interpreter_compiles_nothing(tmp_path: Path) -> None:
    done = run_python(tmp_path, *SCRIPT, interpret=True)
    assert done.returncode == 1
    assert "TRITON_INTERPRET=1 is set" in done.stderr


@pytest.mark.slow
def test_spilled_registers_are_an_error(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-c", STARVED)
    assert done.returncode == 1
    assert re.search(r"registers are spilled: (bias_gelu, 4h: forward, )?bias_gelu, 4h: backward", done.stderr)
