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
    out, _ = learner.communicate(timeout=60)
    assert learner.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.mark.timeout(240)
def test_a_killed_head_goes_on_bit_for_bit(tmp_path):
    through = finished(started(tmp_path / "whole.ckpt"))
    draw, path, num_saved = random.Random(1), tmp_path / "run.ckpt", []
    for _ in range(NUM_KILLS):
        learner = started(path)
        workers: list[int] = []
        try:
            assert learner.stdout.readline() == "ready\n"
            workers = descendants(learner.pid)
            time.sleep(draw.uniform(0.0, 0.15))  # in the middle of an update, of a rollout or of save()
        finally:
            learner.send_signal(signal.SIGKILL)
            learner.communicate()
        wait_until(lambda workers=workers: not any(map(is_running, workers)), "its workers have left")
        num_saved.append(len(load_checkpoint(path).extra["learner"]["digests"]) if path.exists() else 0)
    resumed = finished(started(path))
    assert num_saved == sorted(num_saved) and 0 < num_saved[-1] < NUM_UPDATES, num_saved
    assert resumed["num_resumes"] > 2
    assert resumed["outcome"] == through["outcome"]
    assert len(resumed["outcome"]["digests"]) == NUM_UPDATES
