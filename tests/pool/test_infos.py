"""Infos are joined as Gymnasium joins them."""

import numpy as np
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st

from envfleet.pool.infos import join_infos
from envfleet.testing.programs import require_equal

# One kind of value for each key: where rows differ in kind, Gymnasium loses data, and we do not.
VALUES = {
    "int": st.integers(-(2**40), 2**40),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "numpy": st.floats(0, 1, width=32).map(np.float32),
    "array": st.lists(st.integers(0, 9), min_size=2, max_size=2).map(lambda items: np.array(items, np.int16)),
    "text": st.sampled_from(["", "a", "bc"]),
    "list": st.lists(st.integers(), max_size=2),
    "none": st.none(),
}
INFOS = st.fixed_dictionaries({}, optional={**VALUES, "inner": st.fixed_dictionaries({}, optional=VALUES)})


@given(st.dictionaries(st.integers(0, 4), INFOS, max_size=5))
def test_the_result_is_gymnasiums(infos):
    vector_env = VectorEnv()
    vector_env.num_envs = 5
    expected = {}
    for row, info in infos.items():
        expected = vector_env._add_info(expected, info, row)
    require_equal(join_infos(infos, 5), expected)


def test_nothing_is_lost_where_rows_differ():
    joined = join_infos({0: {"a": 1}, 1: {"a": 2.5}}, 3)
    assert joined["a"].tolist() == [1.0, 2.5, 0.0]
    joined = join_infos({0: {"a": 1}, 2: {"a": "text"}}, 3)
    assert joined["a"].tolist() == [1, None, "text"] and joined["_a"].tolist() == [True, False, True]
    joined = join_infos({0: {"a": np.zeros(2)}, 1: {"a": np.zeros(3)}}, 2)
    assert joined["a"].dtype == object and joined["a"][1].shape == (3,)
    joined = join_infos({0: {"a": {"b": 1}}, 1: {"a": 4}}, 2)
    assert joined["a"].tolist() == [{"b": 1}, 4]
    joined = join_infos({0: {"a": 2**80}}, 1)
    assert joined["a"][0] == 2**80
    joined = join_infos({0: {"a": True}, 1: {"a": 3}}, 2)
    assert joined["a"].tolist() == [True, 3]
