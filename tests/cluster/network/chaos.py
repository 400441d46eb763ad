"""Chaos: a real head and real workers, with a wire between them that fails in many ways.

    python -m tests.cluster.network.chaos --wire tcp --seconds 600 --seed 7

The wire is one that loses, doubles, delays and reorders whole messages (ipc, in this file), or a real tcp link that
does so with packets while large payloads are under way (tcp, in chaos_tcp.py). Workers are killed and stopped, the wire
falls silent. All the while: each row comes exactly once, a rollout has one policy version, progress never stops for
long, memory stays flat. In the end all workers come back, and nothing is left.
"""

import argparse
import contextlib
import dataclasses
import gc
import heapq
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import zmq  # noqa: TID253 - this process is a cluster's own

import envfleet
from envfleet.launchers.local import Local
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.cluster.chaos_learner import Learner, Setup, worker_pids
from tests.support.cluster.chaos_tcp import OverTcp
from tests.support.cluster.tun_wire import NoWire
from tests.support.cluster.zero_copy import start_thread_of_pyzmq
from tests.support.envs.cluster_envs import Agent, CountingEnv
from tests.support.scripts import script_environment
from tests.support.waiting import wait_until

TIMINGS = {"heartbeat_s": 0.2, "silence_s": 3.0, "reconnect_s": 2.0, "resend_s": 0.5}
LONGEST_PAUSE_S = 45.0  # a stopped wire, a start and a back-off fit in
DROP, DOUBLE, DELAY = 0.02, 0.02, 0.1  # of all messages
MOST_DELAY_S = 0.4


# -- the wire --


class Proxy:
    """Stands between head and workers; each connection of a worker has one of its own to the head."""

    def __init__(self, front, back, seed, counts_path):
        self._rng = random.Random(seed)
        self._back_address = back
        self._counts_path = Path(counts_path)
        self._counts = Counter()
        self._context = zmq.Context()
        self._front = self._socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._front.bind(front)
        self._backs = {}
        self._poller = zmq.Poller()
        self._poller.register(self._front, zmq.POLLIN)
        self._late = []  # (when, count, is for the head, connection, frames)
        self._count = itertools.count()

    def run(self):
        next_word_s, parent = 0.0, os.getppid()
        while os.getppid() == parent:
            now_s = time.monotonic()
            wait_s = min([self._late[0][0] - now_s] if self._late else [0.5])
            ready = dict(self._poller.poll(max(0, int(wait_s * 1000) + 1)))
            if self._front in ready:
                connection, *frames = self._front.recv_multipart()
                self._weather(True, connection, frames)
            for connection, back in list(self._backs.items()):
                if back in ready:
                    self._weather(False, connection, back.recv_multipart())
            while self._late and self._late[0][0] <= time.monotonic():
                self._pass_on(*heapq.heappop(self._late)[2:])
            if time.monotonic() > next_word_s:
                next_word_s = time.monotonic() + 1.0
                self._counts_path.with_suffix(".new").write_text(json.dumps(self._counts))
                self._counts_path.with_suffix(".new").rename(self._counts_path)

    def _weather(self, is_for_head, connection, frames):
        self._counts["messages"] += 1
        chance = self._rng.random()
        if chance < DROP:
            self._counts["dropped"] += 1
            return
        if chance < DROP + DOUBLE:
            self._counts["doubled"] += 1
            self._delay(is_for_head, connection, frames)
        if chance > 1.0 - DELAY:
            self._counts["delayed"] += 1
            self._delay(is_for_head, connection, frames)
        else:
            self._pass_on(is_for_head, connection, frames)

    def _delay(self, is_for_head, connection, frames):
        when_s = time.monotonic() + self._rng.random() * MOST_DELAY_S
        heapq.heappush(self._late, (when_s, next(self._count), is_for_head, connection, frames))

    def _pass_on(self, is_for_head, connection, frames):
        if not is_for_head:
            try:
                self._front.send_multipart([connection, *frames], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:  # the worker has hung up, and so do we
                    self._hang_up(connection)
            return
        if connection not in self._backs:
            back = self._socket(zmq.DEALER)
            back.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            back.connect(self._back_address)
            self._backs[connection] = back
            self._poller.register(back, zmq.POLLIN)
        with contextlib.suppress(zmq.Again):
            self._backs[connection].send_multipart(frames, zmq.NOBLOCK)

    def _hang_up(self, connection):
        back = self._backs.pop(connection, None)
        if back is not None:
            self._poller.unregister(back)
            back.close()
            self._counts["hung up"] += 1

    def _socket(self, kind):
        """Asks as the product's sockets do whether the other end is there."""
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(TIMINGS["silence_s"] * 1000 / 3))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(TIMINGS["silence_s"] * 1000))
        return socket


class WireBetween:
    """A launcher: local workers, and the proxy that they take for the head."""

    is_on_this_host = True
    head_address = None
    queue_timeout_s = None

    def __init__(self, folder, seed):
        self.address = f"ipc://{folder}/wire"  # the folder is ours alone: workers look at that
        self._counts_path = folder / "counts.json"
        self._seed = seed
        self.process = None

    def launch(self, job):
        back = f"ipc://{job.run_dir}/head"
        command = [
            sys.executable,
            "-m",
            "tests.cluster.network.chaos",
            "--front",
            self.address,
            "--back",
            back,
            "--seed",
            str(self._seed),
        ]
        self.process = subprocess.Popen([*command, "--counts", str(self._counts_path)], env=script_environment())
        return Local().launch(job)

    def counts(self):
        return json.loads(self._counts_path.read_text()) if self._counts_path.exists() else {}

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


# -- the blows --


class Fate(threading.Thread):
    """Kills and stops processes, by a seed. Whoever was stopped goes on in the end."""

    def __init__(self, wire, seed):
        super().__init__(daemon=True)
        self._wire = wire
        self._rng = random.Random(seed)
        self._is_over = threading.Event()
        self.blows = Counter()

    def close(self):
        self._is_over.set()
        self.join(30.0)

    def run(self):
        while not self._is_over.wait(self._rng.uniform(0.5, 4.0)):
            self._strike()

    def _strike(self):
        rng, workers = self._rng, worker_pids()
        blow = rng.choices(("kill", "kill all", "stop", "stop wire"), (4, 1, 3, 2))[0]
        if not workers:
            return
        self.blows[blow] += 1
        if blow == "kill":
            self._send(rng.choice(workers), signal.SIGKILL)
        elif blow == "kill all":
            for pid in workers:
                self._send(pid, signal.SIGKILL)
        elif blow == "stop":
            self._halt(rng.choice(workers), rng.choice((0.3, 1.0, 2.0, 5.0)))
        else:
            self._halt(self._wire.process.pid, rng.choice((0.3, 1.0, 2.0, TIMINGS["silence_s"] + 2.5)))

    def _halt(self, pid, seconds):
        self._send(pid, signal.SIGSTOP)
        try:
            self._is_over.wait(seconds)
        finally:
            self._send(pid, signal.SIGCONT)

    def _send(self, pid, what):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


class OverMessages:
    """Chaos over ipc: small messages, of which many are lost, doubled and late."""

    setup = Setup(
        env=CountingEnv,
        env_kwargs={"step_s": 0.001},
        make_agent=Agent,
        settings=TIMINGS,
        longest_pause_s=LONGEST_PAUSE_S,
        most_growth_bytes=24 << 20,
    )

    def __init__(self, folder, seed):
        self._wire = WireBetween(folder, seed)
        self.settings = {"launcher": self._wire, "head_address": self._wire.address}
        self.fate = Fate(self._wire, seed)

    def begin(self, learner):
        self.fate.start()

    def counts(self):
        return self._wire.counts()

    def close(self):
        self._wire.close()


WIRES = {"ipc": OverMessages, "tcp": OverTcp}


def run(seconds, seed, wire="ipc", **settings_of_wire):
    """Chaos for `seconds`. Raises if anything does not hold."""
    start_thread_of_pyzmq()
    fds_before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(prefix="ef-chaos-") as folder:
        over = WIRES[wire](Path(folder), seed, **settings_of_wire)
        try:
            report = _learn(seconds, seed, over)
        finally:
            over.close()
        wait_until(lambda: not worker_pids(), "no worker is left")
    gc.collect()
    if len(os.listdir("/proc/self/fd")) > fds_before:
        raise AssertionError(f"file descriptors are left: {len(os.listdir('/proc/self/fd'))}, {fds_before} before")
    if report.growth_bytes > over.setup.most_growth_bytes:
        raise AssertionError(f"memory grew by {report.growth_bytes / 2**20:.1f} MiB: {report}")
    return report


def _learn(seconds, seed, over):
    setup = over.setup
    settings = {"backend": "serial", "max_worker_restarts": 1000, "timeout_s": setup.longest_pause_s}
    settings["on_env_error"] = "restart"  # a lost worker truncates its rows instead of raising
    settings |= {"env_kwargs": setup.env_kwargs, **setup.settings, **over.settings}
    with envfleet.ClusterEnv(setup.env, setup.num_workers, setup.num_envs, **cluster_arguments(settings)) as envs:
        learner = Learner(envs, random.Random(seed), setup)
        begin_s = time.monotonic()
        over.begin(learner)
        try:
            learner.learn_until(begin_s + seconds)
        finally:
            over.fate.close()
        learner.recover()
        report = learner.report
        report.seconds = time.monotonic() - begin_s
        report.blows, report.wire = dict(over.fate.blows), over.counts()
        return report


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wire", choices=WIRES, default="ipc")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--longest-cut-s", type=float, help="of the tcp wire")
    for name in ("--front", "--back", "--counts"):
        parser.add_argument(name, help=argparse.SUPPRESS)  # of the proxy's process
    arguments = parser.parse_args()
    if arguments.front is not None:
        return Proxy(arguments.front, arguments.back, arguments.seed, arguments.counts).run()
    settings = {} if arguments.longest_cut_s is None else {"longest_cut_s": arguments.longest_cut_s}
    try:
        report = run(arguments.seconds, arguments.seed, arguments.wire, **settings)
    except NoWire as error:
        sys.exit(f"no chaos over {arguments.wire}: {error}")
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main()
