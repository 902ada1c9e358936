"""Without tensor and data parallelism nothing is added in another order, so the bits are those of one device.

The reference is the graph captured for one device, run as a plain function: each microbatch's loss divided by
m, its backward, in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.program.program_text import read_program
from tests.generated_models import GeneratedGPT, ModelConfig, make_batch, make_model
from tests.parity import Batch, Run, Step, Training, compare, gradient_errors, split_batch, train_compiled, train_plain

STEPS, LR = 20, 0.1
# A kernel that joins a sum and a norm adds gradients in another order where a stage ends between the two.
AS_IT_IS: dict[str, Any] = {"fuse": False, "layout": "bsh"}
TIED = "tokens.weight"

PLANS: list[dict[str, Any]] = [
    {"mesh": (1, 1, 1), "schedule": "1f1b", "num_microbatches": 3},
    {"mesh": (1, 2, 1), "schedule": "gpipe", "num_microbatches": 3},
    {"mesh": (1, 3, 1), "schedule": "gpipe", "num_microbatches": 4, "num_model_chunks": 2},
    {"mesh": (1, 2, 1), "schedule": "1f1b", "num_microbatches": 3},
    {"mesh": (1, 4, 1), "schedule": "1f1b", "num_microbatches": 6},
    {"mesh": (1, 2, 1), "schedule": "interleaved_1f1b", "num_microbatches": 4, "num_model_chunks": 2},
    {"mesh": (1, 3, 1), "schedule": "interleaved_1f1b", "num_microbatches": 6, "num_model_chunks": 2},
    {"mesh": (1, 4, 1), "schedule": "interleaved_1f1b", "num_microbatches": 4, "num_model_chunks": 1},
]
CONFIGS = {
    "untied": ModelConfig(layers=3, projection="packed"),
    "llama": ModelConfig(layers=3, kv_heads=2, rms_norm=True, rotary=True, gated=True, bias=False, qkv_bias=False),
    "parallel-residual": ModelConfig(
        layers=3, projection="per_head", parallel_residual=True, rotary=True, attention="written"
    ),
    "tied": ModelConfig(layers=3, vocabulary=67, tied=True),
}


class Weights(Mapping[str, Tensor]):
    """Leaves on the model's weights. A name in `separate` gives a leaf of its own at each of its uses."""

    def __init__(self, tensors: Mapping[str, Tensor], separate: tuple[str, ...] = ()) -> None:
        self.leaves = {n: [x.detach().requires_grad_(x.requires_grad)] for n, x in tensors.items()}
        self.separate = separate
        self.uses = dict.fromkeys(separate, 0)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.separate:
            return self.leaves[name][0]
        leaves = self.leaves[name]
        if self.uses[name] == len(leaves):
            leaves.append(leaves[0].detach().requires_grad_())
        self.uses[name] += 1
        return leaves[self.uses[name] - 1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def restart(self) -> None:
        """Count the uses anew, for the next microbatch."""
        self.uses = dict.fromkeys(self.separate, 0)

    def gradients(self) -> dict[str, Tensor]:
        """Each weight's gradient; that of separate leaves added once."""
        found = {}
        for name, leaves in self.leaves.items():
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
            if grads:
                total = grads[0]
                for grad in grads[1:]:
                    total = total + grad
                found[name] = total
        return found


def make_batches(kind: str, microbatches: int) -> list[Batch]:
    return [make_batch(CONFIGS[kind], microbatches, seed) for seed in range(STEPS)]


class OneDevice:
    """The captured graph of `model` for one device, as a function of weights and one microbatch."""

    def __init__(self, model: GeneratedGPT) -> None:
        batch = make_batch(model.config, 1)
        program = autoptd.compile(model, mesh=(1, 1, 1), example_inputs=batch, num_microbatches=1, **AS_IT_IS)
        text = read_program(program.texts[0], "one_device.py")
        self.stage = text.stages[0]
        self.rank = Rank.local(program.mesh)
        self.inputs = [i.name for i in program.manifest.inputs]
        buffers = {**dict(program.buffers), **dict(model.named_buffers())}
        self.fixed = {**buffers, **text.constants(buffers)}

    def step(self, weights: Weights, batch: Batch, microbatches: int) -> Tensor:
        """Leave the gradients of one batch in the leaves of `weights`; give the loss."""
        total: Tensor | None = None
        for microbatch in split_batch(batch, microbatches):
            weights.restart()
            loss = self.stage(self.rank, weights, *(microbatch[name] for name in self.inputs)) / microbatches
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total


@cache
def train_one_device(kind: str, microbatches: int, separate: tuple[str, ...]) -> Run:
    """The reference run; each use of the weights `separate` accumulates apart, and they are added once."""
    model = make_model(CONFIGS[kind])
    device = OneDevice(model)
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainable = {n: x.requires_grad_() for n, x in values.items()}
    steps = []
    for number, batch in enumerate(make_batches(kind, microbatches)):
        weights = Weights({**trainable, **device.fixed}, separate)
        loss = device.step(weights, batch, microbatches)
        gradients = weights.gradients()
        for name in separate:
            assert weights.uses[name] == 2
        if separate and number % 5 == 0:
            _check_against_autograd(device, {**trainable, **device.fixed}, batch, microbatches, gradients)
        steps.append(Step(loss, gradients))
        with torch.no_grad():
            for name, gradient in gradients.items():
                values[name].add_(gradient, alpha=-LR)
    return Run(steps, {n: x.detach() for n, x in values.items()})


def _check_against_autograd(
    device: OneDevice, tensors: Mapping[str, Tensor], batch: Batch, microbatches: int, gradients: Mapping[str, Tensor]
) -> None:
    """Adding the owners once is within 1e-14 of what autograd does with one leaf."""
    plain = Weights(tensors)
    device.step(plain, batch, microbatches)
    assert max(gradient_errors(gradients, plain.gradients()).values()) <= 1e-14


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(kind, plan, marks=[pytest.mark.slow] * ((i + j) % 4 > 0))
        for i, kind in enumerate(CONFIGS)
        for j, plan in enumerate(PLANS)
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(str(x) for x in value.values()),
)
def test_twenty_steps_are_bitwise_those_of_one_device(kind: str, plan: dict[str, Any]) -> None:
    model, microbatches = make_model(CONFIGS[kind]), plan["num_microbatches"]
    program = autoptd.compile(model, example_inputs=make_batch(model.config, 1), **plan, **AS_IT_IS)
    # On one pipeline rank a tied weight has one owner, and is as autograd has it.
    shared = model.config.tied and len(program.manifest.owners(TIED)) > 1
    assert shared == (model.config.tied and program.mesh.pipeline > 1)
    expected = train_one_device(kind, microbatches, (TIED,) if shared else ())
    found = train_compiled(program, make_batches(kind, microbatches), Training(lr=LR))
    for number, (own, one) in enumerate(zip(found.steps, expected.steps, strict=True)):
        assert torch.equal(own.loss, one.loss), f"loss of step {number}"
        assert set(own.gradients) == set(one.gradients)
        differing = [n for n, g in one.gradients.items() if not torch.equal(g, own.gradients[n])]
        assert not differing, f"step {number}: gradients of {differing}"
    for name, value in expected.state.items():
        assert torch.equal(found.state[name], value), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_captured_graph_is_the_plain_model(kind: str) -> None:
    config = CONFIGS[kind]
    model = make_model(config)
    batch = make_batch(config, 4)
    program = autoptd.compile(model, mesh=(1, 1, 1), example_inputs=make_batch(config, 1), num_microbatches=4)
    parallel = program.bind()
    loss = parallel(**batch)
    loss.backward()
    found = {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}
    (expected,) = train_plain(model, [batch], 4).steps
    compare(Step(loss.detach(), found), expected, loss_tolerance=1e-14, gradient_tolerance=1e-14)
