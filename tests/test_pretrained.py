"""Folders of transformers: read by the rows that a rank keeps, written so that nothing of the plain model's is lost."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.checkpoint.pretrained import INDEX, WHOLE, read_size
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.health.malloc import M_MMAP_THRESHOLD
from autoptd.runtime.program.manifest import Manifest
from autoptd.runtime.program.program_text import read_program
from autoptd.runtime.weights import file_tensor
from autoptd.runtime.weights.slices import take_slices
from autoptd.text.reader import program_filename
from autoptd.weights.sources import read_weights
from samples.benchmarks.process_memory import begin_peak, read_memory
from samples.huggingface import read_names
from tests.plain_models import FURTHER, HUGGING_FACE, LENGTH, PLAIN, VOCABULARY
from tests.ranks import run_ranks

MODELS = HUGGING_FACE | FURTHER | PLAIN
QUICK = ["gpt2", "t5"]
OWN_NAMES = {"mixtral", "deepseek-v3"}  # transformers splits and renames what these hold, unless told otherwise


def randomize(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape))
    return model


def compile_tiny(
    name: str, model: nn.Module, mesh: tuple[int, int, int] = (2, 2, 1), num_model_chunks: int = 2
) -> CompiledProgram:
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    example = {"idx": ids, "targets": ids} if name in PLAIN else {"input_ids": ids, "labels": ids}
    if name == "vit":
        example = {"pixel_values": torch.zeros(1, 3, 16, 16), "labels": ids[:, 0]}
    return autoptd.compile(model, mesh, example_inputs=example, num_microbatches=2, num_model_chunks=num_model_chunks)


def save_plain(name: str, model: nn.Module, folder: Path, **options: Any) -> None:
    """As its own project saves it."""
    if name in PLAIN:
        state = model.state_dict()
        if state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr():
            del state["lm_head.weight"]
        folder.mkdir()
        save_file({n: x.clone() for n, x in state.items()}, str(folder / WHOLE), {"format": "pt"})
        return
    # Of some models transformers else writes other names, and their experts one by one.
    model.save_pretrained(folder, save_original_format=False, **options)  # type: ignore[operator]


def read_folder(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(str(file)).items()}


def pass_through(program: CompiledProgram, source: Path, target: Path, **options: Any) -> None:
    """Bind the program to one folder, and write another."""

    def work(rank: int) -> None:
        program.bind(weights=source).export_pretrained(target, **options)

    run_ranks(work, program.mesh.size)


def assert_same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        own, given = (x.contiguous().reshape(-1).view(torch.uint8) for x in (found[name], tensor))
        assert torch.equal(own, given), name


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in MODELS]
)
def test_a_folder_comes_back_byte_by_byte(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = randomize(MODELS[name]())
    save_plain(name, model, source)
    program = compile_tiny(name, randomize(MODELS[name]()).apply(forget))
    pass_through(program, source, target)
    assert_same_bytes(read_folder(target), read_folder(source))
    dtypes = {x.dtype for x in read_folder(source).values()}
    # Among dtypes of one size the library has an order of its own.
    assert len(dtypes) > 1 or (target / WHOLE).read_bytes() == (source / WHOLE).read_bytes()
    if name not in PLAIN:
        model.config.save_pretrained(target)  # type: ignore[union-attr, operator]
        again = type(model).from_pretrained(target)  # type: ignore[attr-defined]
        assert_same_bytes(dict(again.state_dict()), dict(model.state_dict()))


def forget(module: nn.Module) -> None:
    """The program's own model has other weights than the folder."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.zero_()


@pytest.mark.timeout(120)
def test_shards_and_their_index_are_transformers_own(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = randomize(HUGGING_FACE["llama"]()).bfloat16()
    save_plain("llama", model, source, max_shard_size="20KB")
    target.mkdir()
    save_file({"old": torch.ones(1)}, str(target / WHOLE))
    (target / "model-00007-of-00009.safetensors").touch()
    (target / "tokenizer.json").touch()
    program = compile_tiny("llama", HUGGING_FACE["llama"]().bfloat16())
    pass_through(program, source, target, max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    assert_same_bytes(read_folder(target), read_folder(source))
    for file in source.iterdir():
        if "model" in file.name:
            assert (target / file.name).read_bytes() == file.read_bytes(), file.name
    assert {file.name for file in target.iterdir()} == {
        "tokenizer.json",
        *(file.name for file in source.iterdir() if file.name.startswith("model")),
    }


@pytest.mark.timeout(120)
def test_where_rank_0_cannot_write_every_rank_says_so(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("mine")
    program = compile_tiny("nanogpt", PLAIN["nanogpt"]())

    def work(rank: int) -> tuple[str, bool]:
        parallel = program.bind()
        with pytest.raises(ValueError, match=r"max_shard_size='5 elephants': expected the bytes"):
            parallel.export_pretrained(file, max_shard_size="5 elephants")
        try:
            parallel.export_pretrained(file)
        except OSError as error:
            parallel.export_pretrained(tmp_path / "folder")  # nobody hangs or is a tensor ahead
            return type(error).__name__, (tmp_path / "folder" / WHOLE).exists()
        return "", False

    found = run_ranks(work, program.mesh.size)
    assert found == [("FileExistsError", True), *[("OSError", True)] * 3]
    assert file.read_text() == "mine"
    assert [entry.name for entry in (tmp_path / "folder").iterdir()] == [WHOLE]


@pytest.mark.parametrize(("size", "expected"), [(7, 7), ("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19)])
def test_sizes(size: int | str, expected: int) -> None:
    assert read_size(size) == expected


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "5", "GB", "0GB", None])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size=.*expected the bytes of a file"):
        read_size(size)


# What is read


@pytest.fixture
def count_elements(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Elements that the safetensors library hands out, by name."""
    counts: Counter[str] = Counter()

    class Counted:
        def __init__(self, rows: Any, name: str) -> None:
            self.rows, self.name = rows, name

        def __getitem__(self, key: Any) -> Tensor:
            found: Tensor = self.rows[key]
            counts[self.name] += found.numel()
            return found

        def get_shape(self) -> list[int]:
            shape: list[int] = self.rows.get_shape()
            return shape

        def get_dtype(self) -> str:
            dtype: str = self.rows.get_dtype()
            return dtype

    class Reader:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.reader: Any = safe_open(*args, **options)

        def __enter__(self) -> Reader:
            self.reader.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.reader.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self.reader.keys())

        def get_slice(self, name: str) -> Counted:
            return Counted(self.reader.get_slice(name), name)

        def get_tensor(self, name: str) -> Tensor:
            found: Tensor = self.reader.get_tensor(name)
            counts[name] += found.numel()
            return found

    monkeypatch.setattr(file_tensor, "safe_open", Reader)
    return counts


@pytest.mark.parametrize("name", ["gpt2", "phi3", pytest.param("falcon", marks=pytest.mark.slow)])
def test_a_rank_reads_what_it_keeps_and_nothing_else(
    name: str, tmp_path: Path, count_elements: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads, packed projections, columns, and a vocabulary of 61 that two ranks share."""
    monkeypatch.setattr(file_tensor, "BLOCK", 100)  # several blocks a tensor
    model = randomize(HUGGING_FACE[name]())
    save_plain(name, model, tmp_path / "folder")
    program = compile_tiny(name, model)
    manifest, mesh = program.manifest, program.mesh
    padded = [p for p in manifest.parameters.values() if p.placement["tensor"].padding]
    assert padded
    for number in range(mesh.size):
        rank = Rank.local(mesh, mesh.coordinates(number))
        count_elements.clear()
        weights = read_weights(tmp_path / "folder", program.buffers)
        slices = take_slices(manifest, rank, read_constants(program, number), weights, False, ())
        given = read_weights(model, program.buffers)
        own = take_slices(manifest, rank, read_constants(program, number), given, False, ())
        for kept, slice_ in slices.items():
            assert torch.equal(slice_, own[kept]), kept
        assert +count_elements == +count_kept(manifest, rank, slices)
    whole = sum(p.numel() for p in model.parameters())
    assert count_elements.total() < 0.6 * whole


def count_kept(manifest: Manifest, rank: Rank, slices: dict[str, Tensor]) -> Counter[str]:
    """Elements of a rank's slices that are on disk: neither padding nor constants."""
    counts: Counter[str] = Counter()
    for name, tensor in slices.items():
        parameter = manifest.parameters[name]
        if parameter.kind == "parameter":
            counts[name] = tensor.numel()
            dim = parameter.placement["tensor"].dim
            if parameter.placement["tensor"].padding and dim is not None and rank.coordinates.tensor == 1:
                counts[name] -= parameter.placement["tensor"].padding * tensor.numel() // tensor.shape[dim]
    return counts


def read_constants(program: CompiledProgram, rank: int) -> Callable[..., dict[str, Tensor]]:
    at = program.mesh.coordinates(rank).pipeline
    text = read_program(program.texts[at], program_filename(at, len(program.texts)))
    return text.constants


@pytest.mark.timeout(120)
def test_no_rank_has_the_whole_model_in_memory(tmp_path: Path) -> None:
    """250 MB, of which a rank keeps a quarter: its process is never far above that, neither reading nor writing."""
    program, small = (save_deep(tmp_path / str(hidden), hidden) for hidden in (800, 8))
    whole = sum(p.bytes for p in program.manifest.parameters.values())
    largest = max(p.bytes for p in program.manifest.parameters.values())
    assert whole > 240e6

    def work(rank: int) -> tuple[int, int, int]:
        # Else malloc keeps what is freed, and a peak says nothing of what is alive; the variable has bind leave it so.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        # The libraries' own pages are there before anything is counted.
        small.bind(weights=tmp_path / "8").export_pretrained(tmp_path / "out")
        before = begin_peak()
        parallel = program.bind(weights=tmp_path / "800")
        reading = read_memory("VmHWM") - before
        before = begin_peak()
        parallel.export_pretrained(tmp_path / "out")
        own = sum(p.numel() * p.element_size() for p in parallel.parameters())
        return own, reading, read_memory("VmHWM") - before

    for own, reading, writing in run_ranks(work, 4):
        assert own < 0.3 * whole
        assert reading < own + 4 * largest
        assert writing < 7 * largest < 0.3 * whole


def save_deep(folder: Path, hidden: int) -> CompiledProgram:
    with torch.device("meta"):
        model = Deep(hidden)
    folder.mkdir()
    save_file({n: torch.ones(p.shape) for n, p in model.named_parameters()}, str(folder / WHOLE))
    example = {"x": torch.zeros(1, 8, hidden)}
    return autoptd.compile(model, (2, 2, 1), example_inputs=example, num_microbatches=2)


class Deep(nn.Module):
    """Twelve MLPs; the loss is a mean."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        widths = [(hidden, 4 * hidden), (4 * hidden, hidden)] * 12
        self.layers = nn.ModuleList(nn.Linear(*width, bias=False) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + second(torch.relu(first(x)))
        return x.square().mean()


# Other names


def _whole(model: nn.Module) -> nn.Module:
    return model


def _below(model: nn.Module) -> nn.Module:
    below: nn.Module = model.base_model  # type: ignore[assignment]
    return below


@pytest.mark.parametrize(("name", "saved"), [("gpt-neox", _whole), ("vit", _whole), ("gpt2", _below)])
def test_names_of_older_files_and_of_the_class_below(
    name: str, saved: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    """GPT-NeoX has another head on disk, ViT other layers, and GPT-2 without its head no prefix."""
    model = randomize(MODELS[name]())
    saved(model).save_pretrained(tmp_path)  # type: ignore[operator]
    program = compile_one(name, MODELS[name]())
    with pytest.raises(ValueError, match=r"tensors are not among the .* rename="):
        program.bind(device="cpu", weights=tmp_path)
    folder = autoptd.SafetensorsFolder(tmp_path, rename=read_names(model))  # type: ignore[arg-type]
    found = program.bind(device="cpu", weights=folder).full_state_dict()
    assert_same_bytes(found, dict(model.state_dict()))


def compile_one(name: str, model: nn.Module) -> CompiledProgram:
    return compile_tiny(name, model, mesh=(1, 1, 1), num_model_chunks=1)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, str(tmp_path / WHOLE))
    with pytest.raises(ValueError, match=r"both have the tensor c: give one model's"):
        autoptd.SafetensorsFolder(tmp_path, rename=lambda name: "c")


# What is refused


@pytest.fixture(scope="module")
def llama() -> CompiledProgram:
    return autoptd.compile(HUGGING_FACE["llama"](), (1, 1, 1), num_microbatches=1)


def test_names_of_the_class_below_are_refused_with_the_nearest(tmp_path: Path, llama: CompiledProgram) -> None:
    model = HUGGING_FACE["llama"]()
    model.model.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    message = (
        r"21 of the model's 22 tensors are not among the 22 given: model\.embed_tokens\.weight\[61, 32\] "
        r"\(nearest: embed_tokens\.weight\), .* and 18 more; .*rename="
    )
    with pytest.raises(ValueError, match=message):
        llama.bind(device="cpu", weights=tmp_path)


def test_a_model_of_other_sizes_is_refused_before_anything_is_read(tmp_path: Path, llama: CompiledProgram) -> None:
    state = {n: x.clone() for n, x in HUGGING_FACE["llama"]().state_dict().items()}
    state["model.embed_tokens.weight"] = torch.zeros(VOCABULARY + 3, 32)
    save_file(state, str(tmp_path / WHOLE))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has shape \[64, 32\] .* \[61, 32\] in the prog"):
        llama.bind(device="cpu", weights=tmp_path)


def _lose_a_file(folder: Path) -> None:
    next(folder.glob("model-00002*")).unlink()


def _cut_a_file(folder: Path) -> None:
    file = next(folder.glob("model-00002*"))
    file.write_bytes(file.read_bytes()[:-5])


def _mix_two_models(folder: Path) -> None:
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")


def _spoil_the_index(folder: Path) -> None:
    (folder / INDEX).write_text("[]")


def _leave_pickles(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "pytorch_model.bin").touch()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose_a_file, r"model-00002-of-00003\.safetensors cannot be read as safetensors: No such file"),
        (_cut_a_file, r"model-00002-of-00003\.safetensors cannot be read as safetensors"),
        (_mix_two_models, r"of the model's \d+ tensors are not among the \d+ given"),
        (_spoil_the_index, r"is no index of safetensors files"),
        (_leave_pickles, r"has no safetensors; .*\*\.bin files are pickles: load them with from_pretrained"),
    ],
)
def test_a_damaged_folder_is_refused(
    damage: Callable[[Path], None], message: str, tmp_path: Path, llama: CompiledProgram
) -> None:
    save_plain("llama", HUGGING_FACE["llama"](), tmp_path, max_shard_size="30KB")
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        llama.bind(device="cpu", weights=tmp_path)
