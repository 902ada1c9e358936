"""The user's own autograd functions: called in every way, and differentiated by their own backward on every mesh."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import autoptd
from autoptd.check.program import ProgramError
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.work import forward_work
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.kernels.autograd_function import AutogradFunction
from autoptd.verification.reference import take_parts
from tests.checkpoints import bind_thread
from tests.parity import Step, gradient_errors, join_step

WIDTH, VOCABULARY, LENGTH = 8, 16, 4


class Rounded(Function):
    """Straight through: the forward has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float = 0.25) -> Tensor:
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Clamped(Rounded):
    """Inherits its backward; on small numbers its forward's own gradient is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:  # type: ignore[override]
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None


class Reversed(Function):
    @staticmethod
    def forward(x: Tensor, factor: float = 0.5) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.factor * gradient, None


class Several(Function):
    """An integer first, a number that has no gradient, and one that has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, names: list[str], table: Tensor) -> Any:
        ctx.save_for_backward(x)
        place, norm = x.argmax(-1), x.norm(dim=-1, keepdim=True)
        ctx.mark_non_differentiable(place, norm)
        return place, len(names), norm, x * x * table.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, place: Any, names: Any, norm: Any, gradient: Tensor) -> Any:
        assert ctx.needs_input_grad == (True, False, False)
        return 3 * ctx.saved_tensors[0] * gradient, None, None


class Bounded(Function):
    """A backward that is not linear: on every mesh it must see the whole gradient of one microbatch's own loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-3e-3, 3e-3)


class Auxiliary(Function):
    """A loss that enters by the backward, as in mixtures of experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones_like(ctx.like)


class FusedLoss(Function):
    """The head and its cross entropy, with both gradients computed in the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = x @ weight.t()
        gradient = (logits.softmax(-1) - F.one_hot(targets, len(weight))) / len(x)
        ctx.save_for_backward(gradient @ weight, gradient.t() @ x)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return gradient * of_x, gradient * of_weight, None


rounded: Any = Rounded.apply


def apply(function: Any, *arguments: Any) -> Any:
    """Call a function, whose ``apply`` has no types."""
    return function.apply(*arguments)


halved: Any = partial(Reversed.apply, factor=0.75)


def by_default(x: Tensor, function: Any = Rounded.apply) -> Any:
    return function(x, 0.125)


def closed_over() -> Callable[[Tensor], Tensor]:
    function: Any = Rounded.apply
    return lambda x: function(x, 0.0625)


class Block(nn.Module):
    """A residual block whose way to the gradient of `scale` is one call of an autograd function."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.call(x * self.scale))))


def several(x: Tensor) -> Any:
    place, names, norm, product = apply(Several, x, ["a", "b"], torch.ones(2))
    return product + norm * place[..., None] * names


def auxiliary(x: Tensor) -> Any:
    return apply(Auxiliary, x, (x**2).mean() * 0.1)


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "alias": lambda x: rounded(x, 0.25),
    "attribute": Rounded.apply,
    "partial": halved,
    "default argument": by_default,
    "closure": closed_over(),
    "subclass": lambda x: apply(Clamped, x, -0.5, 0.5),
    "setup_context": Reversed.apply,
    "several results": several,
    "not linear": Bounded.apply,
    "auxiliary loss": auxiliary,
    "without gradient": lambda x: x + torch.no_grad()(lambda y: rounded(y, 0.5))(x),
}


class Model(nn.Module):
    """An embedding, a block for each of `calls`, and a fused head."""

    def __init__(self, *calls: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(CALLS[name]) for name in calls)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        x = self.embedding(idx)
        for block in self.blocks:
            x = block(x)
        x = apply(Bounded, x)
        return apply(FusedLoss, x.flatten(0, 1), self.head.weight, targets.flatten())


def make_model(*calls: str) -> Model:
    torch.manual_seed(0)
    return Model(*calls).double()


def make_batch(rows: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randint(VOCABULARY, (rows, LENGTH)) for name in ("idx", "targets")}


def compiled(model: nn.Module, mesh: tuple[int, int, int], count: int, **options: Any) -> CompiledProgram:
    return autoptd.compile(model, mesh, example_inputs=make_batch(1), num_microbatches=count, **options)


def run_step(program: CompiledProgram, batch: Mapping[str, Tensor]) -> Step:
    def work(connection: Connection) -> Step:
        parallel = bind_thread(program, connection)
        at = connection.rank.coordinates
        loss = parallel(**take_parts(program.manifest, batch, program.mesh.data, at.data))
        loss.backward()
        gradients = {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}
        return Step(loss.detach(), gradients)

    return join_step(program.manifest, run_threads(program.manifest, work))


def mean_gradients(model: nn.Module, batch: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """The mean of what the plain model's backward gives for each microbatch."""
    sums: dict[str, Tensor] = {}
    for index in range(count):
        own = copy.deepcopy(model)
        own(**{name: x.chunk(count)[index] for name, x in batch.items()}).backward()
        for name, parameter in own.named_parameters():
            assert parameter.grad is not None
            sums[name] = sums.get(name, 0) + parameter.grad / count
    return sums


@pytest.mark.parametrize(
    ("mesh", "count", "options"),
    [
        ((2, 2, 2), 2, {}),
        pytest.param((1, 1, 1), 3, {}, marks=pytest.mark.slow),
        pytest.param((2, 1, 1), 3, {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param((1, 2, 1), 3, {"schedule": "1f1b"}, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 6, {"recompute": "selective", "layout": "bsh"}, marks=pytest.mark.slow),
    ],
)
def test_own_backward(mesh: tuple[int, int, int], count: int, options: dict[str, Any]) -> None:
    """The gradients are the mean of those that the plain model has of each microbatch."""
    model = make_model(*CALLS)
    program = compiled(model, mesh, count, **options)
    program.check()
    batch = make_batch(count * mesh[2])
    found, expected = run_step(program, batch), mean_gradients(model, batch, count * mesh[2])
    errors = gradient_errors(found.gradients, expected)
    assert max(errors.values()) < 1e-12, errors


def edit(program: CompiledProgram, folder: Path, *pairs: tuple[str, str]) -> CompiledProgram:
    """Save the program, replace pieces of its first text, and load it."""
    program.save(folder)
    file = folder / "program_00.py"
    text = file.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return autoptd.load(folder)


def test_text(tmp_path: Path) -> None:
    """A saved program names the class by its import path; loaded, it is the same program."""
    program = compiled(make_model("alias", "several results"), (2, 1, 1), 2)
    call = f'rank, "{__name__}:Rounded", blocks0_mul, 0.25\n'
    loaded = edit(program, tmp_path, (call, call))
    loaded.check()
    assert loaded.texts == program.texts
    with pytest.raises(ValueError, match=r"program_00\.py:\d+: .*function Missing is not found in module"):
        edit(program, tmp_path, (":Rounded", ":Missing"))


def test_gradient_not_whole(tmp_path: Path) -> None:
    """A backward that is not linear gets no term of a sum over the tensor ranks: the proof insists on that."""
    program = compiled(make_model("not linear"), (2, 1, 1), 2)
    wrong = (("collectives.copied_linear(", "aten.linear("), ("rank, blocks0_bounded", "blocks0_bounded"))
    with pytest.raises(ProgramError, match=r"up to blocks0_bounded .* has a backward of its own: expected"):
        edit(program, tmp_path, *wrong)


class Inner(nn.Module):
    """A function between the two products of a block."""

    def __init__(self, call: Callable[[Tensor], Any] = rounded) -> None:
        super().__init__()
        self.call = call
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        x = self.embedding(idx)
        x = x + self.down(self.call(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Sized(Rounded):
    """Not element by element: it takes a size for a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float = 0.25) -> Tensor:
        return x / x.shape[-1]


class Summed(Rounded):
    """Along the sequence, so that the features may be divided."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float = 0.25) -> Tensor:
        return x.cumsum(1)


@pytest.mark.parametrize(
    ("function", "rules", "divided"),
    [
        (Rounded, None, True),
        (Sized, None, False),
        (Summed, None, False),
        (Summed, {Summed: "b s! h -> b s! h"}, True),
        (Summed, {f"{__name__}:Summed": "b s! h -> b s! h"}, True),
    ],
)
def test_division(function: Any, rules: Any, divided: bool) -> None:
    """Divided where it works element by element, or a rule says how; else whole on every tensor rank."""
    program = compiled(Inner(function.apply).double(), (2, 1, 1), 2, rules=rules)
    # Else the columns, and a sum in front of the function.
    assert (program.rank(0).parameters["up.weight"].local_shape == (WIDTH, WIDTH)) is divided
    note = f"no rule divides {__name__}:{function.__name__}: every tensor rank does them whole"
    assert (note in "".join(program.log)) is not divided
    program.check()
    assert program.verify().passed


def test_products() -> None:
    """The products of a forward are counted, gradients among them."""
    (stage,) = compiled(make_model(), (1, 1, 1), 1).stages
    (node,) = (n for n in stage.graph.nodes if n.target == AutogradFunction(f"{__name__}:FusedLoss"))
    (product,) = forward_work(node).products
    assert product.flops == 3 * 2 * LENGTH * WIDTH * VOCABULARY


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x.transpose(-1, -2) @ x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradient @ (x.transpose(-1, -2) @ x)


class CastProduct(Product):
    forward = staticmethod(custom_fwd(Product.forward, device_type="cpu", cast_inputs=torch.bfloat16))
    backward = staticmethod(custom_bwd(Product.backward, device_type="cpu"))


def test_autocast() -> None:
    """The casts of ``custom_fwd`` are written out; what autocast would cast inside is refused, with that way out."""
    model, batch = Inner(CastProduct.apply), make_batch(2)
    with torch.autocast("cpu", torch.bfloat16):
        program = compiled(model, (1, 1, 1), 2)
        expected = mean_gradients(model, batch, 2)
    found = run_step(program, batch).gradients
    assert max(gradient_errors(found, expected).values()) < 1e-6
    words = r"casts inside .*:Product .*custom_fwd"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=words):
        compiled(Inner(Product.apply), (1, 1, 1), 2)


class Kernel(Function):
    """Reads the values themselves, as a kernel that is launched by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@torch.library.custom_op("autoptd_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


doubled.register_fake(torch.empty_like)


class RegisteredKernel(Kernel):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result: Tensor = doubled(x)
        return result


class Noisy(Kernel):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class NoisyBackward(Kernel):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.bernoulli(torch.full_like(gradient, 0.5))


class InPlace(Kernel):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class WithOut(Kernel):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.mul(x.detach(), 2, out=x.data)


class Owner(Kernel):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: nn.Module) -> Tensor:  # type: ignore[override]
        return x * 2


def local() -> Any:
    class Local(Rounded):
        pass

    return Local


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Kernel.apply, r"forward of Kernel does not run without data .*custom_op and register_fake"),
        (Noisy.apply, r"Noisy draws random numbers with aten\.rand_like.*: draw them in the module's forward"),
        (NoisyBackward.apply, r"NoisyBackward draws random numbers with aten\.bernoulli"),
        (lambda x: apply(InPlace, x * 1), r"InPlace writes to its argument with aten\.mul_.*clone"),
        (lambda x: apply(Owner, x, nn.ReLU()), r"Owner takes a ReLU, which the text of a program cannot hold"),
        (WithOut.apply, r"WithOut writes to its argument with aten\.mul\.out"),
        (local().apply, r"local\.<locals>\.Local is an autograd function that no import finds: .* top level"),
    ],
)
def test_refused(call: Any, message: str) -> None:
    model = make_model("alias")
    model.blocks[0].call = call
    with pytest.raises(ValueError, match=rf"test_custom_autograd\.py:\d+: .*{message}"):
        compiled(model, (1, 1, 1), 1)


def test_registered_kernel() -> None:
    """The way out for a kernel: an operator of torch.library, inside of the function."""
    model = make_model("alias")
    model.blocks[0].call = RegisteredKernel.apply  # type: ignore[assignment]
    program = compiled(model, (1, 1, 1), 1)
    assert "the FLOPs of autoptd_tests::doubled are unknown" in "".join(program.log)
    assert program.verify().passed


class Moody(nn.Module):
    """Rounds otherwise in evaluation."""

    def forward(self, x: Tensor) -> Any:
        return rounded(x, 0.25 if self.training else 0.5)


def test_a_function_that_is_defined_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a cell of a notebook that runs twice: the later class is the one that is compiled."""
    text = """
import torch

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return RESULT

    @staticmethod
    def backward(ctx, gradient):
        return gradient
"""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for result, divided in (("x * 2", True), ("x.softmax(-1)", False)):
        (tmp_path / "own_functions.py").write_text(text.replace("RESULT", result))
        module = importlib.reload(importlib.import_module("own_functions"))
        program = compiled(Inner(module.Own.apply), (2, 1, 1), 2)
        assert (program.rank(0).parameters["up.weight"].local_shape == (WIDTH, WIDTH)) is divided


def test_evaluation() -> None:
    """Another call in evaluation is warned of, as of any operator."""
    model = make_model("alias")
    model.blocks[0].call = Moody()
    with pytest.warns(UserWarning, match="in evaluation the model computes something else"):
        compiled(model, (1, 1, 1), 1)


def test_unequal_labels() -> None:
    """A microbatch's weight, here its part of the labels, is known on ranks that do not compute the loss."""
    program = compiled(Inner(auxiliary).double(), (1, 2, 1), 2)
    assert "kernels.autograd_function(" in program.texts[0]
    batch = make_batch(2)
    batch["targets"][0, 1:] = -100
    assert program.verify(batch=batch).passed
