"""Pixel observations: Gymnasium's AddRenderObservation and FrameStackObservation, bit for bit, in pools."""

import os
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import AddRenderObservation, FrameStackObservation, GrayscaleObservation

import envfleet
from envfleet._native.core import AreaResize
from envfleet.testing.envs import ScriptedEnv
from envfleet.testing.programs import require_equal

pytestmark = pytest.mark.slow

SMALL = {"height": 32, "width": 40}


@pytest.fixture(scope="module")
def mujoco_draws():
    pytest.importorskip("mujoco", reason="needs mujoco")
    try:
        envfleet.make("InvertedPendulum-v5", 1, pixels=envfleet.Pixels(has_effects=False)).close()
    except envfleet.UsageError as error:
        pytest.skip(f"no OpenGL: {error}")


def gymnasiums(env_id, stack_num, grayscale=False, gl=None, **kwargs):
    """What we equal, built in a child process, where it may set what it likes."""
    if gl is not None and not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = gl
    env = gymnasium.make(env_id, render_mode="rgb_array", **kwargs)
    env.reset(seed=0)
    env.render()  # aims MuJoCo's camera: after an unseeded reset, as the wrapper does it, somewhere else each time
    env = AddRenderObservation(env, render_only=True)
    return FrameStackObservation(GrayscaleObservation(env) if grayscale else env, stack_num)


def require_same_run(ours, theirs, num_steps, actions):
    with ours, theirs:
        assert ours.single_observation_space == theirs.single_observation_space
        require_equal(ours.reset(seed=3), theirs.reset(seed=3))
        num_ends = 0
        for _ in range(num_steps):
            act = actions()
            got = ours.step(act)
            require_equal(got, theirs.step(act))
            num_ends += int((got[2] | got[3]).sum())
        return num_ends


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("backend", ["process", "serial"])
def test_an_env_without_opengl_equals_gymnasiums_wrappers(backend, mode):
    pytest.importorskip("pygame", reason="needs pygame")
    pixels = envfleet.Pixels(height=None, width=None, stack_num=4, grayscale=True)
    generator = np.random.default_rng(0)
    num_ends = require_same_run(
        envfleet.make("CartPole-v1", 2, pixels=pixels, backend=backend, autoreset_mode=mode),
        envfleet.make(partial(gymnasiums, "CartPole-v1", 4, True), 2, backend="serial", autoreset_mode=mode),
        30,
        lambda: generator.integers(0, 2, 2),
    )
    assert num_ends >= 2


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_mujoco_equals_gymnasiums_wrappers(mujoco_draws, mode):
    """Two envs of ours in one process, each with its own context; of Gymnasium's one in each."""
    generator = np.random.default_rng(0)
    reference = partial(gymnasiums, "InvertedPendulum-v5", 3, gl="egl", **SMALL)
    num_ends = require_same_run(
        envfleet.make("InvertedPendulum-v5", 2, pixels=envfleet.Pixels(**SMALL), num_workers=1, autoreset_mode=mode),
        envfleet.make(reference, 2, num_workers=2, autoreset_mode=mode),
        12,
        lambda: generator.uniform(-3, 3, (2, 1)).astype(np.float32),
    )
    assert num_ends >= 1


def test_envs_with_different_models_share_a_process(mujoco_draws, tmp_path):
    """Each is drawn with its own context: Gymnasium leaves the one current that was made last."""
    model = Path(gymnasium.__file__).parent / "envs/mujoco/assets/inverted_pendulum.xml"
    sky = '<asset><texture type="skybox" builtin="flat" rgb1="{}" width="8" height="8"/></asset><worldbody>'
    kwargs = []
    for name, colour in (("red", "1 0 0"), ("green", "0 1 0"), ("red", "1 0 0")):
        path = tmp_path / f"{name}.xml"
        path.write_text(model.read_text().replace("<worldbody>", sky.format(colour)))
        kwargs.append({"xml_file": str(path)})
    pixels = envfleet.Pixels(has_effects=False)
    seen = []
    for num_workers in (1, 3):
        with envfleet.make("InvertedPendulum-v5", 3, pixels=pixels, env_kwargs=kwargs, num_workers=num_workers) as pool:
            pool.reset(seed=[5, 5, 5])
            seen.append(pool.step(np.zeros((3, 1), np.float32))[0])
    require_equal(*seen)
    require_equal(seen[0][0], seen[0][2])
    reds, greens = seen[0][0, -1, 0, 0], seen[0][1, -1, 0, 0]  # a corner of the newest image
    assert reds.tolist() == [255, 0, 0] and greens.tolist() == [0, 255, 0]


class Fragile(gymnasium.Wrapper):
    """Fails if it is pushed too hard."""

    def step(self, action):
        if action[0] > 2:
            raise RuntimeError("pushed too hard")
        return super().step(action)


def fragile_pendulum(render_mode):
    return Fragile(gymnasium.make("InvertedPendulum-v5", render_mode=render_mode))


def test_images_survive_the_end_of_another_env(mujoco_draws):
    """An env that is built anew, and its neighbour: MuJoCo frees what the old one drew with in the current context."""
    arguments = {"pixels": envfleet.Pixels(has_effects=False), "render_mode": "rgb_array", "num_workers": 1}
    push, rest = np.array([[3.0], [0.0]], np.float32), np.zeros((2, 1), np.float32)
    with envfleet.make(fragile_pendulum, 2, on_env_error="restart", **arguments) as pool:
        before = pool.reset(seed=0)[0], pool.step(rest)[0]
        assert min(images.std() for images in before) > 1
        for _ in range(2):
            truncated, info = pool.step(push)[3:]
            assert truncated.tolist() == [True, False] and "too hard" in info["env_error"][0]
            require_equal((pool.reset(seed=0)[0], pool.step(rest)[0]), before)


def test_effects_can_be_left_out(mujoco_draws):
    images = []
    for has_effects in (True, False):
        pixels = envfleet.Pixels(has_effects=has_effects, stack_num=1)
        with envfleet.make("HalfCheetah-v5", 1, pixels=pixels) as pool:
            images.append(pool.reset(seed=0)[0].astype(int))
            assert pool.render()[0].shape == (84, 84, 3)
    assert images[0].shape == (1, 1, 84, 84, 3)
    assert 0 < np.abs(images[0] - images[1]).mean() < 60  # the same scene, in another light


def test_native_envs_draw_without_mujoco_gl(mujoco_draws):
    """In a process of its own: OpenGL is not to stay in this one."""
    script = """
import gc, os, envfleet
with envfleet.make("Walker2d-v5", 3, backend="native", render_mode="rgb_array") as pool:
    pool.reset(seed=0)
    of_all, of_some = pool.render(), pool.render([2, 0])
    assert (of_all[2] == of_some[0]).all() and (of_all[0] == of_some[1]).all() and (of_all[0] != of_all[2]).any()
first = envfleet.make("Hopper-v5", 1, backend="native", render_mode="rgb_array")
second = envfleet.make("Walker2d-v5", 1, backend="native", render_mode="rgb_array")
for pool in (first, second):
    pool.reset(seed=0)
frames = [pool.render()[0] for pool in (first, second)]
for pool, frame in zip((first, second), frames):
    assert frame.std() > 1 and (pool.render()[0] == frame).all()
first.close()
del first, pool
gc.collect()
assert (second.render()[0] == frames[1]).all()  # what the first one drew with is gone, and nothing of the second's
second.close()
print("drawn", os.environ.get("MUJOCO_GL"))
"""
    done = run_without_display(script)
    assert done.stdout == "drawn None\n", done.stderr


def test_images_are_made_smaller():
    cv2 = pytest.importorskip("cv2", reason="needs OpenCV")
    pytest.importorskip("pygame", reason="needs pygame")
    whole, small = envfleet.Pixels(height=None, width=None), envfleet.Pixels(height=84, width=96)
    with (
        envfleet.make("CartPole-v1", 2, pixels=whole, backend="serial") as drawn,
        envfleet.make("CartPole-v1", 2, pixels=small, num_workers=1) as resized,
    ):
        assert resized.single_observation_space.shape == (3, 84, 96, 3)
        images, small_images = drawn.reset(seed=0)[0][:, 0], resized.reset(seed=0)[0][:, 0]
    for image, small_image in zip(images, small_images, strict=True):
        expected = cv2.resize(image, (96, 84), interpolation=cv2.INTER_AREA)
        assert np.array_equal(small_image, expected)


@pytest.mark.parametrize("sizes", [((7, 9), (3, 4)), ((12, 8), (4, 8)), ((5, 5), (5, 2)), ((11, 13), (1, 1))])
def test_each_new_pixel_is_the_mean_of_its_area(sizes):
    (height, width), (new_height, new_width) = sizes
    image = np.random.default_rng(1).integers(0, 256, (height, width, 3)).astype(np.uint8)
    resized = AreaResize(*sizes, 3)(image)
    assert resized.shape == (new_height, new_width, 3) and resized.dtype == np.uint8

    def covered(new, num_new, num_old):
        """How much of each old pixel lies under a new one."""
        begin, end = Fraction(new * num_old, num_new), Fraction((new + 1) * num_old, num_new)
        return [max(Fraction(0), min(end, old + 1) - max(begin, old)) for old in range(num_old)]

    for y in range(new_height):
        for x in range(new_width):
            rows, columns = covered(y, new_height, height), covered(x, new_width, width)
            for channel in range(3):
                total = sum(
                    row * column * int(image[i, j, channel])
                    for i, row in enumerate(rows)
                    for j, column in enumerate(columns)
                    if row and column
                )
                assert resized[y, x, channel] == round(total / (sum(rows) * sum(columns)))


@pytest.mark.parametrize(
    "sizes", [((480, 640), (84, 84)), ((1081, 1921), (84, 96)), ((400, 600), (100, 200)), ((64, 64), (32, 32))]
)
def test_images_are_resized_as_opencv_does_it(sizes):
    cv2 = pytest.importorskip("cv2", reason="needs OpenCV")
    image = np.random.default_rng(2).integers(0, 256, (*sizes[0], 3)).astype(np.uint8)
    height, width = sizes[1]
    expected = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    assert np.array_equal(AreaResize(*sizes, 3)(image), expected)


@pytest.mark.parametrize("wrong", [((4, 4), (5, 4)), ((4, 4), (0, 4)), ((65536, 4), (4, 4))])
def test_sizes_that_cannot_be_resized_are_refused(wrong):
    with pytest.raises(ValueError, match="65535"):
        AreaResize(*wrong, 3)


def test_images_of_another_form_are_refused():
    resize = AreaResize((4, 4), (2, 2), 3)
    for image in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((8, 4, 3), np.uint8)[::2]):
        with pytest.raises(TypeError, match="image must be a contiguous array of 48 uint8"):
            resize(image)


def test_envs_without_a_seed_begin_differently():
    pytest.importorskip("pygame", reason="needs pygame")
    with envfleet.make("CartPole-v1", 3, pixels=envfleet.Pixels(height=None, width=None), backend="serial") as pool:
        pool.reset()
        assert len({tuple(state) for state in pool.get_attr("state")}) == 3


def test_callables_and_what_pools_report():
    pixels = envfleet.Pixels(height=1, width=2, stack_num=2)
    with envfleet.make(ScriptedEnv, 2, pixels=pixels, render_mode="rgb_array", num_workers=1) as pool:
        assert pool.single_observation_space == gymnasium.spaces.Box(0, 255, (2, 1, 2, 3), np.uint8)
        assert pool.render_mode == "rgb_array"
        obs, _ = pool.reset(seed=0)
        assert obs.shape == (2, 2, 1, 2, 3) and not obs.any()
        obs = pool.step(np.zeros(2, int))[0]
        assert obs[0, :, 0, 0, 0].tolist() == [0, 1]
        assert [frame.shape for frame in pool.render([1])] == [(2, 2, 3)]  # as the env draws it


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        ("backend must be", {"backend": "native"}),
        ("backend must be", {"backend": "vector"}),
        ("render_mode='rgb_array'", {"render_mode": "human"}),
        ("envfleet.Pixels", {"pixels": True}),
        ("larger than what the env draws, 2 x 2", {"env": ScriptedEnv, "render_mode": "rgb_array"}),
        ("this one has None", {"env": ScriptedEnv}),
    ],
)
def test_what_cannot_be_had(expected, arguments):
    settings = {"env": "CartPole-v1", "num_envs": 1, "pixels": envfleet.Pixels(), **arguments}
    with pytest.raises(envfleet.UsageError, match=expected):
        envfleet.make(**settings)


@pytest.mark.parametrize("wrong", [{"height": 0}, {"width": 2.5}, {"stack_num": None}, {"grayscale": 1}])
def test_wrong_settings(wrong):
    with pytest.raises(envfleet.UsageError, match=next(iter(wrong))):
        envfleet.Pixels(**wrong)


NOTHING_TO_DRAW_WITH = """
import envfleet
for pixels in (None, envfleet.Pixels()):
    try:
        envfleet.make("InvertedPendulum-v5", 1, pixels=pixels, num_workers=1).close()
        print("made")
    except envfleet.UsageError as error:
        print(error)
"""


def run_without_display(script, **variables):
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYOPENGL_PLATFORM")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    "variables",
    [
        {"MUJOCO_GL": "nonsense"},
        {"MUJOCO_GL": "osmesa"},
        {"MUJOCO_GL": "glfw"},
        {"__EGL_VENDOR_LIBRARY_FILENAMES": "none"},  # EGL without any driver
    ],
    ids=lambda variables: "-".join(variables.values()),
)
def test_nothing_to_draw_with(variables):
    pytest.importorskip("mujoco", reason="needs mujoco")
    done = run_without_display(NOTHING_TO_DRAW_WITH, **variables)
    without_pixels, with_pixels = done.stdout.splitlines()
    if with_pixels == "made":
        pytest.skip("OSMesa is installed here")
    assert "MuJoCo cannot draw here" in with_pixels and "libegl1, libosmesa6" in with_pixels, done.stderr
    if variables.get("MUJOCO_GL") in ("nonsense", "osmesa"):
        assert "set the environment variable MUJOCO_GL" in without_pixels  # MuJoCo itself cannot be imported so
    else:
        assert without_pixels == "made", done.stderr
