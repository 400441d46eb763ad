"""backend="vector": whatever comes vectorized, behind the same facade."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
from numpy.testing import assert_array_equal

import envfleet
from envfleet.testing import conformance
from envfleet.testing.envs import Act, ScriptedEnv

MODES = list(envfleet.Autoreset)
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())


class FreshObs(ScriptedEnv):
    """Never reuses an observation: SyncVectorEnv does not copy the final one before a same-step reset."""

    def reset(self, *, seed=None, options=None):
        self._state = self._state.copy()
        return super().reset(seed=seed, options=options)


def sync_vector(env_class, own_mode, num_envs, env_kwargs=None, render_mode=None):
    kwargs = [{}] * num_envs if env_kwargs is None else env_kwargs
    more = {} if render_mode is None else {"render_mode": render_mode}
    builders = [partial(env_class, **each, **more) for each in kwargs]
    return SyncVectorEnv(builders, autoreset_mode=own_mode)


def make_vector(env_class, num_envs, *, own_mode=None, autoreset_mode, env_kwargs=None, **kwargs):
    """As envfleet.make, with Gymnasium's SyncVectorEnv around the envs."""
    own = AutoresetMode(autoreset_mode.value) if own_mode is None else own_mode
    factory = partial(sync_vector, FreshObs if env_class is ScriptedEnv else env_class, own)
    arguments = None if env_kwargs is None else {"env_kwargs": env_kwargs}
    return envfleet.make(
        factory, num_envs, backend="vector", autoreset_mode=autoreset_mode, env_kwargs=arguments, **kwargs
    )


# All that do not need to know which env of a vector env failed, or batches of some envs only.
CHECKS = (
    conformance.explicit_reset_does_not_swallow_the_next_step,
    conformance.is_a_vector_env,
    conformance.autoreset_follows_its_mode,
    conformance.stepping_an_ended_episode_is_refused,
    conformance.seeds_follow_the_convention,
    conformance.some_envs_can_be_reset,
    conformance.programs_equal_gymnasium,
    conformance.methods_and_attributes_reach_each_env,
    conformance.any_space_is_carried,
    conformance.actions_belong_to_the_env,
    conformance.closing_is_final,
)


@modes
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, mode):
    check(make_vector, mode)


@pytest.mark.parametrize("own_mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "mode", [envfleet.Autoreset.SAME_STEP, envfleet.Autoreset.DISABLED], ids=lambda mode: mode.name
)
def test_other_modes_are_had_by_resetting_some_envs(mode, own_mode):
    make = partial(make_vector, own_mode=own_mode)
    for check in (
        conformance.explicit_reset_does_not_swallow_the_next_step,
        conformance.autoreset_follows_its_mode,
        conformance.stepping_an_ended_episode_is_refused,
        conformance.programs_equal_gymnasium,
    ):
        check(make, mode)


class CountsResets(FreshObs):
    num_resets = 0

    def reset(self, *, seed=None, options=None):
        self.num_resets += 1
        return super().reset(seed=seed, options=options)


class HidesMask(SyncVectorEnv):
    """Has a reset() of its own, which does not name the mask."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)


class SaysSo(HidesMask):
    def __init__(self, env_fns):
        super().__init__(env_fns)
        self.metadata = {**self.metadata, "reset_mask": True}


class NamesMask(SyncVectorEnv):
    def reset(self, *, seed=None, options=None):
        masks = [options["reset_mask"] for _ in range(1) if options]
        return super().reset(seed=seed, options={"reset_mask": masks[0]} if masks else None)


@pytest.mark.parametrize("vector", [HidesMask, SaysSo, NamesMask])
def test_whether_some_envs_can_be_reset_is_never_tried_out(vector):
    made = []

    def build(num_envs):
        made.append(vector([CountsResets] * num_envs))
        return RecordEpisodeStatistics(made[-1])

    if vector is HidesMask:
        with pytest.raises(envfleet.UsageError, match=r"HidesMask has no reset_mask.*metadata\['reset_mask'\] = True"):
            envfleet.make(build, 3, backend="vector", autoreset_mode="same_step")
        assert [env.closed for env in made] == [True]
        return
    with envfleet.make(build, 3, backend="vector", autoreset_mode="same_step") as pool:
        assert pool.get_attr("num_resets") == (0, 0, 0)
        pool.reset(seed=0)
        pool.reset(options={"reset_mask": np.array([True, False, False])})
        assert pool.get_attr("num_resets") == (2, 1, 1) and len(made) == 1


def test_wrapped_envs_of_gymnasium_are_known():
    made = []

    def build(num_envs):
        made.append(NormalizeObservation(SyncVectorEnv([FreshObs] * num_envs)))
        return made[-1]

    with envfleet.make(build, 2, backend="vector", autoreset_mode="same_step"):
        assert len(made) == 1 and made[0].obs_rms.count < 1, "no reset before the caller's"


def test_modes_that_cannot_be_had_are_refused():
    make = partial(make_vector, ScriptedEnv, 2)
    with pytest.raises(envfleet.UsageError, match="mode 'same_step'; autoreset_mode='next_step' is not available"):
        make(own_mode=AutoresetMode.SAME_STEP, autoreset_mode=envfleet.Autoreset.NEXT_STEP)
    with pytest.raises(envfleet.UsageError, match="mode 'disabled'; autoreset_mode='next_step' is not available"):
        make(own_mode=AutoresetMode.DISABLED, autoreset_mode=envfleet.Autoreset.NEXT_STEP)
    with pytest.raises(envfleet.UsageError, match="is not available: CartPoleVectorEnv has no reset_mask"):
        envfleet.make("CartPole-v1", 3, backend="vector", autoreset_mode="same_step")


def test_what_a_vector_env_cannot_do_is_refused():
    make = partial(make_vector, ScriptedEnv, 3, autoreset_mode=envfleet.Autoreset.NEXT_STEP)
    for arguments in ({"batch_size": 2}, {"on_env_error": "restart"}, {"num_workers": 2}, {"max_episode_steps": 5}):
        with pytest.raises(envfleet.UsageError, match=next(iter(arguments))):
            make(**arguments)
    with pytest.raises(envfleet.UsageError, match=r"needs a factory of gymnasium\.vector\.VectorEnv; got ScriptedEnv"):
        envfleet.make(lambda num_envs: ScriptedEnv(), 3, backend="vector")
    with pytest.raises(envfleet.UsageError, match="not registered with a vector env"):
        envfleet.make("MountainCar-v0", 3, backend="vector")


@modes
def test_a_vector_env_that_raises_loses_all_episodes(mode):
    with make_vector(ScriptedEnv, 2, autoreset_mode=mode) as pool:
        pool.reset(seed=0)
        pool.step(np.array([Act.GO_ON, Act.GO_ON]))
        with pytest.raises(envfleet.EnvFailed, match="all its episodes are lost") as raised:
            pool.step(np.array([Act.RAISE, Act.GO_ON]))
        assert "told to fail in step" in raised.value.child_traceback
        obs, rewards, terminated, truncated, infos = pool.recv()
        assert_array_equal(truncated, [True, True])
        assert not terminated.any() and not rewards.any()
        assert "told to fail" in infos["env_error"][1]
        last = np.stack(infos["final_obs"]) if mode is envfleet.Autoreset.SAME_STEP else obs
        assert_array_equal(last[:, 1], [1, 1])
        if mode is envfleet.Autoreset.DISABLED:
            pool.reset()
        obs, *_ = pool.step(np.array([Act.GO_ON, Act.GO_ON]))
        assert_array_equal(obs[:, 1], [0, 0] if mode is envfleet.Autoreset.NEXT_STEP else [1, 1])


def test_ids_with_a_vector_entry_point():
    reference = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    with envfleet.make("CartPole-v1", 3, backend="vector") as pool:
        assert_array_equal(pool.reset(seed=4)[0], reference.reset(seed=4)[0])
        for _ in range(30):
            actions = np.ones(3, np.int64)
            for got, expected in zip(pool.step(actions)[:4], reference.step(actions)[:4], strict=True):
                assert_array_equal(got, expected)
    reference.close()
