"""What the answers of a Ray actor mean for its worker. Without Ray: the actor is a stand-in."""

from types import SimpleNamespace

import pytest

from envfleet.launchers.launcher import WorkerState, WorkerStatus
from envfleet.launchers.ray.actor import Begun
from envfleet.launchers.ray.places import Shortage
from envfleet.launchers.ray.status import ASK_AGAIN_S, ActorRecord

NODE = "n1 (Ray node 0123abcd)"


def begun(incarnation):
    return Begun(incarnation, "0123abcd4567", "n1", "/logs/worker-0.log", 77)


@pytest.fixture
def record():
    actor = SimpleNamespace(
        begun=SimpleNamespace(remote=lambda: "begun()"), until_end=SimpleNamespace(remote=lambda: "until_end()")
    )
    return ActorRecord(None, 0, actor, "begun()", WorkerStatus(WorkerState.PENDING, "asked"))


def test_it_runs(record):
    record.take_begun(begun("a"), 0.0)
    assert record.status == WorkerStatus(WorkerState.RUNNING, f"Ray actor on {NODE}, process 77")
    assert record.question == "until_end()"


def test_it_fails_and_ray_starts_it_again(record):
    record.take_begun(begun("a"), 0.0)
    record.take_end("a", -9, 10.0)
    said = f"Ray starts it again: its process was killed by SIGKILL on {NODE}"
    assert record.status == WorkerStatus(WorkerState.PENDING, said) and record.question is None
    record.ask_if_due(10.0)
    assert record.question is None
    record.ask_if_due(10.0 + ASK_AGAIN_S)
    assert record.question == "begun()"
    record.take_begun(begun("a"), 11.0)  # the failed one still answers
    assert record.status.state is WorkerState.PENDING and record.question is None
    record.take_begun(begun("b"), 12.0)
    assert record.status == WorkerStatus(WorkerState.RUNNING, f"Ray actor on {NODE}, process 77; before: {said}", 1)


def test_it_leaves(record):
    record.take_begun(begun("a"), 0.0)
    record.take_end("a", 0, 1.0)
    assert record.status == WorkerStatus(WorkerState.ENDED, f"its process ended with exit code 0 on {NODE}")
    assert record.question is None and record.ask_again_s is None


def test_a_connection_that_was_lost_is_no_failure(record):
    record.take_begun(begun("a"), 0.0)
    record.take_unavailable("no route", 5.0)
    assert record.status == WorkerStatus(WorkerState.PENDING, "Ray starts it again: no route")
    record.take_begun(begun("a"), 6.0)
    assert record.status.state is WorkerState.RUNNING and record.status.num_failures == 0


def test_it_is_gone_for_good(record):
    record.take_error("the actor died")
    assert record.status == WorkerStatus(WorkerState.ENDED, "Ray: the actor died")


@pytest.mark.parametrize(
    ("shortage", "timeout_s", "state"),
    [
        (Shortage("no node", 0.0, False), 10.0, WorkerState.PENDING),
        (Shortage("no node", 11.0, False), 10.0, WorkerState.REFUSED),
        (Shortage("no node", 1e6, False), None, WorkerState.PENDING),
        (Shortage("no node", 1e6, True), 10.0, WorkerState.ENDED),
    ],
)
def test_its_place_is_not_reserved(record, shortage, timeout_s, state):
    assert record.status_in(shortage, timeout_s).state is state
