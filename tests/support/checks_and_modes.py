"""checks_and_modes: the conformance suite for a maker that is dear, or nearly the same as one that passes all of it."""

import pytest

from envfleet import Autoreset
from envfleet.testing import conformance as suite

DEPEND_ON_THE_MODE = (
    suite.autoreset_follows_its_mode,
    suite.a_failing_env_is_named,
    suite.a_failing_env_is_restarted,
    suite.some_envs_can_be_reset,
)


def checks_and_modes(checks):
    """Pairs for parametrize: each check in all modes if it depends on the mode, else in one, by turns."""
    modes = list(Autoreset)
    pairs = []
    for number, check in enumerate(checks):
        if check in DEPEND_ON_THE_MODE:
            pairs += [(check, mode) for mode in modes]
        elif check is suite.stepping_an_ended_episode_is_refused:
            pairs.append((check, Autoreset.DISABLED))
        else:
            pairs.append((check, modes[number % 3]))
    return [pytest.param(check, mode, id=f"{check.__name__}-{mode.name.lower()}") for check, mode in pairs]
