"""Write views, cuts and joins for arguments whose batch and sequence changed places (see `rules`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import argument, shape_of
from autoptd.passes.layout.batch_sequence import Form, broadcast, plain_dim, regroup
from autoptd.passes.layout.writer import LayoutWriter
from autoptd.runtime import aten

Written = tuple[fx.Node, Any] | None  # the new node, and its form (a tuple of them for several results)
Rule = Callable[[LayoutWriter, fx.Node], Written]


def aligned(form: Form, out: Form) -> bool:
    """Return whether the argument's pair is the result's."""
    if form.pair is None or out.pair is None:
        return False
    behind = len(out.dims) - len(form.dims)
    return (form.pair[0] + behind, form.pair[1]) == out.pair


def reshape(m: LayoutWriter, node: fx.Node) -> Written:
    """Write the same reshape of the moved value if batch and sequence stay neighbours."""
    source, shape = node.args[0], list(shape_of(node))
    form = m.form(source)
    out = Form(regroup(form.dims, shape))
    if form.moved and form.pair is not None and out.pair is not None:
        before = prod(form.shape[: form.pair[0]]), form.rows
        if before == (prod(shape[: out.pair[0]]), out.rows):
            out = replace(out, moved=True)
            return m.write((m.value(source), out.arrange(shape)), target=aten.reshape.default), out
    return m.undo(node, (source, shape), aten.reshape.default), out


def _permuted(m: LayoutWriter, node: fx.Node, dims: Sequence[int]) -> Written:
    """Dimension d of the result is dimension ``dims[d]`` of the argument; moved where that may be."""
    source = node.args[0]
    form = m.form(source)
    out = Form(tuple(form.dims[d] for d in dims))
    if out.pair is not None and (form.moved or not out.pair[1]):
        out = replace(out, moved=True)
    order = [form.place(dims[d]) for d in out.order]
    return m.permute(m.value(source), order, node.name), out


def transpose(m: LayoutWriter, node: fx.Node) -> Written:
    order = list(range(len(shape_of(node))))
    first, second = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    order[first], order[second] = order[second], order[first]
    return _permuted(m, node, order)


def permute(m: LayoutWriter, node: fx.Node) -> Written:
    dims: Any = node.args[1]
    return _permuted(m, node, [int(d) % len(dims) for d in dims])


def unsqueeze(m: LayoutWriter, node: fx.Node) -> Written:
    source, rank = node.args[0], len(shape_of(node))
    form, dim = m.form(source), int(node.args[1]) % rank  # type: ignore[arg-type]
    out = replace(form, dims=(*form.dims[:dim], (), *form.dims[dim:]))
    if form.moved and out.pair is None:  # it comes between batch and sequence
        return m.undo(node, (source, dim)), replace(out, moved=False)
    return m.write((m.value(source), dim)), out


def squeeze(m: LayoutWriter, node: fx.Node) -> Written:
    source = node.args[0]
    form = m.form(source)
    given = argument(node, 1, "dim", list(range(len(form.dims))))
    named = [d % len(form.dims) for d in ([given] if isinstance(given, int) else given)]
    gone = [d for d in named if form.shape[d] == 1]
    if any(map(form.holds, gone)):
        return None
    out = form.without(gone)
    return m.write((m.value(source), out.arrange(out.shape)), target=aten.reshape.default), out


def expand(m: LayoutWriter, node: fx.Node) -> Written:
    source, shape = node.args[0], list(shape_of(node))
    form = m.form(source)
    out = Form(broadcast([form], shape))
    if form.moved and aligned(form, out):
        out = replace(out, moved=True)
    return m.write((m.fit(source, out), out.arrange(shape))), out


def select(m: LayoutWriter, node: fx.Node) -> Written:
    """One index of a dimension: of batch or sequence, the other is left, in the user's order."""
    source, dim, index = node.args
    form, dim = m.form(source), int(dim) % len(m.form(source).dims)  # type: ignore[arg-type]
    if form.merged and form.holds(dim):
        return None
    out = replace(form.without([dim]), moved=form.moved and not form.holds(dim))
    return m.write((m.value(source), form.place(dim), index)), settled(out)


def settled(form: Form) -> Form:
    return form if form.pair is not None else replace(form, moved=False)


def unbind(m: LayoutWriter, node: fx.Node) -> Written:
    source = node.args[0]
    form = m.form(source)
    dim = int(argument(node, 1, "dim", 0)) % len(form.dims)
    if form.merged and form.holds(dim):
        return None
    out = settled(replace(form.without([dim]), moved=form.moved and not form.holds(dim)))
    return m.write((m.value(source), form.place(dim))), (out,) * len(node.meta["val"])


def resize(position: int, name: str = "dim", default: int | None = 0) -> Rule:
    """Operators that cut or stretch one dimension, which their argument `position` names: ``slice``."""

    def rule(m: LayoutWriter, node: fx.Node) -> Written:
        source = node.args[0]
        form, dim = m.form(source), argument(node, position, name, default)
        if not isinstance(dim, int) or (form.merged and form.holds(dim)):
            return None
        args, kwargs = replace_dim(node, position, name, form.place(dim) if form.moved else dim)
        new = m.write((m.value(source), *fx.map_arg(args[1:], m.restore)), fx.map_arg(kwargs, m.restore))
        val = node.meta["val"]
        if isinstance(val, (tuple, list)):
            return new, tuple(form.resized(dim, v.shape[dim]) for v in val)
        return new, form.resized(dim, val.shape[dim])

    return rule


def replace_dim(node: fx.Node, position: int, name: str, dim: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's arguments with another dimension."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if position < len(args):
        args[position] = dim
    else:
        kwargs[name] = dim
    return tuple(args), kwargs


def concatenate(m: LayoutWriter, node: fx.Node) -> Written:
    return _joined(m, node, stacks=False)


def stack(m: LayoutWriter, node: fx.Node) -> Written:
    return _joined(m, node, stacks=True)


def _joined(m: LayoutWriter, node: fx.Node, stacks: bool) -> Written:
    sources: Any = node.args[0]
    forms = [m.form(n) for n in sources]
    shape = list(shape_of(node))
    dim = int(argument(node, 1, "dim", 0)) % len(shape)
    if len({len(form.dims) for form in forms}) > 1:
        return None  # cat takes an empty list for a tensor of any rank
    one = shape[:dim] + shape[dim + 1 :] if stacks else shape
    known = Form(broadcast(forms, one))
    moving = [form for form in forms if form.moved]
    if not stacks and moving:  # of the joined dimension, sizes differ
        known = known.replaced(dim, moving[0].resized(dim, shape[dim]).dims[dim])
    out = (
        replace(known, dims=(*known.dims[:dim], plain_dim(shape[dim]), *known.dims[dim:]))
        if stacks
        else known
    )
    fits = all(form.pair == known.pair for form in moving)
    if moving and (
        not fits or known.pair is None or out.pair is None or (known.pair[1] and dim == out.pair[0])
    ):
        return None
    known, out = replace(known, moved=bool(moving)), replace(out, moved=bool(moving))
    args, kwargs = replace_dim(node, 1, "dim", out.place(dim))
    return m.write(([m.fit(n, known) for n in sources], *args[1:]), kwargs), out


def pad(m: LayoutWriter, node: fx.Node) -> Written:
    """Padding is given from the last dimension backwards, a pair of numbers each."""
    source, given = node.args[:2]
    form, numbers = m.form(source), [int(x) for x in given]  # type: ignore[union-attr, arg-type]
    rank = len(form.dims)
    mode = argument(node, 2, "mode", "constant")
    pairs = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
    pairs = (pairs + [[0, 0]] * (rank - len(pairs)))[::-1]
    touched = [d for d in range(rank) if any(pairs[d])]
    if (isinstance(mode, str) and mode != "constant") or (form.merged and any(map(form.holds, touched))):
        return None
    out = form
    for d in touched:
        out = out.resized(d, shape_of(node)[d])
    flat = [n for d in reversed(form.order) for n in pairs[d]] if form.moved else numbers
    return m.write((m.value(source), flat, *node.args[2:]), node.kwargs), out


def getitem(m: LayoutWriter, node: fx.Node) -> Written:
    source, index = node.args
    return m.write((m.value(source), index)), m.forms[source][index]  # type: ignore[index]
