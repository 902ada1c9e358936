"""The plain model's own step in float64: what all ranks' together is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module  # private: functional_call's, for the backward too

from autoptd.ambient import leave_autocast
from autoptd.custom_gradients import Functions
from autoptd.example_inputs import make_example, read_examples
from autoptd.module_state import keeping_attributes
from autoptd.objective import Objective
from autoptd.promotion import Promotion
from autoptd.runtime.manifest import Manifest
from autoptd.runtime.weighting import count_valid
from autoptd.skeleton import set_training
from autoptd.undropped import Undropped


def run_plain(
    manifest: Manifest,
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
) -> tuple[float, dict[str, Tensor], int]:
    """The loss over all microbatches, its gradients, and how many casts were promoted.

    Microbatches count by their valid labels where the program weighs them so, else alike.
    """
    examples = read_examples(model, make_example(manifest), loss_fn, None)
    names = [i.name for i in manifest.inputs]
    objective = Objective(model, names, examples.constants, loss_fn, examples.targets)
    leaves = {}
    for name, parameter in manifest.parameters.items():
        if parameter.kind != "constant" and name in tensors:
            trained = parameter.kind == "parameter" and parameter.requires_grad
            leaves[name] = tensors[name].detach().clone().requires_grad_(trained)
    swapped = _find_places(objective, model, leaves)
    count = manifest.num_microbatches * manifest.mesh.data
    labels = manifest.weighing_labels
    valid = torch.ones(count) if labels is None else count_valid(labels, batch[labels.name])
    total = 0.0
    sums: dict[str, Tensor] = {}
    with (
        keeping_attributes(objective),
        _reparametrize_module(objective, swapped),
        torch.enable_grad(),
        leave_autocast(),
        Functions().watch(),  # what a checkpoint computes again in the backward would have its dropout
        Undropped(),
        Promotion(_find_rounding(manifest)) as promotion,
    ):
        for part in objective.children():
            set_training(part)
        for index in range(count):
            values = tuple(
                batch[i.name]
                if i.batch_dim is None
                else batch[i.name].chunk(count, i.batch_dim)[index].contiguous()
                for i in manifest.inputs
            )
            if valid.any() and not valid[index]:
                continue  # the mean over none of its labels counts nothing
            loss = objective(*values)
            loss = loss / float(valid.sum() / valid[index])
            loss.backward()
            total += float(loss.detach())
            for name, leaf in leaves.items():
                if leaf.grad is not None:  # not in place: two parameters' may be in one memory
                    sums[name] = sums[name] + leaf.grad if name in sums else leaf.grad
                    leaf.grad = None
    return total, sums, promotion.count


def _find_rounding(manifest: Manifest) -> torch.dtype | None:
    """What the program's literals of its activations' dtype were rounded to, where all parameters have one.

    None where it keeps others in float64: then the model may have meant literals of that.
    """
    tensors = manifest.parameters.values()
    trained = {p.dtype for p in tensors if p.kind == "parameter"}
    exact = any(p.kind != "parameter" and p.dtype is torch.float64 for p in tensors)
    return None if exact or len(trained) != 1 else trained.pop()


def _find_places(objective: nn.Module, model: nn.Module, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The leaf for every place in the objective that holds a tensor, tied ones included: each place once.

    A module that is registered under several names is one place. Under the second one torch would take the leaf
    for what was there, and leave it in the user's model.
    """
    inside = next(path for path, part in objective.named_modules() if part is model)
    own = {n: id(t) for n, t in (*objective.named_parameters(), *objective.named_buffers())}
    # A loss_fn's buffers have their names in the objective; tensors in forward's code have none.
    by_tensor = {
        own[n]: leaf for name, leaf in leaves.items() for n in (name, f"{inside}.{name}") if n in own
    }
    return {
        f"{path}.{name}": by_tensor[id(tensor)]
        for path, part in objective.named_modules()
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        if id(tensor) in by_tensor
    }
