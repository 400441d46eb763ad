"""The examples with other libraries' learners run for a few hundred steps, on a pool and on workers."""

import subprocess
import sys

import pytest

from tests.support.scripts import EXAMPLES

pytestmark = pytest.mark.slow

FEW = {"num_envs": 4, "num_rollout_steps": 32, "num_epochs": 2, "num_minibatches": 2, "num_hidden": 16}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("example", ["tianshou_dqn"], indirect=True)
def test_tianshou_dqn(example, num_workers, quick_workers):
    settings = example.Settings(
        num_envs=4,
        num_workers=num_workers,
        total_steps=400,
        num_epoch_steps=200,
        num_collected_steps=40,
        num_test_envs=3,
        num_test_episodes=4,
        num_hidden=16,
        target=1e9,
    )
    result = example.train(settings)
    assert result.train_step >= 400 and result.update_step > 0
    assert result.test_episode == 3 * 4  # before the first epoch, too
    assert result.best_reward > 5


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("example", ["torchrl_ppo"], indirect=True)
def test_torchrl_ppo(example, num_workers, quick_workers, tmp_path):
    """The second one goes on from the checkpoint of the first."""
    settings = {"num_workers": num_workers, "checkpoint": str(tmp_path / "saved"), "resume": "auto", **FEW}
    num_steps, mean_return, exit_code = example.train(example.Settings(total_steps=256, **settings))
    assert (num_steps, exit_code) == (256, 0) and mean_return > 5
    if num_workers == 0:
        assert example.train(example.Settings(total_steps=384, **settings))[0] == 384


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("example", ["skrl_ppo"], indirect=True)
def test_skrl_ppo(example, num_workers, quick_workers):
    assert example.train(example.Settings(total_steps=256, num_workers=num_workers, **FEW)) > 5


@pytest.mark.parametrize("example", ["pettingzoo_ppo"], indirect=True)
def test_pettingzoo_ppo(example, quick_workers, tmp_path):
    """The second one goes on from the checkpoint of the first."""
    small = {"num_envs_per_worker": 2, "num_rollout_steps": 16, "num_hidden": 16, "num_epochs": 1, "max_cycles": 10}
    settings = {"checkpoint": str(tmp_path / "saved"), "resume": "auto", "sync": "aps", **small}
    run = example.train(example.Settings(total_steps=64, **settings))
    assert run.num_steps == 64 and run.num_updates == 1 and run.episodes
    run = example.train(example.Settings(total_steps=192, **settings))
    assert run.num_steps == 192 and run.num_updates == 3


def test_rl_games_ppo(tmp_path):
    pytest.importorskip("rl_games")
    flags = ["--num-envs", "4", "--max-epochs", "2", "--num-rollout-steps", "16", "--minibatch-size", "32"]
    command = [sys.executable, EXAMPLES / "rl_games_ppo.py", *flags, "--num-epochs", "1", "--output-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "epoch: 2/2" in done.stdout and "MAX EPOCHS NUM!" in done.stdout
    assert list(tmp_path.rglob("last_InvertedDoublePendulum-v5_ep_2*.pth"))
