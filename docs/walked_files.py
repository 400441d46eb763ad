"""Which files of a checkout does one rollout, or one step, walk through? Counted by running it, in all processes.

    python docs/walked_files.py [--source PATH/src]

A profile function notes the file of every Python call while a flag in shared memory is up, in this process and in the
workers, children and spawners that it starts. C++ is not seen. --source names another checkout with a compiled core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# What runs by the clock in a thread of its own, and may or may not happen meanwhile.
BY_THE_CLOCK = ("cluster/run/job_monitor.py", "cluster/worker/watchdog.py", "launchers/")

# What every process runs first. One byte of the flag's file says whether calls count.
SITE = """
import mmap, os, sys, threading
_flag = mmap.mmap(os.open(os.environ["WALK_FLAG"], os.O_RDWR), 1)
_seen = set()
def _note(frame, event, arg):
    if event == "call" and _flag[0]:
        name = frame.f_code.co_filename
        if name not in _seen:
            _seen.add(name)
            with open(os.environ["WALK_FILES"], "a") as files:
                files.write(name + "\\n")
def _again():
    _seen.clear()
    sys.setprofile(_note)
threading.setprofile(_note)
sys.setprofile(_note)
os.register_at_fork(after_in_child=_again)
"""

PROGRAMS = {
    "rollout": """
import numpy as np
from envfleet import ClusterEnv, FunctionPolicy
def act(weights, obs):
    return (obs @ weights["w"] > 0).astype(np.int64), np.zeros(len(obs), np.float32)
def log_prob(weights, obs, actions):
    return np.zeros(len(obs), np.float32)
agent = FunctionPolicy(act, log_prob=log_prob, weights={"w": np.zeros(4)})
with ClusterEnv("CartPole-v1", 2, 4) as cluster:
    cluster.rollout(agent, 32)
    _flag[0] = 1
    cluster.rollout(agent, 32)
    _flag[0] = 0
""",
    "pull": """
import torch
from envfleet import APS, ClusterEnv
class Agent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)
    def get_distribution(self, obs):
        return torch.distributions.Categorical(logits=self.actor(obs))
    def get_action_and_value(self, obs, action=None):
        choice = self.get_distribution(obs)
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.critic(obs)
agent = Agent()
with ClusterEnv("CartPole-v1", 2, 4, sync=APS(threshold=1e-9)) as cluster:
    cluster.rollout(agent, 32)
    with torch.no_grad():
        agent.actor.weight[0] += 1.0
    _flag[0] = 1
    cluster.rollout(agent, 32)
    _flag[0] = 0
    assert all(worker.num_pulls == 2 for worker in cluster.stats().workers)
""",
    "native step": """
from envfleet import make
with make("CartPole-v1", 8) as pool:
    pool.reset(seed=0)
    pool.step(pool.action_space.sample())
    _flag[0] = 1
    pool.step(pool.action_space.sample())
    _flag[0] = 0
""",
    "process step": """
from envfleet import make
with make("CartPole-v1", 8, backend="process") as pool:
    pool.reset(seed=0)
    pool.step(pool.action_space.sample())
    _flag[0] = 1
    pool.step(pool.action_space.sample())
    _flag[0] = 0
""",
}


def walked(program: str, source: Path) -> list[str]:
    """Files under `source` in which a function was called while the program's flag was up."""
    with tempfile.TemporaryDirectory() as folder:
        flag, files = Path(folder, "flag"), Path(folder, "files")
        flag.write_bytes(b"\0")
        files.touch()
        Path(folder, "sitecustomize.py").write_text(SITE)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([folder, str(source)]),
            "WALK_FLAG": str(flag),
            "WALK_FILES": str(files),
        }
        head = "from sitecustomize import _flag\n"
        subprocess.run([sys.executable, "-c", head + program], env=environment, check=True, timeout=300)
        inside = {Path(line) for line in files.read_text().splitlines() if line.startswith(str(source))}
    names = sorted(path.relative_to(source / "envfleet").as_posix() for path in inside)
    return [name for name in names if not name.startswith(BY_THE_CLOCK)]


def main() -> None:
    """Print the files that each program walks through."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, default=Path(__file__).parent.parent / "src")
    source = parser.parse_args().source.resolve()
    for name, program in PROGRAMS.items():
        files = walked(program, source)
        num_cluster = sum(file.startswith("cluster/") for file in files)
        print(f"{name}: {len(files)} files, {num_cluster} of them in cluster/")
        print("".join(f"  {file}\n" for file in files), end="")


if __name__ == "__main__":
    main()
