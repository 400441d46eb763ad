"""A minute of chaos, always the same one; `make chaos` has more of it."""

import pytest
from chaos import LONGEST_PAUSE_S, run


@pytest.mark.slow
def test_chaos():
    report = run(seconds=45.0, seed=7)
    print(report)
    assert report.longest_pause_s < LONGEST_PAUSE_S
    assert report.num_rollouts > 50 and report.num_versions > 5
    assert report.num_restarts > 3 and report.num_env_objects > 6  # workers did die, others came
    assert min(report.wire[what] for what in ("dropped", "doubled", "delayed")) > 0
    assert report.refused  # what came twice was noticed
