"""Each example runs for a few hundred steps and leaves what it promises."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.scripts import EXAMPLES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "flags",
    [["--num-envs", "4"], ["--num-envs", "3", "--env-id", "Acrobot-v1"]],
    ids=["CartPole", "Acrobot"],
)
def test_ppo_local(tmp_path, flags):
    command = [sys.executable, EXAMPLES / "ppo_local.py", *flags, "--output-dir", tmp_path]
    command += ["--total-steps", "300", "--num-rollout-steps", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["num_steps"] >= 300


def test_ppo_jax_learns():
    pytest.importorskip("jax")
    command = [sys.executable, EXAMPLES / "ppo_jax.py", "--total-steps", "40000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    returns = [float(each) for each in re.findall(r"mean return ([\d.]+)", done.stdout)]
    assert len(returns) == 10 and returns[-1] > 3 * returns[0]
