"""docs/slurm.md: its commands, one after the other, on a real Slurm."""

import os
import re
import subprocess
import sys

from envfleet.launchers.slurm.settings import Slurm
from tests.support.scripts import DOCS
from tests.support.waiting import wait_until

PAGE = (DOCS / "slurm.md").read_text()
BLOCKS = re.findall(r"(\*Not run in tests: [^\n]*\*\n\n)?```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_can_be_followed(plain_slurm, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("python", ""), ("envfleet", " -m envfleet.cli")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    outputs = []
    for excuse, language, text in BLOCKS:
        if language == "python":
            (tmp_path / "train.py").write_text(text)
        elif not excuse:
            done = subprocess.run(
                ["bash", "-e", "-c", text], env=environment, capture_output=True, text=True, timeout=100, check=False
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
            outputs.append(done.stdout)
    everything = "\n".join(outputs)
    assert "#SBATCH --cpus-per-task=2" in everything and "#SBATCH --time=2:00:00" in everything
    assert everything.count("(100, 12)") == 3  # from outside, as a job, in an allocation
    assert "leaving: the run is over" in everything
    wait_until(lambda: not plain_slurm.queue(), "the queue is empty")


def test_all_settings_are_explained():
    table = PAGE.partition("## Settings")[2].partition("##")[0]
    first_column = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", first_column)) == sorted(Slurm.__dataclass_fields__)
