"""Each check of the suite for launchers catches what it is for."""

import pytest

from envfleet.contract.errors import EnvFleetError
from envfleet.testing import LAUNCHER_CHECKS, LauncherCase, check_launcher
from tests.support import wrong_launchers as wrong
from tests.support.wrong_launchers import Wrapped, Wrong

pytestmark = pytest.mark.slow

# Of each check: what is wrong, and what is said of it.
WRONG = {
    "is_a_set_of_settings": [
        (wrong.Changeable(), "partition can be changed"),
        (wrong.Plain(), "frozen dataclass"),
        (wrong.Nowhere(), "host_of_workers"),
        (wrong.NoTime(), "queue_timeout_s"),
    ],
    "workers_join_and_work": [
        (Wrong(wrong.Mute), "log"),
        (Wrong(wrong.Verbose), "longer"),
        (Wrong(wrong.Placeless), "log_place"),
        (Wrong(wrong.Forgetful), "of 2 workers joined"),
        (Wrong(wrong.Gloomy), "does not start: no"),
    ],
    "secrets_stay_secret": [
        (Wrong(wrong.OnCommandLine), "on a command line"),
        (Wrong(wrong.InLog), "its log has the keys"),
        (Wrong(wrong.InOpenFile), "others can read"),
    ],
    "a_killed_worker_comes_back": [
        (Wrong(wrong.NeverRestarts), "worker 1 has come back"),
        (Wrong(wrong.RestartsAll), "worker 0 was not killed"),
    ],
    "restart_replaces_a_worker": [
        (Wrong(wrong.NeverRestarts), "worker 0 has come back"),
        (Wrong(wrong.RestartsAll), "worker 1 is another process"),
    ],
    "the_fleet_grows_and_shrinks": [
        (Wrong(wrong.Rigid), "does not start"),
        (Wrong(wrong.BeginsAnew), "worker 0 is another process"),
    ],
    "runs_do_not_disturb_each_other": [(Wrong(wrong.CancelsAllRuns), "has ended a worker of another")],
    "cancel_leaves_nothing": [
        (Wrong(wrong.KeepsLeaving), "no process is left"),
        (Wrong(wrong.StillRunning), "ENDED after cancel"),
        (Wrong(wrong.StartsAgain), "start workers after cancel"),
        (Wrong(wrong.FailsTheSecondTime), "cancelled twice"),
        (Wrong(wrong.LeavesFile), "script.sh"),
    ],
    "impossible_resources_are_refused": [
        (Wrong(), "must be refused"),
        (Wrong(wrong.WaitsForEver), "has not refused within"),
        (Wrong(wrong.FailsWithoutWords), "'memory' is not in the error"),
    ],
}


# What must be waited for in vain, to be seen.
VAIN = (
    wrong.Mute,
    wrong.NeverRestarts,
    wrong.StillRunning,
    wrong.KeepsLeaving,
    wrong.WaitsForEver,
)
VAIN_S = 1.0


@pytest.fixture(autouse=True)
def nothing_wrong_is_left():
    yield
    while Wrapped.started:
        Wrapped.started.pop().cancel(1.0)


def name_of(value):
    return getattr(getattr(value, "job_type", value), "__name__", type(value).__name__)


@pytest.mark.parametrize(
    ("check", "launcher", "says"),
    [(check, *each) for check in LAUNCHER_CHECKS for each in WRONG[check.__name__]],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_what_is_wrong_is_caught(check, launcher, says):
    timeout_s = VAIN_S if getattr(launcher, "job_type", None) in VAIN else 60.0
    settings = {"start_timeout_s": 3.0 if launcher == Wrong(wrong.Forgetful) else 60.0, "timeout_s": 60.0}
    # The cluster's own error is as good as the suite's, if that says what is wrong.
    with pytest.raises((AssertionError, EnvFleetError), match=says):
        check(LauncherCase(launcher, launcher, "memory", timeout_s=timeout_s, settings=settings))


def test_check_launcher_runs_the_checks():
    with pytest.raises(AssertionError, match="host_of_workers"):
        check_launcher(wrong.Nowhere())
