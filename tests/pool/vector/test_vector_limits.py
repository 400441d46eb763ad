"""backend="vector": what a vector env cannot do, or does in its own way."""

import os
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.testing import assert_array_equal

import envfleet
from tests.support.waiting import is_running

pytestmark = pytest.mark.slow

GO_ON = np.zeros(2, np.int64)
FIRST = np.array([True, False])
SECOND = np.array([False, True])
modes = pytest.mark.parametrize("mode", list(envfleet.Autoreset), ids=lambda mode: mode.name.lower())


class Counter(gymnasium.Env):
    """Counts its steps up to `last`. Action 1: raise; 2: end the process."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = spaces.Box(-1e9, 1e9, (1,))
    action_space = spaces.Discrete(3)
    level = 0

    def __init__(self, render_mode=None, last=3):
        self.render_mode = render_mode
        self._last = last
        self.num_calls = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 2:
            os._exit(1)
        if action == 1:
            raise RuntimeError("told to fail")
        self._count += 1
        return np.full(1, self._count, np.float32), 1.0, self._count == self._last, False, {}

    def bump(self, by=1):
        self.num_calls += by
        return self.num_calls

    def render(self):
        self.num_calls += 1
        return np.zeros((2, 2, 3), np.uint8)


class Plain(VectorEnv):
    """Reuses its arrays, takes an int as a seed, and does not know reset_mask; `info` is its info."""

    def __init__(self, num_envs, autoreset_mode=AutoresetMode.NEXT_STEP, info=None, render_mode=None):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.render_mode = render_mode
        self.single_observation_space = spaces.Box(-1e9, 1e9, (1,))
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.info = info
        self._results = [np.zeros((num_envs, 1), np.float32), np.zeros(num_envs)]
        self._results += [np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.bool_), np.zeros(num_envs)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._results[0][:] = self.np_random.random()
        return self._results[0], {}

    def step(self, actions):
        obs, rewards, terminated, truncated, numbers = self._results
        for each in (obs, rewards, numbers):
            each += 1
        terminated[:] = rewards % 2 == 0
        truncated[:] = terminated
        return obs, rewards, terminated, truncated, {"x": numbers} if self.info is None else self.info


def sync(num_envs, autoreset_mode=AutoresetMode.NEXT_STEP, render_mode=None):
    return SyncVectorEnv([partial(Counter, render_mode)] * num_envs, autoreset_mode=autoreset_mode)


def async_pickling(num_envs):
    """(Shared memory would leave multiprocessing's own file open.)"""
    return AsyncVectorEnv([Counter] * num_envs, shared_memory=False)


def make(build, num_envs=2, **arguments):
    return envfleet.make(build, num_envs, backend="vector", **arguments)


# -- resets --


def test_a_reset_that_would_swallow_a_step_is_refused():
    for mode in ("same_step", "disabled"):
        with pytest.raises(envfleet.UsageError, match="use shared_memory=True, or build it with the autoreset_mode"):
            make(async_pickling, 1, autoreset_mode=mode)
    with make(async_pickling) as pool:
        pool.reset()
        with pytest.raises(envfleet.UsageError, match="use shared_memory=True"):
            pool.reset(options={"reset_mask": FIRST})
        for _ in range(3):
            pool.step(GO_ON)
        with pytest.raises(envfleet.UsageError, match="use shared_memory=True"):
            pool.reset()
        assert_array_equal(pool.step(GO_ON)[0], [[0], [0]])  # the reset of the next step
        pool.reset()
        assert_array_equal(pool.step(GO_ON)[0], [[1], [1]])


@pytest.mark.parametrize("build", ["CartPole-v1", Plain], ids=["id", "factory"])
def test_reset_mask_is_refused_where_it_would_reset_all(build):
    with make(build) as pool:
        pool.reset(seed=0)
        before = pool.step(GO_ON)[0]
        with pytest.raises(envfleet.UsageError, match=r"some envs cannot be reset alone: .* has no reset_mask"):
            pool.reset(options={"reset_mask": FIRST})
        with make(build) as other:
            other.reset(seed=0)
            assert_array_equal(other.step(GO_ON)[0], before)
            assert_array_equal(pool.step(GO_ON)[0], other.step(GO_ON)[0])  # nothing is in flight, nothing was reset


def test_one_seed_only():
    with make("CartPole-v1") as pool:
        first = pool.reset(seed=4)[0]
        assert_array_equal(pool.reset(seed=[4, 5])[0], first)
        with pytest.raises(envfleet.UsageError, match="takes one seed only: pass an int"):
            pool.reset(seed=[4, 9])
        pool.step(GO_ON)


# -- results --


def test_nothing_that_the_caller_holds_is_overwritten():
    with make(Plain) as pool:
        pool.reset(seed=0)
        *held, infos = pool.step(GO_ON)
        held.append(infos["x"])
        copies = [np.copy(each) for each in held]
        pool.step(GO_ON)
        for each, expected in zip(held, copies, strict=True):
            assert_array_equal(each, expected)


def test_the_caller_may_write_into_what_it_holds():
    with make(sync) as pool:
        pool.reset(seed=0)
        pool.step(GO_ON)[0][:] = -1
        obs, _ = pool.reset(options={"reset_mask": FIRST})
        assert_array_equal(obs, [[0], [1]])
        obs[:] = -1
        assert_array_equal(pool.reset(options={"reset_mask": FIRST})[0], [[0], [1]])


def test_infos_that_have_no_rows():
    info = {
        "fps": 30,
        "version": "1.0",
        "nothing": None,
        "ragged": [[1], [1, 2]],
        "names": ["a", "bcd"],
        "three": np.arange(3),
        "nested": {"depth": 2, "rows": np.arange(2)},
    }
    with make(partial(Plain, info=info)) as pool:
        pool.reset()
        infos = pool.step(GO_ON)[4]
    assert_array_equal(infos["fps"], [30, 30])
    assert infos["version"].tolist() == ["1.0", "1.0"]
    assert infos["nothing"].tolist() == [None, None]
    assert infos["ragged"].tolist() == [[1], [1, 2]]
    assert infos["names"].tolist() == ["a", "bcd"]
    assert_array_equal(infos["three"][1], [0, 1, 2])
    assert_array_equal(infos["nested"]["depth"], [2, 2])
    assert_array_equal(infos["nested"]["rows"], [0, 1])
    assert set(infos["nested"]) == {"depth", "rows"}
    assert all(infos[f"_{key}"].all() for key in info)


def test_infos_within_infos_are_gymnasiums():
    def build(num_envs):
        return RecordEpisodeStatistics(gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync"))

    theirs = build(2)
    theirs.reset(seed=0)
    with make(build) as pool:
        pool.reset(seed=0)
        expected = {}
        while "episode" not in expected:
            infos, expected = pool.step(GO_ON)[4], theirs.step(GO_ON)[4]
    assert set(infos) == set(expected)
    assert set(infos["episode"]) == set(expected["episode"])
    assert_array_equal(infos["episode"]["l"], expected["episode"]["l"])
    theirs.close()


def test_statistics_of_a_wrapper_are_those_of_each_env():
    """Gymnasium's wrapper loses the mask, and with it the other envs' statistics."""

    def build(num_envs):
        ends = [partial(Counter, last=3 + env_id) for env_id in range(num_envs)]
        return RecordEpisodeStatistics(SyncVectorEnv(ends))

    with make(build, autoreset_mode="same_step") as pool:
        pool.reset()
        lengths = []
        for _ in range(12):
            infos = pool.step(GO_ON)[4]
            if "final_info" in infos:
                ended = infos["_final_info"]
                lengths += zip(np.flatnonzero(ended), infos["final_info"]["episode"]["l"][ended], strict=True)
    assert lengths == [(0, 3), (1, 4), (0, 3), (1, 4), (0, 3), (0, 3), (1, 4)]


# -- calls --


def test_only_chosen_envs_are_called_and_drawn():
    with make(sync, render_mode="rgb_array") as pool:
        pool.reset()
        assert pool.call_some([1], "bump", by=5) == (5,)
        assert len(pool.render([1])) == 1
        assert pool.get_attr("num_calls") == (0, 6)


def test_an_env_that_cannot_be_called_alone():
    with make(lambda num_envs: AsyncVectorEnv([partial(Counter, "rgb_array")] * num_envs, shared_memory=False)) as pool:
        pool.reset()
        with pytest.raises(envfleet.UsageError, match="AsyncVectorEnv calls all its envs or none"):
            pool.call_some([1], "bump")
        assert pool.get_attr("num_calls") == (0, 0)
        assert pool.call_some([1, 0], "bump") == (1, 1)
        assert pool.render([1])[0].shape == (2, 2, 3)


def test_drawing_needs_a_render_mode():
    for build in (sync, Plain, "CartPole-v1"):
        with make(build) as pool:
            pool.reset()
            with pytest.raises(envfleet.UsageError, match="without a render_mode"):
                pool.render()
    with make(Plain, render_mode="rgb_array") as pool, pytest.raises(envfleet.UsageError, match="does not draw"):
        pool.render()


def test_wrapped_envs_are_called_too():
    with make(lambda num_envs: RecordEpisodeStatistics(sync(num_envs))) as pool:
        pool.set_attr("level", [1, 2])
        assert pool.get_attr("level") == (1, 2)


# -- failures --


def test_after_a_failure_in_disabled_mode_the_caller_must_reset():
    with make(sync, autoreset_mode="disabled") as pool:
        pool.reset()
        with pytest.raises(envfleet.EnvFailed):
            pool.step(np.array([1, 0]))
        assert_array_equal(pool.recv()[3], [True, True])
        with pytest.raises(envfleet.StepOnEndedEpisode):
            pool.step(GO_ON)
        pool.recv()
        pool.reset()
        assert_array_equal(pool.step(GO_ON)[0], [[1], [1]])


@modes
def test_after_a_failure_a_masked_reset_resets_all(mode):
    with make(sync, autoreset_mode=mode) as pool:
        pool.reset()
        pool.step(GO_ON)
        with pytest.raises(envfleet.EnvFailed):
            pool.step(np.array([1, 0]))
        pool.recv()
        assert_array_equal(pool.reset(options={"reset_mask": SECOND})[0], [[0], [0]])
        assert_array_equal(pool.step(GO_ON)[0], [[1], [1]])


@modes
def test_attributes_outlive_a_failure(mode):
    with make(sync, autoreset_mode=mode) as pool:
        pool.set_attr("level", [3, 4])
        pool.reset()
        with pytest.raises(envfleet.EnvFailed):
            pool.step(np.array([1, 0]))
        pool.recv()
        pool.reset()
        assert pool.get_attr("level") == (3, 4)


def test_a_vector_env_that_cannot_be_built_again():
    made = []

    def build(num_envs, autoreset_mode):
        if made:
            raise OSError("no more of them")
        made.append(sync(num_envs, autoreset_mode))
        return made[0]

    with make(build, autoreset_mode="same_step") as pool:
        pool.reset()
        pool.step(GO_ON)
        with pytest.raises(envfleet.EnvFailed, match="told to fail"):
            pool.step(np.array([1, 0]))
        obs, _, _, truncated, infos = pool.recv()
        assert_array_equal(obs, [[1], [1]])
        assert truncated.all() and "then, in reset: OSError: no more of them" in infos["env_error"][0]
        with pytest.raises(envfleet.EnvFailed, match="no more of them"):
            pool.step(GO_ON)


def test_a_failed_first_reset_has_objects_for_each_env():
    class Talking(Counter):
        observation_space = spaces.Dict(number=spaces.Box(0, 1, (2,)), text=spaces.Text(5))

        def reset(self, *, seed=None, options=None):
            raise RuntimeError("told to fail")

    with make(lambda num_envs: SyncVectorEnv([Talking] * num_envs)) as pool:
        with pytest.raises(envfleet.EnvFailed, match="told to fail"):
            pool.reset()
        obs = pool.recv()[0]
    assert obs["text"] == (None, None)
    assert_array_equal(obs["number"], np.zeros((2, 2)))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium says that it closes while it waits
def test_no_child_is_left_when_one_has_died():
    pids = []  # of each vector env; its process objects are closed with it

    def build(num_envs):
        env = async_pickling(num_envs)
        pids.append([process.pid for process in env.processes])
        return env

    with make(build) as pool:
        pool.reset()
        with pytest.raises(envfleet.EnvFailed):
            pool.step(np.array([2, 0]))
        pool.recv()
        pool.step(GO_ON)
        assert not any(map(is_running, pids[0]))
        assert all(map(is_running, pids[1]))
    assert not any(is_running(pid) for each in pids for pid in each)


def test_what_is_refused_is_closed():
    made = []

    def build(num_envs):
        made.append(async_pickling(num_envs + 1))
        return made[0]

    with pytest.raises(envfleet.UsageError, match="has 3 envs instead of num_envs=2"):
        make(build)
    assert made[0].closed
    with pytest.raises(envfleet.UsageError, match="got NoneType"):
        make(lambda num_envs: None)


# -- ids --


def test_ids_with_a_module(tmp_path, monkeypatch):
    lines = [
        "import gymnasium",
        "name = 'gymnasium.envs.classic_control.cartpole:CartPole'",
        "gymnasium.register('OfAModule-v0', entry_point=name + 'Env', vector_entry_point=name + 'VectorEnv')",
    ]
    (tmp_path / "registers_a_vector_env.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with make("registers_a_vector_env:OfAModule-v0") as pool:
            assert pool.reset()[0].shape == (2, 4)
        with pytest.raises(envfleet.UsageError, match="names a module that cannot be imported"):
            make("no_such_module_anywhere:OfAModule-v0")
    finally:
        gymnasium.registry.pop("OfAModule-v0", None)


# -- wrong results --


class WrongSteps(Plain):
    """What reset() and step() return is given."""

    def __init__(self, num_envs, first=None, result=None):
        super().__init__(num_envs)
        self.single_observation_space = spaces.Box(0, 255, (1,), np.uint8)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._first, self._result = first, result

    def reset(self, *, seed=None, options=None):
        return (np.full((2, 1), 7, np.uint8), {}) if self._first is None else self._first

    def step(self, actions):
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


OBS, NO = np.zeros((2, 1), np.uint8), np.zeros(2, np.bool_)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ((OBS, NO, NO, NO, None), "info of its step() must be a dict; got None"),
        ((OBS, NO, NO, {}), "must return (obs, reward, terminated, truncated, info); got a tuple of 4"),
        ((OBS, None, NO, NO, {}), "rewards of its step() must be an array of 2 numbers; got None"),
        ((OBS, np.zeros((2, 2)), NO, NO, {}), "rewards of its step() must be an array of 2 numbers; got an array"),
        ((OBS, np.zeros(2, complex), NO, NO, {}), "rewards of its step() must be an array of 2 numbers; got an array"),
        ((OBS, NO, [None, False], NO, {}), "terminations of its step() must be an array of 2 numbers; got a list"),
        ((OBS, NO, NO, True, {}), "truncations of its step() must be an array of 2 numbers; got bool True"),
        ((np.full((2, 1), 0.5), NO, NO, NO, {}), "dtype uint8, as its space says; got dtype float64"),
        ((OBS[:1], NO, NO, NO, {}), "shape (2, 1) and dtype uint8, as its space says; got shape (1, 1)"),
        (GeneratorExit("told to"), "GeneratorExit: told to"),
        (SystemExit(3), "SystemExit: 3"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_wrong_step_is_a_failure(result, text):
    with make(partial(WrongSteps, result=result)) as pool:
        pool.reset()
        with pytest.raises(envfleet.EnvFailed) as caught:
            pool.step(GO_ON)
        assert text in str(caught.value.args[0]) and "Traceback" in caught.value.child_traceback
        obs, _, _, truncated, infos = pool.recv()
        assert obs.tolist() == [[7], [7]] and obs.dtype == np.uint8 and truncated.all()
        assert text in infos["env_error"][0]


@pytest.mark.parametrize(
    ("first", "text"),
    [
        ((OBS, None), "info of its reset() must be a dict; got None"),
        (OBS[0], "its reset() must return (obs, info); got an array"),
        ((np.full((2, 1), 0.5), {}), "dtype uint8, as its space says; got dtype float64"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_wrong_reset_is_a_failure(first, text):
    with make(partial(WrongSteps, first=first)) as pool, pytest.raises(envfleet.EnvFailed) as caught:
        pool.reset()
    assert text in str(caught.value.args[0])


class FloatImages(Counter):
    """Its last observation is not of its space."""

    observation_space = spaces.Box(0, 255, (1,), np.uint8)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return obs.astype(np.uint8), info

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs + 0.5 if terminated else obs.astype(np.uint8), reward, terminated, truncated, info


@pytest.mark.parametrize("own_mode", list(AutoresetMode), ids=lambda mode: mode.name.lower())
def test_a_final_observation_of_another_kind_is_refused(own_mode):
    build = partial(SyncVectorEnv, [partial(FloatImages, last=2)] * 2, autoreset_mode=own_mode)
    mode = "next_step" if own_mode is AutoresetMode.NEXT_STEP else "same_step"
    with make(lambda num_envs: build(), autoreset_mode=mode) as pool:
        pool.reset()
        pool.step(GO_ON)
        with pytest.raises(envfleet.EnvFailed, match=r"float32.* to .*uint8|must be an array .* got dtype float32"):
            pool.step(GO_ON)
        assert pool.recv()[3].all()


def test_observations_of_the_same_kind_get_the_dtype_of_their_space():
    class Doubles(Plain):
        def step(self, actions):
            obs, *others = super().step(actions)
            return obs.astype(np.float64), *others

    with make(Doubles) as pool:
        pool.reset()
        assert pool.step(GO_ON)[0].dtype == np.float32
