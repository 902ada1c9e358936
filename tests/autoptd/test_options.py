"""The door: a mesh and options that cannot be meant are refused with the value and a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from autoptd import compiled
from autoptd.compiled import CompiledProgram
from autoptd.compiler import compile
from autoptd.options import read_mesh
from autoptd.planning.search import plan
from autoptd.runtime.program.mesh import Coordinates, Mesh
from samples.gpt import GPT, GPTConfig
from tests.models import tiny

SMALL = GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=16)


def test_a_tuple_is_tensor_pipeline_data() -> None:
    assert read_mesh((8, 64, 6)) == Mesh(tensor=8, pipeline=64, data=6)
    assert read_mesh([2, 1, 1]) == Mesh(2, 1, 1)


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        ((2, 2), ValueError, r"mesh is \(2, 2\); expected three: \(tensor, pipeline, data\)"),
        ((2, 2, 2, 1), ValueError, r"mesh is \(2, 2, 2, 1\)"),
        ((2, 0, 1), ValueError, r"mesh entry 1 \(pipeline\) is 0; expected a positive integer"),
        ((2, 2, -1), ValueError, r"mesh entry 2 \(data\) is -1"),
        ((True, 2, 1), ValueError, r"mesh entry 0 \(tensor\) is True"),
        ((2.0, 2, 1), ValueError, r"mesh entry 0 \(tensor\) is 2.0"),
        (8, TypeError, "mesh is 8; expected three integers"),
        ("2,2,2", TypeError, "mesh is '2,2,2'"),
        ({2, 1, 4}, TypeError, r"mesh is \{.*\}; expected three integers"),
        ("autos", TypeError, 'or "auto"'),
    ],
)
def test_a_wrong_mesh_is_refused(mesh: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_mesh(mesh)


def device_mesh(shape: tuple[int, ...], names: tuple[str, ...], ranks: torch.Tensor | None = None) -> DeviceMesh:
    """A DeviceMesh without a process group: its layout is all that is read."""
    mesh = object.__new__(DeviceMesh)
    order = torch.arange(torch.Size(shape).numel()) if ranks is None else ranks
    mesh.__dict__.update(_test_mesh=order.reshape(shape), _mesh_dim_names=names)
    return mesh


def test_a_device_mesh_gives_its_own_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMesh, "mesh", property(lambda self: self._test_mesh))
    monkeypatch.setattr(DeviceMesh, "mesh_dim_names", property(lambda self: self._mesh_dim_names), raising=False)
    assert read_mesh(device_mesh((6, 64, 8), ("dp", "pp", "tp"))) == Mesh(8, 64, 6)
    swapped = read_mesh(device_mesh((2, 1, 3), ("tp", "dp", "pp")))
    assert (swapped.tensor, swapped.pipeline, swapped.data) == (2, 3, 1)
    assert swapped.group("tensor", 0) == (0, 3)
    assert swapped.coordinates(4) == Coordinates(0, 1, 1)
    with pytest.raises(ValueError, match=r"has dims \('dp', 'pp', 'mp'\); expected \"tp\", \"pp\" and \"dp\""):
        read_mesh(device_mesh((1, 1, 1), ("dp", "pp", "mp")))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schedule": "interleaved"}, ValueError, "unknown schedule 'interleaved'; did you mean 'interleaved_1f1b'"),
        ({"world_size": 8}, ValueError, 'world_size= goes with mesh="auto"'),
        ({"num_microbatches": 0}, ValueError, "num_microbatches is 0; expected a positive integer"),
        ({"num_model_chunks": True}, ValueError, "num_model_chunks is True"),
        ({"fuse": 1}, ValueError, "fuse is 1; expected True or False"),
        ({"scatter_gather": "no"}, ValueError, "scatter_gather is 'no'; expected True or False"),
        ({"layout": "hsb"}, ValueError, "layout is 'hsb'; expected 'sbh'"),
        ({"recompute": "half"}, ValueError, "recompute is 'half'; expected 'none', 'selective', 'full', 'optimal'"),
        ({"recompute": 0}, ValueError, "recompute is 0; expected .*, or a number of layers"),
        ({"recompute": True}, ValueError, "recompute is True"),
        ({"seed": "0"}, TypeError, "seed is '0'; expected an integer"),
        ({"seed": 1 << 64}, ValueError, "expected an integer of 64 bits"),
        ({"schedule": "1f1b", "num_model_chunks": 2}, ValueError, "1f1b"),
        ({"num_microbatches": 3}, ValueError, "3.*multiple.*2"),
        ({"rules": {3: "b s h -> b s h"}}, TypeError, "rules has the key 3; expected an operator, or its name"),
        ({"example_inputs": 3}, TypeError, "example_inputs is 3; expected a dict or tuple"),
        ({"loss_fn": 3}, TypeError, "3 is not a callable object"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compile(GPT(SMALL), (1, 2, 1), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"overlap": "no"}, ValueError, "overlap is 'no'; expected True or False"),
        ({"scatter_gather": "no"}, ValueError, "scatter_gather is 'no'; expected True or False"),
        ({"schedule": ""}, ValueError, "unknown schedule ''; did you mean"),
        ({"schedule": 0}, ValueError, "unknown schedule 0; did you mean"),
        ({"schedule": False}, ValueError, "unknown schedule False; did you mean"),
        ({"recompute": ""}, ValueError, "recompute='': expected 'none'"),
        ({"recompute": 0}, ValueError, "recompute=0: expected 'none'"),
        ({"world_size": None}, ValueError, "world_size is None; expected a positive integer"),
        ({"global_batch": None}, ValueError, "global_batch is None; expected a positive integer"),
        ({"cluster": None}, TypeError, 'cluster is None; expected a shipped name such as "dgx-a100"'),
        ({"example_inputs": 3}, TypeError, "example_inputs is 3; expected a dict"),
        ({"loss_fn": 3}, TypeError, "3 is not a callable object"),
        ({"model": 5}, TypeError, "model is a int; expected an nn.Module or an fx.GraphModule"),
    ],
    ids=str,
)
def test_a_wrong_option_of_a_plan_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    given: Any = {"model": GPT(SMALL), "world_size": 1, "global_batch": 1, "cluster": "dgx-a100", **options}
    with pytest.raises(error, match=message):
        plan(**given)


@pytest.mark.parametrize(("local_rank", "seen", "device"), [("1", 2, 1), ("1", 1, 0), ("5", 4, 1)])
def test_a_process_takes_a_gpu_that_it_sees(
    local_rank: str, seen: int, device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may show each process one of its own, whatever its number is."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    assert compiled._default_device() == torch.device("cuda", device)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.verify(model=3), TypeError, "model is a int; expected an nn.Module"),
        (lambda p: p.verify(model=0), TypeError, "model is a int; expected an nn.Module"),
        (lambda p: p.verify(batch={"idx": 3}), ValueError, "batch: idx is 3; expected torch.int64"),
        (lambda p: p.verify(seed="x"), TypeError, "seed is 'x'; expected an integer"),
        (lambda p: p.verify(seed=1.5), TypeError, "seed is 1.5; expected an integer"),
        (lambda p: p.bind(device="cudaa"), RuntimeError, "device string: cudaa"),
        (lambda p: p.rank(0.0), ValueError, "rank 0.0 is none of mesh .*, which has ranks 0 to 0"),
        (lambda p: p.rank("0"), ValueError, "rank '0' is none of mesh .*, which has ranks 0 to 0"),
        (lambda p: p.cost.evaluate(p.cost.flops, m=-1), ValueError, "m is -1; expected a positive integer"),
        (lambda p: p.cost.evaluate(p.cost.flops, m=float("nan")), ValueError, "m is nan; expected a positive"),
    ],
)
def test_a_wrong_argument_of_a_program_is_refused(
    call: Callable[[CompiledProgram], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(tiny((1, 1, 1)))
