"""EnvPool's xla() over native pools: forms, numbers beside step() in Python, programs of JAX, refusals."""

import functools

import numpy as np
import pytest

import envfleet.compat.envpool as envpool
from envfleet.contract.errors import UsageError

jax = pytest.importorskip("jax", reason="needs jax")
jnp = jax.numpy


def flat(batch):
    # Infos of MuJoCo in Python are a class of dicts, which JAX does not look into.
    return jax.tree.flatten(tuple(dict(each) if isinstance(each, dict) else each for each in batch))


def assert_same(batch, expected):
    (leaves, form), (expected_leaves, expected_form) = flat(batch), flat(expected)
    assert form == expected_form
    for leaf, each in zip(leaves, expected_leaves, strict=True):
        dtype = each.dtype if isinstance(leaf, np.ndarray) else jax.dtypes.canonicalize_dtype(each.dtype)
        assert leaf.shape == each.shape and leaf.dtype == dtype
        np.testing.assert_allclose(leaf, each, rtol=1e-6)


def zeros(env, num_rows):
    space = env.spec.action_space
    return np.zeros((num_rows, *space.shape), space.dtype)


@pytest.mark.parametrize(
    ("task_id", "form"),
    [
        ("CartPole-v1", "gymnasium"),
        ("CartPole-v1", "dm"),
        ("Acrobot-v1", "gymnasium"),
        ("Blackjack-v1", "gymnasium"),
        ("CliffWalking-v0", "dm"),
        ("Hopper-v5", "gymnasium"),
    ],
)
def test_compiled_batches_are_those_of_step(task_id, form):
    if form == "dm":
        pytest.importorskip("dm_env", reason="needs dm_env")
    if task_id.startswith("Hopper"):
        pytest.importorskip("mujoco", reason="needs mujoco")
    make = functools.partial(envpool.make, task_id, env_type=form, num_envs=3, seed=1, max_episode_steps=9)
    with make() as mine, make() as plain:
        if mine._pool.backend != "native":
            pytest.skip("native for another version of MuJoCo only")
        handle, _, _, step = mine.xla()
        assert_same(mine.reset(), plain.reset())
        step = jax.jit(step)
        action = zeros(plain, 3)
        for number in range(24):  # episodes end after 9 steps at most
            if number % 8 == 7:  # Python's own step goes on where the program was, and counts on
                assert_same(mine.step(action), plain.step(action))
            else:
                handle, batch = step(handle, action)
                assert_same(batch, plain.step(action))


def test_a_whole_rollout_is_one_program():
    with envpool.make_gymnasium("CartPole-v1", num_envs=4, seed=3) as env:
        handle, _, _, step = env.xla()
        obs, _ = env.reset()

        def one_step(carry, _):
            handle, obs = carry
            action = (obs[:, 2] > 0).astype(jnp.int32)
            handle, (obs, reward, terminated, truncated, info) = step(handle, action)
            return (handle, obs), (reward, terminated | truncated, info["elapsed_step"], info["players"]["env_id"])

        rollout = jax.jit(lambda carry: jax.lax.scan(one_step, carry, length=200))
        _, (rewards, done, elapsed_step, env_ids) = rollout((handle, obs))
        assert done.any()
        expected = np.zeros(4, int)
        for row in range(200):
            expected = np.where(done[row - 1], 0, expected + 1) if row else expected + 1
            np.testing.assert_array_equal(elapsed_step[row], expected)
            np.testing.assert_array_equal(rewards[row], expected > 0)
        np.testing.assert_array_equal(env_ids, np.tile(np.arange(4), (200, 1)))


def test_asynchronous_pools_send_and_receive():
    with envpool.make_dm("Pendulum-v1", num_envs=6, batch_size=2, seed=0, max_episode_steps=5) as env:
        handle, recv, send, _ = env.xla()

        @jax.jit
        def exchange(handle, states):
            handle = send(handle, jnp.zeros((2, 1)), states.observation.env_id)
            return recv(handle)

        env.async_reset()
        handle, states = recv(handle)
        assert states.first().all()
        num_steps = dict.fromkeys(range(6), 0)
        for _ in range(40):
            for env_id in np.asarray(states.observation.env_id).tolist():
                num_steps[env_id] += 1
            handle, states = exchange(handle, states)
            for row, env_id in enumerate(np.asarray(states.observation.env_id).tolist()):
                place = num_steps[env_id] % 6  # a reset, then five steps
                assert states.step_type[row] == (0 if place == 0 else 2 if place == 5 else 1)


def test_actions_as_dicts_and_columns():
    with envpool.make_gymnasium("CartPole-v1", num_envs=2, seed=0) as env:
        handle, _, _, step = env.xla()
        env.reset()
        ids = jnp.arange(2, dtype=jnp.int32)
        handle, (first, *_) = step(handle, {"action": jnp.ones((2, 1), jnp.int32), "env_id": ids})
        handle, (_, *_, info) = step(handle, jnp.ones(2), ids)
        assert info["elapsed_step"].tolist() == [2, 2] and first.shape == (2, 4)
        with pytest.raises(RuntimeError, match="needs the key 'action'"):
            step(handle, {"env_id": ids})
        with pytest.raises(Exception, match="InvalidAction"):
            jax.block_until_ready(step(handle, jnp.full(2, 7)))


def test_refusals_say_what_to_do():
    with envpool.make_gymnasium("CartPole-v1", num_envs=2) as env:
        handle, _, _, step = env.xla()
        with pytest.raises(Exception, match="call reset"):
            jax.block_until_ready(step(handle, jnp.zeros(2, jnp.int32)))
    pytest.importorskip("ale_py", reason="needs ale_py")
    with (
        envpool.make_gymnasium("Pong-v5", num_envs=1) as env,
        pytest.raises(UsageError, match=r"Atari runs in processes here: step the pool outside of jax\.jit"),
    ):
        env.xla()
