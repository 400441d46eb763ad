"""States on the wire: what a worker cannot have saved is refused, and nothing of it is unpickled."""

import pickle

import msgspec
import numpy as np
import pytest

from envfleet import EnvState
from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.plain_values import from_plain, read_plain, to_plain
from envfleet.cluster.wire.states import checked_states, states_from_plain, states_to_plain

STATE = EnvState("CartPole", b"\0\1", 7, False, np.random.PCG64(3).state, {"return": 1.5, "length": 7, "change": 0})


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


def test_states_cross_the_wire_as_they_are():
    bomb = EnvState("Bomb", pickle.dumps(Bomb()), 0, True, {})
    raw = msgspec.msgpack.encode(states_to_plain([None, STATE, bomb]))
    assert checked_states(read_plain(raw), [1, 2]) == [None, STATE, bomb]
    assert states_from_plain(states_to_plain([STATE, bomb])) == [STATE, bomb]


@pytest.mark.parametrize(
    "changed",
    [
        {"env_name": 3},
        {"env_name": "x" * 5000},
        {"state": "text"},
        {"num_steps": -1},
        {"num_steps": True},
        {"num_steps": 2**60},
        {"has_ended": 1},
        {"generator": []},
        {"running": None},
        {"running": {"length": -1}},
        {"running": {"length": 2**60}},
        {"running": {"length": "7"}},
        {"other": 1},
    ],
)
def test_what_is_no_state_is_refused(changed):
    (plain,) = from_plain(states_to_plain([STATE]))
    with pytest.raises(BadMessage):
        checked_states(from_plain(to_plain([{**plain, **changed}])), [0])


def test_a_state_for_each_env_that_was_asked_for():
    with pytest.raises(BadMessage):
        checked_states([None, None], [1])
    assert checked_states([{"anything": 1}, None], []) == [None, None]
