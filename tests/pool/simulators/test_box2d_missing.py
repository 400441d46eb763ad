"""Envs on Box2D where the native library, the wheel, or both are missing: another backend, or an error that helps."""

import logging
import subprocess
import sys

import pytest

import envfleet
from envfleet.pool.simulators import box2d as native_box2d


def test_without_the_library_processes_run_it(monkeypatch, caplog):
    monkeypatch.setattr(native_box2d, "_LIBRARY", "libnot_built.so")
    assert not {"LunarLander-v3", "BipedalWalker-v3"} & set(envfleet.registry())
    with pytest.raises(envfleet.UsageError, match=r"backend='native' is not available.*made without Box2D"):
        envfleet.make("LunarLander-v3", 2, backend="native")
    with caplog.at_level(logging.INFO), envfleet.make("LunarLander-v3", 2) as pool:
        assert pool.backend == "process"
        pool.reset(seed=0)
        pool.step(pool.action_space.sample())
    assert "libbox2d-dev" in caplog.text


def test_a_library_that_cannot_be_loaded_is_a_warning(monkeypatch, caplog, tmp_path):
    """As if libbox2d.so.2 had been removed after the build."""
    broken = tmp_path / "libenvfleet_box2d.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native_box2d, "_library_path", lambda: broken)
    native_box2d._why_not_loaded.cache_clear()
    try:
        with envfleet.make("BipedalWalker-v3", 1) as pool:
            assert pool.backend == "process"
    finally:
        native_box2d._why_not_loaded.cache_clear()
    assert [record.levelno for record in caplog.records if "Box2D" in record.getMessage()] == [logging.WARNING]


WITHOUT_WHEEL = """
import sys
sys.modules["Box2D"] = None  # as if it were not installed
import importlib.util, envfleet
from envfleet.pool.simulators import box2d
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "Box2D" else find(name, *rest)
"""


def run_without_wheel(program):
    done = subprocess.run([sys.executable, "-c", WITHOUT_WHEEL + program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not native_box2d.is_available(), reason="EnvFleet was built without libbox2d-dev")
def test_native_envs_need_no_wheel():
    program = """
with envfleet.make("LunarLander-v3", 2, render_mode="rgb_array") as pool:
    pool.reset(seed=0)
    pool.step(pool.action_space.sample())
    try:
        pool.render()
    except envfleet.MissingExtra as error:
        print(error)
"""
    assert "'envfleet[box2d]'" in run_without_wheel(program)


def test_neither_library_nor_wheel():
    program = """
box2d._LIBRARY = "libnot_built.so"
for backend in ("auto", "native"):
    try:
        envfleet.make("LunarLander-v3", 2, backend=backend)
    except envfleet.MissingExtra as error:
        print(error)
"""
    assert run_without_wheel(program).count("'envfleet[box2d]'") == 2
