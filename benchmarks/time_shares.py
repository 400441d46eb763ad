"""Where does the time of a step go? Samples of `perf`, by library: the simulator's own share is the limit.

    python -m benchmarks.time_shares      about a minute; writes results/time_shares.md, and the README's table

Needs Linux's perf, and the right to use it.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.machine import version_of
from benchmarks.harness.results import RESULTS_DIR, update_pages

# (env, envs, the simulator's library)
ROWS = (
    ("Ant-v5", 1, "libmujoco"),
    ("Ant-v5", 64, "libmujoco"),
    ("HalfCheetah-v5", 64, "libmujoco"),
    ("Hopper-v5", 64, "libmujoco"),
    ("Humanoid-v5", 64, "libmujoco"),
    ("LunarLander-v3", 64, "libbox2d"),
    ("Pong-v5", 16, "_ale_py"),
)
PARTS = {
    "our C++": ("libenvfleet", "_native"),
    "libc, libm": ("libc.", "libm.", "libstdc++", "ld-linux"),
    "kernel": ("[",),
}  # what is in none of them is Python and NumPy
DURATION_S = 5.0


def shares(env_id: str, num_envs: int, simulator: str) -> dict[str, float]:
    """The share of each part in the samples of this process and its children, while they step."""
    import envfleet

    with envfleet.make(env_id, num_envs, seed=0) as envs, tempfile.TemporaryDirectory() as folder:
        envs.reset(seed=0)
        envs.action_space.seed(0)
        actions = [envs.action_space.sample() for _ in range(16)]
        for action in actions * 4:
            envs.step(action)
        data = Path(folder) / "perf.data"
        processes = ",".join(map(str, [os.getpid(), *_offspring(os.getpid())]))
        perf = subprocess.Popen(["perf", "record", "-q", "-F", "997", "-o", data, "-p", processes])
        try:
            end_s = time.monotonic() + DURATION_S
            while time.monotonic() < end_s:
                for action in actions:
                    envs.step(action)
        finally:
            perf.terminate()
            perf.wait(timeout=30)
        report = subprocess.run(
            ["perf", "report", "-i", data, "--sort", "dso", "--stdio", "-q"], capture_output=True, text=True, check=True
        )
    parts = {"simulator": (simulator,), **PARTS}
    found = dict.fromkeys([*parts, "Python, NumPy"], 0.0)
    for line in report.stdout.splitlines():
        if not line.strip():
            continue
        percent, library = line.split()[:2]
        part = next((part for part, names in parts.items() if library.startswith(names)), "Python, NumPy")
        found[part] += float(percent.rstrip("%"))
    return found


def _offspring(process: int) -> list[int]:
    """The children of a process, and theirs."""
    children = [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [each for child in children for each in (child, *_offspring(child))]


def main() -> None:
    """Measure all rows."""
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("envfleet", "mujoco", "ale-py"))
    date = datetime.datetime.now(datetime.UTC).date()
    lines = []
    for env_id, num_envs, simulator in ROWS:
        print(env_id, num_envs, file=sys.stderr)
        found = shares(env_id, num_envs, simulator)
        if not lines:
            lines = [
                f"{date}; {versions}. Share of the CPU time of all threads and processes, {DURATION_S:g} s of samples.",
                "",
                f"| env | envs | {' | '.join(found)} |",
                f"| --- | --- |{' --- |' * len(found)}",
            ]
        lines.append(f"| {env_id} | {num_envs} | {' | '.join(f'{share:.1f} %' for share in found.values())} |")
    text = "\n".join(lines) + "\n"
    (RESULTS_DIR / "time_shares.md").write_text(text)
    update_pages()
    print(text, end="")


if __name__ == "__main__":
    main()
