"""Triton's compiler takes the kernels, for GPUs that need not be here; the interpreter takes more than it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")


def compile_kernels(
    folder: Path, *arguments: str, interpret: bool = False
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "TRITON_CACHE_DIR": str(folder)}
    command = [
        sys.executable,
        "-W",
        "error::UserWarning",
        "-m",
        "samples.benchmarks.compiled_kernels",
        *arguments,
    ]
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
    done = compile_kernels(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert "bias_gelu, 4h: backward" in done.stdout
    assert any(path.suffix == ".cubin" for path in tmp_path.rglob("*"))


def test_the_interpreter_compiles_nothing(tmp_path: Path) -> None:
    done = compile_kernels(tmp_path, interpret=True)
    assert done.returncode == 1
    assert "TRITON_INTERPRET=1 is set" in done.stderr
