"""f joined with the linears that read it: the same numbers, and an all-reduce beside the weights' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoptd.runtime import aten, collectives
from autoptd.runtime.comm.groups import Group, Posted
from autoptd.runtime.comm.rank import Rank, thread_ranks
from autoptd.runtime.comm.threads import ThreadWorld
from autoptd.runtime.comm.timings import Measured
from autoptd.runtime.program.mesh import Mesh
from samples.benchmarks.activation_memory import SavedTensors

Form = Callable[..., Any]


def joined(rank: Rank, form: str, transposed: bool, x: Tensor, weights: Sequence[Tensor], biases: Any) -> Any:
    if form == "several":
        return collectives.copied_linears(rank, x, weights, biases, transposed)
    (weight, bias) = weights[0], biases[0]
    return collectives.copied_linear(rank, x, weight, bias, transposed)


def apart(rank: Rank, form: str, transposed: bool, x: Tensor, weights: Sequence[Tensor], biases: Any) -> Any:
    f = collectives.copy_to_tensor(rank, x)
    turned = [w.t() if transposed else w for w in weights]
    made = tuple(aten.linear(f, *pair) for pair in zip(turned, biases, strict=True))
    return made if form == "several" else made[0]


def draw(form: str, transposed: bool, bias: bool, dtype: torch.dtype = torch.float64) -> list[Any]:
    """x, weights, biases: of several linears the second has another width, and no bias."""
    torch.manual_seed(0)
    widths = [6, 4] if form == "several" else [6]
    weights = [torch.randn((5, w) if transposed else (w, 5), dtype=dtype) for w in widths]
    biases = [torch.randn(w, dtype=dtype) if bias and w == 6 else None for w in widths]
    return [torch.randn(3, 2, 5, dtype=dtype), weights, biases]


def differentiate(function: Form, rank: Rank, form: str, transposed: bool, given: list[Any]) -> list[Tensor]:
    x, weights, biases = given
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    vectors = [None if b is None else b.clone().requires_grad_() for b in biases]
    made = function(rank, form, transposed, leaves[0], leaves[1:], vectors)
    results = made if isinstance(made, tuple) else (made,)
    loss = sum(((2.0 + rank.group("tensor").index) * result.sin()).sum() for result in results)
    loss.backward()
    gradients = [leaf.grad for leaf in (*leaves, *vectors) if leaf is not None]
    return [*(result.detach() for result in results), *(g for g in gradients if g is not None)]


FORMS = [
    ("linear", False, False),
    ("linear", False, True),
    ("linear", True, True),
    ("several", False, False),
    ("several", False, True),
    ("several", True, True),
]


@pytest.mark.parametrize(("form", "transposed", "bias"), FORMS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_an_overlapped_linear_is_the_copy_and_its_linears(form: str, transposed: bool, bias: bool, tensor: int) -> None:
    """Bit for bit, where the gradient of x is no sum of several products, which are added up in another order."""
    given = draw(form, transposed, bias)

    def run(rank: Rank) -> list[list[Tensor]]:
        return [differentiate(each, rank, form, transposed, given) for each in (joined, apart)]

    world = ThreadWorld()
    for found, expected in world.run(run, thread_ranks(Mesh(tensor, 1, 1), world)):
        for one, other in zip(found, expected, strict=True):
            if form == "several":
                torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
            else:
                assert torch.equal(one, other)


@pytest.mark.parametrize(("form", "transposed", "bias"), FORMS)
def test_an_overlapped_linear_saves_what_its_linears_save(form: str, transposed: bool, bias: bool) -> None:
    rank = Rank.local(Mesh(1, 1, 1))

    def measure(function: Form) -> int:
        x, weights, biases = draw(form, transposed, bias)
        leaves = {str(i): t.requires_grad_() for i, t in enumerate((*weights, *biases)) if t is not None}
        saved = SavedTensors(leaves)
        with saved:
            function(rank, form, transposed, x.requires_grad_() * 1.0, weights, biases)
        return saved.nbytes

    assert measure(joined) == measure(apart) > 0


class RecordingGroup(Group):
    """Takes down when a sum is posted and when its result is taken, and gives another tensor's values then."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(1, 0)
        self.events = events

    def post_all_reduce(self, tensors: Sequence[Tensor]) -> Posted[list[Tensor]]:
        (x,) = tensors
        assert x.is_contiguous()
        self.events.append("post")

        def wait() -> list[Tensor]:
            self.events.append("wait")
            return [x.mul_(10)]

        return Posted(wait)


class Products(TorchDispatchMode):
    """Takes down every product and sum."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm_.default, aten.addmm.out, aten.mm.out, aten.sum.dim_IntList):
            self.events.append(str(func).split(".")[1].rstrip("_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("form", "expected"),
    [("linear", ["mm", "post", "mm", "sum", "wait"]), ("several", ["mm", "addmm", "post", "mm", "mm", "sum", "wait"])],
)
def test_the_sum_runs_beside_the_gradients_of_weights(form: str, expected: list[str]) -> None:
    events: list[str] = []
    rank = Rank.local(Mesh(1, 1, 1))
    rank.groups["tensor"] = RecordingGroup(events)
    rank.measured = Measured(rank.device)
    x, weights, biases = draw(form, False, True)
    leaves: list[Tensor] = [t.requires_grad_() for t in (x, *weights, *biases) if t is not None]
    made = joined(rank, form, False, x, weights, biases)
    with Products(events):
        _total(made).backward()
    assert events == expected
    assert all(leaf.grad is not None for leaf in leaves)
    assert x.grad is not None
    plain = x.grad.clone()
    x.grad = None
    _total(apart(Rank.local(Mesh(1, 1, 1)), form, False, x, weights, biases)).backward()
    assert x.grad is not None
    torch.testing.assert_close(plain, 10 * x.grad)  # what was waited for is what is handed on
    # And the trace has both, from the post on.
    sums, meanwhile = rank.measured.spans
    assert [sums[0], meanwhile[0]] == ["tensor", "products"]
    assert sums[3] == meanwhile[3] <= meanwhile[4] <= sums[4]


def _results(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _total(made: Any) -> Tensor:
    return torch.stack([result.sum() for result in _results(made)]).sum()


def test_only_what_is_asked_for_is_computed_and_saved() -> None:
    events: list[str] = []
    rank = Rank.local(Mesh(1, 1, 1))
    rank.groups["tensor"] = RecordingGroup(events)
    x, (weight,), (bias,) = draw("linear", False, True)
    saved = SavedTensors({})
    with saved:
        frozen = collectives.copied_linear(rank, x.requires_grad_(), weight, bias)
    assert saved.nbytes == weight.nbytes  # as a linear does
    with Products(events):
        frozen.sum().backward()
    assert events == ["mm", "post", "wait"]
    events.clear()
    with Products(events):  # nothing to sum
        collectives.copied_linear(rank, x.detach(), weight.requires_grad_(), bias).sum().backward()
    assert events == ["mm"]
    assert weight.grad is not None


GATHERED: list[Any] = [True, "in pieces"]


@pytest.mark.parametrize("form", ["one", "several"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gathered", GATHERED)
@pytest.mark.parametrize("tensor", [2, 3])
def test_a_gathered_input_is_kept_by_part(form: str, transposed: bool, gathered: Any, tensor: int) -> None:
    """The numbers of a gather and its linears; of x each rank keeps its own rows."""

    def gather(rank: Rank, form: str, transposed: bool, x: Tensor, weights: Sequence[Tensor], biases: Any) -> Any:
        whole = collectives.gather_to_tensor(rank, x, 0)
        turned = [w.t() if transposed else w for w in weights]
        made = tuple(aten.linear(whole, *pair) for pair in zip(turned, biases, strict=True))
        return made if form == "several" else made[0]

    def join(rank: Rank, form: str, transposed: bool, x: Tensor, weights: Sequence[Tensor], biases: Any) -> Any:
        options: dict[str, Any] = {"transposed": transposed, "gathered": gathered}
        if form == "several":
            return collectives.copied_linears(rank, x, weights, biases, **options)
        saved = SavedTensors({str(index): weight for index, weight in enumerate(weights)})
        with saved:
            made = collectives.copied_linear(rank, x, weights[0], biases[0], **options)
        assert saved.nbytes <= x.untyped_storage().nbytes()
        return made

    given, world = draw(form, transposed, bias=True), ThreadWorld()

    def work(rank: Rank) -> list[list[Tensor]]:
        own = [given[0][rank.group("tensor").index].unsqueeze(0), *given[1:]]
        return [differentiate(function, rank, form, transposed, own) for function in (join, gather)]

    for joined_up, composed in world.run(work, thread_ranks(Mesh(tensor, 1, 1), world)):
        for x, y in zip(joined_up, composed, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_a_scattered_linear_is_the_linear_and_its_scatter(transposed: bool, tensor: int) -> None:
    """Of as many rows as there are ranks, each with its own part of what is summed over."""
    _, (weight,), _ = draw("linear", transposed, False)

    def make(rank: Rank, form: str, transposed: bool, x: Tensor, weights: Sequence[Tensor], biases: Any) -> Any:
        return collectives.scattered_linear(rank, x, weights[0], transposed)

    def compose(rank: Rank, form: str, transposed: bool, x: Tensor, weights: Sequence[Tensor], biases: Any) -> Any:
        return collectives.reduce_scatter(rank, aten.linear(x, weights[0].t() if transposed else weights[0]), 0)

    def work(rank: Rank) -> list[list[Tensor]]:
        own = torch.Generator().manual_seed(rank.group("tensor").index)
        x = torch.randn(2 * tensor, 2, 5, dtype=torch.float64, generator=own)
        return [differentiate(function, rank, "linear", transposed, [x, [weight], []]) for function in (make, compose)]

    world = ThreadWorld()
    for made, composed in world.run(work, thread_ranks(Mesh(tensor, 1, 1), world)):
        for one, other in zip(made, composed, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


class ShiftingGroup(Group):
    """The second of two ranks, which takes down when a message is posted and when it is waited for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(2, 1)
        self.events = events

    def post_shift(self, x: Tensor, into: Tensor) -> Posted[Tensor]:
        assert x.is_contiguous()
        self.events.append("post")
        return Posted(lambda: self.events.append("wait") or into.zero_())  # type: ignore[func-returns-value]


def test_messages_are_on_their_way_while_pieces_are_multiplied() -> None:
    events: list[str] = []
    rank = Rank.local(Mesh(2, 1, 1))
    rank.groups["tensor"] = ShiftingGroup(events)
    x, (weight,), _ = draw("linear", False, False)
    x, weight = x[:2].requires_grad_(), weight.requires_grad_()
    with Products(events):
        collectives.copied_linear(rank, x, weight, gathered="in pieces")
        assert events == ["post", "mm", "wait", "mm"]
        events.clear()
        made = collectives.scattered_linear(rank, x, weight)
        assert events == ["mm", "post", "mm", "wait"]
        events.clear()
        made.sum().backward()
        assert events == ["post", "mm", "wait", "mm", "mm"]


def test_times_of_pieces_are_measured() -> None:
    """Of each message, and of the product beside it, which hides so much of it."""
    rank = Rank.local(Mesh(2, 1, 1))
    rank.groups["tensor"], rank.measured = ShiftingGroup([]), Measured(torch.device("cpu"))
    x, (weight,), _ = draw("linear", False, False)
    leaves = x[:2].requires_grad_(), weight.requires_grad_()
    collectives.copied_linear(rank, *leaves, gathered="in pieces")
    collectives.scattered_linear(rank, *leaves).sum().backward()
    spans = rank.measured.read()[2]
    assert [kind for kind, *_ in spans] == ["tensor", "products"] * 3
    for (*_, begin, arrived), (*_, same, computed) in zip(spans[::2], spans[1::2], strict=True):
        assert begin == same < computed <= arrived


def test_rows_that_the_ranks_do_not_divide_are_refused() -> None:
    x, (weight,), _ = draw("linear", False, False)
    with pytest.raises(RuntimeError, match="unflatten"):
        collectives.scattered_linear(Rank.local(Mesh(2, 1, 1)), x.to("meta"), weight.to("meta"))


def test_gradients_in_half_precision_reach_the_leaf() -> None:
    rank = Rank.local(Mesh(1, 1, 1))
    x, (weight,), (bias,) = draw("linear", False, True, torch.bfloat16)
    seen: list[torch.dtype] = []
    leaves = [weight.requires_grad_(), bias.requires_grad_()]
    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.dtype))
    collectives.copied_linear(rank, x.requires_grad_(), *leaves).sum().backward()
    assert seen == [torch.bfloat16] * 2


def test_an_overlapped_linear_cannot_be_differentiated_twice() -> None:
    rank = Rank.local(Mesh(1, 1, 1))
    x, (weight,), _ = draw("linear", False, False)
    made = collectives.copied_linear(rank, x.requires_grad_(), weight.requires_grad_()).square().sum()
    (gradient,) = torch.autograd.grad(made, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_shapes_on_meta() -> None:
    rank = Rank.local(Mesh(4, 1, 1))
    for form, transposed, bias in FORMS:
        x, weights, biases = draw(form, transposed, bias)
        meta: Any = [[b if b is None else b.to("meta") for b in each] for each in (weights, biases)]
        found = _results(joined(rank, form, transposed, x.to("meta").requires_grad_(), *meta))
        expected = _results(apart(rank, form, transposed, x.to("meta"), *meta))
        assert [t.shape for t in found] == [t.shape for t in expected]


def test_biases_that_are_not_the_weights_are_refused() -> None:
    rank = Rank.local(Mesh(2, 1, 1))
    x, weights, biases = draw("several", False, True)
    cases: tuple[tuple[Any, Any], ...] = (weights, biases[:1]), ([], [])
    for given in cases:
        with pytest.raises(ValueError, match=r"copied_linears was given .* expected a bias or None for each"):
            collectives.copied_linears(rank, x, *given)
