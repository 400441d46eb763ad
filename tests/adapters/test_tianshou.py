"""TianshouVectorEnv equals Tianshou's own vector env, whatever runs the envs."""

import gymnasium
import numpy as np
import pytest

import envfleet
from tests.support.envs.learner_envs import OftenEndingEnv

torch = pytest.importorskip("torch")
data = pytest.importorskip("tianshou.data")
venvs = pytest.importorskip("tianshou.env")
dqn = pytest.importorskip("tianshou.algorithm.modelfree.dqn")
nets = pytest.importorskip("tianshou.utils.net.common")
TianshouVectorEnv = pytest.importorskip("envfleet.adapters.tianshou").TianshouVectorEnv

FORKED_WITH = ("tests.support.envs.learner_envs",)
NUM_ENVS = 4


def tianshous_own(make_env=OftenEndingEnv):
    return venvs.DummyVectorEnv([make_env] * NUM_ENVS)


def ours(env=OftenEndingEnv, backend="serial", **kwargs):
    return TianshouVectorEnv(envfleet.make(env, NUM_ENVS, backend=backend, autoreset_mode="same_step", **kwargs))


def ours_on_workers(num_workers):
    cluster = envfleet.ClusterEnv(
        OftenEndingEnv, num_workers, NUM_ENVS // num_workers, backend="serial", autoreset_mode="same_step"
    )
    return TianshouVectorEnv(cluster)


def played(venv, num_steps=60, num_actions=3, together=1):
    """What steps of some envs return, `together` of them at a time, and resets of those whose episode has ended."""
    rng = np.random.default_rng(7)
    results = [venv.seed(5), *venv.reset()]
    for _ in range(num_steps):
        groups = rng.permutation(NUM_ENVS // together)[: rng.integers(1, NUM_ENVS // together + 1)]
        env_ids = (groups[:, None] * together + np.arange(together)).reshape(-1)
        obs, rewards, terminated, truncated, infos = venv.step(rng.integers(num_actions, size=len(env_ids)), env_ids)
        results += [obs, rewards, terminated, truncated, infos]
        ended = env_ids[terminated | truncated]
        if len(ended):
            results += venv.reset(ended)
    venv.close()
    return results


def assert_equal(got, expected):
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        if isinstance(other, np.ndarray):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), number
            one, other = one.tolist(), other.tolist()
        assert one == other, number


def test_it_equals_tianshous_own():
    assert_equal(played(ours()), played(tianshous_own()))


def test_native_envs_equal_those_of_tianshous_own():
    def cart_pole():
        return gymnasium.make("CartPole-v1")

    got = played(ours("CartPole-v1", "native"), 150, 2)
    expected = played(tianshous_own(cart_pole), 150, 2)
    assert any(each.any() for each in got[5::1] if getattr(each, "dtype", None) == np.bool_)  # episodes have ended
    assert_equal(got, expected)


def test_observations_that_are_dicts_come_as_tianshou_has_them():
    got, expected = (
        played(ours(OftenEndingEnv, env_kwargs={"form": "dict"})),
        played(tianshous_own(lambda: OftenEndingEnv("dict"))),
    )
    for one, other in zip(got, expected, strict=True):
        if isinstance(other, np.ndarray) and other.dtype == object and "place" in other[0]:
            for row, expected_row in zip(one, other, strict=True):
                assert list(row) == list(expected_row)
                assert row["place"].tolist() == expected_row["place"].tolist()
                assert row["num_steps"] == expected_row["num_steps"]


def collected(venv):
    """The buffer of a collector that collects steps, then episodes, of a policy without chance."""
    torch.manual_seed(3)
    space = OftenEndingEnv()
    policy = dqn.DiscreteQLearningPolicy(
        model=nets.Net(state_shape=space.observation_space.shape, action_shape=3, hidden_sizes=[8]),
        action_space=space.action_space,
    )
    collector = data.Collector(policy, venv, data.VectorReplayBuffer(400, NUM_ENVS))
    venv.seed(11)
    collector.reset()
    assert collector.collect(n_step=48).n_collected_steps == 48
    steps = collector.buffer[:]
    stats = collector.collect(n_episode=6)
    assert stats.n_collected_episodes == 6
    with pytest.warns(UserWarning, match="should be larger than"):
        again = collector.collect(n_episode=3)  # fewer than there are envs
    assert again.n_collected_episodes == 3
    collector.close()
    return steps, collector.buffer[:]


KEYS = ("obs", "act", "rew", "obs_next", "terminated", "truncated")


def assert_same_rows(got, expected):
    for key in KEYS:
        assert np.array_equal(got[key], expected[key]), key
    assert np.array_equal(got.info["env_id"], expected.info["env_id"])
    assert np.array_equal(got.info["num_steps"], expected.info["num_steps"])


def test_a_collector_collects_the_same():
    for got, expected in zip(collected(ours()), collected(tianshous_own()), strict=True):
        assert_same_rows(got, expected)


@pytest.mark.slow
def test_a_collector_collects_the_same_from_workers_with_one_env(quick_workers):
    for got, expected in zip(collected(ours_on_workers(NUM_ENVS)), collected(tianshous_own()), strict=True):
        assert_same_rows(got, expected)


@pytest.mark.slow
def test_workers_with_several_envs(quick_workers):
    assert_equal(played(ours_on_workers(2), together=2), played(tianshous_own(), together=2))

    steps, rows = collected(ours_on_workers(2))
    assert_same_rows(steps, collected(tianshous_own())[0])
    # Envs run on while others of their worker are stepped, but no row of them is recorded: episodes are whole.
    for env_id in range(NUM_ENVS):
        its = rows[rows.info["env_id"] == env_id]
        begins = np.concatenate([[True], (its.terminated | its.truncated)[:-1]])
        assert np.array_equal(its.obs[begins, 1], np.zeros(begins.sum()))
        assert np.array_equal(its.obs[1:][~begins[1:]], its.obs_next[:-1][~begins[1:]])


def test_an_env_that_ran_on_must_be_reset(quick_workers):
    venv = ours_on_workers(2)
    venv.seed(0)
    venv.reset()
    venv.step(np.zeros(1, int), [1])
    with pytest.raises(envfleet.UsageError, match=r"envs \[0\] have run on, because 2 envs step together"):
        venv.step(np.zeros(2, int), [0, 2])
    venv.step(np.zeros(2, int), [2, 3])
    obs, _ = venv.reset(0)
    assert obs[0, 1] == 0
    venv.step(np.zeros(1, int), 0)
    venv.close()


def test_an_ended_episode_is_not_stepped():
    with envfleet.make(OftenEndingEnv, NUM_ENVS, backend="serial", autoreset_mode="same_step", seed=0) as pool:
        venv = TianshouVectorEnv(pool)
        venv.reset()
        with pytest.raises(envfleet.StepOnEndedEpisode, match=r"envs \[\d"):
            for _ in range(6):
                venv.step(np.zeros(NUM_ENVS, int))


def test_seeds_and_options_of_a_reset():
    venv, own = ours(), tianshous_own()
    for each in (venv, own):
        each.seed(1)
    for kwargs in ({"seed": 4}, {"seed": 4, "options": {"height": 2}}, {"options": {"height": 3}}):
        for env_id in (None, 2, [3, 1]):
            got, expected = venv.reset(env_id, **kwargs), own.reset(env_id, **kwargs)
            assert_equal(got, expected)
    with pytest.raises(envfleet.UsageError, match="speed"):
        venv.reset(speed=1)
    venv.close()


def test_attributes_of_the_envs():
    venv = ours()
    assert len(venv) == NUM_ENVS
    assert venv.get_env_attr("level") == [1] * NUM_ENVS
    venv.set_env_attr("level", 5, [1, 2])
    assert venv.get_env_attr("level", [3, 2]) == [1, 5]
    assert venv.get_env_attr("level", 1) == [5]
    with pytest.raises(AttributeError, match="height"):
        venv.get_env_attr("height")
    assert venv.action_space == [OftenEndingEnv().action_space] * NUM_ENVS
    assert venv.observation_space == [OftenEndingEnv().observation_space] * NUM_ENVS
    venv.close()
    venv.close()


def test_tianshous_wrappers_go_on_top():
    venv = venvs.VectorEnvNormObs(ours())
    venv.seed(0)
    obs, _ = venv.reset()
    obs, *_ = venv.step(torch.ones(NUM_ENVS, dtype=torch.int64))
    assert obs.shape == (NUM_ENVS, 3) and abs(obs.mean()) < 5
    venv.close()


def test_envs_that_do_not_fit_are_refused():
    with (
        envfleet.make("CartPole-v1", 2) as pool,
        pytest.raises(envfleet.UsageError, match="autoreset_mode='same_step'"),
    ):
        TianshouVectorEnv(pool)
    options = {"backend": "serial", "autoreset_mode": "same_step"}
    with envfleet.make(lambda: OftenEndingEnv("tuple"), 2, **options) as pool:  # noqa: SIM117
        with pytest.raises(envfleet.UsageError, match="no tuples"):
            TianshouVectorEnv(pool)
    with envfleet.make("CartPole-v1", 1, autoreset_mode="same_step") as pool:  # noqa: SIM117
        with pytest.raises(envfleet.UsageError, match="needs actions"):
            TianshouVectorEnv(pool).step(None)


def test_envs_that_come_vectorized_step_together():
    def vectorized(num_envs):
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
        return gymnasium.vector.SyncVectorEnv([OftenEndingEnv] * num_envs, autoreset_mode=mode)

    assert_equal(played(ours(vectorized, "vector"), together=NUM_ENVS), played(tianshous_own(), together=NUM_ENVS))
    venv = ours(vectorized, "vector")
    venv.seed(0)
    venv.reset()
    obs, *_ = venv.step(np.ones(1, int), [2])
    assert obs.shape == (1, 3) and obs[0, 1] == 1
    with pytest.raises(envfleet.UsageError, match="4 envs step together"):
        venv.step(np.ones(1, int), [3])
    venv.close()
