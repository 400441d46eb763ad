"""Chaos: a real head and real workers, with a wire between them that loses, doubles, delays and reorders messages.

    python tests/cluster/chaos.py --seconds 600 --seed 7

Workers are killed and stopped, the wire falls silent. All the while: each row comes exactly once, a rollout has one
policy version, progress never stops for long, memory stays flat, and nothing is left in the end.
"""

import argparse
import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq  # noqa: TID253 - this process is a cluster's own

sys.path.insert(0, str(Path(__file__).parents[1]))  # for waiting, when this runs as a script

import envfleet
from cluster_envs import Accounts, Agent, CountingEnv
from envfleet.launchers.local import Local
from waiting import descendants, is_running, wait_until

NUM_WORKERS, NUM_ENVS = 3, 2
NUM_STEPS = 20
TIMINGS = {"heartbeat_s": 0.2, "silence_s": 3.0, "reconnect_s": 2.0, "resend_s": 0.5}
LONGEST_PAUSE_S = 45.0  # without any rollout, whatever happens; a stopped wire, a start and a back-off fit in
MOST_GROWTH_BYTES = 24 << 20
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
        command = [sys.executable, __file__, "--front", self.address, "--back", back, "--seed", str(self._seed)]
        self.process = subprocess.Popen([*command, "--counts", str(self._counts_path)])
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


def worker_pids():
    """Workers among our own children, in the order of workers."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"envfleet.cluster.worker" in arguments and is_running(pid):
                found.append((arguments[arguments.index(b"--worker") + 1], pid))
    return [pid for _, pid in sorted(found)]


# -- what must hold --


class Memory:
    """Resident bytes of this process and of its workers, once each second."""

    def __init__(self):
        self._next_s = 0.0
        self.series = {}  # pid -> [bytes]

    def look(self):
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + 1.0
        for pid in (os.getpid(), *worker_pids()):
            with contextlib.suppress(OSError, IndexError):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.series.setdefault(pid, []).append(pages * os.sysconf("SC_PAGESIZE"))

    def growth_bytes(self):
        """The most that any process grew after its first seconds: caches fill, code is imported."""
        warm = [series[len(series) // 3 :] for series in self.series.values() if len(series) >= 12]
        return max((max(series[-3:]) - min(series[:3]) for series in warm), default=0)


@dataclass
class Report:
    seconds: float = 0.0
    num_rollouts: int = 0
    num_rows: int = 0
    num_steps: int = 0  # of all envs, by step()
    num_env_objects: int = 0
    num_restarts: int = 0
    longest_pause_s: float = 0.0
    growth_bytes: int = 0
    num_versions: int = 0
    blows: dict = field(default_factory=dict)
    wire: dict = field(default_factory=dict)
    refused: dict = field(default_factory=dict)


class Learner:
    """Takes rollouts by stream() and by rollout(), and steps, in turns, and looks closely at each."""

    def __init__(self, envs, rng):
        self._envs = envs
        self._rng = rng
        self._agent = Agent()
        self._action_of = {envs.publish(self._agent): 0}
        self._accounts = Accounts()
        self._memory = Memory()
        self._last_s = time.monotonic()
        self.report = Report()

    def learn_until(self, end_s):
        while time.monotonic() < end_s:
            phase_s = min(end_s, time.monotonic() + self._rng.uniform(2.0, 8.0))
            self._accounts.interrupted(self._envs.num_envs)
            self._rng.choices((self._stream_until, self._collect_until, self._step_until), (5, 3, 2))[0](phase_s)
        report, accounts, stats = self.report, self._accounts, self._envs.stats()
        report.num_rows, report.num_env_objects = accounts.num_rows, accounts.num_env_objects
        report.num_restarts = sum(worker.num_restarts for worker in stats.workers)
        report.refused = dict(stats.num_refused)
        report.growth_bytes = self._memory.growth_bytes()
        report.num_versions = len(self._action_of)

    def _stream_until(self, end_s):
        stream = self._envs.stream(self._agent, NUM_STEPS, timeout_s=LONGEST_PAUSE_S)
        for rollout in stream:
            self._take(rollout)
            if time.monotonic() > end_s:
                break

    def _collect_until(self, end_s):
        while time.monotonic() < end_s:
            self._take(self._envs.rollout(self._agent, NUM_STEPS, timeout_s=LONGEST_PAUSE_S))

    def _step_until(self, end_s):
        """Each step makes one observation more, unless the worker was lost: then that is said, and others begin."""
        obs, _ = self._envs.reset()
        self._progress()
        was_lost = np.zeros(self._envs.num_envs, bool)
        while time.monotonic() < end_s:
            before = obs
            obs, _, _, is_lost, info = self._envs.step(np.zeros(self._envs.num_envs, np.int64))
            self._progress()
            self.report.num_steps += 1
            is_new = obs[:, 0] != before[:, 0]
            expected = np.where(is_new, 0, before[:, 1] + 1)
            if not (is_lost | ((is_new == was_lost) & (obs[:, 1] == expected))).all():
                raise AssertionError(f"a step from {before} to {obs}; lost before: {was_lost}, now: {is_lost}")
            if is_lost.any() and not all("lost" in why for why in info["env_error"][is_lost]):
                raise AssertionError(f"nobody says why envs {is_lost} were truncated: {info}")
            was_lost = is_lost

    def _progress(self):
        now_s = time.monotonic()
        self.report.longest_pause_s = max(self.report.longest_pause_s, now_s - self._last_s)
        self._last_s = now_s
        self._memory.look()

    def _take(self, rollout):
        self._progress()
        self.report.num_rollouts += 1
        self._accounts.add(rollout)
        for row, env_id in enumerate(rollout.env_ids):
            worker = list(rollout.workers).index(env_id // NUM_ENVS)
            expected = self._action_of[int(rollout.versions[worker])]
            if not (rollout.rewards[:, row] == expected).all():
                raise AssertionError(
                    f"worker {env_id // NUM_ENVS}: not the actions of version {rollout.versions[worker]}"
                )
        if self._rng.random() < 0.2:
            action = self._rng.randrange(3)
            self._agent.weights = {"action": self._agent.weights["action"] * 0 + action}
            version = self._envs.publish(self._agent)
            if self._action_of.setdefault(version, action) != action:
                raise AssertionError(f"version {version} stands for two policies")


def run(seconds, seed):
    """Chaos for so long. Raises if anything does not hold."""
    fds_before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(prefix="ef-chaos-") as folder:
        wire = WireBetween(Path(folder), seed)
        settings = {**TIMINGS, "backend": "serial", "max_worker_restarts": 1000, "timeout_s": LONGEST_PAUSE_S}
        settings["on_env_error"] = "restart"  # a lost worker truncates its rows instead of raising
        try:
            with envfleet.ClusterEnv(
                CountingEnv,
                NUM_WORKERS,
                NUM_ENVS,
                launcher=wire,
                head_address=wire.address,
                env_kwargs={"step_s": 0.001},
                **settings,
            ) as envs:
                fate, learner = Fate(wire, seed), Learner(envs, random.Random(seed))
                fate.start()
                begin_s = time.monotonic()
                try:
                    learner.learn_until(begin_s + seconds)
                finally:
                    fate.close()
                report = learner.report
                report.seconds = time.monotonic() - begin_s
                report.blows, report.wire = dict(fate.blows), wire.counts()
        finally:
            wire.close()
        wait_until(lambda: not worker_pids(), "no worker is left")
    del envs, learner
    gc.collect()
    if len(os.listdir("/proc/self/fd")) > fds_before:
        raise AssertionError("file descriptors are left")
    if report.growth_bytes > MOST_GROWTH_BYTES:
        raise AssertionError(f"memory grew by {report.growth_bytes / 2**20:.1f} MiB: {report}")
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=7)
    for name in ("--front", "--back", "--counts"):
        parser.add_argument(name, help=argparse.SUPPRESS)  # of the proxy's process
    arguments = parser.parse_args()
    if arguments.front is not None:
        Proxy(arguments.front, arguments.back, arguments.seed, arguments.counts).run()
    else:
        print(run(arguments.seconds, arguments.seed))


if __name__ == "__main__":
    main()
