"""The modules below a parallel model are of the user's torch.nn classes, and hold slices only."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.runtime.weights.submodules import SlicedModule, make_sliced_module, name_layer
from samples.gpt import GPT, GPTConfig


class Own(nn.Linear):
    """A user's own linear is one."""


class Scale(nn.Module):
    """A user's own layer is of no class of torch.nn."""


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (nn.LayerNorm(2), "LayerNorm"),
        (Own(2, 2), "Linear"),
        (nn.Embedding(2, 2), "Embedding"),
        (nn.MultiheadAttention(2, 1).out_proj, "Linear"),
        (nn.ParameterList(), ""),
        (nn.Sequential(), ""),
        (Scale(), ""),
    ],
)
def test_a_layer_is_named_by_its_class_in_torch(module: nn.Module, layer: str) -> None:
    assert name_layer(module) == layer


LAYERS = sorted(
    name
    for name, kind in vars(nn).items()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind is not nn.Module
)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_part_of_any_class_is_moved_shown_and_loaded(layer: str) -> None:
    part = make_sliced_module(layer)
    part.register_parameter("weight", nn.Parameter(torch.ones(2)))
    assert isinstance(part, getattr(nn, layer))
    assert part.to(torch.float64).weight.dtype is torch.float64
    assert layer in repr(part)
    part.load_state_dict({"weight": torch.zeros(2)})
    assert not part.state_dict()["weight"].any()


@pytest.mark.parametrize("layer", ["", "init", "NoSuchLayer", "Tensor"])
def test_paths_that_are_no_layer_become_plain_sliced_modules(layer: str) -> None:
    assert type(make_sliced_module(layer)) is SlicedModule


def compile_gpt() -> tuple[GPT, nn.Module]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(40, 8, 2, 2, 8))
    return model, autoptd.compile(model, mesh=(1, 1, 1), num_microbatches=1).bind()


def group_by_class(model: nn.Module) -> dict[str, list[str]]:
    """As minGPT does, which decays what is in a linear's weight."""
    kinds = (nn.Linear, nn.LayerNorm, nn.Embedding)
    return {
        kind.__name__: [
            f"{path}.{name}"
            for path, module in model.named_modules()
            if isinstance(module, kind)
            for name, _ in module.named_parameters(recurse=False)
        ]
        for kind in kinds
    }


def test_groups_by_class_are_those_of_the_plain_model() -> None:
    model, parallel = compile_gpt()
    expected = group_by_class(model)
    assert group_by_class(parallel) == expected
    assert all(expected.values())


def test_a_tied_parameter_goes_by_all_its_names() -> None:
    """Frozen by the module of its second name, say; it is listed once, by the first."""
    model, parallel = compile_gpt()
    assert parallel.state_dict().keys() == model.state_dict().keys()
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert isinstance(parallel.lm_head, nn.Linear)
    parallel.lm_head.requires_grad_(False)
    assert not parallel.get_parameter("wte.weight").requires_grad
    parallel.load_state_dict(model.state_dict())
    head: Any = parallel.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"lm_head\.weight was added after bind, or was tied"):
        parallel(idx=torch.zeros(1, 8, dtype=torch.long), targets=torch.zeros(1, 8, dtype=torch.long))


def test_setting_a_compiled_in_attribute_warns() -> None:
    model = GPT(GPTConfig(40, 8, 2, 2, 8))
    model.temperature = 1.0  # type: ignore[assignment]
    parallel = autoptd.compile(model, mesh=(1, 1, 1), num_microbatches=1).bind()
    with pytest.warns(UserWarning, match="temperature was set on a parallel model, .* compile that again"):
        parallel.temperature = 2.0
    norms = [module for module in parallel.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 5
    with pytest.warns(UserWarning, match="eps was set on a parallel model, or on a module of one"):
        norms[0].eps = 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel.train().epoch = 3  # a script's own


def test_a_part_shows_what_it_has_and_computes_nothing() -> None:
    _, parallel = compile_gpt()
    assert "(ln_1): LayerNorm()" in repr(parallel)
    with pytest.raises(ValueError, match=r"a module of a parallel model .* computes nothing: call that model"):
        parallel.get_submodule("h.0.ln_1")(torch.zeros(8))
    with pytest.raises(ValueError, match="initialise the model before it is compiled"):
        parallel.apply(lambda module: module.zero_grad())


def test_a_saved_program_knows_the_layers(tmp_path: object) -> None:
    model = GPT(GPTConfig(40, 8, 2, 2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = autoptd.compile(model, mesh=(1, 1, 1), num_microbatches=1)
        program.save(str(tmp_path))
        parallel = autoptd.load(str(tmp_path)).bind(weights=model.state_dict())
    assert isinstance(parallel.get_submodule("ln_f"), nn.LayerNorm)


def test_layers_are_not_numbered() -> None:
    part: Any = make_sliced_module("")
    with pytest.raises(TypeError, match="not subscriptable"):
        part[0]
    with pytest.raises(TypeError, match="not iterable"):
        list(part)
    assert part


@pytest.mark.parametrize(
    "name", ["register_backward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_on_parts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a hook on it never runs: hook the parallel model"):
        getattr(make_sliced_module("Linear"), name)(print)


@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook"])
def test_forward_hooks_on_parts_are_warned_of(name: str) -> None:
    """What lists a model's modules hooks each, and must not end a run."""
    with pytest.warns(UserWarning, match="a hook on it never runs"):
        getattr(make_sliced_module("Linear"), name)(print).remove()
