"""Values that a forward reads in Python although nothing has data: those of constants are computed."""

import operator
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only  # private, with no public twin

from autoptd.capture.source_lines import user_line
from autoptd.passes.ir.nodes import aten_name, walk
from autoptd.passes.normal_form.writer import is_mutation

# Functions that give Python a value, as branches do.
READS = {
    *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    *(torch.is_nonzero, Tensor.is_nonzero, torch.equal, Tensor.equal, torch.allclose, Tensor.allclose),
    Tensor.__format__,
}
# Operators that read values of their first argument only.
LIKE_SECOND = frozenset(["to", "type_as", "view_as", "expand_as", "reshape_as"])
MOST = 1 << 26  # elements of a constant


class KnownValues(TorchFunctionMode):
    """A mode in which a traced forward reads the values of what it makes of buffers and literals alone.

    `buffers` are the user's own, by their names in the `traced` module; `read` are the names of those that decided
    something. A run of the same forward without a trace is `given`, at each place, what the trace read there.
    """

    def __init__(self, traced: nn.Module) -> None:
        super().__init__()
        self.traced = traced
        self.buffers: dict[str, Tensor] = {}
        self.read: set[str] = set()
        self.given: defaultdict[str, deque[Any]] = defaultdict(deque)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func not in READS:
            return func(*args, **options)
        place = f"{func} {user_line()}"
        if get_proxy_mode() is None:
            return self.given[place].popleft() if self.given[place] else func(*args, **options)
        values = {id(x): self.compute(x) for x in tree_leaves((args, options)) if isinstance(x, Tensor)}
        if any(value is None for value in values.values()):
            return func(*args, **options)
        with _disable_current_modes():
            real, named = tree_map_only(Tensor, lambda x: values[id(x)], (args, options))
            self.given[place].append(result := func(*real, **named))
        return result

    def varies(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the trace is computed from the batch."""
        node, held = find_node(tensor), (*self.traced.parameters(), *self.traced.buffers())
        own = {find_node(x) for x in held}
        return node is not None and any(n.op == "placeholder" and n not in own for n in _find_sources(node))

    def compute(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a tensor of the trace; None unless it is made of buffers and literals alone."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if (wanted := find_node(tensor)) is None:
            return None
        mode: Any = get_proxy_mode()
        root, buffers = mode.tracer.root, self.traced.named_buffers()
        names = {find_node(buffer): name for name, buffer in buffers}
        values: dict[fx.Node, Any] = {}
        sources = _find_sources(wanted)
        with _disable_current_modes(), torch.no_grad():
            for node in sources:
                kept = getattr(root, str(node.target), None) if node.op == "get_attr" else None
                own = self.buffers.get(names.get(node, "")) if node.op == "placeholder" else kept
                value = _evaluate(node, values) if node.op == "call_function" else own
                if value is None or getattr(value, "is_meta", False) or isinstance(value, FakeTensor):
                    return None
                # A forward may write to it.
                values[node] = value if node.op == "call_function" else value.detach().cpu().clone()
        self.read |= {names[node] for node in sources if node in names}
        return values[wanted]  # type: ignore[no-any-return]


def find_node(tensor: Tensor) -> fx.Node | None:
    """Return the node of a tensor of the trace; None for one from elsewhere."""
    mode: Any = get_proxy_mode()
    slot: Any = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _evaluate(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return the value of a call on the `values` of its arguments, by shape alone where these are missing; or None."""
    target: Any = node.target
    val = node.meta.get("val")
    known = target is operator.getitem or (isinstance(target, OpOverload) and target.namespace == "aten")
    if not known or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return None
    large = isinstance(val, Tensor) and val.numel() > MOST
    if large or any(not isinstance(n.meta["val"], Tensor) for n in node.all_input_nodes if n not in values):
        return None

    def value_of(source: fx.Node) -> Any:
        shape = source.meta["val"]
        return values[source] if source in values else torch.empty(shape.shape, dtype=shape.dtype)

    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    value = target(*args, **kwargs)
    alike = not isinstance(val, Tensor) or (value.dtype, value.shape) == (val.dtype, val.shape)
    return value if alike else None


def _find_sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that the value of `node` depends on, in order: also those that write to one of these."""
    found = set(walk([node], _read_by))
    writes = [n for n in node.graph.nodes if is_mutation(n.target)]
    while True:
        held = set().union(*map(find_memory, found))
        more = [n for n in writes if n not in found and held & set().union(*map(find_memory, n.all_input_nodes))]
        if not more:
            return sorted(found)
        found |= set(walk(more, _read_by))


def _read_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments of which `node` reads more than the shape and dtype."""
    name = aten_name(node.target)
    made = name.startswith("new_") or name.endswith("_like")
    yield from node.all_input_nodes[int(made) : 1 if name in LIKE_SECOND else None]


def find_memory(node: fx.Node) -> set[int]:
    """Return what tells the memory of a value, which its views share, from that of others."""
    return {x.untyped_storage()._cdata for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)}
