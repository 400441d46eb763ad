"""EnvPool's own tasks, behind our facade; they need EnvPool."""

import warnings

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet

envpool = pytest.importorskip("envpool", reason="needs envpool")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # EnvPool's spaces lose precision, and Gymnasium says so


def reference(task, num_envs, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return envpool.make(task, env_type="gymnasium", num_envs=num_envs, seed=seed)


def test_it_is_envpools_own_with_its_seeds():
    theirs = reference("CartPole-v1", 3, 7)
    with envfleet.make("envpool:CartPole-v1", 3) as pool:
        assert pool.single_action_space.n == 2
        pool.reset(seed=1)
        for _ in range(2):  # a reset with seeds starts all over
            assert_array_equal(pool.reset(seed=7)[0], theirs.reset()[0])
            for _ in range(40):
                *got, infos = pool.step(np.ones(3, np.int64))
                *expected, expected_infos = theirs.step(np.ones(3, np.int32))
                for each, each_expected in zip(got, expected, strict=True):
                    assert_array_equal(each, each_expected)
                assert_array_equal(infos["elapsed_step"], expected_infos["elapsed_step"])
                assert infos["_elapsed_step"].all() and "env_id" not in infos
            theirs = reference("CartPole-v1", 3, 7)


def test_same_step_resets_those_that_ended():
    with (
        envfleet.make("envpool:CartPole-v1", 4, autoreset_mode="same_step", seed=2) as same,
        envfleet.make("envpool:CartPole-v1", 4, autoreset_mode="next_step", seed=2) as following,
    ):
        assert_array_equal(same.reset()[0], following.reset()[0])
        ended = np.zeros(4, np.bool_)
        while not ended.any():
            got, expected = same.step(np.ones(4, np.int64)), following.step(np.ones(4, np.int64))
            ended = expected[2]
            assert_array_equal(got[2], expected[2])
            assert_array_equal(got[1], expected[1])
            assert_array_equal(got[0][~ended], expected[0][~ended])
        for row in np.flatnonzero(ended):
            assert_array_equal(got[4]["final_obs"][row], expected[0][row])
        first = following.step(np.ones(4, np.int64))[0]
        assert_array_equal(got[0][ended], first[ended])
        assert_array_equal(got[4]["_final_obs"], ended)


def test_some_can_be_reset_without_seeds():
    with envfleet.make("envpool:CartPole-v1", 3, autoreset_mode="disabled") as pool:
        pool.reset(seed=0)
        before = pool.step(np.ones(3, np.int64))[0]
        mask = np.array([False, True, False])
        obs, infos = pool.reset(options={"reset_mask": mask})
        assert_array_equal(obs[~mask], before[~mask])
        assert_array_equal(infos["_elapsed_step"], mask)
        with pytest.raises(envfleet.UsageError, match="EnvPool takes seeds only when it is built"):
            pool.reset(seed=3, options={"reset_mask": mask})
        pool.step(np.ones(3, np.int64))  # nothing was left in flight


def test_envs_are_drawn():
    with envfleet.make("envpool:CartPole-v1", 3, render_mode="rgb_array") as pool:
        pool.reset(seed=0)
        frames = pool.render()
        assert len(frames) == 3 and frames[2].ndim == 3
        chosen = pool.render([2, 0])
        assert_array_equal(chosen[0], frames[2])
        assert_array_equal(chosen[1], frames[0])
    with envfleet.make("envpool:CartPole-v1", 3) as pool, pytest.raises(envfleet.UsageError, match="render_mode"):
        pool.render()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("num_envs", "num_envs"),
        ("batch_size", "batch_size"),
        ("seed", "seed"),
        ("env_seed", "seed"),
        ("num_threads", "num_workers"),
    ],
)
def test_arguments_of_make_are_not_for_env_kwargs(name, ours):
    with pytest.raises(envfleet.UsageError, match=f"must not have {name}: make.. has an argument {ours}"):
        envfleet.make("envpool:CartPole-v1", 2, env_kwargs={name: 1})


def test_unknown_tasks_and_other_backends_are_refused():
    with pytest.raises(envfleet.UsageError, match="no task 'NoSuch-v1'"):
        envfleet.make("envpool:NoSuch-v1", 2)
    with pytest.raises(envfleet.UsageError, match="backend must be 'auto' or 'vector'"):
        envfleet.make("envpool:CartPole-v1", 2, backend="process")
