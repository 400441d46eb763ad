"""The line for people who wait: rewritten on a terminal, a new one in a log when something has changed."""

import os
import select
import sys

import pytest

from envfleet.cluster.run import progress
from envfleet.cluster.run.progress import Progress

ERASE = "\r\x1b[K"


@pytest.fixture
def at_once(monkeypatch):
    for name in ("FIRST_S", "AGAIN_S", "NEXT_LINE_S"):
        monkeypatch.setattr(progress, name, 0.0)


@pytest.mark.usefixtures("at_once")
def test_on_a_terminal_one_line_is_rewritten_and_goes_in_the_end(monkeypatch):
    master, slave = os.openpty()
    with open(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("COLUMNS", "60")
        shown = Progress()
        shown.show("1 of 2 workers are ready", is_news=False)
        shown.show("2 of 2 workers are ready, and this is a text that no line of it can hold", is_news=True)
        shown.close()
        terminal.flush()
        written = ""
        while written.count(ERASE) < 3 and select.select([master], [], [], 10)[0]:  # what was written may come in parts
            written += os.read(master, 4096).decode()
    os.close(master)
    first, second, last = written.split(ERASE)[1:]
    assert first == "envfleet: 1 of 2 workers are ready (0 s)"
    assert second.startswith("envfleet: 2 of 2 workers") and len(second) == 59
    assert last == "" and "\n" not in written


@pytest.mark.usefixtures("at_once")
def test_a_log_has_a_line_for_each_change(capfd):
    shown = Progress()
    shown.show("1 of 2 workers are ready", is_news=False)  # nobody reads a log to see that
    for text in ("1 pending: Resources", "1 pending: Resources", "1 pending: Priority"):
        shown.show(text, is_news=True)
    shown.close()
    assert capfd.readouterr().err == "envfleet: 1 pending: Resources\nenvfleet: 1 pending: Priority\n"


def test_a_short_wait_needs_no_line(capfd):
    shown = Progress()
    shown.show("1 pending", is_news=True)
    shown.close()
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("stderr", [None, "closed"])
def test_nobody_to_tell(monkeypatch, tmp_path, stderr):
    if stderr == "closed":
        stderr = open(tmp_path / "closed", "w")  # noqa: SIM115
        stderr.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        shown = Progress()
        shown.show("1 pending", is_news=True)
        shown.close()
