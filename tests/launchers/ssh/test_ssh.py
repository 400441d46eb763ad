"""SSH: against a real sshd of the tests' own, which takes everything that real hosts do."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from envfleet import ClusterEnv, ClusterError, FunctionPolicy, UsageError, WorkerLost
from envfleet.launchers.launcher import WorkerJob, WorkerState, WorkerStatus
from envfleet.launchers.ssh import BEGUN, SSH, end_of, remote_script
from envfleet.testing import LAUNCHER_CHECKS, LauncherCase
from tests.launchers.ssh.sshd import running_sshd
from tests.support.waiting import is_running, wait_until

AGENT = FunctionPolicy(lambda obs: (obs[:, 0] > 0).astype(int))
QUICK = {"backend": "serial", "timing": {"timeout_s": 60.0}}


@pytest.mark.parametrize("check", LAUNCHER_CHECKS, ids=lambda check: check.__name__)
def test_conformance(sshd, check):
    check(LauncherCase(SSH(["node1", "node2"]), SSH(["stranger"]), "Permission denied"))


def pids(cluster):
    return [worker.pid for worker in cluster.stats().workers]


def wait_for_others(cluster, old):
    """Until other processes have the places of all workers."""
    wait_until(
        lambda: (
            all(worker.stage == "present" for worker in cluster.stats().workers) and not set(old) & set(pids(cluster))
        ),
        "all workers are others, and present",
        40.0,
    )


def sshs_of(pid):
    """The ssh processes that a head has started."""
    found = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(pid)], capture_output=True, text=True, timeout=20)
    return [int(line.split()[0]) for line in found.stdout.splitlines() if line.split()[1] == "ssh"]


# -- what is tied to what --


def test_workers_end_with_their_ssh_and_come_back(sshd):
    with ClusterEnv("CartPole-v1", 2, 1, launcher=SSH(["node1", "node2"]), **QUICK) as cluster:
        old = pids(cluster)
        sshs = sshs_of(os.getpid())
        assert len(sshs) == 2
        for ssh in sshs:
            os.kill(ssh, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, old)), "the workers have left")
        wait_for_others(cluster, old)
        # Whoever is first to tell: the ssh, or the worker.
        assert re.search(r"killed by SIGKILL|standard input was closed", cluster.stats().workers[0].problem)
        cluster.rollout(AGENT, 4)
        os.kill(pids(cluster)[0], signal.SIGKILL)
        wait_until(lambda: "killed" in cluster.stats().workers[0].problem, "the killed worker is missed")
        assert "on node1: its process was killed by SIGKILL" in cluster.stats().workers[0].problem


HEAD = """
    import time
    from envfleet import ClusterEnv
    from envfleet.launchers.ssh import SSH
    hosts = SSH(["node1", "node2"], log_dir={log_dir!r})
    with ClusterEnv("CartPole-v1", 2, 1, launcher=hosts, backend="serial") as cluster:
        print(*[worker.pid for worker in cluster.stats().workers], flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_workers_end_with_the_head(sshd, number, tmp_path):
    code = textwrap.dedent(HEAD).format(log_dir=str(tmp_path))
    with (tmp_path / "err").open("wb") as stderr:
        head = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        workers = [int(pid) for pid in head.stdout.readline().split()]
        assert len(workers) == 2 and all(map(is_running, workers)), (tmp_path / "err").read_text()
        sshs = sshs_of(head.pid)
        head.send_signal(number)
        wait_until(lambda: not any(map(is_running, (*workers, *sshs))), "workers and ssh have ended with the head")
        head.wait(20)
    finally:
        head.kill()
        head.wait()
        head.stdout.close()
    if number is signal.SIGKILL:  # the network would tell them too, after 5 s
        logs = [path.read_text() for path in tmp_path.glob("worker-*.log")]
        assert len(logs) == 2 and all("leaving: its standard input was closed" in log for log in logs)
    for folder in Path(os.environ["TMPDIR"]).glob("envfleet-*"):
        assert number is signal.SIGKILL  # then nobody was left to remove it
        shutil.rmtree(folder)


def test_a_host_fails_and_comes_back(tmp_path, monkeypatch):
    with running_sshd(tmp_path) as server:
        monkeypatch.setenv("PATH", f"{server.folder}/bin:{os.environ['PATH']}")
        with ClusterEnv("CartPole-v1", 2, 1, launcher=SSH(["node1"]), **QUICK) as cluster:
            old = pids(cluster)
            server.stop()
            wait_until(lambda: "refused" in cluster.stats().workers[0].problem, "ssh was tried again")
            problem = cluster.stats().workers[0].problem
            assert re.search(r"ssh has no connection to node1: ssh: connect to host .*: Connection refused", problem)
            server.start()
            wait_for_others(cluster, old)
            cluster.rollout(AGENT, 4)


# -- what users do wrong --


def end_of_worker(launcher, tmp_path):
    """With which status a worker ends that should not even begin."""
    argv = ("-m", "envfleet.cluster.worker", "--head", "tcp://127.0.0.1:9")
    job = launcher.launch(WorkerJob(num_workers=1, argv=argv, environment={"ENVFLEET_KEYS": "k"}, run_dir=tmp_path))
    try:
        wait_until(lambda: job.status(0).state is not WorkerState.RUNNING, "it has ended")
        return job.status(0)
    finally:
        job.cancel(0.0)


def test_the_key_is_not_accepted(sshd):
    """The caller gets to know it at once."""
    with pytest.raises(WorkerLost) as caught, ClusterEnv("CartPole-v1", 1, 1, launcher=SSH(["stranger"]), **QUICK):
        pass
    assert "ssh cannot use host stranger" in str(caught.value)
    assert "Permission denied (publickey)" in str(caught.value) and "ssh-copy-id" in str(caught.value)


def test_the_host_is_another(sshd, tmp_path):
    status = end_of_worker(SSH(["impostor"]), tmp_path)
    assert status.state is WorkerState.REFUSED
    assert "ssh cannot use host impostor: Host key verification failed" in status.detail


def test_nobody_listens_there(sshd, tmp_path):
    status = end_of_worker(SSH(["node1"], port=1), tmp_path)
    assert status.state is WorkerState.ENDED
    assert re.search(r"ssh has no connection to node1: .*Connection refused", status.detail)


def test_there_is_no_such_python(sshd):
    """It is tried some times; then the caller gets to know it."""
    launcher = SSH(["node1"], python="python9")
    with pytest.raises(WorkerLost) as caught, ClusterEnv("CartPole-v1", 1, 1, launcher=launcher, **QUICK):
        pass
    assert "node1 has no program 'python9'" in str(caught.value) and "see python= and setup=" in str(caught.value)


def test_envfleet_is_not_installed_there(sshd, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    status = end_of_worker(SSH(["node1"], python=str(tmp_path / "bare" / "bin" / "python")), tmp_path)
    assert status.state is WorkerState.ENDED and "on node1 EnvFleet is not installed" in status.detail


def test_setup_fails(sshd, tmp_path):
    status = end_of_worker(SSH(["node1"], setup=["cd no-such-project", "touch went-on"]), tmp_path)
    assert status == WorkerStatus(
        WorkerState.ENDED, "on node1: envfleet: this setup command failed: cd no-such-project"
    )
    assert not (sshd.home / "went-on").exists()


def test_an_unknown_host(sshd):
    with pytest.raises(ClusterError, match=r"no-such-host\.invalid"):
        ClusterEnv("CartPole-v1", 1, 1, launcher=SSH(["no-such-host.invalid"], ssh_options=["HostName=%h"]), **QUICK)


def test_options_that_ssh_does_not_know(sshd):
    with pytest.raises(ClusterError, match=r"(?is)node1.*proxyjumps"):
        SSH(["node1"], ssh_options=["ProxyJumps=gate"]).host_of_workers()


def test_no_ssh_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="openssh-client"):
        ClusterEnv("CartPole-v1", 1, 1, launcher=SSH(["node1"]), **QUICK)
    with pytest.raises(UsageError, match="openssh-client"):
        ClusterEnv("CartPole-v1", 1, 1, launcher=SSH(["node1"]), network={"address": "tcp://127.0.0.1:0"}, **QUICK)


@pytest.mark.parametrize(
    "settings",
    [
        {"hosts": []},
        {"hosts": "node1"},
        {"hosts": ["node1", ""]},
        {"hosts": ["-oProxyCommand=evil"]},
        {"hosts": ["node1 node2"]},
        {"hosts": [1]},
        {"port": 0},
        {"port": 65536},
        {"port": "22"},
        {"cpus_per_worker": 0},
        {"cpus_per_worker": 1.5},
        {"cpus_per_worker": True},
        {"setup": "cd project"},
        {"ssh_options": "ProxyJump=gate"},
        {"env": {"A B": "c"}},
        {"env": {"A": 1}},
        {"queue_timeout_s": 0},
    ],
    ids=str,
)
def test_wrong_settings(settings):
    with pytest.raises(UsageError, match=next(iter(settings)).rstrip("s")):
        SSH(**{"hosts": ["node1"], **settings})


# -- settings --


def test_settings_reach_ssh_and_the_worker(sshd, tmp_path):
    """Without ~/.ssh/config; the variables are read where the worker runs."""
    launcher = SSH(
        ["127.0.0.1"],
        port=sshd.port,
        identity_file=sshd.folder / "user_key",
        python="python",
        cpus_per_worker=1,
        setup=[". envfleet-venv/bin/activate", "cd ..", "FROM_SETUP=here; export FROM_SETUP"],
        env={"PLAIN": 'it\'s "$HOME" & more'},
        log_dir=tmp_path / "logs",
    )
    with ClusterEnv("CartPole-v1", 1, 2, launcher=launcher, backend="serial") as cluster:
        pid = pids(cluster)[0]
        process = Path(f"/proc/{pid}")
        entries = (line.partition("=") for line in (process / "environ").read_text().split("\0"))
        variables = {name: value for name, _, value in entries}
        line = (process / "cmdline").read_text().split("\0")
        assert (process / "cwd").readlink() == sshd.folder
        cluster.reset()
        cluster.step(cluster.action_space.sample())
        cluster.rollout(AGENT, 2)  # which is another thing to do than to step: the worker says so
        wait_until(
            lambda: "worker INFO" in (tmp_path / "logs" / "worker-0.log").read_text(), "the log comes through ssh"
        )
    assert line[0] == "python" and "--ends-with-stdin" in line
    assert variables["PLAIN"] == 'it\'s "$HOME" & more'
    assert variables["FROM_SETUP"] == "here"
    assert variables["VIRTUAL_ENV"]
    assert variables["ENVFLEET_NUM_CPUS"] == variables["OMP_NUM_THREADS"] == "1"


def test_workers_are_spread_over_the_hosts_in_turn():
    launcher = SSH(["a", "me@b"], user="you", port=22, ssh_options=["BatchMode=no"])
    assert [launcher.host_of(worker) for worker in range(3)] == ["a", "me@b", "a"]
    assert "you" in launcher.ssh_argv("a") and "you" not in launcher.ssh_argv("me@b")
    argv = launcher.ssh_argv("a")
    assert argv[-2:] == ("--", "a")
    assert argv.index("BatchMode=no") < argv.index("BatchMode=yes")  # the user's holds: ssh takes the first


def test_a_busy_host_is_asked_again(tmp_path, monkeypatch):
    """Its sshd takes one connection at a time: some of four workers are turned away at first."""
    with running_sshd(tmp_path, max_startups=1) as server:
        monkeypatch.setenv("PATH", f"{server.folder}/bin:{os.environ['PATH']}")
        launcher = SSH(["node1"], log_dir=tmp_path / "logs")
        with ClusterEnv("CartPole-v1", 4, 1, launcher=launcher, **QUICK) as cluster:
            assert sum(worker.num_restarts for worker in cluster.stats().workers) == 0
        assert "kex_exchange_identification" in "".join(path.read_text() for path in (tmp_path / "logs").iterdir())


def test_the_home_folder_of_the_host(tmp_path):
    job = WorkerJob(num_workers=1, argv=("-m", "w"), environment={}, run_dir=tmp_path)
    script = remote_script(SSH(["h"], python="~/my venv/bin/python"), job, 0)
    assert script.splitlines()[1] == "\"$HOME\"/'my venv/bin/python' -m w --worker 0 --ends-with-stdin"


@pytest.mark.parametrize("setting", ["hosts", "setup"])
def test_lists_of_the_caller_are_copied(setting):
    given = ["a"]
    launcher = SSH(**{"hosts": ["node1"], setting: given})
    given.append("b")
    assert getattr(launcher, setting) == ("a",)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["node1"], "127.0.0.1"),  # as the settings have it
        (["me@node1"], "127.0.0.1"),
        (["node1", "behind"], None),
        (["node1", "far"], "10.0.0.8"),  # where 127.0.0.1 is another machine
        (["behind"], None),  # there is no direct way
    ],
)
def test_host_of_workers(sshd, hosts, expected):
    assert SSH(hosts).host_of_workers() == expected


NAMES = {"here": "127.0.1.1", "127.0.0.1": "127.0.0.1", "far": "10.0.0.8"}


def resolve(name, *_, **__):
    """As a hosts file of Debian has it, where this machine's own name is a loopback address."""
    if name not in NAMES:
        raise socket.gaierror("Name or service not known")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (NAMES[name], 0))]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["here", "far"], "far"),
        (["nowhere", "here", "far"], "far"),
        (["here"], "here"),
        (["127.0.0.1", "here"], "127.0.0.1"),
        (["nowhere"], "nowhere"),  # whoever looks for the way there can say what is wrong
    ],
)
def test_the_own_name_is_no_way_for_others(monkeypatch, hosts, expected):
    if shutil.which("ssh") is None:
        pytest.skip("no ssh on this machine: apt-get install openssh-client")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert SSH(hosts, ssh_options=["HostName=%h"]).host_of_workers() == expected


# -- the script, and how its end is told --

NASTY = "a 'b' \"c\" $HOME `id` \\ \t*;&|<>#!"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_script_in_a_shell(shell, tmp_path):
    """Nothing is changed on the way: not by quoting, not by setup commands that read from their input."""
    code = "import os, sys; print([os.environ[n] for n in ('SECRET', 'PLAIN')], sys.argv[1:], sys.stdin.read())"
    job = WorkerJob(num_workers=1, argv=("-c", code, NASTY), environment={"SECRET": NASTY}, run_dir=tmp_path)
    launcher = SSH(["h"], python=sys.executable, env={"PLAIN": NASTY}, setup=["cat # takes all there is", "cd /"])
    script = remote_script(launcher, job, 3)
    done = subprocess.run(
        [shell, "-c", script], input=f"{NASTY}\nrest", capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout == f"{[NASTY, NASTY]} {[NASTY, '--worker', '3', '--ends-with-stdin']} rest\n"
    assert done.stderr == f"{BEGUN}\n"


def test_the_script_has_only_the_names_of_secrets(tmp_path):
    job = WorkerJob(num_workers=1, argv=("-m", "w"), environment={"KEYS": "secret"}, run_dir=tmp_path)
    assert remote_script(SSH(["h"], setup=["cd p"], cpus_per_worker=2, env={"A": "b c"}), job, 0) == textwrap.dedent(
        """\
        echo 'envfleet: ssh has come through' >&2
        IFS= read -r KEYS
        { cd p
        } </dev/null || { echo 'envfleet: this setup command failed: cd p' >&2; exit 78; }
        export ENVFLEET_NUM_CPUS=2
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
        export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-2}"
        export MKL_NUM_THREADS="${MKL_NUM_THREADS:-2}"
        export A='b c'
        export KEYS
        python3 -m w --worker 0 --ends-with-stdin
        exit $?"""
    )


@pytest.mark.parametrize(
    ("code", "log", "state", "says"),
    [
        (255, "me@h: Permission denied (publickey,password).", WorkerState.REFUSED, "Permission denied"),
        (255, "Received disconnect: 2: Too many authentication failures\nx", WorkerState.REFUSED, "identity_file="),
        (255, "ssh: Could not resolve hostname h: Name or service not known", WorkerState.REFUSED, "no host has"),
        (255, "ssh: Could not resolve hostname h: Temporary failure in name resolution", WorkerState.ENDED, "Temp"),
        (255, "Timeout, server h not responding.", WorkerState.ENDED, "ssh has no connection to h: Timeout"),
        (255, "", WorkerState.ENDED, "it has printed nothing"),
        (127, "sh: 1: exec: python3: not found", WorkerState.ENDED, "h has no program 'python3': sh: 1"),
        (1, "python3: No module named envfleet", WorkerState.ENDED, "EnvFleet is not installed"),
        (1, "ModuleNotFoundError: No module named 'ale_py'", WorkerState.ENDED, "on h: its process ended with"),
        (78, "envfleet: this setup command failed: x", WorkerState.ENDED, "on h: envfleet: this setup command failed"),
        (
            255,
            f"{BEGUN}\n12:01 INFO joined",
            WorkerState.ENDED,
            "on h: ssh lost the connection, or its process ended with exit code 255; its last line: 12:01 INFO joined",
        ),
        (255, f"hello {BEGUN}\nme@g: Permission denied (publickey).", WorkerState.ENDED, "its last line: me@g"),
        (255, f"{BEGUN}\nHost key verification failed.", WorkerState.ENDED, "its last line: Host key"),
        (255, f"{BEGUN}\nkex_exchange_identification: reset", WorkerState.ENDED, "its last line: kex_"),
        (255, f"{BEGUN}\nTimeout, server h not responding.", WorkerState.ENDED, "ssh lost the connection"),
        (255, "The motto here: no Permission denied (ever)", WorkerState.ENDED, "ssh has no connection"),
        (255, "Welcome. If your Host key verification failed, call us", WorkerState.ENDED, "ssh has no connection"),
        (255, "/h/config: line 3: Bad configuration option: x\n1 bad", WorkerState.REFUSED, "~/.ssh/config"),
        (
            255,
            "kex_exchange_identification: read: Connection reset by peer",
            WorkerState.PENDING,
            "no more connections",
        ),
        (
            255,
            "Warning: Identity file k not accessible: No such file.\nh: Permission denied (a).",
            WorkerState.REFUSED,
            "k not",
        ),
        (126, "sh: 1: exec: python3: Permission denied", WorkerState.ENDED, "h has no program 'python3'"),
        (137, "x", WorkerState.ENDED, "on h: its process was killed by SIGKILL"),
        (200, "x", WorkerState.ENDED, "on h: its process ended with exit code 200"),
        (3, "the head is gone", WorkerState.ENDED, "on h: its process ended with exit code 3"),
    ],
)
def test_how_the_end_is_told(code, log, state, says):
    ended = WorkerStatus(WorkerState.ENDED, f"its process ended with exit code {code}")
    told = end_of(ended, "h", log, "python3")
    assert told.state is state and says in told.detail
    assert told.is_unreachable == ("ssh has no connection" in told.detail)


def test_an_old_log_is_not_taken_for_a_new_one(sshd, tmp_path):
    """A folder for logs may have those of another run."""
    (tmp_path / "worker-0.log").write_text("me@h: Permission denied (publickey).\n")
    job = WorkerJob(num_workers=1, argv=("-c", "import os; os._exit(254 + 1)"), environment={}, run_dir=tmp_path)
    started = SSH(["node1"]).launch(job)
    wait_until(lambda: started.status(0).state is not WorkerState.RUNNING, "it has ended")
    words = "on node1: ssh lost the connection, or its process ended with exit code 255; it has printed nothing"
    assert started.status(0) == WorkerStatus(WorkerState.ENDED, words)
    started.cancel(0.0)


def test_what_a_worker_says_is_not_taken_for_words_of_ssh(sshd, tmp_path):
    """Its environment may use ssh, too; and be chatty."""
    code = "print('x' * 30000); print('git@h: Permission denied (publickey).', flush=True); raise SystemExit(255)"
    job = WorkerJob(num_workers=1, argv=("-c", code), environment={}, run_dir=tmp_path)
    started = SSH(["node1"]).launch(job)
    wait_until(lambda: started.status(0).state is not WorkerState.RUNNING, "it has ended")
    assert started.status(0).state is WorkerState.ENDED
    assert started.status(0).detail.endswith("its last line: git@h: Permission denied (publickey).")
    started.cancel(0.0)
