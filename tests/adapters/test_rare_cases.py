"""What a hostile reader found: actions in parts, envs that fail, masks, and arrays that others write to."""

from functools import partial

import numpy as np
import pytest
from gymnasium import spaces

import envfleet
from envfleet.adapters.gym021 import Gym021
from envfleet.adapters.gymnasium029 import Gymnasium029
from tests.support.envs.counting_env import CountingEnv

PAIR = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(3)))


def pool(*envs, **settings):
    return envfleet.make(list(envs), autoreset_mode="same_step", backend="serial", **settings)


def zeros(num_envs=2):
    return np.zeros(num_envs, np.int64)


@pytest.fixture
def tianshou():
    pytest.importorskip("tianshou")
    from envfleet.adapters.tianshou import TianshouVectorEnv

    return TianshouVectorEnv


@pytest.fixture
def torchrl():
    pytest.importorskip("torchrl")
    from envfleet.adapters.torchrl import TorchRLEnv

    return TorchRLEnv


@pytest.fixture
def sb3():
    pytest.importorskip("stable_baselines3")
    from envfleet.adapters.sb3 import SB3VecEnv

    return SB3VecEnv


@pytest.fixture
def rl_games():
    pytest.importorskip("rl_games")
    from envfleet.adapters.rl_games import RLGamesVecEnv

    return RLGamesVecEnv


@pytest.mark.parametrize("name", ["rl_games", "tianshou", "sb3"])
def test_actions_in_parts_reach_their_envs(request, name):
    """As an array with a row for each env, though the batch of a Tuple space has an array for each part."""
    adapter = request.getfixturevalue(name)
    made = pool(*[partial(CountingEnv, action_space=PAIR)] * 2)
    envs = adapter(made)
    envs.reset()
    envs.step(np.array([[0, 1], [2, 2]]))
    assert [tuple(map(int, action)) for action in made.call("last_action")] == [(0, 1), (2, 2)]
    envs.close()


@pytest.mark.parametrize(
    "actions",
    [
        ((0, 1), (2, 2)),
        [(0, 1), (2, 2)],
        (np.array([0, 2]), np.array([1, 2])),
        ([0, 2], [1, 2]),
        np.array([[0, 1], [2, 2]]),
    ],
    ids=["tuple of tuples", "list", "batch", "batch of lists", "array"],
)
def test_a_tuple_of_actions_is_read_by_what_is_in_it(sb3, actions):
    made = pool(*[partial(CountingEnv, action_space=PAIR)] * 2)
    envs = sb3(made)
    envs.reset()
    envs.step(actions)
    assert [tuple(map(int, action)) for action in made.call("last_action")] == [(0, 1), (2, 2)]
    envs.close()


def test_a_tuple_of_actions_in_nested_parts(sb3):
    """As many parts as envs, and tuples in both forms: their depth tells them apart."""
    made = pool(*[partial(CountingEnv, action_space=spaces.Tuple((PAIR, PAIR)))] * 2)
    envs = sb3(made)
    envs.reset()
    parts = np.array([0, 1])
    for actions in ((((0, 1), (2, 2)), ((1, 1), (0, 2))), ((parts, 1 - parts // 2), (2 - 2 * parts, 2 + 0 * parts))):
        envs.step(actions)
        got = [tuple(tuple(map(int, part)) for part in action) for action in made.call("last_action")]
        assert got == [((0, 1), (2, 2)), ((1, 1), (0, 2))]
    envs.close()


def test_scores_of_rl_games_are_those_of_the_last_step(rl_games):
    envs = rl_games(pool(partial(CountingEnv, 2), partial(CountingEnv, 9)))
    envs.reset()
    envs.step(zeros())
    *_, done, infos = envs.step(zeros())
    assert done.tolist() == [True, False] and infos["scores"].tolist() == [20.0, 20.0]
    envs.close()


def test_an_env_that_cannot_be_reset_either(tianshou):
    """Its row is truncated, and has no first observation of a next episode."""
    failing = partial(CountingEnv, fail_at=2, fails_to_reset=True)
    envs = tianshou(pool(failing, partial(CountingEnv, 2), on_env_error="restart", max_env_restarts=1))
    envs.reset()
    envs.step(zeros())
    with pytest.raises(envfleet.EnvFailed):
        for _ in range(4):
            obs, *_, truncated, infos = envs.step(zeros())
            assert not np.isnan(obs).any()
            if truncated[0]:
                assert "told to fail" in infos[0]["env_error"]
            envs.reset([0, 1])
    envs.close()


def test_after_a_failure_all_envs_or_some_can_be_reset(tianshou):
    envs = tianshou(pool(partial(CountingEnv, 1), partial(CountingEnv, 9, fail_at=2)))
    envs.reset()
    envs.step(zeros())  # env 0 has ended
    with pytest.raises(envfleet.EnvFailed, match="told to fail"):
        envs.step(zeros(1), [1])
    with pytest.raises(envfleet.StepOnEndedEpisode, match=r"envs \[1\] have failed"):
        envs.step(zeros(1), [1])
    assert envs.reset([1])[0][:, 1].tolist() == [0]
    assert envs.reset()[0][:, 1].tolist() == [0, 0]
    assert envs.step(zeros())[0][:, 1].tolist() == [1, 1]
    envs.close()


def test_a_reward_in_the_infos_counts_only_where_rewards_are_clipped():
    envs = Gym021(pool(partial(CountingEnv, 3, info={"reward": -7.0})))
    envs.reset()
    for _ in range(3):
        *_, infos = envs.step(zeros(1))
    assert infos[0]["episode"]["r"] == 6.0
    envs.close()


def test_a_reset_of_some_envs_keeps_the_statistics_of_the_others():
    envs = Gymnasium029(pool(partial(CountingEnv, 5), partial(CountingEnv, 5)))
    envs.reset()
    for _ in range(3):
        envs.step(zeros())
    envs.reset(options={"reset_mask": np.array([True, False])})
    for _ in range(2):
        *_, infos = envs.step(zeros())
    assert (infos["final_info"][1]["episode"]["r"], infos["final_info"][1]["episode"]["l"]) == (15.0, 5)
    envs.close()


def test_options_with_arrays(sb3):
    envs = sb3([CountingEnv, CountingEnv], backend="serial")
    envs.set_options([{"x": np.zeros(2)}, {"x": np.ones(2)}])
    assert envs.reset()[:, 1].tolist() == [0, 0]
    envs.close()
    with pytest.raises(envfleet.UsageError, match="batch_size"):
        sb3([CountingEnv, CountingEnv], batch_size=1)


def test_torchrl_resets_none_and_keeps_its_own_observations(torchrl):
    import torch
    from tensordict import TensorDict

    envs = torchrl(pool(CountingEnv, CountingEnv))
    envs.set_seed(3)
    some = TensorDict({"_reset": torch.tensor([[True], [False]])}, [2])
    assert envs.reset(some)["observation"][:, 1].tolist() == [0, 0]
    state = envs.reset()
    before = state["observation"].clone()
    state["_reset"] = torch.zeros(2, 1, dtype=torch.bool)
    assert torch.equal(envs.reset(state)["observation"], before)
    state = envs.reset()
    state["observation"].zero_()
    state = envs.rand_action(state)
    state["_step"] = torch.tensor([True, False])
    before = before[1] + torch.tensor([1.0, 0.0])  # one more episode
    assert torch.equal(envs.step(state)["next"]["observation"][1], before)
    envs.close()


def test_skrl_takes_numbers_and_vectors_together():
    pytest.importorskip("skrl")
    import torch

    from envfleet.adapters.skrl import SkrlEnv

    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2,), np.float32))
    made = pool(*[partial(CountingEnv, action_space=space)] * 2)
    envs = SkrlEnv(made)
    envs.reset()
    envs.step(torch.zeros(2, 3))
    assert made.call("last_action")[1]["b"].shape == (2,)
    envs.close()


def test_a_ragged_action_of_dm_env_is_refused_in_words():
    pytest.importorskip("dm_env")
    from envfleet.adapters.dm_env import DmEnv

    env = DmEnv(pool(CountingEnv))
    env.reset()
    with pytest.raises(envfleet.InvalidAction):
        env.step([1, [2, 3]])
    env.close()


class FailsToReset(CountingEnv):
    """Its second step raises, and so do the `num_failures` resets that follow, in new envs, too: a file counts them."""

    def __init__(self, path, num_failures):
        super().__init__(num_steps=3)
        self._path, self._num_failures = path, num_failures

    def reset(self, *, seed=None, options=None):
        if self._path.exists() and len(self._path.read_text()) < self._num_failures:
            self._path.write_text(self._path.read_text() + ".")
            raise RuntimeError("no reset yet")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self._step == 1 and not self._path.exists():
            self._path.write_text("")
            raise RuntimeError("told to fail")
        return super().step(action)


def fails_to_reset(path, num_failures, backend="serial"):
    path.unlink(missing_ok=True)
    envs = [partial(FailsToReset, path, num_failures), partial(CountingEnv, 4)]
    return envfleet.make(
        envs, autoreset_mode="same_step", backend=backend, on_env_error="restart", max_env_restarts=num_failures
    )


def played_over_failure(envs):
    """Observations and ends of four steps, the second of which fails in env 0."""
    envs.reset()
    steps = [envs.step(zeros()) for _ in range(4)]
    envs.close()
    return [step[0][:, 1].tolist() for step in steps], [step[-2].tolist() for step in steps], steps


@pytest.mark.parametrize("name", ["rl_games", "sb3", Gym021, Gymnasium029])
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_reset_that_fails_twice_after_a_failure(request, tmp_path, name, backend):
    """Env 0 begins its next episode in the step that failed, as if its first reset had not failed, too."""
    adapter = request.getfixturevalue(name) if isinstance(name, str) else name
    obs, ended, steps = played_over_failure(adapter(fails_to_reset(tmp_path / "resets", 2, backend)))
    assert obs == [[1, 1], [0, 2], [1, 3], [2, 0]]
    assert ended == [[False, False], [True, False], [False, False], [False, adapter is not Gymnasium029]]
    infos = steps[1][-1]
    if isinstance(infos, list):
        assert "told to fail" in infos[0]["env_error"] and infos[0]["terminal_observation"].tolist() == [1, 1]
        assert infos[0]["TimeLimit.truncated"]
    else:
        assert "told to fail" in infos["env_error"][0]
    if adapter is Gymnasium029:
        assert infos["final_observation"][0].tolist() == [1, 1] and infos["final_observation"][1] is None


@pytest.mark.parametrize("name", ["rl_games", "sb3", Gym021, Gymnasium029])
def test_a_reset_that_never_succeeds_names_its_env(request, tmp_path, name):
    adapter = request.getfixturevalue(name) if isinstance(name, str) else name
    path = tmp_path / "resets"
    made = pool(partial(CountingEnv, 9), partial(FailsToReset, path, 99), on_env_error="restart", max_env_restarts=2)
    envs = adapter(made)
    envs.reset()
    envs.step(zeros())
    for _ in range(2):  # each step tries a reset first
        with pytest.raises(envfleet.EnvFailed, match=r"env 1 raised RuntimeError: no reset yet \(\d failures"):
            envs.step(zeros())
    path.write_text("." * 99)
    assert envs.step(zeros())[0][:, 1].tolist() == [3, 1]
    envs.close()
