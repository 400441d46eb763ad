"""Texts about children."""

import pytest

from envfleet.pool.process.child_reports import listed


@pytest.mark.parametrize(
    ("num_envs", "text"),
    [
        (1, "envs 0"),
        (10, "envs 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        (13, "envs 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 3 more"),
    ],
)
def test_the_first_ten_envs_are_listed(num_envs, text):
    assert listed(range(num_envs)) == text
