"""The examples with a cluster, each for a few updates: what tests of launchers and devices run."""

import importlib
import subprocess
import sys

from tests.support.scripts import EXAMPLES

# Small networks, because pyzmq keeps a thread and its files for good once it has sent an array of 64 kB.
_PPO = "--total-steps 200 --num-rollout-steps 32 --num-epochs 2 --num-hidden 16 --num-eval-episodes 2"
_WORKERS = "--num-workers 2 --num-envs-per-worker 2"
SHORT_FLAGS = {
    "ppo": _PPO,
    "dqn": "--total-steps 160 --learning-starts 64 --buffer-size 100 --num-hidden 16",
    "sac": "--total-steps 60 --learning-starts 40 --buffer-size 100 --num-hidden 16",
    "impala": "--total-steps 400 --num-rollout-steps 16 --num-hidden 16",
    "curriculum": "--total-steps 300 --num-rollout-steps 16 --num-epochs 1 --num-minibatches 2",
}


def run_example(monkeypatch, name, *flags):
    """Its main() in this process, as its command line would run it. Returns the exit code."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *_WORKERS.split(), *SHORT_FLAGS[name].split(), *flags])
    return importlib.import_module(name).main()


def run_demo(*flags):
    """demo.py, in a process of its own: Matplotlib keeps files open."""
    words = f"{_WORKERS} {_PPO} --env-id CartPole-v1 --num-minibatches 2 --output-dir demo".split()
    return subprocess.run([sys.executable, EXAMPLES / "demo.py", *words, *flags], timeout=100).returncode
