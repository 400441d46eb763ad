"""A minute of chaos over each wire, always the same one; `make chaos` has more of it."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from envfleet.contract.rollout import Rollout
from tests.cluster.network.chaos import LONGEST_PAUSE_S, run
from tests.support.cluster.chaos_tcp import SETUP
from tests.support.envs.cluster_envs import Accounts
from tests.support.scripts import script_environment

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_chaos():
    report = run(seconds=60.0, seed=7)
    print(report)
    assert report.longest_pause_s < LONGEST_PAUSE_S
    assert report.num_rollouts > 50 and report.num_versions > 5
    assert report.num_restarts > 3 and report.num_env_objects > 6  # workers did die, others came
    assert min(report.wire[what] for what in ("dropped", "doubled", "delayed")) > 0
    assert report.refused  # what came twice was noticed


@pytest.mark.long
@pytest.mark.timeout(400)
def test_chaos_over_tcp(tun_wire_or_skip):
    """60 MB of weights and 50 MB rollouts. The head has a process of its own: libzmq aborted it in 0.6.0."""
    command = [sys.executable, "-m", "tests.cluster.network.chaos", "--wire", "tcp", "--longest-cut-s", "8"]
    done = subprocess.run(
        [*command, "--seconds", "60"], capture_output=True, text=True, timeout=380, env=script_environment()
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-4000:]}"
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["longest_pause_s"] < SETUP.longest_pause_s
    assert report["num_rollouts"] > 1 and report["blows"]["cut"] > 0
    assert report["wire"]["to_workers"]["num_cut"] > 0 and report["wire"]["to_head"]["num_cut"] > 0


# -- who watches the watchman --


def rollout(first, name=1, ends=()):
    """Four rows of one env, whose first observation has the number `first`."""
    ended = np.isin(np.arange(4), ends)[:, None]
    numbers = first + np.cumsum([0, *np.where(ended[:, 0], 2, 1)])
    obs = np.stack([np.full(5, name), numbers], axis=-1)[:, None].astype(np.float64)
    fields = {field.name: None for field in dataclasses.fields(Rollout)}
    fields |= {"obs": obs[:4], "next_obs": obs[4], "rewards": np.zeros((4, 1)), "env_ids": np.array([0])}
    fields |= {"terminations": ended, "truncations": np.zeros_like(ended), "final_steps": np.flatnonzero(ended)}
    fields |= {"final_envs": np.zeros(len(ends), int), "final_obs": obs[list(ends), 0] + [0, 1]}
    return Rollout(**fields)


def test_accounts_take_what_is_right():
    accounts = Accounts()
    for each in (rollout(0), rollout(4, ends=[1]), rollout(9), rollout(0, name=2), rollout(4, name=2)):
        accounts.add(each)
    accounts.interrupted(1)
    accounts.add(rollout(50, name=2))
    accounts.add(rollout(54, name=2))
    assert (accounts.num_rows, accounts.num_env_objects) == (28, 2)


@pytest.mark.parametrize(
    ("rollouts", "problem"),
    [
        ([rollout(0), rollout(0)], "rows 0 to 3 came twice"),
        ([rollout(0), rollout(4), rollout(0)], "rows 0 to 7 came twice"),
        ([rollout(0), rollout(8)], "rows 4 to 7 are missing"),
        ([rollout(4)], "rows 0 to 3 are missing"),
        ([rollout(0, ends=[0]), rollout(4)], "rows 4 to 4 came twice"),
    ],
)
def test_accounts_notice(rollouts, problem):
    accounts = Accounts()
    with pytest.raises(AssertionError, match=problem):
        for each in rollouts:
            accounts.add(each)


def test_accounts_notice_within_a_rollout():
    torn, lost_end = rollout(0), rollout(0, ends=[1])
    torn.obs[2, 0, 1] = 9
    other = rollout(0)
    other.next_obs[0, 0] = 7
    for each in (torn, other, dataclasses.replace(lost_end, final_obs=lost_end.final_obs + 1)):
        with pytest.raises(AssertionError):
            Accounts().add(each)
    with pytest.raises(AssertionError):  # an interruption excuses what is missing, not what comes twice
        accounts = Accounts()
        accounts.add(rollout(0))
        accounts.interrupted(1)
        accounts.add(rollout(0))
