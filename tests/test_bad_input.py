"""What a user may get wrong: refused with the value that was found, the place, and a way out.

All of it is said before any process group is touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoptd
from autoptd.runtime.module.parallel import Parallel
from tests.generated_models import GeneratedGPT, ModelConfig, make_batch, make_model
from tests.ranks import run_ranks

CONFIG = ModelConfig(layers=2, heads=6, kv_heads=6, head_size=4)
HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """Nothing here may start one."""
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


def refused(error: type[Exception], *parts: str, **changes: Any) -> str:
    """Compile with `changes`; the message, which has all `parts`."""
    config = changes.pop("config", CONFIG)
    given: dict[str, Any] = {
        "model": changes.pop("model", None) or make_model(config),
        "mesh": (1, 1, 1),
        "example_inputs": make_batch(config, 1),
        **changes,
    }
    return refuses(error, *parts, call=lambda: autoptd.compile(**given))


def refuses(error: type[Exception], *parts: str, call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} is not in {message!r}"
    return message


# The mesh


@pytest.mark.parametrize("started", [1, 3, 8])
def test_mesh_and_world_size(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = autoptd.compile(make_model(CONFIG), (2, 2, 1), example_inputs=make_batch(CONFIG, 1))
    monkeypatch.setenv("WORLD_SIZE", str(started))
    refuses(
        ValueError,
        f"WORLD_SIZE is {started}",
        "mesh tensor=2 pipeline=2 data=1",
        "4 ranks",
        "torchrun",
        f"compile for a mesh of {started}",
        call=program.bind,
    )


@pytest.mark.parametrize(
    ("mesh", "error", "parts"),
    [
        ((2, 2), ValueError, ["mesh is (2, 2)", "three: (tensor, pipeline, data)", "mesh=(2, 2, 2)"]),
        ((1, 1, 1, 1), ValueError, ["mesh is (1, 1, 1, 1)", "three: (tensor, pipeline, data)"]),
        ((2, 0, 1), ValueError, ["entry 1 (pipeline) is 0", "positive integer"]),
        ((2, 1, -2), ValueError, ["entry 2 (data) is -2", "positive integer"]),
        ((1.5, 1, 1), ValueError, ["entry 0 (tensor) is 1.5", "positive integer"]),
        (4, TypeError, ["mesh is 4", "(tensor, pipeline, data)"]),
    ],
    ids=str,
)
def test_mesh_entries(mesh: Any, error: type[Exception], parts: list[str]) -> None:
    refused(error, *parts, mesh=mesh)


# The model against the mesh


def test_heads_against_tensor() -> None:
    refused(ValueError, "6 heads", "tensor=4", "generated_models.py:", "use tensor=1, 2, 3", mesh=(4, 1, 1))


def test_key_value_heads_against_tensor() -> None:
    config = ModelConfig(layers=1, heads=12, kv_heads=4, head_size=4)
    refused(
        ValueError,
        "4 key-value heads",
        "tensor=6",
        "generated_models.py:",
        "use tensor=1, 2 or 4",
        mesh=(6, 1, 1),
        config=config,
    )


def test_fewer_units_than_stages() -> None:
    config = ModelConfig(layers=1)
    options = {"mesh": (1, 64, 1), "num_model_chunks": 2, "num_microbatches": 64, "config": config}
    message = refused(ValueError, "128 stages", "cuttable units", "at most", **options)
    (units,) = {int(number) for number in re.findall(r"\d+", message)} - {128}
    assert 10 < units < 128


@pytest.mark.parametrize(("m", "legal"), [(6, "4 or 8"), (3, "4"), (13, "12 or 16")])
def test_microbatches_of_the_interleaved_schedule(m: int, legal: str) -> None:
    refused(
        ValueError,
        f"{m} microbatches",
        "interleaved_1f1b",
        "multiple of 4",
        f"num_microbatches={legal}",
        mesh=(1, 4, 1),
        num_microbatches=m,
        num_model_chunks=2,
    )


def test_microbatches_of_the_default_schedule() -> None:
    """Without num_model_chunks too: the schedule was not asked to be another one."""
    refused(ValueError, "3 microbatches", "num_microbatches=2 or 4", mesh=(1, 2, 1), num_microbatches=3)


def test_chunks_of_a_schedule_without() -> None:
    refused(ValueError, "1f1b", "not 2", "interleaved_1f1b", mesh=(1, 2, 1), schedule="1f1b", num_model_chunks=2)


# Options


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("1f1B", "1f1b"), ("interleaved", "interleaved_1f1b"), ("GPipe", "gpipe"), ("zero_bubble", "")],
)
def test_unknown_schedule(given: str, nearest: str) -> None:
    parts = [f"did you mean {nearest!r}"] if nearest else []
    refused(ValueError, repr(given), "gpipe, 1f1b, interleaved_1f1b", *parts, schedule=given)


@pytest.mark.parametrize("name", ["num_microbatches", "num_model_chunks", "microbatch_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "4"])
def test_counts(name: str, value: Any) -> None:
    refused(ValueError, f"{name} is {value!r}", "positive integer", **{name: value})


def test_microbatch_size_against_the_example() -> None:
    refused(ValueError, "microbatch_size=3", "[2, 8]", example_inputs=make_batch(CONFIG, 2), microbatch_size=3)


# The model


@pytest.mark.parametrize("model", [3, "gpt2", GeneratedGPT, F.gelu, {"weight": torch.zeros(2)}], ids=repr)
def test_not_a_module(model: Any) -> None:
    refused(TypeError, "model is", "nn.Module or an fx.GraphModule", model=model)


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "FSDP", "DataParallel"])
def test_wrapped_module(wrapper: str) -> None:
    def work(rank: int) -> str:
        model = make_model(CONFIG)
        wrapped: object
        if wrapper == "DataParallel":
            wrapped = nn.DataParallel(model)
        elif wrapper == "FSDP":
            wrapped = fully_shard(model)
        else:
            wrapped = DistributedDataParallel(model)
        return refused(TypeError, f"wrapped in {wrapper}", "pass the plain module", "data", model=wrapped)

    run_ranks(work, 1)  # torch makes these wrappers in a process group only


def test_already_compiled() -> None:
    program = autoptd.compile(make_model(CONFIG), (1, 1, 1), example_inputs=make_batch(CONFIG, 1))
    refused(TypeError, "compiled already", "plain module", model=program.bind(device="cpu"))


class Branching(GeneratedGPT):
    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        if idx.sum() > 0:  # the line that is named
            return super().forward(idx, targets)
        return super().forward(targets, idx)


class Counting(GeneratedGPT):
    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        kept = targets[targets != 0]
        total = 0
        for position in range(int(kept.max())):  # the line that is named
            total += position
        return super().forward(idx, targets) * total


@pytest.mark.parametrize("kind", [Branching, Counting])
def test_data_dependent_control_flow(kind: type[GeneratedGPT]) -> None:
    torch.manual_seed(0)
    lines = Path(__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}("))
    number = next(i for i in range(start, len(lines)) if lines[i].endswith("# the line that is named")) + 1
    refused(ValueError, f"{HERE}:{number}", "control flow", "torch.where", "mask", model=kind(CONFIG).double())


@torch.library.custom_op("autoptd_bad_input::squash", mutates_args=())
def squash(x: Tensor) -> Tensor:
    return torch.tanh(x)


squash.register_fake(torch.empty_like)
squash.register_autograd(
    lambda ctx, g: g * (1 - ctx.saved_tensors[0] ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Custom(GeneratedGPT):
    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(squash(x))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_operator_without_a_rule() -> None:
    line = next(i for i, x in enumerate(Path(__file__).read_text().splitlines(), 1) if "squash(x))" in x)
    refused(
        ValueError,
        "no sharding rule for autoptd_bad_input.squash",
        f"{HERE}:{line}",
        "rules={",
        model=Custom(CONFIG).double(),
        mesh=(2, 1, 1),
    )


class NoLoss(nn.Module):
    """Gives what it was told to, instead of a loss."""

    def __init__(self, give: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Embedding(8, 4)
        self.give = give

    def forward(self, idx: Tensor) -> object:
        return self.give(self.linear(idx))


@pytest.mark.parametrize(
    ("give", "found"),
    [
        (lambda x: x, "[1, 6, 4]"),
        (lambda x: (x, None), "tuple of a tensor [1, 6, 4]"),
        (lambda x: {"logits": x}, "logits"),
        (lambda x: x.sum(-1), "[1, 6]"),
        (lambda x: None, "None"),
    ],
)
def test_no_scalar_loss(give: Callable[[Tensor], object], found: str) -> None:
    idx = torch.zeros(1, 6, dtype=torch.long)
    refused(ValueError, "no scalar loss", found, "loss_fn=", model=NoLoss(give), example_inputs={"idx": idx})


def test_loss_function_without_a_scalar() -> None:
    idx = torch.zeros(1, 6, dtype=torch.long)
    refused(
        ValueError,
        "loss_fn returned a tensor [1, 6, 4]",
        "scalar",
        model=NoLoss(lambda x: x),
        loss_fn=lambda output, labels: output,
        example_inputs={"idx": idx, "labels": idx.clone()},
    )


def test_example_of_another_argument() -> None:
    batch = make_batch(CONFIG, 1)
    refused(
        ValueError,
        "idx, target, and forward takes",
        "missing a required argument: 'targets'",
        example_inputs={"idx": batch["idx"], "target": batch["targets"]},
    )
    refused(ValueError, "missing a required argument: 'targets'", example_inputs={"idx": batch["idx"]})


@pytest.mark.parametrize("shape", [(0, 8), (1, 0)], ids=str)
def test_example_without_values(shape: tuple[int, int]) -> None:
    batch = {name: torch.zeros(shape, dtype=torch.long) for name in ("idx", "targets")}
    refused(ValueError, f"idx of shape {list(shape)}", "none empty", example_inputs=batch)


# The batch


@pytest.fixture(scope="module")
def parallel() -> Parallel:
    """Two microbatches of three sequences."""
    example = make_batch(CONFIG, 3)
    program = autoptd.compile(make_model(CONFIG), (1, 1, 1), example_inputs=example, num_microbatches=2)
    return program.bind(device="cpu")


def batch_refused(parallel: Parallel, error: type[Exception], *parts: str, **changes: Any) -> None:
    batch = {**make_batch(CONFIG, 6), **changes}
    given = {name: value for name, value in batch.items() if value is not ...}
    refuses(error, *parts, call=lambda: parallel(**given))


@pytest.mark.parametrize("sequences", [1, 3, 5, 7, 12])
def test_batch_of_another_size(parallel: Parallel, sequences: int) -> None:
    batch_refused(
        parallel,
        ValueError,
        f"idx has shape [{sequences}, 8]",
        "expected [6, 8]",
        "microbatch_size 3",
        "num_microbatches 2",
        **make_batch(CONFIG, sequences),
    )


def test_batch_of_another_length(parallel: Parallel) -> None:
    batch_refused(
        parallel,
        ValueError,
        "targets has shape [6, 7]",
        "expected [6, 8]",
        "compile for this one",
        targets=torch.zeros(6, 7, dtype=torch.long),
    )


def test_batch_of_another_dtype(parallel: Parallel) -> None:
    batch_refused(
        parallel,
        ValueError,
        "idx is torch.int32",
        "expected torch.int64",
        ".to(torch.int64)",
        idx=torch.zeros(6, 8, dtype=torch.int32),
    )


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, features: Tensor) -> Tensor:
        return F.gelu(self.head(features)).square().mean()


def test_batch_that_requires_gradient() -> None:
    """As from a trainable encoder in front; without gradients, or detached, it is a batch as any."""
    example = {"features": torch.zeros(1, 4)}
    program = autoptd.compile(Regression(), (1, 1, 1), example_inputs=example, num_microbatches=2)
    parallel = program.bind(device="cpu")
    encoded = nn.Embedding(3, 4)(torch.tensor([0, 2]))
    refuses(
        ValueError,
        "argument features requires gradient",
        ".detach()",
        "a part of the model that is compiled",
        call=lambda: parallel(encoded),
    )
    parallel(encoded.detach())
    with torch.no_grad():
        parallel(encoded)


def test_batch_made_in_inference_mode(parallel: Parallel) -> None:
    """As what another model generates: it is a batch as any."""
    with torch.inference_mode():
        idx = torch.zeros(6, 8, dtype=torch.long)
    batch = make_batch(CONFIG, 6)
    own, other = (float(parallel(**{**batch, "idx": given})) for given in (idx, idx.clone()))
    assert own == other
    with torch.no_grad():
        parallel(**{**batch, "idx": idx})


def test_missing_argument(parallel: Parallel) -> None:
    batch_refused(parallel, TypeError, "targets is missing", "idx, targets", "give it", targets=...)
    batch_refused(parallel, TypeError, "targets is missing", "label_smoothing_factor", targets=None)
    batch_refused(parallel, TypeError, "idx is missing", "example_inputs", idx=None)


def test_extra_argument(parallel: Parallel) -> None:
    batch_refused(
        parallel,
        TypeError,
        "unexpected argument attention_mask",
        "idx, targets",
        "example_inputs",
        attention_mask=torch.ones(6, 8),
    )
    batch_refused(parallel, TypeError, "unexpected argument target", "did you mean targets", target=torch.ones(6, 8))


def test_not_a_tensor(parallel: Parallel) -> None:
    batch_refused(parallel, TypeError, "idx is a list", "expected a tensor", idx=[[0] * 8] * 6)
