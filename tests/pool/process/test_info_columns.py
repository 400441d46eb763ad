"""Numbers that an env declares for its infos travel as arrays; callers see no difference."""

import numpy as np
import pytest

import envfleet
from envfleet.testing import Act, ScriptedEnv
from envfleet.testing.programs import require_equal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_spawners")]


class DeclaringEnv(ScriptedEnv):
    """The same infos as ScriptedEnv, two numbers besides, one of which is not always there, and an array."""

    def __init__(self, declared=("lives", "height", "ram"), lives=3, **kwargs):
        super().__init__(**kwargs)
        self._start_lives = lives
        dtypes = {"lives": np.dtype(np.int64), "height": np.dtype(np.float64), "ram": np.dtype((np.uint8, (2, 3)))}
        self.info_columns = {name: dtypes[name] for name in declared}

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return obs, info | {"lives": 3, "height": 0.5, "ram": np.full((2, 3), 7, np.uint8)}

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        height = {"height": float(obs[1]) + 0.5} if obs[1] % 3 else {}
        ram = {"ram": np.arange(6, dtype=np.uint8).reshape(2, 3) + np.uint8(obs[1])}
        return obs, reward, terminated, truncated, info | height | {"lives": self._start_lives} | ram


@pytest.mark.parametrize("mode", list(envfleet.Autoreset), ids=lambda mode: mode.name.lower())
def test_callers_see_no_difference(mode):
    """Also where envs fail, where only some are reset, and at the ends of episodes."""
    arguments = {"autoreset_mode": mode, "on_env_error": "restart", "max_env_restarts": 100, "num_workers": 2}
    generator = np.random.default_rng(2)
    with (
        envfleet.make(DeclaringEnv, 4, backend="process", **arguments) as pool,
        envfleet.make(DeclaringEnv, 4, backend="process", env_kwargs={"declared": ()}, **arguments) as plain,
    ):
        require_equal(pool.reset(seed=3), plain.reset(seed=3))
        for step in range(40):
            actions = generator.choice([Act.GO_ON] * 12 + [Act.TERMINATE, Act.TERMINATE, Act.TRUNCATE, Act.RAISE], 4)
            got, expected = pool.step(actions), plain.step(actions)
            require_equal(got, expected)
            mask = expected[2] | expected[3] if mode is envfleet.Autoreset.DISABLED else np.arange(4) == step % 4
            if mask.any() and (mode is envfleet.Autoreset.DISABLED or step % 7 == 0):
                require_equal(pool.reset(options={"reset_mask": mask}), plain.reset(options={"reset_mask": mask}))


def test_envs_that_declare_different_numbers():
    kwargs = [{"declared": ("lives", "height")}, {"declared": ("height",)}, {"declared": ()}]
    with (
        envfleet.make(DeclaringEnv, 3, backend="process", env_kwargs=kwargs) as pool,
        envfleet.make(DeclaringEnv, 3, backend="serial", env_kwargs=kwargs) as plain,
    ):
        require_equal(pool.reset(seed=3), plain.reset(seed=3))
        for _ in range(4):
            require_equal(pool.step(np.zeros(3, int)), plain.step(np.zeros(3, int)))


@pytest.mark.parametrize("wrong", ["three", 2**70, None])
def test_a_broken_promise_is_a_failure_of_the_env(wrong):
    with envfleet.make(DeclaringEnv, 2, backend="process", env_kwargs=[{}, {"lives": wrong}]) as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.EnvFailed, match=f"declared 'lives' as a number of int64; got {wrong!r}") as caught:
            pool.step(np.array([Act.GO_ON, Act.GO_ON]))
        assert caught.value.last_action == Act.GO_ON
        obs, _, _, truncated, _ = pool.recv()
        assert truncated.tolist() == [False, True]
        assert obs[1, 0] == np.random.default_rng(1).random(), "the observation before that step"


def test_masks_are_arrays_of_their_own():
    with envfleet.make(DeclaringEnv, 2, backend="process") as pool:
        info = pool.reset(seed=0)[1]
        info["_lives"][:] = False
        assert info["_height"].all()
