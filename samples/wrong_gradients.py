"""The zoo of wrong gradients: faults that parallel training systems have had in silence, and what finds each here.

Each is put into a right program, as an edit of a rank's text or of the manifest, of a call of the runtime, or of the
user's loop. `check`, `verify` or a step must find it, and say where. The table names where the fault was published.

    python -m samples.wrong_gradients              # the table
    python -m samples.wrong_gradients --write      # and keep it in samples/wrong_gradients.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.engine.executor import ShapeFunctions, StageRun
from autoptd.runtime.module import gradient_norm
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.optimizer import clipping
from autoptd.runtime.program.placement import REPLICATED, Placement, Segment, Shard
from autoptd.text.reader import read_texts
from samples.packed_reader import LENGTH, make_batch, make_program

PAGE = Path(__file__).with_suffix(".md")
Edit = Callable[[CompiledProgram], CompiledProgram]


# Edits of texts and manifest


def rewrite(*changes: tuple[str, str]) -> Edit:
    """Write the new for the old of each pair, in the first text that has it."""

    def edit(program: CompiledProgram) -> CompiledProgram:
        texts = list(program.texts)
        for old, new in changes:
            at = next(i for i, text in enumerate(texts) if old in text)
            texts[at] = texts[at].replace(old, new, 1)
        return replace(program, texts=tuple(texts))

    return edit


def place(name: str, placement: Placement) -> Edit:
    """Say in the manifest that the parameter `name` lies otherwise on the mesh than its text computes."""

    def edit(program: CompiledProgram) -> CompiledProgram:
        parameters = dict(program.manifest.parameters)
        parameters[name] = replace(parameters[name], placement=placement)
        return replace(program, manifest=replace(program.manifest, parameters=parameters))

    return edit


def scale_gradient(value: str, factor: float) -> str:
    """Return an expression with the value of `value`, and `factor` times its gradient."""
    return f"aten.add(aten.mul({value}, {factor}), aten.mul(aten.detach({value}), {1 - factor}))"


# Calls of the runtime, as they would be with the fault


def scaled_seeds(factor: float) -> AbstractContextManager[Any]:
    """Begin every backward with `factor` times the gradient of the loss."""
    start = StageRun.start

    def scaled(self: StageRun, weights: Any, inputs: Any, seeds: Any, *sums: Any) -> None:
        start(self, weights, inputs, None if seeds is None else seeds * factor, *sums)

    return patch.object(StageRun, "start", scaled)


def doubled_each_microbatch() -> AbstractContextManager[Any]:
    """Add the gradients so far to themselves after each backward."""
    backward = StageRun.backward

    def doubled(self: StageRun, microbatch: int) -> None:
        backward(self, microbatch)
        for leaf in self._weights.values():
            if leaf.grad is not None and microbatch != self._last:
                leaf.grad.mul_(2)

    return patch.object(StageRun, "backward", doubled)


def untied_gradients() -> AbstractContextManager[Any]:
    """Keep each stage's gradient of a tied weight to itself."""
    alone: Any = SimpleNamespace(size=1, all_reduce=lambda x: x)
    join = vars(Connection)["__init__"]

    def joined(self: Connection, *args: Any, **kwargs: Any) -> None:
        kwargs["tied"] = dict.fromkeys(kwargs.get("tied", {}), alone)
        join(self, *args, **kwargs)

    return patch.object(Connection, "__init__", joined)


def own_norms() -> AbstractContextManager[Any]:
    """Clip on each rank by the norm of the gradients that it has."""

    def norm(manifest: Any, rank: Any, gradients: Mapping[str, Tensor], shards: Any, norm_type: float) -> Tensor:
        return torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()

    return patch.object(gradient_norm, "global_norm", norm)


def counted_copies(all_stages: bool) -> AbstractContextManager[Any]:
    """Count what several ranks hold once for each: the copies on tensor ranks, or the tied ones of stages."""
    own = clipping._own_rows

    def rows(manifest: Any, rank: Any, name: str, gradient: Tensor) -> list[Tensor]:
        if not all_stages:
            return [gradient] if manifest.homes(name)[0] == rank.coordinates.pipeline else []
        at = rank.coordinates.pipeline
        return own(replace(manifest, stages=manifest.stages[at:]), rank, name, gradient)

    return patch.object(clipping, "_own_rows", rows)


# Loops of the user


def run_loop(program: CompiledProgram, loop: Callable[[Parallel], None]) -> None:
    """Run a `loop` on every rank of `program`, a thread each."""
    programs = read_texts(program.texts, program.manifest)
    assert program.model is not None
    weights = {**program.buffers, **program.model.state_dict()}

    def run(connection: Connection) -> None:
        text = programs[connection.rank.coordinates.pipeline]
        loop(Parallel(connection, ShapeFunctions(program.manifest, text, weights)))

    run_threads(program.manifest, run)


def read_by_rank(parallel: Parallel) -> None:
    """Give every rank its own part of the data, tensor ranks too."""
    batch = make_batch(8)
    first = 4 * parallel.coordinates.tensor
    parallel(**{name: rows[first : first + 4] for name, rows in batch.items()})


def step_the_plain_model() -> None:
    """Step an optimizer of the model that was compiled, whose parameters nobody trains."""
    program = make_program(1, 1, 1)
    assert program.model is not None
    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
    parallel = program.bind(device="cpu")
    parallel(**make_batch(4)).backward()
    optimizer.step()


@dataclass(frozen=True)
class Fault:
    """A fault: what is wrong, where it was published, and how it is made here, perhaps `by_tokens` divided."""

    name: str
    published: str
    edit: Edit | None = None
    call: Callable[[], AbstractContextManager[Any]] = nullcontext
    run: Callable[[], None] | None = None
    by_tokens: bool = False


HEAD = "head = collectives.copied_linear("
PACKED = "blocks0_split_with_sizes_2, documents=documents"
PARTIAL = "rank, blocks0_out)"
BIAS = 'p["blocks.0.out.bias"]'
OWN_CLASSES = "(lambda rank, x, y, vocabulary: aten.cross_entropy_loss(x, aten.clamp(y, 0, 18)))"
BACKWARD = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 (1F1 1RECV_F2 1B1 1SEND_B1) x2 +1"
QKV = 'rank, blocks0_norm, p["blocks.0.qkv.weight"], p["blocks.0.qkv.bias"]'
GATHERED = QKV.replace("rank, blocks0_norm", "collectives.all_gather(rank, blocks0_norm, dim=0)")
ORDER = "warm-up: 0F0 0SEND_F0\nsteady: (0RECV_B0 0F1 0SEND_F1 0B0) x2 +1"

FAULTS = (
    Fault(
        "a pipeline's gradients are not divided by the number of tokens",
        "torchtitan #2972",
        rewrite(("return loss ", f"return {scale_gradient('loss', LENGTH)} ")),
    ),
    Fault("gradients are divided by the number of microbatches twice", "AReaL #1273", call=lambda: scaled_seeds(0.25)),
    Fault("gradients are scaled by all ranks, not by the replicas", "torchtune #2420", call=lambda: scaled_seeds(4)),
    Fault(
        "only the last microbatches train",
        "NeMo Automodel #3530",
        rewrite((BACKWARD, BACKWARD.replace(" 1B0 1SEND_B0", ""))),
    ),
    Fault("gradients are doubled by each microbatch", "Megatron-LM #6660", call=doubled_each_microbatch),
    Fault(
        "activations of two microbatches are exchanged",
        "",
        rewrite((ORDER, "warm-up: 0F0\nsteady: 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0F2 0SEND_F2 0B1")),
    ),
    Fault(
        "layers are lost where stages do not divide them",
        "Megatron-LM #1304, mlx-lm #1688",
        rewrite(("return blocks1_add_1 ", "return blocks0_add_1 ")),
    ),
    Fault("the tied embedding's gradients are not summed over the stages", "piper #13", call=untied_gradients),
    Fault(
        "the head is untied in silence",
        "torch.distributed.pipelining",
        rewrite(('rank, norm, p["tokens.weight"]', 'rank, norm, aten.detach(p["tokens.weight"])')),
    ),
    Fault(
        "the head's input gets unreduced gradients",
        "SkyRL #1886",
        rewrite((HEAD, "head = (lambda rank, *given: aten.linear(*given))(")),
    ),
    Fault(
        "a partial sum is not reduced",
        "",
        rewrite((f"collectives.reduce_from_tensor({PARTIAL}", "aten.clone(blocks0_out)")),
    ),
    Fault(
        "a row-parallel bias is added by every rank",
        "text-generation-inference #1036",
        rewrite((PARTIAL, f"rank, aten.add(blocks0_out, {BIAS}))"), (f"bias={BIAS}, residual=add", "residual=add")),
    ),
    Fault(
        "a row-parallel bias gets 1/t of its gradient",
        "torchtitan #4332",
        rewrite((f"bias={BIAS}, residual=add", f"bias={scale_gradient(BIAS, 0.5)}, residual=add")),
    ),
    Fault(
        "the gradient of a norm on each rank's heads is not summed",
        "Megatron-LM #7452 (11), #1446",
        place("blocks.0.q_norm.weight", REPLICATED),
    ),
    Fault(
        "a packed projection is cut as one",
        "ColossalAI #817",
        place("blocks.0.qkv.weight", Placement(tensor=Shard(0, (Segment(1, 32, 1, True),)))),
    ),
    Fault(
        "a tensor-parallel layer is computed whole, and its flag ignored",
        "trl #5331",
        place("blocks.0.up.weight", REPLICATED),
    ),
    Fault(
        "the loss counts the padding of the vocabulary",
        "unsloth #10616",
        rewrite(("reshape_1, vocabulary=37", "reshape_1, vocabulary=38")),
    ),
    Fault(
        "the loss is that of each rank's own classes",
        "bigscience Megatron-DeepSpeed #394",
        rewrite(("loss = kernels.cross_entropy(", f"loss = {OWN_CLASSES}(")),
    ),
    Fault(
        "a fused loss has no gradient", "NeMo Automodel #2681", rewrite(("return loss ", "return aten.detach(loss) "))
    ),
    Fault("packed documents attend to each other", "trl #6843, axolotl #131", rewrite((PACKED, f"{PACKED} * 0"))),
    Fault(
        "a sequence is split twice, so that a part is read twice",
        "axolotl #3498",
        rewrite(('p["tokens.weight"], idx_sb', 'p["tokens.weight"], aten.cat([idx_sb[:4], idx_sb[:4]])')),
    ),
    Fault("each rank clips by the norm of what it holds", "NeMo Automodel #3816, ColossalAI #2192", call=own_norms),
    Fault(
        "the norm counts each tensor rank's copy",
        "NeMo RL #3788, TransformerEngine (ROCm) #715",
        call=lambda: counted_copies(False),
    ),
    Fault("the norm counts a tied weight twice", "Megatron-LM #7228", call=lambda: counted_copies(True)),
    Fault(
        "tensor ranks read different data",
        "accelerate #3092",
        run=lambda: run_loop(make_program(2, 1, 1), read_by_rank),
    ),
    Fault("the optimizer has the parameters from before", "accelerate #3256", run=step_the_plain_model),
    Fault("divided tokens are not gathered", "", rewrite((f"{QKV}, gathered=True", QKV)), by_tokens=True),
    Fault(
        "the gradients of gathered tokens are not summed",
        "",
        rewrite((f"collectives.copied_linear({' ' * 18}", "aten.linear("), (f"{QKV}, gathered=True", GATHERED)),
        by_tokens=True,
    ),
    Fault(
        "tokens are scattered along another dimension",
        "",
        rewrite(("rank, blocks0_out, dim=0", "rank, blocks0_out, dim=2")),
        by_tokens=True,
    ),
    Fault(
        "the gradient of a norm of divided tokens is summed over replicas alone",
        "",
        place("blocks.0.mlp_norm.weight", REPLICATED),
        by_tokens=True,
    ),
    Fault(
        "tensor ranks draw one mask for different tokens",
        "",
        rewrite(("p=0.1, sample=1, divided=0", "p=0.1, sample=1")),
        by_tokens=True,
    ),
)


@dataclass(frozen=True)
class Found:
    """By what a fault was found, and the line of the message that says where; `by` is empty if nothing finds it."""

    by: str
    said: str


def find(fault: Fault) -> Found:
    """Put a `fault` into a right program, and return what finds it."""
    if fault.run is not None:
        try:
            fault.run()
        except (ValueError, RuntimeError) as error:
            return Found("a step", str(error))
        return Found("", "")
    program = make_program(2, 2, 2, sequence_parallel=fault.by_tokens)
    edited = fault.edit(program) if fault.edit else program
    try:
        edited.check()
    except (autoptd.ProgramError, ValueError) as error:  # ValueError: the text does not even run on its shapes
        return Found("check", str(error))
    with fault.call():
        report = edited.verify(batch=make_batch(4 * 2))
    said = (report.fault, *report.disagreements, *(f"{name} is wrong" for name in report.wrong))
    return Found("", "") if report.passed else Found("verify", next(line for line in said if line))


def list_rows() -> Iterator[tuple[Fault, Found]]:
    """Yield each fault and what finds it."""
    for fault in FAULTS:
        yield fault, find(fault)


def main() -> None:
    """Print the table, and write it with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"keep the table in {PAGE.name}")
    write = parser.parse_args().write
    lines = ["| fault | published | found by | which says |", "| --- | --- | --- | --- |"]
    for fault, found in list_rows():
        said = found.said.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {fault.name} | {fault.published} | {found.by or 'NOTHING'} | {said} |")
        print(lines[-1], flush=True)
    if write:
        _, _, about = __doc__.partition("\n\n")
        PAGE.write_text(
            f"# The zoo of wrong gradients\n\nFaults that parallel training systems have had in silence. {about}\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
