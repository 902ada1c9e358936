"""compile and load: the whole road, from a plain model to texts, and back from edited texts."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, fx, nn
from torch.nn import functional

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.weights.sources import read_weights
from samples.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=96, block_size=16, n_layer=2, n_head=4, n_embd=32)


def compile_small(**options: Any) -> CompiledProgram:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"num_microbatches": 4, "microbatch_size": 2, "num_model_chunks": 1, **options}
    program: CompiledProgram = autoptd.compile(GPT(CONFIG), (2, 2, 1), **settings)
    return program


def test_the_cut_is_weighed_by_the_cluster_that_is_given() -> None:
    logs = ["\n".join(compile_small(**options).log) for options in ({}, {"cluster": "laptop-cpu"})]
    assert "a microbatch on DGX A100 (Selene)" in logs[0]
    assert "a microbatch on laptop CPU" in logs[1]


def test_the_cut_fits_a_cluster_that_is_given() -> None:
    """Where none fits the log says so; the default cluster, which nobody asked for, limits nothing."""
    selene = autoptd.Cluster.load("dgx-a100")
    small = replace(selene, device=replace(selene.device, memory_bytes=1e5, reserved_bytes=0.0))
    logs = ["\n".join(compile_small(**options).log) for options in ({"cluster": small}, {"cluster": selene}, {})]
    assert ["no cut was found to fit in 0.0001 GB a rank" in log for log in logs] == [True, False, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_programs_of_a_two_layer_gpt(rank: int, golden: Callable[[str, str], None]) -> None:
    golden(f"gpt_program_{rank:02}.py", compile_small().texts[rank])


def test_compiling_twice_gives_the_same_bytes() -> None:
    assert compile_small().texts == compile_small().texts


def test_the_model_is_left_as_it_was() -> None:
    model = GPT(CONFIG).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    autoptd.compile(model, (2, 2, 1), num_microbatches=4)
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_the_parallel_model_begins_in_the_mode_of_the_plain_one(training: bool, tmp_path: Path) -> None:
    """As ``from_pretrained`` gives one in evaluation mode, which has no dropout until it is put in training mode."""
    model = GPT(replace(CONFIG, dropout=0.5)).train(training)
    program = autoptd.compile(model, (1, 1, 1), num_microbatches=1)
    program.save(tmp_path)
    loaded = autoptd.load(tmp_path).bind(weights=model.state_dict())
    ids = torch.arange(16).unsqueeze(0)
    for parallel in (program.bind(), loaded):
        assert parallel.training is training
        losses = [parallel(idx=ids, targets=ids)[1].item() for _ in range(2)]
        assert (losses[0] == losses[1]) is not training


def test_defaults_are_eight_microbatches_a_rank_and_two_chunks() -> None:
    program = autoptd.compile(GPT(CONFIG), (1, 2, 1))
    assert (program.manifest.num_microbatches, program.manifest.num_model_chunks) == (16, 2)
    assert program.manifest.microbatch_size == 1
    assert len(program.stages) == 4


def test_a_saved_program_loads_as_the_same_texts(tmp_path: Path) -> None:
    program = compile_small()
    program.save(tmp_path / "out")
    loaded = autoptd.load(tmp_path / "out")
    assert loaded.texts == program.texts
    assert loaded.manifest == program.manifest
    assert loaded.schedule == program.schedule


@pytest.mark.parametrize("duplicate", [copy, deepcopy])
def test_a_copied_program_is_the_same(duplicate: Callable[[CompiledProgram], CompiledProgram]) -> None:
    made = duplicate(compile_small())
    assert made.texts == compile_small().texts
    assert made.check() == ()


def test_an_edit_is_what_check_judges(tmp_path: Path) -> None:
    compile_small().save(tmp_path / "out")
    file = tmp_path / "out" / "program_00.py"
    text = file.read_text()
    line = next(one for one in text.splitlines() if "h0_attn_c_proj_g = " in one)
    file.write_text(text.replace(line, "    h0_attn_c_proj_g = h0_attn_c_proj"))
    with pytest.raises(autoptd.ProgramError, match="partial sum"):
        autoptd.load(tmp_path / "out")


def test_bind_without_a_launcher_is_the_plain_model() -> None:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    program = autoptd.compile(model, (1, 1, 1), num_microbatches=2)
    parallel = program.bind(device="cpu")
    batch = {"idx": torch.randint(96, (2, 16)), "targets": torch.randint(96, (2, 16))}
    loss = parallel(**batch)[1]
    loss.backward()
    expected = torch.stack([model(**{k: v[i : i + 1] for k, v in batch.items()})[1] for i in range(2)]).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    gradients = dict(parallel.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, msg=name)


def test_programs_bound_in_inference_mode_train() -> None:
    """As a program that a server binds to evaluate, and trains later."""
    program = autoptd.compile(GPT(CONFIG), (1, 1, 1), num_microbatches=2)
    with torch.inference_mode():
        parallel = program.bind(device="cpu")
    assert not any(tensor.is_inference() for tensor in (*parallel.parameters(), *parallel.buffers()))
    ids = torch.randint(96, (2, 16))
    parallel(idx=ids, targets=ids)[1].backward()
    assert all(parameter.grad is not None for parameter in parallel.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device_of_the_caller_changes_no_program(device: str) -> None:
    """For meta, where models are built under it: the tables of a forward are made in the trace."""
    model, mesh = GPT(CONFIG), (1, 1, 1)
    plain = autoptd.compile(model, mesh)
    with torch.device(device):
        program = autoptd.compile(model, mesh)
        assert torch.empty(()).device.type == device
    assert program.texts == plain.texts
    assert program.verify().passed


class Rotary(nn.Module):
    """Tables of positions, kept out of the state, of which one is read by the constructor only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("theta", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("cache", torch.linspace(0, 1, 64).view(8, 8), persistent=False)


class Turning(nn.Module):
    """Layers that share one module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, rotary = nn.Embedding(16, 8), Rotary()
        self.h = nn.ModuleList(nn.ModuleDict({"rope": rotary, "linear": nn.Linear(8, 8)}) for _ in range(2))

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.table(idx)
        for layer in self.h:
            x = layer["linear"](x + layer["rope"].cache[: x.shape[1]])  # type: ignore[index]
        loss: torch.Tensor = x.square().mean()
        return loss


def test_layers_may_share_a_module_of_buffers_that_are_not_saved(tmp_path: Path) -> None:
    model = Turning()
    program = autoptd.compile(model, (1, 1, 1), example_inputs={"idx": torch.zeros(1, 8, dtype=torch.long)})
    parallel = program.bind()
    state = parallel.full_state_dict()
    Turning().load_state_dict(state)
    parallel.load_full_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_weights_come_from_a_module_a_state_dict_or_safetensors(tmp_path: Path) -> None:
    model = GPT(CONFIG)
    state = {n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    save_file(state, str(tmp_path / "model.safetensors"))
    program = autoptd.compile(GPT(CONFIG), (1, 1, 1), num_microbatches=1)
    for weights in (model, model.state_dict(), tmp_path, tmp_path / "model.safetensors"):
        bound = program.bind(device="cpu", weights=weights).full_state_dict()
        assert bound.keys() == model.state_dict().keys()
        assert all(torch.equal(bound[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_that_are_none_or_nowhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model to take weights from; pass weights="):
        read_weights(None, {})
    with pytest.raises(ValueError, match=r"has no safetensors; expected a file, or a folder"):
        read_weights(tmp_path, {})
    with pytest.raises(TypeError, match="weights is a int; expected a module"):
        read_weights(3, {})  # type: ignore[arg-type]


def test_a_meta_model_compiles_and_takes_weights() -> None:
    with torch.device("meta"):
        model: nn.Module = GPT(CONFIG)
    program = autoptd.compile(model, (1, 1, 1), num_microbatches=1)
    with pytest.raises(ValueError, match="is on the meta device and has no values"):
        program.bind(device="cpu", weights=model)
    real = program.bind(device="cpu", weights=GPT(CONFIG))
    assert sum(p.numel() for p in real.parameters()) == sum(p.numel() for p in model.parameters())


def test_printing_a_program_says_what_was_decided() -> None:
    text = str(compile_small())
    assert "mesh tensor=2 pipeline=2 data=1" in text
    assert "wte.weight" in text


class Masked(nn.Module):
    """A GPT with an argument that may be left out, between those that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(CONFIG)

    def forward(
        self, idx: Tensor, mask: Tensor | None = None, targets: Tensor | None = None, *, scale: float = 1.0
    ) -> Tensor:
        logits, loss = self.gpt(idx if mask is None else idx * mask, targets)
        result: Tensor = logits if loss is None else loss * scale
        return result


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def test_a_call_takes_the_positions_of_forward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    idx, targets = torch.randint(96, (2, 4, 16))
    example = {"idx": idx[:2], "targets": targets[:2]}
    model = Masked()
    program = autoptd.compile(model, (1, 1, 1), example_inputs=example, num_microbatches=2)
    assert program.manifest.arguments == ("idx", "mask", "targets")
    program.save(tmp_path / "out")
    assert autoptd.load(tmp_path / "out").manifest.arguments == ("idx", "mask", "targets")
    parallel = program.bind(device="cpu")
    torch.testing.assert_close(parallel(idx, None, targets), model(idx, None, targets))
    with pytest.raises(TypeError, match=r"unexpected argument mask \(position 1\)"):
        parallel(idx, targets)


def test_a_call_takes_the_targets_of_the_loss_behind_those_of_forward() -> None:
    idx = torch.zeros(2, 16, dtype=torch.long)
    example = {"idx": idx, "labels": idx.clone()}
    program = autoptd.compile(Masked(), (1, 1, 1), example_inputs=example, loss_fn=mean_loss, num_microbatches=1)
    assert program.manifest.arguments == ("idx", "mask", "targets", "labels")
    parallel = program.bind(device="cpu")
    assert torch.equal(parallel(idx, None, None, idx), parallel(idx, labels=idx))


def test_a_graph_takes_the_positions_of_its_placeholders() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8)

        def forward(self, idx: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy((self.table(idx) * mask).flatten(0, 1), targets.flatten())

    traced = fx.symbolic_trace(Scored())
    idx = torch.zeros(2, 4, dtype=torch.long)
    # Given in another order.
    example = {"targets": idx, "mask": torch.ones(2, 4, 1), "idx": idx.clone()}
    program = autoptd.compile(traced, (1, 1, 1), example_inputs=example, num_microbatches=1)
    assert program.manifest.arguments == ("idx", "mask", "targets")
