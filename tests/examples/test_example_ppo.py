"""ppo.py and demo.py run for a few hundred steps and leave what they promise."""

import json
import subprocess
import sys

import pytest

from tests.support.scripts import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch", "rich.live", "rich.progress")

SHORT = {"num_envs_per_worker": 2, "num_rollout_steps": 64, "num_epochs": 2, "total_steps": 600, "num_eval_episodes": 2}


@pytest.fixture(scope="module")
def ppo():
    """The example as a module, as the demo and benchmarks import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import ppo

        yield ppo


def run(script, *flags):
    short = [text for name, value in SHORT.items() for text in ("--" + name.replace("_", "-"), str(value))]
    command = [sys.executable, EXAMPLES / script, *short, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    ("env_id", "sync"), [("CartPole-v1", "never"), ("Pendulum-v1", "aps"), ("LunarLander-v3", "aps")]
)
def test_ppo(ppo, env_id, sync):
    training = ppo.train(ppo.Settings(env_id=env_id, sync=sync, **SHORT))
    assert (training.num_steps, training.num_updates) == (768, 3)
    assert all(pulls <= 3 for pulls in training.pulls[-1])
    assert (training.divergences[-1] is None) == (sync == "never")


def test_training_reports_each_update(ppo):
    updates = []
    training = ppo.train(ppo.Settings(sync="every:2", **SHORT), on_update=updates.append)
    assert [each.num_steps for each in updates] == [256, 512, 768]
    assert [each.lag for each in updates] == [0, 1, 0]
    assert training.pulls == [(1, 1), (1, 1), (2, 2)]
    assert training.num_updates == training.stats.version == 3
    assert len(training.episodes) > 0
    assert training.evaluation.num_episodes == 2
    assert training.curve[-1] == (768, training.mean_return)


def test_training_stops_at_the_target(ppo):
    # Plain PPO, whose data are never stale with this rule: a warning would fail the test.
    training = ppo.train(ppo.Settings(sync="every_update", plain=True, target=1.0, num_mean_episodes=3, **SHORT))
    assert training.target_reached
    assert training.num_steps == 256


def test_plain_ppo_warns_once_of_stale_data(ppo):
    with pytest.warns(UserWarning, match="1 versions old") as warned:
        ppo.train(ppo.Settings(sync="every:2", plain=True, **SHORT | {"total_steps": 1000}))
    assert len(warned) == 1


def test_an_unknown_rule_is_refused(ppo):
    with pytest.raises(ValueError, match="every:0"):
        ppo.Settings(sync="every:0")


def test_the_command_says_how_it_ended(tmp_path):
    done = run("ppo.py", "--target", "500", "--require-target", "--tensorboard", str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "target of 500 not reached" in done.stdout
    assert "after 768 steps" in done.stdout
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_demo_leaves_a_picture_and_a_summary(tmp_path):
    done = run("demo.py", "--output-dir", str(tmp_path), "--require-target")
    assert done.returncode == 1, done.stderr  # the target was not reached
    assert "divergence" in done.stdout  # in the plain lines: stdout is no terminal
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "summary.txt").read_text() in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["num_steps"] == 768
    assert summary["num_pulls"] + summary["num_pulls_avoided"] == 2 * summary["num_updates"] == 6
    assert summary["weight_bytes"] > summary["announcement_bytes"] > 0
