"""The samples: text survives the tokenizer, batches agree over replicas, the GPT is an ordinary one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from samples import corpus, train
from samples.benchmarks import kernels, memory_traffic, one_device, utilisation
from samples.benchmarks.bounded_process import BoundedProcess
from samples.benchmarks.hand_written import train_by_hand
from samples.benchmarks.kernel_cases import CASES, Maker, Sizes
from samples.benchmarks.pinned import own_cores
from samples.gpt import GPT, GPTConfig
from tests.marks import slow, slow_but
from tests.ranks import run_ranks

SMALL = GPTConfig(vocab_size=96, block_size=16, n_layer=2, n_head=2, n_embd=32)


def test_tokenizer_round_trip() -> None:
    texts = corpus.read_sources(corpus.list_sources()[:12])
    tokenizer = corpus.train_tokenizer(texts, vocab_size=600)
    assert tokenizer.get_vocab_size() == 600
    strange = "def f(x):\n\treturn 'é 漢字 🙂'\r\n  # \x00\x7f end"
    for text in [*texts, strange]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert corpus.train_tokenizer(texts, vocab_size=600).to_str() == tokenizer.to_str()


def test_sources_are_no_tests() -> None:
    sources = corpus.list_sources()
    assert len(sources) > 300
    assert sources == sorted(sources)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-4:]) for path in sources)


def test_corpus_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "list_sources", lambda: [Path(corpus.__file__)])
    tokens = corpus.load_corpus(tmp_path, vocab_size=300)
    monkeypatch.setattr(corpus, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    assert np.array_equal(corpus.load_corpus(tmp_path, vocab_size=300), tokens)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".npy"]
    with pytest.raises(ValueError, match="257 to 65536"):
        corpus.load_corpus(tmp_path, vocab_size=100)


def test_replicas_share_the_one_device_batch() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    whole = corpus.batches(tokens, 6, 8, seed=3)
    replicas = [corpus.batches(tokens, 2, 8, seed=3, replica=r, replicas=3) for r in range(3)]
    for (idx, targets), *parts in itertools.islice(zip(whole, *replicas, strict=True), 4):
        assert torch.equal(idx, torch.cat([part[0] for part in parts]))
        assert torch.equal(targets, torch.cat([part[1] for part in parts]))
        assert torch.equal(targets, idx + 1)


def test_gpt_forward() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    idx, targets = torch.randint(0, 96, (2, 2, 16))
    logits, none = model(idx)
    assert logits.shape == (2, 16, 96)
    assert none is None
    _, loss = model(idx, targets)
    assert abs(loss.item() - np.log(96)) < 0.2
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.lm_head.weight is model.wte.weight


def test_gpt_is_causal() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    idx = torch.randint(0, 96, (1, 16))
    changed = idx.clone()
    changed[0, 9] = (idx[0, 9] + 1) % 96
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", slow_but([next(iter(train.MODELS))], train.MODELS))
def test_plain_training_lowers_the_loss(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = np.tile(np.arange(40, dtype=np.uint16), 50)
    monkeypatch.setattr(corpus, "load_corpus", lambda: tokens)
    monkeypatch.setattr(corpus, "VOCAB_SIZE", 64)
    sizes = "--layers 2 --hidden 32 --heads 2 --length 16 --steps 8 --mesh 1,1,2 --learning-rate 1e-2 --warm-up 1"
    log = tmp_path / "log.jsonl"
    train.main(["--plain", "--model", name, *sizes.split(), "--losses", str(log)])
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert len(losses) == 8
    assert losses[-1] < 0.8 * losses[0]
    assert capsys.readouterr().out.count("tokens/s") == 8


def test_accumulated_gradient_is_the_batchs() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).double()
    idx, targets = torch.randint(0, 96, (2, 6, 16))
    loss = train.accumulate_gradients(model, {"idx": idx, "targets": targets}, 3)
    gradients = [gradient_of(parameter) for parameter in model.parameters()]
    model.zero_grad()
    whole = model(idx, targets)[1]
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-14, atol=0)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, gradient_of(parameter), rtol=1e-10, atol=1e-15)


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.slow
def test_mesh_and_one_device_print_the_same_loss(tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--hidden", "32", "--heads", "2", "--length", "16", "--steps", "3", "--mesh", "2,2,1"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "-m", "samples.train"]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    losses: list[list[float]] = []
    for command in (["-m", "samples.train", "--plain"], launcher):  # the first alone makes the corpus
        log = tmp_path / f"{len(losses)}.jsonl"
        subprocess.run(
            [sys.executable, *command, *sizes, "--dtype", "float64", "--losses", str(log)],
            cwd=Path(__file__).parents[1],
            env=threads,
            check=True,
        )
        losses.append([json.loads(line)["loss"] for line in log.read_text().splitlines()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-14, abs=0)
    assert losses[0][2] != losses[0][0]


@pytest.mark.parametrize(("mesh", "chunks"), [slow((2, 2, 2), 1), slow((1, 2, 2), 2), ((1, 1, 2), 1)])
def test_the_hand_written_rival_trains_the_same_model(
    mesh: tuple[int, int, int], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "load_corpus", lambda: np.tile(np.arange(64, dtype=np.uint16), 50) ** 2 % 64)
    monkeypatch.setattr(corpus, "VOCAB_SIZE", 64)
    sizes = f"--layers 4 --hidden 32 --heads 4 --length 16 --steps 3 --dtype float64 --chunks {chunks}"
    args = train.parse_arguments([*sizes.split(), "--mesh", ",".join(map(str, mesh)), "--warm-up", "1"])
    ranks = run_ranks(lambda _: [loss for loss, _ in train_by_hand(args)], math.prod(mesh))
    args.plain = True
    plain = [loss for loss, _ in train.train(args)]
    assert plain[2] < 0.99 * plain[0]
    assert all(losses == pytest.approx(plain, rel=1e-13, abs=0) for losses in ranks)


def test_output_without_loss_is_refused() -> None:
    with pytest.raises(TypeError, match="without a loss"):
        train.find_loss((torch.zeros(2), None))


def test_neighbouring_ranks_share_a_core_and_no_core_is_idle() -> None:
    assert [own_cores([4, 7], rank, (2, 2, 2)) for rank in range(8)] == [[4]] * 4 + [[7]] * 4
    assert [own_cores([4, 7], rank, (2, 2, 1)) for rank in range(4)] == [[4], [7]] * 2
    assert [own_cores([4, 7], rank, (1, 2, 2)) for rank in range(4)] == [[4], [4], [7], [7]]
    assert [own_cores(range(3), rank, (1, 1, 2)) for rank in range(2)] == [range(1), range(1, 3)]
    assert own_cores(range(2), 0, (1, 1, 1)) == range(2)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels are timed")
    sizes = Sizes(rows=8, batch=1, hidden=128, matrices=1, length=16, vocabulary=100)
    monkeypatch.setattr(kernels, "CPU_SIZES", sizes)


@pytest.mark.usefixtures("few_rows")
def test_kernels_bytes_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--only", "gated_product"])
    row = next(line for line in capsys.readouterr().out.splitlines() if "gated_product" in line)
    least = [3 * 8 * 512 * 2 / 1e6, 5 * 8 * 512 * 2 / 1e6]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:-1] == [cell for n in least for cell in (f"{n:.2f}", f"{n:.2f}: 1.00", f"{n:.2f}: 1.00")]
    assert float(cells[-1]) < kernels.TOLERANCE


@pytest.mark.usefixtures("few_rows")
def test_a_norm_reads_its_rows_once() -> None:
    case = next(case for case in CASES if case.name == "rms_norm")
    rank = kernels.make_rank(torch.device("cpu"))
    operands = case.make(kernels.CPU_SIZES, Maker(torch.bfloat16, rank.device))
    with kernels.interpret(8), memory_traffic.count_traffic() as traffic:
        kernels.run_forward(case.ours, rank, 0.0, operands)
    assert traffic.count_once() == case.forward(kernels.CPU_SIZES)
    assert traffic.asked == traffic.count_once()


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("change", ["renamed", "unmasked"])
def test_another_interpreter_is_said(
    change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"renamed": {"create_other_load": (0, 1)}, "unmasked": {memory_traffic.LOAD: (0, 9)}}
    monkeypatch.setattr(memory_traffic, "ACCESSES", known[change])
    kernels.main(["--only", "gated_product"])
    printed = capsys.readouterr().out
    assert "Bytes are not counted: " in printed
    assert "not counted" in printed


@pytest.mark.usefixtures("few_rows")
def test_another_meaning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in CASES if case.name.startswith("gated_product"))
    changed = dataclasses.replace(case, plain=lambda rank, p, gate, up: torch.relu(gate) * up)
    monkeypatch.setattr(kernels, "CASES", (changed,))
    with pytest.raises(SystemExit, match="not what plain torch computes: gated_product"):
        kernels.main([])


@pytest.mark.slow
def test_a_way_that_fails_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilisation, "WAYS", ["eager", "no such way", utilisation.OURS])
    tables: list[Any] = []
    monkeypatch.setattr(utilisation, "publish", lambda *words: tables.append(words))
    utilisation.main(["--steps", "1", "--only", "b = 1, m = 8, AdamW"])
    eager, failed, ours = tables[0][3]
    assert failed[1:] == ["no such way", "failed", *["-"] * 4]
    assert float(ours[-1]) == pytest.approx(float(eager[-1]), rel=0.01)  # the same tokens


def sleep(asked: Connection) -> None:
    time.sleep(600)


def test_a_process_that_does_not_answer_is_ended_and_says_so() -> None:
    with BoundedProcess(sleep, limit=0.5) as process:
        assert process.ask() is None
        assert process.failure == "no answer in 0.5 s"
        assert process._process.exitcode == -signal.SIGKILL
        assert process.ask() is None
    with BoundedProcess(time.sleep, "one argument too many", limit=60.0) as process:
        assert process.ask() is None
        assert process.failure == "failed"


def test_a_way_that_fails_leaves_the_others_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [one_device.Step(seconds, 3, 2.0) for seconds in (0.2, 0.1, 0.3)]
    taken = {"eager": steps, "compiled": [step._replace(seconds=0.1) for step in steps], "rival": "failed"}
    monkeypatch.setattr(one_device, "take_turns", lambda *words: taken)
    row = one_device.compare(0, list(taken), 3, True, 1.0)
    ratio = "2.000 (1.000 to 3.000)"
    assert row == ["sample GPT", "200.0", "100.0", "failed", ratio, "-", "3 / 3", "0.0e+00"]
