"""The folder of a saved program: everything comes back, and what is wrong with a folder is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoptd.runtime.program.manifest import Input, Manifest, Output
from autoptd.runtime.program.manifest_json import from_json, to_json
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.program_text import read_program
from autoptd.text.folder import load_folder, program_hash, save_folder
from autoptd.text.writer import emit_texts
from tests.two_stages import two_stages

MASK = torch.ones(8, 8).tril()
BUFFERS = {"h.0.attn.mask": MASK, "h.1.attn.mask": MASK.T, "scale": torch.tensor(2, dtype=torch.int64)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "out")
    return tmp_path / "out"


def save(path: Path, count: int = 2) -> tuple[tuple[str, ...], Manifest]:
    program, manifest, schedule = two_stages()
    texts = emit_texts(program, manifest, schedule, title="tiny GPT")
    save_folder(path, texts[:count], manifest, schedule[:count], BUFFERS)
    return texts, manifest


def test_everything_comes_back(tmp_path: Path) -> None:
    texts, manifest = save(tmp_path / "new" / "out")
    loaded, again, buffers = load_folder(tmp_path / "new" / "out")
    assert loaded == texts
    assert again == manifest
    assert buffers.keys() == BUFFERS.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, BUFFERS[name])
        assert buffer.dtype is BUFFERS[name].dtype
    names = sorted(file.name for file in (tmp_path / "new" / "out").iterdir())
    assert names == ["buffers.safetensors", "manifest.json", "program_00.py", "program_01.py", "schedule.txt"]


def test_arguments_come_back() -> None:
    manifest = replace(two_stages()[1], arguments=("idx", "mask", "targets"))
    assert '"arguments": [\n  "idx",\n  "mask",\n  "targets"\n ]' in to_json(manifest)
    assert from_json(to_json(manifest)) == manifest
    assert "arguments" not in to_json(replace(manifest, arguments=()))


def test_schedule_has_every_action(folder: Path) -> None:
    text = (folder / "schedule.txt").read_text()
    for rank, program in enumerate(load_folder(folder)[0]):
        actions = read_program(program, "program.py").actions
        assert f"rank {rank}: {' '.join(map(str, actions))}\n" in text
    assert "step" in text


def test_save_replaces_a_saved_program(folder: Path) -> None:
    (folder / "program_02.py").write_text("of a longer pipeline")
    save(folder)
    assert not (folder / "program_02.py").exists()


@pytest.mark.parametrize("manifest", [None, "[]", "{}", "not JSON", '{"format": "another"}'])
def test_save_keeps_what_is_not_ours(tmp_path: Path, manifest: str | None) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match="holds files, but no saved program; give an empty or a new folder"):
        save(tmp_path)
    with pytest.raises(ValueError, match=r"notes\.txt is a file"):
        save(tmp_path / "notes.txt")


@pytest.mark.parametrize("name", ["program_01.py", "manifest.json", "buffers.safetensors"])
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_folder(folder)


def test_a_mark_before_a_text_is_no_matter_and_other_letters_are(folder: Path) -> None:
    file = next(folder.glob("program_*.py"))
    text = file.read_bytes()
    before = load_folder(folder)[0]
    file.write_bytes(b"\xef\xbb\xbf" + text)
    assert load_folder(folder)[0] == before
    file.write_bytes(b"\xff\xfe" + text)
    with pytest.raises(ValueError, match=rf"{file.name} is not UTF-8 .*; convert it"):
        load_folder(folder)


def test_broken_buffers(folder: Path) -> None:
    (folder / "buffers.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"buffers\.safetensors: .*save the program again"):
        load_folder(folder)


def test_hash_sees_texts_and_manifest() -> None:
    program, manifest, schedule = two_stages()
    texts = emit_texts(program, manifest, schedule, title="")
    known = program_hash(texts, manifest)
    assert known == program_hash(list(texts), manifest)
    others = [
        program_hash((texts[0] + "#", texts[1]), manifest),
        program_hash((texts[0] + texts[1],), manifest),
        program_hash(texts, replace(manifest, seed=1)),
    ]
    assert len({known, *others}) == 4


def test_manifest_round_trip() -> None:
    _, manifest, _ = two_stages()
    changed = replace(
        manifest,
        mesh=Mesh(2, 2, 1, ranks=(3, 2, 1, 0)),
        inputs=(Input("x", (), torch.bfloat16, None),),
        output=Output("dataclass", "loss", "models:Out", ("loss", "logits")),
        transient=("h.0.attn.mask",),
    )
    for one in (manifest, changed):
        assert from_json(to_json(one)) == one
        assert to_json(from_json(to_json(one))) == to_json(one)


def change(edit: Callable[[dict[str, Any]], None]) -> str:
    fields = json.loads(to_json(two_stages()[1]))
    edit(fields)
    return json.dumps(fields)


ERRORS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda m: m.update(shedule=m.pop("schedule")),
     "manifest.json: unknown key 'shedule'; did you mean 'schedule'"),
    (lambda m: m.pop("seed"), "manifest.json: missing 'seed'"),
    (lambda m: m.update(format="autoptd 0"), "manifest.json: format is 'autoptd 0', expected 'autoptd 7'"),
    (lambda m: m.update(seed="x"), "manifest.json: seed is 'x', expected int"),
    (lambda m: m.update(seed=True), "manifest.json: seed is True, expected int"),
    (lambda m: m["mesh"].update(tensor=1.5), "manifest.json: mesh: tensor is 1.5, expected int"),
    (lambda m: m["inputs"][0].update(dtype="float33"),
     r"inputs\[0\]: dtype is 'float33', expected the name of a torch dtype"),
    (lambda m: m["stages"][1]["receives"][0].update(shape=3),
     r"stages\[1\]: receives\[0\]: shape is 3, expected list"),
    (lambda m: m["parameters"]["wte.weight"].update(kind="weight"),
     r"parameters\['wte.weight'\]: kind is 'weight', expected one of 'parameter', 'buffer', 'constant'"),
    (lambda m: m.update(parameters=[]), r"parameters is \[\], expected dict"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_manifest_error(edit: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(change(edit))


def test_manifest_is_no_json() -> None:
    with pytest.raises(ValueError, match=r"out/manifest\.json:2: not JSON"):
        from_json("{\n,}", "out/manifest.json")
    with pytest.raises(ValueError, match="format is None"):
        from_json("[]")
