"""How many processes a pool starts: CPUs this process may use, and more for envs that wait."""

import logging
import os
import time

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.pool.cpus import share_of, usable_cpus
from envfleet.pool.scout import Findings, Timing, choose_num_workers
from envfleet.testing import ScriptedEnv


@pytest.fixture
def cgroups(tmp_path):
    """A made-up /proc/self and /sys/fs/cgroup: `cgroups(lines, {path: text})`."""

    def make(lines, files):
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "cgroup").write_text("\n".join(lines) + "\n")
        for path, text in files.items():
            file = tmp_path / "cgroup" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return usable_cpus(tmp_path / "proc", tmp_path / "cgroup")

    return make


NUM_CPUS = len(os.sched_getaffinity(0))


def test_without_a_quota_affinity_counts(cgroups):
    assert cgroups(["0::/"], {"cpu.max": "max 100000"}) == NUM_CPUS


def test_version_2_quota_of_a_parent_group_counts(cgroups):
    files = {"job/cpu.max": "100000 100000", "job/task/cpu.max": "max 100000"}
    assert cgroups(["0::/job/task"], files) == 1


def test_version_1_quota_counts(cgroups):
    files = {"cpu/box/cpu.cfs_quota_us": "150000", "cpu/box/cpu.cfs_period_us": "100000"}
    assert cgroups(["5:memory:/box", "4:cpu,cpuacct:/box"], files) == 1


def test_less_than_one_cpu_is_still_one(cgroups):
    assert cgroups(["0::/"], {"cpu.max": "20000 100000"}) == 1


def test_children_share_the_cpus_in_blocks():
    cpus = [0, 1, 2, 3, 8, 9, 10]
    assert [list(share_of(cpus, child, 3)) for child in range(3)] == [[0, 1], [2, 3], [8, 9, 10]]
    assert [list(share_of(cpus, child, 7)) for child in range(7)] == [[cpu] for cpu in cpus]
    assert share_of(cpus, 5, 8) == cpus


@pytest.mark.parametrize("pin", [True, False])
def test_children_keep_to_their_share(pin):
    with envfleet.make(Pinned, 2, backend="process", num_workers=2, pin_workers=pin) as pool:
        first, second = pool.call("cpus")
        everything = os.sched_getaffinity(0)
        if pin and len(everything) > 1:
            assert first.isdisjoint(second) and first | second == everything
        else:
            assert first == second == everything


class Pinned(ScriptedEnv):
    def cpus(self):
        return os.sched_getaffinity(0)


def test_no_cgroups_at_all(cgroups):
    assert cgroups([], {}) == NUM_CPUS


def chosen(timing, num_envs=64, num_cpus=4):
    return choose_num_workers(Findings(traits=None, timing=timing), num_envs, num_cpus)


def test_an_env_that_computes_gets_one_worker_for_each_cpu():
    number, why = chosen(Timing(num_steps=50, wall_s=0.01, cpu_s=0.0099, num_waits=0))
    assert number == 4 and "computes" in why and "200 us" in why
    assert chosen(Timing(50, 0.01, 0.01, 0), num_envs=3)[0] == 3


def test_an_env_that_waits_gets_more():
    number, why = chosen(Timing(num_steps=50, wall_s=0.1, cpu_s=0.04, num_waits=50))
    assert number == 40 and "mostly waits" in why and "40%" in why
    assert chosen(Timing(50, 0.1, 0.0, 50))[0] == 64
    assert chosen(Timing(50, 0.1, 0.0, 50), num_envs=1000)[0] == 256


def test_a_busy_machine_is_not_taken_for_an_env_that_waits():
    assert chosen(Timing(num_steps=50, wall_s=0.1, cpu_s=0.02, num_waits=1))[0] == 4


def test_an_env_that_could_not_be_measured_gets_the_default():
    assert chosen(None)[0] == 4


class Waits(ScriptedEnv):
    def step(self, action):
        time.sleep(0.002)
        return super().step(0)


class Computes(ScriptedEnv):
    def step(self, action):
        sum(range(20_000))
        return super().step(0)


@pytest.mark.parametrize(("env", "word"), [(Waits, "mostly waits"), (Computes, "computes")])
def test_the_pool_measures_and_says_what_it_chose(env, word, caplog):
    with caplog.at_level(logging.INFO, "envfleet.pool"), envfleet.make(env, 6, backend="process") as pool:
        expected = 6 if env is Waits else min(6, usable_cpus())
        assert pool._backend._shape.num_children == expected
        assert f"{expected} worker processes for 6 envs" in caplog.text and word in caplog.text
        obs, _ = pool.reset(seed=0)
        assert obs[:, 2].tolist() == [0.0] * 6  # the env that was measured is not one of the pool


class DiesOfRandomActions(ScriptedEnv):
    def step(self, action):
        os._exit(5)


class HangsOnRandomActions(ScriptedEnv):
    def step(self, action):
        time.sleep(60)


@pytest.mark.parametrize("env", [DiesOfRandomActions, HangsOnRandomActions])
def test_random_actions_may_be_the_end_of_the_scout_but_not_of_the_pool(env, monkeypatch):
    monkeypatch.setattr("envfleet.pool.process.MEASURE_WAIT_S", 0.5)
    with envfleet.make(env, 3, backend="process") as pool:
        assert pool._backend._shape.num_children == min(3, usable_cpus())
        assert pool.reset(seed=0)[0].shape == (3, 4)


def test_a_quota_is_obeyed():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with envfleet.make(Computes, 4, backend="process") as pool:
            assert pool._backend._shape.num_children == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_nursery_has_no_threads_and_children_draw_different_numbers():
    with envfleet.make(Draws, 4, backend="process", num_workers=4) as pool:
        nursery = pool._backend._household.nursery._process.pid
        assert len(os.listdir(f"/proc/{nursery}/task")) == 1
        assert len(set(pool.call("draw"))) == 4


class Draws(ScriptedEnv):
    def draw(self):
        return float(np.random.random())


def test_gymnasium_ids_specs_and_factories():
    spec = envfleet.EnvSpec(id="CartPole-v1", kwargs={"sutton_barto_reward": True}, max_episode_steps=7)
    factory = envfleet.EnvSpec(factory="envfleet.testing:ScriptedEnv", kwargs={"name": "x"})
    for env in ("CartPole-v1", gymnasium.spec("CartPole-v1"), spec):
        for backend in ("serial", "process"):
            with envfleet.make(env, 2, backend=backend, num_workers=1) as pool:
                assert pool.spec.id == "CartPole-v1"
                assert pool.spec.max_episode_steps == (7 if env is spec else 500)
                assert "CartPole-v1" in repr(pool)
    with envfleet.make(factory, 2, backend="process", num_workers=1) as pool:
        assert pool.get_attr("name") == ("x", "x")


def test_env_kwargs_may_be_a_function_of_the_index():
    with envfleet.make(ScriptedEnv, 3, backend="serial", env_kwargs=lambda i: {"name": f"n{i}"}) as pool:
        assert pool.get_attr("name") == ("n0", "n1", "n2")


def test_max_episode_steps_holds_for_callables():
    with envfleet.make([ScriptedEnv] * 2, backend="serial", max_episode_steps=3) as pool:
        pool.reset(seed=0)
        ends = [pool.step(np.zeros(2, int))[3].tolist() for _ in range(3)]
        assert ends == [[False, False], [False, False], [True, True]]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_envs": 0}, "num_envs must be at least 1"),
        ({"batch_size": 9}, "batch_size must be between 1 and num_envs=2"),
        ({"backend": "gpu"}, "no backend is called 'gpu'"),
        ({"autoreset_mode": "later"}, "autoreset_mode must be one of"),
        ({"on_env_error": "ignore"}, "on_env_error must be"),
        ({"timeout_s": 0}, "timeout_s must be positive"),
        ({"num_workers": 0}, "num_workers must be at least 1"),
        ({"env_kwargs": [{}]}, "env_kwargs must have num_envs=2 entries"),
        ({"env": [ScriptedEnv]}, "num_envs=2 entries; got 1"),
        ({"env": 7}, "env must be a Gymnasium id"),
    ],
)
def test_wrong_arguments_are_refused(arguments, complaint):
    with pytest.raises(envfleet.UsageError, match=complaint):
        envfleet.make(**{"env": ScriptedEnv, "num_envs": 2, "backend": "serial", **arguments})


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_envs_of_one_pool_have_equal_spaces(backend):
    with pytest.raises(envfleet.SpacesDiffer, match="env 1 has another action_space"):
        envfleet.make([ScriptedEnv, Other], backend=backend, num_workers=2)


class Other(ScriptedEnv):
    def __init__(self):
        super().__init__()
        self.action_space = gymnasium.spaces.Discrete(2)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_factory_must_return_an_env(backend):
    with pytest.raises(envfleet.UsageError, match=r"must return a gymnasium\.Env; got int"):
        envfleet.make(lambda: 3, 2, backend=backend)


class Talks(ScriptedEnv):
    """Says things that are hard to pass on."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(0)
        if action == 1:
            info = {"function": lambda: 5, "large": np.arange(2_000_000)}
        if action == 2:
            info = {"lock": __import__("threading").Lock()}
        return obs, reward, terminated, truncated, info


def test_infos_may_be_large_or_odd_and_what_cannot_travel_is_said(caplog):
    with envfleet.make(Talks, 2, backend="process", num_workers=1) as pool:
        pool.reset(seed=0)
        *_, infos = pool.step(np.array([1, 0]))
        assert infos["function"][0]() == 5
        assert infos["large"][0, -1] == 1_999_999
        obs, *_, infos = pool.step(np.array([2, 0]))
        assert "lock" not in infos and "env_error" not in infos
        assert "info['lock'] is left out" in caplog.text
        assert obs[:, 1].tolist() == [2, 2]


class Echo(gymnasium.Env):
    """Returns its action as the observation."""

    def __init__(self, space):
        self.observation_space = self.action_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return action, 0.0, False, False, {}


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"],
)
def test_boxes_of_every_dtype(dtype):
    box = gymnasium.spaces.Box(0, 1, (2, 3), np.dtype(dtype).type)
    with envfleet.make(Echo, 2, env_kwargs={"space": box}, backend="process", num_workers=1) as pool:
        pool.reset(seed=0)
        actions = pool.action_space.sample()
        obs = pool.step(actions)[0]
        assert obs.dtype == np.dtype(dtype) and obs.tobytes() == actions.tobytes()


class OwnSpace(gymnasium.Space):
    """A space that nobody has heard of."""

    def sample(self, mask=None):
        return {"number": int(self.np_random.integers(9))}

    def contains(self, x):
        return isinstance(x, dict) and "number" in x

    def __eq__(self, other):
        return isinstance(other, OwnSpace)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_spaces_of_the_users_own(backend):
    with envfleet.make(Echo, 3, env_kwargs={"space": OwnSpace()}, backend=backend, num_workers=2) as pool:
        assert all("number" in obs for obs in pool.reset(seed=0)[0])
        actions = ({"number": 1}, {"number": 2}, {"number": 3})
        assert pool.step(actions)[0] == actions


@pytest.mark.parametrize("backend", ["native", "process", "serial"])
def test_a_step_of_too_few_envs_is_refused(backend):
    with envfleet.make("CartPole-v1", 3, backend=backend) as pool:
        obs, _ = pool.reset(seed=0)
        with pytest.raises(envfleet.NothingToReceive, match="a batch has 3 rows, but only 1 envs are in flight"):
            pool.step(np.array([1]), [0])
        assert (pool.reset(seed=0)[0] == obs).all()
        assert pool.step(np.array([1, 1, 1]), [2, 1, 0])[1].tolist() == [1, 1, 1]
