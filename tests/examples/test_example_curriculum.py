"""curriculum.py runs for a few hundred steps, and moves its goals."""

import subprocess
import sys

import pytest

from tests.support.scripts import EXAMPLES

pytestmark = pytest.mark.slow


def test_curriculum():
    flags = ["--total-steps", "800", "--num-rollout-steps", "16", "--num-mean-episodes", "5", "--success-rate", "0.1"]
    command = [sys.executable, EXAMPLES / "curriculum.py", "--num-envs-per-worker", "2", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert "at distance 1.0 reached" in first
    assert last.startswith("Goals came to a distance of") and "distance of 1.0" not in last
