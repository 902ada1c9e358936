"""The command line: each command is one call of the Python interface, and prints the result."""

import argparse
import inspect
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rich.console import Console

from autoptd.calibration.fit import calibrate
from autoptd.check.program import ProgramError
from autoptd.cli import tables
from autoptd.cli.model_path import make_model
from autoptd.compiled import CompiledProgram, load
from autoptd.compiler import compile
from autoptd.passes.cost.cluster import Cluster, suggest, write_tables
from autoptd.passes.cost.throughput import format_speed
from autoptd.passes.recompute import MODES
from autoptd.planning.plan import RECOMPUTE
from autoptd.planning.search import plan
from autoptd.reports.page import write_page
from autoptd.runtime.program.schedule import SCHEDULES
from autoptd.simulate.step import Simulation
from autoptd.text.folder import MANIFEST, check_free
from autoptd.verification.random_inputs import find_empty
from autoptd.verification.report import Report
from autoptd.verification.step import check_memory

FLAG: Mapping[str, Any] = {"action": argparse.BooleanOptionalAction, "default": True}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return 0, or 1 if it found something wrong. Under torchrun only rank 0 runs it."""
    args = make_parser().parse_args(argv)
    if os.environ.get("RANK", "0") != "0":
        return 0
    if "" not in sys.path:
        sys.path.insert(0, "")  # models are named from the current folder, as `python -m` finds them
    try:
        found: Outcome = args.run(args)
        if args.json:
            print(json.dumps(found.value, indent=2))
        else:
            found.show(tables.open_console())
        sys.stdout.flush()
    except (ValueError, TypeError, FloatingPointError, OSError, ProgramError) as error:
        if not isinstance(error, BrokenPipeError):  # `| head` has read enough
            print(f"autoptd {args.command}: {error}", file=sys.stderr)
        if isinstance(error, OSError) and error.filename is None:  # discard what is left to flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return found.code


class Outcome(NamedTuple):
    """The result of a command: as JSON, as a function that prints it, and the exit code."""

    value: object
    show: Callable[[Console], None]
    code: int = 0


def _plan(args: argparse.Namespace) -> Outcome:
    """Find the mesh, model chunks, microbatches and recomputation that train a model fastest."""
    plans = plan(make_model(args.model), **_given(args, plan))
    meshes = [(own.tensor, own.pipeline, own.data) for own in plans]
    options, plain = {**plans[0].options, "mesh": ",".join(map(str, meshes[0]))}, inspect.signature(compile).parameters
    chosen = [(name.replace("_", "-"), own) for name, own in options.items() if own != plain[name].default]
    values = ((f"--{'' if own else 'no-'}{n}", [str(own)] * (not isinstance(own, bool))) for n, own in chosen)
    words = [word for flag, value in values for word in (flag, *value)]
    command = shlex.join(["autoptd", "compile", args.model, *words, "-o", "out/"])
    speeds = [own.throughput.describe(args.tokens, args.price) for own in plans]
    rows = zip(meshes, plans, speeds, strict=True)
    found = [{"mesh": mesh, **asdict(replace(own, given={})), **speed} for mesh, own, speed in rows]
    shown, best = [own for own in plans if own.simulated][: args.top], format_speed(speeds[0]).items()
    lines = ["the best: " + ", ".join(f"{words} {value}" for words, value in best)]
    lines += [Cluster.load(args.cluster).expect(plans[0].step_seconds), command]
    return Outcome(found[: args.top], lambda console: tables.print_plans(console, shown, len(plans), lines))


def _compile(args: argparse.Namespace) -> Outcome:
    """Compile a model and save its program."""
    check_free(args.output)
    program = compile(make_model(args.model), args.mesh, **_given(args, compile))
    program.save(args.output)
    return _describe_program(program)


def _inspect(args: argparse.Namespace) -> Outcome:
    """Show a saved program: mesh, schedule, stages, communication."""
    return _describe_program(_load(args.program))


def _describe_program(program: CompiledProgram) -> Outcome:
    return Outcome(asdict(program.overview), lambda console: tables.print_lines(console, str(program).splitlines()))


def _simulate(args: argparse.Namespace) -> Outcome:
    """Time a training step of a saved program on a described cluster."""
    _check_file(args.trace)
    simulation = _load(args.program).simulate(args.cluster, args.dtype, **_given(args, CompiledProgram.simulate))
    if args.trace:
        simulation.save_trace(args.trace)
    speed = simulation.throughput.describe(args.tokens, args.price)
    found = _describe_simulation(simulation) | speed
    return Outcome(found, lambda console: tables.print_simulation(console, simulation, speed))


def _verify(args: argparse.Namespace) -> Outcome:
    """Run all ranks here in float64 and compare with the plain model."""
    program, model = _load(args.program), make_model(args.model)
    if any(find_empty(shape.manifest, model, shape.buffers) for shape in program.shapes):
        check_memory(program.manifest)  # before the whole model takes some of it
        model = make_model(args.model, "cpu")
    report = program.verify(model=model, weights="random", seed=args.seed or 0)
    found, lines = _describe_verified(report), str(report).splitlines()
    return Outcome(found, lambda console: tables.print_lines(console, lines), int(not report.passed))


def _describe_verified(report: Report) -> dict[str, Any]:
    further = [_describe_verified(other) for other in report.further]
    found = {"passed": report.passed, "loss_error": report.loss_error} | asdict(report) | {"further": further}
    return {name: _finite(value) for name, value in found.items()}


def _check_file(path: Path | None) -> None:
    """Raise ValueError, before the work starts, for a path that cannot be written."""
    if path is None:
        return
    place = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        wrong = "is a folder" if path.is_dir() else "is not writable" if path.parent.is_dir() else "is not a folder"
        raise ValueError(f"{place} {wrong}: give a file to write, in a folder that exists")


def _report(args: argparse.Namespace) -> Outcome:
    """Write a page with the schedule, memory, communication, stages and texts."""
    _check_file(args.output)
    program = _load(args.program, args.model)
    explanation = program.explain(args.cluster, args.dtype, **_given(args, CompiledProgram.simulate))
    simulation = explanation.simulation
    write_page(args.output, program.overview, simulation, explanation.lines, program.texts)
    size, simulated = args.output.stat().st_size, _describe_simulation(simulation)
    return Outcome(
        {"path": str(args.output), "bytes": size, "simulation": simulated},
        lambda console: tables.print_lines(console, [f"{args.output}: {size:,} bytes; open it in a browser"]),
    )


def _calibrate(args: argparse.Namespace) -> Outcome:
    """Measure this machine: a cluster for the other commands, in a .toml file."""
    _check_file(args.output)
    cluster = calibrate(args.output, **_given(args, calibrate))
    lines = write_tables(cluster, "measured", {})
    return Outcome(asdict(cluster), lambda console: tables.print_lines(console, lines))


def _load(folder: Path, model: str | None = None) -> CompiledProgram:
    if not folder.is_dir():
        saved = [str(near.parent) for near in folder.parent.glob(f"*/{MANIFEST}")]
        hint = suggest(str(folder), saved)
        raise ValueError(f"there is no folder {folder}{hint}; give one of program.save or autoptd compile")
    return load(folder, None if model is None else make_model(model))


def _given(args: argparse.Namespace, function: Callable[..., object]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: getattr(args, p.name, None) for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {name: value for name, value in given.items() if value is not None}


def _describe_simulation(simulation: Simulation) -> dict[str, object]:
    names = (
        *("dtype", "step_seconds", "tflops_per_device", "mfu", "bubble_fraction"),
        *("critical_rank", "breakdown", "memory_bytes", "held_bytes", "fits", "uncounted"),
    )
    cluster = simulation.cluster
    device = {"device_memory_bytes": cluster.device.memory_bytes, "trust": cluster.expect(simulation.step_seconds)}
    return {"cluster": cluster.name, **{n: getattr(simulation, n) for n in names}, **device}


def _finite(value: Any) -> Any:
    """Return the value, or mapping of values, with None for nan and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _finite(own) for name, own in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_mesh(text: str) -> str | tuple[int, ...]:
    try:
        return text if text == "auto" else tuple(int(entry) for entry in text.split(","))
    except ValueError:
        message = f'{text!r}: expected tensor,pipeline,data, e.g. 2,2,2, or "auto"'
        raise argparse.ArgumentTypeError(message) from None


def _read_recompute(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest command or option."""

    given: Sequence[str] = ()
    commands: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here, where the command's own options are known."""
        self.given = list(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unexpected arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Exit with 2, as argparse does."""
        known = self._option_string_actions
        options = [word.partition("=")[0] for word in self.given if word.startswith("--")]
        hints = [f"; {word} is unknown{suggest(word, known)}" for word in options if word not in known]
        first = self.given[0] if self.given else "-"
        if self.commands and not first.startswith("-"):  # the command of the options is unknown
            hints = [suggest(first, self.commands)]
        super().error(message + "".join(hints))


ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "model": {"help": "module:callable, e.g. samples.gpt:make_model; made on the meta device"},
    "program": {"type": Path, "help": "a saved program's folder; loading runs the code in its texts"},
    "--mesh": {"type": _read_mesh, "metavar": "T,P,D", "help": 'tensor,pipeline,data, or "auto": the best'},
    "--world-size": {"type": int, "help": "devices"},
    "--global-batch": {"type": int, "help": "sequences in a step, of all replicas"},
    "--cluster": {"help": "a shipped name, e.g. dgx-a100, or a .toml file"},
    "--dtype": {"help": "compute in bf16, fp32, …; default the model's own"},
    "--max-tensor": {"type": int, "help": "tensor ranks at most; default a node's devices"},
    "--microbatch-size": {"type": int, "help": "sequences"},
    "--num-microbatches": {"type": int, "help": "of a pipeline and step"},
    "--num-model-chunks": {"type": int, "help": "stages of a pipeline rank"},
    "--schedule": {"help": ", ".join(SCHEDULES)},
    "--recompute": {
        "type": _read_recompute,
        "help": f"{', '.join(MODES)}, or a number of layers; plan: {', '.join(RECOMPUTE)}",
    },
    "--expert": {"type": int, "help": "ranks over which experts of a mixture are divided; default the tensor ranks"},
    "--seed": {"type": int, "help": "of weights, dropout and batches"},
    "--top": {"type": int, "default": 12, "help": "meshes to simulate and show"},
    "--model": {"help": "the plain model, module:callable"},
    "--sequence-parallel": {**FLAG, "default": None, "help": "divide tokens too; default where it is faster, or fits"},
    "--overlap": {**FLAG, "help": "send messages and sum gradients while the device computes"},
    "--wide-gradients": {**FLAG, "help": "sum gradients in at least float32"},
    "--zero": {"type": int, "default": 0, "help": "1: the replicas share the optimizer's states"},
    "--tokens": {"type": float, "help": "of a whole training: print its days"},
    "--price": {"type": float, "help": "of a device-hour: print the cost of --tokens"},
    "--trace": {"type": Path, "help": "write a chrome trace: step.json or step.json.gz"},
    "--devices": {"type": int, "help": "processes that share this machine's cores; default one for each"},
    "--seconds": {"type": float, "help": "how long to measure, about"},
    "--output": {"type": Path, "help": "to write: a program's folder, a page, or a cluster's .toml file"},
    "--json": {"action": "store_true", "help": "print JSON"},
}
STEP = "--cluster! --dtype --overlap --wide-gradients --zero"
COMMANDS: Mapping[Callable[[argparse.Namespace], Outcome], str] = {
    _plan: f"model --world-size! --global-batch! {STEP} --mesh --max-tensor --microbatch-size --num-model-chunks "
    "--schedule --recompute --sequence-parallel --top --tokens --price",
    _compile: "model --mesh! --output! --microbatch-size --num-microbatches --num-model-chunks --schedule --recompute "
    f"--expert --sequence-parallel --seed --world-size --global-batch {STEP.replace('!', '')}",
    _inspect: "program",
    _simulate: f"program {STEP} --trace --tokens --price",
    _verify: "program --model! --seed",
    _calibrate: "--output --devices --seconds",
    _report: f"program {STEP} --output! --model",
}


def make_parser() -> Parser:
    """Return the parser of all commands; arguments with a ! are required."""
    about = "Plan, compile, examine, time and prove parallel training programs."
    parser = Parser(prog="autoptd", description=about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for run, arguments in COMMANDS.items():
        words, name = run.__doc__, run.__name__.removeprefix("_")
        command = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        command.set_defaults(run=run)
        for argument in (*arguments.split(), "--json"):
            required: dict[str, Any] = {"required": True} if argument.endswith("!") else {}
            option = argument.rstrip("!")
            names = ("-o", option) if option == "--output" else (option,)
            command.add_argument(*names, **ARGUMENTS[option], **required)
    parser.commands = tuple(commands.choices)
    return parser
