"""A head that is killed at any moment, and started again with `resume`, comes out as if nothing had happened."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from envfleet import load_checkpoint
from tests.support.scripts import script_environment
from tests.support.waiting import descendants, is_running, wait_until

pytestmark = pytest.mark.slow

NUM_UPDATES, SAVE_EVERY, NUM_KILLS = 150, 2, 10


def started(path):
    program = [sys.executable, "-m", "tests.support.cluster.resumable_learner", str(path)]
    return subprocess.Popen(
        [*program, str(NUM_UPDATES), str(SAVE_EVERY)], stdout=subprocess.PIPE, text=True, env=script_environment()
    )


def finished(learner):
    out, _ = learner.communicate(timeout=120)
    assert learner.returncode == 0
    return json.loads(out.splitlines()[-1])


def killed(path, draw, when):
    """Kill a learner at a random moment, soon after it has begun to do `when`. Returns its workers."""
    learner = started(path)
    workers: list[int] = []
    try:
        num_lines, line = draw.randint(1, 25), ""
        while num_lines > 0 or line != f"{when}\n":
            line, num_lines = learner.stdout.readline(), num_lines - 1
        workers = descendants(learner.pid)
        time.sleep(draw.uniform(0.0, 0.01))  # an update, and a save(), take a few milliseconds
    finally:
        learner.send_signal(signal.SIGKILL)
        learner.communicate()
    return workers


@pytest.mark.timeout(400)
def test_a_killed_head_goes_on_bit_for_bit(tmp_path):
    draw, path, num_saved, workers = random.Random(1), tmp_path / "run.ckpt", [], []
    with started(tmp_path / "whole.ckpt") as whole:
        for number in range(NUM_KILLS):
            workers += killed(path, draw, "saving" if number % 2 else "updating")
            num_saved.append(len(load_checkpoint(path).extra["learner"]["digests"]) if path.exists() else 0)
        through = finished(whole)
    assert num_saved == sorted(num_saved) and 0 < num_saved[-1] < NUM_UPDATES, num_saved
    resumed = finished(started(path))
    assert resumed["num_resumes"] > 4
    assert resumed["outcome"] == through["outcome"]
    assert len(resumed["outcome"]["digests"]) == NUM_UPDATES
    wait_until(lambda: not any(map(is_running, workers)), "workers of killed heads have left", timeout_s=60.0)
