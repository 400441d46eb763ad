"""The head believes nothing of an evaluation that a worker cannot have played; single orders can be cancelled."""

import msgspec
import numpy as np
import pytest

from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.evaluations import arrays_of, checked_episodes
from envfleet.cluster.wire.messages import Code, Evaluate, EvaluationReady, Weights
from envfleet.cluster.wire.orders import Order, OrderLog, Verdict
from envfleet.cluster.wire.plain_values import to_plain
from envfleet.contract.evaluation import Episodes, joined_episodes, seeds_of_episodes

ORDER = Evaluate(
    seeds=[5, 6],
    num_recorded=1,
    is_deterministic=True,
    code=Code(code_id=1, factory="a:b", kwargs={}),
    weights=Weights(version=1, code_id=1, digest=b"", bfloat16=[]),
)


def episodes(**changes):
    values = {
        "returns": np.array([1.0, np.nan]),
        "lengths": np.array([2, 3]),
        "terminated": np.array([True, False]),
        "truncated": np.array([False, True]),
        "infos": [{"a": 1}, {}],
        "frames": [np.zeros((3, 4, 5, 3), np.uint8)],
    }
    return Episodes(**values | changes)


def checked(played, **more):
    infos = msgspec.Raw(msgspec.msgpack.encode(to_plain(played.infos)))
    return checked_episodes(EvaluationReady(order=1, infos=infos), arrays_of(played) | more, ORDER)


def test_what_was_played_comes_whole():
    came = checked(episodes())
    assert came.infos == [{"a": 1}, {}]
    np.testing.assert_equal(arrays_of(came), arrays_of(episodes()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"returns": np.zeros(3)}, "'returns' must be float64"),
        ({"returns": np.zeros(2, np.float32)}, "'returns' must be float64"),
        ({"lengths": np.array([2, 0])}, "at least one step"),
        ({"lengths": np.array([7, 3])}, r"'frames.0' must be uint8 \(8,"),
        ({"truncated": np.array([False, False])}, "did not end"),
        ({"truncated": np.array([0, 2], np.uint8).view(np.bool_)}, "neither 0 nor 1"),
        ({"frames": []}, "consists of the arrays"),
        ({"frames": [np.zeros((3, 4, 5, 3))]}, "must be uint8"),
        ({"infos": [{}]}, "a list of 2 infos"),
        ({"infos": [{}, 3]}, "a list of 2 infos"),
        ({"infos": {}}, "a list of 2 infos"),
        ({"infos": [{}, {3: 4}]}, "a list of 2 infos"),
        ({"more": {"unknown": np.zeros(2)}}, "consists of the arrays"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    more = changes.pop("more", {})
    with pytest.raises(BadMessage, match=message):
        checked(episodes(**changes), **more)


def test_one_order_among_others_is_cancelled():
    log = OrderLog()
    for _ in range(4):
        log.issue(log.prepare(Order(ORDER), 0.0))
    log.cancel(3)
    assert log.cancelled == (0, [3])
    assert [log.judge(number) for number in (1, 3)] == [Verdict.ACCEPTED, Verdict.EARLY]
    log.cancel(1)
    assert log.cancelled == (1, [3])
    log.accept()
    log.accept()
    assert log.judge(3) is Verdict.CANCELLED
    assert log.cancelled == (3, [])
    log.cancel_open()
    assert log.cancelled == (4, [])


def test_parts_are_joined_in_the_order_of_episodes():
    first = episodes(returns=np.array([0.0, 2.0]))
    second = episodes(returns=np.array([1.0, 3.0]), infos=[{"b": 1}, {"b": 3}])
    joined = joined_episodes([([1, 3], second), ([0, 2], first)])
    assert joined.returns.tolist() == [0, 1, 2, 3]
    assert joined.infos == [{"a": 1}, {"b": 1}, {}, {"b": 3}]
    assert len(joined.frames) == 2


def test_the_seed_of_an_episode_does_not_depend_on_their_number():
    seeds = seeds_of_episodes(7, 100)
    assert seeds_of_episodes(7, 3) == seeds[:3]
    assert len(set(seeds)) == 100 and seeds_of_episodes(8, 3) != seeds[:3]
