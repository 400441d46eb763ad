"""dqn.py, sac.py and impala.py run for a few hundred steps; replay buffers keep what followed in the same episode."""

import math
import subprocess
import sys

import numpy as np
import pytest
from gymnasium.spaces import Box

from envfleet import Rollout
from tests.support.scripts import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch", "rich.live", "rich.progress")

# Small networks, because pyzmq keeps a thread and its files for good once it has sent an array of 64 kB.
SMALL = {"num_workers": 2, "num_envs_per_worker": 2, "num_hidden": 16}
FEW_STEPS = {
    "dqn": {"total_steps": 400, "learning_starts": 100, "buffer_size": 150},
    "sac": {"total_steps": 820, "learning_starts": 780, "buffer_size": 150},
    "impala": {"total_steps": 400, "num_rollout_steps": 16},
}


@pytest.mark.parametrize("sync", ["aps", "every_update"])
@pytest.mark.parametrize("example", FEW_STEPS, indirect=True)
def test_training_runs_and_tells_what_it_did(example, sync):
    settings = example.Settings(sync=sync, **SMALL, **FEW_STEPS[example.__name__])
    run = example.train(settings)
    assert run.num_steps >= settings.total_steps
    assert run.num_versions > 1
    # In a stream a slow worker may have delivered nothing yet.
    assert len(run.num_pulls) == 2 and all(pulls <= run.num_versions for pulls in run.num_pulls)
    assert sum(run.num_pulls) >= (1 if example.__name__ == "impala" else 2)
    assert run.weight_bytes > 0 and run.announcement_bytes > 0
    assert run.episodes and all(steps <= run.num_steps for steps, _ in run.episodes)
    assert run.mean_return is not None and math.isfinite(run.mean_return)
    assert run.stats.num_steps >= run.num_steps
    assert example.summary_of(run, settings).startswith(settings.env_id)


@pytest.mark.parametrize(("sync", "num_pulls"), [("never", 1), ("every:1000000", 1)])
@pytest.mark.parametrize("example", ["dqn"], indirect=True)
def test_the_first_weights_are_kept_where_the_rule_says_so(example, sync, num_pulls):
    run = example.train(example.Settings(sync=sync, **SMALL, **FEW_STEPS["dqn"]))
    assert run.num_pulls == [num_pulls, num_pulls]
    assert run.lags == sorted(run.lags) and run.lags[-1] > 0


def test_impala_from_the_command_line(tmp_path):
    command = [sys.executable, EXAMPLES / "impala.py", "--total-steps", "400", "--num-rollout-steps", "16"]
    command += ["--num-envs-per-worker", "2", "--env-id", "Acrobot-v1", "--tensorboard", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Acrobot-v1:") and "versions published" in done.stdout
    assert list(tmp_path.glob("events*"))


@pytest.mark.parametrize("name", FEW_STEPS)
def test_an_unknown_rule_is_refused_by_name(name):
    command = [sys.executable, EXAMPLES / f"{name}.py", "--sync", "sometimes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "every:K" in done.stderr and "'sometimes'" in done.stderr


@pytest.mark.parametrize("example", ["dqn"], indirect=True)
def test_a_missing_tensorboard_is_named(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SystemExit, match="pip install tensorboard"):
        example.ProgressDisplay(example.Settings(tensorboard="anywhere"))


# Three steps of two envs. Env 0 terminates in step 1, env 1 is truncated in step 0. Observation 10 * t + n was acted on
# in row (t, n); the next episodes begin right after.
TERMINATIONS = np.array([[False, False], [True, False], [False, False]])
TRUNCATIONS = np.array([[False, True], [False, False], [False, False]])
REWARDS = np.array([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])


def rollout_of(actions):
    obs = np.array([[[0.0], [1.0]], [[10.0], [11.0]], [[20.0], [21.0]]], np.float32)
    return Rollout(
        obs=obs,
        actions=actions,
        log_probs=None,
        extras={},
        rewards=REWARDS,
        terminations=TERMINATIONS,
        truncations=TRUNCATIONS,
        next_obs=np.array([[30.0], [31.0]], np.float32),
        next_values=None,
        final_values=None,
        states=None,
        final_steps=np.array([0, 1]),
        final_envs=np.array([1, 0]),
        final_obs=np.array([[-1.0], [-10.0]], np.float32),
        episode_returns=np.array([2.0, 5.0]),
        episode_lengths=np.array([1, 2]),
        env_ids=np.arange(2),
        parts=np.zeros(2, np.int64),
        workers=np.arange(1),
        versions=np.arange(1),
        lags=np.arange(1),
    )


@pytest.mark.parametrize("example", ["sac"], indirect=True)
def test_sac_keeps_the_final_observation_as_what_followed(example):
    buffer = example.ReplayBuffer(8, Box(-99, 99, (1,)), Box(-1, 1, (1,)))
    buffer.add(rollout_of(np.zeros((3, 2, 1), np.float32)))
    assert len(buffer) == 6
    assert buffer.obs[:6, 0].tolist() == [0, 1, 10, 11, 20, 21]
    assert buffer.next_obs[:6, 0].tolist() == [10, -1, -10, 21, 30, 31]
    assert buffer.rewards[:6].tolist() == REWARDS.flatten().tolist()
    assert buffer.terminated[:6].tolist() == [0, 0, 1, 0, 0, 0], "a truncation still bootstraps"


@pytest.mark.parametrize("example", ["dqn"], indirect=True)
def test_dqn_sums_rewards_up_to_the_end_of_episode_or_rollout(example):
    buffer = example.ReplayBuffer(8, Box(-99, 99, (1,)), discount=0.5)
    buffer.add(rollout_of(np.arange(6).reshape(3, 2)))
    assert buffer.actions[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.next_obs[:6, 0].tolist() == [-10, -1, -10, 31, 30, 31]
    assert buffer.returns[:6].tolist() == [1 + 0.5 * 4, 2, 4, 8 + 0.5 * 32, 16, 32]
    assert buffer.discounts[:6].tolist() == [0, 0.5, 0, 0.25, 0.5, 0.5], "a truncation still bootstraps"


@pytest.mark.parametrize("example", ["dqn"], indirect=True)
def test_a_full_buffer_overwrites_the_oldest(example):
    buffer = example.ReplayBuffer(8, Box(-99, 99, (1,)), discount=0.5)
    buffer.add(rollout_of(np.zeros((3, 2), int)))
    buffer.add(rollout_of(np.ones((3, 2), int)))
    assert len(buffer) == 8
    assert buffer.actions.tolist() == [1, 1, 1, 1, 0, 0, 1, 1]
    assert {part.shape[0] for part in buffer.sample(5)} == {5}
