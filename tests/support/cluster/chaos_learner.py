"""What must hold whatever happens to wire and workers: a learner that looks closely at all it gets."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.envs.cluster_envs import Accounts
from tests.support.waiting import descendants, is_running, wait_until


@dataclass(frozen=True)
class Setup:
    """What runs while there is chaos, and what is too much."""

    env: type
    env_kwargs: dict[str, Any]
    make_agent: Callable[[], Any]
    settings: dict[str, Any]  # of the cluster
    longest_pause_s: float  # without any rollout, whatever happens
    most_growth_bytes: int  # of any process
    has_payloads: bool = False  # large ones, which make its memory go up and down
    num_workers: int = 3
    num_envs: int = 2  # of each worker
    num_steps: int = 20
    publish_share: float = 0.2  # of rollouts after which there are new weights
    phase_s: tuple[float, float] = (2.0, 8.0)  # how long a stream, rollouts or steps go on; then comes something else


def worker_pids():
    """Workers among our own children, in the order of workers."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"envfleet.cluster.worker" in arguments and is_running(pid):
                found.append((arguments[arguments.index(b"--worker") + 1], pid))
    return [pid for _, pid in sorted(found)]


class Memory(threading.Thread):
    """Resident bytes of this process and of its workers, once each second."""

    def __init__(self):
        super().__init__(daemon=True)
        self._is_over = threading.Event()
        self.series = {}  # pid -> [bytes]

    def run(self):
        while not self._is_over.wait(1.0):
            for pid in (os.getpid(), *worker_pids()):
                with contextlib.suppress(OSError, IndexError):
                    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                    self.series.setdefault(pid, []).append(pages * os.sysconf("SC_PAGESIZE"))

    def close(self):
        self._is_over.set()
        self.join()

    def growth_bytes(self, has_payloads):
        """The most that any process grew after its first seconds: caches fill, code is imported.

        Large payloads come and go: with them the least that a process held in a third of its time is compared with the
        next, if it lived for a minute. A worker that waits for its first weights is not yet what it will be.

        In runs of ten minutes over tcp the result was +106 to +133 MB, in one of four minutes +123 MB. That is no leak,
        but two payloads: a worker that steps holds 66 MB in large blocks (its policy), one that collects 166 MB (and
        two rollouts of 50 MB, kept to be used again), and the two alternate. The head had the same 242 MB in large
        blocks whenever it was idle, from second 40 to second 190 (the agent, its pickle, two versions of the weights);
        malloc's heap, from which libzmq has its frames, went from 24 to 54 MB there, 33 MB of which were free.

        On 2026-11-18, on a machine with a load of 20, 600 s (seed 24) and 420 s (seed 25) gave +124 and +195 MB. In the
        second run that was a worker of two minutes, which waited for its first weights in the first of them. The least
        that the head held in each minute: 197, 209, 341, 340, 349, 377, 360, 306, 295 MB, and 198, 217, 217, 352, 317,
        301 MB: two or three payloads more from the third minute on, and no growth after that.
        """
        growths = [0]
        for series in self.series.values():
            third = len(series) // 3
            if has_payloads and len(series) >= 60:
                growths.append(min(series[2 * third :]) - min(series[third : 2 * third]))
            elif not has_payloads and len(series) >= 12:
                growths.append(max(series[-3:]) - min(series[third : third + 3]))
        return max(growths)

    def least_mb(self):
        """The least that each process held in each whole minute of its life, in MB; the head is the first."""
        return {
            pid: [min(series[start : start + 60]) // 10**6 for start in range(0, len(series) - 59, 60)]
            for pid, series in self.series.items()
            if len(series) >= 60
        }


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
    least_mb: dict = field(default_factory=dict)  # by process, in each minute
    num_versions: int = 0
    blows: dict = field(default_factory=dict)
    wire: dict = field(default_factory=dict)
    refused: dict = field(default_factory=dict)


class Learner:
    """Takes rollouts by stream() and by rollout(), and steps, in turns, and looks closely at each."""

    def __init__(self, envs, rng, setup):
        self._envs = envs
        self._rng = rng
        self._setup = setup
        self._agent = setup.make_agent()
        self._action_of = {envs.publish(self._agent): 0}
        self._accounts = Accounts()
        self._memory = Memory()
        self._memory.start()
        self._last_s = time.monotonic()
        self.num_taken = 0  # rollouts and steps
        self.report = Report()

    def learn_until(self, end_s):
        while time.monotonic() < end_s:
            phase_s = min(end_s, time.monotonic() + self._rng.uniform(*self._setup.phase_s))
            self._accounts.interrupted(self._envs.num_envs)
            self._rng.choices((self._stream_until, self._collect_until, self._step_until), (5, 3, 2))[0](phase_s)

    def recover(self):
        """It is quiet again: all workers come back, and each has a rollout to give."""
        self._memory.close()
        self._accounts.interrupted(self._envs.num_envs)
        self._take(self._envs.rollout(self._agent, self._setup.num_steps, timeout_s=self._setup.longest_pause_s))
        wait_until(lambda: all(each.stage == "present" for each in self._envs.stats().workers), "all workers are there")
        self._sum_up()

    def _sum_up(self):
        report, accounts, stats = self.report, self._accounts, self._envs.stats()
        report.num_rows, report.num_env_objects = accounts.num_rows, accounts.num_env_objects
        report.num_restarts = sum(worker.num_restarts for worker in stats.workers)
        report.refused = dict(stats.num_refused)
        report.least_mb = self._memory.least_mb()
        report.growth_bytes = self._memory.growth_bytes(self._setup.has_payloads)
        report.num_versions = len(self._action_of)

    def _stream_until(self, end_s):
        stream = self._envs.stream(self._agent, self._setup.num_steps, timeout_s=self._setup.longest_pause_s)
        for rollout in stream:
            self._take(rollout)
            if time.monotonic() > end_s:
                break

    def _collect_until(self, end_s):
        while time.monotonic() < end_s:
            self._take(self._envs.rollout(self._agent, self._setup.num_steps, timeout_s=self._setup.longest_pause_s))

    def _step_until(self, end_s):
        """Each step makes one observation more, unless the worker was lost: then that is said, and others begin."""
        obs = checked(self._envs.reset()[0])
        self._progress()
        was_lost = np.zeros(self._envs.num_envs, bool)
        while time.monotonic() < end_s:
            before = obs
            obs, _, _, is_lost, info = self._envs.step(np.zeros(self._envs.num_envs, np.int64))
            obs = checked(obs)
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
        self.num_taken += 1
        now_s = time.monotonic()
        self.report.longest_pause_s = max(self.report.longest_pause_s, now_s - self._last_s)
        self._last_s = now_s

    def _take(self, rollout):
        self._progress()
        self.report.num_rollouts += 1
        names = ("obs", "next_obs", "final_obs")
        self._accounts.add(dataclasses.replace(rollout, **{name: checked(getattr(rollout, name)) for name in names}))
        for row, env_id in enumerate(rollout.env_ids):
            worker = list(rollout.workers).index(env_id // self._setup.num_envs)
            expected = self._action_of[int(rollout.versions[worker])]
            if not (rollout.rewards[:, row] == expected).all():
                raise AssertionError(
                    f"worker {env_id // self._setup.num_envs}: not the actions of version {rollout.versions[worker]}"
                )
        if self._rng.random() < self._setup.publish_share:
            action = self._rng.randrange(3)
            self._agent.weights = {name: np.full_like(array, action) for name, array in self._agent.weights.items()}
            version = self._envs.publish(self._agent)
            if self._action_of.setdefault(version, action) != action:
                raise AssertionError(f"version {version} stands for two policies")


def checked(obs):
    """Name and number of observations; what BulkyEnv puts behind them must be whole."""
    if obs.shape[-1] > 2 and not (obs[..., 2:] == obs[..., 1:2]).all():
        raise AssertionError(f"observations were damaged on the way: {obs}")
    return obs[..., :2]
