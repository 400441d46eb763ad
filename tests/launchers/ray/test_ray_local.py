"""From nothing to a running fleet: a cluster that is started for a run, and the commands of docs/ray.md."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from envfleet.launchers.ray.settings import Ray
from tests.launchers.ray.ray_lab import ray_settings, worker_processes
from tests.support.pages import commands_of, program_of
from tests.support.scripts import DOCS
from tests.support.waiting import descendants, is_running, wait_until

PAGE = DOCS / "ray.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language == "" for line in text.splitlines()]
BROUGHT_ALONG = """
import os

from gymnasium.envs.classic_control import CartPoleEnv

assert os.environ["OF_THE_LAB"] == "yes"
"""
MAKE = """
def make():
    import brought_along

    return brought_along.CartPoleEnv()


if __name__"""
BIN = Path(sys.executable).parent  # `python` and `ray` of the page


@pytest.fixture
def folder(tmp_path):
    """With fleet.py of the page, where Ray runs as in ray_settings(), and nothing of it is left in the end."""
    before = set(descendants(os.getpid()))
    with ray_settings():
        os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
        os.environ["PYTHONUNBUFFERED"] = "1"
        (tmp_path / "fleet.py").write_text(PROGRAMS[0])
        yield tmp_path
        started = set(descendants(os.getpid())) - before
        wait_until(lambda: not any(map(is_running, started)), "all that was started is gone", 30)


def run(command, folder):
    """Its output."""
    done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def ray_processes():
    """Of the folder of this test: those that an ended program has left behind have other parents."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if os.environ["RAY_TMPDIR"] in line and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


def test_the_page_has_the_commands_that_are_run_here():
    assert "python fleet.py" in COMMANDS
    assert [command for command in COMMANDS if command.startswith("ray start")] == [
        "ray start --head --port=6379 --block",
        "ray start --address=HEAD_ADDRESS:6379 --block",
    ]


@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_the_settings_of_the_page(program):
    names = {}
    exec(program, names)
    assert isinstance(names["launcher"], Ray)


def test_a_cluster_is_started_for_a_run_and_ended_with_it(folder):
    said = run("python fleet.py", folder)
    assert said.count("512 steps from 2 workers") == 3
    wait_until(lambda: ray_processes() == [], "Ray is gone", 30)


@pytest.mark.timeout(300)
def test_from_a_laptop_to_ray(folder):
    (folder / "train.py").write_text(program_of("laptop_to_cluster.md"))
    (command,) = commands_of("laptop_to_cluster.md", "On Ray")
    assert "0 to 4096 steps with ray" in run(command, folder)
    wait_until(lambda: ray_processes() == [], "Ray is gone", 30)


def test_several_machines(folder):
    """Both of them this one: the head, a node, and the program which finds them."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    with subprocess.Popen(
        ["ray", "start", "--head", f"--port={port}", "--block", "--num-cpus=0", "--include-dashboard=false"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as head:
        try:
            _wait_for_port(port)
            address = _current_address()
            with subprocess.Popen(
                ["ray", "start", f"--address={address}", "--block", "--num-cpus=1"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as node:
                try:
                    said = run("python fleet.py", folder)  # waits in the queue until the node is there
                    assert said.count("512 steps from 2 workers") == 3
                    assert "starting one on this machine" not in said
                    _run_until_killed(folder)
                    assert is_running(head.pid) and is_running(node.pid)
                finally:
                    _end(node)
        finally:
            _end(head)
    wait_until(lambda: ray_processes() == [], "Ray is gone", 30)


def test_a_folder_is_brought_to_the_nodes(folder):
    (folder / "code").mkdir()
    (folder / "code" / "brought_along.py").write_text(BROUGHT_ALONG)
    program = PROGRAMS[0].replace('"CartPole-v1"', "make").replace("if __name__", MAKE)
    brought = 'runtime_env={"working_dir": "code", "env_vars": {"OF_THE_LAB": "yes"}}'
    program = program.replace("cpus_per_worker=0.5", brought).replace("num_workers=2", "num_workers=1")
    (folder / "fleet.py").write_text(program)
    assert "256 steps from 1 workers" in run("python fleet.py", folder)


OWN_CONNECTION = """
    import ray
    from envfleet.contract.errors import WorkerLost

    with ClusterEnv("CartPole-v1", 1, 2, launcher=Ray(), backend="serial") as fleet:
        ray.shutdown()
        try:
            fleet.rollout(agent, 8)
        except WorkerLost as error:
            assert "ray.shutdown() was called" in str(error)
            print("it was told")
    assert not ray.is_initialized()  # nothing that was asked of Ray since has started another one
    ray.init(num_cpus=1, include_dashboard=False)
    with ClusterEnv("CartPole-v1", 1, 2, launcher=Ray(), backend="serial") as fleet:
        fleet.rollout(agent, 8)
    assert ray.is_initialized()
    ray.shutdown()
"""


def test_the_connection_of_the_program_itself(folder):
    """One that it has ended, and one that it has made: which is used, and left as it is."""
    main = PROGRAMS[0].index("    with ClusterEnv")
    (folder / "fleet.py").write_text(PROGRAMS[0][:main] + OWN_CONNECTION)
    assert "it was told" in run("python fleet.py", folder)


WITHOUT_CONTROL_STORE = """
    import os, signal, subprocess

    fleet = ClusterEnv("CartPole-v1", 1, 2, launcher=Ray(), backend="serial")
    fleet.rollout(agent, 8)
    found = subprocess.run(["pgrep", "-f", "/gcs_server .*" + os.environ["RAY_TMPDIR"]], capture_output=True, text=True)
    (pid,) = [int(pid) for pid in found.stdout.split()]
    os.kill(pid, signal.SIGKILL)
    fleet.close()  # Ray would wait, and end this process after 60 s
    print("closed")
"""


def test_the_control_store_is_gone(folder):
    """What was asked of it is not waited for: the run ends, and the program after it."""
    main = PROGRAMS[0].index("    with ClusterEnv")
    (folder / "fleet.py").write_text(PROGRAMS[0][:main] + WITHOUT_CONTROL_STORE)
    said = run("python fleet.py", folder)
    assert "closed" in said and "Ray has not answered remove_placement_group()" in said
    wait_until(lambda: ray_processes() == [], "Ray is gone", 30)


def _run_until_killed(folder):
    """The program dies without a word while its workers work."""
    ending = "            input()"
    (folder / "lasting.py").write_text(PROGRAMS[0].rstrip() + f"\n{ending}\n")
    with subprocess.Popen(
        ["python", "lasting.py"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as program:
        try:
            assert b"512 steps" in program.stdout.readline()
            assert len(_workers()) == 2
        finally:
            program.kill()
    wait_until(lambda: _workers() == [], "its workers are gone", 30)


def _workers():
    return [pid for pid in worker_processes() if is_running(pid)]


def _wait_for_port(port):
    def listens():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, "Ray's head listens", 60)
    wait_until(lambda: _current_address() != "", "Ray has said where it is", 30)


def _current_address():
    path = Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster")
    return path.read_text().strip() if path.exists() else ""


def _end(process):
    process.terminate()
    try:
        process.wait(20)
    finally:
        process.kill()
