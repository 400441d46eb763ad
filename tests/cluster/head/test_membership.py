"""Who is a member, who is lost: no socket, no clock."""

import pytest

from envfleet.cluster.head.membership import NUM_FORMER_KEPT, Member, Membership


@pytest.fixture
def membership():
    return Membership(num_workers=3, reconnect_s=5.0)


def join(membership, worker, process, now_s=0.0):
    return membership.join(worker, process, "host", 100 + worker, now_s)


def test_a_process_joins_and_is_named(membership):
    member = join(membership, 1, b"a")
    assert (member.worker, member.epoch, member.process) == (1, 1, b"a")
    assert str(member) == "worker 1 (host host, pid 101)"
    assert membership.worker(1) is member
    assert membership.worker(0) is None


def test_members_are_in_the_order_of_workers(membership):
    for worker, process in ((2, b"c"), (0, b"a"), (1, b"b")):
        join(membership, worker, process)
    assert [member.worker for member in membership.members] == [0, 1, 2]


@pytest.mark.parametrize("worker", [-1, 3, 10**30])
def test_there_is_no_such_worker(membership, worker):
    assert "no worker" in join(membership, worker, b"a")
    assert membership.members == []


def test_to_join_twice_changes_nothing(membership):
    member = join(membership, 0, b"a", 1.0)
    membership.member(b"a").connection_closed(1.5)
    assert join(membership, 0, b"a", 2.0) is member
    assert (member.epoch, member.heard_s, member.gone_s) == (1, 2.0, None)


def test_a_process_is_one_worker_only(membership):
    join(membership, 0, b"a")
    assert "worker 0 already" in join(membership, 1, b"a")
    assert membership.worker(1) is None


def test_the_newest_process_wins_and_the_older_never_comes_back(membership):
    join(membership, 0, b"old")
    newer = join(membership, 0, b"new")
    assert isinstance(newer, Member) and newer.epoch == 2
    assert membership.members == [newer]
    assert membership.heard_from(b"old", 1.0) is None
    assert "newer process" in join(membership, 0, b"old")
    assert membership.worker(0) is newer


def test_who_has_left_is_not_listened_to(membership):
    member = join(membership, 0, b"a")
    assert membership.leave(b"a") is member
    assert membership.leave(b"a") is None
    assert membership.heard_from(b"a", 1.0) is None
    assert membership.worker(0) is None
    assert isinstance(join(membership, 0, b"a"), str)


def test_an_older_process_that_leaves_does_not_take_the_newer_along(membership):
    join(membership, 0, b"old")
    newer = join(membership, 0, b"new")
    assert membership.leave(b"old") is None
    assert membership.worker(0) is newer


def test_strangers_are_nobody(membership):
    assert membership.heard_from(b"x", 1.0) is None
    assert membership.member(b"x") is None
    assert membership.leave(b"x") is None
    assert membership.take_lost(1e9) == []


def test_slow_is_not_dead(membership):
    member = join(membership, 0, b"a", 0.0)
    assert membership.take_lost(1e9) == []
    assert membership.worker(0) is member


def test_a_connection_may_stay_closed_for_reconnect_s(membership):
    member = join(membership, 0, b"a", 0.0)
    membership.member(b"a").connection_closed(10.0)
    membership.member(b"a").connection_closed(14.0)  # the first time counts
    assert membership.take_lost(15.0) == []
    ((lost, why),) = membership.take_lost(15.1)
    assert lost is member
    assert "closed for 5 s" in why
    assert membership.take_lost(99.0) == []
    assert membership.heard_from(b"a", 99.0) is None


def test_who_comes_back_in_time_is_not_lost(membership):
    join(membership, 0, b"a", 0.0)
    membership.member(b"a").connection_closed(10.0)
    membership.heard_from(b"a", 14.9)
    assert membership.take_lost(1e9) == []
    membership.member(b"a").connection_closed(20.0)
    assert membership.take_lost(24.0) == []
    assert len(membership.take_lost(25.1)) == 1


def test_only_the_closed_one_is_lost(membership):
    join(membership, 0, b"a")
    join(membership, 1, b"b")
    membership.member(b"b").connection_closed(0.0)
    assert [member.worker for member, _ in membership.take_lost(6.0)] == [1]
    assert [member.worker for member in membership.members] == [0]


def test_epochs_only_grow(membership):
    epochs = []
    for number in range(5):
        epochs.append(join(membership, 0, bytes([number])).epoch)
        membership.leave(bytes([number]))
    assert epochs == [1, 2, 3, 4, 5]
    assert join(membership, 1, b"other").epoch == 1


def test_time_does_not_run_backwards(membership):
    member = join(membership, 0, b"a", 10.0)
    membership.heard_from(b"a", 9.0)
    assert member.heard_s == 10.0


def test_memory_of_former_processes_is_bounded(membership):
    for number in range(NUM_FORMER_KEPT + 10):
        join(membership, 0, b"%d" % number)
    assert "newer process" in join(membership, 0, b"%d" % NUM_FORMER_KEPT)
    assert isinstance(join(membership, 0, b"0"), Member)  # so long ago that nothing of it can be under way
