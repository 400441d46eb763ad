"""SB3VecEnv is what DummyVecEnv is: the same rows, infos, wrappers and weights, on pools and clusters."""

import importlib
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest

pytest.importorskip("stable_baselines3")

import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecMonitor, VecNormalize

import envfleet
from envfleet.adapters.sb3 import SB3VecEnv
from tests.support.envs.walk_env import Marked, WalkEnv, marked_walk

NUM_ENVS = 3
FORKED_WITH = ("gymnasium.envs.classic_control.cartpole", "tests.support.envs.walk_env")


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pool(env, num_envs=NUM_ENVS, **options):
    return SB3VecEnv(envfleet.make(env, num_envs, autoreset_mode="same_step", **options))


def cluster(env, num_workers=2, num_envs_per_worker=2, **options):
    return SB3VecEnv(envfleet.ClusterEnv(env, num_workers, num_envs_per_worker, autoreset_mode="same_step", **options))


def dummy(make_env, num_envs=NUM_ENVS):
    return DummyVecEnv([make_env] * num_envs)


def played(vec_env, num_steps=40, seed=5):
    """All that comes of the same actions, and the vec env closed."""
    vec_env.seed(seed)
    rows = [(vec_env.reset(), list(vec_env.reset_infos))]
    generator = np.random.default_rng(0)
    for _ in range(num_steps):
        actions = generator.integers(0, 2, vec_env.num_envs)
        rows.append((*vec_env.step(actions), list(vec_env.reset_infos)))
    vec_env.close()
    return rows


def require_equal(ours, theirs):
    """Also of the types that learners look at; numbers of infos may be NumPy's."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict) and set(ours) == set(theirs)
        for key in theirs:
            require_equal(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            require_equal(our, their)
    else:
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


CART_POLE = partial(gymnasium.make, "CartPole-v1")
WALK = partial(marked_walk, max_steps=4)
SERIAL = {"backend": "serial"}  # child processes would import torch for SB3's Monitor
DICT_WALK = partial(WalkEnv, max_steps=4, has_dict=True)


@pytest.mark.parametrize(
    ("ours", "make_env", "num_envs"),
    [
        (lambda: pool("CartPole-v1"), CART_POLE, 3),
        (lambda: pool(WALK, backend="process"), WALK, 3),
        (lambda: pool(DICT_WALK, backend="serial"), DICT_WALK, 3),
        (lambda: SB3VecEnv([DICT_WALK] * 3, num_workers=1), DICT_WALK, 3),
        (lambda: cluster("CartPole-v1"), CART_POLE, 4),
        (lambda: cluster(WALK), WALK, 4),
    ],
    ids=["native", "process", "serial", "functions", "cluster, native", "cluster, Python"],
)
def test_rows_and_infos_are_those_of_dummy_vec_env(quick_workers, ours, make_env, num_envs):
    theirs = played(dummy(make_env, num_envs))
    assert any(dones.any() for _, _, dones, _, _ in theirs[1:])
    require_equal(played(ours()), theirs)


@pytest.mark.parametrize(
    "wrap",
    [VecNormalize, partial(VecFrameStack, n_stack=3), lambda vec_env: VecNormalize(VecMonitor(vec_env))],
    ids=["VecNormalize", "VecFrameStack", "VecMonitor"],
)
def test_wrappers_give_the_same_on_top(wrap):
    ours, theirs = played(wrap(pool("CartPole-v1"))), played(wrap(dummy(CART_POLE)))
    for rows in (ours, theirs):  # VecMonitor counts seconds
        for _, _, _, infos, _ in rows[1:]:
            for info in infos:
                info.get("episode", {}).pop("t", None)
    require_equal(ours, theirs)
    is_monitor = "episode" in next(info for row in ours[1:] for info in row[3] if "terminal_observation" in info)
    assert is_monitor == (wrap not in (VecNormalize,) and not isinstance(wrap, partial))


def ppo_weights(vec_env, total_steps=256):
    model = PPO("MlpPolicy", vec_env, n_steps=32, batch_size=64, n_epochs=2, seed=3, device="cpu")
    model.learn(total_steps)
    vec_env.close()
    return {name: value.numpy() for name, value in model.policy.state_dict().items()}


@pytest.mark.parametrize("where", ["pool", "functions", "cluster"])
def test_ppo_learns_the_same_weights_bit_for_bit(quick_workers, where):
    ours = {
        "pool": lambda: pool("CartPole-v1", 4),
        "functions": lambda: make_vec_env("CartPole-v1", 4, vec_env_cls=SB3VecEnv, vec_env_kwargs=SERIAL),
        "cluster": lambda: cluster("CartPole-v1"),
    }[where]
    require_equal(ppo_weights(ours()), ppo_weights(dummy(CART_POLE, 4)))


def test_make_vec_env_takes_the_class_and_the_pools_options(tmp_path):
    arguments = {"n_envs": NUM_ENVS, "seed": 9, "env_kwargs": {"max_steps": 4}}
    ours = make_vec_env(WalkEnv, **arguments, monitor_dir=tmp_path, vec_env_cls=SB3VecEnv, vec_env_kwargs=SERIAL)
    assert ours.unwrapped._source.envs.backend == "serial"
    assert ours.env_is_wrapped(Monitor) == [True] * NUM_ENVS
    assert ours.env_is_wrapped(Marked) == [False] * NUM_ENVS
    ours, theirs = played(ours, seed=9), played(make_vec_env(WalkEnv, **arguments), seed=9)
    for rows in (ours, theirs):
        for _, _, _, infos, _ in rows[1:]:
            for info in infos:
                assert ("episode" in info) == ("terminal_observation" in info)
                info.get("episode", {}).pop("t", None)
    require_equal(ours, theirs)
    assert len(list(tmp_path.glob("*.monitor.csv"))) == NUM_ENVS


@pytest.mark.parametrize("make_ours", [partial(pool, num_envs=4, backend="process"), cluster], ids=["pool", "cluster"])
def test_attributes_and_methods_of_some_envs(quick_workers, make_ours):
    vec_env = make_ours(WALK)
    vec_env.seed(0)
    vec_env.reset()
    places = vec_env.get_attr("place")
    assert vec_env.env_method("moved", 2.0, times=3) == [place + 6.0 for place in places]
    assert vec_env.env_method("moved", 1.0, indices=[3, 0, 3]) == [places[row] + 1.0 for row in (3, 0, 3)]
    assert vec_env.get_attr("place", indices=[-1, 1]) == [places[3], places[1]]
    assert vec_env.get_attr("place", 2) == [places[2]]
    vec_env.set_attr("speed", 5.0, indices=[2, 3])
    assert vec_env.get_attr("speed") == [1.0, 1.0, 5.0, 5.0]
    vec_env.set_attr("speed", [1, 2, 3, 4])  # one value for all envs, though it is a list
    assert vec_env.get_attr("speed") == [[1, 2, 3, 4]] * 4
    assert vec_env.has_attr("speed") and not vec_env.has_attr("weight")
    with pytest.raises(AttributeError, match="env 1 has no attribute 'weight'"):
        vec_env.get_attr("weight", indices=1)
    assert vec_env.env_is_wrapped(Marked) == [True] * 4
    assert vec_env.env_is_wrapped(gymnasium.Wrapper, indices=[1]) == [True]
    assert vec_env.env_is_wrapped(Monitor, indices=[0, 2]) == [False, False]
    with pytest.raises(envfleet.UsageError, match="between -4 and 3"):
        vec_env.get_attr("speed", indices=[4])
    vec_env.close()


def test_attributes_of_native_envs_are_read_and_not_set():
    vec_env = pool("CartPole-v1")
    vec_env.reset()
    assert vec_env.get_attr("gravity", indices=[0, 2]) == [9.8, 9.8]
    assert vec_env.env_is_wrapped(Monitor) == [False] * NUM_ENVS
    assert not vec_env.has_attr("weight")
    with pytest.raises(envfleet.UsageError, match="native env cannot be set"):
        vec_env.set_attr("gravity", 1.0)
    vec_env.close()


def test_options_and_seeds_are_for_the_next_reset_only():
    vec_env = pool(partial(WalkEnv), backend="serial", seed=1)
    first = vec_env.reset()
    vec_env.seed(1)
    vec_env.set_options({"level": 2})
    np.testing.assert_array_equal(vec_env.reset(), first)  # the pool's own seed, and the same by seed()
    assert vec_env.get_attr("options") == [{"level": 2}] * NUM_ENVS
    assert not np.array_equal(vec_env.reset(), first)
    assert vec_env.get_attr("options") == [None] * NUM_ENVS
    vec_env.close()


def test_options_of_each_env_and_no_env_is_reset_twice():
    vec_env, theirs = pool(partial(WalkEnv), backend="serial"), dummy(WalkEnv)
    for each in (vec_env, theirs):
        each.seed(8)
        each.set_options([{"level": 1}, {}, {"level": 1}])
    require_equal(vec_env.reset(), theirs.reset())  # the first reset: some twice, with their seeds
    assert [options or None for options in vec_env.get_attr("options")] == [{"level": 1}, None, {"level": 1}]
    for each in (vec_env, theirs):
        each.set_options([{"level": row + 1} for row in range(NUM_ENVS)])
    require_equal(vec_env.reset(), theirs.reset())
    assert vec_env.get_attr("options") == theirs.get_attr("options") == [{"level": row + 1} for row in range(NUM_ENVS)]
    require_equal(vec_env.reset_infos, theirs.reset_infos)
    require_equal(vec_env.reset(), theirs.reset())
    vec_env.close()


def test_pictures_are_tiled_and_wanted_in_time():
    vec_env = pool(partial(WalkEnv, render_mode="rgb_array"), backend="serial")
    vec_env.reset()
    vec_env.step([1, 1, 1])
    assert [picture.shape for picture in vec_env.get_images()] == [(4, 6, 3)] * NUM_ENVS
    tiled = vec_env.render()
    assert tiled.shape == (8, 12, 3) and tiled[0, 0, 0] == 1 and tiled[-1, -1, 0] == 0
    assert vec_env.metadata["render_modes"] == ["human", "rgb_array"]
    vec_env.close()
    vec_env = pool("CartPole-v1")
    with pytest.warns(UserWarning, match="render_mode='rgb_array'"):
        assert vec_env.get_images() == [None] * NUM_ENVS
    vec_env.close()


def test_a_failed_env_is_told_and_the_step_is_not_lost():
    vec_env = pool(partial(WalkEnv, fails_at=2, max_steps=9), backend="serial")
    vec_env.reset()
    vec_env.step([0, 0, 0])
    vec_env.step_async([0, 0, 0])
    for _ in range(NUM_ENVS):
        with pytest.raises(envfleet.EnvFailed, match="lost its way"):
            vec_env.step_wait()
    _, _, dones, infos = vec_env.step_wait()
    assert dones.all() and all(info["TimeLimit.truncated"] for info in infos)
    assert all("lost its way" in info["env_error"] for info in infos)
    vec_env.close()


@pytest.mark.parametrize(
    ("make_wrong", "text"),
    [
        (lambda: SB3VecEnv(envfleet.make("CartPole-v1", 2)), "make them with autoreset_mode='same_step'"),
        (
            lambda: SB3VecEnv(envfleet.make("CartPole-v1", 4, batch_size=2, autoreset_mode="same_step")),
            "make them without batch_size",
        ),
        (lambda: SB3VecEnv(gymnasium.make("CartPole-v1")), "takes a pool of envfleet.make"),
        (
            lambda: SB3VecEnv(envfleet.make("CartPole-v1", 2, autoreset_mode="same_step"), num_workers=2),
            "made already: num_workers",
        ),
        (lambda: SB3VecEnv([CART_POLE], autoreset_mode="next_step"), "leave it out"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(make_wrong, text):
    with pytest.raises(envfleet.UsageError, match=text):
        make_wrong()


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.vec_env", None)
    monkeypatch.delitem(sys.modules, "envfleet.adapters.sb3")
    with pytest.raises(envfleet.MissingExtra, match=r"envfleet\[sb3\]"):
        importlib.import_module("envfleet.adapters.sb3")


def test_off_policy_learners_train():
    """They store terminal observations themselves."""
    vec_env = pool("Pendulum-v1", 2, max_episode_steps=20)
    before_sac = SAC("MlpPolicy", vec_env, learning_starts=20, batch_size=16, seed=0, device="cpu")
    start = before_sac.policy.state_dict()["actor.mu.weight"].clone()
    before_sac.learn(100)
    assert not torch.equal(before_sac.policy.state_dict()["actor.mu.weight"], start)
    ended = np.flatnonzero(before_sac.replay_buffer.dones[:50, 0])
    assert len(ended) == 2 and before_sac.replay_buffer.timeouts[ended].all()
    vec_env.close()
    vec_env = pool("CartPole-v1", 2)
    dqn = DQN("MlpPolicy", vec_env, learning_starts=20, batch_size=16, train_freq=1, seed=0, device="cpu")
    dqn.learn(200)
    assert dqn.replay_buffer.dones.any() and dqn._n_updates > 50
    vec_env.close()


@pytest.mark.slow
def test_ppo_learns_cart_pole():
    vec_env = VecMonitor(pool("CartPole-v1", 8))
    model = PPO("MlpPolicy", vec_env, n_steps=64, batch_size=128, n_epochs=6, learning_rate=1e-3, seed=1, device="cpu")
    before, _ = evaluate_policy(model, vec_env, 8)
    model.learn(10_240)
    after, _ = evaluate_policy(model, vec_env, 8)
    vec_env.close()
    assert before < 60 and after > 120
