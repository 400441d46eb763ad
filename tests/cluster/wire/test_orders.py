"""Each order is carried out, and each answer accepted, exactly once: no socket, no clock."""

import random
from collections import deque
from itertools import pairwise

import pytest

from envfleet.cluster.wire.orders import LONGEST_RESEND_S, Expected, Ledger, Outbox, Verdict


def issue(ledger, now_s=0.0):
    order = ledger.prepared(lambda order, accepted: [order, accepted], Expected(dict), now_s)
    ledger.issue(order)
    return order


def test_orders_are_numbered_from_one_and_say_what_was_accepted():
    ledger = Ledger()
    assert issue(ledger).frames == [1, 0]
    assert issue(ledger).frames == [2, 0]
    ledger.accept()
    assert issue(ledger).frames == [3, 1]
    assert [order.number for order in ledger.open] == [2, 3]


def test_an_order_that_cannot_be_encoded_was_never_given():
    ledger = Ledger()

    def cannot(order, accepted):
        raise ValueError("no")

    with pytest.raises(ValueError):
        ledger.prepared(cannot, Expected(dict), 0.0)
    assert (ledger.num_issued, len(ledger.open)) == (0, 0)
    assert issue(ledger).number == 1


def test_verdicts():
    ledger = Ledger()
    assert ledger.judge(1) is Verdict.UNKNOWN
    for _ in range(3):
        issue(ledger)
    assert [ledger.judge(number) for number in (-1, 0, 1, 2, 3, 4, 10**30)] == [
        Verdict.UNKNOWN,
        Verdict.UNKNOWN,
        Verdict.ACCEPTED,
        Verdict.EARLY,
        Verdict.EARLY,
        Verdict.UNKNOWN,
        Verdict.UNKNOWN,
    ]
    assert ledger.accept().number == 1
    assert ledger.judge(1) is Verdict.DUPLICATE
    assert ledger.judge(2) is Verdict.ACCEPTED


def test_cancelled_orders_are_still_answered_in_their_order():
    ledger = Ledger()
    assert ledger.cancel_open() is None
    issue(ledger)
    issue(ledger)
    assert ledger.cancel_open() == 2
    issue(ledger)
    assert ledger.judge(1) is Verdict.CANCELLED
    ledger.accept()
    assert ledger.judge(3) is Verdict.EARLY
    assert ledger.judge(2) is Verdict.CANCELLED
    ledger.accept()
    assert ledger.judge(3) is Verdict.ACCEPTED


def test_orders_are_sent_again_until_they_are_received():
    ledger = Ledger()
    issue(ledger, 0.0)
    issue(ledger, 0.5)
    issue(ledger, 3.0)
    assert ledger.overdue(0, 1.0, resend_s=1.0) == []
    assert [order.number for order in ledger.overdue(0, 2.0, resend_s=1.0)] == [1, 2]
    assert ledger.overdue(0, 2.5, resend_s=1.0) == []  # they are on their way again
    assert numbers_of(ledger.overdue(1, 9.0, resend_s=1.0)) == [2, 3]
    assert ledger.overdue(3, 99.0, resend_s=1.0) == []


def test_repetitions_become_rarer_but_never_stop():
    ledger, outbox = Ledger(), Outbox(received=0)
    issue(ledger, 0.0)
    outbox.add(1, [1], 0.0)
    times = []
    for tenths in range(1, 100_000):
        is_sent = bool(ledger.overdue(0, tenths / 10, resend_s=1.0))
        assert bool(outbox.overdue(tenths / 10, resend_s=1.0)) is is_sent
        if is_sent:
            times.append(tenths / 10)
    pauses = [after - before for before, after in pairwise(times)]
    assert 1.0 < times[0] < 1.2
    assert pauses == sorted(pauses, key=lambda pause: round(pause, 6))
    assert LONGEST_RESEND_S < pauses[-1] < LONGEST_RESEND_S + 0.2


def test_what_nobody_takes_for_days_is_still_repeated():
    ledger = Ledger()
    order = issue(ledger, 0.0)
    order.num_repeats = 5000
    assert ledger.overdue(0, 1e6, resend_s=1.0) == [order]


def test_an_order_knows_its_answer():
    order = Ledger().prepared(lambda order, accepted: [], Expected(dict, num_steps=5), 0.0)
    assert order.expects == Expected(dict, 5)


def test_outbox_takes_each_order_once_and_in_turn():
    outbox = Outbox(received=4)
    assert [outbox.is_next(number) for number in (4, 6, 5, 5, 6, 7, 6, 8)] == [
        False,
        False,
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    assert outbox.received == 8


def test_outbox_sends_again_until_accepted():
    outbox = Outbox(received=0)
    assert outbox.overdue(99.0, 1.0) == []
    for number in (1, 2, 3):
        outbox.add(number, [number], float(number))
    assert outbox.overdue(2.0, 1.0) == []
    assert [answer.number for answer in outbox.overdue(2.1, 1.0)] == [1, 2, 3]
    assert outbox.overdue(3.0, 1.0) == []
    outbox.accepted(2)
    outbox.accepted(1)  # old news
    assert [answer.number for answer in outbox.overdue(9.0, 1.0)] == [3]
    outbox.accepted(10)
    assert not outbox.unaccepted


class Wire:
    """Loses, doubles and reorders what is put on it. Only what is for the present process counts."""

    def __init__(self, rng):
        self._rng = rng
        self._things = deque()

    def put(self, epoch, numbers):
        for number in numbers:
            for _ in range(self._rng.choice((0, 1, 1, 1, 2))):
                place = self._rng.randint(max(0, len(self._things) - 3), len(self._things))
                self._things.insert(place, (epoch, number))

    def take(self, epoch):
        while self._things:
            of_epoch, number = self._things.popleft()
            if of_epoch == epoch:
                return number
        return None


def numbers_of(orders):
    return [order.number for order in orders]


@pytest.mark.parametrize("seed", range(8))
def test_any_wire_gives_exactly_once(seed):
    """Processes die in between. Each order is carried out once by each process, each answer accepted once, in turn."""
    rng, num_orders = random.Random(seed), 40
    ledger, outbox, epoch, now_s = Ledger(), Outbox(received=0), 0, 0.0
    to_worker, to_head = Wire(rng), Wire(rng)
    accepted = []
    while len(accepted) < num_orders:
        now_s += 0.1
        assert now_s < 2000, "no progress"
        if ledger.num_issued < min(num_orders, ledger.num_accepted + 3):
            to_worker.put(epoch, [issue(ledger, now_s).number])
        if rng.random() < 0.01:  # the process is lost; the next one begins with the oldest open order
            epoch += 1
            outbox = Outbox(received=ledger.num_accepted)
            to_worker.put(epoch, numbers_of(ledger.open))
        to_worker.put(epoch, numbers_of(ledger.overdue(outbox.received, now_s, 1.0)))
        number = to_worker.take(epoch)
        if number is not None and outbox.is_next(number):
            outbox.add(number, [number], now_s)
            to_head.put(epoch, [number])
        to_head.put(epoch, numbers_of(outbox.overdue(now_s, 1.0)))
        number = to_head.take(epoch)
        if number is not None and ledger.judge(number) is Verdict.ACCEPTED:
            accepted.append(ledger.accept().number)
        if rng.random() < 0.5:
            outbox.accepted(ledger.num_accepted)
    assert accepted == list(range(1, num_orders + 1))
