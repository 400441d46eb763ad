"""With which exit code a worker's process ends, and what is done before; runs that end by a signal."""

import os
import signal
import subprocess
import sys
import threading
import time

import gymnasium
import pytest
import zmq  # noqa: TID253 - a head that does not answer is made of it

from envfleet import ClusterEnv
from envfleet.cluster.wire.sockets import RunKeys
from envfleet.contract.exits import WorkerExit
from envfleet.contract.worker_environment import KEYS_VARIABLE
from envfleet.launchers.launcher import WorkerState, WorkerStatus
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.cluster.run.test_addressing import has_version_6
from tests.support.agents import numpy_agents
from tests.support.scripts import script_environment
from tests.support.waiting import is_running, wait_until

pytestmark = pytest.mark.slow
AGENT = numpy_agents.discrete(num_actions=2)


class SlowEnv(gymnasium.Wrapper):
    """20 ms a step; each leaves a byte in a file."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action):
        time.sleep(0.02)
        with open(os.environ["STEPS_FILE"], "ab") as file:
            file.write(b".")
        return self.env.step(action)


class Kept:
    """A launcher that starts workers by a command with more arguments, and keeps them where tests find them."""

    is_on_this_host = False
    head_address = None
    queue_timeout_s = None
    revives = False

    def __init__(self, *arguments, stdin=subprocess.DEVNULL, environment=None):
        self._arguments, self._stdin, self._environment = arguments, stdin, environment
        self.processes = {}

    def host_of_workers(self):
        return "127.0.0.1"

    def launch(self, job):
        self.job = job
        for worker in range(job.num_workers):
            self.restart(worker)
        return self

    def restart(self, worker):
        command = [sys.executable, *self.job.arguments(worker), *self._arguments]
        environment = script_environment()
        environment |= self.job.environment if self._environment is None else self._environment
        self.processes.setdefault(worker, []).append(
            subprocess.Popen(command, stdin=self._stdin, env=environment, stderr=subprocess.DEVNULL)
        )

    def status(self, worker):
        code = self.processes[worker][-1].poll()
        state = WorkerState.RUNNING if code is None else WorkerState.ENDED
        return WorkerStatus(state, "" if code is None else f"code {code}")

    def log(self, worker, max_bytes=4000):
        return ""

    def log_place(self, worker):
        return "nowhere"

    def cancel(self, grace_s):
        for processes in self.processes.values():
            for process in processes:
                try:
                    process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                if process.stdin is not None:
                    process.stdin.close()


def cluster(launcher, env="CartPole-v1", **settings):
    return ClusterEnv(env, 1, 2, backend="serial", launcher=launcher, **cluster_arguments(settings, reconnect_s=1.0))


def test_a_worker_that_is_told_to_stop_is_done():
    launcher = Kept()
    with cluster(launcher) as envs:
        envs.reset(seed=0)
    assert launcher.processes[0][0].returncode == WorkerExit.DONE


def test_one_that_gets_sigterm_says_so_and_is_replaced():
    launcher = Kept()
    with cluster(launcher) as envs:
        envs.rollout(AGENT, 4)
        launcher.processes[0][0].terminate()
        assert launcher.processes[0][0].wait(20.0) == WorkerExit.TOLD_TO_LEAVE
        envs.rollout(AGENT, 4)
        assert len(launcher.processes[0]) == 2


def test_one_whose_time_is_up_finishes_its_order_first(tmp_path, monkeypatch):
    steps = tmp_path / "steps"
    monkeypatch.setenv("STEPS_FILE", str(steps))
    launcher = Kept()
    with cluster(launcher, SlowEnv) as envs:
        stream = envs.stream(AGENT, 16)
        next(stream)
        wait_until(lambda: steps.stat().st_size > 2 * 16 + 2, "the second rollout is under way")
        launcher.processes[0][0].send_signal(signal.SIGUSR1)
        assert launcher.processes[0][0].wait(20.0) == WorkerExit.OUT_OF_TIME
        assert "time limit" in envs.stats().workers[0].problem
        accepted = envs.stats().workers[0].num_rollouts
        assert accepted >= 2  # also the one that it was at
        for _ in range(4):
            next(stream)
        assert len(launcher.processes[0]) == 2
        # The last answer was accepted, so the successor did not have to collect it again.
        assert envs.stats().num_refused == {}


def test_one_whose_standard_input_is_closed_leaves():
    launcher = Kept("--ends-with-stdin", stdin=subprocess.PIPE)
    with cluster(launcher) as envs:
        envs.rollout(AGENT, 4)
        launcher.processes[0][0].stdin.close()
        assert launcher.processes[0][0].wait(20.0) == WorkerExit.TOLD_TO_LEAVE
        envs.rollout(AGENT, 4)


def test_keys_from_a_file(tmp_path):
    keys = tmp_path / "keys"
    launcher = Kept("--keys-file", str(keys), environment={})
    original = launcher.launch

    def launch(job):
        keys.touch(mode=0o600)
        keys.write_text(job.environment[KEYS_VARIABLE] + "\n")
        return original(job)

    launcher.launch = launch
    with cluster(launcher) as envs:
        envs.reset(seed=0)


@pytest.mark.parametrize(
    ("mode", "text", "message"),
    [
        (0o644, RunKeys.make().for_workers(), "closed to others"),
        (0o600, "no keys", "three keys"),
        (None, "", "cannot be read"),
    ],
)
def test_a_file_that_holds_no_keys(tmp_path, mode, text, message):
    path = tmp_path / "keys"
    if mode is not None:
        path.write_text(text)
        path.chmod(mode)
    command = [sys.executable, "-m", "envfleet.cluster.worker", "--head", "tcp://127.0.0.1:9", "--worker", "0"]
    ended = subprocess.run(
        [*command, "--keys-file", str(path)], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert ended.returncode == 1
    assert message in ended.stderr


def test_one_whose_time_is_up_before_it_is_taken_in():
    """A head that does not answer: it listens, and says nothing."""
    keys = RunKeys.make()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
        deaf.curve_server, deaf.curve_secretkey, deaf.curve_publickey = True, keys.head_secret, keys.head_public
        port = deaf.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, "-m", "envfleet.cluster.worker", "--head", f"tcp://127.0.0.1:{port}"]
        environment = {**os.environ, KEYS_VARIABLE: keys.for_workers()}
        worker = subprocess.Popen([*command, "--worker", "0"], env=environment, stderr=subprocess.DEVNULL)
        assert deaf.poll(30_000)  # it asks to join
        worker.send_signal(signal.SIGUSR1)
        assert worker.wait(20.0) == WorkerExit.OUT_OF_TIME


@pytest.mark.skipif(not has_version_6(), reason="this machine has no IP version 6")
def test_head_and_worker_meet_at_an_address_of_version_6():
    with ClusterEnv("CartPole-v1", 1, 2, backend="serial", network={"address": "tcp://[::1]:0"}) as envs:
        assert envs.reset(seed=0)[0].shape == (2, 4)


def test_one_that_finds_no_head_says_so():
    command = [sys.executable, "-m", "envfleet.cluster.worker", "--head", "tcp://127.0.0.1:9", "--worker", "0"]
    environment = {**os.environ, KEYS_VARIABLE: RunKeys.make().for_workers()}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60.0, check=False)
    assert ended.returncode == WorkerExit.HEAD_GONE
    assert "the head is gone" in ended.stderr


HEAD = """
import time
from tests.cluster.worker.test_leaving import Kept, cluster
launcher = Kept()
class Told(Kept):
    def cancel(self, grace_s):
        super().cancel(grace_s)
        print("cancelled", flush=True)
with cluster(Told()) as envs:
    envs.reset(seed=0)
    print(envs.stats().workers[0].pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_head_that_is_ended_by_a_signal_cancels_its_job(number):
    command = [sys.executable, "-c", HEAD]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=script_environment()
    ) as head:
        worker = int(head.stdout.readline())
        head.send_signal(number)
        assert head.stdout.read().split() == ["cancelled"]
        assert head.wait(20.0) in (128 + number, -number, 1)
    wait_until(lambda: not is_running(worker), "the worker is gone")


IN_LAUNCH = HEAD.replace(
    "class Told(Kept):",
    """class Told(Kept):
    def launch(self, job):
        try:
            super().launch(job)
            print(self.processes[0][0].pid, flush=True)
            time.sleep(60)
        except BaseException:
            self.cancel(5.0)
            raise
""",
)


def test_sigterm_while_workers_are_being_started():
    command = [sys.executable, "-c", IN_LAUNCH]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=script_environment()
    ) as head:
        worker = int(head.stdout.readline())
        head.terminate()
        assert head.stdout.read().split() == ["cancelled"]
        assert head.wait(20.0) == 128 + signal.SIGTERM
    wait_until(lambda: not is_running(worker), "the worker is gone")


def test_sigterm_does_not_wait_for_threads(run_folders):
    thread = "import threading\nthreading.Thread(target=time.sleep, args=[45]).start()\nwith cluster(Told"
    command = [sys.executable, "-c", HEAD.replace("with cluster(Told", thread)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=script_environment()
    ) as head:
        worker = int(head.stdout.readline())
        head.terminate()
        assert head.stdout.readline() == "cancelled\n"
        assert head.poll() is None  # the thread still sleeps
        wait_until(lambda: not is_running(worker), "the worker is gone")
        wait_until(lambda: run_folders() == [], "the run's folder is gone")
        head.kill()


@pytest.fixture
def no_sigterm_handler():
    """Other libraries set one, and leave it: Ray does."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("no_sigterm_handler")
def test_sigterm_is_as_before_when_no_run_is_left():
    before = signal.getsignal(signal.SIGTERM)
    first, second = cluster(Kept()), cluster(Kept())
    assert signal.getsignal(signal.SIGTERM) is not before
    first.close()
    assert signal.getsignal(signal.SIGTERM) is not before
    second.close()
    assert signal.getsignal(signal.SIGTERM) is before
    third = cluster(Kept())
    other = threading.Thread(target=third.close)  # where handlers cannot be changed
    other.start()
    other.join(30.0)
    cluster(Kept()).close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_number_of_cpus_that_were_reserved(monkeypatch):
    from envfleet.pool.process.cpus import usable_cpus

    all_cpus = usable_cpus()
    monkeypatch.setenv("ENVFLEET_NUM_CPUS", "1")
    assert usable_cpus() == 1
    monkeypatch.setenv("ENVFLEET_NUM_CPUS", str(all_cpus + 5))
    assert usable_cpus() == all_cpus
    monkeypatch.setenv("ENVFLEET_NUM_CPUS", "many")
    assert usable_cpus() == all_cpus
