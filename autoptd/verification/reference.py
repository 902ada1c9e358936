"""Run the plain model's step in float64, the reference for the step of all ranks."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module  # private: functional_call's, for the backward too

from autoptd.capture.autocast_state import leave_autocast
from autoptd.capture.custom_autograd import Functions
from autoptd.capture.eval_mode import DropoutOff
from autoptd.capture.example_inputs import make_example, read_examples
from autoptd.capture.experts import loop_over_experts
from autoptd.capture.fake_module import set_training
from autoptd.capture.objective import Objective
from autoptd.capture.side_effects import keeping_attributes
from autoptd.runtime.engine.label_weights import count_valid
from autoptd.runtime.program.manifest import Manifest
from autoptd.verification.float64 import Promotion
from autoptd.verification.gradients import StepResult
from autoptd.verification.keyed_draws import KeyedDraws

ROUNDING = 1e-9  # of a loss in float64, beyond which two losses differ


def run_plain(
    manifest: Manifest,
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    draws: KeyedDraws,
    precise: bool = True,
) -> StepResult:
    """Run one step; microbatches are weighed by their valid labels if the program does so, else equally.

    Random numbers are those of `draws`. In float64 unless not to be `precise`: then as it trains, under its autocast.
    """
    examples = replace(read_examples(model, make_example(manifest), loss_fn, None), inputs=manifest.inputs)
    paths = (result.path for stage in manifest.stages for result in stage.outputs)
    wanted = tuple(dict.fromkeys(path[0] for path in paths))
    objective = Objective(model, examples, loss_fn, wanted, manifest.device)
    leaves = {}
    for name, parameter in manifest.parameters.items():
        if parameter.kind != "constant" and name in tensors:
            trained = parameter.kind == "parameter" and parameter.requires_grad
            leaves[name] = tensors[name].detach().clone().requires_grad_(trained)
    swapped = _find_places(objective, model, leaves)
    count, held = manifest.num_microbatches * manifest.mesh.data, _list_tensors(objective)
    labels = manifest.weighing_labels
    ones = torch.ones(count, dtype=torch.float64)
    valid = ones if labels is None else count_valid(labels, batch[labels.name])
    losses: dict[int, float] = {}
    sums: dict[str, Tensor] = {}
    outputs: dict[tuple[str, ...], list[Tensor]] = {}
    with (
        keeping_attributes(objective),
        _reparametrize_module(objective, swapped),
        torch.enable_grad(),
        leave_autocast() if precise or not manifest.autocast else torch.autocast("cpu", manifest.autocast),
        Functions(None).watch(),  # a checkpoint would compute again in the backward, with dropout
        torch.random.fork_rng(devices=[]),
        loop_over_experts(),
        DropoutOff(),
        draws,
        Promotion(_find_rounding(manifest)) if precise else nullcontext() as promotion,
    ):
        for part in objective.children():
            set_training(part)
        for index in range(count):
            draws.start(index * manifest.microbatch_size)
            loss = objective.find_loss(*take_parts(manifest, batch, count, index).values())
            for path, output in objective.result.outputs.items():
                outputs.setdefault(path, []).append(output.detach().clone())
            if valid.any() and not valid[index]:
                continue  # a microbatch without labels does not count
            losses[index] = float(loss.detach())
            loss.backward()
            for name, leaf in leaves.items():
                if leaf.grad is not None:  # not in place: two gradients may share memory
                    sums[name] = sums.get(name, 0) + leaf.grad * (valid[index] / valid.sum())
                    leaf.grad = None
        now = _list_tensors(objective)
        tables = {x.data_ptr(): now[place] for place, x in held.items() if now[place] is not x}
        promoted, pair = promotion.count if promotion else 0, list(losses)[:2]
        apart = _average({index: losses[index] for index in pair}, valid)
        both = take_parts(manifest, batch, count, *pair).values()
        draws.start(*(index * manifest.microbatch_size for index in pair))
        compared = _compare_losses(apart, lambda: objective.find_loss(*both))
        notes = tuple(compared) if precise and count > 1 else ()
    norm = torch.nn.utils.get_total_norm(sums.values())
    joined = [dict(_join_outputs(manifest, outputs, replica)) for replica in range(manifest.mesh.data)]
    return StepResult(_average(losses, valid), sums, promoted, notes, float(norm), joined, tables)


def _join_outputs(
    manifest: Manifest, outputs: Mapping[tuple[str, ...], list[Tensor]], replica: int
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the outputs of all microbatches of a replica, joined as a call does."""
    m = manifest.num_microbatches
    for result in (result for stage in manifest.stages for result in stage.outputs):
        parts, dim = outputs[result.path][replica * m : (replica + 1) * m], result.batch_dim
        yield result.path, torch.stack(parts) if dim is None else torch.cat(parts, dim)


def _list_tensors(objective: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are plain attributes of modules, by their places."""
    attributes = ((path, *item) for path, m in objective.named_modules() for item in vars(m).items())
    return {f"{path}.{name}": x for path, name, x in attributes if isinstance(x, Tensor)}


def take_parts(manifest: Manifest, batch: Mapping[str, Tensor], num: int, *indices: int) -> dict[str, Tensor]:
    """Return the parts `indices` of a batch that is cut into `num`, joined."""
    return {
        i.name: batch[i.name]
        if i.batch_dim is None
        else torch.cat([batch[i.name].chunk(num, i.batch_dim)[index] for index in indices], i.batch_dim)
        for i in manifest.inputs
    }


def _average(losses: Mapping[int, float], valid: Tensor) -> float:
    """Return the mean of microbatches' `losses` by index, weighed by the `valid` labels; nan without any."""
    counts = {index: float(valid[index]) for index in losses}
    return sum(losses[index] * n for index, n in counts.items()) / (sum(counts.values()) or math.nan)


def _compare_losses(apart: float, run: Callable[[], Tensor]) -> Iterator[str]:
    """Say where the loss of joined microbatches is not the mean of their losses, `apart`."""
    try:
        joined = float(run().detach())
    except Exception as error:  # the model's own code may refuse another batch size
        yield (
            "the loss of the whole batch was not compared with the mean over microbatches: the plain model does not "
            f"accept two at once ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
        )
        return
    if abs(joined - apart) > ROUNDING * abs(apart):
        yield (
            f"two microbatches at once have the loss {joined:.6g}, but the mean of their losses is {apart:.6g}, which "
            "a step computes: this loss is not a mean over the batch"
        )


def _find_rounding(manifest: Manifest) -> torch.dtype | None:
    """Return the dtype to which literals were rounded: the one dtype of all parameters, else None.

    None also if the program keeps others in float64: then the model may have meant them so.
    """
    tensors = manifest.parameters.values()
    trained = {p.dtype for p in tensors if p.kind == "parameter"}
    exact = any(p.kind != "parameter" and p.dtype is torch.float64 for p in tensors)
    return None if exact or len(trained) != 1 else trained.pop()


def _find_places(objective: nn.Module, model: nn.Module, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the leaf for every place in the objective that holds a tensor, tied ones included: each place once.

    A module registered under several names is one place: under the second, torch would leave the leaf in the module.
    """
    inner = next(path for path, part in objective.named_modules() if part is model)
    own = {n: id(t) for n, t in (*objective.named_parameters(), *objective.named_buffers())}
    # A loss_fn's buffers have their names in the objective; tensors in forward's code have none.
    by_tensor = {own[n]: leaf for name, leaf in leaves.items() for n in (name, f"{inner}.{name}") if n in own}
    return {
        f"{path}.{name}": by_tensor[id(tensor)]
        for path, part in objective.named_modules()
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        if id(tensor) in by_tensor
    }
