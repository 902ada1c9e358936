"""The trace of a step that ran: the schedule's own actions, in the format of the predicted step's."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.runtime import collectives, kernels
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.comm.timings import Measured, Span, gather_measured
from autoptd.runtime.optimizer import gradient_buckets
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.schedule import Kind
from samples.gpt import GPT, GPTConfig
from tests.ranks import run_ranks

MESH = (2, 2, 1)


def compile_small() -> autoptd.CompiledProgram:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=4, n_head=4, n_embd=32))
    return autoptd.compile(model, mesh=MESH, num_microbatches=4, num_model_chunks=2, microbatch_size=1)


def take_steps(rank: int, program: autoptd.CompiledProgram, folder: Path) -> str:
    parallel = program.bind("cpu")
    with pytest.raises(RuntimeError, match="no step has run") as refusal:
        parallel.save_trace(folder / "none.json")
    batch = {name: torch.zeros(4, 16, dtype=torch.long) for name in ("idx", "targets")}
    for _ in range(2):
        parallel(**batch)[1].backward()
    parallel.save_trace(folder / "step.json")
    with pytest.raises(TypeError):
        parallel(idx=batch["idx"])  # refused before it starts: the last step is still the last
    with torch.no_grad():
        parallel(**batch)
    parallel.save_trace(folder / "forwards.json")
    return str(refusal.value)


def read_spans(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    trace = json.loads(path.read_text())
    return trace, [event for event in trace["traceEvents"] if event["ph"] == "X"]


def lies_in(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1)


def test_a_step_is_written_as_it_ran(tmp_path: Path) -> None:
    program = compile_small()
    run_ranks(take_steps, 4, program, tmp_path)
    trace, spans = read_spans(tmp_path / "step.json")
    assert trace["otherData"]["step"] == "measured"
    ends: dict[str, float] = {}
    for rank, actions in enumerate(program.schedule):
        own = [s for s in spans if s["pid"] == s["tid"] == rank and s["name"] != "products beside a message"]
        (sums,) = (span for span in spans if span["pid"] == rank and span["tid"] // 2 == 3)
        computed = [str(action) for action in actions if action.kind.computes]
        assert [span["name"] for span in own] == computed
        # The sums begin when the first stage of the two has had its last backward, and end after all.
        assert sums["name"] == "sums of gradients"
        upper = next(span for span in own if span["name"] == f"{rank + 2}B3")
        assert upper["ts"] + upper["dur"] - 1 <= sums["ts"] <= own[-1]["ts"] + 1
        assert sums["ts"] + sums["dur"] >= own[-1]["ts"] + own[-1]["dur"]
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in pairwise(own))
        ends |= {span["name"]: span["ts"] + span["dur"] for span in own}
    assert min(span["ts"] for span in spans) == 0
    begins = {span["name"]: span["ts"] for span in spans}
    for stage in range(3):
        for microbatch in range(4):  # a microsecond is what a float64 of seconds since the epoch tells apart
            assert begins[f"{stage + 1}F{microbatch}"] >= ends[f"{stage}F{microbatch}"] - 1
            assert begins[f"{stage}B{microbatch}"] >= ends[f"{stage + 1}B{microbatch}"] - 1
    _, forwards = read_spans(tmp_path / "forwards.json")
    assert {span["cat"] for span in forwards} == {"forward", "tensor"}
    assert not (tmp_path / "none.json").exists()


def test_the_replicas_sums_begin_in_the_last_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one stage too, as DistributedDataParallel's do."""
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 2**14)
    model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=4, n_head=4, n_embd=32))
    program = autoptd.compile(model, mesh=(1, 1, 2), num_microbatches=4, microbatch_size=1)
    run_ranks(take_steps, 2, program, tmp_path)
    _, spans = read_spans(tmp_path / "step.json")
    (sums,) = (span for span in spans if span["name"] == "sums of gradients")
    (last,) = (span for span in spans if span["name"] == "0B3")
    assert last["ts"] < sums["ts"] < last["ts"] + last["dur"] < sums["ts"] + sums["dur"]


def test_measured_traces_have_the_format_of_predicted_ones(tmp_path: Path) -> None:
    program = compile_small()
    run_ranks(take_steps, 4, program, tmp_path)
    program.simulate("laptop-cpu").save_trace(tmp_path / "predicted.json")
    (measured, ran), (predicted, foreseen) = (read_spans(tmp_path / name) for name in ("step.json", "predicted.json"))
    assert measured.keys() == predicted.keys()
    assert {frozenset(span) for span in ran} == {frozenset(span) for span in foreseen}
    inside = {"products beside a message", "message of the tensor ranks"}
    assert {span["name"] for span in ran} - inside <= {span["name"] for span in foreseen}
    names = ("process_name", "thread_name")
    for rank in range(2):
        assert {e["name"] for e in measured["traceEvents"] if e["pid"] == rank} >= set(names)


def test_the_tensor_ranks_sums_are_shown_beside_gradients_of_weights(tmp_path: Path) -> None:
    program = compile_small()
    run_ranks(take_steps, 4, program, tmp_path)
    trace, spans = read_spans(tmp_path / "step.json")
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for rank in range(2):
        own = [span for span in spans if span["pid"] == rank]
        backwards = [span for span in own if span["cat"] == "backward"]
        sums, weights = ([span for span in own if span["cat"] == name] for name in ("tensor", "products"))
        targets = [node.target for stage in program.stages[rank::2] for node in stage.graph.nodes]
        hidden = sum(target in collectives.COPIED for target in targets)
        forwards = [span for span in own if span["cat"] == "forward"]
        inside = [one for one in sums if any(lies_in(one, forward) for forward in forwards)]
        summed = targets.count(collectives.reduce_from_tensor) + 2 * targets.count(kernels.cross_entropy)
        assert len(inside) == 4 * summed > 0  # 4 microbatches
        sums = [one for one in sums if one not in inside]
        assert len(sums) == len(weights) == 4 * hidden > 0  # the last rank has the head's too
        for one, beside in zip(sums, weights, strict=True):
            assert threads[rank, one["tid"]] == "tensor ranks"
            assert threads[rank, beside["tid"]] == "compute"
            assert one["ts"] == beside["ts"]
            assert 0 < beside["dur"] <= one["dur"]
            assert any(lies_in(one, backward) for backward in backwards)
    _, forwards = read_spans(tmp_path / "forwards.json")
    assert {span["cat"] for span in forwards} == {"forward", "tensor"}


def test_a_broken_step_is_not_shown(tmp_path: Path) -> None:
    model = GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=4, n_embd=32))
    program = autoptd.compile(model, mesh=(1, 1, 1), num_microbatches=2, microbatch_size=1)
    parallel = program.bind("cpu")
    batch = {name: torch.zeros(2, 16, dtype=torch.long) for name in ("idx", "targets")}
    parallel(**batch)
    stage, calls = parallel._shapes[0].stages[0], []
    whole = stage._slots[0].call

    def fail_in_the_second_microbatch(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("the second microbatch")
        return whole.function(*args)

    for slot in stage._slots:
        slot.call = replace(whole, function=partial(fail_in_the_second_microbatch))
    with pytest.raises(OSError, match="the second microbatch"):
        parallel(**batch)
    with pytest.raises(RuntimeError, match="the last failed"):
        parallel.save_trace(tmp_path / "step.json")


def test_marks_are_read_at_once() -> None:
    """Each reading of a device has a zero of its own."""
    readings: list[int] = []

    class Once(Measured):
        def read(self) -> tuple[float, float, list[Span]]:
            readings.append(len(self.spans))
            return super().read()

    rank = Rank.local(Mesh(1, 1, 1))
    measured = Once(rank.device)
    measured.start()
    measured.add(Kind("F"), measured.mark())
    measured.add("data", measured.mark())
    measured.end = measured.mark()
    ((entry,),), (phase,) = gather_measured(measured, rank.group("pipeline"))
    assert readings == [2]
    assert 0 == entry.start <= entry.end <= phase.start <= phase.end
