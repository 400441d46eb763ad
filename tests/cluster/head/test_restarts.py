"""Which workers are started again, and when it is no use any more: no clock."""

import pytest

from envfleet.cluster.head.restarts import (
    FIRST_BACKOFF_S,
    MOST_BACKOFF_S,
    MOST_TRY_AGAIN_S,
    TRY_AGAIN_S,
    UNREACHABLE_S,
    Restarts,
    Stage,
)


@pytest.fixture
def workers():
    return [Restarts(max_restarts=3, join_timeout_s=60.0) for _ in range(2)]


def late(workers, now_s):
    return [index for index, worker in enumerate(workers) if worker.has_missed_join(now_s)]


def take_due(workers, now_s):
    """Those that are due, and whether each was late; they count as started."""
    return [(index, worker.restarted(now_s)) for index, worker in enumerate(workers) if worker.is_due(now_s)]


def test_a_worker_that_joins_in_time(workers):
    assert late(workers, 60.0) == []
    workers[0].joined()
    assert workers[0].stage is Stage.PRESENT
    assert late(workers, 60.1) == [1]


def test_one_that_waits_for_resources_is_not_late(workers):
    workers[1].started(50.0)
    assert late(workers, 100.0) == [0]


def test_a_lost_one_is_started_again_after_its_back_off(workers):
    workers[0].joined()
    assert workers[0].lost("killed", 10.0) is Stage.LOST
    assert workers[0].problem == "killed"
    assert take_due(workers, 10.0) == []
    assert take_due(workers, 10.0 + FIRST_BACKOFF_S) == [(0, False)]
    assert take_due(workers, 99.0) == []  # it counts as started
    assert (workers[0].stage, workers[0].num_restarts) == (Stage.STARTING, 1)
    assert late(workers, 70.0) == [1]  # the other: its own time begins anew
    assert 0 in late(workers, 10.0 + FIRST_BACKOFF_S + 60.1)


def test_news_of_the_same_loss_counts_once(workers):
    workers[0].joined()
    workers[0].lost("it left", 1.0)
    assert workers[0].lost("its process ended", 2.0) is Stage.LOST
    assert (workers[0].num_failures, workers[0].problem) == (1, "it left")


def test_back_off_grows_to_its_limit():
    workers = [Restarts(max_restarts=1000, join_timeout_s=60.0)]
    waits = []
    for _ in range(20):
        workers[0].started(0.0)
        workers[0].lost("again", 0.0)
        waits.append(workers[0].restart_s)
    assert waits[:4] == [FIRST_BACKOFF_S * factor for factor in (1, 2, 4, 8)]
    assert waits == sorted(waits)
    assert waits[-1] == MOST_BACKOFF_S


def outage(workers, seconds, now_s=0.0):
    """The host of worker 0 cannot be reached for this long: when it was tried, until it is given up."""
    end_s, tries_s = now_s + seconds, []
    while now_s < end_s and workers[0].lost("no route to host", now_s, is_unreachable=True) is Stage.LOST:
        now_s = workers[0].restart_s
        assert take_due(workers, now_s) == [(0, False)]
        tries_s.append(now_s)
    return tries_s


@pytest.mark.parametrize("seconds", [5.0, 20.0, 34.0, 60.0])
def test_a_worker_is_tried_soon_after_an_outage_of_its_host(seconds):
    """The longer the outage, the longer was the back-off in 0.6.0: 25 s after one of 34 s."""
    workers = [Restarts(max_restarts=10, join_timeout_s=60.0)]
    workers[0].joined()
    tries_s = outage(workers, seconds)
    assert tries_s[-1] >= seconds
    waits_s = [after - before for before, after in zip([0.0, *tries_s], tries_s, strict=False)]
    assert max(waits_s) <= UNREACHABLE_S + 1e-9
    workers[0].joined()
    workers[0].lost("killed", 100.0)  # the outage does not count for what comes after it
    assert workers[0].restart_s == 100.0 + FIRST_BACKOFF_S


def test_an_outage_that_does_not_end_is_counted_as_slowly_as_failures():
    waits_s = [min(MOST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**index) for index in range(10)]
    workers = [Restarts(max_restarts=10, join_timeout_s=1000.0)]
    workers[0].joined()
    tries_s = outage(workers, 1000.0)
    assert workers[0].stage is Stage.GIVEN_UP
    assert sum(waits_s) <= tries_s[-1] < sum(waits_s) + 10 * UNREACHABLE_S
    assert workers[0].num_restarts == 10  # not one for each try


def test_the_exponent_does_not_overflow():
    workers = [Restarts(max_restarts=10**6, join_timeout_s=60.0)]
    workers[0].num_failures = 5000
    workers[0].lost("again", 0.0)
    assert workers[0].restart_s == MOST_BACKOFF_S


def test_one_that_gets_nothing_done_is_given_up(workers):
    for _ in range(3):
        workers[0].joined()
        assert workers[0].lost("killed", 0.0) is Stage.LOST
        assert take_due(workers, 100.0) == [(0, False)]
    assert workers[0].lost("killed", 0.0) is Stage.GIVEN_UP
    assert take_due(workers, 1e9) == []
    assert 0 not in late(workers, 1e9)
    assert workers[0].lost("once more", 0.0) is Stage.GIVEN_UP
    assert workers[0].problem == "killed"


def test_one_that_works_in_between_is_started_again_for_ever(workers):
    for _ in range(50):
        workers[0].joined()
        workers[0].worked()
        assert workers[0].lost("killed", 0.0) is Stage.LOST
        assert workers[0].restart_s == FIRST_BACKOFF_S
        take_due(workers, 1.0)
    assert workers[0].num_restarts == 50


def test_one_that_was_given_up_may_be_started_by_hand():
    workers = [Restarts(max_restarts=0, join_timeout_s=60.0)]
    workers[0].started(0.0)
    assert workers[0].lost("killed", 0.0) is Stage.GIVEN_UP
    workers[0].joined()
    assert workers[0].stage is Stage.PRESENT


def test_workers_do_not_share_a_fate(workers):
    workers[0].joined()
    workers[1].joined()
    workers[1].lost("killed", 0.0)
    assert [worker.stage for worker in workers] == [Stage.PRESENT, Stage.LOST]
    assert take_due(workers, 1.0) == [(1, False)]


def test_whether_one_is_late_is_said_once(workers):
    workers[0].lost("it has not joined", 70.0)
    workers[0].is_late = True
    assert take_due(workers, 80.0) == [(0, True)]
    workers[0].joined()
    workers[0].lost("killed", 90.0)
    assert take_due(workers, 99.0) == [(0, False)]


def test_one_that_the_engine_refuses_is_given_up_unless_it_is_there(workers):
    workers[0].joined()
    assert not workers[0].refused("no such image")
    assert workers[0].stage is Stage.PRESENT
    assert workers[1].refused("no such image")
    assert (workers[1].stage, workers[1].problem) == (Stage.GIVEN_UP, "no such image")
    assert not workers[1].refused("no such image")  # told once
    workers[1].joined()
    assert workers[1].stage is Stage.PRESENT


def test_an_engine_that_could_not_start_one_is_asked_again(workers):
    workers[0].joined()
    workers[0].lost("killed", 10.0)
    assert take_due(workers, 11.0) == [(0, False)]
    workers[0].not_started("the controller does not answer", 11.0)
    assert (workers[0].num_failures, workers[0].problem) == (1, "the controller does not answer")
    assert take_due(workers, 11.0 + TRY_AGAIN_S - 0.1) == []
    assert take_due(workers, 11.0 + TRY_AGAIN_S) == [(0, False)]
    workers[0].not_started("the controller does not answer", 20.0)
    assert take_due(workers, 20.0 + TRY_AGAIN_S) == []  # twice as long each time
    assert take_due(workers, 20.0 + 2 * TRY_AGAIN_S) == [(0, False)]
    for _ in range(100):
        workers[0].not_started("the controller does not answer", 30.0)
    assert workers[0].restart_s == 30.0 + MOST_TRY_AGAIN_S
    workers[0].joined()
    assert workers[0].num_refusals == 0


def test_one_that_was_told_to_leave_has_not_failed(workers):
    for _ in range(20):
        workers[0].joined()
        assert workers[0].lost("it left: its time limit is near", 0.0, is_failure=False) is Stage.LOST
        assert take_due(workers, 1.0) == [(0, False)]
    assert (workers[0].num_failures, workers[0].num_restarts) == (0, 20)


def test_processes_that_the_engine_replaces_before_they_join_are_failures(workers):
    assert not workers[0].revived(2, "its pod failed")
    assert not workers[0].revived(1, "its pod failed")
    assert workers[0].num_failures == 3
    assert workers[0].revived(1, "its pod failed again")
    assert (workers[0].stage, workers[0].problem) == (Stage.GIVEN_UP, "its pod failed again")


def test_one_that_had_joined_is_counted_when_its_connection_is_lost(workers):
    workers[0].joined()
    assert not workers[0].revived(1, "its pod failed")
    assert workers[0].num_failures == 0
    workers[0].lost("its connection is closed", 1.0)
    assert workers[0].num_failures == 1


def test_what_the_engine_says_of_a_worker_that_was_left_to_it_is_no_new_loss(workers):
    workers[0].joined()
    workers[0].lost("it left: its time limit is near", 1.0)
    assert take_due(workers, 2.0) == [(0, False)]
    workers[0].left_to_engine()
    workers[0].lost("its job has ended", 3.0)
    assert take_due(workers, 3.0) == [(0, False)]  # at once, and this time we restart it
    worker = workers[0]
    assert (worker.num_failures, worker.num_restarts, worker.problem) == (1, 1, "it left: its time limit is near")
    workers[0].lost("its job has ended again", 4.0)
    assert worker.num_failures == 2


def test_the_process_that_the_engine_replaces_was_counted_when_its_connection_was_lost(workers):
    workers[0].joined()
    workers[0].lost("its connection is closed", 1.0)
    take_due(workers, 2.0)
    workers[0].left_to_engine()
    workers[0].revived(1, "its pod failed")
    assert workers[0].num_failures == 1
    workers[0].revived(2, "its pod failed")
    assert workers[0].num_failures == 3
