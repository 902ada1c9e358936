"""The parity comparison is judged: each of these seeded faults must make it fail.

A fault is put into the program (its texts, its manifest) or into the runtime of the forked ranks. Where it is in
a text, and the static proof sees it too, loading the edited folder is refused as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime import launch
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.comm.groups import Posted, ProcessGroup, running
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.comm.transfer import SendBuffer
from autoptd.runtime.engine.executor import StageRun
from autoptd.runtime.module import step_runner
from autoptd.runtime.optimizer import clipping
from autoptd.runtime.program.placement import REPLICATED, Parameter, Placement, Segment, Shard
from autoptd.runtime.program.program_text import read_program
from autoptd.runtime.program.schedule import Action, Kind
from autoptd.runtime.program.schedule_text import format_schedule
from autoptd.runtime.weights import slices
from samples.benchmarks.uniform_cut import uniform_cuts
from tests.generated_models import ModelConfig, make_batch, make_model
from tests.parity import Batch, ParityError, Run, Training, compare, train_compiled, train_plain

Edit = Callable[[CompiledProgram], CompiledProgram]

GPT = ModelConfig(layers=4, projection="packed", tied=True)
GROUPED = ModelConfig(layers=2, kv_heads=2, projection="unequal", query_key_norm=True)
PROGRAMS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "gpt": (GPT, {"mesh": (2, 2, 2), "schedule": "interleaved_1f1b", "num_model_chunks": 2}),
    "gpipe": (GPT, {"mesh": (2, 2, 1), "schedule": "gpipe"}),
    "grouped": (GROUPED, {"mesh": (4, 2, 1), "schedule": "1f1b"}),
}
MICROBATCHES = 4
CLIPPED = Training(max_norm=0.5)

# Only ever used in a forked rank, and never undone there.
forked = pytest.MonkeyPatch()


@cache
def build(name: str) -> tuple[CompiledProgram, Batch, Run]:
    """A program without a fault, its batch, and what the plain model does with it."""
    config, options = PROGRAMS[name]
    model = make_model(config)
    example = make_batch(config, 1)
    with uniform_cuts():  # faults are put where the layers are
        program = autoptd.compile(model, example_inputs=example, num_microbatches=MICROBATCHES, **options)
    microbatches = MICROBATCHES * program.mesh.data
    batch = make_batch(config, microbatches, ignored=0.2)
    # Some targets are left out: the loss is the mean over those of the whole batch.
    return program, batch, train_plain(model, [batch], 1, CLIPPED)


# Edits of texts and manifest


def keep(program: CompiledProgram) -> CompiledProgram:
    return program


def rewrite(old: str, new: str) -> Edit:
    """In the one text that has it, write `new` for `old`."""

    def edit(program: CompiledProgram) -> CompiledProgram:
        (at,) = (i for i, text in enumerate(program.texts) if old in text)
        texts = [text.replace(old, new, 1) if i == at else text for i, text in enumerate(program.texts)]
        return replace(program, texts=tuple(texts))

    return edit


def both(*edits: Edit) -> Edit:
    def edit(program: CompiledProgram) -> CompiledProgram:
        for one in edits:
            program = one(program)
        return program

    return edit


def reorder(pipeline: int, change: Callable[[list[Action]], list[Action]]) -> Edit:
    """Another SCHEDULE in the text of rank `pipeline`."""

    def edit(program: CompiledProgram) -> CompiledProgram:
        text = program.texts[pipeline]
        actions = change(list(read_program(text, "unfaulted.py").actions))
        schedule = f'SCHEDULE = """\n{format_schedule(actions)}\n"""'
        text = re.sub(r'SCHEDULE = """.*?"""', schedule, text, flags=re.DOTALL)
        texts = [text if i == pipeline else own for i, own in enumerate(program.texts)]
        return replace(program, texts=tuple(texts))

    return edit


def swap_sends(kind: Kind, stage: int) -> Callable[[list[Action]], list[Action]]:
    """Send microbatch 1 ahead of microbatch 0."""

    def change(actions: list[Action]) -> list[Action]:
        first, second = (actions.index(Action(stage, kind, microbatch)) for microbatch in (0, 1))
        late = actions[first]
        return [*actions[:first], *actions[first + 1 : second + 1], late, *actions[second + 1 :]]

    return change


def change_parameter(name: str, **fields: Any) -> Edit:
    """Other fields for one parameter of the manifest."""

    def edit(program: CompiledProgram) -> CompiledProgram:
        parameters = dict(program.manifest.parameters)
        parameters[name] = replace(parameters[name], **fields)
        return replace(program, manifest=replace(program.manifest, parameters=parameters))

    return edit


# Faults of the runtime


def forget_the_tied_sum() -> None:
    connect: Callable[..., Connection] = vars(launch)["connect"]

    def without(*args: Any) -> Connection:
        connection = connect(*args)
        alone: Any = SimpleNamespace(size=1, all_reduce=lambda x: x)
        return replace(connection, tied=dict.fromkeys(connection.tied, alone))

    forked.setattr(launch, "connect", without)


def shift_vocabulary_shards() -> None:
    take = slices.take_slice

    def shifted(parameter: Parameter, whole: Tensor, rank: Rank) -> Tensor:
        on_tensor = parameter.placement["tensor"]
        rolled = whole.roll(-1, on_tensor.dim) if on_tensor.padding and on_tensor.dim is not None else whole
        return take(parameter, rolled, rank)

    forked.setattr(slices, "take_slice", shifted)


def forget_dividing_by_replicas() -> None:
    post = ProcessGroup.post_all_reduce

    def change(group: ProcessGroup, tensors: Sequence[Tensor]) -> Posted[list[Tensor]]:
        return post(group, [x * group.size for x in tensors])

    forked.setattr(ProcessGroup, "post_all_reduce", change)


def skip_the_replicas() -> None:
    forked.setattr(ProcessGroup, "post_all_reduce", lambda group, tensors: running(list(tensors)))


def forget_dividing_by_microbatches() -> None:
    start = StageRun.start

    def changed(self: StageRun, weights: Any, inputs: Any, seeds: Any, *memory: Any) -> None:
        start(self, weights, inputs, None if seeds is None else seeds / seeds, *memory)

    forked.setattr(StageRun, "start", changed)


def gather_in_reverse() -> None:
    all_gather = ProcessGroup.all_gather
    forked.setattr(ProcessGroup, "all_gather", lambda self, x: all_gather(self, x)[::-1])


def send_what_was_sent_before() -> None:
    send = SendBuffer.send

    def stale(self: SendBuffer, microbatch: int) -> None:
        before: dict[int, Any] = vars(self).setdefault("before", {})
        before[microbatch] = self._held[microbatch]
        if microbatch == 1:
            self._held[1] = before[0]
        send(self, microbatch)

    forked.setattr(SendBuffer, "send", stale)


def differentiate_another_microbatch() -> None:
    backward = StageRun.backward

    def swapped(self: StageRun, microbatch: int) -> None:
        # Not in the last stage as well: twice swapped is another order, and right.
        if microbatch == 0 and Kind.RECEIVE_GRADIENT in self.takes:
            one, two, *_ = self._slots
            one._kept, two._kept = two._kept, one._kept
        backward(self, microbatch)

    forked.setattr(StageRun, "backward", swapped)


def shift_the_targets() -> None:
    split_batch: Callable[..., list[tuple[Tensor, ...]]] = vars(step_runner)["split_batch"]

    def shifted(manifest: Any, batch: Batch, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
        rows = split_batch(manifest, batch, names)
        return rows[1:] + rows[:1] if tuple(names) == ("targets",) else rows

    forked.setattr(step_runner, "split_batch", shifted)


def change_all_reduce(skip: Callable[[Tensor, str], bool]) -> None:
    all_reduce = ProcessGroup.all_reduce

    def changed(self: ProcessGroup, x: Tensor, op: Any = "sum") -> Tensor:
        return x if skip(x, op) else all_reduce(self, x, op)

    forked.setattr(ProcessGroup, "all_reduce", changed)


def skip_the_maximum() -> None:
    change_all_reduce(lambda x, op: op == "max")


def skip_the_sum_of_exponentials() -> None:
    change_all_reduce(lambda x, op: x.dim() == 2 and x.shape[0] == 2 and x.shape[1] == GPT.length)


def count_every_copy_in_the_norm() -> None:
    def every(manifest: Any, rank: Any, name: str, gradient: Tensor) -> list[Tensor]:
        return [gradient]

    forked.setattr(clipping, "_own_rows", every)


@dataclass(frozen=True)
class Fault:
    """What is wrong, in which program, and whether the static proof refuses it, or what it says it does not cover."""

    name: str
    program: str
    edit: Edit = keep
    prepare: Callable[[], None] | None = None
    refused: bool = False
    uncovered: str = ""

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


NOTHING = "(lambda rank, x: x)("
LINEAR = "(lambda rank, *given: aten.linear(*given))("
TWICE = "(lambda rank, x: collectives.reduce_from_tensor(rank, collectives.reduce_from_tensor(rank, x)))("
NEXT = "(lambda rank, x, dim: x.narrow(dim, (rank.groups['tensor'].index + 1) % 4, 1))("
QKV = 'p["blocks.0.attention.qkv'
SAME = 'p["positions.weight"].reshape(192)[:36]'
CONTEXT = "blocks0_attention_transpose_3 = aten.permute(blocks0_attention_sdpa"
SECTIONS = "        blocks0_attention_qkv"
DOWN = 'p["blocks.0.mlp.down.bias"]'

FAULTS = [
    Fault(
        "a g is dropped",
        "gpt",
        rewrite("blocks0_mlp_down_g = collectives.reduce_from_tensor(", f"blocks0_mlp_down_g = {NOTHING}"),
        refused=True,
    ),
    Fault(
        "the embedding's g is dropped",
        "gpt",
        rewrite("tokens_g = collectives.reduce_from_tensor(", f"tokens_g = {NOTHING}"),
        refused=True,
    ),
    Fault(
        "an f is dropped",
        "gpt",
        rewrite("blocks0_attention_qkv = collectives.copied_linear(", f"blocks0_attention_qkv = {LINEAR}"),
        refused=True,
    ),
    Fault(
        "the head's f is dropped", "gpt", rewrite("head = collectives.copied_linear(", f"head = {LINEAR}"), refused=True
    ),
    Fault(
        "a g is doubled",
        "gpt",
        rewrite("blocks1_attention_out_g = collectives.reduce_from_tensor(", f"blocks1_attention_out_g = {TWICE}"),
        refused=True,
    ),
    Fault(
        "a row-parallel bias is added t times",
        "gpt",
        both(
            rewrite("rank, blocks0_mlp_down\n", f"rank, aten.add(blocks0_mlp_down, {DOWN})\n"),
            rewrite(f"blocks0_mlp_down_g, {DOWN}, blocks0_add", "blocks0_mlp_down_g, None, blocks0_add"),
        ),
        refused=True,
    ),
    Fault(
        "attention looks ahead",
        "gpt",
        rewrite(
            "blocks0_attention_transpose_2,\n        is_causal=True",
            "blocks0_attention_transpose_2,\n        is_causal=False",
        ),
    ),
    Fault(
        "the loss counts the padding of the vocabulary",
        "gpt",
        rewrite("rank, reshape, reshape_1, vocabulary=53", "rank, reshape, reshape_1, vocabulary=54"),
        refused=True,
    ),
    Fault(
        "the loss's vocabulary shard is shifted by one",
        "gpt",
        rewrite("rank, reshape, reshape_1, vocabulary=53", "rank, reshape.roll(1, 1), reshape_1, vocabulary=53"),
        uncovered="roll",
    ),
    Fault("the table's vocabulary shard is shifted by one", "gpt", prepare=shift_vocabulary_shards),
    Fault(
        "a key is that of the next rank's head",
        "grouped",
        rewrite("blocks0_attention_k_norm_own = collectives.take_own(", f"blocks0_attention_k_norm_own = {NEXT}"),
        uncovered="reshape",
    ),
    Fault("two activations are swapped", "gpipe", reorder(0, swap_sends(Kind.SEND_OUTPUT, 0)), refused=True),
    Fault("two gradients are swapped", "gpipe", reorder(1, swap_sends(Kind.SEND_GRADIENT, 1)), refused=True),
    Fault("a stale activation is sent", "gpt", prepare=send_what_was_sent_before),
    Fault("a backward takes another microbatch's graph", "gpipe", prepare=differentiate_another_microbatch),
    Fault("the loss compares with another microbatch", "gpt", prepare=shift_the_targets),
    Fault("scattered pieces are gathered in the wrong order", "gpt", prepare=gather_in_reverse),
    Fault("the tied gradient is not summed", "gpt", prepare=forget_the_tied_sum),
    Fault("the gradient is not divided by d", "gpt", prepare=forget_dividing_by_replicas),
    Fault("the gradient is not summed over the replicas", "gpt", prepare=skip_the_replicas),
    Fault("the gradient is not divided by m", "gpt", prepare=forget_dividing_by_microbatches),
    Fault("the loss skips the maximum over the ranks", "gpt", prepare=skip_the_maximum),
    Fault("the loss skips the sum over the ranks", "gpt", prepare=skip_the_sum_of_exponentials),
    Fault(
        "a packed projection is cut into contiguous runs",
        "gpt",
        change_parameter(
            "blocks.0.attention.qkv.weight", placement=Placement(tensor=Shard(0, (Segment(1, 72, 1, True),)))
        ),
        refused=True,
    ),
    Fault(
        "a partial gradient is taken for whole",
        "grouped",
        change_parameter("blocks.0.attention.q_norm.weight", placement=REPLICATED),
        refused=True,
    ),
    Fault(
        "a divided projection gets the same bias on every rank",
        "gpt",
        rewrite(
            f'blocks0_attention_norm, {QKV}.weight"], {QKV}.bias"]', f'blocks0_attention_norm, {QKV}.weight"], {SAME}'
        ),
        refused=True,
    ),
    Fault("the heads are turned round", "gpt", rewrite(CONTEXT, f"{CONTEXT}.flip(1)"), uncovered="flip"),
    Fault("sections are shifted", "gpt", rewrite(f"{SECTIONS}, 12", f"{SECTIONS}.roll(12, 2), 12"), uncovered="roll"),
    Fault(
        "a whole gradient is taken for partial",
        "gpt",
        change_parameter("blocks.1.mlp_norm.weight", placement=REPLICATED.with_partial_gradient("tensor")),
        refused=True,
    ),
    Fault("the norm counts every rank's copy", "gpt", prepare=count_every_copy_in_the_norm),
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_a_fault_nothing_is_found(name: str) -> None:
    program, batch, expected = build(name)
    compare(train_compiled(program, [batch], CLIPPED).steps[0], expected.steps[0])


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, f in enumerate(FAULTS)], ids=str
)
def test_the_comparison_finds_the_fault(fault: Fault) -> None:
    program, batch, expected = build(fault.program)
    faulty = fault.edit(program)

    def judge() -> None:
        found = train_compiled(faulty, [batch], CLIPPED, prepare=fault.prepare)
        compare(found.steps[0], expected.steps[0])

    with pytest.raises(ParityError):
        judge()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.refused], ids=str)
def test_the_static_proof_refuses_the_edited_program(fault: Fault, tmp_path: Path) -> None:
    program, _, _ = build(fault.program)
    fault.edit(program).save(tmp_path)
    with pytest.raises(autoptd.ProgramError):
        autoptd.load(tmp_path)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.uncovered], ids=str)
def test_the_static_proof_says_what_it_does_not_cover(fault: Fault) -> None:
    program, _, _ = build(fault.program)
    assert any(f": {fault.uncovered}, " in line for line in fault.edit(program).check())


@pytest.mark.parametrize("vocabulary", [52, 54])
def test_a_table_has_the_rows_of_the_manifest(vocabulary: int, tmp_path: Path) -> None:
    program, _, _ = build("gpt")
    rewrite("idx_sb, vocabulary=53", f"idx_sb, vocabulary={vocabulary}")(program).save(tmp_path)
    message = rf"vocabulary={vocabulary}, where tokens_weight has 53 rows .*: expected vocabulary=53"
    with pytest.raises(autoptd.ProgramError, match=message):
        autoptd.load(tmp_path)


def test_there_are_enough() -> None:
    assert len({fault.name for fault in FAULTS}) >= 20
