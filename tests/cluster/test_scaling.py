"""More workers and fewer, while a stream runs and at other times."""

import os
import signal
import threading
import time

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet import ClusterEnv, EnvBusy, NotReset, UsageError
from envfleet.contract.errors import ClusterError
from envfleet.launchers.launcher import WorkerState, WorkerStatus
from envfleet.launchers.local import Local
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.agents import numpy_agents
from tests.support.inside import fleet
from tests.support.waiting import own_children, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
AGENT = numpy_agents.discrete(num_actions=2)


def cluster(num_workers=2, **settings):
    return ClusterEnv("CartPole-v1", num_workers, 2, backend="serial", **cluster_arguments(settings))


def collected_from(stream, wanted, timeout_s=60.0):
    """Take rollouts until each of the wanted workers has delivered one."""
    seen, deadline_s = set(), time.monotonic() + timeout_s
    while not wanted <= seen:
        assert time.monotonic() < deadline_s, f"{wanted} were wanted, {seen} came"
        seen.add(int(next(stream).workers[0]))


def test_new_workers_join_a_stream_and_old_ones_leave_it():
    with cluster() as envs:
        stream = envs.stream(AGENT, 8)
        collected_from(stream, {0, 1})
        envs.scale(4)
        assert (envs.num_workers, envs.num_envs, envs.batch_size) == (4, 8, 8)
        collected_from(stream, {0, 1, 2, 3})
        num_children = len(own_children())
        envs.scale(1)
        wait_until(lambda: len(own_children()) <= num_children - 3, "the processes of three workers are gone")
        assert {int(next(stream).workers[0]) for _ in range(20)} == {0}
        assert [each.worker for each in envs.stats().workers] == [0]
        envs.scale(2)
        collected_from(stream, {0, 1})
        stream.close()
        assert envs.rollout(AGENT, 4).rewards.shape == (4, 4)


def test_stepping_after_scaling_equals_a_pool_of_that_size():
    with cluster() as envs:
        envs.reset(seed=5)
        for num_workers in (3, 1):
            envs.scale(num_workers)
            with pytest.raises(NotReset):
                envs.step(np.zeros(envs.num_envs, int))
            assert envs.observation_space.shape == (envs.num_envs, 4)
            with envfleet.make("CartPole-v1", num_envs=envs.num_envs, backend="serial") as pool:
                np.testing.assert_array_equal(envs.reset(seed=5)[0], pool.reset(seed=5)[0])
                actions = np.arange(envs.num_envs) % 2
                for ours, theirs in zip(envs.step(actions)[:4], pool.step(actions)[:4], strict=True):
                    np.testing.assert_array_equal(ours, theirs)


def test_rollouts_have_the_new_number_of_envs():
    with cluster(sync=envfleet.APS()) as envs:
        assert envs.rollout(AGENT, 4).rewards.shape == (4, 4)
        envs.scale(3)
        assert envs.rollout(AGENT, 4).rewards.shape == (4, 6)
        envs.scale(1)
        assert envs.rollout(AGENT, 4).rewards.shape == (4, 2)


def test_a_worker_that_is_killed_after_scaling_is_replaced():
    with cluster(1, reconnect_s=0.5) as envs:
        envs.scale(2)
        envs.rollout(AGENT, 4)
        before = envs.stats().workers[1].pid
        os.kill(before, signal.SIGKILL)
        assert envs.rollout(AGENT, 4).rewards.shape == (4, 4)
        assert envs.stats().workers[1].pid != before


def test_attributes_of_all_envs_are_set_in_those_of_new_workers():
    with ClusterEnv(lambda: gymnasium.make("CartPole-v1"), 1, 2, backend="serial") as envs:
        envs.set_attr("tag", 7)
        envs.set_attr("each", [1, 2])
        envs.scale(2)
        assert envs.get_attr("tag") == (7, 7, 7, 7)


def test_what_cannot_be_scaled():
    with cluster(batch_size=4) as envs:
        with pytest.raises(UsageError, match="batch_size"):
            envs.scale(1)
        with pytest.raises(UsageError, match="num_workers"):
            envs.scale(0)
        envs.reset(seed=0)
        envs.send(np.zeros(4, int))
        with pytest.raises(EnvBusy, match="scale"):
            envs.scale(3)
        envs.recv()
        envs.scale(3)
    with (
        ClusterEnv([lambda: gymnasium.make("CartPole-v1")] * 2, 2, 1, backend="serial") as envs,
        pytest.raises(UsageError, match="3 entries"),
    ):
        envs.scale(3)
    with pytest.raises(envfleet.PoolClosed):
        envs.scale(1)


class Reluctant:
    """Local workers, of an engine that has two of them, and refuses to change that."""

    is_on_this_host = True
    head_address = None
    queue_timeout_s = None

    def launch(self, job):
        local = Local().launch(job)

        def resize(num_workers):
            raise ClusterError("two, and no others")

        local.resize = resize
        return local


@pytest.mark.parametrize("num_workers", [1, 3])
def test_nothing_has_changed_if_the_engine_refuses(num_workers):
    with cluster(launcher=Reluctant()) as envs:
        envs.set_attr("tag", [1, 2, 3, 4])
        stream = envs.stream(AGENT, 4)
        collected_from(stream, {0, 1})
        with pytest.raises(ClusterError, match="two, and no others"):
            envs.scale(num_workers)
        assert envs.num_workers == 2
        for _ in range(10):  # also what was on its way before
            collected_from(stream, {0, 1})
        stream.close()
        assert envs.get_attr("tag") == (1, 2, 3, 4)


def test_a_worker_that_was_killed_while_idle_is_no_obstacle():
    with cluster(1, reconnect_s=0.3) as envs:
        for num_restarts in range(1, 4):
            before = envs.stats().workers[0].pid
            os.kill(before, signal.SIGKILL)
            wait_until(lambda before=before: envs.stats().workers[0].pid != before, "it is replaced")
            wait_until(lambda: fleet(envs)[0].is_ready, "its pool is built")
            assert envs.stats().workers[0].num_restarts == num_restarts
        envs.scale(2)
        assert envs.reset(seed=0)[0].shape == (4, 4)


def test_the_workers_that_go_are_no_strangers(caplog):
    with cluster(3) as envs:
        stream = envs.stream(AGENT, 4)
        collected_from(stream, {0, 1, 2})
        envs.scale(1)
        for _ in range(20):
            next(stream)
        assert set(envs.stats().num_refused) <= {"from a former member"}
    assert [each.message for each in caplog.records if "dropped" in each.message] == []


def test_a_fork_cannot_use_it():
    with cluster(1) as envs:
        pid = os.fork()
        if pid == 0:
            try:
                envs.scale(2)
            except envfleet.PoolClosed:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert envs.reset(seed=0)[0].shape == (2, 4)


class OneOf:
    """A job with one of the workers of another; Local takes it for worker 0."""

    num_workers = 1

    def __init__(self, job, worker):
        self._job, self._worker = job, worker
        self.environment, self.run_dir = job.environment, job.run_dir

    def arguments(self, _worker):
        return self._job.arguments(self._worker)


class Queue:
    """An engine in whose queue some workers wait until they are let go; the others are local processes."""

    is_on_this_host = True
    head_address = None
    revives = False

    def __init__(self, waiting, queue_timeout_s=None, state=WorkerState.PENDING):
        self.waiting = set(waiting)
        self.queue_timeout_s = queue_timeout_s
        self._state = state
        self._jobs = {}

    def launch(self, job):
        self._job = job
        return self

    def status(self, worker):
        if worker in self.waiting:
            return WorkerStatus(self._state, f"job {worker}: Priority")
        if worker not in self._jobs:
            self._jobs[worker] = Local().launch(OneOf(self._job, worker))
        return self._jobs[worker].status(0)

    def log(self, worker, max_bytes=4000):
        return ""

    def log_place(self, worker):
        return "nowhere"

    def restart(self, worker):
        self._jobs[worker].restart(0)

    def cancel(self, grace_s):
        for job in self._jobs.values():
            job.cancel(grace_s)


def test_those_who_are_there_begin_and_others_join_as_they_come():
    queue = Queue({1})
    with cluster(launcher=queue, min_workers=1) as envs:
        stream = envs.stream(AGENT, 8)
        assert {int(next(stream).workers[0]) for _ in range(10)} == {0}
        queue.waiting.clear()
        collected_from(stream, {0, 1})
        assert envs.stats().workers[1].num_restarts == 0


def test_time_in_the_queue_has_a_limit_of_its_own(capfd):
    with (
        pytest.raises(envfleet.JoinTimeout, match="job 1: Priority") as caught,
        cluster(launcher=Queue({1}, queue_timeout_s=12.0), start_timeout_s=60.0),
    ):
        pass
    assert "queue_timeout_s" in str(caught.value)
    assert "1 of 2 workers are ready, 1 pending: worker 1: job 1: Priority" in capfd.readouterr().err


def test_fewer_workers_need_no_wait_and_more_wait_no_longer_than_said():
    queue = Queue({1, 2})
    queue.resize = lambda num_workers: None
    with cluster(3, launcher=queue, min_workers=1) as envs:
        envs.scale(2)
        envs.scale(3)  # one is enough, as at the start
        envs.close()
    queue = Queue({1})
    queue.resize = lambda num_workers: None
    with cluster(1, launcher=queue) as envs:
        with pytest.raises(envfleet.JoinTimeout, match="job 1: Priority"):
            envs.scale(2, timeout_s=1.5)
        queue.waiting.clear()
        assert envs.rollout(AGENT, 4).rewards.shape == (4, 4)  # it has come since


def test_the_limit_of_scale_counts_also_for_workers_that_run_and_do_not_join():
    queue = Queue({1}, state=WorkerState.RUNNING)
    queue.resize = lambda num_workers: None
    with cluster(1, launcher=queue, start_timeout_s=100.0) as envs:
        begun_s = time.monotonic()
        with pytest.raises(envfleet.JoinTimeout, match=r"in 1 s.*job 1: Priority"):
            envs.scale(2, timeout_s=1.0)
        assert time.monotonic() - begun_s < 50.0


@pytest.mark.parametrize("is_first_slow", [True, False])
def test_one_that_cannot_be_built_is_no_matter_if_others_are_enough(is_first_slow):
    def make(env_id):
        if env_id == 1:
            raise RuntimeError("not here")
        time.sleep(3.0 if is_first_slow else 0.0)
        return gymnasium.make("CartPole-v1")

    makers = [lambda env_id=env_id: make(env_id) for env_id in range(2)]
    with ClusterEnv(makers, 2, 1, backend="serial", timing={"min_workers": 1}) as envs:
        stream = envs.stream(AGENT, 4)
        assert int(next(stream).workers[0]) == 0
    with pytest.raises(envfleet.WorkerFailed, match="not here"):
        ClusterEnv(makers, 2, 1, backend="serial")


def test_a_launcher_that_cannot_say_how_its_workers_are_does_not_stop_the_clock():
    queue = Queue(set())
    queue.status = lambda worker: 1 / 0
    with (
        pytest.raises(envfleet.JoinTimeout, match="the launcher has not said"),
        cluster(launcher=queue, start_timeout_s=2.0),
    ):
        pass


def test_a_slow_launcher_delays_no_deadline():
    queue = Queue(set())
    is_over, has_returned = threading.Event(), threading.Event()

    def restart(worker):
        is_over.wait(60.0)
        has_returned.set()

    queue.restart = restart
    with cluster(launcher=queue, reconnect_s=0.3) as envs:
        os.kill(envs.stats().workers[1].pid, signal.SIGKILL)
        wait_until(lambda: envs.stats().workers[1].stage == "starting", "the launcher is asked to restart it")
        with pytest.raises(envfleet.ClusterTimeout):
            envs.rollout(AGENT, 4, timeout_s=0.5)
        assert not has_returned.is_set()  # nobody has waited for it
        is_over.set()


def test_a_refused_worker_is_told_at_once():
    with (
        pytest.raises(envfleet.WorkerLost, match="worker 1 does not start: job 1: Priority"),
        cluster(launcher=Queue({1}, state=WorkerState.REFUSED)),
    ):
        pass
