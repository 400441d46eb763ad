"""ActionMasks: masks of envs that were put back into saved states are those of the states, or none."""

import numpy as np
import pytest

from envfleet import UsageError
from envfleet.policies.action_masks import ActionMasks

ALL = np.ones(2, np.bool_)
INFOS = {
    "legal": np.array([[1, 0, 1], [0, 1, 1]]),
    "_legal": ALL,
    "safe": np.array([[1, 1, 0], [1, 1, 0]]),
    "_safe": ALL,
}


def begun(key="legal"):
    masks = ActionMasks(2, INFOS)
    masks.begin(key, num_steps=1)
    return masks


def test_masks_are_those_of_the_states():
    saved = begun()
    running = {env_id: saved.of(env_id) for env_id in range(2)}
    masks = ActionMasks(2, {"legal": np.zeros((2, 3)), "_legal": ALL})
    masks.begin("legal", num_steps=1)
    masks.restored({0: running[0]})
    assert masks.argument()["action_mask"].tolist() == [[True, False, True], [False, False, False]]
    masks.restored(running)
    masks.begin("legal", num_steps=1)
    assert masks.argument()["action_mask"].tolist() == (INFOS["legal"] != 0).tolist()


def test_infos_of_other_observations_do_not_count():
    """Another key is looked for in the infos of the present observations, which a state does not have."""
    masks = begun()
    masks.restored({env_id: masks.of(env_id) for env_id in range(2)})
    with pytest.raises(UsageError, match="action_mask='safe' was not asked for"):
        masks.begin("safe", num_steps=1)
    masks.begin("legal", num_steps=1)


@pytest.mark.parametrize("running", [{0: {}, 1: {}}, {1: {}}], ids=["all", "one"])
def test_states_without_masks_have_none(running):
    masks = begun()
    masks.restored(running)
    assert masks.argument() == {} and masks.saved() == (None, None, None)
    with pytest.raises(UsageError, match="call reset"):
        masks.begin("legal", num_steps=1)


def test_a_checkpoint_has_them():
    """Also between set_state() and the next rollout, when there are no infos."""
    masks = begun()
    masks.restored({env_id: masks.of(env_id) for env_id in range(2)})
    other = ActionMasks(2, None)
    other.restore(*masks.saved())
    other.begin("legal", num_steps=1)
    assert other.argument()["action_mask"].tolist() == (INFOS["legal"] != 0).tolist()
