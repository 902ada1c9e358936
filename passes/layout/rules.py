"""Write each operator for arguments whose batch and sequence changed places (see `layout`).

A rule takes the writer and a node, writes the operator on the new arguments, and returns that with the dimension order
of its result; None if it cannot, and then the arguments get the user's order back. A rule may call a result moved only
if it is exactly the user's value with batch and sequence exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autoptd.passes.ir.nodes import dim_place, named_dims, reduced_dims, shape_of
from autoptd.passes.layout import view_rules as views
from autoptd.passes.layout.batch_sequence import Form, broadcast, plain_dim, plain_form, size_of
from autoptd.passes.layout.view_rules import Rule, Written
from autoptd.passes.layout.writer import LayoutWriter

# Elementwise


def elementwise(m: LayoutWriter, node: fx.Node) -> Written:
    """Moved where an argument is; the others are transposed to broadcast against it, a view."""
    forms = [m.form(n) for n in node.all_input_nodes if n in m.forms]
    out = Form(broadcast(forms, shape_of(node)))
    moved = any(form.moved and views.aligned(form, out) for form in forms)
    return _write_fitted(m, node, replace(out, moved=moved)), replace(out, moved=moved)


def _write_fitted(m: LayoutWriter, node: fx.Node, out: Form) -> fx.Node:
    return m.write(
        fx.map_arg(node.args, lambda n: m.fit(n, out)), fx.map_arg(node.kwargs, lambda n: m.fit(n, out))
    )


def contiguous(m: LayoutWriter, node: fx.Node) -> Written:
    """Not written where the value lies in order already."""
    source = node.args[0]
    if m.value(source).meta["val"].is_contiguous():
        return m.value(source), m.form(source)
    return elementwise(m, node)


# Operators over the last dimensions, and others that keep the rest as it is


def over_last(m: LayoutWriter, node: fx.Node) -> Written:
    """``linear``, ``layer_norm``: the last dimensions are transformed, each row by itself."""
    source, *rest = node.args
    form = m.form(source)
    widths: Any = rest[0]
    width = len(widths) if isinstance(widths, (list, tuple)) else 1
    if any(form.holds(-back) for back in range(1, width + 1)):
        return None
    args = (m.value(source), *fx.map_arg(tuple(rest), m.restore))
    out = form.resized(-1, shape_of(node)[-1]) if width == 1 else form
    return m.write(args, fx.map_arg(node.kwargs, m.restore)), out


def addmm(m: LayoutWriter, node: fx.Node) -> Written:
    """Write bias + rows x weight: a bias of one dimension is the same for all rows."""
    bias, x, weight = node.args[:3]
    form = m.form(x)
    if form.holds(1) or len(m.form(bias).dims) > 1 or m.is_moved(weight):
        return None
    args = (m.restore(bias), m.value(x), m.restore(weight))
    return m.write(args, node.kwargs), form.resized(1, shape_of(node)[1])


def matmul(m: LayoutWriter, node: fx.Node) -> Written:
    """With a matrix a ``linear``; the product of two batches keeps the user's order, in strided views."""
    x, y = node.args[:2]
    form, other = m.form(x), m.form(y)
    if len(other.dims) == 2 and len(form.dims) >= 2 and not form.holds(-1):
        return m.write((m.value(x), m.restore(y))), form.resized(-1, shape_of(node)[-1])
    return product(m, node)


def product(m: LayoutWriter, node: fx.Node) -> Written:
    """``matmul``, ``bmm``, ``baddbmm`` of the last two arguments, in the user's order."""
    x, y = (m.form(n) for n in node.args[-2:])
    new = m.write(fx.map_arg(node.args, m.restore), node.kwargs)
    if len(x.dims) < 3 or len(y.dims) < 3:
        return new, plain_form(shape_of(node))
    lead = broadcast([Form(form.dims[:-2]) for form in (x, y)], shape_of(node)[:-2])
    return new, Form((*lead, x.dims[-2], plain_dim(shape_of(node)[-1])))


def keep(position: int) -> Rule:
    """Operators in the user's order whose result has the dimensions of one argument but for the last.

    Attention over [b, heads, s, size] reads [s, b, heads, size] in place, and fused attention writes it so too.
    """

    def rule(m: LayoutWriter, node: fx.Node) -> Written:
        own = replace(m.form(node.args[position]), moved=False)
        new = m.write(fx.map_arg(node.args, m.restore), fx.map_arg(node.kwargs, m.restore))
        return new, own.resized(-1, shape_of(node)[-1])

    return rule


def split_linear(m: LayoutWriter, node: fx.Node) -> Written:
    form = m.form(node.args[0])
    if form.holds(-1):
        return None
    count, *_, size = shape_of(node)
    new = m.write((m.value(node.args[0]), *fx.map_arg(node.args[1:], m.restore)))
    return new, replace(form, dims=(plain_dim(count), *form.dims[:-1], plain_dim(size)))


def embedding(m: LayoutWriter, node: fx.Node) -> Written:
    weight, ids, *rest = node.args
    form = m.form(ids)
    out = Form((*form.dims, plain_dim(shape_of(node)[-1])), form.moved)
    return m.write((m.restore(weight), m.value(ids), *rest), node.kwargs), out


# Reductions and losses


def reduce(m: LayoutWriter, node: fx.Node) -> Written:
    """Sums and the like over named dimensions, or all."""
    source = node.args[0]
    form = m.form(source)
    rank = len(form.dims)
    given, dims = named_dims(node), reduced_dims(node, rank)
    kept = bool(rank) and len(shape_of(node)) == rank
    halved = not form.merged and sum(map(form.holds, dims)) == 1
    placed: Any = [form.place(d) for d in dims]
    args, kwargs = node.args, dict(node.kwargs)
    if given is not None and form.moved:
        args, kwargs = views.replace_dim(
            node, dim_place(node), "dim", placed[0] if isinstance(given, int) else placed
        )
    new = m.write((m.value(source), *args[1:]), kwargs)
    if not kept:
        return new, views.settled(replace(form.without(dims), moved=form.moved and not halved))
    out = form
    for d in dims:
        out = out.replaced(d, ())
    if halved and form.pair is not None:
        new = m.permute(new, form.order, f"{node.name}_bs")
    return new, views.settled(replace(out, moved=form.moved and not halved))


def class_loss(m: LayoutWriter, node: fx.Node) -> Written:
    """Rows of logits against labels: any order, the same for both."""
    logits, target, *rest = node.args
    form = m.form(logits)
    rows = Form(form.dims[:1], form.moved)
    if not form.merged or form.holds(1) or len(form.dims) != 2 or len(m.form(target).dims) != 1:
        return None
    new = m.write(
        (m.value(logits), m.fit(target, rows), *fx.map_arg(tuple(rest), m.restore)),
        fx.map_arg(node.kwargs, m.restore),
    )
    return new, rows if shape_of(node) else Form(())


def gather(m: LayoutWriter, node: fx.Node) -> Written:
    source, dim, index = node.args[:3]
    form, dim = m.form(source), int(dim)  # type: ignore[arg-type]
    picks = m.form(index)
    same = all(a == b for d, (a, b) in enumerate(zip(form.shape, picks.shape, strict=True)) if form.holds(d))
    if form.holds(dim) or not same or not form.moved:
        return None
    out = replace(
        form,
        dims=tuple(a if size_of(a) == size_of(b) else b for a, b in zip(form.dims, picks.dims, strict=True)),
    )
    return m.write((m.value(source), form.place(dim), m.fit(index, form))), out


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(["aten.linear", "aten.layer_norm", "aten.rms_norm"], over_last),
    "aten.addmm": addmm,
    "aten.mm": matmul,
    "aten.matmul": matmul,
    **dict.fromkeys(["aten.bmm", "aten.baddbmm"], product),
    "kernels.split_linear": split_linear,
    "aten.embedding": embedding,
    "aten.scaled_dot_product_attention": keep(0),
    "kernels.scaled_softmax": keep(1),
    "kernels.dropout": elementwise,
    "aten.contiguous": contiguous,
    **dict.fromkeys(["aten.to", "aten.detach"], elementwise),
    **dict.fromkeys(["aten.view", "aten.reshape", "aten._unsafe_view"], views.reshape),
    **dict.fromkeys(["aten.flatten", "aten.unflatten"], views.reshape),
    **dict.fromkeys(["aten.transpose", "aten.swapaxes"], views.transpose),
    "aten.permute": views.permute,
    "aten.unsqueeze": views.unsqueeze,
    "aten.squeeze": views.squeeze,
    **dict.fromkeys(["aten.expand", "aten.broadcast_to"], views.expand),
    "aten.select": views.select,
    "aten.unbind": views.unbind,
    **dict.fromkeys(["aten.slice", "aten.narrow"], views.resize(1)),
    **dict.fromkeys(
        ["aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split"], views.resize(2)
    ),
    "aten.repeat_interleave": views.resize(2, default=None),
    **dict.fromkeys(["aten.cat", "aten.concat", "aten.concatenate"], views.concatenate),
    "aten.stack": views.stack,
    **dict.fromkeys(["aten.pad", "aten.constant_pad_nd"], views.pad),
    "_operator.getitem": views.getitem,
    **dict.fromkeys(
        ["aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax", "aten.cumsum"],
        views.resize(1),
    ),
    **dict.fromkeys(
        ["aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.any", "aten.all", "aten.logsumexp"], reduce
    ),
    **dict.fromkeys(["aten.var", "aten.std", "aten.norm", "aten.linalg_vector_norm"], reduce),
    **dict.fromkeys(["aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd"], class_loss),
    "aten.gather": gather,
}
