"""FlexAttention written out: two products, a softmax, and the user's functions of a score and its indices.

Torch computes it by a compiler, or by vmap, and a trace can hold neither. So a function of single indices is called
with all of them at once, which means the same where it works element by element.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import log
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only  # private, with no public twin

from autoptd.capture.source_lines import CaptureError, user_line
from autoptd.passes.ir.autograd_functions import Operations, tensors_in

_OWN = {name: getattr(flex, name) for name in ("create_mask", "_convert_mask_to_block_mask")}


@contextmanager
def write_flex_attention() -> Iterator[None]:
    """Compute FlexAttention in this block by other operators of torch, which have a gradient on CPUs too."""

    def skip(*_: Any, **__: Any) -> tuple[None, None]:
        return None, None

    # Private: what the public functions call, under whatever name a program has kept these.
    named: dict[str, Any] = dict.fromkeys((*_OWN, "_validate_device", "_transpose_ordered"), skip)
    named |= {"flex_attention_hop": _attend, "_create_sparse_block_from_block_mask": _make_blocks}
    # What the user gave to torch.compile runs as written.
    as_written = torch.compiler.set_stance("force_eager")
    with patch.multiple(flex, _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True, **named), as_written:
        yield


def _make_blocks(_: Any, mod: Any, lengths: tuple[int, int], *sizes: Any) -> BlockMask:
    """Return a mask that leaves all to its function `mod`: blocks where nothing is seen only save time."""
    rows, columns = (-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    with _disable_current_modes():
        count = torch.full((1, 1, rows), columns, dtype=torch.int32)
        every = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns)
    return BlockMask.from_kv_blocks(count, every, None, None, sizes, mod, lengths)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mod: Any, blocks: tuple[Any, ...], scale: float, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention, and the logarithm of its softmax's sums and its largest scores, both over that of 2."""
    (b, h, s), t = query.shape[:3], key.shape[2]
    at = [torch.arange(n).view([-1 if d == i else 1 for i in range(4)]) for d, n in enumerate((b, h, s, t))]
    seen = _call_with_all(_find_mask(blocks), *at)
    seen = seen.expand(*seen.shape[:-2], s, t)
    keys, values = (x.repeat_interleave(h // key.shape[1], 1) for x in (key, value))
    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = query.to(precise) @ keys.to(precise).transpose(-2, -1) * scale
    scores = torch.where(seen, _call_with_all(mod, scores, *at), -float("inf"))
    if mod is flex._identity:
        out = F.scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=h != key.shape[1])
    else:
        out = torch._safe_softmax(scores, -1).to(query.dtype) @ values
    return out, scores.logsumexp(-1) / log(2), scores.amax(-1) / log(2)


def _find_mask(blocks: tuple[Any, ...]) -> Any:
    """Return the function of a mask that was given as a tuple. CaptureError unless it hides what the blocks do."""
    q, kv, count, every, full_count, full_every, *_, size, kv_size, mod = blocks
    columns = every.shape[-1]
    if size == kv_size == flex._LARGE_SPARSE_BLOCK_SIZE:
        return mod  # no mask was given

    def agrees() -> bool:
        if full_count is None and (count == columns).all():
            return True
        mask = _OWN["create_mask"](mod, *every.shape[:2], q, kv, count.device)
        some, whole = _OWN["_convert_mask_to_block_mask"](mask, size, kv_size, separate_full_blocks=True)
        given = flex._ordered_to_dense(count, every, columns)
        full = given * 0 if full_count is None else flex._ordered_to_dense(full_count, full_every, columns)
        return torch.equal(given + full > 0, some + whole > 0) and not (full > whole).any()

    try:
        with ThreadPoolExecutor(1) as thread:  # in which no mode of the trace is active
            found = "" if thread.submit(agrees).result() else "whose blocks hide other keys than its mask_mod"
    except Exception as error:  # of the user's own code, and of torch without data
        found = f"whose blocks cannot be compared with its mask_mod ({type(error).__name__})"
    if found:
        way = "say all that is hidden in mask_mod, and call create_block_mask in forward"
        raise CaptureError(f"{user_line()}: flex_attention gets a BlockMask {found}: {way}")
    return mod


def _call_with_all(mod: Callable[..., Tensor], *values: Tensor) -> Tensor:
    with _AllAtOnce(mod, values):
        return mod(*values)


class _AllAtOnce(TorchFunctionMode):
    """A mode in which a function of scalars computes with `values` of all of them, each result as large as they are."""

    def __init__(self, mod: Callable[..., Tensor], values: Sequence[Tensor]) -> None:
        super().__init__()
        self._name = getattr(mod, "__name__", "a function")
        self._varying, self._heads = {id(x): x for x in values}, values[-3]
        self._rows: dict[int, tuple[Tensor, Tensor, tuple[Any, ...]]] = {}  # of fewer indices than dimensions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if not any(id(x) in self._varying or id(x) in self._rows for x in tensors_in((args, options))):
            return func(*args, **options)
        if func is Tensor.__getitem__:
            return self._index(*args)
        with _disable_current_modes():
            scalars, named = tree_map_only((Tensor, torch.device), self._make_scalar, (args, options))
            with Operations() as operations:
                result = func(*scalars, **named)
        if not isinstance(result, Tensor):
            return args[0].device if isinstance(result, torch.device) else result
        if result.dim() or not all(x.elementwise for x in operations.made):
            self._refuse(f"calls {getattr(func, '__name__', func)}, which does not work element by element")
        made = func(*args, **options)
        self._varying[id(made)] = made
        return made

    def _make_scalar(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        return torch.empty(() if id(x) in self._varying else x.shape, dtype=x.dtype, device="meta")

    def _index(self, source: Tensor, index: Any) -> Tensor:
        """Index a tensor by as many indices as it has dimensions, which may come one after the other."""
        _, whole, before = self._rows.get(id(source), (source, source, ()))
        every = (*before, *(index if isinstance(index, tuple) else (index,)))
        if id(whole) in self._varying or not all(map(self._is_number, every)) or len(every) > whole.dim():
            self._refuse("indexes by something else than one number for each dimension")
        made = self._take(whole, every) if len(every) == whole.dim() else whole[every]
        if len(every) == whole.dim():
            self._varying[id(made)] = made
        else:
            self._rows[id(made)] = made, whole, every
        return made

    def _take(self, whole: Tensor, index: Sequence[Any]) -> Tensor:
        """Index all dimensions; one by the numbers of all heads is taken as it is, so that heads may be divided."""
        dims = [d for d, x in enumerate(index) if x is self._heads and whole.shape[d] == x.numel()]
        others = [x for d, x in enumerate(index) if d not in dims]
        shapes = [x.shape for x in others if isinstance(x, Tensor)]
        if len(dims) != 1 or any(len(shape) > 1 and shape[1] > 1 for shape in shapes):
            return whole[tuple(index)]
        made = whole.movedim(dims[0], 0)[(slice(None), *others)]
        return made.view(-1, *[1] * (5 - made.dim()), *made.shape[1:]).transpose(0, 2).squeeze(0)

    def _is_number(self, x: object) -> bool:
        single = isinstance(x, Tensor) and x.dtype is not torch.bool and (id(x) in self._varying or not x.dim())
        return single or type(x) is int

    def _refuse(self, what: str) -> NoReturn:
        raise CaptureError(
            f"{user_line()}: {self._name} of flex_attention {what}: write it with arithmetic, comparisons and "
            "torch.where, and index tensors by a number for each dimension"
        )
