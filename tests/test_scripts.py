"""The scripts before and after: few lines apart, and the same losses; and the files that launch them."""

from __future__ import annotations

import difflib
import io
import math
import os
import platform
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch

from samples import corpus
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "samples" / "scripts"
STEPS = 3
LINES = 10
ETC = Path("/etc/netns")
NAMES = ["nanogpt", "accelerate", "trainer", "dpo", "peft"]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place to run in, with a text of random tokens, so that no tokenizer is trained."""
    kept = tmp_path / corpus.FOLDER
    kept.mkdir(parents=True)
    tokens = np.random.default_rng(0).zipf(1.3, size=400_000) % corpus.VOCAB_SIZE
    np.save(kept / f"stdlib-{platform.python_version()}-{corpus.VOCAB_SIZE}.npy", tokens.astype(np.uint16))
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": path, "PATH": scripts, "OMP_NUM_THREADS": "1", **more}


def run(folder: Path, *command: str, **more: str) -> str:
    finished = subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


def run_module(rank: int, folder: Path, module: str, *arguments: str) -> str:
    """What ``python -m module`` prints, in a forked rank, which need not import torch first."""
    os.chdir(folder)
    sys.argv = [module, *arguments]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_module(module, run_name="__main__")
    return printed.getvalue()


def numbers(text: str) -> list[float]:
    """What the steps printed: losses and norms."""
    lines = [line for line in text.splitlines() if "loss" in line and "train_loss" not in line]
    return [float(x) for line in lines for x in re.findall(r"(?:loss|norm)'?:? '?([0-9.]+)", line)]


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_few_lines_apart(name: str) -> None:
    before, after = ((SCRIPTS / f"{name}_{which}.py").read_text().splitlines() for which in ("before", "after"))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    changes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    assert 0 < sum(max(i2 - i1, j2 - j1) for _, i1, i2, j1, j2 in changes) <= LINES


def test_a_pair_trains_alike(folder: Path) -> None:
    """As the slow test has it of all, in forked processes."""
    script = "samples.scripts.nanogpt"
    before = numbers(*run_ranks(run_module, 1, folder, f"{script}_before", "2"))
    after = numbers("".join(run_ranks(run_module, 4, folder, f"{script}_after", "2", timeout=120)))
    assert len(before) == 5
    assert after == pytest.approx(before, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_pairs_train_alike(name: str, folder: Path) -> None:
    pytest.importorskip("accelerate")
    module = f"samples.scripts.{name}"
    before = numbers(run(folder, sys.executable, "-m", f"{module}_before", str(STEPS)))
    launched = ["torchrun", "--standalone", "--nproc-per-node", "4"]
    after = numbers(run(folder, *launched, "-m", f"{module}_after", str(STEPS)))
    assert len(before) >= 2 * STEPS
    assert after == pytest.approx(before, rel=2e-3 if name in ("trainer", "peft") else 1e-4)
    (saved,) = (file for file in (folder / "out" / name).iterdir() if file.suffix in (".pt", ".safetensors"))
    assert saved.stat().st_size > 1_000_000


MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2)]


@pytest.mark.parametrize(
    ("device", "mesh"), [("cpu", (1, 2, 1)), *(pytest.param("cuda", mesh, marks=pytest.mark.gpu) for mesh in MESHES)]
)
def test_ranks_on_one_card_train_as_the_plain_model(device: str, mesh: tuple[int, int, int], folder: Path) -> None:
    """Over NCCL on a GPU, and over gloo without one; beside the plain model there, and on the CPU."""
    if torch.cuda.is_available() != (device == "cuda"):
        pytest.skip("with a GPU over NCCL, without one over gloo")
    script = str(ROOT / "samples" / "launch" / "ranks_on_one_gpu.sh")
    sizes = ["--layers", "4", "--hidden", "128", "--heads", "4", "--length", "32", "--warm-up", "1"]
    sizes += ["--mesh", ",".join(map(str, mesh)), "--steps", str(STEPS)]
    parallel = run(folder, script, str(math.prod(mesh)), *sizes, MASTER_PORT=free_port())
    plain = ["samples.train", "--plain", *sizes]
    losses = numbers(
        run(folder, sys.executable, "-m", *plain) if device == "cuda" else run_ranks(run_module, 1, folder, *plain)[0]
    )
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert numbers(parallel) == pytest.approx(losses, rel=1e-4)
    if device == "cuda":
        assert numbers(run(folder, sys.executable, "-m", *plain, CUDA_VISIBLE_DEVICES="")) == pytest.approx(
            losses, rel=1e-3
        )


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_graphs_change_no_bit_of_a_loss(card: str, folder: Path) -> None:
    script = str(ROOT / "samples" / "launch" / "ranks_on_one_gpu.sh")
    sizes = ["--layers", "4", "--hidden", "128", "--heads", "4", "--length", "32"]
    said = subprocess.run(
        [script, *sizes],
        cwd=folder,
        env=environment(MASTER_PORT=free_port()),
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert said.returncode == 0, said.stdout + said.stderr[-4000:]
    assert said.stdout.count("the same bits in 20 steps") == len(MESHES)


STAND_IN = """
import json, os, sys
mesh = sys.argv[sys.argv.index("--mesh") + 1]
graphs = "--no-graphs" not in sys.argv
assert "--chunks" in sys.argv and int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"])
if mesh == "1,2,1" and graphs:
    sys.exit("no step")
if os.environ["RANK"] == "0":
    with open(sys.argv[sys.argv.index("--losses") + 1], "w") as file:
        for loss in (1.5, 0.75 + 1e-16 * (mesh == "2,1,1" and graphs)):
            file.write(json.dumps({"loss": loss}) + "\\n")
"""


def test_losses_with_and_without_graphs_are_compared_bit_by_bit(tmp_path: Path) -> None:
    """Against a stand-in of the training script, whose losses differ in the last bit on one mesh."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    script = str(ROOT / "samples" / "launch" / "ranks_on_one_gpu.sh")
    settings = environment(SCRIPT="stand_in", MESHES="1,1,1 2,1,1 1,2,1")
    said = subprocess.run([script], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=100)
    assert said.returncode == 1
    assert said.stdout.splitlines() == [
        "1,1,1: the same bits in 2 steps, at last 0x1.8000000000000p-1 with graphs, 0x1.8000000000000p-1 without",
        "2,1,1: DIFFERENT from step 2 on 0x1.8000000000001p-1 with graphs, 0x1.8000000000000p-1 without",
        "1,2,1: no losses with graphs",
    ]
    assert "no step" in said.stderr
    settings["MESHES"] = "1,1,1"
    assert subprocess.run([script], cwd=tmp_path, env=settings, capture_output=True, timeout=100).returncode == 0


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.slow
def test_two_launchers_are_one_job(folder: Path) -> None:
    port = free_port()
    script = str(ROOT / "samples" / "launch" / "torchrun_two_nodes.sh")
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GPUS_PER_NODE": "2"}
    settings["SCRIPT"] = "samples.scripts.nanogpt_after"
    second = subprocess.Popen(
        [script, str(STEPS)], cwd=folder, env=environment(NODE_RANK="1", **settings), stdout=subprocess.DEVNULL
    )
    try:
        first = run(folder, script, str(STEPS), NODE_RANK="0", **settings)
        assert second.wait(60) == 0
    finally:
        second.kill()
    assert len(numbers(first)) == 2 * STEPS + 1


@contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """What starts a command on each of two hosts with a network, a name and files of their own, joined by a cable."""
    names = [f"autoptd-{os.getpid()}-{i}" for i in range(2)]
    ends = [f"ptd{os.getpid() % 10**6}{i}" for i in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("netns", "add", name)
            etc = ETC / name  # is /etc there
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.1 {names[0]}\n10.77.0.2 {names[1]}\n")
            (etc / "resolv.conf").touch()
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", end)
            for device in ("lo", end):
                ip("-n", name, "link", "set", device, "up")
        named = 'hostname "$0"; mkdir -p "$TMPDIR/$0"; export TMPDIR="$TMPDIR/$0"; exec "$@"'
        start = ["unshare", "--uts", "sh", "-c", named]
        yield [["ip", "netns", "exec", name, *start, name] for name in names]
    finally:
        subprocess.run(["ip", "link", "delete", ends[0]], check=False, capture_output=True)
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(ETC / name, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("ip") or os.geteuid() != 0, reason="makes network namespaces: needs Linux's iproute2 and root"
)
def test_two_machines_are_one_job(folder: Path) -> None:
    """The launch file on each of two hosts that have nothing in common but the cable between them."""
    script = str(ROOT / "samples" / "launch" / "torchrun_two_nodes.sh")
    settings = {"MASTER_ADDR": "10.77.0.1", "GPUS_PER_NODE": "2", "TMPDIR": str(folder)}
    settings |= {"SCRIPT": "samples.scripts.nanogpt_after", "MASTER_PORT": "29500"}
    before = numbers(run(folder, sys.executable, "-m", "samples.scripts.nanogpt_before", str(STEPS)))
    with two_hosts() as (first, second):
        other = subprocess.Popen(
            [*second, script, str(STEPS)],
            cwd=folder,
            env=environment(NODE_RANK="1", **settings),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            after = numbers(run(folder, *first, script, str(STEPS), NODE_RANK="0", **settings))
            assert other.wait(60) == 0
        finally:
            if other.poll() is None:
                os.killpg(other.pid, signal.SIGKILL)
    assert after == pytest.approx(before, rel=1e-4)


def test_slurm_starts_a_launcher_a_node(folder: Path) -> None:
    """Against a stand-in of Slurm's commands: the node's launcher gets the job's nodes and the first one's address."""
    for name, body in {"scontrol": 'printf "%s\\n" node-a node-b', "srun": 'printf "%s\\n" "$@"'}.items():
        file = folder / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
    settings = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77"}
    settings["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    script = str(ROOT / "samples" / "launch" / "slurm.sh")
    given = run(folder, script, "--mesh", "8,2,1", **settings, SLURM_GPUS_ON_NODE="4").split()
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "4", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "node-a:29500", "--rdzv-id", "77", "-m", "samples.train", "--mesh", "8,2,1"]
    assert given == ["--kill-on-bad-exit=1", *command]


def test_the_page_names_what_exists() -> None:
    page = (ROOT / "samples" / "from_your_script_to_64_gpus.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (ROOT / "samples" / link).exists(), link
    for path in re.findall(r"samples/[a-z_/]+\.(?:sh|py)", page):
        assert (ROOT / path).exists(), path
