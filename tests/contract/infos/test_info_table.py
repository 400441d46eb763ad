"""InfoTable: infos of many envs in the form that Gymnasium's vector envs give them."""

import numpy as np
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st

from envfleet.contract.infos.table import InfoTable, error_info
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


def require_same(got: InfoTable, expected: InfoTable) -> None:
    """Equal bits, and equal order of keys."""
    assert got.num_rows == expected.num_rows
    assert list(got.columns) == list(expected.columns)
    require_equal(got.columns, expected.columns)


def _gymnasiums(infos, num_rows):
    vector_env = VectorEnv()
    vector_env.num_envs = num_rows
    joined = {}
    for row, info in infos.items():
        joined = vector_env._add_info(joined, info, row)
    return joined


@given(st.dictionaries(st.integers(0, 4), INFOS, max_size=5))
def test_the_result_is_gymnasiums(infos):
    require_equal(InfoTable.from_rows(infos, 5).columns, _gymnasiums(infos, 5))


def test_nothing_is_lost_where_rows_differ():
    joined = InfoTable.from_rows({0: {"a": 1}, 1: {"a": 2.5}}, 3).columns
    assert joined["a"].tolist() == [1.0, 2.5, 0.0]
    joined = InfoTable.from_rows({0: {"a": 1}, 2: {"a": "text"}}, 3).columns
    assert joined["a"].tolist() == [1, None, "text"] and joined["_a"].tolist() == [True, False, True]
    joined = InfoTable.from_rows({0: {"a": np.zeros(2)}, 1: {"a": np.zeros(3)}}, 2).columns
    assert joined["a"].dtype == object and joined["a"][1].shape == (3,)
    joined = InfoTable.from_rows({0: {"a": {"b": 1}}, 1: {"a": 4}}, 2).columns
    assert joined["a"].tolist() == [{"b": 1}, 4]
    joined = InfoTable.from_rows({0: {"a": 2**80}}, 1).columns
    assert joined["a"][0] == 2**80
    joined = InfoTable.from_rows({0: {"a": True}, 1: {"a": 3}}, 2).columns
    assert joined["a"].tolist() == [True, 3]


@given(st.data())
def test_joining_and_selecting_are_inverse(data):
    """Cut a table anywhere: its parts, joined, are the table again, which is Gymnasium's; and each row is its info."""
    infos = data.draw(st.dictionaries(st.integers(0, 5), INFOS, max_size=6))
    table = InfoTable.from_rows(infos, 6)
    cuts = sorted(data.draw(st.sets(st.integers(1, 5))))
    parts = [table.select(rows) for rows in np.split(np.arange(6), cuts)]
    assert [part.num_rows for part in parts] == np.diff([0, *cuts, 6]).tolist()
    joined = InfoTable.join(parts)
    require_same(joined, table)
    require_equal(joined.columns, _gymnasiums(infos, 6))
    for row in range(6):
        require_equal(joined.row(row), infos.get(row, {}))
        require_equal(joined.rows()[row], infos.get(row, {}))


@given(st.data())
def test_selecting_from_joined_tables_gives_back_each(data):
    given_infos = data.draw(st.lists(st.dictionaries(st.integers(0, 2), INFOS, max_size=3), min_size=1, max_size=3))
    tables = [InfoTable.from_rows(infos, 3) for infos in given_infos]
    joined = InfoTable.join(tables)
    for index, (table, infos) in enumerate(zip(tables, given_infos, strict=True)):
        rows = np.arange(3) + 3 * index
        for row in range(3):
            require_equal(joined.row(int(rows[row])), infos.get(row, {}))
        if all(infos.get(row) for row in range(3)):
            # Keys that only other tables have are left out again when the rows are put elsewhere.
            require_equal(InfoTable(3).put_rows(np.arange(3), joined.select(rows)).columns, table.columns)


@given(st.data())
def test_rows_that_are_put_are_as_if_they_had_been_there(data):
    infos = {row: data.draw(INFOS) for row in range(5)}
    rows = np.array(data.draw(st.lists(st.integers(0, 4), unique=True, min_size=1)))
    new = {row: data.draw(INFOS) for row in rows.tolist()}
    before = InfoTable.from_rows(infos, 5)
    kept = before.copy()
    put = before.put_rows(rows, InfoTable.from_rows(dict(enumerate(new.values())), len(rows)))
    require_equal(put.columns, InfoTable.from_rows(infos | new, 5).columns)
    require_same(before, kept)


def test_put_rows_replace_what_was_there():
    old = InfoTable.from_rows({0: {"a": 1, "gone": 2}, 1: {"a": 3}}, 2)
    put = old.put_rows(np.array([0]), InfoTable.from_rows({0: {"b": 2.5}}, 1))
    expected = {"a": np.array([0, 3]), "_a": np.array([False, True])}
    require_equal(put.columns, expected | {"b": np.array([2.5, 0.0]), "_b": np.array([True, False])})


def test_only_some_rows_have_anything():
    table = InfoTable.from_rows({0: {"a": 1, "deep": {"b": 2}}, 1: {"a": 3}}, 2)
    require_equal(table.only(np.array([1])).columns, {"a": np.array([0, 3]), "_a": np.array([False, True])})


def test_a_column_that_no_row_has_is_not_added():
    table = InfoTable(2)
    table.add("a", np.array([7, 8]), np.array([False, False]))
    assert table.columns == {}
    mask = np.array([False, True])
    table.add("a", np.array([0, 8]), mask)
    assert list(table.columns) == ["a", "_a"] and table.columns["_a"] is mask


def test_finals_are_gymnasiums():
    """As its vector envs add them after a same-step reset."""
    last = {1: np.ones(2, np.float32), 2: np.zeros(2, np.float32)}
    last_infos = {1: {"score": 3}, 2: {"score": 4, "why": "lost"}}
    infos = {row: {"final_obs": last[row], "final_info": last_infos[row], "first": True} for row in last}
    table = InfoTable.from_rows({row: {"first": True} for row in last}, 4)
    assert table.final_obs is None and table.final_infos.columns == {}
    table.add_finals(np.array([1, 2]), list(last.values()), InfoTable.from_rows(last_infos, 4))
    require_equal(table.columns, _gymnasiums(infos, 4))
    assert table.final_obs.dtype == object and table.final_obs[1] is last[1] and table.final_obs[0] is None
    require_equal(table.final_infos.row(2), {"score": 4, "why": "lost"})
    assert table.columns["_final_obs"] is not table.columns["_final_info"]


def test_final_observations_of_dict_spaces_stay_dictionaries():
    table = InfoTable(2)
    table.add_finals(np.array([1]), [{"a": np.ones(1)}])
    assert table.final_obs.tolist() == [None, {"a": np.ones(1)}]
    assert list(table.columns) == ["final_obs", "_final_obs"]


def test_errors_are_told_by_row():
    table = InfoTable(3)
    table.add_errors(np.array([0, 2]), "it broke")
    require_equal(table.columns, _gymnasiums({0: error_info("it broke"), 2: error_info("it broke")}, 3))
    assert table.columns["env_error"].tolist() == ["it broke", None, "it broke"]


def test_errors_after_a_same_step_reset_are_in_the_final_info_too():
    table = InfoTable.from_rows({row: {"first": True} for row in range(2)}, 2)
    table.add_errors(np.array([1]), "it broke", ["the last"])
    final = {"final_obs": "the last", "final_info": error_info("it broke"), **error_info("it broke")}
    require_equal(table.columns, _gymnasiums({0: {"first": True}, 1: {"first": True} | final}, 2))


def test_a_vector_env_may_leave_masks_out():
    raw = {
        "given": np.array([1, 2, 3]),
        "_given": np.array([True, False, True]),
        "number": 5,
        "each": ["a", "b", "c"],
        "text": "for all",
        "ragged": [[1], [2, 3], []],
        "deep": {"x": np.arange(3.0), "_x": np.array([False, True, True]), "y": 2},
        "final_obs": np.zeros((3, 2)),
    }
    table = InfoTable.from_vector_env(raw, 3)
    assert all(f"_{key}" in table.columns for key in raw if not key.startswith("_"))
    assert table.columns["_given"] is raw["_given"] and table.columns["_number"].tolist() == [True] * 3
    assert table.columns["number"].tolist() == [5, 5, 5] and table.columns["each"].tolist() == ["a", "b", "c"]
    assert table.columns["text"].tolist() == ["for all"] * 3 and table.columns["ragged"].tolist() == [[1], [2, 3], []]
    assert table.columns["deep"]["y"].tolist() == [2, 2, 2] and "_y" not in table.columns["deep"]
    assert table.final_obs is raw["final_obs"], "as it came: one array of all"


def test_copies_share_nothing():
    table = InfoTable.from_rows({0: {"a": 1, "deep": {"b": np.zeros(2)}}}, 1)
    copy = table.copy()
    copy.columns["a"][0] = 2
    copy.columns["deep"]["b"][:] = 1
    copy.columns["_a"][0] = False
    require_equal(table.row(0), {"a": 1, "deep": {"b": np.zeros(2)}})


def test_what_has_no_rows_is_carried_along():
    table = InfoTable(2, {"version": "1", "a": np.array([1, 2])})
    require_equal(table.select(np.array([1])).columns, {"version": "1", "a": np.array([2])})
