"""How many processes a pool starts: CPUs this process may use, and more for envs that wait."""

import logging
import os
import time

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet.pool.process.cpus import share_of, usable_cpus
from envfleet.pool.process.step_timing import StepTimes, advice, fitting_num_workers
from envfleet.testing import ScriptedEnv
from tests.support.inside import num_children, spawner_pid
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


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


def test_children_beside_which_the_caller_works_are_not_bound():
    with envfleet.make(Pinned, 2, backend="process", num_workers=2, batch_size=1) as pool:
        assert set(map(frozenset, pool.call("cpus"))) == {frozenset(os.sched_getaffinity(0))}


class Pinned(ScriptedEnv):
    def cpus(self):
        return os.sched_getaffinity(0)


def test_no_cgroups_at_all(cgroups):
    assert cgroups([], {}) == NUM_CPUS


def fitting(times, num_envs=64, num_cpus=4):
    return fitting_num_workers(times, num_envs, num_cpus)


def test_envs_that_compute_need_one_worker_for_each_cpu():
    times = StepTimes(num_steps=50, wall_s=0.01, cpu_s=0.0099, num_waits=0)
    assert fitting(times) == 4 and fitting(times, num_envs=3) == 3
    assert advice(times, num_workers=4, num_envs=64, num_cpus=4) is None


def test_envs_that_wait_need_more():
    times = StepTimes(num_steps=50, wall_s=0.1, cpu_s=0.04, num_waits=50)
    assert fitting(times) == 40
    text = advice(times, num_workers=4, num_envs=64, num_cpus=4)
    assert "mostly wait (50 steps took 2000 us each, 40% of it on the CPU)" in text and "num_workers=40" in text
    assert advice(times, num_workers=40, num_envs=64, num_cpus=4) is None
    assert fitting(StepTimes(50, 0.1, 0.0, 50)) == 64
    assert fitting(StepTimes(50, 0.1, 0.0, 50), num_envs=1000) == 256


def test_a_busy_machine_is_not_taken_for_envs_that_wait():
    assert fitting(StepTimes(num_steps=50, wall_s=0.1, cpu_s=0.02, num_waits=1)) == 4


def test_the_first_steps_alone_do_not_decide():
    assert not StepTimes(num_steps=7, wall_s=9.0).are_enough  # one of them may have waited for a connection
    assert StepTimes(num_steps=8, wall_s=9.0).are_enough and not StepTimes(num_steps=63, wall_s=0.1).are_enough
    assert StepTimes(num_steps=64, wall_s=0.1).are_enough


class Waits(ScriptedEnv):
    def step(self, action):
        time.sleep(0.002)
        return super().step(0)


class Computes(ScriptedEnv):
    def step(self, action):
        sum(range(20_000))
        return super().step(0)


def steps(pool, num_steps):
    pool.reset(seed=0)
    for _ in range(num_steps):
        pool.step(np.zeros(pool.num_envs, int))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_log_advises_more_processes_if_the_envs_wait(caplog, batch_size):
    num_envs = 8 * usable_cpus()
    with envfleet.make(Waits, num_envs, backend="process", batch_size=batch_size) as pool:
        assert num_children(pool) == usable_cpus()
        pool.async_reset(seed=0)

        def step_until_advised():
            env_ids = pool.recv()[4]["env_id"]
            pool.send(np.zeros(len(env_ids), int), env_ids)
            return any("mostly wait" in record.message for record in caplog.records)

        wait_until(step_until_advised, "the first child has taken enough steps")
        for _ in range(5):
            step_until_advised()
    advised = [record for record in caplog.records if "mostly wait" in record.message]
    assert [record.levelname for record in advised] == ["WARNING"]
    assert f"num_workers={num_envs}" in advised[0].message


def test_the_log_says_that_the_processes_fit(caplog):
    with caplog.at_level(logging.INFO, "envfleet.pool"), envfleet.make(Computes, 40, backend="process") as pool:
        steps(pool, 20)
    assert f"{usable_cpus()} worker processes for 40 envs: one for each CPU" in caplog.text
    assert f"{usable_cpus()} worker processes fit: 64 steps took" in caplog.text and "mostly wait" not in caplog.text


@pytest.mark.parametrize("num_envs", [1, 8])
def test_no_advice_for_a_number_that_the_caller_chose_or_that_cannot_grow(caplog, num_envs):
    num_workers = None if num_envs == 1 else 1
    with envfleet.make(Waits, num_envs, backend="process", num_workers=num_workers) as pool:
        steps(pool, 70 // num_envs)
    assert not caplog.records


def test_a_quota_is_obeyed():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with envfleet.make(Computes, 4, backend="process") as pool:
            assert num_children(pool) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_nursery_has_no_threads_and_children_draw_different_numbers():
    with envfleet.make(Draws, 4, backend="process", num_workers=4) as pool:
        spawner = spawner_pid(pool)
        assert len(os.listdir(f"/proc/{spawner}/task")) == 1
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
        ({"num_envs": 0}, "num_envs must be a whole number of at least 1; got 0"),
        ({"batch_size": 9}, "batch_size must be between 1 and num_envs=2"),
        ({"backend": "gpu"}, "no backend is called 'gpu'"),
        ({"autoreset_mode": "later"}, "autoreset_mode must be one of"),
        ({"on_env_error": "ignore"}, "on_env_error must be"),
        ({"timeout_s": 0}, "timeout_s must be positive"),
        ({"num_workers": 0}, "num_workers must be a whole number of at least 1; got 0"),
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
def test_a_step_of_too_few_envs_is_refused_by_an_asynchronous_pool(backend):
    with envfleet.make("CartPole-v1", 3, backend=backend, batch_size=2) as pool:
        obs, _ = pool.reset(seed=0)
        with pytest.raises(envfleet.NothingToReceive, match="a batch has 2 rows, but only 1 envs are in flight"):
            pool.step(np.array([1]), [0])
        assert (pool.reset(seed=0)[0] == obs).all()
        assert pool.step(np.array([1, 1, 1]), [2, 1, 0])[1].tolist() == [1, 1]
