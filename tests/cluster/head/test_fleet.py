"""The records of all workers: who joins, who is lost, who is started again. No socket, no clock."""

import pytest

from envfleet.cluster.head.config import HeadConfig
from envfleet.cluster.head.connections import Delivery
from envfleet.cluster.head.fleet import Fleet
from envfleet.cluster.head.head import Head
from envfleet.cluster.head.restarts import Stage
from envfleet.cluster.network import Network
from envfleet.cluster.sync import EveryUpdate
from envfleet.cluster.timing import Timing
from envfleet.cluster.wire.codec import Decoder
from envfleet.cluster.wire.messages import PROTOCOL_VERSION, FromHead, Join, Leaving, PoolPlan, SetAttr
from envfleet.cluster.wire.orders import Order
from envfleet.contract.pool_config import PoolConfig
from envfleet.launchers.launcher import WorkerState, WorkerStatus

RUNNING = WorkerStatus(WorkerState.RUNNING)
PENDING = WorkerStatus(WorkerState.PENDING, "in the queue")
ENDED = WorkerStatus(WorkerState.ENDED, "exit code 1")


def config_of(num_workers):
    plan = PoolPlan(env=None, pool=PoolConfig(num_envs=1))
    timing = Timing(max_worker_restarts=3, join_timeout_s=60.0, reconnect_s=5.0)
    return HeadConfig(
        plans=(plan,) * num_workers,
        env_pickles=(None,) * num_workers,
        sync=EveryUpdate(),
        timing=timing,
        network=Network(),
    )


class Wire:
    """What was sent to which process; `closed` processes cannot be reached."""

    def __init__(self):
        self.sent, self.closed = [], set()

    def deliver(self, process, frames):
        if process in self.closed:
            return Delivery.CLOSED
        message, _ = Decoder(FromHead).decode(frames)
        self.sent.append((process[:1], type(message).__name__))
        return Delivery.SENT


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def fleet(wire):
    fleet = Fleet(config_of(2), wire.deliver, None, lambda *refused: None)
    fleet.start(0.0)
    return fleet


def process(letter):
    return letter.encode() * 16


def join(fleet, worker, letter, now_s=1.0):
    fleet.join(process(letter), Join(protocol=PROTOCOL_VERSION, worker=worker, host="h", pid=ord(letter)), now_s)


def stages(fleet):
    return [record.restarts.stage for record in fleet]


def test_a_record_knows_its_process(fleet, wire):
    assert (str(fleet[1]), len(fleet), fleet.present) == ("worker 1", 2, [])
    join(fleet, 1, "a")
    assert wire.sent == [(b"a", "Welcome")]
    assert str(fleet[1]) == f"worker 1 (host h, pid {ord('a')})"
    assert fleet.present == [fleet[1]] == [fleet.heard_from(process("a"), 2.0)]
    assert stages(fleet) == [Stage.STARTING, Stage.PRESENT]
    assert fleet.missing == [fleet[0], fleet[1]]  # their pools are not built


def test_a_newer_process_takes_the_place(fleet, wire):
    join(fleet, 0, "a")
    fleet[0].is_ready = True
    join(fleet, 0, "b")
    assert wire.sent == [(b"a", "Welcome"), (b"a", "Refused"), (b"b", "Welcome")]
    assert not fleet[0].is_ready and fleet[0].restarts.num_restarts == 1
    assert "a newer process" in fleet[0].problem
    assert fleet.heard_from(process("a"), 2.0) is None and fleet.was_member(process("a"))


def test_a_worker_whose_connection_stays_closed_is_lost_and_started_again(fleet, wire):
    join(fleet, 0, "a")
    wire.closed.add(process("a"))
    fleet.tick(3.0)  # it was silent, and cannot be asked
    assert fleet[0].restarts.stage is Stage.PRESENT
    fleet.tick(9.0)
    assert fleet[0].restarts.stage is Stage.LOST
    assert fleet[0].problem.startswith("worker 0 (host h, pid") and "connection" in fleet[0].problem
    assert fleet.take_due(9.0) == []
    assert fleet.take_due(10.0) == [(0, False, True)]
    assert str(fleet[0]) == "worker 0"


def test_one_that_does_not_join_is_late(fleet):
    join(fleet, 1, "a")
    assert fleet.take_due(60.0) == fleet.take_due(60.1) == []  # its back-off begins
    assert "has not joined within 60 s" in fleet[0].problem
    assert fleet.take_due(61.0) == [(0, True, True)]


def test_time_in_a_queue_does_not_count(fleet):
    fleet.reported(0, PENDING, 50.0)
    assert fleet[0].is_pending and fleet[0].is_alive
    fleet.reported(0, RUNNING, 51.0)
    assert fleet.take_due(100.0) == []
    assert (fleet[0].restarts.stage, fleet[1].restarts.stage) == (Stage.STARTING, Stage.LOST)


def test_an_ended_process_counts_if_its_connection_is_closed(fleet, wire):
    join(fleet, 0, "a")
    fleet.reported(0, ENDED, 2.0)
    assert fleet[0].restarts.stage is Stage.PRESENT  # another process of this worker has ended
    wire.closed.add(process("a"))
    fleet.reported(0, ENDED, 3.0)
    assert fleet[0].restarts.stage is Stage.LOST
    assert "exit code 1" in fleet[0].problem
    assert fleet.take_due(9.0) == [(0, False, False)]


def test_what_the_launcher_says_is_news_unless_all_is_well_as_before(fleet):
    assert fleet.is_news(0, RUNNING)
    fleet.reported(0, RUNNING, 1.0)
    assert not fleet.is_news(0, RUNNING)
    assert fleet.is_news(0, WorkerStatus(WorkerState.RUNNING, num_failures=1))
    fleet.reported(0, PENDING, 1.0)
    assert fleet.is_news(0, PENDING)  # its time to join does not run


def test_processes_that_the_engine_replaced_before_the_first_report_do_not_count(fleet):
    fleet.reported(0, WorkerStatus(WorkerState.RUNNING, num_failures=7), 1.0)
    assert fleet[0].restarts.num_failures == 0
    fleet.reported(0, WorkerStatus(WorkerState.RUNNING, num_failures=9), 1.0)
    assert fleet[0].restarts.num_failures == 2


def test_more_workers_and_fewer(fleet, wire):
    join(fleet, 0, "a")
    fleet.resize(config_of(3), {"power": [2]}, 100.0)
    assert stages(fleet) == [Stage.PRESENT, Stage.STARTING, Stage.STARTING]
    assert [record.worker for record in fleet] == [0, 1, 2]
    assert (fleet[1].attributes, fleet[2].attributes) == ({}, {"power": [2]})
    fleet.take_due(110.0)
    assert stages(fleet) == [Stage.PRESENT, Stage.LOST, Stage.STARTING]  # the new one's time has just begun
    join(fleet, 2, "c")
    fleet.resize(config_of(1), {}, 120.0)
    assert (len(fleet), wire.sent[-1]) == (1, (b"c", "Stop"))
    assert fleet.heard_from(process("c"), 121.0) is None
    fleet.resize(config_of(2), {}, 130.0)
    assert fleet.take_due(140.0) == [] and fleet[1].restarts.num_failures == 0


def test_workers_that_leave_at_the_end_are_not_lost(fleet):
    join(fleet, 0, "a")
    join(fleet, 1, "b")
    fleet.leaving(fleet[0], Leaving(why="its time limit is near", is_failure=False), 2.0)
    fleet.is_stopping = True
    fleet.leaving(fleet[1], Leaving(why="the run is over", is_failure=False), 2.0)
    assert (fleet[0].restarts.stage, fleet[0].restarts.num_failures) == (Stage.LOST, 0)
    assert (fleet[1].problem, fleet.present) == ("", [])


def test_a_worker_that_is_missing_says_why(fleet):
    fleet.reported(0, PENDING, 1.0)
    text = fleet[0].about(5.0, "/logs/0")
    assert text == "worker 0 is starting, its process is pending (in the queue), log: /logs/0"
    join(fleet, 0, "a", 2.0)
    assert f"worker 0 (host h, pid {ord('a')}) is present, heard of 3.0 s ago" in fleet[0].about(5.0, "/logs/0")
    assert "its process is running (the launcher has not said how it is)" in fleet[1].about(5.0, "/logs/1")


def test_an_order_that_cannot_be_encoded_is_issued_to_nobody(tmp_path):
    head = Head(config_of(2), f"ipc://{tmp_path}/head", None)
    try:
        orders = {0: Order(SetAttr(name="power", values=[1])), 1: Order(SetAttr(name="power", values=[object()]))}
        with pytest.raises(TypeError):
            head.issue(orders)
        assert [record.orders.num_issued for record in head.fleet] == [0, 0] and not head.has_open_orders
    finally:
        head.close()
