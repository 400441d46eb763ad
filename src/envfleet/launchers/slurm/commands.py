"""Run Slurm's programs. Each has a deadline; what a failing one prints is in the error."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence

from envfleet.contract.errors import ClusterError

ANSWER_S = 10.0  # the most that a question to the controller may take


def run_slurm(
    arguments: Sequence[str], *, timeout_s: float, text: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """Run a program of Slurm and return what it has printed.

    Args:
        arguments: The program and its arguments.
        timeout_s: The most seconds that it may take.
        text: Its standard input.
        environment: Its whole environment. None: that of this process.

    Raises:
        ClusterError: The program is missing, fails, or takes too long.
    """
    try:
        done = subprocess.run(
            arguments,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=timeout_s,
            check=False,
            start_new_session=True,  # Ctrl-C is for the head, which ends its jobs in order
        )
    except OSError as error:
        raise _missing(arguments[0], error) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"Slurm has not answered {arguments[0]} within {timeout_s:g} s: is slurmctld running?"
        ) from error
    if done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ClusterError(f"{arguments[0]} failed: {words}")
    return done.stdout


def leave_to_slurm(commands: Iterable[Sequence[str]]) -> None:
    """Start a shell that runs programs of Slurm one after the other, and do not wait: it outlives this process."""
    lines = "; ".join(map(shlex.join, commands))
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["sh", "-c", f"{{ {lines}; }} </dev/null >/dev/null 2>&1 &"], timeout=ANSWER_S, start_new_session=True
        )


def _missing(program: str, error: OSError) -> ClusterError:
    return ClusterError(
        f"Slurm's {program} cannot be run on this machine ({error}): run this on a login node, or install Slurm's "
        f"client programs here (Debian: slurm-client)"
    )


def environment_outside_jobs() -> dict[str, str]:
    """Return the environment of this process without the variables of the Slurm job that it may run in."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}


_OF_A_JOB = (
    *(f"SLURM_{name}" for name in ("ARRAY_", "CPU", "DISTRIBUTION", "EXPORT", "GPU", "GTIDS", "JOB", "LAUNCH_NODE")),
    *(f"SLURM_{name}" for name in ("LOCALID", "MEM_", "NNODES", "NODE", "NPROCS", "NTASKS", "OPEN_MODE", "PRIO")),
    *(f"SLURM_{name}" for name in ("PROCID", "RESTART", "SRUN", "STEP", "SUBMIT", "TASK", "THREADS", "TOPOLOGY")),
    "SLURMD_",
)
