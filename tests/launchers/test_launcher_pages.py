"""What docs/ssh.md and docs/manual.md tell a newcomer to type works."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.pages import commands_of, program_of
from tests.support.scripts import DOCS

pytestmark = pytest.mark.slow

FENCE = re.compile(r"(\*Not run in tests: [^\n]*\*\n\n)?```([a-z-]+)\n(.*?)```", re.DOTALL)


def blocks(page):
    """(language, text) of each, in order, without those that say that they are not run."""
    found = FENCE.findall((DOCS / page).read_text())
    return [(language, text) for mark, language, text in found if not mark]


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs commands as somebody would who has EnvFleet installed."""
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")

    def run(text):
        done = subprocess.run(["sh", "-e"], input=text, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.mark.engine
def test_the_ssh_page(sshd, shell, tmp_path):
    printed = ""
    for language, text in blocks("ssh.md"):
        if language == "python":
            (tmp_path / "fleet.py").write_text(text)
        elif language == "ssh-config":
            (tmp_path / "config").write_text(text)
            assert "user you\n" in shell("ssh -G -F config node1")
        else:
            assert language == "sh"
            printed += shell(text)
    import envfleet

    assert re.fullmatch(
        rf"ok\n{re.escape(envfleet.__version__)}\nworker 0 is process \d+ of .+\nworker 1 is process \d+ of .+\n"
        r"\(100, 8\)\n",
        printed,
    )


@pytest.mark.engine
def test_from_a_laptop_to_ssh_hosts(sshd, shell, tmp_path):
    (tmp_path / "train.py").write_text(program_of("laptop_to_cluster.md"))
    (command,) = commands_of("laptop_to_cluster.md", "On SSH hosts")
    assert shell(command).startswith("0 to 4096 steps with ssh")


def test_the_ssh_pages_messages_are_those_of_the_code():
    page = (DOCS / "ssh.md").read_text()
    code = (DOCS.parent / "src" / "envfleet" / "launchers" / "ssh.py").read_text()
    for text in ("EnvFleet is not installed", "has no program", "Permission denied", "Host key verification failed"):
        assert text in page and text.replace("(", r"\(") in code
    from envfleet.launchers.ssh import SSH

    told = set(re.findall(r"`(\w+)`", page.split("## Settings")[1].split("##")[0]))
    assert set(SSH.__dataclass_fields__) - {"_"} <= told


def test_the_manual_page(tmp_path, shell):
    (_, program), (_, command), (_, example) = blocks("manual.md")
    (tmp_path / "fleet.py").write_text(program)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    head = subprocess.Popen(
        shlex.split(command),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    workers = []
    try:
        lines = [head.stdout.readline() for _ in range(3)]
        assert [plain(line) for line in lines] == [plain(line) for line in example.splitlines(keepends=True)]
        for line in lines[1:]:
            with (tmp_path / f"{len(workers)}.log").open("wb") as log:
                workers.append(subprocess.Popen(shlex.split(line), cwd=tmp_path, stdout=log, stderr=log))
        assert head.stdout.read() == "(100, 8)\n"
        assert head.wait(20) == 0
        assert [worker.wait(20) for worker in workers] == [0, 0]
        assert not (tmp_path / "fleet.keys").exists()
    finally:
        for process in (head, *workers):
            process.kill()
            process.wait()
        head.stdout.close()


def plain(line):
    """Without what is different each time: addresses and folders."""
    return re.sub(r"\S*fleet\.keys", "KEYS", re.sub(r"tcp://\S+", "HEAD", line))


def test_python_of_the_tests_is_the_one_on_the_path():
    assert Path(sysconfig.get_path("scripts"), "python").resolve() == Path(sys.executable).resolve()
