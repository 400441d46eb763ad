"""A cluster is a VectorEnv that equals a pool on this machine, bit for bit, whatever runs where."""

import subprocess
import sys
import textwrap
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import vector as wrappers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envfleet
from envfleet import Autoreset, ClusterEnv, EnvSpec
from envfleet.testing import CHECKS, PYTHON_ENV_CHECKS, Act, BoxActionEnv, Program, ScriptedEnv, TreeEnv, run_program
from envfleet.testing import conformance as suite
from envfleet.testing.cluster_arguments import cluster_arguments
from envfleet.testing.programs import HARMLESS, require_equal
from tests.support.checks_and_modes import checks_and_modes
from tests.support.envs.detach_envs import ACTION_SPACES, EveryKindEnv
from tests.support.scripts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

MODES = list(Autoreset)
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
EveryKindInSerial = {"env": EveryKindEnv, "backend": "serial"}
ENVS = {
    "cartpole": {"env": "CartPole-v1"},
    "frozenlake": {"env": "FrozenLake-v1"},
    "blackjack": {"env": "Blackjack-v1"},
    "python": EveryKindInSerial,
}


def follow(cluster, pool, num_steps=60, seed=5, ops=True):
    """The same calls on both; all results are equal."""
    generator = np.random.default_rng(seed)
    pool.action_space.seed(seed)
    require_same(cluster.reset(seed=seed), pool.reset(seed=seed))
    num_ended = 0
    for step in range(num_steps):
        actions = pool.action_space.sample()
        got, expected = cluster.step(actions), pool.step(actions)
        require_same(got, expected)
        ended = expected[2] | expected[3]
        num_ended += ended.sum()
        if pool.metadata["autoreset_mode"].value == Autoreset.DISABLED.value and ended.any():
            require_same(*(each.reset(options={"reset_mask": ended.copy()}) for each in (cluster, pool)))
        elif ops and step % 20 == 19:
            mask = generator.random(pool.num_envs) < 0.5
            if mask.any():
                options = {"reset_mask": mask, "start": step}
                require_same(*(each.reset(seed=step, options=dict(options)) for each in (cluster, pool)))
    assert num_ended, "no episode ended: this would prove nothing"


def require_same(got, expected):
    """Equal, and as free to be written to."""
    require_equal(got, expected)
    if isinstance(expected, tuple) and len(expected) == 5:
        for array in got[1:4]:
            assert array.flags.writeable


def both(num_workers, num_envs_per_worker, **kwargs):
    """A cluster, and the pool that it must equal."""
    env, render_mode = kwargs.pop("env"), kwargs.pop("render_mode", None)
    cluster = make_cluster_of(env, num_workers, num_envs_per_worker, render_mode=render_mode, **kwargs)
    return cluster, envfleet.make(env, num_workers * num_envs_per_worker, render_mode=render_mode, **kwargs)


def make_cluster_of(env, num_workers, num_envs_per_worker, render_mode=None, **kwargs):
    """A cluster; `render_mode` is said in the env's spec there."""
    if render_mode is not None:
        env = EnvSpec(**{"id" if isinstance(env, str) else "factory": env, "render_mode": render_mode})
    return ClusterEnv(env, num_workers, num_envs_per_worker, **cluster_arguments(kwargs))


# -- envs, modes, numbers of workers, spaces --


@modes
@pytest.mark.parametrize("env", ENVS)
def test_two_workers(env, mode):
    cluster, pool = both(2, 3, autoreset_mode=mode, **ENVS[env])
    with cluster, pool:
        for name in ("num_envs", "single_observation_space", "single_action_space", "observation_space"):
            assert getattr(cluster, name) == getattr(pool, name)
        assert cluster.action_space == pool.action_space
        assert cluster.metadata == pool.metadata
        assert cluster.spec == pool.spec
        follow(cluster, pool)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("env", ["cartpole", "python"])
def test_other_numbers_of_workers(env, num_workers):
    cluster, pool = both(num_workers, 2, autoreset_mode="same_step", **ENVS[env])
    with cluster, pool:
        follow(cluster, pool)


@pytest.mark.parametrize("actions", ACTION_SPACES)
def test_action_spaces(actions):
    backend = "process" if actions in ("dict", "box") else "serial"
    cluster, pool = both(2, 2, env=EveryKindEnv, backend=backend, env_kwargs={"actions": actions})
    with cluster, pool:
        follow(cluster, pool, 40)


def test_float64_actions_become_those_of_the_space():
    cluster, pool = both(2, 1, env=BoxActionEnv, backend="process")
    with cluster, pool:
        require_same(cluster.reset(seed=0), pool.reset(seed=0))
        for _ in range(3):
            actions = np.random.default_rng(0).random((2, 3))
            require_same(cluster.step(actions), pool.step(actions))


# -- seeds, options, partial resets --


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: mode.name.lower())
def scripted(request):
    """Two workers with two scripted envs each, seeded by the constructor, and a pool like them."""
    cluster, pool = both(2, 2, env=ScriptedEnv, backend="serial", autoreset_mode=request.param, seed=77)
    with cluster, pool:
        require_same(cluster.reset(), pool.reset())  # the constructor's seed
        yield cluster, pool


def test_seeds(scripted):
    cluster, pool = scripted
    by_number = pool.reset(seed=4)[0].copy()
    require_same(cluster.reset(seed=4)[0], by_number)
    for seed in ([9, None, 3, 4], [5, 5, 5, 5], None, np.int64(12), None, 0, [0, 1, None, 2**40]):
        require_same(cluster.reset(seed=seed), pool.reset(seed=seed))
        actions = np.array([Act.GO_ON, Act.TERMINATE, Act.TRUNCATE, Act.GO_ON])
        require_same(cluster.step(actions), pool.step(actions))
    assert cluster.np_random_seed == pool.np_random_seed


def test_options(scripted):
    for options in ({"level": 3}, {"deep": {"list": [1, (2.5, None)], "array": np.arange(3)}}, {}):
        require_same(*(each.reset(seed=1, options=options) for each in scripted))


@pytest.mark.parametrize("mask", ["1000", "1100", "0011", "1001", "1111", "0100"])
def test_some_envs_are_reset(scripted, mask):
    """Also masks that leave out all envs of a worker."""
    mask = np.array([each == "1" for each in mask])
    go_on = np.full(4, Act.GO_ON)
    for end in (False, True):
        require_same(*(each.reset(seed=2) for each in scripted))
        require_same(*(each.step(go_on) for each in scripted))
        if end:
            require_same(*(each.step(np.where(mask, Act.TERMINATE, Act.GO_ON)) for each in scripted))
        options = {"reset_mask": mask, "level": 1}
        require_same(*(each.reset(seed=[5, None, 6, 7], options=dict(options)) for each in scripted))
        require_same(*(each.reset(options={"reset_mask": mask}) for each in scripted))
        for _ in range(3):
            require_same(*(each.step(go_on) for each in scripted))


def test_send_and_recv(scripted):
    """In any order of rows; batches come in the order of envs."""
    require_same(*(each.reset(seed=3) for each in scripted))
    for env_ids in ([0, 1, 2, 3], [3, 0, 2, 1], [2, 3, 1, 0]):
        actions = np.array([Act.GO_ON, Act.GO_ON, Act.TRUNCATE, Act.GO_ON])
        for each in scripted:
            each.send(actions, env_ids)
        require_same(*(each.recv() for each in scripted))
        require_same(*(each.reset(seed=3) for each in scripted))
    for each in scripted:
        each.async_reset(seed=8)
    require_same(*(each.recv() for each in scripted))
    for each in scripted:
        each.send(np.zeros(2, np.int64), [3, 2])
        each.send(np.zeros(2, np.int64), [0, 1])
    require_same(*(each.recv() for each in scripted))


def test_a_reset_drops_what_was_not_received(scripted):
    require_same(*(each.reset(seed=3) for each in scripted))
    for each in scripted:
        each.send(np.full(4, Act.TERMINATE))
    require_same(*(each.reset(seed=4) for each in scripted))
    for each in scripted:
        each.async_reset(seed=5)
    require_same(*(each.reset(seed=4) for each in scripted))
    require_same(*(each.step(np.zeros(4, np.int64)) for each in scripted))


def test_returned_arrays_belong_to_the_caller(scripted):
    cluster, pool = scripted
    held = [cluster.reset(seed=1)]
    expected = [pool.reset(seed=1)]
    for _ in range(20):
        held.append(cluster.step(np.zeros(4, np.int64)))
        expected.append(pool.step(np.zeros(4, np.int64)))
    require_equal(held, expected)
    held[-1][0][:] = 0.0
    require_same(cluster.step(np.zeros(4, np.int64)), pool.step(np.zeros(4, np.int64)))


def test_a_partial_reset_after_the_caller_wrote_into_its_rows(scripted):
    """The rows of envs that are not reset are shown again as they were."""
    cluster, pool = scripted
    for each in scripted:
        each.reset(seed=1)
    obs, expected = cluster.step(np.zeros(4, np.int64))[0], pool.step(np.zeros(4, np.int64))[0].copy()
    obs[:] = -1.0
    got, _ = cluster.reset(options={"reset_mask": np.array([True, False, False, False])})
    require_equal(got[1:], expected[1:])


# -- the asynchronous mode --


@pytest.mark.parametrize(("num_workers", "per_worker", "batch_size"), [(3, 2, 4), (2, 2, 2)])
def test_asynchronous_batches(num_workers, per_worker, batch_size):
    """Each env has the trajectory that it has alone, whichever workers come first."""
    num_envs = num_workers * per_worker
    told = {env_id: [] for env_id in range(num_envs)}
    with ClusterEnv(EveryKindEnv, num_workers, per_worker, batch_size=batch_size, backend="serial") as cluster:
        cluster.async_reset(seed=30)
        for _ in range(40):
            obs, rewards, terminated, truncated, info = cluster.recv()
            env_ids = info["env_id"]
            assert env_ids.dtype == np.int32
            assert env_ids.tolist() == sorted(set(env_ids.tolist())) and len(env_ids) == batch_size == len(rewards)
            for row, env_id in enumerate(env_ids.tolist()):
                told[env_id].append((obs["place"][row], rewards[row], terminated[row], truncated[row]))
            actions = np.array([2 + (len(told[env_id]) + env_id) % 4 for env_id in env_ids.tolist()])
            order = np.random.default_rng(len(told[0])).permutation(batch_size)
            cluster.send(actions[order], env_ids[order])
        first = cluster.reset(seed=1)[0]["place"]
        assert first.shape == (num_envs, 2)
        obs, _, _, _, info = cluster.step(np.full(num_envs, 2))
        assert len(obs["place"]) == batch_size == len(info["env_id"])
    for env_id, steps in told.items():
        assert len(steps) > 1
        with envfleet.make(EveryKindEnv, 1, backend="serial") as alone:
            assert np.array_equal(alone.reset(seed=30 + env_id)[0]["place"][0], steps[0][0])
            for number, (place, reward, terminated, truncated) in enumerate(steps[1:], start=1):
                obs, rewards, ends, cuts, _ = alone.step(np.array([2 + (number + env_id) % 4]))
                require_equal((place, reward), (obs["place"][0], rewards[0]))
                assert (terminated, truncated) == (ends[0], cuts[0])


def test_asynchronous_infos_have_a_row_for_each_row():
    with ClusterEnv(EveryKindEnv, 3, 1, batch_size=2, backend="serial", autoreset_mode="same_step") as cluster:
        cluster.async_reset(seed=0)
        for _ in range(30):
            *_, info = cluster.recv()
            for key, column in info.items():
                if isinstance(column, np.ndarray):
                    assert len(column) == 2, key
            cluster.send(np.full(2, 3), info["env_id"])


# -- methods, attributes, rendering --


def test_methods_attributes_and_frames():
    cluster, pool = both(2, 2, env=EveryKindEnv, backend="serial", render_mode="rgb_array")
    with cluster, pool:
        for each in (cluster, pool):
            each.reset(seed=0)
            each.step(np.full(4, 2))
            each.set_attr("level", [1, 2, 3, 4])
        require_equal(cluster.get_attr("level"), pool.get_attr("level"))
        require_equal(cluster.call("scaled", 3.0, by=4), pool.call("scaled", 3.0, by=4))
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        require_equal(cluster.call("scaled", array, by=array), pool.call("scaled", array, by=array))
        frames = cluster.render()
        assert isinstance(frames, tuple)
        require_equal(frames, pool.render())
        for env_ids in ([2], [3, 0], [1, 2, 0]):  # of one worker, of both
            require_equal(cluster.render(env_ids), pool.render(env_ids))
            require_equal(cluster.call_some(env_ids, "level"), pool.call_some(env_ids, "level"))
        for wrong in ([], [4], [1, 1]):
            with pytest.raises(envfleet.UsageError, match="env_ids"):
                cluster.render(wrong)
        assert cluster.render_mode == "rgb_array" == pool.render_mode
        for levels in (9, (5, 6, 7, 8), np.int64(3)):
            for each in (cluster, pool):
                each.set_attr("level", levels)
            require_equal(cluster.get_attr("level"), pool.get_attr("level"))
        require_same(cluster.step(np.full(4, 3)), pool.step(np.full(4, 3)))


def test_frames_of_a_registered_env():
    cluster, pool = both(2, 1, env="CartPole-v1", render_mode="rgb_array")
    with cluster, pool:
        cluster.reset(seed=0), pool.reset(seed=0)
        require_equal(cluster.render(), pool.render())


# -- what the user may call an env --


def small_kwargs(env_id):
    return {"level": env_id * env_id, "ends": 0.05}


class OfThisModule(EveryKindEnv):
    def __init__(self, level=3, **kwargs):
        super().__init__(level=level + 100, **kwargs)


ENV_KINDS = {
    "kwargs dict": {"env": "FrozenLake-v1", "env_kwargs": {"is_slippery": False, "map_name": "8x8"}},
    "kwargs list": {**EveryKindInSerial, "env_kwargs": [{"level": level} for level in (4, 3, 2, 1)]},
    "kwargs callable": {**EveryKindInSerial, "env_kwargs": small_kwargs},
    "time limit of a class": {"env": EnvSpec(factory=EveryKindEnv, max_episode_steps=4), "backend": "serial"},
    "no time limit": {"env": EnvSpec(id="CartPole-v1", max_episode_steps=-1)},
    "lambda": {"env": lambda: EveryKindEnv(level=8), "backend": "serial"},
    "partial": {"env": partial(EveryKindEnv, level=9), "backend": "serial"},
    "class of this module": {"env": OfThisModule, "backend": "serial"},
    "list of factories": {"env": [partial(EveryKindEnv, level=i) for i in range(4)], "backend": "serial"},
    "spec of an id": {"env": EnvSpec(id="FrozenLake-v1", kwargs={"map_name": "8x8"}, max_episode_steps=9)},
    "spec of a factory": {
        "env": EnvSpec(factory="tests.support.envs.detach_envs:EveryKindEnv", kwargs={"level": 6}, max_episode_steps=6),
        "backend": "serial",
    },
    "spec overruled": {
        "env": EnvSpec(factory="tests.support.envs.detach_envs:EveryKindEnv", kwargs={"level": 6, "ends": 0.2}),
        "env_kwargs": {"level": 5},
        "backend": "serial",
    },
    "gymnasium's spec": {"env": gymnasium.spec("CartPole-v1")},
}


@pytest.mark.parametrize("kind", ENV_KINDS)
def test_what_an_env_may_be(kind):
    cluster, pool = both(2, 2, **ENV_KINDS[kind])
    with cluster, pool:
        assert cluster.spec == pool.spec
        follow(cluster, pool, 40, ops=False)


@pytest.fixture
def registered():
    """Ids that only this process knows."""
    gymnasium.register("OnlyHereByClass-v0", OfThisModule, max_episode_steps=5, kwargs={"ends": 0.01})
    gymnasium.register("OnlyHereByPath-v0", "tests.support.envs.detach_envs:EveryKindEnv", kwargs={"level": 11})
    gymnasium.register("OnlyHereByLambda-v0", lambda **kwargs: EveryKindEnv(**kwargs), kwargs={"level": 12})
    gymnasium.register("OnlyHereOfGymnasium-v0", CARTPOLE, max_episode_steps=3)
    yield
    for env_id in ONLY_HERE:
        del gymnasium.registry[env_id]


CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
ONLY_HERE = ("OnlyHereByClass-v0", "OnlyHereByPath-v0", "OnlyHereByLambda-v0", "OnlyHereOfGymnasium-v0")


@pytest.mark.parametrize("name", ONLY_HERE)
def test_ids_that_only_this_process_knows(registered, name):
    cluster, pool = both(2, 2, env=name, backend="serial")
    with cluster, pool:
        follow(cluster, pool, 30, ops=False)


def test_the_arguments_of_an_id_that_only_this_process_knows(registered):
    env = EnvSpec(id="OnlyHereByPath-v0", kwargs={"level": 21}, max_episode_steps=3)
    cluster, pool = both(2, 1, env=env, backend="serial", env_kwargs={"ends": 0.0})
    with cluster, pool:
        assert pool.get_attr("level") == (21, 21)
        assert cluster.get_attr("level") == (21, 21)
        follow(cluster, pool, 10, ops=False)


def test_a_main_script_without_a_guard(tmp_path):
    """Classes, lambdas and ids of __main__ reach the workers; the script does not run again there."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import gymnasium, numpy as np, envfleet
            from tests.support.envs.detach_envs import EveryKindEnv
            from envfleet.testing.programs import require_equal

            print("this script runs")
            LEVEL = 5

            class Mine(EveryKindEnv):
                def __init__(self, **kwargs):
                    super().__init__(**{"level": LEVEL, **kwargs})

            gymnasium.register("Mine-v0", Mine)
            for env in (Mine, lambda: Mine(level=6), "Mine-v0", [Mine, lambda: Mine(level=9)]):
                with (
                    envfleet.ClusterEnv(env, 2, 1, backend="serial") as cluster,
                    envfleet.make(env, 2, backend="serial") as pool,
                ):
                    require_equal(cluster.reset(seed=1), pool.reset(seed=1))
                    for _ in range(5):
                        require_equal(cluster.step(np.full(2, 3)), pool.step(np.full(2, 3)))
            print("done")
            """
        )
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, env=environment)
    assert (ran.returncode, ran.stdout.split("\n")) == (0, ["this script runs", "done", ""]), ran.stderr
    assert ran.stderr == ""


# -- programs, the conformance suite, Gymnasium's wrappers --

NUM_ENVS = 4
ACTS = st.lists(st.sampled_from([int(act) for act in HARMLESS]), min_size=NUM_ENVS, max_size=NUM_ENVS)
OPS = st.one_of(
    st.tuples(st.just("step"), ACTS),
    st.tuples(st.just("reset"), st.one_of(st.none(), st.integers(0, 50))),
    st.tuples(st.just("reset_some"), st.lists(st.booleans(), min_size=NUM_ENVS, max_size=NUM_ENVS)),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ops=st.lists(OPS, max_size=20))
def test_any_program_equals_gymnasium(scripted, ops):
    run_program(scripted[0], Program(NUM_ENVS, ops))


def make_cluster(env, num_envs, **kwargs):
    """A worker for each env, so that send() may choose any of them."""
    return make_cluster_of(env, num_envs, 1, backend="serial", **kwargs)


# A cluster carries arrays only: Text, Sequence and Graph spaces are refused (test below).
APPLY = [check for check in CHECKS + PYTHON_ENV_CHECKS if check is not suite.any_space_is_carried]


@pytest.mark.parametrize(("check", "mode"), checks_and_modes(APPLY))
def test_conformance(check, mode):
    check(make_cluster, mode)


@modes
def test_conformance_of_several_envs_in_a_worker(mode):
    suite.autoreset_follows_its_mode(
        lambda env, num_envs, **kwargs: ClusterEnv(env, 1, num_envs, **cluster_arguments(kwargs)), mode
    )


def test_spaces_that_are_no_arrays_are_refused():
    with pytest.raises(envfleet.EnvFleetError, match=r"Text|Sequence|Graph"):
        ClusterEnv(TreeEnv, 1, 1, backend="serial")


WRAPPERS = {
    "statistics": lambda envs: wrappers.RecordEpisodeStatistics(envs),
    "normalize": lambda envs: wrappers.NormalizeReward(wrappers.NormalizeObservation(envs)),
    "clip": lambda envs: wrappers.ClipReward(envs, -0.5, 0.5),
    "list": lambda envs: wrappers.DictInfoToList(wrappers.RecordEpisodeStatistics(envs)),
    "dtype": lambda envs: wrappers.DtypeObservation(envs, np.float64),
    "flatten": lambda envs: wrappers.FlattenObservation(envs),
}


@pytest.fixture(scope="module")
def cartpoles():
    with ClusterEnv("CartPole-v1", 2, 2) as cluster:
        yield cluster


@pytest.mark.parametrize("name", WRAPPERS)
def test_gymnasiums_wrappers(cartpoles, name):
    ours = WRAPPERS[name](cartpoles)
    theirs = WRAPPERS[name](gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync"))
    generator = np.random.default_rng(0)
    try:
        require_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
        for _ in range(80):
            actions = generator.integers(0, 2, 4)
            got, expected = ours.step(actions), theirs.step(actions)
            require_equal(got[:4], expected[:4])
            require_equal(without_times(got[4]), without_times(expected[4]))
    finally:
        theirs.close()


def without_times(infos):
    """Wall-clock times differ, of course."""
    if isinstance(infos, dict):
        return {key: without_times(value) for key, value in infos.items() if key not in ("t", "_t")}
    return [without_times(info) for info in infos] if isinstance(infos, list) else infos
