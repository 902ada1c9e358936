"""Buckets of gradients that are posted while the backward that completes them still runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoptd.runtime.comm.groups import Group
from autoptd.runtime.optimizer.gradient_buckets import BucketWatch
from autoptd.runtime.optimizer.gradient_memory import Bucket, StageLeaves, lay_out

NAMES = ("first", "second", "third")
REPLICAS = dict.fromkeys((*NAMES, "weight", "a", "b", "tied"), Group())


def watched(events: list[str]) -> tuple[dict[str, Tensor], list[Bucket], BucketWatch]:
    """A watch over a bucket for each leaf, and the events of the leaves and buckets."""
    leaves = {name: torch.ones(2, dtype=torch.float64, requires_grad=True) for name in NAMES}
    own = StageLeaves({0: leaves})
    memory = lay_out(own, {0: NAMES}, [(name,) for name in NAMES], (), REPLICAS)
    memory.attach(own)
    buckets = list(memory)
    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    return leaves, buckets, BucketWatch(leaves, [bucket.views for bucket in buckets], lambda _: None)


def run(leaves: dict[str, Tensor], watch: BucketWatch, events: list[str], order: tuple[str, ...] = NAMES) -> None:
    """A backward that comes to the leaves against `order`."""
    x = torch.ones(2, dtype=torch.float64)
    for name in order:
        x = torch.tanh(x * leaves[name])
    events.clear()
    with watch.report(lambda number: events.append(f"bucket {number}")):
        x.sum().backward()


def test_a_bucket_is_posted_as_soon_as_it_and_those_before_it_are_complete() -> None:
    events: list[str] = []
    leaves, _, watch = watched(events)
    run(leaves, watch, events)
    assert events == ["third", "bucket 0", "second", "bucket 1", "first", "bucket 2"]


def test_it_waits_for_the_buckets_before_it() -> None:
    events: list[str] = []
    leaves, _, watch = watched(events)
    order = ("second", "third", "first")  # the backward ends with the second, whose bucket is number 1
    run(leaves, watch, events, order)
    assert events == ["first", "third", "bucket 0", "second", "bucket 1", "bucket 2"]


def test_buckets_of_leaves_that_the_loss_does_not_reach_come_at_the_end() -> None:
    events: list[str] = []
    leaves, _, watch = watched(events)
    run(leaves, watch, events, ("first", "third"))
    assert events == ["third", "bucket 0", "first", "bucket 1", "bucket 2"]


def test_a_backward_that_breaks_off_posts_no_more() -> None:
    events: list[str] = []
    leaves, _, watch = watched(events)
    handle = leaves["second"].register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(leaves, watch, events)
    assert events == ["third", "bucket 0"]
    handle.remove()
    run(leaves, watch, events)
    assert events == ["third", "bucket 0", "second", "bucket 1", "first", "bucket 2"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_to_float32_and_the_leaf_keeps_none(dtype: torch.dtype) -> None:
    leaf = torch.ones(3, dtype=dtype, requires_grad=True)
    leaves = StageLeaves({0: {"weight": leaf}})
    memory = lay_out(leaves, {0: ("weight",)}, (), (), REPLICAS)
    memory.attach(leaves)
    for _ in range(300):
        (leaf * 1.0).sum().backward()
    assert leaf.grad is None
    assert next(iter(memory)).views["weight"].tolist() == [300.0] * 3


def test_buckets_are_of_one_dtype_and_about_their_size_and_partial_sums_come_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoptd.runtime.optimizer.gradient_buckets.BUCKET_BYTES", 32)
    dtypes = {"a": torch.float64, "b": torch.bfloat16, "c": torch.float32, "d": torch.float64, "e": torch.float32}
    leaves = StageLeaves({0: {name: torch.ones(3, dtype=d, requires_grad=True) for name, d in dtypes.items()}})
    memory = lay_out(leaves, {0: tuple(dtypes)}, [("c",)], ("d",), dict.fromkeys(dtypes, Group(4)))
    assert [(tuple(b.views), b.shard, b.flat.dtype, len(b.flat)) for b in memory] == [
        (("c",), 0, torch.float32, 4),
        (("e", "b"), None, torch.float32, 8),
        (("a",), None, torch.float64, 4),
        (("d",), None, torch.float64, 4),
    ]


def test_frozen_leaves_have_no_memory() -> None:
    leaves = StageLeaves({0: {"a": torch.ones(2), "b": torch.ones(2, requires_grad=True)}})
    assert [tuple(bucket.views) for bucket in lay_out(leaves, {0: ("a", "b"), 1: ("a",)}, (), (), REPLICAS)] == [("b",)]


def test_a_parameter_of_two_stages_has_a_sum_for_each() -> None:
    leaves = StageLeaves({k: {"tied": torch.ones(2, requires_grad=True)} for k in (0, 3)})
    memory = lay_out(leaves, {3: ("tied",)}, (), (), REPLICAS)
    memory.attach(leaves)
    for stage, factor in ((0, 2.0), (3, 5.0)):
        (leaves.by_stage[stage]["tied"] * factor).sum().backward()
    assert [each.tolist() for each in memory.sums(next(iter(memory)))["tied"]] == [[2.0, 2.0], [5.0, 5.0]]
    memory.begin(())
    assert [each.tolist() for each in memory.sums(next(iter(memory)))["tied"]] == [[0.0, 0.0]] * 2
