"""Somebody who starts what Manual prints, as often as it does, and goes home when the keys are gone."""

import contextlib
import io
import shlex
import subprocess
import sys
import threading
from pathlib import Path


class Volunteer(io.TextIOBase):
    """To be the standard output."""

    def __init__(self, log):
        self.printed = ""
        self.is_away = False  # then commands wait for come_back()
        self._waiting = []
        self._log = log
        self._old = []
        self._running = {}  # by the command, which names head and worker
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def write(self, text):
        with self._lock:
            self.printed += text
            for line in text.splitlines():
                if line.startswith("  "):
                    self._waiting.append(line)
        if not self.is_away:
            self.come_back()
        return len(text)

    def come_back(self):
        """Start what was asked for."""
        with self._lock:
            self.is_away = False
            while self._waiting:
                self._start(self._waiting.pop(0))

    def _start(self, command):
        if command in self._running:  # the head sends the older process away
            self._old.append(self._running[command])
        self._running[command] = subprocess.Popen(
            shlex.split(command), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def _watch(self):
        while not self._is_over.wait(0.05):
            with self._lock:
                for command, process in list(self._running.items()):
                    if not _keys(command).exists():
                        process.kill()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()
        for process in (*self._running.values(), *self._old):
            process.kill()
            process.wait()


def _keys(command):
    words = shlex.split(command)
    return Path(words[words.index("--keys-file") + 1])


@contextlib.contextmanager
def volunteer(log_path):
    with log_path.open("ab") as log, Volunteer(log) as person, contextlib.redirect_stdout(person):
        yield person


PYTHON = shlex.quote(sys.executable)
