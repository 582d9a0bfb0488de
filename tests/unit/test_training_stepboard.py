"""What a rank says that waited in vain; the board itself is tested by lesson `uneven`."""

from __future__ import annotations

import pytest

from lab.training.stepboard import sentence, timed_out

ALL_REDUCE = "all-reduce of the gradients"


def test_a_rank_that_left_is_named_with_its_steps() -> None:
    said = sentence(0, 4, ALL_REDUCE, 20, {0: (4, None), 1: (3, 4)})
    assert said.startswith(
        "rank 0 waited 20 s in the all-reduce of the gradients of step 4 (from 0) for rank 1, which left the loop "
        "after 4 steps: "
    )


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({0: (2, None), 1: (1, None)}, "rank 1, which is in step 1"),
        ({0: (2, None), 1: (None, None)}, "rank 1, which is before its first step"),
        (
            {0: (2, None), 1: (2, None), 2: (1, 2), 3: (1, 2)},
            "rank 2, which left the loop after 2 steps and rank 3",
        ),
        ({0: (2, None), 1: (2, None)}, "the others, which did come to this step"),
        # it left later than this step: it is not the one that is missing
        ({0: (2, None), 1: (4, 5)}, "the others, which did come to this step"),
    ],
)
def test_whoever_is_missing_is_named(where: dict[int, tuple[int | None, int | None]], words: str) -> None:
    assert words in sentence(0, 2, ALL_REDUCE, 5, where)


@pytest.mark.parametrize(
    ("text", "is_limit"),
    [
        ("[unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete", True),
        ("Connection closed by peer [127.0.0.3]:1234", False),
    ],
)
def test_only_a_limit_counts_as_waiting(text: str, is_limit: bool) -> None:
    assert timed_out(RuntimeError(text)) is is_limit
