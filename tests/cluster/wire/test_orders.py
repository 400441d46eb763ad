"""Each order is carried out, and each answer accepted, exactly once: no socket, no clock."""

import random
from collections import deque
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from envfleet.cluster.wire.codec import Decoder
from envfleet.cluster.wire.messages import (
    Call,
    Collect,
    FromHead,
    Reset,
    RolloutReady,
    RowsReady,
    SetAttr,
    Step,
    ValuesReady,
)
from envfleet.cluster.wire.orders import LONGEST_RESEND_S, Order, OrderLog, Outbox, Verdict

STEP = Order(Step(autoreset="next_step"))


def issue(log, now_s=0.0):
    prepared = log.prepare(STEP, now_s)
    log.issue(prepared)
    return prepared


def decoded(prepared):
    return Decoder(FromHead).decode(prepared.frames)


def numbers_in(prepared):
    message, _ = decoded(prepared)
    return message.order, message.accepted


def test_orders_are_numbered_from_one_and_say_what_was_accepted():
    log = OrderLog()
    assert numbers_in(issue(log)) == (1, 0)
    assert numbers_in(issue(log)) == (2, 0)
    log.accept()
    assert numbers_in(issue(log)) == (3, 1)
    assert (STEP.message.order, STEP.message.accepted) == (0, 0)  # the order itself is a value: it does not change
    assert [order.number for order in log.open] == [2, 3]


def test_an_order_that_cannot_be_encoded_was_never_given():
    log = OrderLog()
    with pytest.raises(TypeError):
        log.prepare(Order(SetAttr(name="power", values=[object()])), 0.0)
    assert (log.num_issued, len(log.open)) == (0, 0)
    assert issue(log).number == 1


def test_verdicts():
    log = OrderLog()
    assert log.judge(1) is Verdict.UNKNOWN
    for _ in range(3):
        issue(log)
    assert [log.judge(number) for number in (-1, 0, 1, 2, 3, 4, 10**30)] == [
        Verdict.UNKNOWN,
        Verdict.UNKNOWN,
        Verdict.ACCEPTED,
        Verdict.EARLY,
        Verdict.EARLY,
        Verdict.UNKNOWN,
        Verdict.UNKNOWN,
    ]
    assert log.accept().number == 1
    assert log.judge(1) is Verdict.DUPLICATE
    assert log.judge(2) is Verdict.ACCEPTED


def test_cancelled_orders_are_still_answered_in_their_order():
    log = OrderLog()
    assert log.cancel_open() is None
    issue(log)
    issue(log)
    assert log.cancel_open() == 2
    issue(log)
    assert log.judge(1) is Verdict.CANCELLED
    log.accept()
    assert log.judge(3) is Verdict.EARLY
    assert log.judge(2) is Verdict.CANCELLED
    log.accept()
    assert log.judge(3) is Verdict.ACCEPTED


def test_orders_are_sent_again_until_they_are_received():
    log = OrderLog()
    issue(log, 0.0)
    issue(log, 0.5)
    issue(log, 3.0)
    assert log.overdue(0, 1.0, resend_s=1.0) == []
    assert [order.number for order in log.overdue(0, 2.0, resend_s=1.0)] == [1, 2]
    assert log.overdue(0, 2.5, resend_s=1.0) == []  # they are on their way again
    assert numbers_of(log.overdue(1, 9.0, resend_s=1.0)) == [2, 3]
    assert log.overdue(3, 99.0, resend_s=1.0) == []


def test_repetitions_become_rarer_but_never_stop():
    log, outbox = OrderLog(), Outbox(received=0)
    issue(log, 0.0)
    outbox.add(1, [1], 0.0)
    times = []
    for tenths in range(1, 100_000):
        is_sent = bool(log.overdue(0, tenths / 10, resend_s=1.0))
        assert bool(outbox.overdue(tenths / 10, resend_s=1.0)) is is_sent
        if is_sent:
            times.append(tenths / 10)
    pauses = [after - before for before, after in pairwise(times)]
    assert 1.0 < times[0] < 1.2
    assert pauses == sorted(pauses, key=lambda pause: round(pause, 6))
    assert LONGEST_RESEND_S < pauses[-1] < LONGEST_RESEND_S + 0.2


def test_what_nobody_takes_for_days_is_still_repeated():
    log = OrderLog()
    order = issue(log, 0.0)
    order.num_repeats = 5000
    assert log.overdue(0, 1e6, resend_s=1.0) == [order]


def test_an_order_knows_its_answer():
    collect = Collect(num_steps=5, code_id=1, version=1, divergence=None, measured_version=-1)
    answers = [
        (Order(Reset(autoreset="next_step", seeds=[None], options=None, mask=None)), (RowsReady, 0)),
        (STEP, (RowsReady, 0)),
        (Order(collect), (RolloutReady, 5)),
        (Order(Call(name="render", args=[], kwargs={})), (ValuesReady, 0)),
        (Order(SetAttr(name="power", values=[1])), (ValuesReady, 0)),
    ]
    for order, expected in answers:
        assert (order.answer, order.num_steps) == expected
        assert OrderLog().prepare(order, 0.0).order is order


def test_an_order_carries_its_arrays():
    actions = np.arange(3, dtype=np.float32)
    message, arrays = decoded(OrderLog().prepare(Order(STEP.message, {"action.0": actions}), 0.0))
    assert message == msgspec.structs.replace(STEP.message, order=1)
    assert np.array_equal(arrays["action.0"], actions)


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
    log, outbox, epoch, now_s = OrderLog(), Outbox(received=0), 0, 0.0
    to_worker, to_head = Wire(rng), Wire(rng)
    accepted = []
    while len(accepted) < num_orders:
        now_s += 0.1
        assert now_s < 2000, "no progress"
        if log.num_issued < min(num_orders, log.num_accepted + 3):
            to_worker.put(epoch, [issue(log, now_s).number])
        if rng.random() < 0.01:  # the process is lost; the next one begins with the oldest open order
            epoch += 1
            outbox = Outbox(received=log.num_accepted)
            to_worker.put(epoch, numbers_of(log.open))
        to_worker.put(epoch, numbers_of(log.overdue(outbox.received, now_s, 1.0)))
        number = to_worker.take(epoch)
        if number is not None and outbox.is_next(number):
            outbox.add(number, [number], now_s)
            to_head.put(epoch, [number])
        to_head.put(epoch, numbers_of(outbox.overdue(now_s, 1.0)))
        number = to_head.take(epoch)
        if number is not None and log.judge(number) is Verdict.ACCEPTED:
            accepted.append(log.accept().number)
        if rng.random() < 0.5:
            outbox.accepted(log.num_accepted)
    assert accepted == list(range(1, num_orders + 1))
