"""A model with fewer of its equal layers: what planning measures in place of the whole."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from autoptd.skeleton import copy_structure

KEPT = 4  # layers: the first and last, which may differ in the graph, and two like all between


def shorten_model(model: nn.Module) -> tuple[nn.Module, int]:
    """A copy of `model` on the meta device with all but a few of its equal layers left out, and how many those are.

    The layers are the ModuleList with the most parameters, if its modules are equal: in type, settings, and the
    shapes and dtypes of their tensors, none of which is another's too. Settings that differ by the layer's own
    number are no difference. A forward that treats equal modules differently is not seen through. Where there is
    nothing to leave out, `model` itself and 0.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > KEPT]
    name, layers = max(lists, key=lambda named: _count(named[1]), default=("", nn.ModuleList()))
    if not lists or _is_tied(model, layers):
        return model, 0
    signs = [_sign(layer) for layer in layers]
    if any(sign.keys() != signs[0].keys() for sign in signs):
        return model, 0
    for key in signs[0]:
        column = [sign[key] for sign in signs]
        if len(set(column)) > 1 and column != [str(index) for index in range(len(column))]:
            return model, 0
    copy = copy_structure(model, _twin)
    short = copy.get_submodule(name)
    assert isinstance(short, nn.ModuleList)
    del short[KEPT:]
    return copy, len(layers) - KEPT


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _is_tied(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Whether a tensor of one layer is also another module's."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    uses = Counter(id(tensor) for _, tensor in named)
    return any(uses[id(tensor)] > 1 for tensor in (*layers.parameters(), *layers.buffers()))


def _sign(layer: nn.Module) -> dict[tuple[str, str], str]:
    """What makes two layers equal, by place: types, settings, shapes."""
    found = {}
    for path, module in layer.named_modules():
        found[path, "type"] = str(type(module))
        for key, value in vars(module).items():
            plain = isinstance(value, (bool, int, float, str, type(None), tuple))
            found[path, key] = str(value) if plain else getattr(value, "__qualname__", str(type(value)))
    for path, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        found[path, "tensor"] = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
    return found


def _twin(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        return nn.Parameter(shape, requires_grad=tensor.requires_grad)
    return tensor
