"""The pace of a stream: a learner that publishes once for each batch never meets a rollout that is too old.

Workers of any speed are played here, without sockets: which of them is ready first is drawn at random.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envfleet.cluster.pace import Pace


class PlayedStream:
    """What a stream does with its pace: versions of rollouts that are out, for each worker, oldest first."""

    def __init__(self, max_lag, num_rollouts, num_workers, credit):
        self.pace, self.max_lag, self.num_rollouts, self.credit = (
            Pace(max_lag, num_rollouts),
            max_lag,
            num_rollouts,
            credit,
        )
        self.newest = 0
        self.out = {worker: [] for worker in range(num_workers)}
        self.gathered = []
        self.num_dropped = 0

    def lags(self):
        return {worker: [self.newest - version for version in each] for worker, each in self.out.items()}

    def order(self, choose):
        """Orders are given while there is room; a policy may be as old as the pace allows."""
        while True:
            spare_lag = self.pace.spare_lag(sum(map(len, self.out.values())), len(self.gathered))
            free = [worker for worker, each in self.out.items() if len(each) < self.credit]
            if spare_lag < 0 or not free:
                return
            worker = choose(free)
            oldest = max([self.newest - min(spare_lag, self.max_lag // 2), *self.out[worker]])
            self.out[worker].append(oldest)

    def take_batch(self, choose):
        while len(self.gathered) < self.num_rollouts:
            self.order(choose)
            takeable = self.pace.takeable(self.lags(), len(self.gathered))
            assert takeable, "the learner would wait for ever"
            version = self.out[choose(takeable)].pop(0)
            if self.newest - version > self.max_lag:
                self.num_dropped += 1
            else:
                self.gathered.append(version)
        self.order(choose)
        self.gathered = []

    def publish(self, num_versions):
        self.newest += num_versions
        self.pace.learned(num_versions)


@given(
    max_lag=st.integers(0, 9),
    num_rollouts=st.integers(1, 4),
    num_workers=st.integers(1, 5),
    credit=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_nothing_gets_too_old_under_a_version_for_each_batch(max_lag, num_rollouts, num_workers, credit, random):
    stream = PlayedStream(max_lag, num_rollouts, num_workers, credit)
    for _ in range(20):
        stream.take_batch(random.choice)
        stream.publish(random.choice([0, 1, 1]))
    assert stream.num_dropped == 0


@given(max_lag=st.integers(0, 6), num_versions=st.integers(2, 5), random=st.randoms(use_true_random=False))
def test_the_pace_adapts_to_more_versions_for_each_batch(max_lag, num_versions, random):
    """What was ordered before the first of them may be lost, nothing later."""
    stream = PlayedStream(max_lag, 1, 3, 2)
    for _ in range(15):
        stream.take_batch(random.choice)
        stream.publish(num_versions)
    assert stream.num_dropped <= 3 * 2
    before = stream.num_dropped
    for _ in range(15):
        stream.take_batch(random.choice)
        stream.publish(num_versions)
    assert stream.num_dropped == before


@pytest.mark.parametrize(
    ("max_lag", "num_rollouts", "expected"), [(0, 1, 1), (1, 1, 2), (3, 1, 4), (0, 2, 2), (1, 3, 6), (100, 1, 8)]
)
def test_as_many_are_ordered_as_can_be_taken_in_time(max_lag, num_rollouts, expected):
    stream = PlayedStream(max_lag, num_rollouts, num_workers=4, credit=2)
    stream.order(lambda free: free[0])
    assert sum(map(len, stream.out.values())) == expected


def test_a_rollout_that_would_be_too_old_next_time_comes_first():
    pace = Pace(max_lag=3, num_rollouts=1)
    assert pace.takeable({0: [1, 0], 1: [2]}, 0) == [0, 1]
    assert pace.takeable({0: [1, 0], 1: [3]}, 0) == [1], "after one more version it is too old"
    assert pace.takeable({0: [1, 0], 1: [3], 2: [3]}, 0) == [1, 2], "one of them will be lost"
    assert pace.takeable({0: [2], 1: [4]}, 0) == [0, 1], "too old already: it is dropped, and holds nobody up"
    assert pace.takeable({0: [], 1: [0]}, 0) == [1]
    assert Pace(max_lag=3, num_rollouts=2).takeable({0: [1, 0], 1: [3]}, 0) == [0, 1], "both are in this batch"
