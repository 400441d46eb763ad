"""Envs that do to their process what no env should: each failure names the env and has a traceback."""

import os
import signal
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import envfleet
from envfleet.testing import ScriptedEnv
from tests.support.inside import child_pid

pytestmark = pytest.mark.slow


class HostileEnv(gymnasium.Env):
    """Action k does the k-th thing; `shows` is in every info."""

    observation_space = spaces.Box(0, 100, (1,))
    action_space = spaces.Discrete(10)

    def __init__(self, shows=None):
        self._shows = {} if shows is None else shows()
        self._num_steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_steps = 0
        if options is not None:
            raise options["error"]
        return np.zeros(1, np.float32), dict(self._shows)

    def step(self, action):
        if action == 1:
            raise KeyboardInterrupt("of its own")
        if action == 2:
            raise GeneratorExit("of its own")
        if action == 3:
            raise MyOwn("of its own")
        if action == 4:
            os.closerange(3, 256)
        if action == 5:
            os.closerange(3, 256)
            self._files = [open(os.devnull, "r+b") for _ in range(40)]  # noqa: SIM115 - they take the numbers
        self._num_steps += 1
        return np.full(1, self._num_steps, np.float32), 1.0, False, False, dict(self._shows)

    def interrupt(self):
        raise KeyboardInterrupt("in a call")

    def close(self):
        raise KeyboardInterrupt("in close")


class MyOwn(BaseException):
    pass


def make(backend="process", **kwargs):
    return envfleet.make(HostileEnv, 4, **{"backend": backend, "num_workers": 2, **kwargs})


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, MyOwn], ids=lambda kind: kind.__name__)
def test_any_exception_in_a_child_is_a_failure_of_its_env(kind):
    act = {KeyboardInterrupt: 1, GeneratorExit: 2, MyOwn: 3}[kind]
    with make() as pool:
        pool.reset(seed=0)
        pool.step(np.zeros(4, int))
        with pytest.raises(envfleet.EnvFailed, match=rf"env 2 raised .*{kind.__name__}: of its own") as caught:
            pool.step(np.array([0, 0, act, 0]))
        assert type(caught.value) is envfleet.EnvFailed, "the process goes on"
        assert caught.value.env_id == 2 and caught.value.seed == 2 and caught.value.last_action == act
        assert "test_hostile_envs.py" in caught.value.child_traceback
        obs, _, _, truncated, _ = pool.recv()
        assert obs[:, 0].tolist() == [2, 2, 1, 2] and truncated.tolist() == [False, False, True, False]
        with pytest.raises(envfleet.EnvFailed, match=f"{kind.__name__}: in reset"):
            pool.reset(options={"error": kind("in reset")})
        pool.reset(seed=0)
        with pytest.raises(envfleet.EnvFailed, match="KeyboardInterrupt: in a call"):
            pool.call("interrupt")
        assert pool.step(np.zeros(4, int))[0][:, 0].tolist() == [1, 1, 1, 1]


def test_they_are_restarted_like_others():
    with make(on_env_error="restart") as pool:
        pool.reset(seed=0)
        truncated, infos = pool.step(np.array([0, 1, 0, 2]))[3:]
        assert truncated.tolist() == [False, True, False, True]
        assert "KeyboardInterrupt" in infos["env_error"][1] and "GeneratorExit" in infos["env_error"][3]


class InterruptedEnv(ScriptedEnv):
    is_interrupted = False

    def step(self, action):
        if self.is_interrupted:
            self.is_interrupted = False
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


def test_ctrl_c_in_the_callers_own_process_is_the_callers():
    with envfleet.make(InterruptedEnv, 2, backend="serial") as pool:
        pool.reset(seed=0)
        pool.step(np.zeros(2, int))
        pool.set_attr("is_interrupted", [False, True])
        with pytest.raises(KeyboardInterrupt):
            pool.step(np.zeros(2, int))
        assert pool.recv()[0][:, 1].tolist() == [2, 2], "the step that was interrupted is done"


@pytest.mark.parametrize("act", [4, 5], ids=["closed", "closed and taken"])
@pytest.mark.parametrize("shows", [None, lambda: {"text": "any"}], ids=["no info", "infos"])
def test_closed_file_descriptors_are_named(act, shows):
    """Whether it is noticed in that step, or later by another env of the process."""
    with make(env_kwargs={"shows": shows}) as pool:
        pool.reset(seed=0)
        pool.step(np.zeros(4, int))
        with pytest.raises(envfleet.ChildDied, match="closed by code that did not open it") as caught:
            pool.step(np.array([0, 0, act, 0]))
            pool.call("_num_steps")
        text = str(caught.value)
        assert "which ran envs 2 to 3" in text and "FileClosed" in text and "Traceback" in text
        assert caught.value.env_ids == (2, 3)
        if shows is not None:
            assert caught.value.env_id == 2 and "while env 2 was in step()" in text
            assert pool.recv()[3].tolist() == [False, False, True, True]
        pool.reset(seed=0)
        assert pool.step(np.zeros(4, int))[0][:, 0].tolist() == [1, 1, 1, 1]


def test_what_cannot_be_pickled_is_left_out_of_an_info(caplog):
    def shows():
        return {"lock": threading.Lock(), "score": 3, "deep": {"lock": threading.Lock(), "score": 4}, "twice": _double}

    for mode in envfleet.Autoreset:
        with make(env_kwargs={"shows": shows}, autoreset_mode=mode, max_episode_steps=2) as pool:
            infos = pool.reset(seed=0)[1]
            for _ in range(2):
                assert "lock" not in infos and "env_error" not in infos
                assert infos["score"].tolist() == [3] * 4
                assert infos["deep"]["score"].tolist() == [4] * 4 and "lock" not in infos["deep"]
                assert infos["twice"][0](3) == 6
                truncated, infos = pool.step(np.zeros(4, int))[3:]
            assert truncated.all()
            if mode is envfleet.Autoreset.SAME_STEP:
                assert infos["final_info"]["score"].tolist() == [3] * 4 and "lock" not in infos["final_info"]
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert sum("info['lock']" in text and "final" not in text for text in told) == 3, "once in each pool"
    assert sum("final_info['deep']['lock']" in text for text in told) == 1


def _double(number):
    return 2 * number


class OnlyThere(Exception):
    """Its instances are pickled, but not unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def test_an_info_that_cannot_be_unpickled_loses_no_row(caplog):
    with make(env_kwargs=[{}, {"shows": lambda: {"error": OnlyThere(1, 2)}}, {}, {}]) as pool:
        pool.reset(seed=0)
        obs, _, _, truncated, infos = pool.step(np.zeros(4, int))
        assert obs[:, 0].tolist() == [1] * 4 and not truncated.any() and "error" not in infos
    assert "info of env 1 is left out" in caplog.text


def test_a_failure_that_cannot_be_unpickled_names_its_env():
    kwargs = [{}, {"shows": lambda: {"error": OnlyThere(1, 2)}}, {}, {}]
    with make(env_kwargs=kwargs, autoreset_mode="same_step") as pool:
        pool.reset(seed=0)
        with pytest.raises(envfleet.EnvFailed, match=r"env 1 raised an exception; .*unpickled here") as caught:
            pool.step(np.array([0, 3, 0, 0]))  # the info of the new episode comes with the failure
        assert caught.value.env_id == 1
        assert pool.recv()[3].tolist() == [False, True, False, False]


@pytest.mark.parametrize("on_env_error", ["raise", "restart"])
def test_options_and_requests_that_cannot_be_unpickled_there(on_env_error):
    with make(on_env_error=on_env_error) as pool:
        pool.reset(seed=0)
        pids = [child_pid(pool, child) for child in range(2)]
        with pytest.raises(envfleet.EnvFailed, match=r"OnlyThere.__init__") as caught:
            pool.reset(options={"error": OnlyThere(1, 2)})
        assert type(caught.value) is envfleet.EnvFailed, "the process goes on"
        pool.reset(seed=0)
        for wrong in (lambda: pool.call("interrupt", OnlyThere(1, 2)), lambda: pool.set_attr("x", OnlyThere(1, 2))):
            with pytest.raises(envfleet.EnvFailed, match=r"OnlyThere.__init__"):
                wrong()
        pool.reset(seed=0)
        assert pool.step(np.zeros(4, int))[0][:, 0].tolist() == [1] * 4
        assert pids == [child_pid(pool, child) for child in range(2)]


class LockSpace(spaces.Space):
    """Observations that cannot be pickled."""

    def __init__(self):
        super().__init__()

    def sample(self, mask=None):
        return threading.Lock()

    def contains(self, x):
        return True

    def __eq__(self, other):
        return isinstance(other, LockSpace)


class LockEnv(HostileEnv):
    observation_space = spaces.Dict({"lock": LockSpace(), "number": spaces.Box(0, 100, (1,))})

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return {"lock": None, "number": obs}, info

    def step(self, action):
        obs, *others = super().step(action)
        return {"lock": threading.Lock() if action else None, "number": obs}, *others


@pytest.mark.parametrize("mode", list(envfleet.Autoreset), ids=lambda mode: mode.name.lower())
def test_an_observation_that_cannot_be_pickled_is_a_failure_of_its_env(mode):
    with envfleet.make(LockEnv, 2, backend="process", num_workers=1, autoreset_mode=mode) as pool:
        pool.reset(seed=0)
        pool.step(np.zeros(2, int))
        with pytest.raises(envfleet.EnvFailed, match=r"env 1 raised .*lock") as caught:
            pool.step(np.array([0, 9]))
        assert type(caught.value) is envfleet.EnvFailed and caught.value.last_action == 9
        obs, _, _, truncated, infos = pool.recv()
        assert truncated.tolist() == [False, True]
        last = infos["final_obs"][1] if mode is envfleet.Autoreset.SAME_STEP else {"number": obs["number"][1]}
        assert last["number"].tolist() == [1]
        pool.reset(seed=0)
        assert pool.step(np.zeros(2, int))[0]["number"].tolist() == [[1], [1]]


class ObjectActionEnv(HostileEnv):
    action_space = spaces.Dict({"any": LockSpace(), "number": spaces.Discrete(10)})

    def step(self, action):
        return super().step(action["number"])


def test_an_action_that_cannot_be_unpickled_there():
    with envfleet.make(ObjectActionEnv, 2, backend="process", num_workers=1) as pool:
        pool.reset(seed=0)
        pool.step({"any": (1, 2), "number": np.zeros(2, int)})
        with pytest.raises(envfleet.EnvFailed, match=r"env 1 raised .*OnlyThere.__init__") as caught:
            pool.step({"any": (1, OnlyThere(1, 2)), "number": np.zeros(2, int)})
        assert type(caught.value) is envfleet.EnvFailed
        obs, _, _, truncated, infos = pool.recv()
        assert obs[:, 0].tolist() == [2, 1] and truncated.tolist() == [False, True] and infos["env_error"][1]
        assert pool.step({"any": (1, 2), "number": np.zeros(2, int)})[0][:, 0].tolist() == [3, 0]


def test_all_of_it_on_a_worker():
    kwargs = {"shows": lambda: {"lock": threading.Lock(), "score": 3}}
    with envfleet.ClusterEnv(HostileEnv, 1, 2, backend="process", env_kwargs=kwargs) as cluster:
        infos = cluster.reset(seed=0)[1]
        assert infos["score"].tolist() == [3, 3] and "lock" not in infos and "env_error" not in infos
        with pytest.raises(envfleet.EnvFailed, match="KeyboardInterrupt: of its own") as caught:
            cluster.step(np.array([0, 1]))
        assert caught.value.env_id == 1 and caught.value.last_action == 1
        assert "test_hostile_envs.py" in caught.value.child_traceback
        assert cluster.recv()[3].tolist() == [False, True]
        cluster.reset(seed=0)
        with pytest.raises(envfleet.EnvFailed, match="closed by code that did not open it") as caught:
            cluster.step(np.array([0, 4]))
            cluster.step(np.array([0, 0]))
        assert "Traceback" in caught.value.child_traceback
        cluster.reset(seed=0)
        assert cluster.step(np.array([0, 0]))[0][:, 0].tolist() == [1, 1]
