"""What an env may return: the same as Gymnasium's SyncVectorEnv takes, and nothing else."""

import pickle
from collections import OrderedDict
from decimal import Decimal
from types import MappingProxyType

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from envfleet.contract.results import ObservationCheck, WrongResult, number_rows, reset_result, step_result
from envfleet.contract.spaces import SpaceTree

UINT8 = spaces.Box(0, 255, (2,), np.uint8)
FLOAT32 = spaces.Box(-10, 10, (2,), np.float32)
DTYPES = (np.bool_, np.uint8, np.int8, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64, np.complex64)


def test_an_unpickled_space_is_checked_the_quick_way(monkeypatch):
    check = ObservationCheck(SpaceTree(pickle.loads(pickle.dumps(FLOAT32)))).check
    monkeypatch.setattr("envfleet.contract.results._require_leaf", lambda *_: pytest.fail("the slow way"))
    check(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    "space",
    [UINT8, FLOAT32, spaces.Box(-5, 5, (2,), np.int64), spaces.MultiBinary(2), spaces.MultiDiscrete([3, 3])],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_arrays_are_taken_as_gymnasium_takes_them(space, dtype):
    obs = np.ones(2, dtype)
    try:
        concatenate(space, [obs], create_empty_array(space, 1))
    except TypeError:
        with pytest.raises(WrongResult, match=f"dtype {space.dtype}, as its space says; got dtype {obs.dtype}"):
            ObservationCheck(SpaceTree(space)).check(obs)
    else:
        ObservationCheck(SpaceTree(space)).check(obs)


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (UINT8, [0, 255]),
        (UINT8, (True, False)),
        (FLOAT32, [1, 2]),
        (FLOAT32, [0.5, 2]),
        (spaces.Discrete(5), 3),
        (spaces.Discrete(5), np.int64(3)),
        (spaces.Discrete(5), np.int32(3)),
        (spaces.Discrete(5), np.array(3)),
        (spaces.MultiBinary(2), [0, 1]),
        (spaces.Box(-1, 1, (), np.float32), 0.5),
        (spaces.Box(0, 1, (0,), np.uint8), np.zeros(0, np.uint8)),
    ],
    ids=repr,
)
def test_python_values_are_taken(space, obs):
    tree = SpaceTree(space)
    ObservationCheck(tree).check(obs)
    column = tree.empty(lambda shape, dtype: np.zeros((1, *shape), dtype))
    column[0] = obs
    assert column[0].tolist() == np.asarray(obs).tolist()


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (UINT8, [0, 256]),
        (UINT8, [-1, 0]),
        (UINT8, [0.5, 1]),
        (UINT8, [0, 2**70]),
        (UINT8, [[1], [1, 2]]),
        (UINT8, "ab"),
        (UINT8, None),
        (UINT8, 1),
        (UINT8, np.zeros((1, 2), np.uint8)),
        pytest.param(UINT8, object(), id="object"),
        (FLOAT32, ["a", "b"]),
        (FLOAT32, np.array([None, None])),
        (spaces.Discrete(5), 3.0),
        (spaces.Discrete(5), 2**70),
        (spaces.Discrete(5), np.float64(3)),
        (spaces.Discrete(5), [3]),
    ],
    ids=lambda value: repr(value) if type(value) is not object else "object",
)
def test_other_values_are_refused(space, obs):
    with pytest.raises(WrongResult, match="as its space says; got"):
        ObservationCheck(SpaceTree(space)).check(obs)


def test_the_leaf_of_a_nested_observation_is_named():
    check = ObservationCheck(SpaceTree(spaces.Dict({"camera": spaces.Tuple((UINT8, spaces.Text(3)))}))).check
    check({"camera": (np.zeros(2, np.uint8), "abc")})
    with pytest.raises(WrongResult, match=r"observation\['camera'\]\[0\] .* got dtype float64"):
        check({"camera": (np.zeros(2), "abc")})
    for wrong in ({}, {"camera": ()}, None, np.zeros(2), {"camera": 3}):
        with pytest.raises(WrongResult, match="not the form"):
            check(wrong)


def test_batches_get_the_dtype_of_their_space():
    checks = ObservationCheck(SpaceTree(spaces.Dict({"a": FLOAT32, "word": spaces.Text(3)})))
    batch = checks.batch({"a": np.ones((3, 2), np.float64), "word": ("x", "y", "z")}, 3)
    assert batch["a"].dtype == np.float32 and batch["word"] == ("x", "y", "z")
    with pytest.raises(WrongResult, match=r"shape \(3, 2\)"):
        checks.batch({"a": np.ones((2, 2)), "word": ("x", "y", "z")}, 3)
    with pytest.raises(WrongResult, match="tuple of 3 values"):
        checks.batch({"a": np.ones((3, 2)), "word": ("x",)}, 3)


@pytest.mark.parametrize(
    "reward", [1, True, np.float32(1), np.int8(1), np.bool_(True), np.array(1.0), np.array([1.0]), Decimal(1)], ids=repr
)
def test_rewards_of_one_number_become_floats(reward):
    got = step_result((0, reward, False, False, {}))[1]
    assert got == 1.0 and type(got) is float


@pytest.mark.parametrize(
    "reward", [None, 1j, np.complex64(1), "1.0", b"1", [1.0], np.zeros(2), np.zeros(0), 10**400, {}], ids=type
)
def test_other_rewards_are_refused(reward):
    with pytest.raises(WrongResult, match="the reward of its step"):
        step_result((0, reward, False, False, {}))


@pytest.mark.parametrize("flag", [True, 1, np.bool_(True), np.int64(1), 1.0, np.array([True])], ids=repr)
def test_flags_become_bools(flag):
    assert step_result((0, 0.0, flag, False, {}))[2] is True
    assert step_result((0, 0.0, False, flag, {}))[3] is True


@pytest.mark.parametrize("flag", [None, "False", [], np.zeros(2, bool), 1j], ids=repr)
def test_other_flags_are_refused(flag):
    with pytest.raises(WrongResult, match="terminated of its step"):
        step_result((0, 0.0, flag, False, {}))


def test_infos_are_dictionaries():
    assert step_result((0, 0.0, False, False, MappingProxyType({"a": 1})))[4] == {"a": 1}
    assert type(reset_result((0, OrderedDict(a=1)))[1]) is OrderedDict
    for wrong in (None, [], "text", 3, {1, 2}):
        with pytest.raises(WrongResult, match="must be a dict"):
            reset_result((0, wrong))


def test_a_value_that_cannot_be_printed_is_named_all_the_same():
    class Rude:
        def __repr__(self):
            raise RuntimeError("no")

    with pytest.raises(WrongResult, match="got Rude"):
        step_result((0, Rude(), False, False, {}))


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((2, 1)), None, [1j, 2j], ["a", "b"], 1.0], ids=repr)
def test_rows_of_vector_envs(values):
    assert number_rows([1, 2], 2, "rewards").tolist() == [1, 2]
    with pytest.raises(WrongResult, match="array of 2 numbers"):
        number_rows(values, 2, "rewards")
