"""Communication counted while it happens, and equal to what the plan prints.

Of a GPT of L layers the tensor ranks all-reduce, per microbatch: forward two a layer (behind attention and MLP),
one behind the vocabulary-parallel embedding, and two small ones in the loss (the maximum; the sum of
exponentials together with the target's logit); backward two a layer (in front of attention and MLP), one in front
of the output head. Nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.saved_tensors import find_repeated
from autoptd.passes.ir.program import recomputed_groups
from autoptd.runtime import collectives, kernels
from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.transfer import is_scattered
from autoptd.text.comments import write_bytes
from samples.benchmarks.uniform_cut import uniform_cuts
from samples.gpt import GPT, GPTConfig
from tests.counting import calls, elements, sent_elements
from tests.generated_models import ModelConfig, make_batch, make_model
from tests.marks import slow
from tests.parity import Batch, loss_of, split_batch
from tests.ranks import run_ranks

LAYERS, B, LENGTH = 4, 2, 8
MEGATRON = ModelConfig(layers=LAYERS, length=LENGTH, projection="packed")
STREAM = B * LENGTH * MEGATRON.hidden  # b * s * h elements
TOKENS = B * LENGTH

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Traffic:
    """What one rank communicated: calls and elements by "group kind", and elements sent by boundary."""

    calls: Counts
    elements: Counts
    sent: Counts

    def __sub__(self, before: Traffic) -> Traffic:
        def subtract(after: Counts, first: Counts) -> Counts:
            return {key: n - first.get(key, 0) for key, n in after.items() if n != first.get(key, 0)}

        return Traffic(
            subtract(self.calls, before.calls),
            subtract(self.elements, before.elements),
            subtract(self.sent, before.sent),
        )


@dataclass(frozen=True)
class Measured:
    """One rank's traffic in a forward-only step, and in a training step."""

    forward: Traffic
    training: Traffic


def read_traffic(parallel: Any) -> Traffic:
    connection = parallel._connection
    groups: dict[str, Group] = dict(connection.rank.groups)
    groups |= {f"tied {owners}": group for owners, group in connection.tied.items()}
    return Traffic(
        {f"{name} {kind}": n for name, group in groups.items() for kind, n in calls(group).items()},
        {f"{name} {kind}": n for name, group in groups.items() for kind, n in elements(group).items()},
        dict(sent_elements(parallel)),
    )


def measure(program: CompiledProgram, config: ModelConfig) -> list[Measured]:
    """Run a step without gradients and one with, on every rank; what each rank communicated."""
    manifest = program.manifest
    sequences = manifest.microbatch_size * manifest.num_microbatches * program.mesh.data
    return measure_batch(program, make_batch(config, sequences))


def measure_batch(program: CompiledProgram, batch: Batch) -> list[Measured]:
    def work(rank: int) -> Measured:
        parallel = program.bind()
        own = split_batch(batch, program.mesh.data)[program.mesh.coordinates(rank).data]
        start = read_traffic(parallel)
        with torch.no_grad():
            parallel(**own)
        middle = read_traffic(parallel)
        loss_of(parallel(**own)).backward()
        return Measured(middle - start, read_traffic(parallel) - middle)

    return run_ranks(work, program.mesh.size)


def compile_model(config: ModelConfig, mesh: tuple[int, int, int], **options: Any) -> CompiledProgram:
    example = make_batch(config, B)
    with uniform_cuts():  # one value of [s, b, h] crosses
        return autoptd.compile(make_model(config), mesh, example_inputs=example, microbatch_size=B, **options)


def over_pipeline(program: CompiledProgram, measured: list[Traffic], key: str) -> tuple[int, int]:
    """Calls and elements of one tensor rank, added over the pipeline; the same for every tensor rank and replica."""
    mesh = program.mesh
    totals = {
        tuple(
            sum(getattr(measured[rank], kind).get(key, 0) for rank in mesh.group("pipeline", first))
            for kind in ("calls", "elements")
        )
        for first in range(mesh.size)
    }
    ((calls, elements),) = totals
    return calls, elements


@pytest.mark.parametrize("m", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2)], ids=str)
def test_a_layer_has_two_all_reduces_forward_and_two_backward(mesh: tuple[int, int, int], m: int) -> None:
    program = compile_model(MEGATRON, mesh, num_microbatches=m)
    measured = measure(program, MEGATRON)
    forward = over_pipeline(program, [x.forward for x in measured], "tensor all_reduce")
    both = over_pipeline(program, [x.training for x in measured], "tensor all_reduce")
    layers, embedding, head, loss = 2 * LAYERS, 1, 1, 2
    assert forward == (m * (layers + embedding + loss), m * (STREAM * (layers + embedding) + 3 * TOKENS))
    assert both[0] - forward[0] == m * (layers + head)
    assert both[1] - forward[1] == m * STREAM * (layers + head)
    for rank in measured:
        kinds = {kind.removeprefix("tensor ") for kind in rank.training.calls if kind.startswith("tensor ")}
        assert kinds <= {"all_reduce", "all_gather"}


@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 2, 1), *map(slow, [(4, 1, 1), (2, 2, 2)])], ids=str)
def test_divided_tokens_are_scattered_and_gathered(mesh: tuple[int, int, int]) -> None:
    """As many bytes as the all-reduces, and a gather again for each weight's gradient; boundaries need none."""
    m, t = 2, mesh[0]
    program = compile_model(MEGATRON, mesh, num_microbatches=m, sequence_parallel=True)
    measured = measure(program, MEGATRON)
    sums = m * (2 * LAYERS + 1)  # behind attentions, MLPs and the embedding; in front of these and of the head

    def over(kind: str, when: str) -> tuple[int, int]:
        return over_pipeline(program, [getattr(x, when) for x in measured], f"tensor {kind}")

    assert over("reduce_scatter", "forward") == (sums, sums * STREAM)
    assert over("all_gather", "forward") == (sums, sums * STREAM // t)
    assert over("all_reduce", "forward") == (2 * m, 3 * m * TOKENS)  # of the loss
    assert over("reduce_scatter", "training") == (2 * sums, 2 * sums * STREAM)
    assert over("all_gather", "training") == (3 * sums, 3 * sums * STREAM // t)
    text = " ".join(str(program).split())
    printed = re.search(r"collectives per microbatch: forward (\d+) \(([^)]*)\), backward (\d+) \(([^)]*)\)", text)
    assert printed is not None, text
    assert [int(printed[1]) * m, int(printed[3]) * m] == [2 * sums, 3 * sums]
    assert printed[2] == write_bytes(8 * 2 * sums * STREAM // m)
    assert printed[4] == write_bytes(8 * 3 * sums * STREAM // m)
    # Once a step the gradients of a stage's norms and biases are summed, in one bucket.
    assert over("all_reduce", "training")[0] == 2 * m + len(program.stages)
    for rank in measured:
        assert set(rank.training.sent.values()) <= {m * STREAM // t}


SENDING: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((2, 2, 1), {"num_microbatches": 4, "num_model_chunks": 2}),
    ((4, 2, 1), {"num_microbatches": 3, "schedule": "1f1b"}),
    ((2, 4, 1), {"num_microbatches": 4, "num_model_chunks": 1}),
    ((2, 2, 2), {"num_microbatches": 2, "num_model_chunks": 2, "schedule": "gpipe"}),
]


@pytest.mark.parametrize(
    ("mesh", "options", "scatter_gather"),
    [
        *((*case, True) for case in SENDING),
        *((*case, False) for case in SENDING[:2]),
        *(slow(*case, False) for case in SENDING[2:]),
    ],
    ids=str,
)
def test_a_boundary_sends_one_share_per_tensor_rank(
    mesh: tuple[int, int, int], options: dict[str, Any], scatter_gather: bool
) -> None:
    program = compile_model(MEGATRON, mesh, scatter_gather=scatter_gather, **options)
    m, t, last = program.manifest.num_microbatches, program.mesh.tensor, len(program.stages) - 1
    share = STREAM // t if scatter_gather else STREAM
    for rank, measured in enumerate(measure(program, MEGATRON)):
        at = program.mesh.coordinates(rank).pipeline
        stages = range(at, last + 1, program.mesh.pipeline)
        values = [len(stage.sends) for stage in program.manifest.stages]
        forward = {f"stage {k} -> {k + 1}": m * values[k] * share for k in stages if k < last}
        backward = {f"stage {k} -> {k - 1}": m * values[k - 1] * share for k in stages if k > 0}
        assert measured.forward.sent == forward
        assert measured.training.sent == forward | backward
        arrivals = sum((k > 0 and values[k - 1]) + (k < last and values[k]) for k in stages)
        gathers = m * arrivals if scatter_gather else 0
        assert measured.training.calls.get("tensor all_gather", 0) == gathers
        assert measured.training.elements.get("tensor all_gather", 0) == gathers * share


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 2, 1)], ids=str)
def test_recomputing_a_layer_repeats_its_all_reduces(mesh: tuple[int, int, int], dropout: float) -> None:
    """That behind attention alone: what is behind the MLP saves nothing, dropout neither."""
    layers, b, length, hidden, m = 3, 2, 16, 32, 2
    model = GPT(GPTConfig(64, length, layers, 4, hidden, dropout))
    example = {name: torch.zeros(b, length, dtype=torch.long) for name in ("idx", "targets")}
    options: dict[str, Any] = {"example_inputs": example, "num_microbatches": m, "schedule": "1f1b"}
    program = autoptd.compile(model, mesh, recompute="full", **options)
    batch = {name: torch.randint(0, 64, (m * b, length)) for name in example}
    traffic = measure_batch(program, batch)
    forward = over_pipeline(program, [x.forward for x in traffic], "tensor all_reduce")
    both = over_pipeline(program, [x.training for x in traffic], "tensor all_reduce")
    plain = 2 * layers + 1
    text = " ".join(str(program).split())
    printed = re.search(r"backward (\d+) \((.*?)\), of which recomputation repeats (\d+) \((.*?)\);", text)
    assert printed is not None, text
    again = int(printed[3])
    groups = [group for stage in program.stages for group in recomputed_groups(stage.graph)]
    assert mesh[1] > 1 or len(groups) == layers
    if mesh == (2, 1, 1):
        assert again == layers
    assert int(printed[1]) == plain + again
    assert both[0] - forward[0] == m * (plain + again)
    assert both[1] - forward[1] == m * b * length * hidden * (plain + again)
    assert printed[2] == write_bytes(4 * b * length * hidden * (plain + again))
    assert sum(text.count("and again") for text in program.texts) == again


PRINTED = [
    MEGATRON,
    ModelConfig(layers=3, kv_heads=2, projection="unequal", rms_norm=True, rotary=True, gated=True, bias=False),
    ModelConfig(layers=3, kv_heads=1, query_key_norm=True, rms_norm=True, gated=True, packed_gate=True),
    ModelConfig(layers=3, projection="per_head", parallel_residual=True, rotary=True, head_bias=True),
    ModelConfig(layers=3, tied=True, attention="written", vocabulary=67),
]


WAYS: list[tuple[int, int, str | int]] = [
    (2, 2, "none"), (4, 2, "none"), (2, 3, "none"), (2, 2, "full"), (2, 1, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "t", "p", "recompute"),
    [
        pytest.param(config, *way, marks=[pytest.mark.slow] * (config is not MEGATRON and way is not WAYS[0]))
        for config in PRINTED
        for way in WAYS
    ],
    ids=str,
)
def test_the_plan_prints_what_is_counted(config: ModelConfig, t: int, p: int, recompute: str | int) -> None:
    m = 3
    options: dict[str, Any] = {"num_microbatches": m, "schedule": "1f1b", "recompute": recompute}
    program = compile_model(config, (t, p, 1), **options)
    text = " ".join(str(program).split())
    printed = re.search(
        r"collectives per microbatch: forward (\d+) \(([^)]*)\), backward (\d+) \(([^)]*)\)[^;]*; "
        r"the loss reduces three numbers a token",
        text,
    )
    assert printed is not None, text
    measured = measure(program, config)
    forward = over_pipeline(program, [x.forward for x in measured], "tensor all_reduce")
    both = over_pipeline(program, [x.training for x in measured], "tensor all_reduce")
    assert int(printed[1]) == forward[0] // m - 2
    assert printed[2] == write_bytes(8 * (forward[1] // m - 3 * B * config.length))
    manifest = program.manifest
    partial = {n for n, q in manifest.parameters.items() if q.placement.has_partial_gradient}
    assert ("summed over the tensor ranks once a step" in text) == bool(partial)
    # Those of one pipeline rank travel together.
    buckets = len({owner for name in partial for owner in manifest.owners(name)})
    assert int(printed[3]) * m == both[0] - forward[0] - buckets
    if not partial:
        assert printed[4] == write_bytes(8 * (both[1] - forward[1]) // m)
    _check_stages(program, measured)


def _check_stages(program: CompiledProgram, measured: list[Measured]) -> None:
    """Rank by rank: the graphs' collectives, the partial gradients' bucket, and the manifest's boundaries."""
    manifest, mesh = program.manifest, program.mesh
    m = manifest.num_microbatches
    for rank, found in enumerate(measured):
        at = mesh.coordinates(rank).pipeline
        own = [s for s in program.manifest.stages if s.index % mesh.pipeline == at]
        stages = [program.stages[s.index] for s in own]
        targets = [n.target for stage in stages for n in stage.graph.nodes]
        again = [n.target for stage in stages for n in find_repeated(stage, mesh)]
        f = sum(targets.count(each) for each in (collectives.copy_to_tensor, *collectives.COPIED))
        g = targets.count(collectives.reduce_from_tensor)
        losses = targets.count(kernels.cross_entropy)
        buckets = any(manifest.parameters[n].placement.has_partial_gradient for s in own for n in s.parameters)
        assert found.forward.calls.get("tensor all_reduce", 0) == m * (g + 2 * losses)
        assert (
            found.training.calls.get("tensor all_reduce", 0)
            == m * (f + g + 2 * losses + again.count(collectives.reduce_from_tensor)) + buckets
        )
        for stage in own:
            if not stage.sends:
                continue
            sent = sum(prod(b.shape) // (mesh.tensor if is_scattered(b, mesh.tensor, True) else 1) for b in stage.sends)
            label = f"stage {stage.index} -> {stage.index + 1}"
            assert found.training.sent[label] == m * sent
            assert write_bytes(8 * sent) in str(program)


def test_losses_and_gradients_are_summed_once_a_step() -> None:
    """Per step: the loss's way to all ranks, the tied gradient over its owners, all gradients over the replicas."""
    config = ModelConfig(layers=4, tied=True, vocabulary=64)
    program = compile_model(config, (2, 2, 2), num_microbatches=4)
    mesh, parameters = program.mesh, program.manifest.parameters
    for rank, measured in enumerate(measure(program, config)):
        at = mesh.coordinates(rank)
        held = {
            name: prod(parameters[name].placement["tensor"].local_shape(parameters[name].shape, mesh.tensor))
            for name, local in program.rank(rank).parameters.items()
            if parameters[name].kind == "parameter" and local.shape
        }
        last = at.pipeline == mesh.pipeline - 1
        found = measured.training
        # A bucket of each of two stages and one of what is tied; the number of valid labels, and the loss.
        assert found.calls["data all_reduce"] == 3 + 1 + last
        assert found.elements["data all_reduce"] == sum(held.values()) + 1 + last
        assert found.calls["tied (0, 1) all_reduce"] == 1
        assert found.elements["tied (0, 1) all_reduce"] == 64 // 2 * config.hidden
        assert found.calls["pipeline broadcast"] == 1
        assert found.elements["pipeline broadcast"] == 2
        assert not [key for key in found.calls if key.startswith("pipeline") and key != "pipeline broadcast"]
        forward = measured.forward.calls
        assert not [key for key in forward if key.startswith("tied")]
        assert forward.get("data all_reduce", 0) == 1 + last
