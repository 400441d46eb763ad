"""The check after each test (conftest.py) waits for what is about to end."""

import os
import threading


def test_a_file_that_is_closed_a_moment_later():
    """As a thread does it that serves a connection whose client has gone: it needs to be given time."""
    for number in os.pipe():
        threading.Timer(0.3, os.close, [number]).start()
