"""Plans: what of the user's words travels plain, what is pickled, and who gets which part."""

import inspect
import threading
from functools import partial

import cloudpickle
import gymnasium
import numpy as np
import pytest

from envfleet import ClusterEnv, EnvSpec, UsageError
from envfleet.cluster.run.plans import env_pickles, gymnasium_spec_of, pool_plans
from envfleet.cluster.wire.plain_values import from_plain
from envfleet.contract.pool_config import PoolConfig
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.detach_envs import EveryKindEnv


def plans_of(env, num_workers=2, num_envs_per_worker=3, env_kwargs=None, seed=None, pool=(), **said):
    spec = EnvSpec.of(env, kwargs=env_kwargs, **said)
    return pool_plans(spec, PoolConfig(num_envs=num_envs_per_worker, **dict(pool)), seed, num_workers)


def pickles_of(env, env_kwargs=None):
    """(what builds the envs, their arguments) for each worker; None where nothing is pickled."""
    pickled = env_pickles(EnvSpec.of(env, kwargs=env_kwargs), plans_of(env, env_kwargs=env_kwargs))
    specs = [None if each is None else cloudpickle.loads(each)[0] for each in pickled]
    return [None if spec is None else (spec.factory, spec.kwargs) for spec in specs]


def kwargs_in(plan):
    return [from_plain(each) for each in plan.env.kwargs]


@pytest.fixture
def only_here():
    gymnasium.register("OnlyHere-v0", EveryKindEnv, max_episode_steps=5)
    yield "OnlyHere-v0"
    del gymnasium.registry["OnlyHere-v0"]


def test_a_built_in_id_travels_as_it_is():
    plans = plans_of("CartPole-v1", max_episode_steps=9, render_mode="rgb_array", seed=4, pool={"num_workers": 3})
    assert [plan.first_env_id for plan in plans] == [0, 3]
    assert all(plan.env.id == "CartPole-v1" and plan.env.factory is None for plan in plans)
    plan = plans[1]
    assert (plan.pool.num_envs, plan.env.max_episode_steps, plan.env.render_mode, plan.seed) == (3, 9, "rgb_array", 4)
    assert plan.pool == PoolConfig(num_envs=3, num_workers=3)
    assert pickles_of("CartPole-v1") == [None, None]


def test_a_spec_says_more_than_its_id():
    spec = EnvSpec(id="FrozenLake-v1", kwargs={"map_name": "8x8"}, max_episode_steps=7, render_mode="ansi")
    plan = plans_of(spec)[0]
    assert (plan.env.id, plan.env.max_episode_steps, plan.env.render_mode) == ("FrozenLake-v1", 7, "ansi")
    assert kwargs_in(plan) == [{"map_name": "8x8"}] * 3
    overruled = plans_of(spec, env_kwargs={"map_name": "4x4"}, max_episode_steps=8, render_mode="rgb_array")[1]
    assert (overruled.env.max_episode_steps, overruled.env.render_mode) == (8, "rgb_array")
    assert kwargs_in(overruled) == [{"map_name": "4x4"}] * 3


def test_a_factory_by_path_is_not_pickled():
    spec = EnvSpec(factory="tests.support.envs.detach_envs:EveryKindEnv", kwargs={"level": 2})
    plans = plans_of(spec, env_kwargs=[{"ends": i / 10} for i in range(6)])
    assert {plan.env.factory for plan in plans} == {"tests.support.envs.detach_envs:EveryKindEnv"}
    assert plans[0].env.id is None
    assert kwargs_in(plans[1]) == [{"level": 2, "ends": i / 10} for i in (3, 4, 5)]
    assert pickles_of(spec) == [None, None]


@pytest.mark.parametrize("env_kwargs", [lambda env_id: {"level": env_id}, [{"level": i} for i in range(6)]])
def test_arguments_count_the_envs_of_the_whole_run(env_kwargs):
    assert [kwargs_in(plan) for plan in plans_of("CartPole-v1", env_kwargs=env_kwargs)] == [
        [{"level": 0}, {"level": 1}, {"level": 2}],
        [{"level": 3}, {"level": 4}, {"level": 5}],
    ]
    first, second = pickles_of(EveryKindEnv, env_kwargs)
    assert first == (EveryKindEnv, [{"level": 0}, {"level": 1}, {"level": 2}])
    assert second[1] == [{"level": 3}, {"level": 4}, {"level": 5}]


def test_arguments_that_are_not_plain_are_pickled():
    kwargs = {"thing": EveryKindEnv, "number": complex(1, 2)}
    spec, its_kwargs = pickles_of("CartPole-v1", kwargs)[1]
    assert spec == gymnasium.spec("CartPole-v1")
    assert its_kwargs == [kwargs] * 3
    assert plans_of("CartPole-v1", env_kwargs=kwargs)[0].env is None


def test_arguments_of_a_spec_are_not_lost_where_it_is_pickled():
    kwargs = {"thing": EveryKindEnv}
    env, its_kwargs = pickles_of(EnvSpec(id="FrozenLake-v1", kwargs={"map_name": "8x8"}), kwargs)[0]
    assert env == gymnasium.spec("FrozenLake-v1")
    assert its_kwargs == [{"map_name": "8x8", **kwargs}] * 3


def test_an_id_known_only_here_travels_as_gymnasiums_spec(only_here):
    env, kwargs = pickles_of(only_here)[0]
    assert isinstance(env, gymnasium.envs.registration.EnvSpec) and env.entry_point is EveryKindEnv
    assert env.max_episode_steps == 5 and kwargs == {}
    assert plans_of(only_here)[0].env is None


def test_a_list_is_cut_into_parts():
    factories = [partial(EveryKindEnv, level=i) for i in range(6)]
    first, second = pickles_of(factories)
    assert [each.keywords["level"] for each in first[0]] == [0, 1, 2]
    assert [each.keywords["level"] for each in second[0]] == [3, 4, 5]


def test_an_id_that_nobody_here_knows_is_left_to_the_workers():
    assert plans_of("SomewhereElse-v7")[0].env.id == "SomewhereElse-v7"
    assert gymnasium_spec_of(EnvSpec.of("SomewhereElse-v7")) is None


def test_spec_of(only_here):
    assert gymnasium_spec_of(EnvSpec.of("CartPole-v1")) == gymnasium.spec("CartPole-v1")
    assert gymnasium_spec_of(EnvSpec.of(EnvSpec(id="CartPole-v1"))) == gymnasium.spec("CartPole-v1")
    assert gymnasium_spec_of(EnvSpec.of(only_here)).id == only_here
    assert gymnasium_spec_of(EnvSpec.of(EveryKindEnv)) is None and gymnasium_spec_of(EnvSpec.of([EveryKindEnv])) is None
    assert gymnasium_spec_of(EnvSpec.of(EnvSpec(factory="a:b"))) is None


def test_wrong_numbers_of_things():
    with pytest.raises(UsageError, match="must have 6 entries"):
        plans_of([EveryKindEnv] * 4)
    with pytest.raises(UsageError, match="num_envs=6 entries; got 2"):
        plans_of("CartPole-v1", env_kwargs=[{}, {}])
    with pytest.raises(UsageError, match="num_envs=6 entries; got 2"):
        pickles_of(EveryKindEnv, [{}, {}])


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be pickled for the workers"):
        pickles_of(lambda: (lock, EveryKindEnv())[1])


WRONG_ARGUMENTS = {
    "num_workers": ({"num_workers": 0}, "num_workers must be a whole number"),
    "num_workers as text": ({"num_workers": "2"}, "num_workers must be a whole number"),
    "num_workers as bool": ({"num_workers": True}, "num_workers must be a whole number"),
    "num_envs_per_worker": ({"num_envs_per_worker": -1}, "num_envs_per_worker must be a whole number"),
    "fraction": ({"num_envs_per_worker": 1.5}, "num_envs_per_worker must be a whole number"),
    "credit": ({"credit": 0}, "credit must be a whole number"),
    "batch_size no multiple": ({"num_envs_per_worker": 2, "batch_size": 3}, "multiple of num_envs_per_worker=2"),
    "batch_size too large": ({"batch_size": 3}, "batch_size"),
    "batch_size too small": ({"batch_size": 0}, "batch_size"),
    "autoreset_mode": ({"autoreset_mode": "sometimes"}, "autoreset"),
    "on_env_error": ({"on_env_error": "ignore"}, "on_env_error"),
    "compression": ({"compression": "gzip"}, "compression"),
    "seed": ({"seed": -1}, "seed"),
    "seed as text": ({"seed": "seven"}, "seed"),
    "backend": ({"backend": "quantum"}, "backend"),
    "heartbeat_s": ({"heartbeat_s": 0}, "heartbeat_s must be positive"),
    "silence_s": ({"silence_s": -1.0}, "silence_s must be positive"),
    "reconnect_s": ({"reconnect_s": float("nan")}, "reconnect_s must be positive"),
    "resend_s": ({"resend_s": 0}, "resend_s must be positive"),
    "join_timeout_s": ({"join_timeout_s": 0}, "join_timeout_s must be positive"),
    "timeout_s": ({"timeout_s": 0}, "timeout_s"),
    "max_worker_restarts": ({"max_worker_restarts": -1}, "max_worker_restarts"),
    "max_env_restarts": ({"max_env_restarts": -1, "on_env_error": "restart"}, "max_env_restarts"),
    "max_worker_restarts without end": ({"max_worker_restarts": float("inf")}, "max_worker_restarts must be a whole"),
    "max_env_restarts none": ({"max_env_restarts": None}, "max_env_restarts must be a whole number"),
    "pin_workers as a number": ({"pin_workers": 1}, "pin_workers must be True or False or None; got 1"),
    "all settings of a pool": ({"pool": PoolConfig(num_envs=2)}, r"pool must be envfleet.PoolSettings\(\.\.\.\), or a"),
    "pool_workers": ({"pool_workers": 0}, "num_workers|pool_workers"),
    "env": ({"env": 7}, "env"),
    "address": ({"address": "nowhere"}, "address"),
    "list of envs": ({"env": [EveryKindEnv]}, "2 entries"),
    "list of kwargs": ({"env_kwargs": [{}]}, "2 entries"),
}


@pytest.mark.parametrize("wrong", WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused_before_anything_starts(wrong, monkeypatch):
    def start(*_args, **_kwargs):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("envfleet.launchers.processes.Processes._start", start)
    changes, message = WRONG_ARGUMENTS[wrong]
    arguments = {"env": "CartPole-v1", "num_workers": 2, "num_envs_per_worker": 1, **changes}
    with pytest.raises(UsageError, match=message):
        ClusterEnv(**cluster_arguments(arguments))


MOVED = {
    "join_timeout_s": r"join_timeout_s moved: timing=Timing\(join_timeout_s=\.\.\.\)",
    "timeout_s": r"timeout_s moved: timing=Timing\(timeout_s=\.\.\.\)",
    "pool_timeout_s": r"pool_timeout_s moved: pool=PoolSettings\(timeout_s=\.\.\.\)",
    "pool_workers": r"pool_workers moved: pool=PoolSettings\(num_workers=\.\.\.\)",
    "on_env_error": r"on_env_error moved: pool=PoolSettings\(on_env_error=\.\.\.\)",
    "address": r"address moved: network=Network\(address=\.\.\.\)",
    "credit": r"credit moved: network=Network\(credit=\.\.\.\)",
    "max_episode_steps": r"max_episode_steps moved: env=EnvSpec\(id=\.\.\., max_episode_steps=\.\.\.\)",
    "pixels": r"pixels moved: env=EnvSpec\(id=\.\.\., pixels=\.\.\.\)",
}


@pytest.mark.parametrize("name", MOVED)
def test_a_name_of_an_earlier_version_says_where_it_went(name):
    with pytest.raises(UsageError, match=MOVED[name]):
        ClusterEnv("CartPole-v1", 1, 1, **{name: 1})


def test_all_arguments_of_the_last_version_are_known_or_moved():
    before = (
        "launcher sync batch_size backend autoreset_mode seed env_kwargs max_episode_steps pool_workers on_env_error "
        "max_env_restarts render_mode pixels credit compression weights_dtype address head_address timeout_s "
        "pool_timeout_s start_timeout_s min_workers join_timeout_s max_worker_restarts heartbeat_s silence_s "
        "reconnect_s resend_s"
    )
    known = list(inspect.signature(ClusterEnv).parameters)
    assert len(known) <= 16  # 14, and what issue 17 adds: worker_device, resume
    for name in set(before.split()) - set(known):
        with pytest.raises(UsageError, match=f"^{name} moved: "):
            ClusterEnv("CartPole-v1", **{name: None})


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"no setting 'num_env'; known: env, num_workers, .*timing"):
        ClusterEnv("CartPole-v1", num_env=3)
    with pytest.raises(UsageError, match=r"timing has no setting 'heartbeat'; known: .*heartbeat_s"):
        ClusterEnv("CartPole-v1", timing={"heartbeat": 1.0})
    with pytest.raises(UsageError, match=r"pool must be envfleet.PoolSettings\(\.\.\.\), or a dict"):
        ClusterEnv("CartPole-v1", pool=3)


def test_numbers_of_numpy_are_numbers():
    with ClusterEnv("CartPole-v1", np.int64(1), np.int32(2)) as cluster:
        assert cluster.num_envs == 2
        assert cluster.reset(seed=0)[0].shape == (2, 4)
