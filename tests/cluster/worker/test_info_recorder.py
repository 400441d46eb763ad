"""Infos of several steps are written together: the result is that of writing each by itself."""

import numpy as np
import pytest

from envfleet.cluster.info_choice import ALL_INFOS, NUMBERS, InfoChoice
from envfleet.cluster.worker.collecting.info_recorder import MOST_HELD_BYTES, NUM_HELD, InfoRecorder
from envfleet.contract.infos.table import InfoTable
from envfleet.testing.programs import require_equal

T, N = 5 * NUM_HELD + 3, 3


def steps_of(seed):
    """Mostly the same numbers; sometimes a key is missing, or has another dtype, shape or kind, or comes late."""
    random = np.random.default_rng(seed)
    steps = []
    for t in range(T):
        rows = [{"x": random.random(), "n": t, "pos": random.random(2)} for _ in range(N)]
        match random.integers(12):
            case 0:
                del rows[1]["x"]
            case 1:
                rows = [{**row, "n": 0.5} for row in rows]
            case 2 if t > T // 2:
                rows = [{**row, "pos": random.random(4)} for row in rows]
            case 3:
                rows[2]["word"] = ["a", t]
            case 4 if t > T // 2:
                rows[0]["n"] = [t]
            case 5:
                rows = [{**row, "late": True} for row in rows]
            case 6:
                rows = [{}] * N
        table = InfoTable.from_rows(dict(enumerate(rows)), N)
        if random.random() < 0.3:
            table.add_finals(np.array([1]), [np.zeros(2)], InfoTable.from_rows({1: rows[1]}, N))
        steps.append(table.columns)
    return steps


def recorded(steps, choice, obs_bytes):
    recorder = InfoRecorder(choice, T, N, obs_bytes)
    for t, infos in enumerate(steps):
        recorder.write(t, None, infos)
        if "final_info" in infos:
            recorder.write_finals(np.array([1]), infos)
        for key, column in infos.items():  # an env may change its objects after the step
            if not isinstance(column, dict) and key != "final_obs" and column.dtype == object:
                for each in column:
                    if isinstance(each, list):
                        each.append("changed")
    return recorder.packed()


@pytest.mark.parametrize(
    "choice", [NUMBERS, ALL_INFOS, InfoChoice(("x", "word"), True)], ids=["numbers", "all", "some"]
)
@pytest.mark.parametrize("seed", range(20))
def test_steps_that_are_written_together_are_those_written_one_by_one(seed, choice):
    together = recorded(steps_of(seed), choice, obs_bytes=0)
    one_by_one = recorded(steps_of(seed), choice, obs_bytes=MOST_HELD_BYTES)
    assert together[0] == one_by_one[0]
    require_equal(together[1], one_by_one[1])


def test_numbers_alone_are_held_and_large_observations_are_not():
    steps = [InfoTable.from_rows({row: {"x": float(t)} for row in range(N)}, N).columns for t in range(T)]
    for obs_bytes, num_held in ((0, NUM_HELD - 2), (MOST_HELD_BYTES, 0)):
        recorder = InfoRecorder(NUMBERS, T, N, obs_bytes)
        for t in range(NUM_HELD - 1):
            recorder.write(t, None, steps[t])
        assert len(recorder._held) == num_held
        for t in range(NUM_HELD - 1, T):
            recorder.write(t, None, steps[t])
        _, arrays = recorder.packed()
        np.testing.assert_array_equal(arrays["info.0"], np.repeat(np.arange(T, dtype=float)[:, None], N, 1))
        assert arrays.keys() == {"info.0"}  # without a mask: all rows have it
