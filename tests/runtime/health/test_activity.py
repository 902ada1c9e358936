"""Where a rank is, and where an error of it came up."""

from __future__ import annotations

import pytest

from autoptd.runtime.health.activity import CALLS, Position


def test_an_error_tells_where_it_broke_off_what_it_was_raised_in() -> None:
    position = Position()
    with pytest.raises(KeyError) as caught, position.collective_call("load_checkpoint"):
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
    with position.call(training):
        assert str(position.read()) == words
    assert "begin" not in str(position.read())


def train(*positions: Position) -> None:
    for position in positions:
        with position.call(True):
            pass


def test_another_call_in_place_of_a_peers_is_refused() -> None:
    first = Position()
    second = Position(peers={3: first.slots})
    train(first, second)
    with first.call(False):
        with pytest.raises(RuntimeError, match="full_state_dict of this rank met an evaluation of rank 3") as said:
            second.collective_call("full_state_dict").__enter__()
        assert "which is at begin of an evaluation after step 1" in str(said.value)


def test_a_clipping_that_a_rank_does_not_take_part_in_says_why() -> None:
    first = Position()
    second = Position(peers={3: first.slots})
    refused = pytest.raises(RuntimeError, match=r"clip_grad_norm_ of rank 3.* whose gradients were cleared")
    with first.collective_call("clip_grad_norm_"), refused:
        train(second)


@pytest.mark.parametrize("ahead", [0, 1, 10])
def test_so_it_is_when_the_peer_has_gone_on(ahead: int) -> None:
    first = Position()
    second = Position(peers={3: first.slots})
    train(first, second)
    with first.collective_call("full_state_dict"):
        pass
    train(*[first] * ahead)
    with pytest.raises(RuntimeError, match="a call in training of this rank met full_state_dict of rank 3"):
        train(second)


def test_calls_of_one_order_are_the_same_however_far_apart() -> None:
    """Those that failed too, which they do on all ranks: some are in it still when others make the next."""
    first = Position()
    second = Position(peers={3: first.slots})
    train(*[first] * 40, *[second] * 40)
    with first.collective_call("save_checkpoint"):
        with pytest.raises(KeyError), second.collective_call("save_checkpoint"):
            raise KeyError
        train(second)
    train(*[second] * 30)


def test_many_calls_are_counted() -> None:
    first = Position()
    second = Position(peers={3: first.slots})
    first.slots[CALLS] = second.slots[CALLS] = 1 << 40
    train(first, second, first, second, first, first, second)
    with first.collective_call("save_checkpoint"):
        pass
    with pytest.raises(RuntimeError, match="met save_checkpoint of rank 3"):
        train(second, second)
