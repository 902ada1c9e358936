"""Refuse ``torch.utils.checkpoint`` around a parallel model: it would run a whole step to recompute a tensor."""

from __future__ import annotations

from torch._C._autograd import _top_saved_tensors_default_hooks


def refuse_checkpoint() -> None:
    """Raise ValueError inside ``torch.utils.checkpoint``, which would call the model anew in each backward."""
    hooks = _top_saved_tensors_default_hooks(False)
    if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        raise ValueError(
            "the parallel model is called inside torch.utils.checkpoint, and a call is a whole step, with its "
            "backwards: call it without, and let the compiler recompute, by compile(recompute='full') or 'selective'"
        )
