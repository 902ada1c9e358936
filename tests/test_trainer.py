"""transformers' Trainer on several ranks, beside itself on one device, with uneven labels."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import autoptd
from autoptd.runtime.comm.connection import connect
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.engine.label_weights import read_items, weigh_items
from autoptd.runtime.module.parallel import Parallel
from samples.gpt import GPT, GPTConfig
from samples.huggingface import make_gpt2, make_llama
from tests.ranks import run_ranks
from tests.runtime.chain import Chain
from tests.runtime.module.test_parallel import CPU

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
Trainer = transformers.Trainer  # imported here, by its name, else every forked rank would import it anew

SIZES = GPTConfig(vocab_size=96, block_size=16, n_layer=2, n_head=2, n_embd=32)
STEPS, ROWS, ACCUMULATED = 3, 4, 2
Logged = list[tuple[float, float]]


def make_rows(count: int) -> list[dict[str, Tensor]]:
    """Prompts of 0 to 12 tokens are not learned: every microbatch has another count of labels."""
    torch.manual_seed(1)
    rows = []
    for number, ids in enumerate(torch.randint(0, SIZES.vocab_size, (count, SIZES.block_size))):
        labels = ids.clone()
        labels[: number * 5 % 13] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return make_llama(SIZES) if name == "llama" else make_gpt2(SIZES)


def score(found: Any) -> dict[str, float]:
    """What a user computes of the predicted tokens."""
    hits = (found.predictions[:, :-1] == found.label_ids[:, 1:]) & (found.label_ids[:, 1:] != -100)
    return {"hits": hits.sum(), "predicted": found.predictions.sum(), "rows": len(found.predictions)}


def train(
    model: nn.Module, rows: Any, batch: int, loader: Any = None, **options: Any
) -> tuple[Logged, list[float], Any]:
    """(loss, gradient norm) of each step, the loss and scores of an evaluation after them, and the trainer."""
    arguments = transformers.TrainingArguments(
        "out",
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=ACCUMULATED,
        max_steps=STEPS,
        max_grad_norm=0.1,
        learning_rate=1e-2,
        weight_decay=1.0,  # of linears and embeddings only, which the Trainer tells by the modules' classes
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **options,
    )
    given: Any = {"train_dataset": rows, "eval_dataset": rows, "compute_metrics": score}
    given["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    trainer = Trainer(model, arguments, **given)
    if isinstance(model, Parallel):
        trainer.gather_function = trainer.accelerator.gather_for_metrics = model.gather_replicas
    if loader is not None:
        trainer.get_train_dataloader = lambda: loader
        trainer.get_eval_dataloader = lambda *_: loader
    trainer.train()
    found = trainer.evaluate()
    evaluated = [found[f"eval_{name}"] for name in ("loss", "hits", "predicted", "rows")]
    steps = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    return steps, evaluated, trainer


CASES = [
    ((2, 2, 1), "gpt2", True),
    pytest.param((1, 2, 2), "llama", True, marks=pytest.mark.slow),
    pytest.param((1, 2, 2), "gpt2", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "name", "average"), CASES)
def test_trainer(
    mesh: tuple[int, int, int], name: str, average: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulated over calls with other counts of labels, clipped, scheduled, scored; a shard's file warned of."""
    monkeypatch.chdir(tmp_path)
    rows = make_rows(STEPS * ACCUMULATED * ROWS * mesh[2])
    model = make_model(name)
    program = autoptd.compile(model, mesh=mesh, num_microbatches=ROWS, outputs=("logits",))

    def work(rank: int) -> tuple[Logged, list[float]]:
        parallel = program.bind()
        sampler: Any = DistributedSampler(rows, mesh[2], parallel.coordinates.data, shuffle=False)  # type: ignore[arg-type]
        loader: Any = DataLoader(rows, ROWS, sampler=sampler)  # type: ignore[arg-type]
        steps, evaluated, trainer = train(parallel, rows, ROWS, loader, average_tokens_across_devices=average)
        if rank == 0:
            with (
                pytest.warns(UserWarning, match=r"this rank's slices .*save_strategy='no'"),
                suppress(RuntimeError),  # safetensors writes no tied tensors
            ):
                trainer.save_model("saved")
        return steps, evaluated

    def alone(rank: int) -> tuple[Logged, list[float]]:
        return train(copy.deepcopy(model), rows, ROWS * mesh[2])[:2]

    ((expected, evaluated),) = run_ranks(alone, 1, timeout=150)
    assert len(expected) == STEPS
    for steps, own in run_ranks(work, program.mesh.size, timeout=150):
        assert steps == [pytest.approx(step, rel=1e-5) for step in expected]
        assert own == pytest.approx(evaluated, rel=1e-5)


def test_items_of_unknown_labels_are_refused() -> None:
    chain = Chain((1, 1, 1), "gpipe", 1, 1)
    parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
    assert not parallel.accepts_loss_kwargs
    with pytest.raises(ValueError, match=r"num_items_in_batch is given, but the loss is not known .*x, ids, target"):
        parallel(**chain.batch(), num_items_in_batch=3)
    assert parallel._connection.rank.randomness.call == 0


def test_a_rank_alone_may_repeat_a_call_whose_items_were_refused() -> None:
    """Before the step: after it the call would count twice there, for dropout and for the others."""
    config = GPTConfig(32, 8, 1, 2, 8, dropout=0.5)
    program = autoptd.compile(GPT(config), (1, 2, 1), microbatch_size=1, num_microbatches=2)

    def work(rank: int) -> int:
        parallel = program.bind()
        idx = torch.arange(16).view(2, 8)
        if rank == 1:
            with pytest.raises(ValueError, match="argument idx has shape"):
                parallel(idx[:1], idx)
            with pytest.raises(ValueError, match=r"num_items_in_batch is .*expected one number"):
                parallel(idx, idx, num_items_in_batch=torch.ones(2))
        parallel(idx, idx, num_items_in_batch=14)
        return parallel._connection.rank.randomness.call

    assert run_ranks(work, 2) == [1, 1]


def test_items_weigh_a_call_by_its_labels() -> None:
    rows = make_rows(2 * ROWS)
    program = autoptd.compile(make_model("gpt2"), mesh=(1, 1, 1), num_microbatches=ROWS)
    parallel = program.bind()
    assert parallel.accepts_loss_kwargs
    batch = {name: torch.stack([row[name] for row in rows[:ROWS]]) for name in rows[0]}
    counted = int((batch["labels"][:, 1:] != -100).sum())
    rank = Rank.local(program.mesh)
    for items in (40, 40.0, torch.tensor(40), torch.tensor([40])):
        number = read_items(program.manifest, items, CPU)
        assert weigh_items(program.manifest, rank, batch, number).item() == counted / 40
    mean = parallel(**batch).loss
    part = parallel(**batch, num_items_in_batch=2 * counted).loss
    torch.testing.assert_close(part, mean / 2)
    parallel.zero_grad()
    mean.backward()
    whole = [p.grad.clone() for p in parallel.parameters() if p.grad is not None]
    parallel.zero_grad()
    part.backward()
    for gradient, half in zip(whole, (p.grad for p in parallel.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(half, gradient / 2)
