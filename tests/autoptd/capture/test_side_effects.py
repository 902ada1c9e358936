"""What a forward does besides computing, and other than in evaluation: refused, or said."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoptd
from autoptd.compiled import CompiledProgram

INPUTS = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("idx", "targets")}


class Plain(nn.Module):
    """A small language model with something done in the middle."""

    def __init__(self, middle: Callable[[Plain, Tensor], Tensor] = lambda _, x: x) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.register_buffer("mean", torch.zeros(8))
        self.cache: Tensor | None = None
        self.count, self.middle = 0, middle

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.middle(self, self.table(idx))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def compile_plain(model: nn.Module, mesh: Any = (1, 1, 1)) -> CompiledProgram:
    return autoptd.compile(model, mesh, example_inputs=INPUTS)


def move_mean(model: Plain, x: Tensor) -> Tensor:
    model.mean = 0.9 * model.get_buffer("mean") + 0.1 * x.detach().mean((0, 1))
    return x - model.mean


def hook(_: Plain, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient / 2)
    return x


def draw(_: Plain, x: Tensor) -> Tensor:
    return x if random.random() < 2 else x * 2


def draw_numpy(_: Plain, x: Tensor) -> Tensor:
    return x if np.random.rand() < 2 else x * 2


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (move_mean, "forward assigns the buffer 'mean'"),
        (hook, r"test_side_effects.py:\d+: x.register_hook.*: a hook on a gradient"),
        (draw, "forward draws random numbers with Python's random"),
        (draw_numpy, "forward draws random numbers with numpy.random"),
    ],
)
def test_side_effects_that_no_trace_repeats_are_refused(
    middle: Callable[[Plain, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compile_plain(Plain(middle))
    assert Tensor.register_hook.__name__ == "register_hook"


def test_a_module_may_be_converted_to_what_it_is() -> None:
    def convert(model: Plain, x: Tensor) -> Tensor:
        model.head = model.head.to(torch.float32)
        return x

    program = compile_plain(Plain(convert))
    assert program.verify().passed


def test_a_module_that_forward_converts_is_refused() -> None:
    """The plain model would be another one behind its first call."""
    refused = r"test_side_effects.py:\d+: .*forward converts weight of a Linear from torch.float32 to torch.float64"
    with pytest.raises(ValueError, match=refused):
        compile_plain(Plain(lambda model, x: model.head.double()(x.double())[..., :8].float()))


def test_hooks_on_gradients_are_refused_by_name() -> None:
    model = Plain()
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(model.table.weight, register)(lambda _: None)
        with pytest.raises(ValueError, match=r"table\.weight has a hook on its gradient"):
            compile_plain(model)
        handle.remove()
    handle = model.head.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="head has a backward hook"):
        compile_plain(model)
    handle.remove()
    compile_plain(model)


def test_a_loss_may_not_change_its_buffers_either() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, loss: Tensor) -> Tensor:
            self.scale = 0.9 * self.get_buffer("scale") + 0.1 * loss.detach()
            return loss / self.scale

    with pytest.raises(ValueError, match=r"forward assigns the buffer 'loss_fn\.scale'"):
        autoptd.compile(Plain(), (1, 1, 1), example_inputs=INPUTS, loss_fn=Loss())
    hooked = Loss()
    hooked.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Loss has a backward hook"):
        autoptd.compile(Plain(), (1, 1, 1), example_inputs=INPUTS, loss_fn=hooked)


def test_a_count_in_an_attribute_is_said_to_stay() -> None:
    def count(model: Plain, x: Tensor) -> Tensor:
        model.count += 1
        return x

    with pytest.warns(UserWarning, match="forward changes count from 0 to 1"):
        compile_plain(Plain(count))


class Holding(Plain):
    """Beside attributes there are lists, dicts, objects and generators."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(middle)
        self.memory, self.memories, self.last = torch.zeros(8), [torch.zeros(8)], torch.zeros(1)
        self.state: dict[str, Any] = {"n": 0, "deep": {"steps": [0]}, "best": float("nan")}
        self.seen: dict[int, Tensor] = {}
        self.hidden = (torch.zeros(8), torch.zeros(8))
        self.config = SimpleNamespace(n=0)
        self.rng, self.rngs = random.Random(3), {"a": np.random.default_rng(0)}
        self.entropy = random.SystemRandom()  # of no state

    def look(self) -> tuple[Any, ...]:
        numbers = (repr(self.state), self.config.n, self.rng.getstate(), str(self.rngs["a"].bit_generator.state))
        return (*numbers, *self.seen, id(self.memory), *map(id, self.memories), id(self.last), id(self.hidden))


def remember(model: Holding, x: Tensor) -> Tensor:
    before, model.memory = model.memory, x.detach().mean((0, 1))
    return x + before


def remember_in_a_list(model: Holding, x: Tensor) -> Tensor:
    before, model.memories[0] = model.memories[0], x.detach().mean((0, 1))
    return x + before


def remember_in_a_tuple(model: Holding, x: Tensor) -> Tensor:
    (before, cell), now = model.hidden, x.detach().mean((0, 1))
    model.hidden = (now, cell + now)
    return x + before


def count_in_a_dict(model: Holding, x: Tensor) -> Tensor:
    model.state["n"] += 1
    return x


def count_deep(model: Holding, x: Tensor) -> Tensor:
    model.state["deep"]["steps"][0] += 1
    return x


def count_in_an_object(model: Holding, x: Tensor) -> Tensor:
    model.config.n += 1
    return x


def draw_of_its_own(model: Holding, x: Tensor) -> Tensor:
    return x if model.rng.random() < 2 else x * 2


def draw_of_its_own_numpy(model: Holding, x: Tensor) -> Tensor:
    return x if model.rngs["a"].random() < 2 else x * 2


def keep_to_look_at(model: Holding, x: Tensor) -> Tensor:
    model.last = x.detach() * 2
    model.memories.append(x)
    model.state["mean"] = x.mean().item()
    return x * model.seen.setdefault(x.shape[1], x.new_ones(x.shape[1], 1))


def read_constants(model: Holding, x: Tensor) -> Tensor:
    return x + model.memory + model.memories[0]


@pytest.mark.parametrize(
    ("middle", "refusal", "warning"),
    [
        (remember, r"aten\.add\.Tensor \(test_side.*\) reads memory, which forward assigns", ""),
        (remember_in_a_list, r"aten\.add\.Tensor \(test_side.*\) reads memories\[0\], which forward assigns", ""),
        (remember_in_a_tuple, r"aten\.add\.Tensor \(test_side.*\) reads hidden\[[01]\], which forward assigns", ""),
        (draw_of_its_own, "draws random numbers with the model's rng,", ""),
        (draw_of_its_own_numpy, r"draws random numbers with the model's rngs\['a'\],", ""),
        (count_in_a_dict, "", r"forward changes state\['n'\] from 0 to 1"),
        (count_deep, "", r"forward changes state\['deep'\]\['steps'\]\[0\] from 0 to 1"),
        (count_in_an_object, "", r"forward changes config\.n from 0 to 1"),
        (keep_to_look_at, "", r"forward leaves last, memories\[1\], state\['mean'\], different for each batch"),
        (read_constants, "", ""),
    ],
)
def test_state_kept_for_the_next_call_is_refused_or_warned_of(
    middle: Callable[[Any, Tensor], Tensor], refusal: str, warning: str
) -> None:
    """It is refused, or said once; and the user's model is left as it was, by verify too."""
    model = Holding(middle)
    before = model.look()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if refusal:
            with pytest.raises(ValueError, match=refusal):
                compile_plain(model)
        else:
            assert compile_plain(model).verify().passed
    assert model.look() == before
    said = [str(entry.message) for entry in caught]
    assert len(said) == bool(warning)
    assert all(re.match(warning, text) for text in said), said


BALANCES: list[Tensor] = []
LAST: Tensor | None = None


class Balance:
    """A place that functions and classes share."""

    kept: tuple[Tensor, ...] = ()


def balance(x: Tensor) -> Tensor:
    return x.square().mean()


def leave_on_the_module(model: Plain, x: Tensor) -> Tensor:
    model.cache = balance(x)
    return x


def leave_hidden(model: Plain, x: Tensor) -> Tensor:
    model.cache = x
    return x


def leave_in_a_list(model: Plain, x: Tensor) -> Tensor:
    model.__dict__.setdefault("balances", []).append(balance(x))
    return x


def leave_in_a_global(model: Plain, x: Tensor) -> Tensor:
    global LAST
    LAST = balance(x)
    return x


def append(value: Tensor) -> None:
    BALANCES.append(value)


def leave_in_a_global_list(model: Plain, x: Tensor) -> Tensor:
    append(balance(x))
    return x


def leave_in_a_class(model: Plain, x: Tensor) -> Tensor:
    Balance.kept = (balance(x),)
    return x


def leave_in_a_closure() -> Callable[[Plain, Tensor], Tensor]:
    kept: list[Tensor] = []
    last: Tensor | None = None

    def leave(model: Plain, x: Tensor) -> Tensor:
        nonlocal last
        last = balance(x)
        kept.append(last.detach())
        return x

    return leave


@pytest.mark.parametrize(
    ("middle", "place"),
    [
        (leave_on_the_module, "cache"),
        (leave_hidden, "cache"),
        (leave_in_a_list, r"balances\[0\]"),
        (leave_in_a_global, r"\S+test_side_effects\.LAST"),
        (leave_in_a_global_list, r"\S+test_side_effects\.BALANCES\[0\]"),
        (leave_in_a_class, r"Balance\.kept\[0\]"),
        (leave_in_a_closure(), r"leave_in_a_closure.<locals>.leave\.last"),
    ],
)
def test_tensors_with_a_gradient_left_beside_the_loss_are_refused(
    middle: Callable[[Plain, Tensor], Tensor], place: str
) -> None:
    """As a balance of experts that the loop adds to the loss, or a hidden state that it looks at."""
    with pytest.raises(ValueError, match=f"forward leaves {place}, a tensor with a gradient that the loss does not"):
        compile_plain(Plain(middle))
    assert (LAST, BALANCES, Balance.kept) == (None, [], ())


def test_a_loss_may_read_what_its_modules_left() -> None:
    class Summing(Plain):
        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            self.cache = None
            loss = super().forward(idx, targets)
            assert self.cache is not None
            return loss + self.cache

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = compile_plain(Summing(leave_on_the_module).double(), (2, 1, 1))
    report = program.verify()
    assert report.passed, report
    assert max(report.gradient_errors.values()) < 1e-12


def test_what_a_step_hands_out_may_be_left_too() -> None:
    class Returning(Plain):
        def forward(self, idx: Tensor, targets: Tensor) -> Any:
            loss = super().forward(idx, targets)
            return loss, self.cache

    model = Returning(leave_on_the_module)
    with pytest.raises(ValueError, match="return it beside the loss and name it in outputs="):
        compile_plain(model)
    autoptd.compile(model, (1, 1, 1), example_inputs=INPUTS, outputs=("1",))


def test_a_forward_without_gradients_is_refused() -> None:
    """Where the plain model's backward raises; round a compilation, and for a part of the model, there are others."""
    for without in (torch.no_grad, torch.inference_mode):
        model = Plain()
        model.forward = without()(model.forward)  # type: ignore[method-assign]
        with pytest.raises(
            ValueError, match=r"the loss has no gradient, and the plain model's loss.backward\(\) raises"
        ):
            compile_plain(model)
        with without():
            program = compile_plain(Plain())
        assert program.verify().passed

    def freeze(model: Plain, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x + model.head.weight.sum()

    assert compile_plain(Plain(freeze)).verify().passed


def test_a_table_that_the_first_call_makes_is_a_constant() -> None:
    def keep(model: Plain, x: Tensor) -> Tensor:
        if "positions" not in model._buffers:
            model.register_buffer("positions", torch.linspace(0, 1, 8).to(x))
        return x + model.get_buffer("positions")

    model = Plain(keep)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = compile_plain(model)
    assert program.verify().passed
    assert "positions" not in model._buffers


def branch(model: Plain, x: Tensor) -> Tensor:
    return x * 2 if model.training else x


def scale(model: Plain, x: Tensor) -> Tensor:
    return x * (0.5 if model.training else 1.0)


def end(model: Plain, x: Tensor) -> Tensor:
    return (x if model.training else x.cos()).sin()


@pytest.mark.parametrize("middle", [branch, scale, end])
def test_an_evaluation_that_computes_something_else_is_said(middle: Callable[[Plain, Tensor], Tensor]) -> None:
    """Verify compares with the training that the program has."""
    with pytest.warns(UserWarning, match=r"in evaluation the model computes something else, from .*test_side_eff"):
        program = compile_plain(Plain(middle).double(), (2, 1, 1))
    assert program.verify().passed
    assert any("in evaluation the model computes something else" in line for line in program.log)


def drop(model: Plain, x: Tensor) -> Tensor:
    x = F.dropout(F.dropout(x, 0.3, model.training), 0.0)
    if model.training:
        x = F.dropout(x, 0.2)
    heads = x.unflatten(2, (2, 4)).transpose(1, 2)
    p = 0.1 if model.training else 0.0
    return F.scaled_dot_product_attention(heads, heads, heads, None, p, True).transpose(1, 2).flatten(2)


def test_dropout_makes_no_other_evaluation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = compile_plain(Plain(drop).double(), (2, 1, 1))
    assert program.verify().passed


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1)], ids=str)
def test_compiled_functions_of_the_user_are_traced_uncompiled(mesh: tuple[int, int, int]) -> None:
    """Inductor's kernels would read the memory of tensors without data, which ends the process."""

    def compile_none(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        raise AssertionError("a compiler ran")

    double = torch.compile(lambda x, drops: F.dropout(2 * x.sin(), 0.1, drops), backend=compile_none)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = compile_plain(Plain(lambda own, x: double(x, own.training)), mesh)
    assert not [line for line in program.log if "evaluation" in line]
    assert program.verify().passed


def drop_attention(model: Plain, x: Tensor) -> Tensor:
    heads = x.unflatten(2, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, None, 0.1, True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "middle", [lambda _, x: F.dropout(x, 0.3), lambda _, x: torch.dropout(x, p=0.3, train=True), drop_attention]
)
def test_dropout_in_evaluation_too_is_in_training_alone(middle: Callable[[Plain, Tensor], Tensor]) -> None:
    assert compile_plain(Plain(middle).double(), (2, 1, 1)).verify().passed


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_recomputes_what_the_user_checkpoints(dtype: torch.dtype, reentrant: bool) -> None:
    def again(model: Plain, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda y: F.gelu(F.linear(y, model.head.weight)), x, use_reentrant=reentrant)
        return result[..., :8]

    assert compile_plain(Plain(again).to(dtype)).verify().passed


@pytest.mark.parametrize("reentrant", [True, False])
def test_verify_drops_nothing_in_what_the_user_checkpoints(reentrant: bool) -> None:
    """What the backward computes again neither; where one checkpoint has two dropouts torch would refuse that."""

    def again(model: Plain, x: Tensor) -> Tensor:
        def block(y: Tensor) -> tuple[Tensor, Tensor]:
            first = F.dropout(F.gelu(F.linear(y, model.head.weight)), 0.1, model.training)[..., :8]
            return first, F.dropout(first.tanh(), 0.1, model.training)

        for _ in range(2):
            first, second = checkpoint(block, x, use_reentrant=reentrant)
            x = x + first + second
        return x

    assert compile_plain(Plain(again), (2, 1, 1)).verify().passed


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_checkpoints_of_the_user_are_looked_through_and_said(outer: bool, inner: bool) -> None:
    """One inside the other too: torch's own trace of two that are not reentrant has no gradient."""

    def nested(model: Plain, x: Tensor) -> Tensor:
        def again(y: Tensor) -> Tensor:
            result: Tensor = checkpoint(lambda z: F.gelu(F.linear(z, model.head.weight)), y, use_reentrant=inner)
            return result.tanh()

        result: Tensor = checkpoint(again, x, use_reentrant=outer)
        return result[..., :8]

    program = compile_plain(Plain(nested), (2, 1, 1))
    said = [line for line in program.log if "activation checkpointing is inlined; recompute=" in line]
    assert len(said) == 2
    assert all("test_side_effects.py" in line for line in said)
    # Its lines are wrapped: where, the folder's length says.
    assert said[0] in " ".join(program.texts[0].split())
    report = program.verify()
    assert report.passed, report
    assert max(report.gradient_errors.values()) < 1e-12


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_that_lose_gradients_are_refused(reentrant: bool, trained: bool) -> None:
    """As torch does to the parameters in a reentrant one whose inputs need none: then `trained` ones are lost."""

    def lose(model: Plain, x: Tensor) -> Tensor:
        weight = model.head.weight if trained else model.head.weight.detach()
        scale: Tensor = checkpoint(lambda y: (y @ weight.t()).mean(), x.detach(), use_reentrant=reentrant)
        return x * scale

    if reentrant and trained:
        with pytest.raises(ValueError, match=r"test_side_effects.py:\d+: .*no argument of this reentrant checkpoint"):
            compile_plain(Plain(lose))
    else:
        assert compile_plain(Plain(lose)).verify().passed


def test_verify_leaves_what_forward_keeps() -> None:
    def keep(model: Plain, x: Tensor) -> Tensor:
        if model.cache is None:
            model.cache = torch.arange(8).to(x)
        return x + model.cache

    model = Plain(keep).eval()
    program = compile_plain(model)
    assert program.verify().passed
    assert model.cache is None
    assert not model.training
    assert not model.head.training
    assert torch.isfinite(model(**INPUTS))


def test_what_is_kept_under_no_grad_has_its_gradient_where_it_is_read() -> None:
    def keep(model: Plain, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.cache = x * 1
        y = 2 * x
        with torch.no_grad():
            model.cache = y
        return model.cache + 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = compile_plain(Plain(keep)).verify()
    assert report.passed, report
