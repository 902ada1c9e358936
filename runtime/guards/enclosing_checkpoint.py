"""``torch.utils.checkpoint`` round a parallel model: each tensor that it saves would be made by a step of its own."""

from __future__ import annotations

from torch._C._autograd import _top_saved_tensors_default_hooks


def refuse_checkpoint() -> None:
    """Raise ValueError in what ``torch.utils.checkpoint`` calls: backwards in a call would call the model anew."""
    hooks = _top_saved_tensors_default_hooks(False)
    if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        raise ValueError(
            "the parallel model is called inside torch.utils.checkpoint, and a call is a whole step, with its "
            "backwards: call it without, and let the compiler recompute, by compile(recompute='full') or 'selective'"
        )
