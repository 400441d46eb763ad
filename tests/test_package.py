"""The package as installed: typed, light to import, without side effects."""

import importlib.resources
import inspect
import re
import subprocess
import sys

import pytest

import envfleet
from envfleet.launchers.launcher import Job, Launcher

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


def public_callables():
    """(name, function) of each public function, and of each public method of the public classes, as help() shows it."""
    names = {name: getattr(envfleet, name) for name in envfleet.__all__}
    for name, value in (names | {"Launcher": Launcher, "Job": Job}).items():
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value) and value.__module__.startswith("envfleet."):
            for method, function in inspect.getmembers(value, inspect.isroutine):
                is_own = (getattr(function, "__module__", None) or "").startswith("envfleet.")
                if is_own and not method.startswith("_"):
                    yield f"{name}.{method}", function


PUBLIC = dict(public_callables())


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_method_says_what_it_takes_returns_and_raises(name):
    function = PUBLIC[name]
    text, signature = inspect.getdoc(function), inspect.signature(function)
    if set(signature.parameters) - {"self"}:
        assert "Args:\n" in text
        described = re.findall(r"^ {4}\*{0,2}(\w+(?:, \*{0,2}\w+)*):", text.partition("Args:\n")[2], re.MULTILINE)
        described = {each.strip("* ") for names in described for each in names.split(",")}
        assert {*signature.parameters} - {"self"} <= described
    for error in re.findall(r"\braise (\w+)\(", inspect.getsource(function)):
        assert f"{error}:" in text.partition("Raises:\n")[2]
    if signature.return_annotation not in (None, "None", "NoReturn", inspect.Signature.empty):
        assert "Returns:\n" in text or "Yields:\n" in text
