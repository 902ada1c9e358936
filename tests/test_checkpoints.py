"""What a checkpoint promises on one process, and on several where one of them fails."""

from __future__ import annotations

import pickle
import re
import resource
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.state_dict_saver import save

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.checkpoint import files, saving
from autoptd.runtime.checkpoint.tensor_file import open_tensors, write_tensors
from autoptd.runtime.module.parallel import Parallel
from tests.checkpoints import CONFIGS, assert_same, compile_config, run_mesh
from tests.generated_models import make_batch
from tests.plain_models import LENGTH, PLAIN
from tests.ranks import run_ranks

ONE = (1, 1, 1)


def bind(kind: str = "packed") -> tuple[Parallel, torch.optim.Optimizer]:
    parallel = compile_config(kind, ONE).bind()
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2)


def step(parallel: Parallel, optimizer: torch.optim.Optimizer, kind: str = "packed") -> None:
    parallel(**make_batch(CONFIGS[kind], 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


def copy_state(parallel: Parallel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in parallel.state_dict().items()}


def test_a_folder_is_plain_data(tmp_path: Path) -> None:
    parallel, optimizer = bind()
    step(parallel, optimizer)
    parallel.save_checkpoint(tmp_path, optimizer, data={"epoch": 1})
    (folder,) = tmp_path.iterdir()
    assert folder.name == "step_00000001"
    assert sorted(path.name for path in folder.iterdir()) == [
        "COMMIT",
        "checkpoint.json",
        "rank_00000.json",
        "rank_00000_000.safetensors",
        "rank_00000_001.safetensors",
        "rank_00000_002.safetensors",
    ]
    stored = load_file(folder / "rank_00000_000.safetensors")
    assert torch.equal(stored["tokens.weight@0,0"], parallel.state_dict()["tokens.weight"])
    assert "tokens.weight:exp_avg@0,0" in load_file(folder / "rank_00000_001.safetensors")


def test_nothing_unpickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle was read")

    parallel, optimizer = bind()
    step(parallel, optimizer)
    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    parallel.save_checkpoint(tmp_path, optimizer)
    parallel.load_checkpoint(tmp_path, optimizer)
    with pytest.raises(AssertionError, match="a pickle was read"):
        pickle.loads(b"")


def test_an_asynchronous_save_is_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel, optimizer = bind()
    step(parallel, optimizer)
    before = copy_state(parallel)
    moments = {id(p): s["exp_avg"].clone() for p, s in optimizer.state.items()}
    write = write_tensors

    def write_late(*args: Any) -> Any:
        time.sleep(0.2)
        return write(*args)

    monkeypatch.setattr(saving, "write_tensors", write_late)
    parallel.save_checkpoint(tmp_path, optimizer, asynchronous=True)
    assert not list(tmp_path.glob("*/COMMIT"))
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.fill_(7)
            optimizer.state[parameter]["exp_avg"].fill_(7)
    parallel.finish_checkpoint()
    parallel.load_checkpoint(tmp_path, optimizer)
    assert_same(copy_state(parallel), before)
    assert all(torch.equal(s["exp_avg"], moments[id(p)]) for p, s in optimizer.state.items())


def test_an_unfinished_save_is_finished_at_exit(tmp_path: Path) -> None:
    code = (
        "import sys, autoptd\nfrom samples.gpt import GPT, GPTConfig\n"
        "program = autoptd.compile(GPT(GPTConfig(32, 8, 2, 2, 16)), (1, 1, 1))\n"
        "program.bind().save_checkpoint(sys.argv[1], asynchronous=True)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=True)
    assert (tmp_path / "a" / "step_00000000" / "COMMIT").exists()


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    parallel, optimizer = bind()
    (tmp_path / "step_00000000").mkdir()  # an earlier save that did not finish
    (tmp_path / "notes").mkdir()
    for _ in range(3):
        step(parallel, optimizer)
        parallel.save_checkpoint(tmp_path, optimizer, keep=2)
    parallel.save_checkpoint(tmp_path, optimizer, data="again", keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_00000003", "step_00000003_2"]
    assert parallel.load_checkpoint(tmp_path) == "again"
    assert parallel.load_checkpoint(tmp_path / "step_00000003") is None
    for keep in (0, True, 1.0):
        with pytest.raises(autoptd.CheckpointError, match="keep is"):
            parallel.save_checkpoint(tmp_path, keep=keep)  # type: ignore[arg-type]


def test_the_last_committed_is_taken_after_going_back(tmp_path: Path) -> None:
    parallel, optimizer = bind()
    for name in ("one", "two", "three"):
        step(parallel, optimizer)
        parallel.save_checkpoint(tmp_path, optimizer, data=name)
    parallel.load_checkpoint(tmp_path / "step_00000001", optimizer)
    step(parallel, optimizer)
    parallel.save_checkpoint(tmp_path, optimizer, data="another two")
    assert parallel.load_checkpoint(tmp_path, optimizer) == "another two"


def test_uncommitted_checkpoints_are_refused(tmp_path: Path) -> None:
    parallel = bind()[0]
    with pytest.raises(autoptd.CheckpointError, match=r"nowhere is no folder"):
        parallel.load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(autoptd.CheckpointError, match=r"no committed checkpoint, but no step folder"):
        parallel.load_checkpoint(tmp_path)
    parallel.save_checkpoint(tmp_path)
    (tmp_path / "step_00000005").mkdir()
    parallel.load_checkpoint(tmp_path)
    named = r"step_00000005 was not committed .*the newest good one is .*step_00000000"
    with pytest.raises(autoptd.CheckpointError, match=named):
        parallel.load_checkpoint(tmp_path / "step_00000005")
    (tmp_path / "step_00000000" / "COMMIT").unlink()
    with pytest.raises(autoptd.CheckpointError, match=r"no committed checkpoint, but 2 unfinished saves"):
        parallel.load_checkpoint(tmp_path)


@pytest.mark.parametrize(("kind", "named"), [("tied", "lm_head|head"), ("grouped", "gate_up")])
def test_another_model_is_refused(kind: str, named: str, tmp_path: Path) -> None:
    bind()[0].save_checkpoint(tmp_path)
    other = bind(kind)[0]
    before = copy_state(other)
    with pytest.raises(autoptd.CheckpointError, match=f"checkpoint.json is of another model: .*({named})"):
        other.load_checkpoint(tmp_path)
    assert_same(copy_state(other), before)


def test_another_precision_is_refused(tmp_path: Path) -> None:
    parallel, _ = bind()
    parallel.save_checkpoint(tmp_path)
    with pytest.raises(autoptd.CheckpointError, match=r"is torch.float64, and the model's torch.float32"):
        compile_config("packed", ONE).bind(weights=None).float().load_checkpoint(tmp_path)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    parallel, optimizer = bind()
    parallel.save_checkpoint(tmp_path / "none")
    with pytest.raises(autoptd.CheckpointError, match="has no optimizer, and AdamW is to be loaded"):
        parallel.load_checkpoint(tmp_path / "none", optimizer)
    step(parallel, optimizer)
    parallel.save_checkpoint(tmp_path, optimizer)
    trained = list(parallel.parameters())
    with pytest.raises(autoptd.CheckpointError, match="has the optimizer AdamW, and SGD is to be loaded"):
        parallel.load_checkpoint(tmp_path, torch.optim.SGD(trained))
    with pytest.raises(autoptd.CheckpointError, match=r"has states of .*, which the optimizer does not hold"):
        parallel.load_checkpoint(tmp_path, torch.optim.AdamW(trained[1:]))
    groups = [{"params": trained[:2], "lr": 1e-3}, {"params": trained[2:], "lr": 5e-4}]
    parallel.save_checkpoint(tmp_path / "groups", torch.optim.AdamW(groups))
    with pytest.raises(autoptd.CheckpointError, match="are in one group of the optimizer, and were in several"):
        parallel.load_checkpoint(tmp_path / "groups", optimizer)
    other = torch.optim.AdamW([{"params": trained[:2]}, {"params": trained[2:]}])
    parallel.load_checkpoint(tmp_path / "groups", other)
    assert [group["lr"] for group in other.param_groups] == [1e-3, 5e-4]


def test_an_optimizer_is_loaded_without_its_scheduler(tmp_path: Path) -> None:
    parallel, optimizer = bind()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(parallel, optimizer)
    scheduler.step()
    parallel.save_checkpoint(tmp_path, optimizer, scheduler)
    other = torch.optim.AdamW(parallel.parameters(), lr=1.0)
    parallel.load_checkpoint(tmp_path, other)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["initial_lr"]) == (5e-3, 1e-2)
    parallel.load_checkpoint(tmp_path)  # the model alone


def test_a_scheduler_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    parallel, optimizer = bind()
    steps, cosine = (
        torch.optim.lr_scheduler.StepLR(optimizer, 3),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    )
    parallel.save_checkpoint(tmp_path, optimizer, [steps, cosine])
    step(parallel, optimizer)
    steps.step()
    before, counted = copy_state(parallel), steps.state_dict()
    for wrong in ([cosine], [steps, steps], {"a": steps}, [steps, cosine, steps]):
        with pytest.raises(autoptd.CheckpointError, match=r"scheduler . is a .*; the checkpoint has"):
            parallel.load_checkpoint(tmp_path, optimizer, wrong)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    parallel.save_checkpoint(tmp_path / "off", optimizer, [steps, scaler])
    steps.step()
    counted = dict(steps.state_dict())
    with pytest.raises(autoptd.CheckpointError, match="scheduler 1"):
        parallel.load_checkpoint(tmp_path / "off", optimizer, [steps, torch.amp.GradScaler("cpu")])
    assert steps.state_dict() == counted
    assert_same(copy_state(parallel), before)
    with pytest.raises(TypeError, match="scheduler 0 is a int without state_dict"):
        parallel.load_checkpoint(tmp_path, optimizer, 3)  # type: ignore[arg-type]


def test_unloadable_state_is_refused_before_writing(tmp_path: Path) -> None:
    parallel, optimizer = bind()
    with pytest.raises(autoptd.CheckpointError, match=r"data\['seen'\] is a builtins.set"):
        parallel.save_checkpoint(tmp_path, data={"seen": {1}})
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(autoptd.CheckpointError, match=r"a group of the optimizer\['hook'\]"):
        parallel.save_checkpoint(tmp_path, optimizer)
    assert not list(tmp_path.iterdir())


@cache
def compile_nano() -> CompiledProgram:
    example = torch.zeros(1, LENGTH, dtype=torch.long)
    torch.manual_seed(0)
    model = PLAIN["nanogpt-slow"]()
    return autoptd.compile(model, ONE, example_inputs={"idx": example, "targets": example})


def test_a_proved_mask_is_held(tmp_path: Path) -> None:
    parallel = compile_nano().bind()
    mask = parallel.get_buffer("transformer.h.1.attn.bias")
    mask[..., 0] = 0
    parallel.save_checkpoint(tmp_path)
    fresh = compile_nano().bind()
    with pytest.raises(autoptd.CheckpointError, match=r"the buffer transformer.h.1.attn.bias is given other values"):
        fresh.load_checkpoint(tmp_path)


def test_a_folder_of_torch_s_own_checkpoints_says_how_it_is_converted(tmp_path: Path) -> None:
    program = compile_nano()
    assert program.model is not None
    save({"model": program.model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    parallel = program.bind()
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in parallel.parameters())), parallel.parameters())
    with pytest.raises(autoptd.CheckpointError, match=r"format_utils.dcp_to_torch_save.*load_full_state_dict"):
        parallel.load_checkpoint(tmp_path / "dcp")
    format_utils.dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    parallel.load_full_state_dict(torch.load(tmp_path / "whole.pt")["model"])
    assert_same(dict(parallel.full_state_dict()), dict(program.model.state_dict()))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_ranks_failed_write_is_every_ranks_error(failing: int, asynchronous: bool, tmp_path: Path) -> None:
    program = compile_config("packed", (2, 1, 1))

    def work(rank: int) -> list[str]:
        parallel = program.bind()
        said = []
        for turn in range(2):
            allowed = 1000 if turn == 0 and rank == failing else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, resource.RLIM_INFINITY))
            try:
                parallel.save_checkpoint(tmp_path, data=turn, asynchronous=asynchronous)
                parallel.finish_checkpoint()
            except autoptd.CheckpointError as error:
                said.append(str(error))
        return [*said, parallel.load_checkpoint(tmp_path)]

    for said in run_ranks(work, 2):
        assert re.fullmatch(
            rf".*/rank_0000{failing}_000.safetensors cannot be written: .*File too large .*\(on rank {failing} of 2\)",
            said[0],
        )
        assert said[1:] == [1]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = compile_config("packed", (2, 1, 1))

    def work(rank: int) -> str:
        parallel = program.bind()
        with pytest.raises(autoptd.CheckpointError) as caught:
            parallel.save_checkpoint(tmp_path / "file")
        return str(caught.value)

    for said in run_ranks(work, 2):
        assert "file exists" in said.lower()
        assert said.endswith("(on rank 0 of 2)")


def test_a_damaged_file_on_one_rank_is_every_ranks_error(tmp_path: Path) -> None:
    """The second rank alone reads the second file; the first one's weights stay too."""

    def save(parallel: Parallel, own: Any, at: int) -> Any:
        parallel.save_checkpoint(tmp_path, own)

    run_mesh("packed", (1, 2, 1), "sgd", save)
    file = tmp_path / "step_00000000" / "rank_00001_000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def load(parallel: Parallel, own: Any, at: int) -> Any:
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.fill_(3)
        with pytest.raises(autoptd.CheckpointError) as caught:
            parallel.load_checkpoint(tmp_path)
        assert all(bool((p == 3).all()) for p in parallel.parameters())
        return str(caught.value)

    for said in run_mesh("packed", (1, 2, 1), "sgd", load):
        assert "rank_00001_000.safetensors" in str(said)
        assert str(said).endswith("(on rank 1 of 2)")


def test_a_text_is_not_longer_than_a_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_TEXT_LIMIT", 1000)
    with pytest.raises(autoptd.CheckpointError, match="longer than 1000 bytes"):
        bind()[0].save_checkpoint(tmp_path)


def test_tensors_in_one_memory_are_both_written(tmp_path: Path) -> None:
    one = torch.arange(6.0)
    digest = write_tensors(tmp_path / "file", {"one": one, "other": one.view(2, 3), "tail": one[3:]})
    with open_tensors(tmp_path / "file", digest) as reader:
        assert torch.equal(reader.get_tensor("other"), one.view(2, 3))
        assert torch.equal(reader.get_tensor("tail"), one[3:])
