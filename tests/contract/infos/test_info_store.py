"""Infos of many steps become columns, whatever the envs say from step to step."""

import numpy as np
import pytest

from envfleet.contract.infos.flat import Dense, Sparse, as_table, joined, nested
from envfleet.contract.infos.store import InfoBudget, InfoStore
from envfleet.contract.infos.table import InfoTable
from envfleet.testing.programs import require_equal

T, N = 4, 3
ANY = InfoBudget(None)


def table(*infos):
    return InfoTable.from_rows(dict(enumerate(infos)), len(infos)).columns


def stored(steps, keys=None, has_objects=True, budget=None):
    store = InfoStore(len(steps) * N, budget or InfoBudget(None), keys, has_objects)
    for t, infos in enumerate(steps):
        store.write(slice(t * N, (t + 1) * N), infos)
    return store, nested(store.flat((len(steps), N)))


def same(value):
    return table(*[value] * N)


def test_each_step_is_as_its_env_said():
    random = np.random.default_rng(0)
    steps = [
        table(*({"x": random.random(), "n": t, "pos": np.ones(2, np.float32), "in": {"a": t, "b": {"c": True}}},) * N)
        for t in range(T)
    ]
    steps[2] = table({"x": 0.5, "late": 1}, {}, {"pos": np.ones(2, np.float32)})
    _, infos = stored(steps)
    assert infos["x"].shape == (T, N) and infos["pos"].shape == (T, N, 2) and infos["in"]["b"]["c"].dtype == np.bool_
    for t in (0, 1, 3):
        got = as_table(infos, N, t)
        require_equal([got.row(row) for row in range(N)], [InfoTable(N, steps[t]).row(row) for row in range(N)])
    assert infos["_late"].tolist() == [[False] * 3, [False] * 3, [True, False, False], [False] * 3]
    assert infos["_in"][2].tolist() == [False] * 3 and infos["_pos"][2].tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [((1, 2.5, 3), np.float64), ((np.float32(1), 2.0), np.float64), ((np.int8(1), np.int16(300)), np.int16)],
)
def test_a_dtype_that_changes_holds_all(values, dtype):
    _, infos = stored([same({"x": value}) for value in values])
    assert infos["x"].dtype == dtype
    assert infos["x"][:, 0].tolist() == [float(value) for value in values]


@pytest.mark.parametrize(
    "values",
    [
        (1, True),
        (np.ones(2), np.ones(3)),
        (1.5, "text"),
        (1.5, {"a": 1}),
        ({"a": 1}, 1.5),
        ("text", 1.5),
        ({"a": 1}, None),
    ],
)
def test_what_changes_its_kind_becomes_objects_or_is_left_out(values):
    _, infos = stored([same({"x": value, "y": 1}) for value in values])
    assert [place for *place, _ in infos["x"]] == [[t, n] for t in range(len(values)) for n in range(N)]
    require_equal([value for *_, value in infos["x"][::N]], list(values))
    store, infos = stored([same({"x": value, "y": 1}) for value in values], has_objects=False)
    assert "x" not in infos and infos["y"].shape == (2, N)
    assert ("x" in store.left_out) == (not isinstance(values[0], str))


def test_keys_are_chosen():
    _, infos = stored([same({"x": 1, "word": "a", "z": 3})] * 2, keys=("word", "x"))
    assert set(infos) == {"word", "x", "_x"}
    assert infos["word"][0] == (0, 0, "a")


def test_a_limit_leaves_out_what_does_not_fit():
    budget = InfoBudget(T * N * 9)
    store, infos = stored([same({"image": np.zeros(8), "x": 1.0, "y": 1.0})] * T, has_objects=False, budget=budget)
    assert set(infos) == {"x", "_x"}
    assert set(store.left_out) == {"image", "y"} and "float64 of shape (8,)" in store.left_out["image"]


def test_rows_in_any_order_and_finals_that_grow():
    store = InfoStore(T * N, InfoBudget(None), has_objects=True)
    places = np.random.default_rng(1).permutation(T * N)
    for first in range(0, T * N, 2):
        at = places[first : first + 2]
        store.write(at, table(*({"x": int(place), "word": str(place)} for place in at)))
    infos = nested(store.flat((T, N)))
    assert infos["x"].tolist() == np.arange(T * N).reshape(T, N).tolist()
    assert infos["word"] == [(t, n, str(t * N + n)) for t in range(T) for n in range(N)]

    finals = InfoStore(2, InfoBudget(None), has_objects=True)
    for first in range(0, 30, 3):
        finals.grow(first + 3)
        infos = table({}, *({"x": first + i, "in": {"word": str(first + i)}} for i in range(3)))
        finals.write(slice(first, first + 3), infos, np.arange(1, 4))
    order = np.random.default_rng(2).permutation(30)
    infos = nested(finals.flat((30,), order))
    assert infos["x"].tolist() == order.tolist()
    assert infos["in"]["word"] == [(row, str(place)) for row, place in enumerate(order)]


def test_growing_beyond_the_limit_leaves_out():
    finals = InfoStore(2, InfoBudget(10 * 9))
    for first in range(0, 30, 3):
        finals.grow(first + 3)
        finals.write(slice(first, first + 3), table(*({"x": 1.0},) * 3))
    assert not finals.flat((30,)) and "no more room" in finals.left_out["x"]


def test_the_workers_side_by_side():
    parts = [stored([same({"x": 1, "late": 2.0, "in": {"a": 1}})])[0], stored([same({"x": 2.5, "word": "b"})])[0]]
    infos = nested(joined([part.flat((1, N)) for part in parts], [(1, N)] * 2, axis=1))
    assert infos["x"].tolist() == [[1, 1, 1, 2.5, 2.5, 2.5]] and infos["_x"].all()
    assert infos["_late"].tolist() == infos["in"]["_a"].tolist() == [[True] * 3 + [False] * 3]
    assert infos["word"] == [(0, 3, "b"), (0, 4, "b"), (0, 5, "b")]
    mixed = [{("x",): Dense(np.ones(2), np.array([True, False]))}, {("x",): Sparse(np.array([[1]]), ["text"])}]
    assert nested(joined(mixed, [(2,), (2,)], axis=0)) == {"x": [(0, 1.0), (3, "text")]}


def test_memory_of_the_env_is_not_kept():
    mine = {"list": [1]}
    store = InfoStore(2, InfoBudget(None), has_objects=True)
    for row in range(2):
        mine["list"][0] = row
        store.write(slice(row, row + 1), table(mine))
    assert nested(store.flat((2,)))["list"] == [(0, [0]), (1, [1])]
