"""The table that lesson `context` expects, and how it reads the one that ranks report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import UserError
from lab.lessons.context import expected_table, seen_table


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_node_holds_neighbouring_world_ranks(nodes: int, per_node: int) -> None:
    table = expected_table(nodes * per_node, nodes)
    assert [world for world, *_ in table] == list(range(nodes * per_node))
    assert all(world == node_rank * per_node + local for world, local, node_rank, _ in table)
    assert len({letter for *_, letter in table}) == nodes


def test_nodes_get_letters_by_first_appearance_whatever_the_order_of_rows() -> None:
    rows = [
        {"world_rank": world, "local_rank": 0, "node_rank": world, "node_id": node}
        for world, node in ((1, "n9"), (0, "n3"))
    ]
    assert seen_table(rows) == [(0, 0, 0, "A"), (1, 0, 1, "B")]


@pytest.mark.parametrize(("cpus", "share"), [(1, 0.5), (2, 1), (4, 2), (5, 2), (7, 3), (8, 4)])
def test_exactly_two_ranks_fit_on_a_node(cpus: int, share: float) -> None:
    from lab.observe.context import _share

    assert _share(cpus) == share
    assert cpus // share == 2


def test_three_cpus_cannot_be_filled_by_two_ranks() -> None:
    from lab.observe.context import _share

    with pytest.raises(UserError, match="LAB_NODE_CPUS=3"):
        _share(3)
