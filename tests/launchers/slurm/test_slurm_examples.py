"""Every example with `--launcher slurm`, on a real Slurm."""

import pytest

from tests.support.short_examples import SHORT_FLAGS, run_demo, run_example
from tests.support.waiting import wait_until


@pytest.mark.parametrize("name", [*SHORT_FLAGS, "demo"])
def test_example(plain_slurm, monkeypatch, tmp_path, name):
    flags = ["--launcher", "slurm", "--launcher-setting", "partition=low", "--launcher-setting", "setup=export X=1"]
    assert (run_demo(*flags) if name == "demo" else run_example(monkeypatch, name, *flags)) == 0
    logs = [log.read_text() for log in tmp_path.glob("envfleet-logs/*/worker-*.log")]
    assert len(logs) == 2 and all("leaving: the run is over" in log for log in logs)
    wait_until(lambda: not plain_slurm.queue(), "the queue is empty")
