"""Each example runs for a few hundred steps and leaves what it promises."""

import json
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
