"""A MuJoCo that the native envs were not compiled for. `make test-others` has one."""

import logging

import gymnasium
import pytest
from numpy.testing import assert_array_equal

import envfleet
from envfleet.pool.simulators.mujoco import is_available, library_version

mujoco = pytest.importorskip("mujoco", reason="needs mujoco")
pytestmark = pytest.mark.skipif(is_available(), reason="needs a MuJoCo other than that of the native envs")


def test_gymnasiums_envs_run_in_processes(caplog):
    with caplog.at_level(logging.WARNING, "envfleet.pool"), envfleet.make("Ant-v5", 2) as pool:
        assert pool.backend == "process"
        obs, _ = pool.reset(seed=3)
    for row, seed in enumerate((3, 4)):
        assert_array_equal(obs[row], gymnasium.make("Ant-v5").reset(seed=seed)[0])
    assert f"compiled for version {library_version()}, but {mujoco.__version__} is installed" in caplog.text


def test_native_envs_cannot_be_had():
    assert "Ant-v5" not in envfleet.registry()
    with pytest.raises(envfleet.UsageError, match=f"pip install mujoco=={library_version()}"):
        envfleet.make("Ant-v5", 2, backend="native")
