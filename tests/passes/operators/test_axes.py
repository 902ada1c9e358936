"""Axes: what unifying, viewing and slicing say about each other."""

from __future__ import annotations

from autoptd.passes.operators import axes as ax
from autoptd.passes.operators.axes import Axis


def sizes(axes: list[Axis] | None) -> list[int]:
    assert axes is not None
    return [ax.find(a).size for a in axes]


def test_a_refinement_met_anywhere_holds_everywhere() -> None:
    hidden, other = Axis(768), Axis(768)
    ax.unify(hidden, other)
    assert sizes(ax.regroup([other], [12, 64])) == [12, 64]
    assert repr(hidden) == "(12*64)"


def test_a_view_merges_and_splits_across_dimensions() -> None:
    batch, length, width = Axis(2), Axis(16), Axis(48)
    merged, heads, size = ax.regroup([batch, length, width], [32, 6, 8]) or []
    assert [ax.find(f) for f in ax.factors(merged)] == [ax.find(batch), ax.find(length)]
    back = ax.regroup([merged, heads, size], [2, 16, 48]) or []
    assert ax.find(back[0]) is ax.find(batch)
    assert ax.factors(back[2]) == [ax.find(heads), ax.find(size)]


def test_dimensions_of_size_one_come_and_go() -> None:
    width = Axis(8)
    grouped = ax.regroup([Axis(1), width], [1, 1, 8, 1]) or []
    assert sizes(grouped) == [1, 1, 8, 1]
    assert ax.find(grouped[2]) is ax.find(width)


def test_joined_rows_are_the_length_beside_a_batch_of_one() -> None:
    batch, length = Axis(1), Axis(16)
    batch.kept = True
    rows, joined = ax.product([batch, length]), Axis(16, "sum", (Axis(8), Axis(8)))
    ax.unify(joined, rows)
    assert ax.factors(rows) == [batch, joined]


def test_a_view_that_cuts_across_factors_is_none() -> None:
    assert ax.regroup([Axis(6), Axis(4)], [4, 6]) is None


def test_products_line_up_by_their_common_factors() -> None:
    first, second = Axis(24), Axis(24)
    assert sizes(ax.regroup([first], [2, 12])) == [2, 12]
    assert sizes(ax.regroup([second], [4, 6])) == [4, 6]
    ax.unify(first, second)
    assert [f.size for f in ax.factors(first)] == [f.size for f in ax.factors(second)] == [2, 2, 6]
    assert not any(leaf.blocked for leaf in ax.leaves(first))


def test_products_that_do_not_nest_are_blocked_and_say_so() -> None:
    first, second = Axis(6), Axis(6)
    ax.regroup([first], [2, 3])
    ax.regroup([second], [3, 2])
    ax.unify(first, second)
    assert all("do not nest" in leaf.blocked for leaf in [*ax.leaves(first), *ax.leaves(second)])


def test_slices_make_segments_that_add_up() -> None:
    packed = Axis(32)
    q, rest = ax.segment(packed, [16]) or []
    k, v = ax.segment(rest, [8]) or []
    assert repr(packed) == "(16+(8+8))"
    again = ax.segment(packed, [16, 24]) or []
    assert [ax.find(a) for a in again] == [ax.find(q), ax.find(k), ax.find(v)]


def test_a_sum_is_viewed_as_heads_when_all_segments_are_multiples() -> None:
    packed = Axis(32)
    q, k, v = ax.segment(packed, [16, 24]) or []
    heads, size = ax.regroup([packed], [4, 8]) or []
    assert repr(heads) == "(2+1+1)"
    assert [ax.factors(a)[-1] for a in (q, k, v)] == [ax.find(size)] * 3


def test_two_sums_are_cut_at_each_others_bounds() -> None:
    first, second = Axis(10), Axis(10)
    ax.segment(first, [4])
    ax.segment(second, [6])
    ax.unify(first, second)
    assert [leaf.size for leaf in ax.leaves(first)] == [4, 2, 4]
    assert [ax.find(a) for a in ax.leaves(first)] == [ax.find(a) for a in ax.leaves(second)]


def test_a_blocked_axis_blocks_what_it_is_made_of_before_and_after() -> None:
    before, after = Axis(12), Axis(12)
    parts = ax.regroup([before], [3, 4]) or []
    ax.block(before, "normalised over")
    assert all(ax.find(p).blocked == "normalised over" for p in parts)
    ax.block(after, "normalised over")
    assert all(ax.find(p).blocked for p in ax.regroup([after], [3, 4]) or [])
    ax.unify(Axis(12), after)
    assert ax.find(after).blocked
