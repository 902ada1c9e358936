"""Experts of transformers, whose modules all compute by one interface: traced as our operators, or run as written."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from autoptd.runtime import kernels

Forward = Callable[..., Tensor]


def write_experts() -> AbstractContextManager[Any]:
    """Compute experts in this block by operators that know experts, whichever the model's config names.

    Others name no expert, take no float64 (``grouped_mm``), or loop over data ("eager").
    """
    return _choose(lambda written: _compute_experts)


def loop_over_experts() -> AbstractContextManager[Any]:
    """Compute experts in this block as their class is written, which any dtype can be."""
    return _choose(lambda written: written)


def _choose(choose: Callable[[Forward], Forward]) -> AbstractContextManager[Any]:
    """Let `choose` pick the forward of all experts, given that of their class; not one that the user wrote."""
    moe = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ALL_EXPERTS_FUNCTIONS", None)
    if interface is None:
        return nullcontext()
    named = interface.get_interface

    def find(implementation: str | None, written: Forward) -> Forward:
        theirs: Forward = named(implementation, written)
        return choose(written) if theirs.__module__.startswith("transformers.") else theirs

    return patch.object(interface, "get_interface", find)


def _compute_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute what transformers' own forwards of its experts do, for the rows of all experts together."""

    def multiply(rows: Tensor, name: str) -> Tensor:
        weight, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return kernels.grouped_linear(rows, weight, counts, bias, module.is_transposed)

    weight = module.down_proj
    order, counts = torch.ops.autoptd.route(top_k_index, 0, len(weight))
    rows = kernels.dispatch(hidden_states, order, top_k_index.shape[1])
    rows = multiply(rows, "gate_up_proj" if module.has_gate else "up_proj")
    rows = multiply(module._apply_gate(rows) if module.has_gate else module.act_fn(rows), "down_proj")
    if getattr(module, "has_post_expert_norm", False):  # since transformers 5.20
        rows = module.post_expert_norm(rows)
    return kernels.combine(rows, top_k_weights, order).to(hidden_states.dtype)
