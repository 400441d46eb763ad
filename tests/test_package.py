"""The package as installed: typed, light to import, without side effects."""

import importlib.resources
import subprocess
import sys

import envfleet

OPTIONAL = ("torch", "zmq", "jax", "ray", "matplotlib", "rich")


def test_importing_loads_no_optional_package_and_starts_nothing():
    code = f"""if True:
        import os, sys, threading, gymnasium
        tasks = len(os.listdir('/proc/self/task'))
        files = set(os.listdir('/proc/self/fd'))
        import envfleet
        assert len(os.listdir('/proc/self/task')) == tasks
        assert set(os.listdir('/proc/self/fd')) == files
        print([name for name in {OPTIONAL} if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_all_public_names_exist():
    assert all(hasattr(envfleet, name) for name in envfleet.__all__)


def test_the_package_is_typed():
    assert importlib.resources.files("envfleet").joinpath("py.typed").is_file()
