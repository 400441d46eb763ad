"""A cluster that is saved, closed and resumed goes on as if nothing had happened: bit for bit, on real workers."""

import dataclasses
import logging
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch  # noqa: TID253 - agents of torch are part of this

import envfleet
from envfleet import APS, CheckpointError, ClusterEnv, ClusterTimeout, EnvBusy, EveryUpdate, Never, UsageError
from envfleet.cluster.checkpoint.saving import StatesOfWorkers
from envfleet.cluster.sync import Every
from envfleet.contract.errors import NotReset, StepOnEndedEpisode
from tests.support.agents.aps_agents import NoiseEnv
from tests.support.cluster.resumable_learner import NUM_ENVS, NUM_STEPS, SEED, NumpyLearner, rollout_digest
from tests.support.cluster.torch_learners import (
    ByPathLearner,
    ExploringLearner,
    FeedForward,
    MaskedLearner,
    NormalizingLearner,
    RecurrentLearner,
    TorchLearner,
)
from tests.support.equal_arrays import assert_array_equal
from tests.support.inside import fleet
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch", "tests.support.cluster.torch_learners")

NUM_UPDATES = 10
SAVED_AFTER = 4


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def cart_poles(num_workers=2, num_envs=NUM_ENVS, env="CartPole-v1", **kwargs):
    return ClusterEnv(env, num_workers, num_envs, **{"seed": SEED, **kwargs})


def what_came(cluster, learner):
    stats = cluster.stats()
    counted = [(each.num_steps, each.num_rollouts, each.num_pulls, each.version, each.lag) for each in stats.workers]
    divergences = [each.divergence for each in stats.workers]
    return {
        **learner.outcome(),
        "version": stats.version,
        "metrics": stats.metrics,
        "counted": counted,
        "kl": divergences,
    }


def ran_through(kind, path=None, **kwargs):
    """A run that nothing interrupts; with `path`, it saves on its way."""
    learner = kind()
    with cart_poles(**kwargs) as cluster:
        while len(learner.digests) < NUM_UPDATES:
            learner.update(cluster)
            if path is not None and len(learner.digests) == SAVED_AFTER:
                cluster.save(path, extra=learner.state())
        return what_came(cluster, learner)


def resumed_from(path, kind, num_updates=NUM_UPDATES, saves=None, **kwargs):
    torch.manual_seed(0)  # a new process has any
    np.random.seed(0)
    learner = kind()
    with cart_poles(resume=path, **kwargs) as cluster:
        learner.restore(cluster.resumed.extra)
        while len(learner.digests) < num_updates:
            learner.update(cluster)
        if saves is not None:
            cluster.save(saves, extra=learner.state())
        return what_came(cluster, learner)


COURSES = {
    "plain, every update": (TorchLearner, {"sync": EveryUpdate()}),
    "plain, APS": (TorchLearner, {"sync": APS(threshold=2e-3, max_lag=4, num_probes=16)}),
    "recurrent, APS": (RecurrentLearner, {"sync": APS(threshold=1e-3, max_lag=4, num_probes=16)}),
    "normalizing, every third": (NormalizingLearner, {"sync": Every(3)}),
    "own generator, never": (ExploringLearner, {"sync": Never()}),
    "by its path": (ByPathLearner, {}),
    "masks and infos": (MaskedLearner, {"env": "Taxi-v3", "num_envs": 2}),
    "weights of 16 bits": (NumpyLearner, {"network": {"weights_dtype": "bfloat16"}}),
    "first ready": (NumpyLearner, {"num_envs": 2, "worker_batch_size": 2}),
}


@pytest.mark.parametrize("course", COURSES)
def test_a_run_goes_on_bit_for_bit(tmp_path, course):
    kind, kwargs = COURSES[course]
    through = ran_through(kind, tmp_path / "run.ckpt", **kwargs)
    assert resumed_from(tmp_path / "run.ckpt", kind, **kwargs) == through
    if "APS" in course:  # some of the pulls were due, and some were not
        num_pulls = sum(each[2] for each in through["counted"])
        assert 2 < num_pulls < 2 * NUM_UPDATES


def test_saving_changes_nothing_and_a_resumed_run_is_resumed_again(tmp_path):
    kind, kwargs = COURSES["recurrent, APS"]
    through = ran_through(kind, **kwargs)
    assert ran_through(kind, tmp_path / "1", **kwargs) == through
    resumed_from(tmp_path / "1", kind, SAVED_AFTER, tmp_path / "2", **kwargs)  # nothing was done in between
    resumed_from(tmp_path / "2", kind, SAVED_AFTER + 2, tmp_path / "3", **kwargs)
    assert resumed_from(tmp_path / "3", kind, **kwargs) == through


def test_a_run_that_was_never_stepped_goes_on_with_its_first_seeds(tmp_path):
    through = ran_through(NumpyLearner)
    with cart_poles() as cluster:
        cluster.save(tmp_path / "run.ckpt")
    learner = NumpyLearner()
    with cart_poles(resume=tmp_path / "run.ckpt", seed=None) as cluster:
        assert cluster.resumed.version == 0 and cluster.resumed.weights == {} and cluster.resumed.seed == SEED
        for _ in range(NUM_UPDATES):
            learner.update(cluster)
        assert what_came(cluster, learner) == through


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_step_goes_on_without_a_reset(tmp_path, mode):
    actions = np.random.default_rng(0).integers(0, 2, (70, 2 * NUM_ENVS))

    def stepped(cluster, number, ended):
        """One step; where the mode asks for it, envs whose episodes have ended are reset first."""
        if mode == "disabled" and ended.any():
            cluster.reset(options={"reset_mask": ended})
        obs, rewards, terminated, truncated, _ = cluster.step(actions[number])
        return obs, rewards, terminated, truncated, terminated | truncated

    with cart_poles(autoreset_mode=mode) as cluster:
        cluster.reset()
        number, ended = 0, np.zeros(2 * NUM_ENVS, np.bool_)
        while number < 5 or not ended.any():  # saved where an env is to be reset
            *_, ended = stepped(cluster, number, ended)
            number += 1
        cluster.save(tmp_path / "run.ckpt")
        through, at_save = [], (number, ended)
        for number in range(at_save[0], 70):
            *_, ended = rows = stepped(cluster, number, ended)
            through.append(rows)
    number, ended = at_save
    with cart_poles(autoreset_mode=mode, resume=tmp_path / "run.ckpt") as cluster:
        if mode == "disabled":
            with pytest.raises(StepOnEndedEpisode):
                cluster.step(actions[number])
    with cart_poles(autoreset_mode=mode, resume=tmp_path / "run.ckpt") as cluster:
        assert cluster.np_random_seed == (-1,) * 2 * NUM_ENVS  # of generators that were restored
        for expected in through:
            *_, ended = rows = stepped(cluster, number, ended)
            number += 1
            for part, other in zip(rows, expected, strict=True):
                assert_array_equal(part, other)


def test_a_partial_reset_after_a_resume_repeats_what_the_others_show(tmp_path):
    with cart_poles() as cluster:
        cluster.reset()
        obs = cluster.step(np.zeros(2 * NUM_ENVS, np.int64))[0]
        cluster.save(tmp_path / "run.ckpt")
    mask = np.zeros(2 * NUM_ENVS, np.bool_)
    mask[1] = True
    with cart_poles(resume=tmp_path / "run.ckpt") as cluster:
        after = cluster.reset(options={"reset_mask": mask})[0]
    assert_array_equal(after[~mask], obs[~mask])
    assert (after[mask] != obs[mask]).any()


def test_another_autoreset_mode_wants_a_reset_first(tmp_path):
    with cart_poles() as cluster:
        cluster.reset()
        cluster.save(tmp_path / "run.ckpt")
    with cart_poles(resume=tmp_path / "run.ckpt", autoreset_mode="disabled") as cluster, pytest.raises(NotReset):
        cluster.step(np.zeros(2 * NUM_ENVS, np.int64))


def test_a_rollout_after_a_reset_goes_on_with_its_episodes(tmp_path):
    """Saved between reset() and the first rollout, which begins with the episodes of that reset."""
    with cart_poles() as cluster:
        obs, _ = cluster.reset(seed=77)
        cluster.save(tmp_path / "run.ckpt")
        through = rollout_digest(cluster.rollout(NumpyLearner().agent, NUM_STEPS))
    with cart_poles(resume=tmp_path / "run.ckpt") as cluster:
        rollout = cluster.rollout(NumpyLearner().agent, NUM_STEPS)
    assert_array_equal(rollout.obs[0], obs)
    assert rollout_digest(rollout) == through


# -- beside a stream --


@pytest.mark.parametrize("kwargs", [{}, {"worker_batch_size": 2}], ids=["all", "first ready"])
def test_a_checkpoint_is_saved_beside_a_stream(tmp_path, kwargs):
    learner = TorchLearner()
    with cart_poles(**kwargs) as cluster:
        stream = cluster.stream(learner.agent, NUM_STEPS)
        for number, rollout in enumerate(stream):
            learner.learn(rollout, 0.1)
            version = cluster.publish(learner.agent)
            if number == 6:
                cluster.save(tmp_path / "run.ckpt", extra=learner.state())
                saved = cluster.stats()
            if number == 12:
                break
        assert {each.num_rollouts for each in cluster.stats().workers} != {0}
        assert version == 14
    checkpoint = envfleet.load_checkpoint(tmp_path / "run.ckpt")
    assert checkpoint.version == 8 and checkpoint.has_env_states
    assert_array_equal(
        checkpoint.weights["actor.weight"], learner_after(checkpoint).module.actor.weight.detach().numpy()
    )
    learner = learner_after(checkpoint)
    with cart_poles(**kwargs, resume=tmp_path / "run.ckpt") as cluster:
        assert cluster.stats().num_steps == saved.num_steps  # with what was collected and not taken
        rollouts = [rollout for rollout, _ in zip(cluster.stream(learner.agent, NUM_STEPS), range(40), strict=False)]
        assert cluster.stats().version == 8  # what is published again, and is the same, is no new version
    num_steps, is_longer = Counter(), {}  # by env: of steps since the resume; is its first episode longer than these?
    for rollout in rollouts:
        for step, column, length in zip(rollout.final_steps, rollout.final_envs, rollout.episode_lengths, strict=True):
            env_id = int(rollout.env_ids[column])
            is_longer.setdefault(env_id, length > num_steps[env_id] + step + 1)
        num_steps.update(dict.fromkeys(map(int, rollout.env_ids), NUM_STEPS))
    assert any(is_longer.values())  # those had begun before


def learner_after(checkpoint):
    learner = TorchLearner()
    learner.restore(checkpoint.extra)
    return learner


# -- what cannot go on --


def test_envs_without_states_begin_new_episodes_with_new_seeds(tmp_path, caplog):
    agent = envfleet.FunctionPolicy(lambda obs: np.zeros(len(obs), np.int64))

    def first_obs(name, resume=None):
        """Of a run that ends with a checkpoint."""
        resume = None if resume is None else tmp_path / resume
        with ClusterEnv(NoiseEnv, 2, 2, backend="serial", seed=SEED, resume=resume) as cluster:
            obs = cluster.rollout(agent, 3).obs[0]
            cluster.save(tmp_path / name)
            cluster.save(tmp_path / name)
            return obs

    with caplog.at_level(logging.WARNING, "envfleet"):
        begun = first_obs("begun")
        (said,) = [each for each in caplog.messages if "the checkpoint lacks a part of worker" in each]
        assert "its envs have no states: " in said
        caplog.clear()
        resumed = first_obs("resumed", "begun")
        assert sum("has no states of some envs: these begin new episodes" in each for each in caplog.messages) == 1
    assert not envfleet.load_checkpoint(tmp_path / "begun").has_env_states
    assert_array_equal(first_obs("same", "begun"), resumed)  # the same checkpoint, the same course
    again = first_obs("again", "resumed")
    for one, other in ((begun, resumed), (begun, again), (resumed, again)):
        assert not (one == other).all(axis=-1).any(), "an env has begun with a seed that was used before"


@pytest.mark.parametrize("num_workers", [1, 3])
def test_another_number_of_workers_begins_new_episodes(tmp_path, caplog, num_workers):
    learner = NumpyLearner()
    with cart_poles() as cluster:
        for _ in range(3):
            learner.update(cluster)
        first = cluster.rollout(learner.agent, 1).obs[0]
        cluster.save(tmp_path / "run.ckpt", extra=learner.state())
        version = cluster.stats().version
    caplog.set_level(logging.WARNING, "envfleet")
    with cart_poles(num_workers, resume=tmp_path / "run.ckpt") as cluster:
        rollout = cluster.rollout(learner.agent, 5)
        assert cluster.stats().version == version and rollout.versions.tolist() == [version] * num_workers
        cluster.save(tmp_path / "run.ckpt")
    assert sum(f"with 2 workers, this one has {num_workers}" in each for each in caplog.messages) == 1
    assert not any((row == other).all() for row in rollout.obs[0] for other in first)


def test_what_differs_is_said_and_nothing_is_started(tmp_path):
    with cart_poles() as cluster:
        cluster.rollout(FeedForward(), 2)
        cluster.save(tmp_path / "run.ckpt")
    for kwargs, what in (
        ({"env": "Acrobot-v1"}, r"env is 'CartPole-v1' there, 'Acrobot-v1' here"),
        ({"num_envs": 4}, r"num_envs_per_worker is 3 there, 4 here"),
        ({"env": envfleet.EnvSpec(id="CartPole-v1", max_episode_steps=9)}, r"max_episode_steps is None there, 9 here"),
        ({"env_kwargs": {"sutton_barto_reward": True}}, r"env_kwargs is \{\} there"),
    ):
        with pytest.raises(CheckpointError, match=what):
            cart_poles(resume=tmp_path / "run.ckpt", **kwargs)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*none"):
        cart_poles(resume=tmp_path / "none")
    with pytest.raises(UsageError, match="named by its path; got 3"):
        cart_poles(resume=3)
    data = bytearray((tmp_path / "run.ckpt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        cart_poles(resume=tmp_path / "damaged")
    with cart_poles(resume=tmp_path / "run.ckpt") as cluster:
        with pytest.raises(
            UsageError, match=r"not the policy of the checkpoint: 2 of its weights differ, the first is 'actor"
        ):
            cluster.rollout(FeedForward(num_actions=3), 2)
        assert cluster.rollout(FeedForward(), 2).num_envs == 2 * NUM_ENVS


def test_other_spaces_are_refused(tmp_path):
    with ClusterEnv(NoiseEnv, 1, 1, backend="serial") as cluster:
        cluster.save(tmp_path / "run.ckpt")
    checkpoint_of = envfleet.cluster.checkpoint.checkpoint
    saved = checkpoint_of.read_checkpoint(tmp_path / "run.ckpt")[1]
    other = dataclasses.replace(
        saved, action_space={"space": {"kind": "discrete", "n": 9, "start": 0, "dtype": "int64"}, "arrays": {}}
    )
    checkpoint_of.write_checkpoint(tmp_path / "other", other, (None, []))
    with pytest.raises(CheckpointError, match=r"actions are Discrete\(9\) there"):
        ClusterEnv(NoiseEnv, 1, 1, backend="serial", resume=tmp_path / "other")


def test_states_that_do_not_fit_are_the_callers_error(tmp_path):
    """Saved by native envs, resumed with Python's: only the worker can tell."""
    with cart_poles() as cluster:
        cluster.reset()
        cluster.save(tmp_path / "run.ckpt")
    with pytest.raises(CheckpointError, match="cannot go on where the checkpoint has it: UsageError"):
        cart_poles(resume=tmp_path / "run.ckpt", backend="serial")


def test_workers_with_results_to_come_are_busy(tmp_path):
    with cart_poles() as cluster:
        cluster.reset()
        cluster.send(np.zeros(2 * NUM_ENVS, np.int64))
        with pytest.raises(EnvBusy, match="before you save"):
            cluster.save(tmp_path / "run.ckpt")
        cluster.recv()
        agent = NumpyLearner().agent
        with pytest.raises(ClusterTimeout):
            cluster.rollout(agent, 2000, timeout_s=1e-6)
        with pytest.raises(EnvBusy, match="finish the rollout"):
            cluster.save(tmp_path / "run.ckpt")
        cluster.rollout(agent, 2000)
        with pytest.raises(UsageError, match=r"extra\['x'\] is a object"):
            cluster.save(tmp_path / "run.ckpt", extra={"x": object()})
        assert not (tmp_path / "run.ckpt").exists()
        cluster.save(str(tmp_path / "run.ckpt"))
        assert envfleet.load_checkpoint(str(tmp_path / "run.ckpt")).extra is None


# -- kills --


def test_a_worker_that_dies_after_a_resume_does_not_restore_again(tmp_path):
    learner = NumpyLearner()
    with cart_poles() as cluster:
        learner.update(cluster)
        cluster.save(tmp_path / "run.ckpt", extra=learner.state())
    with cart_poles(resume=tmp_path / "run.ckpt") as cluster:
        first = cluster.rollout(learner.agent, NUM_STEPS)
        os.kill(cluster.stats().workers[0].pid, signal.SIGKILL)
        second = cluster.rollout(learner.agent, NUM_STEPS)
        assert cluster.stats().workers[0].num_restarts == 1
        own = slice(0, NUM_ENVS)
        assert not (second.obs[0][own] == first.obs[0][own]).all(axis=-1).any()
        assert_array_equal(second.obs[0][NUM_ENVS:], first.next_obs[NUM_ENVS:])
        cluster.save(tmp_path / "again.ckpt")
        third = rollout_digest(cluster.rollout(learner.agent, NUM_STEPS))
    with cart_poles(resume=tmp_path / "again.ckpt") as cluster:
        assert rollout_digest(cluster.rollout(learner.agent, NUM_STEPS)) == third


def test_what_a_worker_said_does_not_fit_the_process_in_its_place(tmp_path, monkeypatch):
    """It answers, and is lost and replaced before the other one has answered."""
    has_answered, taken = threading.Event(), StatesOfWorkers._taken

    def noted(self, worker, number):
        answer = taken(self, worker, number)
        if worker == 0 and answer is not None:
            has_answered.set()
        return answer

    monkeypatch.setattr(StatesOfWorkers, "_taken", noted)
    learner = NumpyLearner()
    with cart_poles() as cluster:
        learner.update(cluster)
        pids = [worker.pid for worker in cluster.stats().workers]

        def replace_first():
            assert has_answered.wait(30.0)
            os.kill(pids[0], signal.SIGKILL)
            wait_until(
                lambda: fleet(cluster)[0].is_ready and cluster.stats().workers[0].pid != pids[0], "it is replaced"
            )
            os.kill(pids[1], signal.SIGCONT)

        os.kill(pids[1], signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            helper = threads.submit(replace_first)
            cluster.save(tmp_path / "run.ckpt", extra=learner.state())
            helper.result(60.0)
    saved = envfleet.cluster.checkpoint.checkpoint.read_checkpoint(tmp_path / "run.ckpt")[1]
    assert [each.state is None for each in saved.head.workers] == [True, False]


def test_a_worker_that_is_lost_during_save_has_no_state(tmp_path):
    learner = NumpyLearner()
    with cart_poles() as cluster:
        learner.update(cluster)
        pid = cluster.stats().workers[1].pid
        os.kill(pid, signal.SIGSTOP)  # it cannot answer
        with pytest.raises(ClusterTimeout, match=r"no answer to save\(\) within 0.3 s: worker 1"):
            cluster.save(tmp_path / "run.ckpt", timeout_s=0.3)
        assert not (tmp_path / "run.ckpt").exists()
        os.kill(pid, signal.SIGKILL)
        cluster.save(tmp_path / "run.ckpt", extra=learner.state())
        assert envfleet.load_checkpoint(tmp_path / "run.ckpt").version == 1
        learner.update(cluster)
        wait_until(lambda: cluster.stats().workers[1].stage == "present", "the worker is replaced")
