"""What is said to Slurm, as text: golden files, quoting, and the loop of a worker's script, run by bash."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envfleet import Timing
from envfleet.contract.errors import ClusterError, UsageError
from envfleet.launchers.launcher import WorkerJob, WorkerState
from envfleet.launchers.slurm import script as slurm_script
from envfleet.launchers.slurm.script import (
    array_of,
    head_script,
    job_id_of,
    sbatch_arguments,
    sbatch_script,
    seconds_of,
    srun_arguments,
)
from envfleet.launchers.slurm.settings import Slurm
from envfleet.launchers.slurm.status import Element, elements_of, steps_of
from tests.support.waiting import wait_until

GOLDEN = Path(__file__).parent / "golden"
PYTHON = {"python": "/opt/python/bin/python", "log_dir": "/home/me/logs"}
JOB = WorkerJob(
    num_workers=4,
    argv=("-m", "envfleet.cluster.worker", "--head", "tcp://HEAD:PORT", "--silence-s", "30"),
    environment={"ENVFLEET_KEYS": "secret"},
    run_dir=Path("/run/of/this"),
)
ALL = Slurm(
    partition="gpu,cpu",
    time_limit="1-12:00",
    cpus_per_worker=8,
    mem_per_worker="16G",
    gpus_per_worker="a100:2",
    account="lab-7",
    qos="high",
    constraint="[rack1|rack2]&ib",
    exclusive=True,
    setup=["module load cuda  # the newest", "export GREETING='it is'"],
    extra_sbatch={"exclude": "node7,node8", "comment": "the learner's; not mine", "nice": 100, "spread-job": None},
    **PYTHON,
)


def golden(name, text):
    file = GOLDEN / name
    if os.environ.get("ENVFLEET_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text(), f"{name} differs; ENVFLEET_WRITE_GOLDEN=1 writes it anew"
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "settings", "workers"),
    [
        ("plain.sh", Slurm(**PYTHON), None),
        ("one_worker_of_a_short_limit.sh", Slurm(time_limit="2", **PYTHON), [2]),
        ("all.sh", ALL, None),
        ("named.sh", Slurm(job_name="walker_2.1", **PYTHON), [0]),
    ],
)
def test_scripts(name, settings, workers):
    golden(name, sbatch_script(settings, JOB, workers))


def test_head_scripts():
    golden("head.sh", head_script(Slurm(cpus_per_worker=2, **PYTHON), 4, ["python", "train.py", "--name", "it's mine"]))
    golden("head_all.sh", head_script(ALL, 16, ["python", "train.py"]))
    assert "#SBATCH --job-name=walker\n" in head_script(Slurm(job_name="walker"), 4, ["python", "train.py"])


def test_secrets_are_nowhere():
    for text in (sbatch_script(ALL, JOB), *sbatch_arguments(ALL, [0], "x"), *srun_arguments(ALL, JOB, 0, "x")):
        assert "secret" not in text


def test_sbatch_has_all_options_of_the_script():
    """Those on its command line win over the user's SBATCH_ variables."""
    script = sbatch_script(ALL, JOB, [0, 1], name="run")
    directives = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in script.splitlines() if "#SBATCH" in line]
    assert sbatch_arguments(ALL, [0, 1], "run")[2:] == directives


def test_srun():
    arguments = srun_arguments(Slurm(cpus_per_worker=2, mem_per_worker="1G", **PYTHON), JOB, 3, "run")
    assert arguments[-3:] == ["30", "--worker", "3"]
    assert {"--cpus-per-task=2", "--exact", "--mem=1G", "--job-name=run-3"} <= set(arguments)
    arguments = srun_arguments(ALL, JOB, 3, "run")
    assert arguments[-3:-1] == ["bash", "-c"] and "module load cuda" in arguments[-1] and "--worker 3" in arguments[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"partition": "a; rm -rf"},
        {"partition": "--wrap=x"},
        {"partition": "a\nb"},
        {"account": "$(id)"},
        {"qos": ""},
        {"constraint": "a b"},
        {"job_name": "a\nb"},
        {"job_name": "a b"},
        {"job_name": "-a"},
        {"job_name": "a,b"},
        {"job_name": ""},
        {"job_name": None},
        {"job_name": "a" * 65},
        {"mem_per_worker": "much"},
        {"mem_per_worker": "4 G"},
        {"gpus_per_worker": -1},
        {"gpus_per_worker": "a100"},
        {"cpus_per_worker": 0},
        {"cpus_per_worker": 1.5},
        {"cpus_per_worker": True},
        {"time_limit": "an hour"},
        {"time_limit": 5},
        {"signal_lead_s": 0},
        {"signal_lead_s": 70_000},
        {"setup": "module load cuda"},
        {"setup": [5]},
        {"extra_sbatch": {"--exclude": "node7"}},
        {"extra_sbatch": {"Exclude": "node7"}},
        {"extra_sbatch": {"comment\n#SBATCH --wrap": "x"}},
        {"extra_sbatch": {"comment": "a\n#SBATCH --uid=0"}},
        {"extra_sbatch": {"array": "0-9"}},
        {"extra_sbatch": {"output": "x"}},
        {"log_dir": "a\nb"},
        {"queue_timeout_s": 0},
        {"allocation": "mine"},
    ],
    ids=str,
)
def test_refused_settings(settings):
    with pytest.raises(UsageError, match=re.escape(next(iter(settings)))):
        Slurm(**settings)


def test_settings_that_have_a_name_of_their_own():
    with pytest.raises(UsageError, match=r"Slurm\(time_limit=...\)"):
        Slurm(extra_sbatch={"time": "5"})
    with pytest.raises(UsageError, match=r"Slurm\(job_name=...\)"):
        Slurm(extra_sbatch={"job-name": "walker"})


def test_allocation_current_outside_of_a_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UsageError, match="SLURM_JOB_ID"):
        Slurm(allocation="current").launch(JOB)


def test_no_slurm_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="login node"):
        Slurm(log_dir=tmp_path).launch(JOB)
    assert Slurm().host_of_workers() is None


@pytest.mark.parametrize(
    ("time_limit", "seconds"),
    [("30", 1800), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("1-12:30", 131400), ("0-0:0:5", 5)],
)
def test_time_limits(time_limit, seconds):
    assert seconds_of(time_limit) == seconds


@pytest.mark.parametrize("time_limit", ["UNLIMITED", "infinite"])
def test_no_time_limit(time_limit):
    options = sbatch_arguments(Slurm(time_limit=time_limit), [0], "n")
    assert f"--time={time_limit}" in options and "--signal=B:USR1@60" in options


def test_how_long_before_the_limit():
    for settings, lead_s in (({}, 60), ({"time_limit": "2"}, 24), ({"time_limit": "9", "signal_lead_s": 300}, 300)):
        settings = Slurm(**settings)
        assert f"--signal=B:USR1@{lead_s}" in sbatch_arguments(settings, [0], "n")
        assert f"#SBATCH --signal=B:USR1@{lead_s}\n" in head_script(settings, 1, ["true"])


def test_arrays():
    assert array_of(range(4)) == "0-3"
    assert array_of([7]) == "7"
    assert array_of([5, 1, 0, 2, 9, 8]) == "0-2,5,8-9"


def test_job_ids():
    assert job_id_of("12\n") == "12"
    assert job_id_of("a warning of a plugin\n12;cluster\n") == "12"
    with pytest.raises(ValueError, match="printed"):
        job_id_of("")


# -- the queue --


def test_lines_of_squeue():
    elements = elements_of("12_0|RUNNING|node1|None\n12_[2-3,7%2]|PENDING||Resources\nslurm_load_jobs error: no\n\n")
    assert list(elements) == ["12_0", "12_2", "12_3", "12_7"]
    assert elements["12_0"] == Element("12_0", "RUNNING", "node1", "None")
    assert str(elements["12_0"]) == "Slurm job 12_0 on node1: RUNNING"
    assert str(elements["12_3"]) == "Slurm job 12_3: PENDING (Resources)"


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("PENDING", "Resources", WorkerState.PENDING),
        ("PENDING", "Priority", WorkerState.PENDING),
        ("PENDING", "AssocMaxJobsLimit", WorkerState.PENDING),
        ("PENDING", "QOSMaxJobsPerUserLimit", WorkerState.PENDING),
        ("PENDING", "BeginTime", WorkerState.PENDING),
        ("PENDING", "JobHeldUser", WorkerState.PENDING),
        ("PENDING", "PartitionDown", WorkerState.PENDING),
        ("PENDING", "PartitionTimeLimit", WorkerState.REFUSED),
        ("PENDING", "BadConstraints", WorkerState.REFUSED),
        ("PENDING", "InvalidQOS", WorkerState.REFUSED),
        ("PENDING", "QOSMaxCpuPerJobLimit", WorkerState.REFUSED),
        ("PENDING", "AssocMaxWallDurationPerJobLimit", WorkerState.REFUSED),
        ("PENDING", "launch failed requeued held", WorkerState.ENDED),
        ("CONFIGURING", "None", WorkerState.PENDING),
        ("SUSPENDED", "None", WorkerState.PENDING),
        ("RUNNING", "None", WorkerState.RUNNING),
        ("COMPLETING", "None", WorkerState.RUNNING),
        ("COMPLETED", "None", WorkerState.ENDED),
        ("NODE_FAIL", "NodeDown", WorkerState.ENDED),
        ("TIMEOUT", "TimeLimit", WorkerState.ENDED),
        ("CANCELLED", "None", WorkerState.ENDED),
    ],
)
def test_states(state, reason, expected):
    assert Element("1_0", state, "", reason).worker_state is expected


def test_held_jobs_can_be_let_go():
    assert "scontrol release 1_0" in str(Element("1_0", "PENDING", "", "JobHeldUser"))


def test_lines_of_squeue_about_steps():
    assert steps_of("12.0|envfleet-1-0\n12.batch|batch\nsqueue: error\n") == {
        "envfleet-1-0": "12.0",
        "batch": "12.batch",
    }


# -- the loop of a worker's script --

WORKER = """
import os, pathlib, signal, sys, time
starts = pathlib.Path("starts")
with starts.open("a") as file:
    file.write(f"{os.getpid()} {sys.argv[-1]}\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
pathlib.Path("ready").touch()
while not pathlib.Path("exit").exists():
    time.sleep(0.01)
code = int(pathlib.Path("exit").read_text())
pathlib.Path("exit").unlink()
sys.exit(code)
"""


class Script:
    """A worker's script under bash, with a worker that does as it is told."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "worker.py").write_text(WORKER)
        job = WorkerJob(num_workers=8, argv=("worker.py",), environment={}, run_dir=folder)
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", sbatch_script(Slurm(python=sys.executable, log_dir=folder), job)],
                cwd=folder,
                env={**os.environ, "SLURM_ARRAY_TASK_ID": "7"},
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self):
        self.wait_for_start(1)
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_for_start(self, number):
        wait_until(lambda: (self.folder / "ready").exists() and len(self.pids()) == number, f"start {number}")
        (self.folder / "ready").unlink()

    def pids(self):
        file = self.folder / "starts"
        lines = file.read_text().splitlines() if file.exists() else []
        assert all(line.endswith(" 7") for line in lines)
        return [int(line.split()[0]) for line in lines]

    def tell(self, code):
        (self.folder / "exit.new").write_text(str(code))
        (self.folder / "exit.new").rename(self.folder / "exit")

    def log(self):
        return (self.folder / "log").read_text()


@pytest.fixture
def script(tmp_path):
    with Script(tmp_path) as script:
        yield script


@pytest.mark.parametrize("code", [0, 3, 5])
def test_a_worker_that_is_done(script, code):
    script.tell(code)
    assert script.process.wait(10) == 0


def test_a_worker_that_is_killed_starts_again_in_place(script):
    os.kill(script.pids()[0], signal.SIGKILL)
    script.wait_for_start(2)
    script.tell(1)
    script.wait_for_start(3)
    assert "ended with code 137; it is started again here" in script.log()
    script.tell(0)
    assert script.process.wait(10) == 0


def test_before_the_time_limit(script):
    script.process.send_signal(signal.SIGUSR1)
    assert script.process.wait(10) == 0
    assert len(script.pids()) == 1


def test_preempted(script):
    """The worker leaves; the script waits for Slurm, which would take the job for completed otherwise."""
    os.killpg(script.process.pid, signal.SIGTERM)  # as Slurm does: the whole group
    wait_until(lambda: "told to leave" in script.log(), "the worker has left")
    os.killpg(script.process.pid, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        script.process.wait(1.0)
    assert len(script.pids()) == 1


def test_told_to_leave_but_not_by_slurm(tmp_path, monkeypatch):
    """Somebody has ended the worker, and Slurm does not end the job: it is back before the head asks for another."""
    assert Timing().join_timeout_s > slurm_script.REQUEUE_WAIT_S
    monkeypatch.setattr(slurm_script, "REQUEUE_WAIT_S", 1)
    with Script(tmp_path) as script:
        os.kill(script.pids()[0], signal.SIGTERM)
        script.wait_for_start(2)
        script.tell(0)
        assert script.process.wait(10) == 0


def test_the_head_ends_it(script):
    script.process.send_signal(signal.SIGUSR2)
    assert script.process.wait(10) == 0
    assert len(script.pids()) == 1


def test_the_head_ends_it_after_slurm_has_told_it_to_leave(script):
    script.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "told to leave" in script.log(), "the worker has left")
    script.process.send_signal(signal.SIGUSR2)
    assert script.process.wait(10) == 0


def test_the_head_ends_it_between_two_starts(script):
    script.tell(1)
    wait_until(lambda: "started again here" in script.log(), "the worker has crashed")
    script.process.send_signal(signal.SIGUSR2)
    assert script.process.wait(10) == 0


def test_a_worker_that_keeps_crashing_is_given_up(tmp_path):
    """With a `sleep` that does not: the waits between the starts grow."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sleep").write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/sleeps\n")
    (tmp_path / "bin" / "sleep").chmod(0o755)
    job = WorkerJob(num_workers=1, argv=("-c", "raise SystemExit(9)"), environment={}, run_dir=tmp_path)
    done = subprocess.run(
        ["bash", "-c", sbatch_script(Slurm(python=sys.executable, log_dir=tmp_path), job)],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "0", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 9
    assert (tmp_path / "sleeps").read_text().split() == ["1", "2", "4"]
    assert "too often: given up" in done.stderr


def test_a_line_of_setup_that_fails(tmp_path):
    settings = Slurm(python=sys.executable, log_dir=tmp_path, setup=["true", "module load nothing 2>/dev/null # x"])
    done = subprocess.run(
        ["bash", "-c", sbatch_script(settings, JOB)],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "0"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "this line of setup failed: module load nothing" in done.stderr


# -- the script of a learner --

LEARNER = """
import pathlib, signal, sys, time
codes = dict(pair.split("=") for pair in sys.argv[1:])
for name in set(codes) & {"SIGUSR1", "SIGTERM"}:
    signal.signal(getattr(signal, name), lambda *_, code=int(codes[name]): sys.exit(code))
pathlib.Path("ready").touch()
while not pathlib.Path("exit").exists():
    time.sleep(0.01)
sys.exit(int(codes["exit"]))
"""
# What the script asks Slurm, on a machine without one; tests/launchers/slurm/test_slurm_requeue.py asks the real one.
SCONTROL = """#!/bin/sh
echo "$@" >> asked
if [ "$1" = show ]; then
  if [ -e ended ]; then state=COMPLETING; else state=RUNNING; fi
  echo "JobId=12 JobState=$state Reason=None Requeue=1 Restarts=$(cat restarts) BatchFlag=1"
elif [ -e no_requeue ]; then
  exit 1
fi
"""


class LearnerScript:
    """The script under bash, with a learner that leaves with the code for what came."""

    def __init__(self, folder, **codes):
        self.folder = folder
        (folder / "learner.py").write_text(LEARNER)
        (folder / "scontrol").write_text(SCONTROL)
        (folder / "scontrol").chmod(0o755)
        (folder / "restarts").write_text("2")
        command = [sys.executable, "learner.py", *(f"{name}={code}" for name, code in codes.items())]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", head_script(Slurm(), 2, command)],
                cwd=folder,
                env={
                    **os.environ,
                    "SLURM_JOB_ID": "12",
                    "SLURM_RESTART_COUNT": "2",
                    "PATH": f"{folder}:{os.environ['PATH']}",
                },
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self):
        wait_until(lambda: (self.folder / "ready").exists(), "the learner has begun")
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self):
        return (self.folder / "log").read_text()

    def requeues(self):
        asked = self.folder / "asked"
        return asked.read_text().count("requeue 12") if asked.exists() else 0


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_learner_that_ends_by_itself_is_not_requeued(tmp_path, code):
    with LearnerScript(tmp_path, exit=code) as script:
        (tmp_path / "exit").touch()
        assert script.process.wait(10) == code
        assert script.requeues() == 0


def test_a_learner_that_has_saved_before_the_limit_is_requeued(tmp_path):
    with LearnerScript(tmp_path, SIGUSR1=75) as script:
        script.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: script.requeues() == 1, "the job is requeued")
        with pytest.raises(subprocess.TimeoutExpired):
            script.process.wait(0.5)  # until Slurm ends it
        os.killpg(script.process.pid, signal.SIGTERM)
        script.process.wait(10)
        assert "it has saved; the job is requeued" in script.log()


@pytest.mark.parametrize("code", [0, 1, 138])
def test_a_learner_that_saves_nothing_is_not_requeued(tmp_path, code):
    """Or it would begin at the same place again, for ever. Nor is one that has just finished."""
    with LearnerScript(tmp_path, SIGUSR1=code) as script:
        script.process.send_signal(signal.SIGUSR1)
        assert script.process.wait(10) == code
        assert script.requeues() == 0


def test_a_learner_that_does_not_know_usr1_is_left_alone(tmp_path, monkeypatch):
    """It would end it. Until the limit it may still finish."""
    monkeypatch.setattr(slurm_script, "PASS_WAIT_S", 1)
    with LearnerScript(tmp_path, exit=0) as script:
        script.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "does not handle SIGUSR1" in script.log(), "it is said")
        (tmp_path / "exit").touch()
        assert script.process.wait(10) == 0


def test_a_requeue_that_slurm_refuses(tmp_path):
    (tmp_path / "no_requeue").touch()
    with LearnerScript(tmp_path, SIGUSR1=75) as script:
        script.process.send_signal(signal.SIGUSR1)
        assert script.process.wait(10) == 75
        assert "was not requeued: submit it again" in script.log()


def test_a_preempted_learner_waits_for_slurm(tmp_path):
    with LearnerScript(tmp_path, SIGTERM=75) as script:
        (tmp_path / "ended").touch()
        (tmp_path / "restarts").write_text("3")
        os.killpg(script.process.pid, signal.SIGTERM)  # as Slurm does: the whole group
        wait_until(lambda: "Slurm will end this job" in script.log(), "the learner has left")
        os.killpg(script.process.pid, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            script.process.wait(0.5)
        assert script.requeues() == 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_cancelled_learner_stays_so(tmp_path, name):
    """Also if it was saving already, because its time limit was near."""
    with LearnerScript(tmp_path, **{name: 75}) as script:
        (tmp_path / "ended").touch()
        script.process.send_signal(signal.SIGUSR1) if name == "SIGUSR1" else os.killpg(
            script.process.pid, signal.SIGTERM
        )
        assert script.process.wait(10) == 75
        assert script.requeues() == 0
        assert "submit it again to go on" in script.log()


@pytest.mark.parametrize("to_all", [True, False], ids=["from Slurm", "to the script only"])
def test_a_learner_that_ends_on_sigterm(tmp_path, monkeypatch, to_all):
    """It gets it once: from Slurm or, if only the script was told, from there."""
    monkeypatch.setattr(slurm_script, "PASS_WAIT_S", 1)
    with LearnerScript(tmp_path, SIGTERM=143) as script:
        if to_all:
            os.killpg(script.process.pid, signal.SIGTERM)
        else:
            script.process.send_signal(signal.SIGTERM)
        assert script.process.wait(10) == 143
        assert script.requeues() == 0


def test_a_learner_that_is_killed_by_the_signal_that_its_script_gets(tmp_path):
    with LearnerScript(tmp_path) as script:
        os.killpg(script.process.pid, signal.SIGTERM)
        assert script.process.wait(10) == 143
