"""What every test must leave behind: nothing."""

import contextlib
import gc
import os
import signal
from pathlib import Path

import pytest

from tests.support.waiting import own_children, wait_until

# A shell ignores Ctrl-C for what it runs in the background, and so would the scripts that are interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Folders whose tests share an engine that takes long to start: they stay together, and come first.
ENGINES = ("launchers/slurm", "launchers/ray", "launchers/kubernetes", "launchers/ssh", "launchers")


def pytest_collection_modifyitems(items):
    """Two processes share the tests (`make test`), by files, since fixtures live as long as their file."""
    here = Path(__file__).parent

    def folder_of(item):
        return str(item.path.parent.relative_to(here))

    for item in items:
        folder = folder_of(item)
        item.add_marker(pytest.mark.xdist_group(folder if folder in ENGINES else str(item.path)))
    items.sort(key=lambda item: ENGINES.index(folder_of(item)) if folder_of(item) in ENGINES else len(ENGINES))


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process, no file descriptor and no shared-memory file outlives its test."""
    processes, shared_memory, files = own_children(), _shared_memory(), _files()
    yield
    # To look for garbage takes long when torch is loaded: only if something is there that should not be.
    if not (own_children() <= processes and _shared_memory() <= shared_memory and len(_files()) <= len(files)):
        gc.collect()
    # What has been told to end may take a moment on a busy machine: processes, threads that close a connection.
    wait_until(lambda: own_children() <= processes, lambda: f"processes are gone: {own_children() - processes}")
    wait_until(lambda: _shared_memory() <= shared_memory, lambda: f"files are gone: {_shared_memory() - shared_memory}")
    wait_until(lambda: len(_files()) <= len(files), lambda: f"files are closed: {_new(_files(), files)}")


def _files():
    """What is open, by number of the descriptor."""
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them, or one that is closed meanwhile
            files[number] = os.readlink(f"/proc/self/fd/{number}")
    return files


def _new(files, before):
    return {number: name for number, name in files.items() if before.get(number) != name}


def _shared_memory():
    """Named segments as Python makes them; other programs have theirs there too."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "envfleet"))}
