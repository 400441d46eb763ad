"""A worker builds each env once, whatever autoreset modes the orders want, and in whatever order they come."""

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.contract.pool_config import PoolConfig
from envfleet.contract.spec import EnvSpec
from envfleet.pool.make import make_pool

pytestmark = pytest.mark.usefixtures("quick_workers", "quick_spawners")

NUM_ENVS = 4  # 2 workers with 2 each


class CountedEnv(gymnasium.Env):
    """Leaves a line in a file when it is built. Episodes have 3 steps."""

    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, path):
        with open(path, "a") as file:
            file.write("built\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        return np.full(1, self.num_steps, np.float32), 1.0, self.num_steps == 3, False, {}


def many(num_envs, path):
    return gymnasium.vector.SyncVectorEnv([lambda: CountedEnv(path)] * num_envs)


def first(obs):
    return np.zeros(len(obs), np.int64)


def log_probs(obs, actions):
    return np.zeros(len(obs), np.float32)


AGENT = (first, log_probs)


def step_some(envs):
    envs.reset(seed=0)
    for _ in range(7):
        envs.step(np.zeros(NUM_ENVS, int))


def roll_out(envs):
    rollout = envs.rollout(AGENT, 7)
    assert rollout.terminations.sum() >= NUM_ENVS


MODES = [(roll_out, None), (step_some, None), (step_some, "next_step"), (roll_out, "disabled")]


@pytest.mark.parametrize("backend", ["serial", "process", "vector"])
@pytest.mark.parametrize(("begin", "mode"), MODES)
def test_each_env_is_built_once(tmp_path, backend, begin, mode):
    path = tmp_path / "built"
    env = many if backend == "vector" else CountedEnv
    kwargs = {"path": str(path)}
    with envfleet.ClusterEnv(env, 2, 2, backend=backend, autoreset_mode=mode, env_kwargs=kwargs) as envs:
        begin(envs)
        for _ in range(2):
            if mode != "disabled":
                step_some(envs)
            else:
                envs.reset(seed=0)
            roll_out(envs)
    assert len(path.read_text().splitlines()) == NUM_ENVS


@pytest.mark.parametrize("backend", ["serial", "process", "native"])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_pool_that_switches_equals_one_that_was_made_for_the_mode(backend, batch_size):
    """Also for native envs, whose construction nobody sees."""
    spec = EnvSpec(id="CartPole-v1", max_episode_steps=5)
    config = {"num_envs": 3, "backend": backend}
    with make_pool(spec, PoolConfig(**config, batch_size=batch_size, switches_autoreset=True)) as pool:
        for number, mode in enumerate([*envfleet.Autoreset, *envfleet.Autoreset]):
            if number:  # it was reset: what is in flight is dropped
                pool.send(np.ones(3, int))
            assert pool.switch_autoreset(mode) is True
            assert pool.autoreset_mode.value == mode.value == pool.metadata["autoreset_mode"].value
            if batch_size is not None:
                pool.reset(seed=3)
                continue
            with make_pool(spec, PoolConfig(**config, autoreset=mode)) as fresh:
                np.testing.assert_array_equal(pool.reset(seed=3)[0], fresh.reset(seed=3)[0])
                num_steps = 5 if mode is envfleet.Autoreset.DISABLED else 30
                for _ in range(num_steps):
                    got, expected = pool.step(np.array([0, 1, 0])), fresh.step(np.array([0, 1, 0]))
                    for one, other in zip(got[:4], expected[:4], strict=True):
                        np.testing.assert_array_equal(one, other)
                    assert got[4].keys() == expected[4].keys()


def test_a_pool_without_room_for_final_observations_says_so():
    with envfleet.make("CartPole-v1", 2) as pool:
        with pytest.raises(envfleet.UsageError, match="no room for final observations"):
            pool.switch_autoreset(envfleet.Autoreset.SAME_STEP)
        assert pool.switch_autoreset(envfleet.Autoreset.DISABLED) is True


class SaysItsMode(gymnasium.vector.SyncVectorEnv):
    """Has one mode only: a mask does not reset some of its envs."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)


def of_one_mode(num_envs, autoreset_mode, path):
    return SaysItsMode([lambda: CountedEnv(path)] * num_envs, autoreset_mode=autoreset_mode)


def test_a_vector_env_that_cannot_switch_is_built_anew_or_nothing_changes(tmp_path):
    spec = EnvSpec(factory=of_one_mode, kwargs={"path": str(tmp_path / "built")})
    with make_pool(spec, PoolConfig(num_envs=2, backend="vector", switches_autoreset=True)) as pool:
        pool.reset(seed=0)
        assert pool.switch_autoreset(envfleet.Autoreset.SAME_STEP) is False
        with pytest.raises(envfleet.NotReset):
            pool.step(np.zeros(2, int))
        pool.reset(seed=0)
        assert any("final_obs" in pool.step(np.zeros(2, int))[4] for _ in range(4))
    only_next = EnvSpec(factory=lambda num_envs: SaysItsMode([lambda: CountedEnv(tmp_path / "other")] * num_envs))
    with make_pool(only_next, PoolConfig(num_envs=2, backend="vector", switches_autoreset=True)) as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.UsageError, match="'same_step' is not available"):
            pool.switch_autoreset(envfleet.Autoreset.SAME_STEP)
        assert pool.step(np.zeros(2, int))[0].tolist() == [[1.0], [1.0]]
