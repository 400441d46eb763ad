"""What Ray(...) refuses, and how it finds a cluster: without one."""

import socket
import sys
import threading
import time

import pytest

from envfleet.contract.errors import ClusterError, MissingExtra, UsageError
from envfleet.launchers.processes import how_it_ended
from envfleet.launchers.ray import session as ray_session
from envfleet.launchers.ray.actor import ActorCommand, WorkerActor, is_failure
from envfleet.launchers.ray.places import is_infeasible, shortage_words
from envfleet.launchers.ray.settings import Ray
from tests.launchers.ray.ray_lab import ray_settings
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"address": ""}, "host:port"),
        ({"address": "ray://head:10001"}, "ray job submit"),
        ({"cpus_per_worker": 0}, "cpus_per_worker=0"),
        ({"cpus_per_worker": float("nan")}, "more than 0"),
        ({"gpus_per_worker": -1}, "gpus_per_worker=-1"),
        ({"resources": {"CPU": 2}}, "give cpus_per_worker="),
        ({"resources": {"tpu": 0}}, "'tpu': 0"),
        ({"placement": "SCATTER"}, "STRICT_SPREAD"),
        ({"queue_timeout_s": 0}, "queue_timeout_s=0"),
    ],
)
def test_wrong_settings(settings, says):
    with pytest.raises(UsageError, match=says):
        Ray(**settings)


def test_what_is_infeasible():
    nodes = [{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert not is_infeasible({"CPU": 4}, nodes)
    assert not is_infeasible({"CPU": 2, "GPU": 1}, nodes)
    assert is_infeasible({"CPU": 4, "GPU": 1}, nodes)  # no node has both
    assert is_infeasible({"CPU": 1, "unicorn": 1}, nodes)
    assert is_infeasible({"CPU": 1}, [])


def test_what_is_said_of_a_shortage():
    words = shortage_words({"CPU": 8}, 3, "PACK", "PENDING", [{"CPU": 4.0}, {"CPU": 2.0}], {"CPU": 5.0}, True)
    assert "PENDING: 3 x (8 CPU) asked for, PACK" in words
    assert "2 nodes with 6 CPU in all, 4 CPU at most on one, and 5 CPU free" in words
    assert "never fits" in words


def test_ray_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"envfleet\[ray\]"):
        Ray().host_of_workers()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with ray_settings(), pytest.raises(ClusterError, match=rf"the cluster at {address} cannot be reached.*refused"):
        Ray(address=address).host_of_workers()


@pytest.mark.parametrize(("answer", "says"), [(b"HTTP/1.1 400 Bad\r\n\r\n", "is not Ray"), (None, "timed out")])
def test_what_listens_is_not_ray(monkeypatch, answer, says):
    monkeypatch.setattr(ray_session, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_over = threading.Event()

        def serve():
            connection, _ = server.accept()
            with connection:
                if answer is not None:
                    connection.sendall(answer)
                is_over.wait(20)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with ray_settings(), pytest.raises(ClusterError, match=says):
                Ray(address=f"127.0.0.1:{server.getsockname()[1]}").host_of_workers()
        finally:
            is_over.set()
            thread.join()


def test_what_takes_too_long_is_undone():
    may_return, undone = threading.Event(), []

    def call():
        may_return.wait(20)
        return "a place"

    with pytest.raises(ClusterError, match=r"Ray has not answered a call within 0\.01 s"):
        ray_session.in_time(call, "a call", 0.01, undone.append)
    may_return.set()
    wait_until(lambda: undone == ["a place"], "it is undone")
    assert ray_session.in_time(call, "a call", 20.0, undone.append) == "a place"
    with pytest.raises(ZeroDivisionError):
        ray_session.in_time(lambda: 1 / 0, "a call", 20.0)
    assert undone == ["a place"]


def test_what_is_shown_of_a_command_has_no_keys(tmp_path):
    command = ActorCommand(None, ("-m", "w"), {"ENVFLEET_KEYS": "secret"}, None, "worker.log")
    assert "secret" not in repr(command) and "'-m', 'w'" in repr(command)


def test_how_a_process_has_ended():
    assert not any(map(is_failure, (0, 3, 4, 5)))
    assert is_failure(1) and is_failure(-9)
    assert how_it_ended(2) == "its process ended with exit code 2"
    assert how_it_ended(-9) == "its process was killed by SIGKILL"
    assert how_it_ended(-99) == "its process was killed by signal 99"


def actor_of(code, tmp_path, **environment):
    """An actor without Ray, whose worker runs this code."""
    return WorkerActor(ActorCommand(sys.executable, ("-c", code), environment, ("/somewhere",), "worker.log"))


def test_an_actor_ends_a_worker_that_does_not_leave(tmp_path):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(100)"
    actor = actor_of(code, tmp_path)
    deadline_s = time.monotonic() + 20
    while "deaf" not in actor.log(100):
        assert time.monotonic() < deadline_s
    actor.end(0.1)
    assert actor.until_end()[1] == -9


def test_what_a_worker_is_given(tmp_path):
    code = "import os, sys; print(os.environ['PYTHONPATH'], os.environ['ANY'], sys.argv[1:], sys.stdin.read() == '')"
    actor = actor_of(code, tmp_path, ANY="thing")
    actor._process.stdin.close()
    assert actor.until_end()[1] == 0
    assert actor.log(100).split() == ["/somewhere", "thing", "['--ends-with-stdin']", "True"]
