"""Chaos over a real tcp link: it is cut, throttled, late, lossy and out of order while large payloads are under way."""

import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial

from tests.support.cluster.chaos_learner import Setup, worker_pids
from tests.support.cluster.tun_wire import DIRECTIONS, Link, TunWire
from tests.support.envs.bulky_envs import BulkyAgent, BulkyEnv

WEIGHT_BYTES = 60_000_000
ROLLOUT_BYTES = 50_000_000
NUM_WORKERS, NUM_ENVS, NUM_STEPS = 2, 2, 20
SILENCE_S = 3.0
CALM = Link(rate_bps=400e6, delay_s=0.001, queue_bytes=1 << 20)
MTU = 9000  # the process that carries packets is Python: it has the time for some thousands of them each second
RECOVERY = 0.8  # so often the next blow waits until something has come after the last one
BUSY_BYTES, BUSY_S = 4_000_000, 0.2  # so much in so short a time: a large payload is under way

SETUP = Setup(
    env=BulkyEnv,
    env_kwargs={"obs_bytes": ROLLOUT_BYTES // (NUM_ENVS * NUM_STEPS) // 8 * 8},
    make_agent=partial(BulkyAgent, WEIGHT_BYTES),
    settings={"heartbeat_s": 0.5, "silence_s": SILENCE_S, "reconnect_s": 5.0, "resend_s": 1.0},
    longest_pause_s=240.0,  # two cuts of 40 s, new workers and 240 MB for them on a bad link fit in
    most_growth_bytes=200 << 20,  # four payloads: one that stays after each cut would soon be more
    has_payloads=True,
    num_workers=NUM_WORKERS,
    num_envs=NUM_ENVS,
    num_steps=NUM_STEPS,
    phase_s=(10.0, 25.0),
    publish_share=0.6,
)


class OverTcp:
    """The wire, and what befalls it."""

    setup = SETUP

    def __init__(self, folder, seed, longest_cut_s=40.0):
        self._wire = TunWire(CALM, CALM, seed=seed, mtu=MTU)
        self.settings = {"launcher": self._wire.launcher(log_dir=folder)}
        self.fate = Weather(self._wire, seed, longest_cut_s)

    def begin(self, learner):
        self.fate.learner = learner
        self.fate.start()

    def counts(self):
        return dataclasses.asdict(self._wire.counts())

    def close(self):
        self._wire.close()


class Weather(threading.Thread):
    """One thing after the other, by a seed: each kind once, then at random. In the end the wire is calm."""

    def __init__(self, wire, seed, longest_cut_s):
        super().__init__(daemon=True)
        self._wire = wire
        self._rng = random.Random(seed)
        self._longest_cut_s = longest_cut_s
        self._is_over = threading.Event()
        self.learner = None  # who shows that there is progress
        self.blows = Counter()
        self._kinds = {
            "cut": self._cut,
            "lose": self._lose,
            "reorder": self._reorder,
            "delay": self._delay,
            "cut one way": self._cut_one_way,
            "throttle": self._throttle,
            "kill": self._kill,
            "stop": self._stop,
        }

    def run(self):
        kinds = list(self._kinds)
        while not self._is_over.is_set():
            kind = kinds.pop(0) if kinds else self._rng.choice([*self._kinds, "cut", "cut"])
            self._wait_until_busy(self._rng.choice(DIRECTIONS))
            self.blows[kind] += 1
            try:
                self._kinds[kind]()
            finally:
                self._wire.set(to_workers=CALM, to_head=CALM)
            if self._rng.random() < RECOVERY:
                self._wait_for_progress()
            self._is_over.wait(self._rng.uniform(0.5, 4.0))

    def close(self):
        self._is_over.set()
        self.join(60.0)

    def _cut(self):
        self._wire.cut()
        self._is_over.wait(self._cut_s())

    def _cut_one_way(self):
        self._wire.cut(self._rng.choice(DIRECTIONS))
        self._is_over.wait(self._cut_s())

    def _cut_s(self):
        """The first is long enough for connections to die, with bytes unsent on both sides."""
        if sum(self.blows.values()) == 1:
            return min(2 * SILENCE_S, self._longest_cut_s)
        return min(self._rng.choice((0.5, 2.0, SILENCE_S + 1.0, 2 * SILENCE_S, 40.0)), self._longest_cut_s)

    def _lose(self):
        self._change(loss=self._rng.choice((0.002, 0.01, 0.05)))

    def _reorder(self):
        self._change(reorder=self._rng.choice((0.02, 0.2)), reorder_s=self._rng.choice((0.002, 0.02)))

    def _delay(self):
        self._change(delay_s=self._rng.choice((0.02, 0.1, 0.4)))

    def _throttle(self):
        self._change(rate_bps=self._rng.choice((5e6, 20e6, 50e6)))

    def _change(self, **settings):
        link = dataclasses.replace(CALM, **settings)
        self._wire.set(to_workers=link, to_head=link)
        self._is_over.wait(self._rng.uniform(2.0, 6.0))

    def _kill(self):
        for pid in self._rng.sample(worker_pids(), 1):
            _send(pid, signal.SIGKILL)

    def _stop(self):
        pids = self._rng.sample(worker_pids(), 1)
        for pid in pids:
            _send(pid, signal.SIGSTOP)
        self._is_over.wait(self._rng.choice((1.0, 2 * SILENCE_S)))
        for pid in pids:
            _send(pid, signal.SIGCONT)

    def _wait_for_progress(self):
        before = self.learner.num_taken
        while self.learner.num_taken == before and not self._is_over.wait(0.1):
            pass  # the learner has a deadline

    def _wait_until_busy(self, name, timeout_s=5.0):
        """Until a large payload is under way in this direction, or not for `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        before = getattr(self._wire.counts(), name).tcp_bytes
        while time.monotonic() < deadline_s and not self._is_over.wait(BUSY_S):
            now = getattr(self._wire.counts(), name).tcp_bytes
            if now - before > BUSY_BYTES:
                return
            before = now


def _send(pid, what):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)
