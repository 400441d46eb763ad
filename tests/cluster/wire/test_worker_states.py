"""What a worker says for a checkpoint: the head keeps bytes that it does not read, and refuses what cannot be."""

import numpy as np
import pytest

from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.messages import SaveState, StateReady
from envfleet.cluster.wire.worker_states import checked_state

STATE = np.arange(5, dtype=np.uint8)
WEIGHT = np.ones((2, 3), np.float32)


def ready(version=3, code_id=1):
    return StateReady(order=1, code_id=code_id, version=version, has_env_states=True, left_out=["this"])


def test_a_state_is_what_came():
    state = checked_state(ready(), {"state": STATE, "weight.w": WEIGHT}, SaveState(version=4))
    assert state.state is STATE and state.weights == {"w": WEIGHT} and state.left_out == ["this"]
    assert (state.code_id, state.version, state.has_env_states) == (1, 3, True)
    assert checked_state(ready(-1, 0), {"state": STATE}, SaveState(version=4)).weights == {}


@pytest.mark.parametrize(
    ("message", "arrays", "what"),
    [
        (ready(), {}, "array 'state' must be uint8"),
        (ready(), {"state": STATE.astype(np.int8)}, "array 'state' must be uint8"),
        (ready(), {"state": STATE.reshape(5, 1)}, "array 'state' must be uint8"),
        (ready(5), {"state": STATE}, "the state of version 5; possible: -1 to 4"),
        (ready(-2), {"state": STATE}, "the state of version -2"),
        (ready(code_id=-1), {"state": STATE}, "the state of version 3"),
        (ready(), {"state": STATE, "obs": STATE}, r"got \['obs'\]"),
        (ready(4), {"state": STATE, "weight.w": WEIGHT}, "weights of version 4, which were not asked for"),
        (ready(-1), {"state": STATE, "weight.w": WEIGHT}, "weights of version -1"),
    ],
)
def test_what_cannot_be_is_refused(message, arrays, what):
    with pytest.raises(BadMessage, match=what):
        checked_state(message, arrays, SaveState(version=4))
