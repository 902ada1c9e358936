"""The norm of the whole model's gradient, and clipping by it: by the parallel model, and by torch's own functions.

Plain loops, Accelerate, the Trainer and Lightning all clip by functions of ``torch.nn.utils``. Those that know the norm
and scale by it are replaced once in ``torch.nn.utils.clip_grad``, where torch's ``clip_grad_norm_`` looks them up: so
one that was imported before ``bind`` knows them too.
"""

import threading
from collections.abc import Callable, Container
from functools import partial, reduce, wraps
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from autoptd.runtime.comm.groups import ThreadGroup
from autoptd.runtime.engine.dynamo import leave_uncompiled
from autoptd.runtime.module.step_runner import StepRunner
from autoptd.runtime.optimizer.clipping import global_norm

CALL = "call parallel.clip_grad_norm_(max_norm) instead, on every rank"


# Of the parallel models that live: the thread that is its rank (None: the process is), and the runner of its steps.
_MODELS: WeakKeyDictionary[nn.Module, tuple[int | None, StepRunner]] = WeakKeyDictionary()
_LOCK = threading.Lock()


@leave_uncompiled
def clip_gradients(runner: StepRunner, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scale the gradients to `max_norm`; return their norm before. As `Parallel.clip_grad_norm_`."""
    norm = _measure(runner, norm_type, error_if_nonfinite)
    nn.utils.clip_grads_with_norm_(runner.weights.leaves.values(), max_norm, norm, foreach=False)
    dtypes = {p.dtype for p in runner.weights.manifest.parameters.values() if p.kind == "parameter"}
    return norm.to(torch.float64 if torch.float64 in dtypes else torch.float32)


def _measure(runner: StepRunner, norm_type: float, strict: bool, of: Container[str | int] | None = None) -> Tensor:
    """Return the norm of the whole gradient, or of that of the leaves `of`, in float64: a collective of all ranks.

    Raises ValueError for a `norm_type` that is no norm of joined parts: 0, which counts, minima, and not a number.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type is {norm_type}, expected a positive number or inf: the norms of the ranks' gradients are "
            "joined to that of the whole model's, which other types do not give"
        )
    weights, connection = runner.weights, runner.weights.connection
    named = {k: p.grad for k, p in weights.leaves.items() if isinstance(k, str) and (of is None or k in of)}
    gradients = {name: gradient for name, gradient in named.items() if gradient is not None}
    position = connection.position
    with position.collective_call("clip_grad_norm_"), position.during("norm of the gradient"):
        norm = global_norm(weights.manifest, connection.rank, gradients, weights.shards, norm_type)
    runner.norm = norm
    if strict and not torch.isfinite(norm):
        raise RuntimeError(
            f"the {norm_type}-norm of the gradient is {norm.item()}: skip this step, "
            "or pass error_if_nonfinite=False to scale by it all the same"
        )
    return norm


def clip_over_ranks(parallel: nn.Module, runner: StepRunner) -> None:
    """Let torch clip the gradients of `parallel`, while that lives, by their norm over all ranks, alike on each."""
    is_thread = isinstance(runner.weights.connection.world, ThreadGroup)
    _MODELS[parallel] = threading.get_ident() if is_thread else None, runner
    with _LOCK:
        for name, replacement in _REPLACEMENTS.items():
            original = getattr(clip_grad, name)
            if hasattr(original, "knows_parallel_models"):
                continue
            wrapped = wraps(original)(partial(replacement, original))
            wrapped.knows_parallel_models = True  # type: ignore[attr-defined]
            for module in (clip_grad, nn.utils):
                for alias in [alias for alias, value in vars(module).items() if value is original]:
                    setattr(module, alias, wrapped)


def _list_models() -> list[StepRunner]:
    """Return the models of this rank, whichever thread bound them.

    Where ranks are threads, the backward of another rank writes its gradients without the interpreter's lock.
    """
    return [model for thread, model in list(_MODELS.values()) if thread in (threading.get_ident(), None)]


@leave_uncompiled
def _total_norm(
    original: Any, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
) -> Tensor:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for model in _list_models():
        keys = _read_keys(model)
        if any(id(tensor) in keys for tensor in tensors):
            of = _check_whole(model, [keys.get(id(tensor)) for tensor in tensors])
            norm = _measure(model, float(norm_type), error_if_nonfinite, of)
            # A placeholder has the dtype of its parameter, whose gradient is summed in more.
            return norm.to(reduce(torch.promote_types, [torch.float32, *(tensor.dtype for tensor in tensors)]))
    return original(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]


def _read_keys(model: StepRunner) -> dict[int, str | int]:
    """Return the keys of the leaves of `model`, and the names of its sharded parameters, by the ids of gradients."""
    leaves, sharded = model.weights.leaves.items(), model.weights.sharded.values()
    named = chain(leaves, *(own.items() for own in sharded))
    return {id(parameter.grad): key for key, parameter in named if parameter.grad is not None}


def _check_whole(model: StepRunner, keys: list[str | int | None]) -> set[str | int]:
    """Return the leaves that gradients of these `keys` are of; None is the key of one that is not of `model`.

    Raises ValueError unless they are all of the model's gradients, no others, and every rank has some.
    """
    if None in keys:
        raise ValueError(
            "torch's norm is asked for gradients of a parallel model together with others: each rank has other parts "
            f"of the model's, so clip the others alone, and for the model {CALL}"
        )
    given = {key for key in keys if key is not None}
    leaves, sharded = model.weights.leaves, model.weights.sharded
    given |= {index for index, own in sharded.items() if given.issuperset(own)}
    # Parameters that were frozen after their backward may be left out, on every rank.
    trained = [key for key, leaf in leaves.items() if leaf.grad is not None and leaf.requires_grad]
    absent = [key for key in trained if key not in given]
    missing = sorted(key if isinstance(key, str) else next(iter(sharded[key])) for key in absent)
    if missing or not model.gradients_everywhere:
        reason = f"not {missing[0]}'s" if missing else "some ranks have no gradients and do not ask for it"
        raise ValueError(
            "torch's norm of a parallel model's gradients is that over all ranks, and needs all gradients on each; "
            f"here it is given {len(keys)}, {reason}: {CALL}"
        )
    return given


@leave_uncompiled
def _change_own(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
    """Call `original` with the parts that this rank steps in place of sharded `parameters`."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for model in _list_models():
        leaves = model.weights.leaves
        parts = {id(p): leaves[index] for index, own in model.weights.sharded.items() for p in own.values()}
        given = list({id(p): p for p in (parts.get(id(p), p) for p in given)}.values())
    original(given, *args, **kwargs)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "_get_total_norm": _total_norm,
    "_clip_grads_with_norm_": _change_own,
    "clip_grad_value_": _change_own,
}
