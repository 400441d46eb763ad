"""Libraries that know EnvPool train on its stand-in, in the forms in which they use it."""

import subprocess
import sys

import numpy as np
import pytest

import envfleet.compat.envpool as envpool
from tests.support.scripts import script_environment

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:The `render_mode` attribute:UserWarning")  # SB3 says so of EnvPool, too
def test_stable_baselines3_trains_through_a_wrapper_of_the_pool():
    """As EnvPool's example does it: ended envs are reset one by one, and observations are written over."""
    sb3 = pytest.importorskip("stable_baselines3", reason="needs envfleet[sb3]")
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")

    class Adapter(vec_env.VecEnvWrapper):
        def __init__(self, pool):
            pool.num_envs = pool.spec.config.num_envs
            super().__init__(venv=pool)
            self.num_resets = 0

        def step_async(self, actions):
            self.actions = actions

        def reset(self):
            return self.venv.reset()[0]

        def seed(self, seed=None):
            pass

        def step_wait(self):
            obs, rewards, terminated, truncated, columns = self.venv.step(self.actions)
            done = terminated | truncated
            arrays = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
            infos = [{name: column[row] for name, column in arrays.items()} for row in range(self.num_envs)]
            for row in np.flatnonzero(done):
                infos[row]["terminal_observation"] = obs[row].copy()
                obs[row] = self.venv.reset(np.array([row]))[0][0]
                self.num_resets += 1
            return obs, rewards, done, infos

    with envpool.make("CartPole-v1", env_type="gym", num_envs=4, seed=0) as pool:
        pool.spec.id = "CartPole-v1"
        adapter = Adapter(pool)
        model = sb3.PPO("MlpPolicy", vec_env.VecMonitor(adapter), n_steps=32, batch_size=64, seed=0, device="cpu")
        model.learn(256)
        assert adapter.num_resets == len(model.ep_info_buffer) > 4
        lengths = [episode["l"] for episode in model.ep_info_buffer]
        assert all(8 <= length <= 256 // 4 for length in lengths)


def test_tianshou_collects_from_the_pool_itself():
    """Its collectors step and reset subsets of the envs."""
    pytest.importorskip("tianshou", reason="needs envfleet[tianshou]")
    from tianshou.algorithm.random import MARLRandomDiscreteMaskedOffPolicyAlgorithm as RandomAlgorithm
    from tianshou.data import Collector, VectorReplayBuffer

    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=0)
    algorithm = RandomAlgorithm(action_space=pool.action_space)
    buffer = VectorReplayBuffer(4000, len(pool))
    collector = Collector(algorithm, pool, buffer)
    collector.reset()
    stats = collector.collect(n_episode=10, random=True)
    assert stats.n_collected_episodes == 10
    assert stats.n_collected_steps == stats.lens.sum() == len(buffer)
    np.testing.assert_array_equal(stats.returns, stats.lens)  # a reward of 1 each step: no row is that of a reset
    collector.close()


def test_rl_games_vector_env_for_envpool():
    for module in ("rl_games", "mujoco"):
        pytest.importorskip(module)
    script = """
from envfleet.compat.run_as_envpool import stand_in
stand_in()
import numpy as np
from rl_games.envs.envpool import Envpool
envs = Envpool("envpool", 3, env_name="HalfCheetah-v4", seed=5)
assert type(envs.env).__module__.startswith("envfleet."), type(envs.env)
obs = envs.reset()
assert obs.shape == (3, 17), obs.shape
for _ in range(5):
    obs, rewards, done, info = envs.step(np.zeros((3, 6), np.float32))
assert info["elapsed_step"].tolist() == [5, 5, 5] and not info["time_outs"].any()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
