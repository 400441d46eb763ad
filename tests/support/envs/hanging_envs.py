"""Envs that hang for real, once each time a file says so, in the way that it says."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

INTERRUPTIBLE = ("sleep", "loop", "read", "retry")  # come back after a signal whose handler raises
DEAF = ("c", "stopped", "swallow")  # must be killed


class HangingEnv(gymnasium.Env):
    """Observations are [a number drawn in this step, steps in this episode, episodes]: each env has its own trajectory.

    A file `hang-step-NAME`, `hang-reset-NAME` or `hang-build-NAME` in `folder` makes it hang there, once or always.
    The file has the name of one of `_WAYS`, or "held": then it goes on when `let_go_on` says so.
    """

    def __init__(self, folder, name=0, length=7, step_s=0.0):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.folder, self.name, self.length, self.step_s = Path(folder), name, length, step_s
        self._num_steps = self._num_episodes = 0
        if (self.folder / f"hang-build-{name}").exists():
            self._hang("build")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._hang("reset")
        self._num_steps, self._num_episodes = 0, self._num_episodes + 1
        return self._obs(), {}

    def step(self, action):
        self._hang("step")
        if self.step_s:
            time.sleep(self.step_s)
        self._num_steps += 1
        return self._obs(), float(self._num_steps), self._num_steps >= self.length, False, {}

    def pid(self):
        return os.getpid()

    def _obs(self):
        return np.array([self.np_random.random(), self._num_steps, self._num_episodes])

    def _hang(self, where):
        file = self.folder / f"hang-{where}-{self.name}"
        try:
            how, *always = file.read_text().split()
            if not always:
                file.unlink()
        except FileNotFoundError:
            return
        mark = self.folder / f"hung-{where}-{self.name}"
        mark.write_text(str(os.getpid()))
        if how == "held":
            while mark.exists():
                time.sleep(0.01)
        else:
            hang(how)


def hang(how):
    """For ever; or raise, once or always."""
    _WAYS[how]()


def _loop():
    while True:
        pass


def _sleep_through(errors):
    """As code does that tries again whatever happens."""
    while True:
        with contextlib.suppress(errors):
            time.sleep(3600)


def _hang_in_c():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        ctypes.CDLL(None).sleep(3600)


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def _raise():
    raise RuntimeError("the simulator has no licence")


_WAYS = {
    "raise": _raise,
    "sleep": lambda: time.sleep(3600),
    "loop": _loop,
    "read": lambda: os.read(os.pipe()[0], 1),
    "retry": lambda: _sleep_through(Exception),
    "swallow": lambda: _sleep_through(BaseException),
    "c": _hang_in_c,
    "stopped": _stop,
}


def tell_to_hang(folder, name, how, where="step", *, always=False):
    """In its next step or reset; always: and in those after it, until `hang_no_more`."""
    (Path(folder) / f"hung-{where}-{name}").unlink(missing_ok=True)
    partial = Path(folder) / f"partial-{where}-{name}"
    partial.write_text(f"{how} always" if always else how)
    partial.rename(Path(folder) / f"hang-{where}-{name}")


def hang_no_more(folder, name, where="step"):
    """It was told to hang always."""
    (Path(folder) / f"hang-{where}-{name}").unlink()


def let_go_on(folder, name, where="step"):
    """It was told to hang "held", and does."""
    (Path(folder) / f"hung-{where}-{name}").unlink()


def has_hung(folder, name, where="step"):
    """Does it hang, or has it hung?"""
    return (Path(folder) / f"hung-{where}-{name}").exists()
