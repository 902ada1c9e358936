"""A model with fewer of its equal layers, which planning measures in place of the whole."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from autoptd.capture.example_inputs import Examples
from autoptd.capture.fake_module import copy_structure, make_mode, make_twin, run_without_data

KEPT = 4  # layers: the first and last, which may differ in the graph, and two of the others
OWN = ("_parameters", "_buffers", "_modules")  # attributes of a module whose contents are compared


def shorten_model(model: nn.Module, examples: Examples) -> tuple[nn.Module, int]:
    """Return a copy of `model` on the meta device with few of its equal layers, and the number of layers left out.

    The layers are the ModuleList with the most parameters, if its modules are equal: in type, settings, and the
    shapes and dtypes of their tensors, none of which is tied; and if forward, called as in `examples`, calls each in
    the same way. A setting may be the layer's own number. Otherwise the result is `model` itself and 0.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > KEPT]
    if not lists:
        return model, 0
    name, layers = max(lists, key=lambda named: sum(p.numel() for p in named[1].parameters()))
    if _is_tied(model, layers) or not _are_equal(layers) or not _uses_alike(model, name, examples):
        return model, 0
    copy = copy_structure(model, lambda x: make_twin(x) if isinstance(x, nn.Parameter) else x)
    short = copy.get_submodule(name)
    assert isinstance(short, nn.ModuleList)
    del short[KEPT:]
    return copy, len(layers) - KEPT


def _is_tied(model: nn.Module, layers: nn.ModuleList) -> bool:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    uses = Counter(id(tensor) for _, tensor in named)
    return any(uses[id(tensor)] > 1 for tensor in (*layers.parameters(), *layers.buffers()))


def _are_equal(layers: nn.ModuleList) -> bool:
    """Return whether all layers agree, but for a setting that is the layer's own number."""
    signs, numbers = [*map(_sign, layers)], [*range(len(layers))]
    if any(sign.keys() != signs[0].keys() for sign in signs):
        return False
    columns = ([sign[key] for sign in signs] for key in signs[0])
    return all(all(_is_same(own[0], value) for value in own) or own == numbers for own in columns)


def _sign(layer: nn.Module) -> dict[tuple[str, str], object]:
    """Return the types, settings and shapes in which equal layers agree."""
    found: dict[tuple[str, str], object] = {}
    for path, module in layer.named_modules():
        found[path, "type"] = type(module)
        found.update(((path, key), value) for key, value in vars(module).items() if key not in OWN)
    for path, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        found[path, "tensor"] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return found


def _is_same(one: object, other: object) -> bool:
    """Return whether two settings are certainly the same."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor) or type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return (one == other) is True


def _uses_alike(model: nn.Module, name: str, examples: Examples) -> bool:
    """Return whether forward calls the layers in `name` all in the same way, without data; False if unknown."""
    skeleton = copy_structure(model, partial(make_twin, mode=(mode := make_mode())))
    layers = skeleton.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    calls: list[list[object]] = [[] for _ in layers]
    results: list[tuple[object, Any]] = []
    for layer, own in zip(layers, calls, strict=True):
        layer.forward = partial(_call, layer.forward, own, results)
    inputs = [i for i in examples.inputs if i.name not in examples.targets]
    try:
        with torch.no_grad(), run_without_data(mode):
            skeleton(**{i.name: torch.empty(i.shape, dtype=i.dtype) for i in inputs}, **examples.constants)
    except Exception:  # the user's code looks at values: the whole model is measured, and capture explains
        return False
    return bool(calls[0]) and all(_is_same(calls[0], own) for own in calls)


def _call(
    forward: Callable[..., Any], calls: list[Any], results: list[tuple[Any, Any]], *args: Any, **kwargs: Any
) -> Any:
    """Record a layer's call, and return the result of the first call of any layer with equal arguments."""
    leaves, form = tree_flatten((args, kwargs))
    given = [form, *((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)]
    calls.append(given)
    for known, result in results:
        if _is_same(known, given):
            return result
    results.append((given, forward(*args, **kwargs)))
    return results[-1][1]
