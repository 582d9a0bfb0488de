"""The document's channel: whole or not at all, whatever the log did to its lines."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.channel import MARK, Receiver, frame, send

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def large(seed: int = 0) -> dict[str, Any]:
    """A document of several lines: random text does not compress."""
    numbers = random.Random(seed)
    return {"text": "".join(chr(numbers.randrange(32, 0x2FFF)) for _ in range(20_000))}


def received(lines: list[str]) -> dict[str, Any] | None:
    receiver = Receiver()
    for line in lines:
        receiver.takes(line)
    return receiver.document


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_document_comes_out_as_it_went_in(document: dict[str, Any]) -> None:
    assert received(frame(document)) == document


def test_a_large_document_is_cut_into_short_lines_that_may_come_mixed_up() -> None:
    lines = frame(large())
    assert len(lines) > 3
    assert max(len(line) for line in lines) < 4096  # a write to a pipe is whole up to here
    random.Random(1).shuffle(lines)
    assert received(lines) == large()


def test_two_documents_may_be_interleaved_and_the_last_one_complete_counts() -> None:
    one, two = frame(large(1)), frame(large(2))
    mixed = [line for pair in zip(one, two, strict=False) for line in pair]
    mixed += one[len(two) :] + two[len(one) :]
    assert received(mixed) in (large(1), large(2))
    assert received(one + two) == large(2)


def test_lines_of_others_are_left_alone_and_a_prefix_does_no_harm() -> None:
    receiver = Receiver()
    assert not receiver.takes("(RayTrainWorker pid=1) [rank 0/2] loss 0.5")
    assert not receiver.takes("")
    for line in frame({"a": 1}):
        assert receiver.takes(f"(driver pid=7) {line}")
    assert receiver.document == {"a": 1}


def test_a_repeated_line_does_no_harm() -> None:
    lines = frame(large())
    assert received([line for line in lines for _ in (1, 2)]) == large()


@pytest.mark.parametrize("torn", range(4))
def test_a_torn_line_is_noticed_and_never_shown(torn: int) -> None:
    lines = frame(large())
    cut = lines[torn][: len(lines[torn]) // 2]
    receiver = Receiver()
    for line in [*lines[:torn], cut, *lines[torn + 1 :]]:
        assert receiver.takes(line)
    assert receiver.document is None


def test_a_missing_line_gives_no_document() -> None:
    assert received(frame(large())[1:]) is None


def test_a_line_that_another_writer_ran_into_gives_no_document() -> None:
    lines = frame(large())
    lines[1] = lines[1][:100] + "(raylet) something else " + lines[1][100:]
    assert received(lines) is None


@pytest.mark.parametrize(
    "line",
    [f"{MARK} ", f"{MARK} x", f"{MARK} d 0 1 !!!!", f"{MARK} d 0 0 x", f"{MARK} d x 1 a", f"{MARK} d 5 1 a"],
)
def test_rubbish_after_the_mark_is_taken_and_gives_no_document(line: str) -> None:
    receiver = Receiver()
    assert receiver.takes(line)
    assert receiver.document is None


def test_a_second_sending_repairs_a_torn_first_one() -> None:
    lines = frame(large())
    torn = [*lines[:1], lines[1][:200], *lines[2:]]
    assert received(torn + lines) == large()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_cannot_carry_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        frame({"loss": number})


def test_send_writes_a_whole_line_a_call() -> None:
    written: list[str] = []
    send(large(), written.append)
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in written)
    assert received("".join(written).splitlines()) == large()
