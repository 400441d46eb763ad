"""What every test must leave behind: nothing."""

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from waiting import own_children, wait_until


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process, no file descriptor and no shared-memory file outlives its test."""
    gc.collect()
    processes, shared_memory = own_children(), _shared_memory()
    num_fds = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    wait_until(lambda: own_children() <= processes, f"processes are gone: {own_children() - processes}")
    assert _shared_memory() <= shared_memory
    assert len(os.listdir("/proc/self/fd")) <= num_fds


def _shared_memory():
    """Named segments and semaphores as Python makes them; other programs have theirs there too."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem.", "envfleet"))}
