"""Python values survive JSON as they were, and what would not is refused by its place."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoptd.runtime.checkpoint.error import CheckpointError
from autoptd.runtime.checkpoint.files import rank_file
from autoptd.runtime.checkpoint.record import read_rank_record
from autoptd.runtime.program.tagged_json import decode_value, encode_value

KEYS = st.one_of(st.text(max_size=4), st.integers(), st.floats(allow_nan=False), st.none())
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.just("!"), inner),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


def travel(value: Any) -> Any:
    return decode_value(json.loads(json.dumps(encode_value(value, "value"))), "value")


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_values_come_back(value: Any) -> None:
    found = travel(value)
    assert found == value
    assert repr(found) == repr(value)  # types, order, and -0.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 5e-324, 0.1, -0.0, 2**70])
def test_numbers_are_exact(value: float) -> None:
    assert repr(travel(value)) == repr(value)


def test_counters_and_single_tensors() -> None:
    found = travel({"milestones": Counter([30, 80, 80]), "lr": torch.tensor(0.1, dtype=torch.bfloat16)})
    assert found["milestones"] == Counter([30, 80, 80])
    assert type(found["milestones"]) is Counter
    assert found["lr"].dtype is torch.bfloat16
    assert torch.equal(found["lr"], torch.tensor(0.1, dtype=torch.bfloat16))
    assert travel(torch.tensor(True)).item() is True


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [1, {2}]}, r"value\['a'\]\[1\] is a builtins.set"),
        ({"w": torch.zeros(2)}, r"value\['w'\] is a torch.Tensor of shape \[2\]"),
        ([lambda: 0], r"value\[0\] is a builtins.function"),
    ],
)
def test_others_are_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        encode_value(value, "value")


@pytest.mark.parametrize(
    "text", [b"{", b"\xff", b'{"a": 1, "a": 2}', b"NaN", b"[" * 100_000, b'{"' + b"k" * 20_000 + b'": 1}', b"1" * 5000]
)
def test_bad_json_is_an_error_of_the_checkpoint(text: bytes, tmp_path: Path) -> None:
    rank_file(tmp_path, 0).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"rank_00000\.json: (?!its format)"):
        read_rank_record(tmp_path, 0)


@pytest.mark.parametrize(
    "value",
    [
        {"!": "set", "of": []},
        {"!": "float", "of": "many"},
        {"!": "dict", "of": [[1]]},
        {"!": "dict", "of": [[[1], 2]]},
        {"!": "int8", "of": 1000},
        {"!": "float32", "of": "x"},
        {"!": ["tuple"], "of": []},
        {"!": "tuple", "of": [], "more": 1},
    ],
)
def test_bad_tags_are_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match="value"):
        decode_value(value, "value")
