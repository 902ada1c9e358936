"""Write ``torch.autocast`` out as casts: some operators compute in fewer bits, some in float32."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autoptd.passes.ir.autocast import KERNELS, Autocast
from autoptd.passes.ir.autograd_functions import find_cast, find_operations
from autoptd.passes.ir.nodes import nodes_in, where
from autoptd.passes.normal_form.writer import Call, is_mutation
from autoptd.runtime import aten
from autoptd.runtime.kernels.autograd_function import AutogradFunction


def enter_region(outer: Autocast | None, device: str, dtype: torch.dtype, enabled: bool) -> Autocast | None:
    """Return the state inside ``torch.autocast(device, dtype, enabled)`` in the forward, within the state `outer`.

    Models are traced on the CPU, so a region of ``x.device.type`` says "cpu" whatever device the program will run on:
    it means the device of `outer`. A CUDA region does nothing where a model autocasts on CPUs; ValueError for others.
    """
    if device not in KERNELS:
        if enabled:
            raise ValueError(
                f"torch.autocast({device!r}) inside forward is not supported; expected 'cpu' or 'cuda'. Cast "
                "explicitly, or leave it out of the model"
            )
        return outer
    if outer is None:
        return Autocast(device, dtype, enabled)
    return outer if device == "cuda" and outer.device == "cpu" else Autocast(outer.device, dtype, enabled)


def cast_arguments(state: Autocast, call: Call) -> Call:
    """Return the call with its arguments cast according to `state`.

    Each cast of a value is written once, at its first such use. A parameter is cast at each use, as these may lie in
    several stages, so that its cast need not be sent.
    """
    target, writer = call.node.target, call.writer
    policy = state.policy(target)
    eligible = {n for n in nodes_in((call.args, call.kwargs)) if is_eligible(n.meta["val"])}
    if policy == "sum":
        eligible = eligible & {call.source} if call.argument("dtype") is None else set()
    if isinstance(target, AutogradFunction) and state.enabled:
        dtype = _choose_cast(state, target, call)
    elif policy is None or not eligible:
        return call
    else:
        several = len({n.meta["val"].dtype for n in eligible}) > 1
        lower = policy == "lower" or (policy == "inside" and call.node.meta["val"].dtype == state.dtype)
        stays = policy == "inside" or (policy == "widest" and not several)
        dtype = state.dtype if lower else None if stays else torch.float32

    def read(source: fx.Node) -> fx.Node:
        if dtype is None or source not in eligible or source.meta["val"].dtype == dtype:
            return source
        if (source, dtype) in writer.casts:
            return writer.casts[source, dtype]
        meta = {**call.meta, "val": source.meta["val"].to(dtype)}
        made = writer.emit(aten.to.dtype, (source, dtype), meta)
        if source.op != "get_attr":
            writer.casts[source, dtype] = made
        return made

    return replace(call, args=fx.map_arg(call.args, read), kwargs=fx.map_arg(call.kwargs, read))


def _choose_cast(state: Autocast, function: AutogradFunction, call: Call) -> torch.dtype | None:
    """Return the dtype to which the user's function casts its arguments; ValueError where autocast acts inside it."""
    if (dtype := find_cast(function, state.device)) is not None:
        return dtype
    for own in find_operations(function, call.args)[0]:
        if state.policy(own.operator) is not None or not (own.elementwise or own.operator.is_view):
            raise ValueError(
                f"{where(call.node)}: under autocast torch casts inside {function.path} ({own.operator}), and a "
                "program writes casts out: let the function cast its arguments, with @torch.amp.custom_fwd(device_type="
                f"{state.device!r}, cast_inputs=...) on its forward and custom_bwd on its backward"
            )
    return None


def is_eligible(value: object) -> bool:
    """Return whether autocast may cast a value: floating and not float64."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def describe_result(state: Autocast | None, call: Call, target: Any) -> Call:
    """Return the call, to be written as one of `target`, with the resulting dtypes in its ``meta``.

    The model was traced under autocast on the CPU: another dtype than the traced one means a cast inside: ValueError.
    """
    node, traced, arguments = call.node, call.val, (call.args, call.kwargs)
    given, same = ([n.meta["val"] for n in nodes_in(x)] for x in (arguments, (node.args, node.kwargs)))
    enabled = state is not None and state.enabled
    floats = any(isinstance(v, Tensor) and v.is_floating_point() for v in given)
    if not floats or not (enabled or is_mutation(node.target) or _dtypes(given) != _dtypes(same)):
        return call
    values, meta = fx.map_arg(arguments, lambda n: n.meta["val"]), torch.device("meta")
    args, kwargs = fx.node.map_aggregate(values, lambda x: meta if isinstance(x, torch.device) else x)
    try:
        with torch.no_grad():
            found = target(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{where(node)}: under autocast {node.target} gets {_names(given)}, which it does not accept "
            f"({str(error).splitlines()[0]}); cast its arguments explicitly"
        ) from error
    checked = state is not None and enabled and state.device == "cpu" and not is_mutation(node.target)
    if checked and _dtypes(found) != _dtypes(traced):
        raise ValueError(
            f"{where(node)}: under autocast torch casts inside {node.target}, which returns {_names(traced)}; "
            f"expected {_names(found)}. Call it with autocast disabled, and cast explicitly"
        )
    dtypes = iter(_dtypes(found))
    val = fx.node.map_aggregate(traced, lambda x: x.to(next(dtypes)) if isinstance(x, Tensor) else x)
    return replace(call, meta={**call.meta, "val": val})


def _dtypes(value: Any) -> list[torch.dtype]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v.dtype for v in values if isinstance(v, Tensor)]


def _names(value: Any) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _dtypes(value))
