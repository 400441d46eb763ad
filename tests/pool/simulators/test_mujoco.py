"""Native envs on MuJoCo equal Gymnasium's, to the last bit; and what happens where MuJoCo is missing, or complains."""

import logging
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import envfleet
from envfleet.pool.simulators import mujoco as native_mujoco
from envfleet.testing.programs import require_equal
from tests.support.equal_arrays import assert_array_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native_mujoco.is_available(), reason="needs the mujoco that EnvFleet was compiled with"),
    pytest.mark.filterwarnings("ignore:.*out of date"),  # v4
]

NUM_ENVS = 3
ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


@dataclass(frozen=True)
class Case:
    id: str
    kwargs: dict = field(default_factory=dict)
    num_steps: int = 60
    max_episode_steps: int | None = None  # None: as registered
    reach: float = 1.0  # of the actions, in units of the bounds

    def __str__(self):
        return ",".join([self.id, *(f"{name}={value}" for name, value in self.kwargs.items())])


IDS = [
    env_id
    for env_id in envfleet.registry()
    if env_id in gymnasium.registry and "mujoco" in str(gymnasium.registry[env_id].entry_point)
]
V5 = [env_id for env_id in IDS if env_id.endswith("-v5")]
NO_POSITIONS_EXCLUDED = {"exclude_current_positions_from_observation": False}
NO_TERMINATION = {"terminate_when_unhealthy": False}
OPTIONS = [
    Case("Ant-v5", {"forward_reward_weight": 2, "ctrl_cost_weight": 0.3, "contact_cost_weight": 0.01}),
    Case("Ant-v5", {"healthy_reward": 0.7, "healthy_z_range": (0.5, 0.8), "main_body": "torso"}),
    Case("Ant-v5", {"main_body": 3, "contact_force_range": (-0.2, 0.3), "include_cfrc_ext_in_observation": False}),
    Case("Ant-v5", {**NO_POSITIONS_EXCLUDED, **NO_TERMINATION, "frame_skip": 3, "reset_noise_scale": 0.3}),
    Case("Ant-v5", {"default_camera_config": {"distance": 2.0}, "width": 64, "xml_file": str(ASSETS / "ant.xml")}),
    Case("Ant-v4", {"use_contact_forces": True, "ctrl_cost_weight": 0.3, "contact_cost_weight": 0.01}),
    Case("Ant-v4", {**NO_POSITIONS_EXCLUDED, **NO_TERMINATION, "healthy_z_range": [0.5, 0.8]}),
    Case("HalfCheetah-v5", {**NO_POSITIONS_EXCLUDED, "forward_reward_weight": 0.3, "ctrl_cost_weight": 1}),
    Case("HalfCheetah-v5", {"frame_skip": 1, "reset_noise_scale": 0.0}),
    Case("HalfCheetah-v4", {**NO_POSITIONS_EXCLUDED, "forward_reward_weight": 0.3, "reset_noise_scale": 0.5}),
    Case("Hopper-v5", {**NO_POSITIONS_EXCLUDED, **NO_TERMINATION, "healthy_reward": 0.3}),
    Case("Hopper-v5", {"healthy_state_range": (-2.0, 2.0), "healthy_angle_range": (-0.1, 0.3), "frame_skip": 8}),
    Case("Hopper-v4", {**NO_TERMINATION, "healthy_reward": 0.3, "healthy_state_range": (-2.0, 2.0)}),
    Case("Walker2d-v5", {**NO_POSITIONS_EXCLUDED, "healthy_z_range": (1.0, 1.3), "healthy_angle_range": (-0.5, 0.5)}),
    Case("Walker2d-v5", {"xml_file": "walker2d.xml", "ctrl_cost_weight": 0.5, **NO_TERMINATION}),
    Case("Walker2d-v4", {**NO_POSITIONS_EXCLUDED, "reset_noise_scale": 0.1}),
    Case("Humanoid-v5", {**NO_POSITIONS_EXCLUDED, **NO_TERMINATION, "contact_cost_range": (0.1, 0.2)}),
    Case("Humanoid-v5", {"include_cinert_in_observation": False, "include_cfrc_ext_in_observation": False}),
    Case("Humanoid-v5", {"include_cvel_in_observation": False, "include_qfrc_actuator_in_observation": False}),
    Case("Humanoid-v5", {"contact_cost_weight": 1e-3, "healthy_z_range": (1.2, 1.39), "forward_reward_weight": 3}),
    Case("Humanoid-v4", {**NO_POSITIONS_EXCLUDED, **NO_TERMINATION, "ctrl_cost_weight": 1.5}),
    Case("HumanoidStandup-v5", {**NO_POSITIONS_EXCLUDED, "impact_cost_range": (0.001, 0.002), "uph_cost_weight": 3}),
    Case("HumanoidStandup-v5", {"include_cinert_in_observation": False, "impact_cost_weight": 1e-3}),
    Case("Swimmer-v5", {**NO_POSITIONS_EXCLUDED, "forward_reward_weight": 3.3, "ctrl_cost_weight": 0.1}),
    Case("Swimmer-v4", {**NO_POSITIONS_EXCLUDED, "reset_noise_scale": 1.0}),
    Case("Reacher-v5", {"reward_dist_weight": 0.3, "reward_control_weight": 0.7, "frame_skip": 5}),
    Case("Pusher-v5", {"reward_near_weight": 0.3, "reward_dist_weight": 1.7, "reward_control_weight": 0.03}),
    Case("InvertedPendulum-v5", {"reset_noise_scale": 0.1, "frame_skip": 1}),
    Case("InvertedDoublePendulum-v5", {"healthy_reward": 3.3, "reset_noise_scale": 0.05, "frame_skip": 2}),
]
EXTREME = [Case(env_id, num_steps=120, max_episode_steps=50, reach=reach) for env_id in V5 for reach in (0.0, 10.0)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Gymnasium's HalfCheetah leaves a file in the working directory."""
    monkeypatch.chdir(tmp_path)


def make_both(case, autoreset_mode=AutoresetMode.NEXT_STEP):
    limit = case.max_episode_steps
    pool = envfleet.make(
        case.id,
        NUM_ENVS,
        backend="native",
        env_kwargs=case.kwargs,
        max_episode_steps=limit,
        autoreset_mode=autoreset_mode,
    )
    assert not Path("MUJOCO_LOG.TXT").exists()

    def make_env():
        return gymnasium.make(case.id, disable_env_checker=True, max_episode_steps=limit, **case.kwargs)

    return pool, SyncVectorEnv([make_env] * NUM_ENVS, autoreset_mode=autoreset_mode)


def actions_for(pool, case, rng):
    space = pool.single_action_space
    return rng.uniform(case.reach * space.low, case.reach * space.high, (NUM_ENVS, *space.shape)).astype(np.float32)


def require_equal_infos(ours, theirs):
    assert set(ours) == set(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert_array_equal(ours[name], theirs[name], err_msg=name)


def require_equal_episodes(case, seed=11):
    pool, reference = make_both(case)
    rng = np.random.default_rng(0)
    num_ended = 0
    with pool:
        assert pool.single_observation_space == reference.single_observation_space
        assert pool.single_action_space == reference.single_action_space
        for ours, theirs in [(pool.reset(seed=seed), reference.reset(seed=seed)), (pool.reset(), reference.reset())]:
            assert_array_equal(ours[0], theirs[0])
            require_equal_infos(ours[1], theirs[1])
        for _ in range(case.num_steps):
            actions = actions_for(pool, case, rng)
            ours, theirs = pool.step(actions), reference.step(actions)
            assert ours[0].dtype == theirs[0].dtype
            for our, their in zip(ours[:4], theirs[:4], strict=True):
                assert_array_equal(our, their)
            require_equal_infos(ours[4], theirs[4])
            num_ended += np.count_nonzero(ours[2] | ours[3])
    reference.close()
    return num_ended


@pytest.mark.parametrize("env_id", IDS)
def test_episodes(env_id):
    assert require_equal_episodes(Case(env_id, num_steps=250, max_episode_steps=100)) >= 2 * NUM_ENVS


@pytest.mark.long
@pytest.mark.parametrize("env_id", V5)
def test_episodes_as_long_as_they_are_registered(env_id):
    num_steps = gymnasium.spec(env_id).max_episode_steps + 5
    assert require_equal_episodes(Case(env_id, num_steps=num_steps), seed=5) >= NUM_ENVS


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_options(case):
    require_equal_episodes(case)


@pytest.mark.long
@pytest.mark.parametrize("case", EXTREME, ids=lambda case: f"{case.id},reach={case.reach}")
def test_no_action_and_actions_beyond_the_bounds(case):
    require_equal_episodes(case)


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Humanoid-v5", "Reacher-v4", "InvertedPendulum-v5"])
def test_same_step_autoreset(env_id):
    case = Case(env_id, max_episode_steps=30)
    pool, reference = make_both(case, AutoresetMode.SAME_STEP)
    rng = np.random.default_rng(2)
    with pool:
        assert_array_equal(pool.reset(seed=2)[0], reference.reset(seed=2)[0])
        for _ in range(70):
            actions = actions_for(pool, case, rng)
            (*ours, infos), (*theirs, their_infos) = pool.step(actions), reference.step(actions)
            for our, their in zip(ours, theirs, strict=True):
                assert_array_equal(our, their)
            for our, their in zip(infos.pop("final_obs", ()), their_infos.pop("final_obs", ()), strict=True):
                assert_array_equal(our, their)
            require_equal_infos(infos.pop("final_info", {}), their_infos.pop("final_info", {}))
            require_equal_infos(infos, their_infos)


def test_autoreset_by_the_caller():
    case = Case("Walker2d-v5", max_episode_steps=15)
    pool, reference = make_both(case, AutoresetMode.DISABLED)
    rng = np.random.default_rng(2)
    with pool:
        assert_array_equal(pool.reset(seed=2)[0], reference.reset(seed=2)[0])
        for _ in range(60):
            actions = actions_for(pool, case, rng)
            ours, theirs = pool.step(actions), reference.step(actions)
            for our, their in zip(ours[:4], theirs[:4], strict=True):
                assert_array_equal(our, their)
            ended = ours[2] | ours[3]
            if ended.any():
                options = {"reset_mask": ended}
                assert_array_equal(pool.reset(options=options)[0], reference.reset(options=options)[0])


def test_threads_and_batches_change_nothing():
    num_envs, num_steps = 12, 25
    actions = np.random.default_rng(3).uniform(-1, 1, (num_steps, num_envs, 8)).astype(np.float32)
    with (
        envfleet.make("Ant-v5", num_envs, num_workers=1) as alone,
        envfleet.make("Ant-v5", num_envs, num_workers=4) as four,
    ):
        require_equal(alone.reset(seed=1), four.reset(seed=1))
        expected = [alone.step(each) for each in actions]
        require_equal([four.step(each) for each in actions], expected)
    with envfleet.make("Ant-v5", num_envs, batch_size=5, num_workers=3) as pool:
        pool.async_reset(seed=1)
        num_sent = np.zeros(num_envs, int)
        while num_sent.min() < num_steps:
            obs, rewards, _, _, infos = pool.recv()
            env_ids = infos["env_id"]
            for row, env_id in enumerate(env_ids):
                if 0 < num_sent[env_id] <= num_steps:
                    assert_array_equal(obs[row], expected[num_sent[env_id] - 1][0][env_id])
                    assert rewards[row] == expected[num_sent[env_id] - 1][1][env_id]
            pool.send(actions[np.minimum(num_sent[env_ids], num_steps - 1), env_ids], env_ids)
            num_sent[env_ids] += 1


def changed_model(tmp_path, name, old, new):
    text = (ASSETS / name).read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new))
    return str(path)


def test_a_simulation_that_explodes(tmp_path, caplog):
    """MuJoCo warns, and resets it: so it is here, too. The warning goes to the log, once, and to no file."""
    native_mujoco._library()  # loaded before the records are counted
    path = changed_model(tmp_path, "inverted_pendulum.xml", 'gear="100"', 'gear="1e14"')
    case = Case("InvertedPendulum-v5", {"xml_file": path}, num_steps=10, max_episode_steps=4)
    pool, reference = make_both(case)
    rng = np.random.default_rng(0)
    with pool, caplog.at_level(logging.WARNING, "envfleet.pool"):
        assert_array_equal(pool.reset(seed=1)[0], reference.reset(seed=1)[0])
        for _ in range(case.num_steps):
            actions = actions_for(pool, case, rng)
            ours = pool.step(actions)
            assert not Path("MUJOCO_LOG.TXT").exists()
            theirs = reference.step(actions)
            Path("MUJOCO_LOG.TXT").unlink(missing_ok=True)
            for our, their in zip(ours[:4], theirs[:4], strict=True):
                assert_array_equal(our, their)
    kinds = [record.getMessage().partition(" Time =")[0] for record in caplog.records]
    assert any("simulation is unstable" in kind for kind in kinds)
    assert len(kinds) == len(set(kinds))


def test_what_mujoco_cannot_do_is_a_failure_of_the_env(tmp_path):
    path = changed_model(tmp_path, "ant.xml", "</mujoco>", '<size memory="12K"/></mujoco>')
    with (
        envfleet.make("Ant-v5", 2, backend="native", env_kwargs={"xml_file": path}) as pool,
        pytest.raises(envfleet.EnvFailed, match=r"MuJoCo: .*(memory|stack)"),
    ):
        pool.reset(seed=0)
        for _ in range(100):
            pool.step(pool.action_space.sample())
    kwargs = {"env_kwargs": {"xml_file": path}, "on_env_error": "restart"}
    with envfleet.make("Ant-v5", 2, backend="native", **kwargs) as pool:
        pool.reset(seed=0)
        num_steps = next(i for i in range(100) if "env_error" in pool.step(pool.action_space.sample())[4])
        assert num_steps > 0
        pool.reset(seed=0)  # goes on, with an mjData that nothing has happened to


@pytest.mark.parametrize(
    ("words", "kwargs"),
    [
        ("no argument is called 'nonsense'", {"nonsense": 1}),
        ("does not exist", {"xml_file": "no_such.xml"}),
        ("'healthy_z_range' must be", {"healthy_z_range": (1, 2, 3)}),
        ("a body 'tail'", {"main_body": "tail"}),
        ("number of Python's", {"ctrl_cost_weight": np.float64(0.5)}),
        ("'frame_skip' must be", {"frame_skip": 0}),
        ("XML", {"xml_file": __file__}),
        ("xml_file must be a path", {"xml_file": 5}),
        ("cannot be built", {"healthy_z_range": (0.2, 10**400)}),
        ("the body 'main_body'", {"main_body": 1.5}),
        ("the body 'main_body'", {"main_body": float("nan")}),
    ],
)
def test_arguments_that_are_refused(words, kwargs):
    with pytest.raises(envfleet.UsageError, match=words):
        envfleet.make("Ant-v5", 2, backend="native", env_kwargs=kwargs)
    with pytest.raises(envfleet.UsageError, match="no argument is called 'xml_file'"):
        envfleet.make("Hopper-v4", 2, backend="native", env_kwargs={"xml_file": "hopper.xml"})


def test_numbers_that_are_no_int64():
    with envfleet.make("Ant-v5", 1, backend="native", env_kwargs={"ctrl_cost_weight": 10**30}) as pool:
        pool.reset(seed=0)
        assert pool.step(np.ones((1, 8), np.float32))[1] < -1e29


def test_models_that_sleep_are_not_native(tmp_path):
    path = changed_model(tmp_path, "ant.xml", "</mujoco>", '<option><flag sleep="enable"/></option></mujoco>')
    with pytest.raises(envfleet.UsageError, match="models that sleep"):
        envfleet.make("Ant-v5", 1, backend="native", env_kwargs={"xml_file": path})


CALLBACK = """
import mujoco, envfleet
with envfleet.make("InvertedPendulum-v5", 1, backend="native") as pool:
    pool.reset(seed=0)
    mujoco.set_mjcb_control(lambda model, data: None)
    try:
        pool.step(pool.action_space.sample())
    except envfleet.EnvFailed as error:
        print(error)
    try:
        envfleet.make("InvertedPendulum-v5", 1, backend="native")
    except envfleet.UsageError as error:
        print(error)
    mujoco.set_mjcb_control(None)
    pool.recv()
    pool.reset(seed=0)
    print("goes on")
"""


def test_callbacks_of_the_process():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CALLBACK], capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("env 0 raised"), done.stderr
    assert "backend='native' is not available: the native mujoco/InvertedPendulum-v5" in done.stdout
    assert done.stdout.count("callbacks of MuJoCo are set") == 2
    assert done.stdout.endswith("goes on\n"), done.stderr


def test_another_mujoco_means_processes(monkeypatch, caplog):
    monkeypatch.setattr(native_mujoco, "library_version", lambda: "3.9.9")
    assert "Ant-v5" not in envfleet.registry()
    with caplog.at_level(logging.WARNING, "envfleet.pool"), envfleet.make("InvertedPendulum-v5", 2) as pool:
        assert pool.backend == "process"
        pool.reset(seed=0)
    assert "compiled for version 3.9.9" in caplog.text
    with pytest.raises(envfleet.UsageError, match=r"pip install mujoco==3\.9\.9"):
        envfleet.make("Ant-v5", 2, backend="native")


def test_without_mujoco(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(envfleet.MissingExtra, match=r"envfleet\[mujoco\]"):
        envfleet.make("Ant-v5", 2)


def test_a_build_without_mujoco(monkeypatch):
    monkeypatch.setattr(native_mujoco, "_library_path", lambda: None)
    with envfleet.make("InvertedPendulum-v5", 2) as pool:
        assert pool.backend == "process"


def test_attributes_are_gymnasiums():
    with warnings.catch_warnings(), envfleet.make("Humanoid-v5", 2) as pool:
        assert pool.backend == "native"
        reference = [gymnasium.make("Humanoid-v5", disable_env_checker=True).unwrapped for _ in range(2)]
        pool.reset(seed=4)
        for seed, env in enumerate(reference, start=4):
            env.reset(seed=seed)
        for _ in range(3):
            actions = pool.action_space.sample()
            pool.step(actions)
            for env, action in zip(reference, actions, strict=True):
                env.step(action)
        for name in ("state_vector", "is_healthy", "contact_cost", "_get_obs"):
            for ours, env in zip(pool.call(name), reference, strict=True):
                theirs = getattr(env, name)
                assert_array_equal(ours, theirs() if callable(theirs) else theirs)


def test_gymnasiums_class_leaves_no_file_either():
    """Its HalfCheetah does, if nobody keeps it from that."""
    with envfleet.make("HalfCheetah-v5", 1) as pool:
        pool.reset(seed=0)
        assert pool.get_attr("frame_skip") == (5,)
    assert not Path("MUJOCO_LOG.TXT").exists()


def test_the_clock_of_other_users_of_mujoco_goes_on():
    """It stands still for the steps of native envs only."""
    import mujoco

    env = gymnasium.make("InvertedPendulum-v5").unwrapped
    env.reset(seed=0)
    with envfleet.make("InvertedPendulum-v5", 1) as pool:
        pool.reset(seed=0)
        pool.step(pool.action_space.sample())
        env.step(env.action_space.sample())
    assert env.data.timer[mujoco.mjtTimer.mjTIMER_STEP].duration > 0


RENDER = """
import gymnasium, numpy as np, envfleet
kwargs = {"width": 64, "height": 48}
try:
    reference = [gymnasium.make("Walker2d-v5", render_mode="rgb_array", **kwargs) for _ in range(2)]
    for seed, env in enumerate(reference):
        env.reset(seed=seed)
        env.render()
except Exception as error:
    raise SystemExit(f"Gymnasium cannot draw: {error}")
with envfleet.make("Walker2d-v5", 2, backend="native", env_kwargs=kwargs, render_mode="rgb_array") as pool:
    pool.reset(seed=0)
    for _ in range(3):
        actions = pool.action_space.sample()
        pool.step(actions)
        frames = pool.render()
        for env, action, frame in zip(reference, actions, frames, strict=True):
            env.step(action)
            assert frame.shape == (48, 64, 3) and frame.std() > 1
            np.testing.assert_array_equal(frame, env.render())
print("equal")
"""
NO_DISPLAY = """
import envfleet
with envfleet.make("InvertedPendulum-v5", 1, render_mode="rgb_array") as pool:
    pool.reset(seed=0)
    try:
        pool.render()
    except envfleet.UsageError as error:
        print(error)
"""


def run_with_opengl(platform, script):
    env = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    command = [sys.executable, "-W", "ignore", "-c", script]
    env["MUJOCO_GL"] = platform
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)


def test_frames_are_gymnasiums():
    done = run_with_opengl("egl", RENDER)
    if "Gymnasium cannot draw" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "equal\n", done.stderr


def test_drawing_without_a_display():
    done = run_with_opengl("glfw", NO_DISPLAY)
    assert "set the environment variable MUJOCO_GL to 'egl'" in done.stdout, done.stderr
