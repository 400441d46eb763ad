"""Gymnasium's own vector wrappers work on a pool, and give what they give on Gymnasium's vector envs."""

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import vector as wrappers

import envfleet
from envfleet.testing.programs import require_equal

pytestmark = pytest.mark.usefixtures("quick_spawners")

STACKS = {
    "statistics": lambda envs: wrappers.RecordEpisodeStatistics(envs),
    "normalize": lambda envs: wrappers.NormalizeReward(wrappers.NormalizeObservation(envs)),
    "clip": lambda envs: wrappers.ClipReward(envs, -0.5, 0.5),
    "rescale": lambda envs: wrappers.DictInfoToList(wrappers.RecordEpisodeStatistics(envs)),
    "dtype": lambda envs: wrappers.DtypeObservation(envs, np.float64),
    "flatten": lambda envs: wrappers.FlattenObservation(envs),
}


@pytest.mark.parametrize("stack", STACKS)
def test_wrapped_pools_equal_wrapped_gymnasium(stack):
    ours = STACKS[stack](envfleet.make("CartPole-v1", 4, num_workers=2, backend="process"))
    theirs = STACKS[stack](gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync"))
    generator = np.random.default_rng(0)
    try:
        require_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
        for _ in range(120):
            actions = generator.integers(0, 2, 4)
            got, expected = ours.step(actions), theirs.step(actions)
            require_equal(got[:4], expected[:4])
            require_equal(_without_times(got[4]), _without_times(expected[4]))
    finally:
        ours.close()
        theirs.close()


def _without_times(infos):
    """Wall-clock times differ, of course."""
    if isinstance(infos, dict):
        return {key: _without_times(value) for key, value in infos.items() if key not in ("t", "_t")}
    return [_without_times(info) for info in infos] if isinstance(infos, list) else infos


def test_statistics_survive_a_partial_reset():
    """SyncVectorEnv takes the mask out of the caller's options, so that its wrapper forgets all envs."""
    envs = wrappers.RecordEpisodeStatistics(envfleet.make("CartPole-v1", 2, backend="serial"))
    envs.reset(seed=0)
    envs.step(np.array([0, 1]))
    envs.reset(options={"reset_mask": np.array([True, False])})
    assert envs.episode_lengths.tolist() == [0, 1]
    envs.close()
