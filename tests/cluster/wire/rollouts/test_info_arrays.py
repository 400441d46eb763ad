"""Infos on the wire: what a worker packs comes out the same, and what no worker of ours packs is refused."""

import msgspec
import numpy as np
import pytest

from envfleet.cluster.info_choice import ALL_INFOS, InfoChoice
from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.cluster.wire.rollouts.info_arrays import packed, unpacked
from envfleet.contract.infos.flat import Dense, Sparse, joined, nested
from envfleet.testing.programs import require_equal

T, N, F = 4, 3, 2
MASK = np.random.default_rng(0).random((T, N)) < 0.5
STEPS = {
    ("x",): Dense(np.arange(T * N, dtype=np.float32).reshape(T, N), MASK),
    ("all",): Dense(np.ones((T, N, 5), np.bool_), np.ones((T, N), np.bool_)),
    ("sim",): Dense(None, MASK),
    ("sim", "clock"): Dense(np.zeros((T, N), np.int8), MASK),
    ("word",): Sparse(np.array([[0, 1], [3, 2]]), ["a", {"b": np.arange(3)}]),
}
FINALS = {("x",): Dense(np.ones(F), np.ones(F, np.bool_)), ("word",): Sparse(np.array([[1]]), [None])}


def sent():
    infos, arrays = packed(dict(STEPS), dict(FINALS), {})
    fields = {"steps": infos.steps, "finals": infos.finals, "left_out": infos.left_out}
    return fields | {"objects": infos.objects}, arrays


def received(infos, arrays, choice=ALL_INFOS):
    message = infos if isinstance(infos, RolloutInfos) else RolloutInfos(**infos)
    return unpacked(message, arrays, choice, T, N, F)


def test_what_is_packed_comes_out_the_same():
    steps, finals = received(*packed(dict(STEPS), dict(FINALS), {}))
    require_equal(nested(steps), nested(STEPS))
    require_equal(nested(finals), nested(FINALS))
    _, arrays = packed(dict(STEPS), dict(FINALS), {})
    assert "info_mask.1" not in arrays and "final_info_mask.0" not in arrays  # all rows have these


def test_what_cannot_be_sent_is_left_out_and_told():
    left_out = {}
    infos, _ = packed({("bad",): Sparse(np.zeros((1, 2), np.int64), [object()]), **STEPS}, {}, left_out)
    assert "is a object" in left_out["bad"] and infos.left_out[0].startswith("'bad' (info['bad'][0] is")
    lists = [[0] * 1000 for _ in range(300)]
    many = Sparse(np.zeros((300, 2), np.int64), lists)
    infos, arrays = packed({("many",): many, **STEPS}, {}, left_out := {})
    assert "more parts" in left_out["many"]
    require_equal(nested(received(infos, arrays)[0]), nested(STEPS))


def change_names(infos, arrays):
    infos["steps"][0] = ["y", "x"]


def change_objects(value):
    def change(infos, arrays):
        infos["objects"] = msgspec.Raw(msgspec.msgpack.encode(value))

    return change


def change_array(name, make):
    def change(infos, arrays):
        arrays[name] = make(arrays.get(name))

    return change


def one(at, values, keys=("w",)):
    array = ["array", "int64", np.shape(at), np.asarray(at, np.int64).tobytes()]
    return change_objects({"info": [[list(keys), array, ["list", *values]]]})


def not_boolean(array):
    array = array.copy()
    array.view(np.uint8)[0] = 7
    return array


WRONG = {
    "inside no dictionary": (change_names, "inside .* no dictionary"),
    "a key twice": (lambda infos, arrays: infos["steps"].append(["x"]), "neither values nor a mask"),
    "no array": (lambda infos, arrays: arrays.pop("info.1"), "neither values nor a mask"),
    "another shape": (change_array("info.0", lambda array: array[:-1]), "must begin with"),
    "another mask": (change_array("info_mask.0", lambda array: array[:, :-1]), "must be bool"),
    "a mask of bytes": (change_array("info_mask.0", lambda array: array.astype(np.uint8)), "must be bool"),
    "bools that are none": (change_array("info_mask.0", not_boolean), "neither 0 nor 1"),
    "values that are no bools": (change_array("info.1", not_boolean), "neither 0 nor 1"),
    "too many keys": (lambda infos, arrays: infos["steps"].extend([["x"]] * 300), "at most 256"),
    "a long key": (change_array("info.0", lambda array: array), None),
    "too much left out": (lambda infos, arrays: infos["left_out"].extend(["x"] * 300), "left out"),
    "a long reason": (lambda infos, arrays: infos["left_out"].append("x" * 2000), "left out"),
    "no dictionary": (change_objects([1]), "must be a dictionary"),
    "another part": (change_objects({"what": []}), "must be a dictionary"),
    "no list": (change_objects({"info": {}}), "must be a list"),
    "two parts": (change_objects({"info": [[["w"], 1]]}), "keys, places and values"),
    "keys that are none": (change_objects({"info": [[[1], 1, 1]]}), "must be text"),
    "places that are none": (change_objects({"info": [[["w"], 1, 1]]}), "places of info"),
    "places of one dimension": (one([1], ["a"]), "places of info"),
    "places outside": (one([[0, N]], ["a"]), "outside"),
    "negative places": (one([[-1, 0]], ["a"]), "outside"),
    "fewer values": (one([[0, 0], [1, 0]], ["a"]), "another number"),
    "a key of a column": (one([[0, 0]], ["a"], ["x"]), "comes twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused(case):
    change, text = WRONG[case]
    infos, arrays = sent()
    change(infos, arrays)
    if text is None:
        infos["steps"][0] = ["k" * 300]
        text = "longer than"
    with pytest.raises(BadMessage, match=text):
        received(infos, arrays)


def test_what_was_not_asked_for_is_refused():
    infos, arrays = sent()
    with pytest.raises(BadMessage, match="no numbers, which were not asked for"):
        received(infos, arrays, InfoChoice())
    with pytest.raises(BadMessage, match="'all' was not asked for"):
        received(infos, arrays, InfoChoice(("x", "word", "sim"), True))
    with pytest.raises(BadMessage, match="was not asked for"):
        received(infos | {"objects": msgspec.Raw(b"\x80")}, arrays, InfoChoice(()))
    arrays["info.0"] = np.zeros((T, N, 300_000))
    with pytest.raises(BadMessage, match="at most 16,777,216 if no keys"):
        received(infos | {"objects": msgspec.Raw(b"\x80")}, arrays, InfoChoice())


def test_names_without_number_are_refused_before_they_are_made():
    """Two megabytes of empty lists would become 140 MB of objects."""
    bomb = b"\x81\xa5steps\xdd" + (1 << 20).to_bytes(4, "big") + b"\x90" * (1 << 20)
    with pytest.raises(msgspec.ValidationError, match="length <= 256"):
        msgspec.msgpack.decode(bomb, type=RolloutInfos)


def test_columns_of_no_rows_are_refused():
    """They have no bytes, and could have any shape."""
    infos = RolloutInfos(finals=[["x"]])
    with pytest.raises(BadMessage, match="of which there are none"):
        unpacked(infos, {"final_info.0": np.zeros((0, 1 << 40), np.float64)}, ALL_INFOS, 2, 3, 0)


def test_the_name_of_another_ones_mask_is_refused():
    infos, arrays = RolloutInfos(steps=[["x"], ["_x"]]), {f"info.{index}": np.zeros((2, 3)) for index in range(2)}
    with pytest.raises(BadMessage, match="name of the mask of another one"):
        unpacked(infos, arrays, ALL_INFOS, 2, 3, 0)


def test_few_large_rows_beside_many_stay_sparse():
    large = {("x",): Dense(np.ones((1, 1 << 17)), np.ones(1, np.bool_))}
    flat = joined([large, {}], [(1,), (100_000,)], 0)  # 100 GB, if it were dense
    assert isinstance(flat["x",], Sparse)
    assert flat["x",].at.tolist() == [[0]]
