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
def staffing():
    staffing = Restarts(num_workers=2, max_restarts=3, join_timeout_s=60.0)
    for worker in range(2):
        staffing.started(worker, 0.0)
    return staffing


def test_a_worker_that_joins_in_time(staffing):
    assert staffing.late(60.0) == []
    staffing.joined(0)
    assert staffing.posts[0].stage is Stage.PRESENT
    assert staffing.late(60.1) == [1]


def test_one_that_waits_for_resources_is_not_late(staffing):
    staffing.started(1, 50.0)
    assert staffing.late(100.0) == [0]


def test_a_lost_one_is_started_again_after_its_back_off(staffing):
    staffing.joined(0)
    assert staffing.lost(0, "killed", 10.0) is Stage.LOST
    assert staffing.posts[0].problem == "killed"
    assert staffing.take_due(10.0) == []
    assert staffing.take_due(10.0 + FIRST_BACKOFF_S) == [(0, False)]
    assert staffing.take_due(99.0) == []  # it counts as started
    assert (staffing.posts[0].stage, staffing.posts[0].num_restarts) == (Stage.STARTING, 1)
    assert staffing.late(70.0) == [1]  # the other: its own time begins anew
    assert 0 in staffing.late(10.0 + FIRST_BACKOFF_S + 60.1)


def test_news_of_the_same_loss_counts_once(staffing):
    staffing.joined(0)
    staffing.lost(0, "it left", 1.0)
    assert staffing.lost(0, "its process ended", 2.0) is Stage.LOST
    assert (staffing.posts[0].num_failures, staffing.posts[0].problem) == (1, "it left")


def test_back_off_grows_to_its_limit():
    staffing = Restarts(num_workers=1, max_restarts=1000, join_timeout_s=60.0)
    waits = []
    for _ in range(20):
        staffing.started(0, 0.0)
        staffing.lost(0, "again", 0.0)
        waits.append(staffing.posts[0].restart_s)
    assert waits[:4] == [FIRST_BACKOFF_S * factor for factor in (1, 2, 4, 8)]
    assert waits == sorted(waits)
    assert waits[-1] == MOST_BACKOFF_S


def outage(staffing, seconds, now_s=0.0):
    """The host of worker 0 cannot be reached for this long: when it was tried, until it is given up."""
    end_s, tries_s = now_s + seconds, []
    while now_s < end_s and staffing.lost(0, "no route to host", now_s, is_unreachable=True) is Stage.LOST:
        now_s = staffing.posts[0].restart_s
        assert staffing.take_due(now_s) == [(0, False)]
        tries_s.append(now_s)
    return tries_s


@pytest.mark.parametrize("seconds", [5.0, 20.0, 34.0, 60.0])
def test_a_worker_is_tried_soon_after_an_outage_of_its_host(seconds):
    """The longer the outage, the longer was the back-off in 0.6.0: 25 s after one of 34 s."""
    staffing = Restarts(num_workers=1, max_restarts=10, join_timeout_s=60.0)
    staffing.joined(0)
    tries_s = outage(staffing, seconds)
    assert tries_s[-1] >= seconds
    waits_s = [after - before for before, after in zip([0.0, *tries_s], tries_s, strict=False)]
    assert max(waits_s) <= UNREACHABLE_S + 1e-9
    staffing.joined(0)
    staffing.lost(0, "killed", 100.0)  # the outage does not count for what comes after it
    assert staffing.posts[0].restart_s == 100.0 + FIRST_BACKOFF_S


def test_an_outage_that_does_not_end_is_counted_as_slowly_as_failures():
    waits_s = [min(MOST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**index) for index in range(10)]
    staffing = Restarts(num_workers=1, max_restarts=10, join_timeout_s=1000.0)
    staffing.joined(0)
    tries_s = outage(staffing, 1000.0)
    assert staffing.posts[0].stage is Stage.GIVEN_UP
    assert sum(waits_s) <= tries_s[-1] < sum(waits_s) + 10 * UNREACHABLE_S
    assert staffing.posts[0].num_restarts == 10  # not one for each try


def test_the_exponent_does_not_overflow():
    staffing = Restarts(num_workers=1, max_restarts=10**6, join_timeout_s=60.0)
    staffing.posts[0].num_failures = 5000
    staffing.lost(0, "again", 0.0)
    assert staffing.posts[0].restart_s == MOST_BACKOFF_S


def test_one_that_gets_nothing_done_is_given_up(staffing):
    for _ in range(3):
        staffing.joined(0)
        assert staffing.lost(0, "killed", 0.0) is Stage.LOST
        assert staffing.take_due(100.0) == [(0, False)]
    assert staffing.lost(0, "killed", 0.0) is Stage.GIVEN_UP
    assert staffing.take_due(1e9) == []
    assert 0 not in staffing.late(1e9)
    assert staffing.lost(0, "once more", 0.0) is Stage.GIVEN_UP
    assert staffing.posts[0].problem == "killed"


def test_one_that_works_in_between_is_started_again_for_ever(staffing):
    for _ in range(50):
        staffing.joined(0)
        staffing.worked(0)
        assert staffing.lost(0, "killed", 0.0) is Stage.LOST
        assert staffing.posts[0].restart_s == FIRST_BACKOFF_S
        staffing.take_due(1.0)
    assert staffing.posts[0].num_restarts == 50


def test_one_that_was_given_up_may_be_started_by_hand():
    staffing = Restarts(num_workers=1, max_restarts=0, join_timeout_s=60.0)
    staffing.started(0, 0.0)
    assert staffing.lost(0, "killed", 0.0) is Stage.GIVEN_UP
    staffing.joined(0)
    assert staffing.posts[0].stage is Stage.PRESENT


def test_workers_do_not_share_a_fate(staffing):
    staffing.joined(0)
    staffing.joined(1)
    staffing.lost(1, "killed", 0.0)
    assert [post.stage for post in staffing.posts] == [Stage.PRESENT, Stage.LOST]
    assert staffing.take_due(1.0) == [(1, False)]


def test_whether_one_is_late_is_said_once(staffing):
    staffing.lost(0, "it has not joined", 70.0)
    staffing.posts[0].is_late = True
    assert staffing.take_due(80.0) == [(0, True)]
    staffing.joined(0)
    staffing.lost(0, "killed", 90.0)
    assert staffing.take_due(99.0) == [(0, False)]


def test_one_that_the_engine_refuses_is_given_up_unless_it_is_there(staffing):
    staffing.joined(0)
    assert not staffing.refused(0, "no such image")
    assert staffing.posts[0].stage is Stage.PRESENT
    assert staffing.refused(1, "no such image")
    assert (staffing.posts[1].stage, staffing.posts[1].problem) == (Stage.GIVEN_UP, "no such image")
    assert not staffing.refused(1, "no such image")  # told once
    staffing.joined(1)
    assert staffing.posts[1].stage is Stage.PRESENT


def test_an_engine_that_could_not_start_one_is_asked_again(staffing):
    staffing.joined(0)
    staffing.lost(0, "killed", 10.0)
    assert staffing.take_due(11.0) == [(0, False)]
    staffing.not_started(0, "the controller does not answer", 11.0)
    assert (staffing.posts[0].num_failures, staffing.posts[0].problem) == (1, "the controller does not answer")
    assert staffing.take_due(11.0 + TRY_AGAIN_S - 0.1) == []
    assert staffing.take_due(11.0 + TRY_AGAIN_S) == [(0, False)]
    staffing.not_started(0, "the controller does not answer", 20.0)
    assert staffing.take_due(20.0 + TRY_AGAIN_S) == []  # twice as long each time
    assert staffing.take_due(20.0 + 2 * TRY_AGAIN_S) == [(0, False)]
    for _ in range(100):
        staffing.not_started(0, "the controller does not answer", 30.0)
    assert staffing.posts[0].restart_s == 30.0 + MOST_TRY_AGAIN_S
    staffing.joined(0)
    assert staffing.posts[0].num_refusals == 0


def test_one_that_was_told_to_leave_has_not_failed(staffing):
    for _ in range(20):
        staffing.joined(0)
        assert staffing.lost(0, "it left: its time limit is near", 0.0, is_failure=False) is Stage.LOST
        assert staffing.take_due(1.0) == [(0, False)]
    assert (staffing.posts[0].num_failures, staffing.posts[0].num_restarts) == (0, 20)


def test_processes_that_the_engine_replaces_before_they_join_are_failures(staffing):
    assert not staffing.revived(0, 2, "its pod failed")
    assert not staffing.revived(0, 1, "its pod failed")
    assert staffing.posts[0].num_failures == 3
    assert staffing.revived(0, 1, "its pod failed again")
    assert (staffing.posts[0].stage, staffing.posts[0].problem) == (Stage.GIVEN_UP, "its pod failed again")


def test_one_that_had_joined_is_counted_when_its_connection_is_lost(staffing):
    staffing.joined(0)
    assert not staffing.revived(0, 1, "its pod failed")
    assert staffing.posts[0].num_failures == 0
    staffing.lost(0, "its connection is closed", 1.0)
    assert staffing.posts[0].num_failures == 1


def test_more_posts_and_fewer(staffing):
    staffing.joined(0)
    staffing.resize(3, 100.0)
    assert [post.stage for post in staffing.posts] == [Stage.PRESENT, Stage.STARTING, Stage.STARTING]
    assert staffing.late(110.0) == [1]  # the new one's time has just begun
    staffing.resize(1, 100.0)
    staffing.resize(2, 120.0)
    assert staffing.late(130.0) == []


def test_what_the_engine_says_of_a_worker_that_was_left_to_it_is_no_new_loss(staffing):
    staffing.joined(0)
    staffing.lost(0, "it left: its time limit is near", 1.0)
    assert staffing.take_due(2.0) == [(0, False)]
    staffing.left_to_engine(0)
    staffing.lost(0, "its job has ended", 3.0)
    assert staffing.take_due(3.0) == [(0, False)]  # at once, and this time we restart it
    post = staffing.posts[0]
    assert (post.num_failures, post.num_restarts, post.problem) == (1, 1, "it left: its time limit is near")
    staffing.lost(0, "its job has ended again", 4.0)
    assert post.num_failures == 2


def test_the_process_that_the_engine_replaces_was_counted_when_its_connection_was_lost(staffing):
    staffing.joined(0)
    staffing.lost(0, "its connection is closed", 1.0)
    staffing.take_due(2.0)
    staffing.left_to_engine(0)
    staffing.revived(0, 1, "its pod failed")
    assert staffing.posts[0].num_failures == 1
    staffing.revived(0, 2, "its pod failed")
    assert staffing.posts[0].num_failures == 3
