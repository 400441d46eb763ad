"""What Slurm is asked to run: sbatch scripts as text, and the arguments of sbatch and srun. Pure."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from envfleet.contract.exits import LearnerExit, WorkerExit
from envfleet.contract.worker_environment import cpu_counts
from envfleet.launchers.launcher import WorkerJob

if TYPE_CHECKING:
    from envfleet.launchers.slurm.settings import Slurm

# Slurm signals a job this long before its time limit: a worker finishes its rollout and leaves, a learner saves.
SIGNAL_LEAD_S = 60
# How long a script whose worker was told to leave waits for Slurm to end the job. It must be more than Slurm's KillWait
# (30 s by default), and less than the 60 s after which the head asks for another worker: if it was not Slurm that told
# the worker to leave, the script starts it again.
REQUEUE_WAIT_S = 40
PASS_WAIT_S = 5  # how long a learner's script waits whether the learner ends on SIGTERM before it passes it on
NO_LIMIT = ("UNLIMITED", "INFINITE")  # in upper or lower case

# -- the array of workers --


def sbatch_script(
    settings: Slurm, job: WorkerJob, workers: Iterable[int] | None = None, *, name: str | None = None
) -> str:
    """Return the script of a job array; element N of the array is worker N.

    The run's keys are not in the script: `job.environment` must be in the environment of sbatch.

    Args:
        settings: The user's settings.
        job: What to start.
        workers: The workers to start. None: all of them.
        name: The name of the run. None: the job_name of the settings.
    """
    numbers = range(job.num_workers) if workers is None else workers
    name = settings.job_name if name is None else name
    parts = [
        "#!/bin/bash",
        *(f"#SBATCH {_directive(option)}" for option in sbatch_options(settings, numbers, name)),
        "",
        "# Element N of this array is worker N of an EnvFleet run. The keys of the run are in the job's environment.",
        *_exports(settings),
        *_setup(settings),
        _LOOP.format(
            command=shlex.join((settings.interpreter, *job.argv)),
            done=int(WorkerExit.DONE),
            head_gone=int(WorkerExit.HEAD_GONE),
            out_of_time=int(WorkerExit.OUT_OF_TIME),
            told_to_leave=int(WorkerExit.TOLD_TO_LEAVE),
            requeue_wait_s=REQUEUE_WAIT_S,
        ),
    ]
    return "\n".join(parts)


def sbatch_options(settings: Slurm, workers: Iterable[int], name: str) -> list[str]:
    """Return the options of sbatch for an array of workers."""
    log_dir = str(settings.log_dir_of(name)).replace("%", "%%")
    return [
        f"--job-name={name}",
        f"--array={array_of(workers)}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={settings.cpus_per_worker}",
        *given_options(
            ("mem", settings.mem_per_worker), ("gres", f"gpu:{gpus}" if (gpus := _gpus(settings)) else None)
        ),
        *_place(settings),
        f"--output={log_dir}/worker-%a.log",
        "--open-mode=append",
        "--export=ALL",
        "--requeue",
        _signal(settings),
        *_extras(settings),
    ]


def sbatch_arguments(settings: Slurm, workers: Sequence[int], name: str) -> list[str]:
    """Return the sbatch command, which reads the script from its standard input.

    It repeats all options of the script: variables such as SBATCH_EXPORT override the script, but not the command line.
    """
    return ["sbatch", "--parsable", *sbatch_options(settings, workers, name)]


def job_id_of(answer: str) -> str:
    """Return the job id in what `sbatch --parsable` has printed: "12" or "12;cluster".

    Raises:
        ValueError: There is no job id in it.
    """
    last_line = answer.strip().rpartition("\n")[2]
    job_id = last_line.partition(";")[0].strip()
    if not job_id.isdecimal():
        raise ValueError(f"expected a job id from sbatch --parsable; it printed {answer!r}")
    return job_id


def array_of(workers: Iterable[int]) -> str:
    """Write numbers as Slurm does: [0, 1, 2, 5] is "0-2,5"."""
    runs: list[list[int]] = []
    for worker in sorted(set(workers)):
        if runs and runs[-1][-1] == worker - 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


# The script restarts a crashed worker itself: the job keeps its place, and the worker need not wait in the queue again.
_LOOP = """
say() {{ echo "$(date '+%F %T') envfleet.slurm worker $SLURM_ARRAY_TASK_ID: $*" >&2; }}

# TERM: preempted, or cancelled by somebody. USR1: the time limit is near. USR2: the head wants no worker here any more.
told= over= child=
tell() {{ told=$1; if [ -n "$child" ]; then kill -s "$1" "$child" 2>/dev/null; fi; }}
trap 'tell TERM' TERM INT
trap 'tell USR1' USR1
trap 'over=yes; tell TERM' USR2

run_worker() {{  # sets code
  {command} --worker "$SLURM_ARRAY_TASK_ID" </dev/null &
  child=$!
  if [ -n "$told" ]; then kill -s "$told" "$child" 2>/dev/null; fi
  wait "$child"; code=$?
  while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done  # a signal ends a wait, too
  wait "$child" 2>/dev/null; again=$?
  if [ "$again" != 127 ]; then code=$again; fi
  child=
}}

pause() {{  # seconds; a signal ends it
  sleep "$1" & nap=$!
  wait "$nap"; kill "$nap" 2>/dev/null
}}

num_crashes=0
while [ -z "$over" ]; do
  started=$SECONDS
  run_worker
  case $code in {done} | {head_gone} | {out_of_time}) exit 0 ;; esac
  if [ -n "$over" ] || [ "$told" = USR1 ]; then exit 0; fi
  if [ "$code" = {told_to_leave} ] || [ "$told" = TERM ]; then
    # A job whose script ends by itself is completed, and would not be requeued: wait to be killed.
    say "it was told to leave; Slurm will end this job, or run it again later"
    until_s=$((SECONDS + {requeue_wait_s}))
    while [ -z "$over" ] && [ "$SECONDS" -lt "$until_s" ]; do pause $((until_s - SECONDS)); done
    told=
    continue
  fi
  if [ $((SECONDS - started)) -ge 20 ]; then num_crashes=0; fi
  num_crashes=$((num_crashes + 1))
  if [ "$num_crashes" -gt 3 ]; then
    say "it ended with code $code, and too often: given up"
    exit "$code"
  fi
  say "it ended with code $code; it is started again here"
  pause $((1 << (num_crashes - 1)))
done
exit 0
"""

# -- one job for head and workers --


def head_script(settings: Slurm, num_workers: int, command: Sequence[str]) -> str:
    """Return the script of one job for learner and workers: the learner starts its workers as steps of the job.

    The learner gets the same resources as a worker. Its launcher is `Slurm()`, which notices that it runs inside a job.
    Before the time limit the learner gets SIGUSR1. If it saves and exits with LearnerExit.STOPPED (see
    envfleet.StopSignal), the job is requeued, and its next start goes on from there.

    Args:
        settings: The user's settings.
        num_workers: The number of workers.
        command: The command line of the learner.
    """
    options = [
        f"--job-name={settings.job_name}",
        f"--ntasks={num_workers + 1}",
        f"--cpus-per-task={settings.cpus_per_worker}",
        *given_options(
            ("mem-per-cpu", _mem_per_cpu(settings.mem_per_worker, settings.cpus_per_worker)),
            ("gpus-per-task", _gpus(settings)),
        ),
        *_place(settings),
        "--no-kill",  # a node that fails ends its workers, not the whole job
        "--open-mode=append",
        "--requeue",
        _signal(settings),
        *_extras(settings),
    ]
    parts = [
        "#!/bin/bash",
        *(f"#SBATCH {_directive(option)}" for option in options),
        "",
        f"# A learner and its {num_workers} workers in one job: Slurm() starts them with srun.",
        *_exports(settings),
        *_setup(settings),
        _LEARNER.format(
            command=shlex.join(command),
            stopped=int(LearnerExit.STOPPED),
            pass_wait_s=PASS_WAIT_S,
            requeue_wait_s=REQUEUE_WAIT_S,
        ),
    ]
    return "\n".join(parts)


# USR1 ends a program that does not handle it, so it is passed on only to one that does: SigCgt in /proc is the set of
# handled signals, and USR1 is number 10. A learner that is still being imported gets it a little later.
_LEARNER = """
say() {{ echo "$(date '+%F %T') envfleet.slurm learner: $*" >&2; }}

# USR1: the time limit is near. TERM: preempted, or cancelled by somebody, or the time limit; usually Slurm tells the
# learner, too, so that it is passed on only if it still runs a while later.
told= to_pass= pass_s=0 is_said= child=
trap 'told=${{told:-TERM}}; to_pass=TERM; pass_s=$((SECONDS + {pass_wait_s}))' TERM INT
trap 'told=USR1; to_pass=USR1; pass_s=$SECONDS; pass' USR1
handles_usr1() {{
  local handled
  handled=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$child/status" 2>/dev/null)
  [ -n "$handled" ] && [ $((16#$handled & 0x200)) != 0 ]
}}
pass() {{
  if [ -z "$child" ] || [ "$SECONDS" -lt "$pass_s" ]; then return; fi
  if [ "$to_pass" = TERM ] || handles_usr1; then
    kill -s "$to_pass" "$child" 2>/dev/null
    to_pass=
  elif [ -z "$is_said" ] && [ "$SECONDS" -ge $((pass_s + {pass_wait_s})) ]; then
    is_said=yes
    say "the time limit is near; it does not handle SIGUSR1 (envfleet.StopSignal)"
  fi
}}
pause() {{  # seconds; a signal ends it
  sleep "$1" & nap=$!
  wait "$nap"; kill "$nap" 2>/dev/null
}}

{command} </dev/null &
child=$!
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do  # a signal ends a wait, too
  if [ -n "$to_pass" ]; then sleep 1; pass; else wait "$child"; code=$?; fi
done
wait "$child" 2>/dev/null; again=$?
case $again in 127 | -1) ;; *) code=$again ;; esac  # -1: bash 5.2, if the learner ended when a signal ended the wait
if [ "$code" != {stopped} ] || [ -z "$told" ]; then exit "$code"; fi

# It was told to stop, and has saved. A job that Slurm ends, but does not requeue, was cancelled, or its time is over.
job=" $(scontrol show job --oneliner "$SLURM_JOB_ID" 2>/dev/null) "
case $job in
  *" JobState=COMPLETING "*" Restarts=${{SLURM_RESTART_COUNT:-0}} "*)
    say "it has saved; Slurm ends this job: submit it again to go on"
    exit "$code" ;;
esac
until_s=$((SECONDS + {requeue_wait_s}))
if [ "$told" = USR1 ]; then
  say "it has saved; the job is requeued, and will go on from there"
  trap - TERM USR1
  if ! scontrol requeue "$SLURM_JOB_ID"; then
    say "the job was not requeued: submit it again to go on"
    exit "$code"
  fi
else
  say "it has saved; Slurm will end this job, or run it again later"
fi
# A job whose script ends by itself is completed, and would not be requeued: wait to be killed.
while [ "$SECONDS" -lt "$until_s" ]; do pause $((until_s - SECONDS)); done
exit "$code"
"""


def srun_arguments(settings: Slurm, job: WorkerJob, worker: int, name: str) -> list[str]:
    """Return the srun command that runs one worker as a step of the job that this process runs in."""
    command = [settings.interpreter, *job.arguments(worker)]
    if settings.setup:
        command = ["bash", "-c", "\n".join([*_setup(settings), f"exec {shlex.join(command)}"])]
    return [
        "srun",
        f"--job-name={step_name(name, worker)}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={settings.cpus_per_worker}",
        "--exact",  # by default a step takes all CPUs of its node
        # 0: the step shares the job's memory with the other steps, and reserves none.
        f"--mem={settings.mem_per_worker or 0}",
        *given_options(("gpus-per-task", _gpus(settings))),
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--input=none",
        "--export=ALL",
        *command,
    ]


def step_name(name: str, worker: int) -> str:
    """Return the name of a worker's step, by which squeue finds it."""
    return f"{name}-{worker}"


# -- used by both --


def _place(settings: Slurm) -> list[str]:
    place = given_options(
        ("time", settings.time_limit),
        ("partition", settings.partition),
        ("account", settings.account),
        ("qos", settings.qos),
        ("constraint", settings.constraint),
    )
    return [*place, "--exclusive"] if settings.exclusive else place


def given_options(*options: tuple[str, object]) -> list[str]:
    """Write options of a command as "--name=value"; those that are None are left out."""
    return [f"--{name}={value}" for name, value in options if value is not None]


def _extras(settings: Slurm) -> list[str]:
    extras = settings.extra_sbatch.items()
    return [f"--{name}" if value is None or value is True else f"--{name}={value}" for name, value in extras]


def _directive(option: str) -> str:
    """Quote an option for a #SBATCH line, which sbatch reads as a shell would."""
    name, equals, value = option.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else name


def _exports(settings: Slurm) -> list[str]:
    return [f"export {name}={value}" for name, value in cpu_counts(settings.cpus_per_worker).items()]


def _setup(settings: Slurm) -> list[str]:
    lines: list[str] = []
    for line in settings.setup:
        words = shlex.quote(f"envfleet.slurm: this line of setup failed: {line}")
        lines += [line, f"if [ $? != 0 ]; then echo {words} >&2; exit 1; fi"]
    return lines


def _gpus(settings: Slurm) -> str | None:
    gpus = str(settings.gpus_per_worker)
    return None if gpus.rpartition(":")[2].strip("0") == "" else gpus


def _mem_per_cpu(mem: str | int | None, num_cpus: int) -> str | None:
    if mem is None:
        return None
    match = re.fullmatch(r"(\d+)([KMGT]?)", str(mem))
    assert match is not None  # Slurm() has checked it
    kilobytes = int(match[1]) * 1024 ** "KMGT".index(match[2] or "M")
    return f"{-(-kilobytes // num_cpus)}K"


def _signal(settings: Slurm) -> str:
    """Have Slurm signal the job's script before the time limit: after 60 s or, of short limits, a fifth, by default."""
    seconds = math.inf if settings.time_limit is None else seconds_of(settings.time_limit)
    lead_s = SIGNAL_LEAD_S if seconds >= SIGNAL_LEAD_S * 5 else max(5, int(seconds) // 5)
    return f"--signal=B:USR1@{settings.signal_lead_s or lead_s}"


def seconds_of(time_limit: str) -> float:
    """Return the seconds of a time limit as Slurm writes it; infinity for "UNLIMITED" and "INFINITE".

    Args:
        time_limit: "minutes[:seconds]", "hours:minutes:seconds", "days-hours[:minutes[:seconds]]", or one of the words.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(time_limit, str) and time_limit.upper() in NO_LIMIT:
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit)
    if match is None:
        raise ValueError(
            f"expected 'minutes', 'hours:minutes:seconds', 'days-hours:minutes' or 'UNLIMITED'; got {time_limit!r}"
        )
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None or match[4] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    return first * 60 + second
