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
    processes, shared_memory = own_children(), set(os.listdir("/dev/shm"))
    num_fds = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    wait_until(lambda: own_children() <= processes, f"processes are gone: {own_children() - processes}")
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert len(os.listdir("/proc/self/fd")) <= num_fds
