"""Thunks such as `lambda: gym.make("My-v0")` find what the script has registered, in child processes and on workers."""

import importlib
import os
import subprocess
import sys
import textwrap
import threading

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import envfleet
from envfleet.pool.registrations import Registrations, is_gymnasiums_own
from envfleet.testing import ScriptedEnv

pytestmark = pytest.mark.slow

MODULE = """
import gymnasium
class ModuleEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(99)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, level=0, render_mode=None):
        self.level = level
    def reset(self, *, seed=None, options=None):
        return self.level, {}
    def step(self, action):
        return self.level, 0.0, False, False, {}
class Twice(ModuleEnv):
    def __init__(self, **kwargs):
        super().__init__(level=2 * gymnasium.make("Module/Plain-v0").unwrapped.level)
gymnasium.register("Module/Plain-v0", entry_point="module_of_envs:ModuleEnv", kwargs={"level": 11})
gymnasium.register("Module/Class-v0", entry_point=ModuleEnv, kwargs={"level": 12})
gymnasium.register("Module/Twice-v0", entry_point="module_of_envs:Twice")
gymnasium.register("Module/Replaced-v0", entry_point=ModuleEnv, kwargs={"level": 13})
"""

SCRIPT = """
import gymnasium as gym
import module_of_envs
import envfleet
{imports}

class Mine(module_of_envs.ModuleEnv):
    pass

gym.register("ByClass-v0", entry_point=Mine, kwargs={{"level": 1}})
gym.register("ByPath-v0", entry_point="__main__:Mine", kwargs={{"level": 2}})
gym.register("ByLambda-v0", entry_point=lambda **kwargs: Mine(**kwargs), kwargs={{"level": 3}})
gym.register("Wrapped-v0", entry_point=Mine, max_episode_steps=7, kwargs={{"level": 4}})
del gym.registry["Module/Replaced-v0"]
gym.register("Module/Replaced-v0", entry_point=Mine, kwargs={{"level": 5}})

def make_env(env_id):
    def thunk():
        env = gym.make(env_id)
        return gym.wrappers.RecordEpisodeStatistics(env)
    return thunk

ids = ["ByClass-v0", "ByPath-v0", "ByLambda-v0", "Wrapped-v0"]
ids += ["Module/Plain-v0", "Module/Class-v0", "Module/Twice-v0", "Module/Replaced-v0"]
with {pool} as envs:
    obs, _ = envs.reset(seed=0)
    print(obs.tolist(), [envs.step(envs.action_space.sample())[3].any() for _ in range(7)].count(True))
{more}
"""

LEVELS = "[1, 2, 3, 4, 11, 12, 22, 5] 1\n"
ATARI = """
with envfleet.make([make_env("ALE/Pong-v5")] * 2, num_workers=1) as envs:
    print(envs.reset(seed=0)[0].shape)
"""


def output_of(tmp_path, pool, imports="", more=""):
    """What the script prints. It may print nothing on stderr, and warnings are errors."""
    (tmp_path / "module_of_envs.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "script.py").write_text(SCRIPT.format(pool=pool, imports=imports, more=more))
    environment = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, tmp_path / "script.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    said = [line for line in ran.stderr.splitlines() if not line.startswith(("A.L.E:", "[Powered by Stella]"))]
    assert (ran.returncode, said) == (0, [])
    return ran.stdout


@pytest.mark.parametrize("num_workers", [1, 3])
def test_thunks_find_the_registrations_of_the_script(tmp_path, num_workers):
    pool = f"envfleet.make([make_env(each) for each in ids], num_workers={num_workers})"
    assert output_of(tmp_path, pool) == LEVELS


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_thunks_find_them_on_workers(tmp_path, backend):
    pool = f"envfleet.ClusterEnv([make_env(each) for each in ids], 2, 4, backend={backend!r})"
    assert output_of(tmp_path, pool) == LEVELS


def test_thunks_find_atari_games_of_an_imported_ale_py(tmp_path):
    pytest.importorskip("ale_py", reason="needs envfleet[atari]")
    pool = "envfleet.make([make_env(each) for each in ids], num_workers=2)"
    assert output_of(tmp_path, pool, "import ale_py", ATARI) == LEVELS + "(2, 210, 160, 3)\n"


@pytest.fixture
def register():
    """gymnasium.register, undone after the test."""
    before = dict(gymnasium.registry)
    yield gymnasium.register
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def test_an_id_that_is_registered_in_main_by_path(tmp_path):
    for pool in ("envfleet.make('ByPath-v0', 2)", "envfleet.ClusterEnv('ByPath-v0', 2, 1)"):
        assert output_of(tmp_path, pool) == "[2, 2] 0\n"


def test_a_registration_that_cannot_travel_is_named_when_it_is_needed(register):
    lock = threading.Lock()
    register("Locked-v0", entry_point=lambda: (lock, ScriptedEnv())[1])
    with envfleet.make(ScriptedEnv, 2, backend="process", num_workers=1) as pool:  # does not need it
        pool.reset(seed=0)
    with pytest.raises(envfleet.UsageError, match=r"Locked-v0 is registered .* cannot be passed .*lock"):
        envfleet.make(lambda: gymnasium.make("Locked-v0"), 2, backend="process")


MODULE_WITH_LOCK = """
import threading
import gymnasium
from envfleet.testing import ScriptedEnv
def entry_point(lock):
    return lambda **kwargs: (lock, ScriptedEnv())[1]
gymnasium.register("WithLock-v0", entry_point=entry_point(threading.Lock()))
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_one_that_cannot_travel_is_made_by_its_module(tmp_path, monkeypatch, register, num_workers):
    (tmp_path / "module_with_lock.py").write_text(MODULE_WITH_LOCK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_with_lock", raising=False)
    importlib.import_module("module_with_lock")

    def build():
        importlib.import_module("module_with_lock")  # in a child that has built an env before, it does nothing
        gymnasium.make("WithLock-v0")  # an env of its own, inside this one
        return ScriptedEnv()

    assert "WithLock-v0" in Registrations.of_this_process().refusals
    with envfleet.make(build, 2, backend="process", num_workers=num_workers) as pool:
        pool.reset(seed=0)


def test_one_that_cannot_travel_does_not_become_that_of_gymnasium(register):
    lock = threading.Lock()
    del gymnasium.registry["CartPole-v1"]
    register("CartPole-v1", entry_point=lambda: (lock, ScriptedEnv())[1])
    with pytest.raises(envfleet.UsageError, match=r"CartPole-v1 is registered .* cannot be passed"):
        envfleet.make(lambda: gymnasium.make("CartPole-v1"), 2, backend="process")


def test_what_gymnasium_registers_itself_does_not_travel(register):
    assert all(is_gymnasiums_own(spec) for env_id, spec in gymnasium.registry.items() if env_id.startswith("CartPole"))
    before = Registrations.of_this_process().pickles.keys()
    assert "CartPole-v1" not in before and "Ant-v2" not in before
    register("Own-v0", entry_point=CartPoleEnv)
    gymnasium.registry["CartPole-v1"].max_episode_steps = 9
    try:
        assert Registrations.of_this_process().pickles.keys() - before == {"Own-v0", "CartPole-v1"}
    finally:
        gymnasium.registry["CartPole-v1"].max_episode_steps = 500
