"""Where a rank is, and where an error of it came up."""

from __future__ import annotations

import pytest

from autoptd.runtime.position import Position


def test_an_error_tells_where_it_broke_off_what_it_was_raised_in() -> None:
    position = Position()
    with pytest.raises(KeyError) as caught, position.duty("load_checkpoint"):
        raise KeyError
    assert str(position.place_of(caught.value)) == "load_checkpoint after step 0, which every rank must call"
    with pytest.raises(ValueError, match="of it") as outer:
        raise ValueError("of it") from caught.value
    assert position.place_of(outer.value) == position.place_of(caught.value)
    assert str(position.place_of(ValueError("another"))) == "the time before its first step"


@pytest.mark.parametrize(
    ("training", "words"), [(True, "begin of step 1"), (False, "begin of an evaluation after step 0")]
)
def test_a_call_is_of_a_step_or_of_an_evaluation(training: bool, words: str) -> None:
    position = Position()
    with position.call(training, 0):
        assert str(position.read()) == words
    assert "begin" not in str(position.read())


def test_another_call_in_place_of_a_peers_is_refused() -> None:
    """By count: one that is a call ahead or behind has yet to make this one, or has made it."""
    first = Position()
    second = Position(peers={0: first.slots})
    for position in (first, second):
        with position.call(True, 0):
            pass
    with first.call(False, 0):
        refusal = pytest.raises(RuntimeError, match="rank 0 at begin of an evaluation")
        with refusal as refused, second.duty("full_state_dict"):
            pass
        with second.call(True, 0):  # which `first` is behind of
            pass
    assert "this rank is at full_state_dict after step 1" in str(refused.value)
