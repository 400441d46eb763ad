"""docs/slurm.md, and docs/laptop_to_cluster.md up to Slurm: their commands, one after the other, on a real Slurm."""

import os
import re
import subprocess
import sys

import pytest

from envfleet.launchers.slurm.settings import Slurm
from tests.support.pages import commands_of, program_of
from tests.support.scripts import DOCS
from tests.support.waiting import wait_until

PAGE = (DOCS / "slurm.md").read_text()
BLOCKS = re.findall(r"(\*Not run in tests: [^\n]*\*\n\n)?```(\w+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Runs commands as somebody would who has EnvFleet installed."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("python", ""), ("envfleet", " -m envfleet.cli")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(text):
        done = subprocess.run(
            ["bash", "-e", "-c", text], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_the_page_can_be_followed(plain_slurm, tmp_path, shell):
    outputs = []
    for excuse, language, text in BLOCKS:
        if language == "python":
            (tmp_path / "train.py").write_text(text)
        elif not excuse:
            outputs.append(shell(text))
    everything = "\n".join(outputs)
    assert "#SBATCH --cpus-per-task=2" in everything and "#SBATCH --time=2:00:00" in everything
    assert everything.count("(100, 12)") == 3  # from outside, as a job, in an allocation
    assert "leaving: the run is over" in everything
    wait_until(lambda: not plain_slurm.queue(), "the queue is empty")


@pytest.mark.timeout(300)
def test_from_a_laptop_to_slurm(plain_slurm, tmp_path, shell):
    """Each command goes on where the one before has ended: here, with workers on Slurm, as a job."""
    page = "laptop_to_cluster.md"
    (tmp_path / "train.py").write_text(program_of(page))
    commands = [*commands_of(page, "On a laptop"), *commands_of(page, "On Slurm")]
    printed = "".join(shell(text) for text in commands)
    assert re.findall(r"(\d+) to (\d+) steps with (\w+)", printed) == [
        ("0", "4096", "local"),
        ("4096", "8192", "local"),
        ("8192", "12288", "slurm"),
        ("12288", "16384", "slurm"),
    ]
    wait_until(lambda: not plain_slurm.queue(), "the queue is empty")


def test_all_settings_are_explained():
    table = PAGE.partition("## Settings")[2].partition("##")[0]
    first_column = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", first_column)) == sorted(Slurm.__dataclass_fields__)
