"""The loops that people have, on several ranks, beside the same loops on one device."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoptd
from autoptd.runtime.module.parallel import Parallel
from samples.gpt import GPT, GPTConfig
from tests.ranks import run_ranks

SIZES = GPTConfig(vocab_size=96, block_size=16, n_layer=2, n_head=2, n_embd=32)
STEPS, ROWS, MAX_NORM = 3, 4, 0.1
MESHES = [(2, 2, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)]
Mesh = tuple[int, int, int]


class Seen(NamedTuple):
    """A call, as a loop saw it."""

    loss: float
    norm: float | None


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**vars(SIZES), "dropout": dropout})).double()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.1)
    return model


def make_data(rows: int = 2 * STEPS * ROWS * 2) -> TensorDataset:
    torch.manual_seed(1)
    ids = torch.randint(0, SIZES.vocab_size, (rows, SIZES.block_size + 1))
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def compile_model(model: nn.Module, mesh: Mesh, **options: Any) -> autoptd.CompiledProgram:
    example = tuple(x[:1].clone() for x in make_data(1).tensors)
    return autoptd.compile(model, mesh=mesh, example_inputs=example, num_microbatches=ROWS, **options)


def load(replicas: int = 1, replica: int = 0, rows: int = ROWS) -> DataLoader[tuple[Tensor, ...]]:
    data = make_data()
    sampler: Any = DistributedSampler(data, replicas, replica, shuffle=False)
    return DataLoader(data, rows, sampler=sampler)


def halve(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def compare(
    mesh: Mesh, parallel_loop: Callable[[Parallel, Any], Any], plain_loop: Callable[..., Any], **options: Any
) -> None:
    """``parallel_loop(parallel, loader)`` on every rank sees what ``plain_loop(model, loader)`` sees, and trains so."""
    model = make_model()
    program = compile_model(model, mesh, **options)

    def work(rank: int) -> tuple[list[Seen], dict[str, Tensor]]:
        parallel = program.bind()
        seen = parallel_loop(parallel, load(mesh[2], parallel.coordinates.data))
        return seen, parallel.full_state_dict()

    def alone(rank: int) -> tuple[list[Seen], dict[str, Tensor]]:
        plain = copy.deepcopy(model)
        return plain_loop(plain, load(rows=ROWS * mesh[2])), plain.state_dict()

    ((expected, weights),) = run_ranks(alone, 1, timeout=150)
    results = run_ranks(work, program.mesh.size, timeout=150)
    for seen, _ in results:
        assert len(seen) == len(expected)
        for (loss, norm), (true, true_norm) in zip(seen, expected, strict=True):
            assert loss == pytest.approx(true, rel=1e-10)
            assert norm == (None if true_norm is None else pytest.approx(true_norm, rel=1e-10))
    for name, tensor in weights.items():
        torch.testing.assert_close(results[0][1][name], tensor, rtol=1e-7, atol=1e-9)


def train_plainly(model: nn.Module, loader: Any) -> list[Seen]:
    """Two calls a step, torch's own clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = halve(optimizer)
    seen = []
    for number, batch in zip(range(2 * STEPS), loader, strict=False):
        loss = model(*batch)[1]
        (loss / 2).backward()
        norm = None
        if number % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(Seen(loss.item(), norm))
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_plain_loop(mesh: Mesh) -> None:
    compare(mesh, train_plainly, train_plainly)


def train_with_accelerate(model: nn.Module, loader: Any) -> list[Seen]:
    accelerate = pytest.importorskip("accelerate")
    # The batch is not larger for there being more processes, so the scheduler takes one step at a time.
    whole = accelerate.DataLoaderConfiguration(split_batches=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer, scheduler = accelerator.prepare(model, optimizer, halve(optimizer))
    seen = []
    for _, batch in zip(range(2 * STEPS), loader, strict=False):
        with accelerator.accumulate(prepared):
            loss = prepared(*batch)[1]
            accelerator.backward(loss)
            norm = None
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(prepared.parameters(), MAX_NORM).item()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(Seen(loss.item(), norm))
    if isinstance(model, Parallel):
        assert prepared is model  # not wrapped
        if accelerator.is_main_process:
            with pytest.warns(UserWarning, match=r"this rank's slices .*full_state_dict"):
                accelerator.save_state("state")
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_accelerate(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compare(mesh, train_with_accelerate, train_with_accelerate)


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_accelerates_precision_is_warned_of_where_the_program_has_another(precision: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    program = compile_model(make_model().float(), (1, 1, 1))

    def work(rank: int) -> list[str]:
        accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
        parallel = accelerator.prepare(program.bind())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                parallel(*next(iter(load())))
        return [str(warning.message) for warning in caught]

    (found,) = run_ranks(work, 1)
    if precision == "no":
        assert not found
    else:
        (message,) = found
        assert "mixed_precision='bf16' (the Trainer's bf16=True) has no effect" in message


def train_with_lightning(model: nn.Module, loader: Any) -> list[Seen]:
    lightning = pytest.importorskip("lightning")
    seen: list[Seen] = []

    class Training(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, ...], index: int) -> Tensor:
            loss: Tensor = self.model(*batch)[1]
            seen.append(Seen(loss.item(), None))
            return loss

        def validation_step(self, batch: tuple[Tensor, ...], index: int) -> None:
            logits, loss = self.model(*batch)
            accuracy = (logits.argmax(-1) == batch[1]).double().mean()
            if isinstance(self.model, Parallel):
                accuracy = self.model.gather_replicas(accuracy).mean()
            seen.append(Seen(loss.item(), accuracy.item()))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halve(optimizer), "interval": "step"}}

    trainer = lightning.Trainer(
        strategy=lightning.pytorch.strategies.SingleDeviceStrategy(device="cpu"),
        accelerator="cpu",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=MAX_NORM,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Training(), loader, loader)
    if isinstance(model, Parallel):
        with pytest.warns(UserWarning, match=r"this rank's slices .*full_state_dict"):
            trainer.save_checkpoint("checkpoint.pt")
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_lightning(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    compare(mesh, train_with_lightning, train_with_lightning, outputs=("0",))


def train_explicitly(parallel: Parallel, loader: Any) -> list[Seen]:
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    scheduler = halve(optimizer)
    seen = []
    for _, (idx, targets) in zip(range(STEPS), loader, strict=False):
        batch = {"idx": idx, "targets": targets}
        _, loss = parallel(**batch)
        loss.backward()
        parallel.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        last = parallel.last_step
        assert last.loss == loss.item()
        assert last.tokens_per_second is not None
        seen.append(Seen(last.loss, last.gradient_norm))
    return seen


def train_each_step(model: nn.Module, loader: Any) -> list[Seen]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = halve(optimizer)
    seen = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(*batch)[1]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(Seen(loss.item(), norm.item()))
    return seen


@pytest.mark.parametrize("mesh", MESHES)
def test_the_last_step_in_numbers(mesh: Mesh) -> None:
    compare(mesh, train_explicitly, train_each_step)


def test_evaluation_draws_no_masks() -> None:
    """`eval` and ``no_grad``: forwards only, the plain model's loss, no gradients, and training goes on as before."""
    model = make_model(dropout=0.3)
    program = compile_model(model, (2, 2, 1))
    batches = [batch for _, batch in zip(range(2), load(), strict=False)]

    def work(rank: int, evaluate: bool) -> tuple[list[float], float | None]:
        parallel = program.bind()
        losses, evaluated = [], None
        for idx, targets in batches:
            losses.append(parallel(idx, targets)[1].item())
            if evaluate:
                parallel.eval()
                with torch.no_grad():
                    evaluated = parallel(*batches[1])[1].item()
                    assert evaluated == parallel(*batches[1])[1].item()
                assert all(p.grad is None for p in parallel.parameters())
                parallel.train()
        return losses, evaluated

    with torch.no_grad():
        expected = model.eval()(*batches[1])[1].item()
    results = run_ranks(work, 4, True)
    assert all(evaluated == pytest.approx(expected, rel=1e-12) for _, evaluated in results)
    assert [losses for losses, _ in results] == [losses for losses, _ in run_ranks(work, 4, False)]
    assert results[0][0][1] != pytest.approx(expected, rel=1e-6)  # masks were drawn


def test_the_call_has_the_signature_of_the_models_own() -> None:
    """By which the Trainer knows columns to keep, those to be refused too, and those that are labels."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, idx: Tensor, mask: Tensor | None = None, *, labels: Tensor, scale: float = 1.0) -> Tensor:
            loss: Tensor = self.model(idx, labels)[1]
            return loss * scale

    example = dict(zip(("idx", "labels"), make_data(1).tensors, strict=True))
    parallel = autoptd.compile(Masked(), (1, 1, 1), example_inputs={**example, "scale": 2.0}, num_microbatches=1).bind()
    assert list(inspect.signature(parallel.forward).parameters) == ["idx", "mask", "labels", "scale", "others"]
    utils = pytest.importorskip("transformers.utils")
    assert utils.find_labels(type(parallel)) == ["labels"]
    assert type(parallel).__name__ == "Parallel"
    assert isinstance(parallel, Parallel)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 1, 2), (1, 2, 2)])
def test_inference_mode_before_training(mesh: Mesh) -> None:
    program = compile_model(make_model(), mesh)

    def work(rank: int) -> tuple[float, float]:
        parallel = program.bind()
        batch = next(iter(load(mesh[2], parallel.coordinates.data)))
        with torch.inference_mode():
            before = parallel(*batch)[1].item()
        loss = parallel(*batch)[1]
        loss.backward()
        return before, loss.item()

    for before, loss in run_ranks(work, program.mesh.size):
        assert before == loss


def test_buffers_that_are_written_count() -> None:
    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()
            self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            return self.model(idx, targets)[1] * (self.scale * 2).exp()  # type: ignore[no-any-return]

    model = Scaled()
    example = tuple(x[:1].clone() for x in make_data(1).tensors)
    parallel = autoptd.compile(model, (1, 1, 1), example_inputs=example, num_microbatches=ROWS).bind()
    batch = next(iter(load()))
    for _ in range(3):
        assert torch.isclose(parallel(*batch), model(*batch), rtol=1e-12)
        model.scale.mul_(1.5)
        parallel.get_buffer("scale").mul_(1.5)


def test_a_forward_that_takes_others_and_a_number() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, idx: Tensor, targets: Tensor, others: Tensor | None = None, scale: float = 1.0) -> Tensor:
            loss: Tensor = self.model(idx, targets)[1]
            return loss * scale

    example = dict(zip(("idx", "targets"), (x[:1].clone() for x in make_data(1).tensors), strict=True))
    program = autoptd.compile(Named(), (1, 1, 1), example_inputs={**example, "scale": 2.0}, num_microbatches=ROWS)
    parallel = program.bind()
    signature = inspect.signature(parallel.forward)
    assert list(signature.parameters) == ["idx", "targets", "others", "scale", "others_"]
    batch = next(iter(load()))
    assert torch.equal(parallel(*batch, scale=signature.parameters["scale"].default), parallel(*batch, scale=2))
    with pytest.raises(ValueError, match="scale is True, but the program was compiled with 2"):
        parallel(*batch, scale=True)


def test_a_numbered_cpu_is_the_cpu() -> None:
    parallel = compile_model(make_model(), (1, 1, 1)).bind("cpu:0")
    assert parallel(*next(iter(load())))[1].isfinite()


def test_an_optimizer_made_before_bind_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = compile_model(model, (1, 1, 1)).bind()
    parallel(*next(iter(load())))[1].backward()
    with pytest.raises(ValueError, match=r"wte.weight, .* optimizer = AdamW\(parallel.parameters\(\), \.\.\.\)"):
        optimizer.step()


def test_an_optimizer_of_whole_tensors_is_refused_where_the_mesh_divides_them() -> None:
    accelerate = pytest.importorskip("accelerate")

    def work(rank: int, mesh: Mesh) -> str:
        parallel = compile_model(make_model(), mesh).bind()
        parallel(*next(iter(load())))[1].backward()
        optimizer = torch.optim.Adafactor(parallel.parameters(), lr=1e-2)
        try:
            optimizer.step()
        except ValueError as error:
            # The way out, in Accelerate's wrapper, which loads the state that it takes.
            optimizer = parallel.whole_optimizer(torch.optim.Adafactor, parallel.parameters(), lr=1e-2)
            accelerate.Accelerator(cpu=True).prepare(optimizer).step()
            return str(error)
        return ""

    refused = "optimizer = parallel.whole_optimizer(Adafactor, parameters, ...)"
    assert all(refused in said for mesh in ((2, 1, 1), (1, 2, 1)) for said in run_ranks(work, 2, mesh))
    assert run_ranks(work, 2, (1, 1, 2)) == ["", ""]


def test_torchs_checkpoint_round_the_parallel_model_is_refused() -> None:
    """Each saved tensor would be made by a whole step, in the middle of another; ranks waited for ever."""

    def work(rank: int) -> None:
        parallel = compile_model(make_model(), (1, 2, 1)).bind()
        batch = next(iter(load()))
        with pytest.raises(ValueError, match=r"inside torch\.utils\.checkpoint.*compile\(recompute='full'\)"):
            checkpoint(parallel, *batch, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            parallel(*batch)[1].backward()

    run_ranks(work, 2)


def test_a_part_of_the_model_that_another_rank_has_is_named() -> None:
    def work(rank: int) -> None:
        parallel = compile_model(make_model(), (1, 2, 1)).bind()
        if rank == 0:
            assert parallel.wpe.weight is parallel.get_parameter("wpe.weight")
            return
        with pytest.raises(AttributeError, match=r"'wpe': .* modules that the stages of this rank read "):
            parallel.wpe.weight.requires_grad_(False)

    run_ranks(work, 2)


@pytest.mark.parametrize(
    "take",
    [copy.copy, copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel],
    ids=["copy", "deepcopy", "pickle", "average"],
)
def test_a_copy_of_the_parallel_model_is_refused(take: Callable[[nn.Module], object]) -> None:
    parallel = compile_model(make_model(), (1, 1, 1)).bind()
    with pytest.raises(TypeError, match=r"neither copied nor pickled: save_checkpoint .* average of its weights"):
        take(parallel)


def test_a_parameter_frozen_after_compile_is_refused() -> None:
    model = make_model()
    program = compile_model(model, (1, 1, 1))
    model.get_parameter("wpe.weight").requires_grad_(False)
    with pytest.raises(ValueError, match=r"parameter wpe\.weight requires no gradient now, unlike when"):
        program.bind()
    program.bind(weights=model.state_dict())


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
def test_models_of_different_seeds_are_refused(mesh: Mesh) -> None:
    """As a script builds them that forgets the seed: replicas, slices and stages would be of different models."""

    def work(rank: int, seeds: tuple[int, int], given: bool) -> str:
        model = make_model()
        program = compile_model(model, mesh)
        torch.manual_seed(seeds[rank])
        nn.init.normal_(model.get_parameter("h.0.ln_1.weight"))
        try:
            program.bind(weights=model.state_dict() if given else None)
        except RuntimeError as error:
            return str(error)
        return "bound"

    expected = "h.0.ln_1.weight has other values on rank 1 than on rank 0; ranks [1] of 2 differ"
    for given in (False, True):
        for said in run_ranks(work, 2, (0, 1), given):
            assert expected in said
            assert "call torch.manual_seed before building the model" in said
    assert run_ranks(work, 2, (3, 3), False) == ["bound", "bound"]


def test_ddp_is_refused() -> None:
    """With tensor ranks alone all shapes are the same, and DDP would not notice."""
    program = compile_model(make_model(), (2, 1, 1))

    def work(rank: int, nested: bool) -> None:
        parallel: nn.Module = program.bind()
        batch = next(iter(load()))
        if nested:
            parallel = nn.Sequential(parallel)
            call = partial(DistributedDataParallel(parallel), batch[0])
        else:
            call = partial(DistributedDataParallel(parallel), *batch)
        with pytest.raises(ValueError, match="inside DistributedDataParallel, which gave every rank the first"):
            call()

    run_ranks(work, 2, False)
    run_ranks(work, 2, True)
