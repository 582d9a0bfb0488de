"""The start benchmark's arithmetic; the measuring itself is `make bench-start`."""

from __future__ import annotations

from lab.experiments.start import first_steps, table


def test_first_steps_are_found_wherever_a_lesson_keeps_its_ranks() -> None:
    document = {
        "several": {"ranks": [{"first_step_at": 12.5}, {"first_step_at": 12.0}]},
        "alone": {"ranks": [{"first_step_at": 20}], "first_step_at": None},
        "text": "first_step_at",
    }
    assert sorted(first_steps(document)) == [12.0, 12.5, 20.0]


def test_the_table_has_a_ratio_to_torchrun_where_there_is_a_first_step() -> None:
    found = {
        "runtime": "embedded",
        "cores": 2,
        "up_s": 12.34,
        "torchrun": {"what": "torchrun", "first_step_s": 4.0, "total_s": 6.0},
        "lessons": [
            {"what": "first-run", "first_step_s": 10.0, "total_s": 20.0},
            {"what": "no-training", "first_step_s": None, "total_s": 2.0},
        ],
    }
    cells = [line.split() for line in table(found)[2:]]
    assert cells == [
        ["make", "up", "12.3"],
        ["torchrun", "4.0", "1.0", "6.0"],
        ["first-run", "10.0", "2.5", "20.0"],
        ["no-training", "-", "-", "2.0"],
    ]
