"""pool.xla(): what jitted functions return equals the loop in Python, bit for bit; what goes wrong is said in words."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import envfleet
from envfleet.pool.pool import EnvPool
from envfleet.pool.xla_pool import XlaPool
from envfleet.testing import ScriptedEnv
from tests.support.equal_arrays import assert_array_equal
from tests.support.native_makers import load_scripted, make_native
from tests.support.waiting import wait_until

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax
JaxError = jax.errors.JaxRuntimeError

GO_ON, TERMINATE, RAISE, SLEEP = 0, 1, 4, 8  # actions of ScriptedEnv


@pytest.fixture
def bits64():
    with jax.enable_x64(True):
        yield


def assert_equal_arrays(got, expected):
    assert np.asarray(got).dtype == np.asarray(expected).dtype
    assert_array_equal(got, expected)


def scan(step, handle, actions):
    """All steps in one compiled program; results have a leading axis of steps."""

    @jax.jit
    def run(handle, actions):
        return lax.scan(step, handle, actions)

    return jax.tree.map(np.asarray, run(handle, actions))


def sampled(pool, num_steps, seed=0):
    pool.action_space.seed(seed)
    batches = [pool.action_space.sample() for _ in range(num_steps)]
    return jax.tree.map(lambda *each: np.stack(each), *batches)


def at(tree, t):
    return jax.tree.map(lambda each: each[t], tree)


def assert_same_infos(infos, expected):
    """Python leaves out what no row has; compiled programs cannot."""
    for key in [key for key in infos if not key.startswith("_") and key != "env_id"]:
        if key not in expected:
            assert not infos[f"_{key}"].any()
        elif key == "final_obs":
            assert_equal_arrays(infos["_final_obs"], expected["_final_obs"])
            for row in np.flatnonzero(expected["_final_obs"]):
                jax.tree.map(assert_equal_arrays, at(infos[key], row), expected[key][row])
        elif isinstance(infos[key], dict):
            assert_equal_arrays(infos[f"_{key}"], expected[f"_{key}"])
            assert_same_infos(infos[key], expected[key])
        else:
            assert_equal_arrays(infos[f"_{key}"], expected[f"_{key}"])
            assert_equal_arrays(infos[key], expected[key])
    assert set(expected) <= set(infos)


ENVS = ["CartPole-v1", "Pendulum-v1", "Taxi-v3", "Blackjack-v1", "HalfCheetah-v5", "Tree-v0"]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("env_id", ENVS)
def test_a_scan_equals_the_loop_in_python(env_id, mode, bits64):
    if env_id == "HalfCheetah-v5":
        pytest.importorskip("mujoco")
    load_scripted()  # Tree-v0: nested spaces, frames among them
    settings = {"backend": "native", "seed": 3, "autoreset_mode": mode, "max_episode_steps": 12}
    with envfleet.make(env_id, 5, **settings) as pool, envfleet.make(env_id, 5, **settings) as other:
        actions = sampled(pool, 40)
        pool.reset()
        other.reset()
        handle, _, _, step = pool.xla()
        _, (obs, rewards, terminations, truncations, infos) = scan(step, handle, actions)
        assert truncations.any() or terminations.any()
        for t in range(40):
            expected = other.step(at(actions, t))
            jax.tree.map(assert_equal_arrays, at(obs, t), expected[0])
            for got, wanted in zip((rewards[t], terminations[t], truncations[t]), expected[1:4], strict=True):
                assert_equal_arrays(got, wanted)
            assert_same_infos(at(infos, t), expected[4])
        if mode == "same_step":  # in every row: what the step led to
            went_on = ~(terminations | truncations)
            jax.tree.map(lambda final, own: assert_equal_arrays(final[went_on], own[went_on]), infos["final_obs"], obs)
        assert infos["env_id"].tolist() == [[0, 1, 2, 3, 4]] * 40


def test_without_64_bits_arrays_are_rounded_as_jax_would():
    with envfleet.make("Pendulum-v1", 3, seed=0) as pool, envfleet.make("Pendulum-v1", 3, seed=0) as other:
        actions = sampled(pool, 5)
        pool.reset()
        other.reset()
        handle, _, _, step = pool.xla()
        _, (obs, rewards, *_) = scan(step, handle, actions)
        for t in range(5):
            expected = other.step(actions[t])
            assert_equal_arrays(obs[t], expected[0])
            assert_equal_arrays(rewards[t], expected[1].astype(np.float32))


def test_the_loop_of_cleanrl():
    """Unrolled in jit, with a policy, storage that is written to, and the handle passed from call to call."""
    num_steps = 6
    with envfleet.make("CartPole-v1", 4, seed=1) as envs, envfleet.make("CartPole-v1", 4, seed=1) as other:
        handle, _, _, step_env = envs.xla()
        weights = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2)), jnp.float32)

        @jax.jit
        def rollout(weights, obs, handle):
            storage = jnp.zeros((num_steps, 4, 4))
            for t in range(num_steps):
                action = jnp.argmax(obs @ weights, axis=1)
                handle, (obs, rewards, _, _, _) = step_env(handle, action)
                storage = storage.at[t].set(obs * rewards[:, None])
            return storage, obs, handle

        next_obs, _ = envs.reset()
        obs, _ = other.reset()
        for _ in range(3):
            storage, next_obs, handle = rollout(weights, next_obs, handle)
            for t in range(num_steps):
                obs, rewards, *_ = other.step(np.argmax(obs @ np.asarray(weights), axis=1))
                assert_equal_arrays(np.asarray(storage[t]), obs * rewards[:, None].astype(np.float32))


def test_an_asynchronous_pool_in_a_scan():
    """Each env gets the actions that follow from its own observations: so its trajectory is the one of a loop."""
    num_envs, batch_size, num_batches = 6, 2, 60
    with envfleet.make("CartPole-v1", num_envs, seed=5) as other:
        obs, _ = other.reset()
        trajectories = [obs]
        for _ in range(num_batches):
            trajectories.append(other.step((trajectories[-1][:, 2] > 0).astype(np.int64))[0])
    with envfleet.make("CartPole-v1", num_envs, batch_size=batch_size, seed=5) as pool:
        pool.async_reset()
        handle, recv, send, _ = pool.xla()

        @jax.jit
        def run(handle):
            def once(handle, _):
                handle, (obs, *_, info) = recv(handle)
                handle = send(handle, (obs[:, 2] > 0).astype(jnp.int32), info["env_id"])
                return handle, (obs, info["env_id"])

            return lax.scan(once, handle, length=num_batches)

        handle, (obs, env_ids) = run(handle)
        counts = np.zeros(num_envs, int)
        for batch, ids in zip(np.asarray(obs), np.asarray(env_ids), strict=True):
            for row, env_id in zip(batch, ids, strict=True):
                assert_equal_arrays(row, trajectories[counts[env_id]][env_id])
                counts[env_id] += 1
        assert counts.sum() == num_batches * batch_size and counts.min() > 0
        # What the program sent is received in Python.
        obs, *_, info = pool.recv()
        for row, env_id in zip(obs, info["env_id"], strict=True):
            assert_equal_arrays(row, trajectories[counts[env_id]][env_id])


def test_step_of_an_asynchronous_pool_names_its_envs():
    with envfleet.make("CartPole-v1", 4, batch_size=2, seed=0) as pool:
        pool.reset()
        handle, _, send, step = pool.xla()
        handle = send(handle, np.zeros(2, np.int32), np.array([3, 1]))
        handle, (_, _, _, _, info) = jax.jit(step)(handle, np.zeros(2, np.int32), np.array([0, 2]))
        handle, (_, rewards, _, _, others) = step(handle, np.zeros(2, np.int32), info["env_id"])
        assert len({*info["env_id"].tolist()}) == len({*others["env_id"].tolist()}) == 2
        assert rewards.tolist() == [1.0, 1.0]


def test_python_and_compiled_steps_take_turns():
    with envfleet.make("CartPole-v1", 4, seed=2) as pool, envfleet.make("CartPole-v1", 4, seed=2) as other:
        pool.reset()
        other.reset()
        handle, recv, send, step = pool.xla()
        step = jax.jit(step)
        actions = sampled(pool, 40)
        for t in range(0, 40, 4):
            handle, (obs, *_) = step(handle, actions[t])
            assert_equal_arrays(np.asarray(obs), other.step(actions[t])[0])
            assert_equal_arrays(pool.step(actions[t + 1])[0], other.step(actions[t + 1])[0])
            pool.send(actions[t + 2])
            handle, (obs, *_) = recv(handle)
            assert_equal_arrays(np.asarray(obs), other.step(actions[t + 2])[0])
            jax.block_until_ready(send(handle, actions[t + 3]))
            assert_equal_arrays(pool.recv()[0], other.step(actions[t + 3])[0])


def test_the_pools_seed_counts_once():
    with envfleet.make("CartPole-v1", 2, seed=2) as pool, envfleet.make("CartPole-v1", 2, seed=2) as other:
        _, recv, _, _ = (functions := pool.xla())
        for each, receive in ((pool, lambda: recv(functions.handle)[1]), (other, other.recv)):
            each.async_reset()
            jax.block_until_ready(receive()[0])
        assert_equal_arrays(pool.reset()[0], other.reset()[0])


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_python_is_not_asked(mode, monkeypatch):
    def asked(*_):
        raise AssertionError("Python was asked")

    with envfleet.make("CartPole-v1", 4, seed=0, autoreset_mode=mode) as pool:
        pool.reset()
        handle, _, _, step = pool.xla()
        for name in ("_recv_for_xla", "_send_for_xla"):
            monkeypatch.setattr(XlaPool, name, asked)
        _, (_, _, terminations, _, _) = scan(step, handle, sampled(pool, 100))
        assert terminations.any()


# -- what goes wrong --


def test_a_wrong_action_is_named_and_nothing_was_sent():
    with envfleet.make("CartPole-v1", 2, seed=0) as pool, envfleet.make("CartPole-v1", 2, seed=0) as other:
        pool.reset()
        other.reset()
        handle, _, _, step = pool.xla()
        jitted = jax.jit(step)
        with pytest.raises(JaxError, match=r"InvalidAction: actions, row 1: Discrete\(2\) has no value 7"):
            jax.block_until_ready(jitted(handle, np.array([0, 7])))
        obs = jitted(handle, np.array([0, 1]))[1][0]
        assert_equal_arrays(np.asarray(obs), other.step(np.array([0, 1]))[0])
    with envfleet.make("Pendulum-v1", 2, seed=0) as pool:
        pool.reset()
        handle, _, _, step = pool.xla()
        with pytest.raises(JaxError, match=r"InvalidAction: actions has NaN in rows \[1\]"):
            jax.block_until_ready(step(handle, np.array([[0.0], [np.nan]], np.float32)))


def test_wrong_forms_are_refused_while_tracing():
    with envfleet.make("CartPole-v1", 2) as pool:
        pool.reset()
        handle, _, send, step = pool.xla()
        with pytest.raises(envfleet.InvalidAction, match=r"actions must have shape \(2,\).*got \(3,\)"):
            jax.jit(step)(handle, np.zeros(3, np.int32))
        with pytest.raises(envfleet.InvalidAction, match="actions must have dtype int64; got float32"):
            jax.jit(send)(handle, np.zeros(2, np.float32))
        with pytest.raises(envfleet.UsageError, match="takes the handle of the call before first"):
            step(np.zeros(2, np.int32), np.zeros(2, np.int32))
        with pytest.raises(envfleet.UsageError, match="env_id must be a vector"):
            send(handle, np.zeros(2, np.int32), np.zeros(2, np.float32))


def test_misuse_is_told_as_in_python():
    zeros = np.zeros(2, np.int32)
    with envfleet.make("CartPole-v1", 2) as pool:
        handle, recv, send, step = pool.xla()
        with pytest.raises(JaxError, match=r"NotReset: call reset\(\)"):
            jax.block_until_ready(step(handle, zeros))
        pool.reset()
        with pytest.raises(JaxError, match="NothingToReceive: no env is in flight"):
            jax.block_until_ready(recv(handle))
        jax.block_until_ready(send(handle, zeros))
        with pytest.raises(JaxError, match="EnvBusy"):
            jax.block_until_ready(step(handle, zeros))
        with pytest.raises(envfleet.EnvBusy):
            pool.step(zeros.astype(np.int64))  # the dtype that a step in one call takes
        jax.block_until_ready(recv(handle))
        with pytest.raises(JaxError, match=r"UsageError: step.. and send.. of xla.. step all envs"):
            jax.block_until_ready(step(handle, zeros, np.array([1, 0])))
        jax.block_until_ready(step(handle, zeros, np.array([0, 1])))
    with envfleet.make("CartPole-v1", 4, batch_size=2) as pool:
        pool.reset()
        handle, recv, send, step = pool.xla()
        for env_id, words in (([0, 0], "names an env twice"), ([0, 4], "must be between 0 and 3")):
            with pytest.raises(JaxError, match=words):
                jax.block_until_ready(send(handle, zeros, np.array(env_id)))


def test_some_envs_that_python_sent_are_received_there():
    with envfleet.make("CartPole-v1", 3) as pool:
        pool.reset()
        handle, recv, _, _ = pool.xla()
        pool.send(np.array([1]), [2])
        with pytest.raises(JaxError, match="of some envs only"):
            jax.block_until_ready(recv(handle))
        assert len(pool.recv()[0]) == 1


def test_an_env_that_fails():
    with make_native(ScriptedEnv, 2, seed=0) as pool:
        pool.reset()
        handle, _, _, step = pool.xla()
        with pytest.raises(JaxError, match=r"EnvFailed: .*told to fail in step"):
            jax.block_until_ready(step(handle, np.array([GO_ON, RAISE])))
        _, _, _, truncations, infos = pool.recv()
        assert truncations.tolist() == [False, True] and "told to fail" in infos["env_error"][1]
        jax.block_until_ready(step(handle, np.array([GO_ON, GO_ON])))


def test_an_env_that_is_restarted_has_a_row(bits64):
    settings = {"seed": 0, "on_env_error": "restart", "autoreset_mode": "same_step"}
    acts = np.array([[GO_ON, RAISE], [GO_ON, GO_ON], [TERMINATE, TERMINATE], [GO_ON, GO_ON]])
    with make_native(ScriptedEnv, 2, **settings) as pool, make_native(ScriptedEnv, 2, **settings) as other:
        pool.reset()
        other.reset()
        handle, _, _, step = pool.xla()
        _, (obs, rewards, terminations, truncations, infos) = scan(step, handle, acts)
        for t, expected in enumerate([other.step(each) for each in acts]):
            for got, wanted in zip((obs, rewards, terminations, truncations), expected, strict=False):
                assert_equal_arrays(got[t], wanted)
            texts = {"env_error", "_env_error"}
            infos_of_texts = {key: value for key, value in expected[4].items() if key not in texts}
            infos_of_texts.get("final_info", {}).pop("env_error", None)
            infos_of_texts.get("final_info", {}).pop("_env_error", None)
            assert_same_infos(at(infos, t), infos_of_texts)


def test_a_step_that_takes_too_long():
    """One thread begins with runs of four envs, and looks at the clock after each."""
    with make_native(ScriptedEnv, 20, seed=0, env_kwargs={"sleep_s": 0.06}, timeout_s=0.2, num_workers=1) as pool:
        pool.reset()
        handle, _, _, step = pool.xla()
        with pytest.raises(JaxError, match=r"DEADLINE_EXCEEDED: PoolTimeout: no full batch after 0\.2 s"):
            jax.block_until_ready(step(handle, np.full(20, SLEEP)))
        assert pool.recv(timeout_s=10)[0].shape == (20, 4)
        jax.block_until_ready(step(handle, np.full(20, GO_ON)))


def test_a_long_step_is_waited_for():
    """Longer than C++ waits without Python."""
    with make_native(ScriptedEnv, 2, seed=0, env_kwargs={"sleep_s": 0.15}) as pool:
        pool.reset()
        handle, _, _, step = pool.xla()
        _, (obs, *_) = scan(step, handle, np.full((2, 2), SLEEP))
        assert obs[:, :, 1].tolist() == [[1, 1], [2, 2]]


# -- the pool's end --


def test_a_closed_pool_is_said_to_be_closed():
    pool = envfleet.make("CartPole-v1", 2, seed=0)
    pool.reset()
    handle, recv, send, step = pool.xla()
    jitted = jax.jit(step)
    jax.block_until_ready(jitted(handle, np.zeros(2, np.int32)))
    pool.close()
    pool.close()
    for call in (lambda: jitted(handle, np.zeros(2, np.int32)), lambda: recv(handle)):
        with pytest.raises(JaxError, match="PoolClosed: the pool of this handle was closed"):
            jax.block_until_ready(call())
    with pytest.raises(envfleet.PoolClosed):
        pool.xla()
    with pytest.raises(envfleet.PoolClosed):
        pool.step(np.zeros(2, np.int64))
    with pytest.raises(JaxError, match="PoolClosed"):
        jax.block_until_ready(send(np.full(8, 255, np.uint8), np.zeros(2, np.int32)))


def test_the_handle_of_another_pool():
    with envfleet.make("CartPole-v1", 2, seed=0) as pool, envfleet.make("CartPole-v1", 3, seed=0) as larger:
        with envfleet.make("Acrobot-v1", 2, seed=0) as stranger:
            for each in (pool, larger, stranger):
                each.reset()
            step, zeros = pool.xla().step, np.zeros(2, np.int32)
            for each in (larger, stranger):
                with pytest.raises(JaxError, match="the handle is of a pool with other spaces or sizes"):
                    jax.block_until_ready(step(each.xla().handle, zeros))
            for each in (larger, stranger):  # nothing was sent
                each.step(np.zeros(each.num_envs, np.int64))
        jax.block_until_ready(step(pool.xla().handle, zeros))


def test_functions_keep_the_pool_and_nothing_else_does():
    pool = envfleet.make("CartPole-v1", 2, seed=0)
    pool.reset()
    functions, gone = pool.xla(), weakref.ref(pool)
    del pool
    gc.collect()
    jax.block_until_ready(functions.step(functions.handle, np.zeros(2, np.int32)))
    del functions
    gc.collect()
    jax.clear_caches()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("how", ["close", "drop"])
def test_the_pool_ends_while_a_program_runs(how):
    """The program is started, and not waited for. It ends, or says that the pool was closed."""
    pool = envfleet.make("Acrobot-v1", 64, seed=0)
    pool.reset()
    handle, _, _, step = pool.xla()
    actions = np.zeros((2000, 64), np.int32)

    @jax.jit
    def run(handle, actions):
        return lax.scan(lambda handle, act: (step(handle, act)[0], None), handle, actions)[0]

    compiled = run.lower(handle, actions).compile()
    started = threading.Event()
    errors = []

    def use():
        started.set()
        try:
            jax.block_until_ready(compiled(jnp.asarray(handle), jnp.asarray(actions)))
        except JaxError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    started.wait(10)
    if how == "close":
        pool.close()
    else:
        del pool, step, run
        gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert all("PoolClosed" in error for error in errors)


def test_calls_from_python_wait_for_their_turn():
    """observations() steps nothing, but uses the same batches. In the middle of a step it would find envs busy."""
    num_steps = 40_000
    with envfleet.make("CartPole-v1", 8, seed=0) as pool, envfleet.make("CartPole-v1", 8, seed=0) as other:
        pool.reset()
        other.reset()
        handle, _, _, step = pool.xla()
        actions = np.random.default_rng(0).integers(2, size=(num_steps, 8))
        results, num_calls = [], 0
        thread = threading.Thread(target=lambda: results.append(scan(step, handle, actions)))
        thread.start()
        while thread.is_alive():
            pool.observations()
            num_calls += 1
        thread.join()
        other_handle, _, _, other_step = other.xla()
        _, expected = scan(other_step, other_handle, actions)
        jax.tree.map(assert_equal_arrays, results[0][1], expected)
        assert num_calls > 0


def test_every_method_of_a_pool_takes_turns():
    names = [name for name in dir(EnvPool) if not name.startswith("_") and callable(getattr(EnvPool, name))]
    inherited = [name for name in names if getattr(XlaPool, name) is getattr(EnvPool, name)]
    assert {"step", "reset", "close"} <= set(names) - set(inherited)
    assert [name for name in inherited if name in vars(EnvPool)] == []


# -- refusals --


def test_vmap_is_refused_with_the_reason():
    with envfleet.make("CartPole-v1", 2, seed=0) as pool:
        pool.reset()
        handle, _, _, step = pool.xla()
        with pytest.raises(envfleet.UsageError, match="cannot be vmapped: a pool is a batch of envs already"):
            jax.jit(jax.vmap(step, in_axes=(None, 0)))(handle, np.zeros((3, 2), np.int32))


def test_two_pools_in_one_program():
    with envfleet.make("CartPole-v1", 2, seed=0) as first, envfleet.make("Acrobot-v1", 3, seed=0) as second:
        pools = (first, second)
        zeros = [np.zeros(pool.num_envs, np.int64) for pool in pools]
        functions = [pool.xla() for pool in pools]
        for pool in pools:
            pool.reset(seed=1)

        @jax.jit
        def both(handles):
            return [each.step(handle, act) for each, handle, act in zip(functions, handles, zeros, strict=True)]

        got = [results[0] for _, results in both([each.handle for each in functions])]
        for pool, obs, act in zip(pools, got, zeros, strict=True):
            pool.reset(seed=1)
            assert_equal_arrays(np.asarray(obs), pool.step(act)[0])


def test_pools_that_are_not_native_refuse():
    with (
        envfleet.make("CartPole-v1", 2, backend="serial") as pool,
        pytest.raises(envfleet.UsageError, match=r"xla.. needs native envs.*the backend of this pool is 'serial'"),
    ):
        pool.xla()


def test_the_extra_is_named():
    code = """if True:
        import sys
        sys.modules["jax"] = None
        import envfleet
        with envfleet.make("CartPole-v1", 2) as pool:
            try:
                pool.xla()
            except envfleet.MissingExtra as error:
                print(error)
            pool.reset()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert 'pip install "envfleet[jax]"' in done.stdout


def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have():
    """A call of XLA holds the pool's lock while the process forks; here another thread stands for that call."""
    with envfleet.make("CartPole-v1", 2) as pool:
        pool.reset(seed=0)
        pool.xla()
        is_held, may_end = threading.Event(), threading.Event()

        def hold():
            with pool._alone():
                is_held.set()
                assert may_end.wait(60.0)

        thread = threading.Thread(target=hold)
        thread.start()
        assert is_held.wait(60.0)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                with contextlib.suppress(envfleet.PoolClosed):
                    pool.step(np.zeros(2, np.int64))
                pool.close()
                os._exit(0)
            os._exit(1)
        try:
            statuses = []
            wait_until(lambda: statuses.append(os.waitpid(child, os.WNOHANG)) or statuses[-1][0], "the child has ended")
            assert os.waitstatus_to_exitcode(statuses[-1][1]) == 0
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        finally:
            may_end.set()
            thread.join()
