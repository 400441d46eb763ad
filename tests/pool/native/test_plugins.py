"""Native envs of one's own: the documented example compiles and runs, and what goes wrong is said."""

import re

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet
from tests.support.scripts import DOCS

pytestmark = pytest.mark.slow

GUIDE = DOCS / "native_env.md"


@pytest.fixture(scope="module")
def corridor(tmp_path_factory):
    """The header in the guide, as a library."""
    folder = tmp_path_factory.mktemp("corridor")
    (folder / "corridor.h").write_text(_code("cpp"))
    envfleet.compile_native(folder / "corridor.h", folder / "corridor.so", flags=["-Werror"])
    return folder / "corridor.so"


def _code(language):
    return re.search(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]


def test_the_example_is_short():
    lines = [line for line in _code("cpp").splitlines() if line.strip() and not line.strip().startswith("//")]
    assert len(lines) <= 40


def test_the_guide_runs_as_it_stands(tmp_path, monkeypatch):
    (tmp_path / "corridor.h").write_text(_code("cpp"))
    monkeypatch.chdir(tmp_path)
    exec(compile(_code("python"), str(GUIDE), "exec"), {})


def test_the_example_does_what_it_says(corridor):
    assert envfleet.load_native(corridor) == ["Corridor-v0"]
    assert "Corridor-v0" in envfleet.registry()
    with envfleet.make("Corridor-v0", 3, env_kwargs={"length": 3, "slip": 0}) as pool:
        assert pool.single_observation_space.shape == (2,) and pool.single_action_space.n == 2
        obs, _ = pool.reset(seed=5)
        assert_array_equal(obs[:, 0], [np.float32(np.random.default_rng(5 + i).random()) for i in range(3)])
        for _ in range(3):
            obs, rewards, terminations, _, infos = pool.step(np.array([1, 1, 0]))
        assert_array_equal(terminations, [True, True, False])
        assert_array_equal(rewards, [1.0, 1.0, -0.01])
        assert_array_equal(obs[:, 0], np.float32([3, 3, 0]))
        assert_array_equal(infos["slipped"], [False] * 3)
        assert pool.reset(options={"place": 2.5})[0][0, 0] == 2.5
    with envfleet.make("Corridor-v0", 1, env_kwargs={"slip": 0.0}) as pool:
        pool.reset(seed=0)
        truncated_after = next(step for step in range(1, 200) if pool.step(np.array([0]))[3][0])
        assert truncated_after == 100


def test_wrong_arguments_are_named(corridor):
    envfleet.load_native(corridor)
    for kwargs, words in (
        ({"length": 0}, "length must be at least 1"),
        ({"width": 3}, "no argument is called 'width'; known: length, slip"),
        ({"slip": "often"}, "'slip' must be a number; got a string"),
    ):
        with pytest.raises(envfleet.UsageError, match=words):
            envfleet.make("Corridor-v0", 2, backend="native", env_kwargs=kwargs)
    with (
        envfleet.make("Corridor-v0", 2) as pool,
        pytest.raises(envfleet.UsageError, match="no Python side"),
    ):
        pool.get_attr("length")


def test_what_cannot_be_loaded_is_said(tmp_path, monkeypatch):
    with pytest.raises(envfleet.UsageError, match="no file is called"):
        envfleet.load_native(tmp_path / "missing.h")
    broken = tmp_path / "broken.h"
    broken.write_text('#include "engine/registry.h"\nstruct Broken { int x = y; };')
    with pytest.raises(envfleet.UsageError, match=r"does not compile:(.|\n)*error:"):
        envfleet.load_native(broken)
    broken.write_text('#include "engine/registry.h"\nstruct Half { struct Model {}; };\nENVFLEET_ENV("Half-v0", Half);')
    with pytest.raises(envfleet.UsageError, match="Half is no native environment"):
        envfleet.load_native(broken)
    broken.write_text('#include "engine/registry.h"\n')
    with pytest.raises(envfleet.UsageError, match="has no environment"):
        envfleet.load_native(broken)
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(envfleet.UsageError, match="cannot be loaded"):
        envfleet.load_native(text)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(envfleet.UsageError, match="no-such-compiler"):
        envfleet.load_native(broken)


def test_a_library_of_another_version_is_refused(tmp_path):
    header = tmp_path / "other.h"
    header.write_text("#undef ENVFLEET_PLUGIN_ABI\n#define ENVFLEET_PLUGIN_ABI 1\n" + _code("cpp"))
    with pytest.raises(envfleet.UsageError, match="another version of EnvFleet: compile it again"):
        envfleet.load_native(header)
