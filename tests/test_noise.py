"""Random numbers that forward draws: the same on every mesh, for any microbatch, and in the plain model of verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd import ProgramError
from autoptd.compiled import CompiledProgram
from autoptd.passes.normal_form.draws import write_draw
from autoptd.runtime import aten
from autoptd.runtime.comm.connection import Connection, run_threads
from tests.checkpoints import bind_thread

SEQUENCES, LENGTH, HIDDEN, EXPERTS, ROWS = 4, 6, 8, 4, 16
MESHES = [((1, 1, 1), 1), ((2, 1, 1), 2), ((2, 2, 1), 1), ((1, 2, 2), 1), ((1, 1, 2), 2)]
Noise = Callable[["Layer", Tensor], Tensor]


class Layer(nn.Module):
    """A layer with `noise` in it."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise = noise
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise(self, x)

    def feed(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down(F.gelu(self.up(x)))
        return fed


class Noisy(nn.Module):
    """Tokens, layers with noise in them, and a head."""

    def __init__(self, *noises: Noise) -> None:
        super().__init__()
        self.layers = nn.Sequential(*map(Layer, noises))
        self.table, self.head = nn.Embedding(ROWS, HIDDEN), nn.Linear(HIDDEN, ROWS)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.table(idx))).flatten(0, 1), targets.flatten())


def neftune(m: Layer, x: Tensor) -> Tensor:
    return m.feed(x + torch.zeros_like(x).uniform_(-0.5, 0.5))


def drop_path(m: Layer, x: Tensor) -> Tensor:
    """As timm writes it."""
    return m.feed(x) * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6).div_(0.6)


def floored(m: Layer, x: Tensor) -> Tensor:
    """A dropped path as transformers writes it."""
    return m.feed(x) / 0.6 * (0.6 + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)).floor_()


def jitter(m: Layer, x: Tensor) -> Tensor:
    weights = m.router(x * torch.empty_like(x).uniform_(0.8, 1.2)).softmax(-1)
    return torch.einsum("bse,bsh,eho->bso", weights, x, m.experts)


def gumbel(m: Layer, x: Tensor) -> Tensor:
    return torch.einsum("bse,bsh,eho->bso", F.gumbel_softmax(m.router(x), hard=True), x, m.experts)


def parameters(m: Layer, x: Tensor) -> Tensor:
    y: Tensor = m.down(F.gelu(F.linear(x, m.up.weight + 0.3 * torch.randn_like(m.up.weight), m.up.bias)))
    return y


def hidden(m: Layer, x: Tensor) -> Tensor:
    """In the divided dimension."""
    up = m.up(x)
    with torch.no_grad():
        times = torch.empty_like(up).exponential_(2.0)
    noise = torch.rand_like(up) + torch.normal(0.0, up.abs()) + times
    y: Tensor = m.down(up * torch.bernoulli(up.sigmoid()) + noise)
    return y


def shared(m: Layer, x: Tensor) -> Tensor:
    """One for all sequences: a scalar, a single element, a vector."""
    return m.feed(x * torch.rand(()) + torch.rand(1) + torch.randn(HIDDEN))


def channels(m: Layer, x: Tensor) -> Tensor:
    """For each sequence, of fixed sizes."""
    return m.feed(x * torch.randint(1, 4, (x.shape[0], 1, HIDDEN)) + torch.randint_like(x, 3))


WAYS = [(neftune, drop_path, jitter), (hidden, floored, gumbel), (parameters, shared, channels)]


def compile_noise(
    *noises: Noise, mesh: tuple[int, int, int] = (1, 1, 1), b: int = 1, **options: Any
) -> CompiledProgram:
    torch.manual_seed(0)
    example = {name: torch.zeros(b, LENGTH, dtype=torch.long) for name in ("idx", "targets")}
    count = SEQUENCES // b // mesh[2]
    return autoptd.compile(
        Noisy(*noises).double(), mesh, example_inputs=example, num_microbatches=count, schedule="1f1b",
        num_model_chunks=1, seed=5, **options
    )  # fmt: skip


@pytest.mark.parametrize("noises", WAYS)
def test_every_mesh_draws_the_numbers_of_the_plain_model(noises: tuple[Noise, ...]) -> None:
    losses = []
    for mesh, b in MESHES:
        program = compile_noise(*noises, mesh=mesh, b=b)
        report = program.verify()
        assert max(report.gradient_errors.values()) <= 1e-12, (mesh, report)
        assert abs(report.loss - report.reference_loss) <= 1e-12 * abs(report.loss)
        losses.append(report.loss)
        assert any("kernels.uniform" in text for text in program.texts)
    assert max(losses) - min(losses) <= 1e-12


def edit_text(program: CompiledProgram, old: str, new: str) -> CompiledProgram:
    assert old in program.texts[0]
    return replace(program, texts=(program.texts[0].replace(old, new), *program.texts[1:]))


def step(program: CompiledProgram, steps: int = 2) -> list[dict[str, Tensor]]:
    """The loss and the gradients of some steps of training."""
    torch.manual_seed(1)
    batch = {name: torch.randint(ROWS, (SEQUENCES, LENGTH)) for name in ("idx", "targets")}

    def run(connection: Connection) -> list[dict[str, Tensor]]:
        parallel = bind_thread(program, connection)
        found = []
        for _ in range(steps):
            loss = parallel(**batch)
            loss.backward()
            gradients = {n: p.grad.clone() for n, p in parallel.named_parameters() if p.grad is not None}
            found.append({"loss": loss.detach(), **gradients})
            parallel.zero_grad()
        return found

    return run_threads(program.manifest, run)[0]


@pytest.mark.parametrize("noise", [hidden, drop_path, parameters])
def test_steps_draw_anew_and_the_second_forward_draws_the_same(noise: Noise) -> None:
    first, second = step(compile_noise(noise, noise))
    again, _ = step(compile_noise(noise, noise, b=2, recompute="full"))
    assert abs(first["loss"] - second["loss"]) > 1e-4
    for name, value in first.items():
        torch.testing.assert_close(again[name], value, rtol=1e-12, atol=1e-12)


def test_noise_in_training_alone_is_warned_of_as_evaluation_draws_too() -> None:
    def jitter_in_training(m: Layer, x: Tensor) -> Tensor:
        return jitter(m, x) if m.training else m.feed(x)

    with pytest.warns(UserWarning, match="in evaluation the model computes something else.*with its noise"):
        program = compile_noise(jitter_in_training)
    batch = {name: torch.ones(SEQUENCES, LENGTH, dtype=torch.long) for name in ("idx", "targets")}

    def evaluate(connection: Connection) -> list[float]:
        parallel = bind_thread(program, connection).eval()
        with torch.no_grad():
            return [float(parallel(**batch)) for _ in range(2)]

    one, other = run_threads(program.manifest, evaluate)[0]
    assert one == other


def test_verify_finds_numbers_of_another_operator() -> None:
    program = compile_noise(neftune)
    program = edit_text(program, "operator=0", "operator=1")
    assert not program.verify().ok()


def test_the_proof_finds_numbers_of_the_whole_for_a_part() -> None:
    program = compile_noise(hidden, mesh=(2, 1, 1), b=2)
    with pytest.raises(ProgramError, match="draws for a value that is divided, with divided=None"):
        edit_text(program, ", divided=2", "").check()


def test_a_shape_that_only_has_the_size_of_the_batch_is_refused() -> None:
    def shuffle(m: Layer, x: Tensor) -> Tensor:
        order = torch.rand(x.shape[:2]).argsort(1)
        return m.feed(x.gather(1, order[..., None].expand(-1, -1, x.shape[-1])))

    with pytest.raises(ValueError, match=r"the draw at .*test_noise.py.* is over \[2, 6\].*microbatch_size=1"):
        compile_noise(shuffle, b=2)
    assert compile_noise(shuffle, b=1).verify().ok()


def test_the_distributions_are_those_of_torch() -> None:
    u = torch.linspace(0, 1, 200_001, dtype=torch.float64)[:-1] + 1 / 400_000

    def draw(target: Any, **given: Any) -> Tensor:
        made: Tensor = write_draw(target, given, torch.float64, lambda _: u, lambda call, *given: call(*given))
        return made.double()

    normal = draw(aten.normal_.default, mean=3.0, std=2.0)
    assert (float(normal.mean()), float(normal.std())) == pytest.approx((3, 2), abs=1e-3)
    assert float(((normal - 3).abs() < 2).double().mean()) == pytest.approx(0.682689, abs=1e-5)
    times = draw(aten.exponential_.default, lambd=4.0)
    assert float(times.min()) > 0
    assert float(times.mean()) == pytest.approx(0.25, abs=1e-4)
    assert float(draw(aten.bernoulli.p, self=u, p=0.3).mean()) == pytest.approx(0.3, abs=1e-5)
    numbers = draw(aten.randint.low, low=-2, high=3)
    assert numbers.unique(return_counts=True)[1].tolist() == [40_000] * 5
    assert numbers.unique().tolist() == [-2, -1, 0, 1, 2]
    spread = draw(aten.uniform_.default, **{"from": -1.0, "to": 3.0})
    assert (float(spread.min()), float(spread.max())) == pytest.approx((-1, 3), abs=1e-4)
