"""recv_ready() and step_all(): an asynchronous pool serves fewer envs than a batch has rows, and all of them."""

import numpy as np
import pytest

import envfleet
from envfleet import EnvBusy, EnvFailed, InvalidAction, NothingToReceive
from tests.support.envs.uneven_envs import UnevenEnv

pytestmark = pytest.mark.usefixtures("quick_spawners")

BACKENDS = pytest.mark.parametrize(
    ("backend", "env"), [("serial", UnevenEnv), ("process", UnevenEnv), ("native", "CartPole-v1")]
)


def make(env, backend="serial", **settings):
    return envfleet.make(env, 5, backend=backend, autoreset_mode="same_step", **settings)


def actions(num_rows):
    return np.ones(num_rows, np.int64)


@BACKENDS
def test_fewer_in_flight_than_a_batch_has_rows(backend, env):
    with make(env) as alone:
        alone.reset(seed=0)
        expected = alone.step(actions(5))
    with make(env, backend, batch_size=3) as pool:
        pool.reset(seed=0)
        check_fewer(pool, expected)


def check_fewer(pool, expected):
    with pytest.raises(NothingToReceive):
        pool.recv_ready()
    pool.send(actions(1), [3])
    got = pool.recv_ready()
    assert got[4]["env_id"].tolist() == [3] and len(got[0]) == len(got[1]) == 1
    pool.send(actions(2), [4, 0])
    got = pool.recv_ready()
    assert sorted(got[4]["env_id"].tolist()) == [0, 4]
    pool.send(actions(2), [2, 1])
    pool.send(actions(2), [3, 0])
    seen = [*pool.recv_ready()[4]["env_id"].tolist(), *pool.recv_ready()[4]["env_id"].tolist()]
    assert sorted(seen) == [0, 1, 2, 3]
    pool.reset(seed=0)
    for env_id in (4, 2):
        pool.send(actions(1), [env_id])
        got = pool.recv_ready()
        np.testing.assert_array_equal(got[0][0], expected[0][env_id])
        assert got[1][0] == expected[1][env_id]


@BACKENDS
def test_all_envs_whatever_the_batch_size(backend, env):
    with make(env, backend, batch_size=3) as pool, make(env) as alone:
        np.testing.assert_array_equal(pool.reset(seed=1)[0], alone.reset(seed=1)[0])
        for _ in range(3):
            got, expected = pool.step_all(actions(5)), alone.step_all(actions(5))
            for one, other in zip(got[:4], expected[:4], strict=True):
                np.testing.assert_array_equal(one, other)
        with pytest.raises(InvalidAction):
            pool.step_all(actions(4))
        pool.send(actions(5))
        with pytest.raises(EnvBusy):
            pool.step_all(actions(5))
        assert len(pool.recv()[1]) == 3 and len(pool.recv_ready()[1]) == 2


class FailingEnv(UnevenEnv):
    """Fails in its second step."""

    num_calls = 0

    def step(self, action):
        self.num_calls += 1
        if self.num_calls == 2:
            raise RuntimeError("the wheel came off")
        return super().step(action)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_after_a_failure_the_same_batch(backend):
    with envfleet.make(FailingEnv, 4, batch_size=3, backend=backend, autoreset_mode="same_step") as pool:
        pool.reset(seed=0)
        pool.send(actions(1), [1])
        pool.recv_ready()
        pool.send(actions(1), [1])
        with pytest.raises(EnvFailed, match="the wheel came off"):
            pool.recv_ready()
        got = pool.recv_ready()
        assert got[4]["env_id"].tolist() == [1] and got[3].tolist() == [True]
        assert len(pool.step_all(actions(4))[1]) == 4
