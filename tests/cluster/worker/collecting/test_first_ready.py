"""First-ready acting: each env's columns are its own time line, as if it ran alone; each has one version."""

import contextlib
import os
import signal

import numpy as np
import pytest

import envfleet
from envfleet import APS, ClusterEnv, PolicyFailed, UsageError
from envfleet.testing.programs import require_equal
from tests.support.envs.cluster_envs import Accounts, Agent, CountingEnv, RaisingAgent
from tests.support.envs.uneven_envs import ReflexAgent, RememberingAgent, UnevenEnv
from tests.support.waiting import is_running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

T, N, K, SEED = 6, 4, 2, 11  # steps; envs of each of two workers; envs that a policy acts on at a time


class TimeLine:
    """One env alone, in this thread."""

    def __init__(self, env, agent, seed):
        self.pool = envfleet.make(env, 1, backend="serial", autoreset_mode="same_step")
        self.obs = self.pool.reset(seed=seed)[0]
        self.agent = agent
        self.state = agent.initial_state(1) if hasattr(agent, "initial_state") else None
        self.episode_return, self.episode_length = 0.0, 0

    def check(self, rollout, column, number):
        """The next rows of this env are the rollout's; values are those of weights with this number."""
        agent, ends = self.agent, np.flatnonzero(rollout.final_envs == column).tolist()
        agent.number = number
        if self.state is not None:
            require_equal(rollout.states["sum"][column], self.state["sum"][0], "state")
        for t in range(rollout.num_steps):
            require_equal(rollout.obs[t, column], self.obs[0], f"obs[{t}]")
            acted = agent.act(self.obs, **self._state())
            require_equal(rollout.actions[t, column], acted.actions[0], f"actions[{t}]")
            assert rollout.extras["values"][t, column] == acted.extras["values"][0]
            self.state = acted.state
            self.obs, rewards, terminated, truncated, info = self.pool.step(acted.actions)
            self.episode_return += rewards[0]
            self.episode_length += 1
            found = rollout.rewards[t, column], rollout.terminations[t, column], rollout.truncations[t, column]
            assert found == (rewards[0], terminated[0], truncated[0])
            check_info(rollout.infos, (t, column), info)
            if terminated[0] or truncated[0]:
                row = ends.pop(0)
                check_info(rollout.final_infos, row, info.get("final_info", {}))
                assert rollout.final_steps[row] == t
                require_equal(rollout.final_obs[row], info["final_obs"][0], "final_obs")
                values = agent.values(info["final_obs"][0][None], **self._state())
                assert rollout.final_values[t, column] == values[0]
                assert rollout.episode_returns[row] == pytest.approx(self.episode_return, abs=1e-12)
                assert rollout.episode_lengths[row] == self.episode_length
                self.episode_return, self.episode_length = 0.0, 0
                if self.state is not None:
                    self.state = agent.initial_state(1)
        assert not ends
        require_equal(rollout.next_obs[column], self.obs[0], "next_obs")
        assert rollout.next_values[column] == agent.values(self.obs, **self._state())[0]

    def _state(self):
        return {} if self.state is None else {"state": self.state}


def check_info(infos, place, expected):
    """The infos of a row are those of the env alone."""
    keys = [key for key in expected if f"_{key}" in expected and not key.startswith("final_")]
    assert {key for key in infos if f"_{key}" in infos and infos[f"_{key}"][place]} == set(keys)
    for key in keys:
        assert infos[key][place] == expected[key][0], key


class TimeLines:
    """Of all envs of a cluster that was reset with SEED."""

    def __init__(self, env, agent_class, num_envs=2 * N):
        self.lines = [TimeLine(env, agent_class(), SEED + env_id) for env_id in range(num_envs)]
        self.number_of = {}  # version -> the number of its weights
        self.num_columns = [0] * num_envs

    def publish(self, cluster, agent):
        agent.number += 1
        self.number_of[cluster.publish(agent)] = agent.number

    def check(self, rollout):
        assert (np.diff(rollout.env_ids) > 0).all()
        for column, env_id in enumerate(rollout.env_ids.tolist()):
            part = rollout.parts[column]
            assert rollout.workers[part] == env_id // N
            assert rollout.lags[part] >= 0
            self.lines[env_id].check(rollout, column, self.number_of[int(rollout.versions[part])])
            self.num_columns[env_id] += 1


def uneven(num_envs=2 * N):
    """One env of each worker is 20 times as slow as the others."""
    return [{"step_s": 0.02 if env_id % N == 0 else 0.001} for env_id in range(num_envs)]


@pytest.mark.parametrize(
    ("env", "agent_class", "backend"),
    [
        (UnevenEnv, ReflexAgent, "process"),
        (UnevenEnv, RememberingAgent, "process"),
        (UnevenEnv, RememberingAgent, "serial"),
        ("CartPole-v1", ReflexAgent, "native"),
    ],
)
def test_every_column_is_the_time_line_of_its_env(env, agent_class, backend):
    agent, lines = agent_class(), TimeLines(env, agent_class)
    own = {} if backend == "native" else {"env_kwargs": uneven()}
    pool = {} if backend == "serial" else {"num_workers": N}
    with ClusterEnv(env, 2, N, worker_batch_size=K, backend=backend, pool=pool, **own) as cluster:
        cluster.reset(seed=SEED)
        for _ in range(2):
            lines.publish(cluster, agent)
            rollout = cluster.rollout(agent, T)
            assert rollout.num_envs == 2 * N and rollout.parts.tolist() == [0] * N + [1] * N
            lines.check(rollout)
        lines.publish(cluster, agent)
        stream = cluster.stream(agent, T)
        num_versions = []
        while min(lines.num_columns) < 4:
            rollout = next(stream)
            assert rollout.num_envs == K and rollout.num_steps == T
            assert rollout.version == rollout.versions.min() and rollout.lag == rollout.lags.max()
            num_versions.append(len(rollout.versions))
            lines.check(rollout)
            lines.publish(cluster, agent)
        assert len(lines.number_of) > 10
        if backend == "process":
            assert max(num_versions) > 1, "a slow env's column is older than that of a quick one"
            assert max(lines.num_columns) > min(lines.num_columns), "quick envs did not wait for slow ones"
        stream.close()
        # The same pool serves all other ways: whole batches, calls, and rollouts of all envs.
        assert len(cluster.call("gravity" if backend == "native" else "step_s")) == 2 * N
        obs, _ = cluster.reset(seed=SEED)
        again = TimeLines(env, agent_class)
        require_equal(obs, np.concatenate([line.obs for line in again.lines]), "reset after a stream")
        obs, rewards, *_ = cluster.step(np.ones(2 * N, np.int64))
        assert obs.shape[0] == rewards.shape[0] == 2 * N


def test_a_batch_of_all_envs_is_as_without_one():
    def rollouts(**settings):
        with ClusterEnv(UnevenEnv, 2, N, backend="serial", seed=SEED, **settings) as cluster:
            agent = ReflexAgent()
            first = cluster.rollout(agent, T)
            with contextlib.closing(cluster.stream(agent, T)) as stream:
                return [first, *sorted((next(stream) for _ in range(2)), key=lambda each: each.env_ids[0])][:1]

    for one, other in zip(rollouts(), rollouts(worker_batch_size=N), strict=True):
        for name in ("obs", "actions", "rewards", "final_obs", "final_values", "next_values", "env_ids", "parts"):
            require_equal(getattr(one, name), getattr(other, name), name)


def test_killed_in_a_stream(tmp_path):
    """No row is lost or doubled within the life of an env object: its observations are numbered."""
    accounts, kwargs = Accounts(), {"folder": str(tmp_path)}
    settings = {"backend": "process", "pool": {"num_workers": N, "on_env_error": "restart"}, "env_kwargs": kwargs}
    with ClusterEnv(CountingEnv, 2, N, worker_batch_size=K, timing={"heartbeat_s": 0.2}, **settings) as cluster:
        victims = [worker.pid for worker in cluster.stats().workers]
        num_rollouts, agent = 0, Agent()
        for rollout in cluster.stream(agent, 8):
            accounts.add(rollout)
            num_rollouts += 1
            agent.weights["action"] = np.array([num_rollouts % 3])
            cluster.publish(agent)
            if accounts.num_env_objects == 2 * N and is_running(victims[0]):
                os.kill(victims[0], signal.SIGKILL)
            if accounts.num_env_objects >= 3 * N:
                break
        stats = cluster.stats()
        assert [worker.num_restarts for worker in stats.workers] == [1, 0]
        # Two rollouts more may have come that were not taken: credit.
        assert num_rollouts <= sum(worker.num_rollouts for worker in stats.workers)
        assert accounts.num_rows == num_rollouts * 8 * K
        assert not any("malformed" in why for why in stats.num_refused)


def test_rollouts_between_streams_begin_anew():
    """A stream that ends drops its unfinished rows; the envs go on where they are."""
    accounts = Accounts()
    with ClusterEnv(CountingEnv, 1, N, worker_batch_size=K, backend="process") as cluster:
        agent = Agent()
        for num_steps in (5, 3):
            with contextlib.closing(cluster.stream(agent, num_steps)) as stream:
                for _ in range(6):
                    accounts.add(next(stream))
            accounts.interrupted(N)
            accounts.add(cluster.rollout(agent, num_steps))
            accounts.add(cluster.rollout(agent, 2))
            with pytest.raises(PolicyFailed, match="the network is empty"):
                cluster.rollout(RaisingAgent(), 2)
            accounts.add(cluster.rollout(agent, 1))
            accounts.interrupted(N)
        assert cluster.stats().num_refused == {}


def test_aps_measures_rows_of_the_newest_version():
    """log_prob of a ReflexAgent tells by how many versions two differ: k3 of a log-ratio of d / 8."""
    with ClusterEnv(
        UnevenEnv, 1, N, worker_batch_size=K, backend="process", pool={"num_workers": N},
        env_kwargs=uneven(N), sync=APS(threshold=1e-6, num_probes=5),
    ) as cluster:  # fmt: skip
        agent = RememberingAgent()
        lags = []
        with contextlib.closing(cluster.stream(agent, T)) as stream:
            for _ in range(30):
                rollout = next(stream)
                lags.append(rollout.lag)
                agent.number += 1
                cluster.publish(agent)
        stats = cluster.stats()
        assert stats.workers[0].divergence > 0
        assert stats.workers[0].num_pulls > 5
        assert max(lags) > min(lags)


def test_refused():
    for size in (0, 5, 2.5):
        with pytest.raises(UsageError, match="worker_batch_size"):
            ClusterEnv(UnevenEnv, 1, N, worker_batch_size=size)
    with pytest.raises(UsageError, match="vector env steps all its envs together"):
        ClusterEnv("CartPole-v1", 1, N, worker_batch_size=2, backend="vector")
