"""The commands: each is one call of the Python interface, and a wrong word is told the nearest right one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import autoptd
from autoptd.cli.main import main, make_parser
from autoptd.cli.model_path import make_model
from autoptd.cli.tables import print_lines, print_simulation
from autoptd.compiled import CompiledProgram
from autoptd.verification.report import Report
from samples.benchmarks.uniform_cut import uniform_cuts
from samples.gpt import GPT, GPTConfig
from tests.marks import slow

ROOT = Path(__file__).parents[3]
SPEED = ("--tokens", "1e9", "--price", "2.5")
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

from samples.gpt import GPT, GPTConfig

SIZES = GPTConfig(vocab_size=64, block_size=16, n_layer=4, n_head=4, n_embd=32)

def make_small():
    return GPT(SIZES)

def make_with(config):
    return GPT(config)

class Rotary(nn.Module):
    def __init__(self, theta):  # which the model does not keep: it cannot be built again
        super().__init__()
        self.wte, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)
        angles = torch.outer(torch.arange(16.0), theta ** (-torch.arange(0, 32, 2) / 32)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx, targets):
        x = self.wte(idx)
        x = x * self.cos + torch.cat((-x[..., 16:], x[..., :16]), -1) * self.sin
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())

def make_rotary():
    return Rotary(10000.0)

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.scale, self.shifts = torch.arange(32.0), [torch.arange(32.0)]

    def forward(self, idx, targets):
        x = self.wte(idx) * self.scale + self.shifts[0]
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=4, n_head=4, n_embd=32))
    path: Path = tmp_path_factory.mktemp("programs") / "small"
    with uniform_cuts():  # one value of [s, b, h] crosses
        autoptd.compile(model, mesh=(2, 2, 2), num_microbatches=4, num_model_chunks=2).save(path)
    return path


@pytest.fixture(autouse=True)
def _own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "small_models.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("small_models", None)


def read_json(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "small_models:make_small",
        "--world-size",
        "4",
        "--global-batch",
        "8",
        "--cluster",
        "dgx-a100",
        "--recompute",
        "full",
    ]
    found = read_json(capsys, *words, "--top", 2)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=4, n_head=4, n_embd=32))
    plans = autoptd.plan(model, world_size=4, global_batch=8, cluster="dgx-a100", recompute="full", top=2)
    assert len(found) == 2 < len(plans)
    assert [plan["step_seconds"] for plan in found] == [plan.step_seconds for plan in plans[:2]]
    assert found[0]["mesh"] == [plans[0].mesh.tensor, plans[0].mesh.pipeline, plans[0].mesh.data]
    assert {plan["recompute"] for plan in found} == {"full"}
    assert main([*words, "--top", "1"]) == 0
    shown = capsys.readouterr().out
    assert plans[0].why.split()[0] in shown
    assert f"{len(plans) - 1} more meshes" in shown
    assert "the best: tokens per second " in shown
    assert "MFU" in shown
    assert f" {found[0]['mfu']:.1%} " in shown
    command = next(line for line in shown.splitlines() if line.startswith("autoptd compile"))
    assert main([*shlex.split(command)[1:-1], str(tmp_path / "out")]) == 0  # it is one that works
    assert autoptd.load(tmp_path / "out").mesh == plans[0].mesh


def test_compile_saves_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--mesh 1,2,2 --num-microbatches 4 --num-model-chunks 2 --recompute full --schedule interleaved_1f1b"
    found = read_json(capsys, "compile", "small_models:make_small", "-o", tmp_path / "out", *options.split())
    program = autoptd.load(tmp_path / "out")
    assert found["mesh"] == [1, 2, 2] == list(program.overview.mesh)
    assert found["recomputation"]["groups"] >= 4
    assert [stage["index"] for stage in found["stages"]] == [0, 1, 2, 3]
    assert found["title"].startswith("GPT, ")


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, program = read_json(capsys, "inspect", folder), autoptd.load(folder)
    assert found["global_batch"] == 1 * 4 * 2
    assert found["world_size"] == 8
    assert [stage["parameters"] for stage in found["stages"]] == [s.parameters for s in program.overview.stages]
    assert found["communication"]["tensor_forward"]["count"] == 9
    crossing = sum(len(stage.sends) for stage in program.manifest.stages)  # each [s, b, h] in float32, halved
    assert found["communication"]["pipeline_forward"] == {"count": crossing, "bytes": crossing * 16 * 32 * 4 // 2}
    assert found["tied"][0]["pipeline_ranks"] == [0, 1]
    held = [program.rank(rank).parameters for rank in (0, 2)]  # pipeline ranks 0 and 1
    sizes = [sum(torch.Size(p.local_shape).numel() for n, p in own.items() if "arange" not in n) for own in held]
    assert found["communication"]["gradient_bytes"] == 4 * max(sizes)
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "small, " in shown
    assert "mesh tensor=2 pipeline=2 data=2: 8 ranks" in shown
    assert re.search(r"^ +0 +0 +wte +h\.0\.mlp\.c_proj", shown, re.MULTILINE)


def test_simulate(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "step.json"
    words = ("simulate", folder, "--cluster", "dgx-a100", "--dtype", "bf16", "--zero", "1", "--overlap", *SPEED)
    found = read_json(capsys, *words, "--trace", trace)
    step = autoptd.load(folder).simulate("dgx-a100", "bf16", zero=1, overlap=True)
    assert found["step_seconds"] == step.step_seconds
    assert found["breakdown"] == dict(step.breakdown)
    assert step.throughput.tokens == 8 * 16  # microbatches of one sequence
    assert step.throughput.describe(1e9, 2.5).items() <= found.items()
    assert found["memory_bytes"] == list(step.memory_bytes)
    assert found["fits"] is True
    assert found["device_memory_bytes"] == 80e9
    assert json.loads(trace.read_text())["otherData"]["step"] == "predicted"
    assert main([*map(str, words)]) == 0
    shown = capsys.readouterr().out
    assert "DGX A100 (Selene), bf16" in shown
    assert re.search(r"tokens per second per device +[\d,]+\n", shown)
    assert "fits in 75.2 GB" in shown
    assert autoptd.Cluster.load("dgx-a100").expect(step.step_seconds) in " ".join(shown.split())


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read_json(capsys, "verify", folder, "--model", "small_models:make_small")
    assert found["passed"] is True
    assert found["ranks"] == 8
    assert max(found["gradient_errors"].values()) < 1e-12
    assert main(["verify", str(folder), "--model", "small_models:make_small", "--seed", "3"]) == 0
    assert "verify passed: 8 ranks" in capsys.readouterr().out


def test_verify_computes_the_buffers_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "small_models:make_rotary"
    ids = torch.zeros((1, 16), dtype=torch.long)
    model, example = make_model(name), {"idx": ids, "targets": ids.clone()}
    autoptd.compile(model, mesh=(2, 2, 1), example_inputs=example).save(tmp_path / "rotary")
    found = read_json(capsys, "verify", tmp_path / "rotary", "--model", name)
    assert found["passed"] is True
    assert "wte.weight" in found["gradient_errors"]


def test_verify_builds_a_model_with_plain_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the meta device they would have no values; a program cannot give them any, and says so."""
    name = "small_models:Scaled"
    ids = torch.zeros((1, 16), dtype=torch.long)
    program = autoptd.compile(make_model(name, "cpu"), (2, 1, 1), example_inputs={"idx": ids, "targets": ids.clone()})
    program.save(tmp_path / "scaled")
    assert read_json(capsys, "verify", tmp_path / "scaled", "--model", name)["passed"] is True
    with pytest.raises(
        ValueError, match=r"neither a parameter nor a buffer: .*, at .*small_models.py:\d+: .*Register it as a buffer"
    ):
        program.verify(model=make_model(name), weights="random")


def test_a_failed_verification_is_a_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {"output logits": float("inf")}
    report = Report(float("nan"), 1.0, {"wte.weight": float("inf")}, (), 8, 0.1, output_errors=errors)
    monkeypatch.setattr(CompiledProgram, "verify", lambda self, **_: report)
    words = ["verify", str(folder), "--model", "small_models:make_small"]
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["passed"] is False
    assert found["loss"] is None
    assert found["gradient_errors"] == {"wte.weight": None}
    assert found["output_errors"] == {"output logits": None}
    assert main(words) == 1
    assert "FAILED" in capsys.readouterr().out


def test_report(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    found = read_json(capsys, "report", folder, "--cluster", "dgx-a100", "-o", page)
    assert found["bytes"] == page.stat().st_size
    assert found["simulation"]["step_seconds"] == autoptd.load(folder).simulate("dgx-a100").step_seconds
    autoptd.load(folder).save_report(tmp_path / "same.html", "dgx-a100")
    assert (tmp_path / "same.html").read_text() == page.read_text()


def test_as_a_program_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "autoptd", "inspect", str(folder)]
    plain = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "8 ranks" in plain.stdout
    assert "\x1b" not in plain.stdout  # plain, as it is no terminal
    assert plain.stdout.isascii()
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", str(folder), "--jsn"])
    wrong = capsys.readouterr().err
    assert "--jsn is unknown (did you mean --json?)" in wrong
    assert "Traceback" not in wrong


def test_a_full_disk_is_said(folder: Path) -> None:
    command = [sys.executable, "-m", "autoptd", "inspect", str(folder)]
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (found.returncode, found.stderr) == (1, "autoptd inspect: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("options", [[], slow(["--json"])])
def test_a_reader_may_leave_early(folder: Path, options: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "autoptd", "inspect", str(folder), *options]
    found = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (found.returncode, found.stderr) == (1, "")


def test_other_ranks_are_silent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    words = ["report", str(folder), "--cluster", "dgx-a100", "-o", str(tmp_path / "page.html")]
    assert main(words) == 0
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("inspect {folder}x", "there is no folder {folder}x (did you mean {folder}?); give one of program.save"),
        ("simulate {folder} --cluster dgx-a10", "'dgx-a10' is not shipped (did you mean dgx-a100?)"),
        ("simulate {folder} --cluster dgx-a100 --dtype bf61", "dtype='bf61': expected one of"),
        ("simulate {folder} --cluster dgx-a100 --trace {folder}", "{folder} is a folder: give a file to write"),
        ("report {folder} --cluster dgx-a100 -o {folder}x/a.html", "{folder}x is not a folder: give a file"),
        ("simulate {folder} --cluster dgx-a100 --zero 3", "zero=3: expected 0 or 1"),
        ("verify {folder} --model small_models:make_smal", "has no attribute 'make_smal' (did you mean make_small?)"),
        ("verify {folder} --model small_models:SIZES", "is or returned a GPTConfig; expected module:callable"),
        ("verify {folder} --model small_models:make_with", "missing 1 required positional argument"),
        ("verify {folder} --model small_models", "'small_models' is or returned a module; expected module:callable"),
        ("verify {folder} --model samples.gtp:GPT", "No module named 'samples.gtp'"),
        *(
            (f"plan samples.gpt:make_model --world-size 8 --global-batch 8 --cluster dgx-a100 --top {top}", said)
            for top, said in ((0, "top is 0; expected a positive"), (-1, "top is -1; expected a positive"))
        ),
        (
            "plan samples.gpt:make_model --world-size 8 --global-batch 8 --cluster dgx-a100 --schedule=",
            "unknown schedule ''; did you mean",
        ),
        *(
            (f"compile no:model --mesh 1,1,1 -o {place}", said)  # before anything is compiled
            for place, said in (
                ("{folder}/manifest.json/out", "{folder}/manifest.json is a file; give a folder"),
                ("/dev/full", "/dev/full is a file; give a folder"),
                ("n" * 300, "File name too long: 'nnn"),
            )
        ),
        ("report {folder} --cluster dgx-a100 -o " + "n" * 300, "File name too long: 'nnn"),
        ("calibrate -o " + "n" * 300 + ".toml", "File name too long: 'nnn"),
        ("compile samples.gpt:make_model --mesh 1,1 -o {folder}", "mesh is (1, 1)"),
        ("compile samples.gpt:make_model --mesh 1,1,1 -o {folder} --recompute ful", "recompute is 'ful'"),
        ("compile samples.gpt:make_model --mesh 1,1,1 -o {folder} --recompute ²", "recompute is '²'; expected"),
        ("compile samples.gpt:make_model --mesh 1,1,1 -o {folder} --schedule 1f2b", "did you mean '1f1b'?"),
        ("compile samples.gpt:make_model --mesh auto -o {folder}", "needs world_size=, global_batch=, cluster="),
    ],
)
def test_bad_commands_exit_with_1_and_a_message(
    folder: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.format(folder=folder).split()) == 1
    shown, said = capsys.readouterr()
    assert shown == ""
    assert message.format(folder=folder) in said


def test_options_of_an_unknown_command_are_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulat", "out", "--cluster", "dgx-a100"])
    assert "--cluster is unknown" not in (said := capsys.readouterr().err)
    assert said.endswith("(did you mean simulate?)\n")


def test_the_command_of_a_plan_is_one_for_a_shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spaced = tmp_path / "my cluster.toml"
    spaced.write_text((ROOT / "passes" / "cost" / "clusters" / "dgx-a100.toml").read_text())
    words = ["small_models:make_small", "--world-size", "1", "--global-batch", "1", "--cluster", str(spaced)]
    assert main(["plan", *words, "--top", "1"]) == 0
    assert f"--cluster '{spaced}' -o out/" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", ["--sequence-parallel", "--no-sequence-parallel"])
def test_the_command_of_a_plan_has_all_that_the_plan_was_made_with(
    tokens: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = "plan small_models:make_small --world-size 2 --global-batch 2 --cluster dgx-h100 --zero 1 --dtype bf16"
    assert main([*words.split(), "--no-overlap", tokens, "--top", "1"]) == 0
    shown = capsys.readouterr().out
    command = next(line for line in shown.splitlines() if line.startswith("autoptd compile"))
    assert {"--zero 1", "--dtype bf16", "--no-overlap", "--cluster dgx-h100", tokens} <= set(
        re.findall(r"--\S+(?: [^-]\S*)?", command)
    )
    assert main([*command.replace("out/", str(tmp_path / "out")).split()[1:]]) == 0
    assert re.search(r"^expect \S+ to \S+ s a step: .* measured; .* taken over from dgx-a100", shown, re.M)


def test_the_help_of_a_plan_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    assert "plan: none, selective, full" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("simulte", "(did you mean simulate?)"),
        ("simulate out --clster dgx-a100", "required: --cluster; --clster is unknown (did you mean --cluster?)"),
        ("report out --cluster dgx-a100 --dtyp=bf16", "--dtyp is unknown (did you mean --dtype?)"),
        ("compile a:b --mesh 2,x,2 -o out", "argument --mesh: '2,x,2': expected tensor,pipeline,data"),
    ],
)
def test_a_wrong_command_line_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library', at {file}:1: import"),
        ("def make(:", "SyntaxError: invalid syntax (broken_models.py, line 1); expected"),
        ("sizes = 1 / 0", "ZeroDivisionError: division by zero, at {file}:1: sizes = 1 / 0; expected"),
        ("def make():\n    raise KeyError('n_layer')", "KeyError: 'n_layer', at {file}:2: raise KeyError"),
        ("import json\ndef make():\n    json.loads('')", "Expecting value: line 1 column 1 (char 0), at {file}:3"),
    ],
)
def test_an_error_of_the_users_own_file_is_said_with_its_place(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_models.py").write_text(text)
    assert main(["compile", "broken_models:make", "--mesh", "1,1,1", "-o", str(tmp_path / "out")]) == 1
    sys.modules.pop("broken_models", None)
    said = capsys.readouterr().err
    assert "model 'broken_models:make' cannot be built: " in said
    assert message.format(file=tmp_path / "broken_models.py") in said


def test_a_place_that_may_not_be_written_to_is_refused_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    calls = {
        f"compile no:model --mesh 1,1,1 -o {folder}": folder,
        f"report no --cluster dgx-a100 -o {folder}.html": folder.parent,
    }
    for words, place in calls.items():
        assert main(words.split()) == 1
        assert f"{place} is not writable" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(*_: object, **__: object) -> None:
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(CompiledProgram, "verify", verify)
    assert main(["verify", str(folder), "--model", "small_models:make_small"]) == 1
    assert capsys.readouterr().err == "autoptd verify: the loss is nan\n"


def test_tables_on_a_terminal(folder: Path) -> None:
    program = autoptd.load(folder)
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100, highlight=False)
    named = CompiledProgram(
        program.stages, ("[red]cut[/]",), program.texts, program.manifest, program.buffers, "[bold]mine[/]"
    )
    print_lines(console, str(named).splitlines())
    print_simulation(console, program.simulate("dgx-a100"), {"days": 0.5})
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert shown != screen.getvalue()
    assert "[bold]mine[/]" in shown  # a user's names are no markup
    assert "[red]cut[/]" in shown
    assert "─" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert all(stage.last in shown for stage in program.overview.stages)


def test_the_entry_point_and_the_template_are_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["autoptd"] == "autoptd.cli.main:main"
    assert "reports/report.html" in project["tool"]["setuptools"]["package-data"]["autoptd"]


def test_the_readmes_commands_are_commands() -> None:
    lines = re.findall(r"^    autoptd (.+?)(?: +#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = [make_parser().parse_args(shlex.split(line)).command for line in lines]
    assert {"plan", "compile", "inspect", "simulate", "verify", "report"} <= set(commands)
