"""Golden texts, and Triton's kernels on tensors of the CPU.

Golden texts are kept beside the tests, compared line by line, written anew by ``pytest --update-golden``.
"""

from __future__ import annotations

import difflib
import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch

from autoptd.runtime.kernels import registration
from tests.captures import SHARED, Captures
from tests.counting import count_all
from tests.shared_passes import order_once, run_passes_once

# On some processors MKL rounds a product otherwise where its operands lie otherwise; in this mode on none, so that
# "bit for bit" is a statement about our graphs. It is read at the first product.
os.environ["MKL_CBWR"] = "COMPATIBLE"

# One thread, as each rank has: some operators add up in another order with two, tiny ones gain nothing from them, and
# workers that wait for each other's threads lose much.
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that a test starts
torch.set_num_threads(1)

count_all()

# A collection of all objects takes a second in a process that has collected every test, and finds little.
gc.set_threshold(10_000, 10, 20)


def pytest_configure(config: pytest.Config) -> None:
    """Without ``-m gpu`` no test sees a GPU: what they say of the CPU they say on any machine."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
        # Where the first backward comes after fake tensors, a torch built for CUDA starts threads for the devices that
        # it lacks, and no backward runs in a forked process any more.
        torch.ones((), requires_grad=True).backward()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One worker more than there are cores: while one waits for its ranks or for a limit, another has work."""
    return (yield) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put failures first: their tests wait, and at the end of a run the other workers would wait with them."""
    items.sort(key=lambda item: "failures" not in item.path.name)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device whose tensors go to the Triton kernels: the CPU under Triton's interpreter, and a GPU."""
    pytest.importorskip("triton")
    device = torch.device(request.param)
    if torch.cuda.is_available() != (device.type == "cuda"):
        pytest.skip("Triton compiles where there is a GPU, and interprets where there is none")
    monkeypatch.setattr(registration, "kernel_devices", {device.type})
    return device


@pytest.fixture
def card() -> str:
    """A CUDA device, for tests that are marked with `gpu`."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture(scope="session", autouse=True)
def captures() -> Iterator[Captures]:
    """`compile` and the planner trace each of the tests' models once, and no test changes what they share."""
    with pytest.MonkeyPatch.context() as patch:
        for user in ("autoptd.compiler", "autoptd.planning.estimator"):
            patch.setattr(f"{user}.capture", SHARED.capture)
        patch.setattr("autoptd.planning.estimator.run_passes", run_passes_once)
        patch.setattr("autoptd.planning.estimator.FusedOrder", order_once)
        yield SHARED
    SHARED.check()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: compare with the file `name` in the test's folder ``golden/``."""
    folder = request.path.parent / "golden"

    def compare(name: str, text: str) -> None:
        compare_golden(folder / name, text, update=request.config.getoption("--update-golden"))

    return compare


def compare_golden(file: Path, text: str, *, update: bool) -> None:
    if update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        return
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    if text != expected:
        lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), file.name, "now", lineterm="")
        pytest.fail("\n".join([*lines, "if this is meant: pytest --update-golden"]), pytrace=False)
