"""The contenders of benchmarks/cluster.py: which script serves each, and how it is asked for a window.

Each runs in a process of its own (see cluster_peers/serve.py), so that its CPU is that of a tree of processes, and
that peers whose packages do not go together with ours can have another interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.harness.cpu_time import tree_cpu_s
from benchmarks.harness.rows import NotInstalled, Window

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 180.0
STUCK_AFTER_S = 60.0  # beyond the window itself
CLOSE_TIMEOUT_S = 30.0


class ContenderFailed(Exception):
    """What the contender said went wrong."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do what a row measures."""

    name: str
    script: str  # a module of cluster_peers
    settings: dict[str, Any] = field(default_factory=dict)
    is_peer: bool = False  # runs in the interpreter of --peers-python
    environment: dict[str, str] = field(default_factory=dict)


class Running:
    """A contender that is built."""

    def __init__(self, contender: Contender, peers_python: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [
                peers_python if contender.is_peer else sys.executable,
                "-m",
                f"benchmarks.rows.cluster_peers.{contender.script}",
                json.dumps(contender.settings),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **contender.environment, "PYTHONPATH": search_path},
            start_new_session=True,
        )
        try:
            self.about = self._answer(BUILD_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def run_window(self, window_s: float) -> Window:
        """Measure."""
        before_s = tree_cpu_s(self._process.pid)
        self._say({"window_s": window_s})
        answer = self._answer(window_s + STUCK_AFTER_S)
        cpu_s = tree_cpu_s(self._process.pid) - before_s
        return Window(answer.pop("count"), answer.pop("duration_s"), cpu_s, more=answer)

    def close(self) -> None:
        """End it, whatever state it is in."""
        with contextlib.suppress(OSError):
            self._say({"close": True})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: nobody else's processes
        self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ContenderFailed(f"its process ended with {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise NotInstalled(answer["missing"])
        if "error" in answer:
            raise ContenderFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-300:].decode(errors="replace")


TWO_TIMES_EIGHT = {"num_workers": 2, "num_envs_per_worker": 8}
RLLIB = Contender("RLlib env runners", "rllib_runners", TWO_TIMES_EIGHT, is_peer=True)


def torchrl(is_compiled: bool) -> Contender:
    """TorchRL with the same envs and networks."""
    name = "TorchRL MultiSync" + (", compiled policy" if is_compiled else "")
    return Contender(name, "torchrl_collector", {**TWO_TIMES_EIGHT, "is_compiled": is_compiled}, is_peer=True)


def cluster_rollout(num_envs_per_worker: int, policy: str = "module") -> Contender:
    """envfleet, two workers. `policy`: the torch module as it is, the same traced, or the same network in NumPy."""
    settings = {"num_workers": 2, "num_envs_per_worker": num_envs_per_worker, "policy": policy}
    name = {"module": "envfleet rollout", "traced": "envfleet rollout, traced", "numpy": "envfleet rollout, NumPy"}
    return Contender(name[policy], "envfleet_rollout", settings)


def one_process(num_pools: int, num_envs: int, checks_distributions: bool = False, num_processes: int = 1) -> Contender:
    """The same without a cluster. Torch checks the arguments of distributions by default; workers do not."""
    checks = ", torch's checks on" if checks_distributions else ""
    pools = f"{num_pools} pools of {num_envs}" if num_pools > 1 else f"one pool of {num_envs}"
    where = "one process" if num_processes == 1 else f"in each of {num_processes} processes at once"
    settings = {"num_pools": num_pools, "num_envs": num_envs, "checks_distributions": checks_distributions}
    return Contender(f"{pools}, {where}{checks}", "envfleet_one_process", {**settings, "num_processes": num_processes})


def cluster_step(address: str | None) -> Contender:
    """step(actions) of 2 x 64 envs."""
    name = "envfleet step, " + ("ipc" if address is None else "tcp with CURVE")
    return Contender(name, "envfleet_step", {"num_envs": 128, "num_workers": 2, "address": address})


LOCAL_STEP = Contender("local pool", "envfleet_step", {"num_envs": 128, "num_workers": 0})
ZEROMQ_ECHO = Contender("ZeroMQ alone, ipc", "zeromq_echo", {"num_workers": 2})


def cluster_stream(stacked: bool, num_envs: int, num_steps: int) -> Contender:
    """Rollouts of images from two workers."""
    settings = {"num_workers": 2, "num_envs_per_worker": num_envs, "num_steps": num_steps, "stacked": stacked}
    return Contender("envfleet stream", "envfleet_stream", settings)


def zeromq(num_bytes: int, refill: bool = False) -> Contender:
    """Two processes that push."""
    name = "ZeroMQ, frames written anew" if refill else "ZeroMQ alone"
    settings = {"num_workers": 2, "num_bytes": num_bytes, "refill": refill}
    return Contender(name, "zeromq_push", settings)
