"""What a member of the run answers is checked: what cannot be true is an error, what an env may do is counted.

The worker is written by hand: one answer is wrong, those before and after it are not.
"""

import contextlib
import logging
import re
import time
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envfleet
from envfleet import APS, EnvFailed, PolicyFailed, WorkerFailed
from envfleet.cluster.head.config import HeadConfig
from envfleet.cluster.head.connections import Delivery
from envfleet.cluster.head.fleet import Fleet
from envfleet.cluster.network import Network
from envfleet.cluster.sync import EveryUpdate
from envfleet.cluster.timing import Timing
from envfleet.cluster.wire.codec import encode
from envfleet.cluster.wire.messages import PROTOCOL_VERSION, EnvFailure, Join, PoolPlan, Ready, Refused
from envfleet.cluster.wire.spaces import describe_space
from envfleet.contract.distributions import Categorical
from envfleet.contract.pool_config import PoolConfig
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.cluster.hand_worker import ByHand, HandWorker, cancelled
from tests.support.envs.cluster_envs import Agent, CountingEnv
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

T, N = 5, 2
AGENT = Agent()


class Answers:
    """A hand worker's answers: those that are said first, one for each order, then good ones."""

    def __init__(self, *first):
        self._first = list(first)  # functions (hand worker, order) -> frames

    def __call__(self, hand, order):
        answer = self._first.pop(0) if self._first else HandWorker.rollout
        return [answer(hand, order)]

    def add(self, answer):
        self._first.append(answer)


def good(hand, order):
    return hand.rollout(order)


def changed(change=lambda arrays: None, **fields):
    return lambda hand, order: hand.rollout(order, change=change, **fields)


@contextlib.contextmanager
def cluster(answers, **kwargs):
    launcher = ByHand(lambda address: [HandWorker(address, num_envs=N, answers=answers)])
    kwargs = {"heartbeat_s": 0.2, "resend_s": 1.0, "timeout_s": 20.0, "launcher": launcher, **kwargs}
    with envfleet.ClusterEnv(CountingEnv, 1, N, **cluster_arguments(kwargs)) as envs:
        yield envs


def ends(arrays, steps=(1, 3, 3), envs=(0, 0, 1), lengths=(2, 2, 4)):
    """Three episodes that end as their flags say."""
    arrays["terminated"][list(steps), list(envs)] = True
    arrays |= {
        "final_steps": np.array(steps, np.int64),
        "final_envs": np.array(envs, np.int64),
        "final_obs.0": np.zeros((len(steps), 2)),
        "episode_returns": np.zeros(len(steps)),
        "episode_lengths": np.array(lengths, np.int64),
        "episode_seconds": np.zeros(len(steps)),
    }


def with_ends(**changes):
    return changed(lambda arrays: ends(arrays, **changes))


def put(name, index, value):
    def change(arrays):
        array = arrays[name]
        (array.view(np.uint8) if array.dtype == np.bool_ else array)[index] = value

    return changed(change)


def but_end(name, index, value):
    def change(arrays):
        ends(arrays)
        arrays[name][index] = value

    return changed(change)


def failing(env_id):
    failure = EnvFailure(kind="E", env_id=env_id, error="e", traceback="", seed=None, last_action=None)
    return changed(failures=[failure])


IMPOSSIBLE = {
    "an action above its space": (put("action.0", (2, 1), 3), r"step 2, env 1 is 3, which Discrete\(3\) does not have"),
    "an action below its space": (put("action.0", (0, 0), -1), r"step 0, env 0 is -1, which Discrete\(3\)"),
    "a boolean of 2": (put("terminated", (0, 0), 2), "'terminated' of bool has bytes that are neither 0 nor 1"),
    "a boolean of 255": (put("truncated", (4, 1), 255), "'truncated' of bool has bytes"),
    "an end by the flags alone": (put("terminated", (2, 0), 1), "1 episodes end by their flags, 0 by final_steps"),
    "an end by final_steps alone": (but_end("terminated", (1, 0), False), "2 episodes end by their flags, 3 by"),
    "an end at another step": (but_end("final_steps", 0, 0), "must name the same ones"),
    "an end of another env": (but_end("final_envs", 0, 1), "must name the same ones"),
    "a negative length": (but_end("episode_lengths", 0, -3), "env 0 that ends in step 1 has a length of -3"),
    "a length of 0": (but_end("episode_lengths", 1, 0), "env 0 that ends in step 3 has a length of 0; possible: 2\\n"),
    "an episode longer than since the last": (but_end("episode_lengths", 1, 3), "length of 3; possible: 2\\n"),
    "an episode longer than the run": (but_end("episode_lengths", 2, 10), "length of 10; possible: 4 to 9\\n"),
    "NaN seconds": (changed(seconds=float("nan")), "took nan seconds"),
    "infinite seconds": (changed(seconds=float("inf")), "took inf seconds"),
    "negative seconds": (changed(seconds=-1.0), r"took -1\.0 seconds"),
    "an older version": (changed(version=0), "version 0; possible: from 1, of its last one, to 1, the newest"),
    "a version to come": (changed(version=2), "version 2; possible"),
    "a failure of another worker's env": (failing(N), "a failure of env 2; the worker's own are 0 to 1"),
    "a failure of no env": (failing(-1), "a failure of env -1"),
    "a cancellation that nobody asked for": (lambda hand, order: cancelled(order.order), "is not cancelled"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_true_costs_that_answer_only(name):
    wrong, words = IMPOSSIBLE[name]
    with cluster(Answers(good, wrong, good, with_ends())) as envs:
        assert envs.rollout(AGENT, T).num_steps == T
        with pytest.raises(WorkerFailed, match=f"worker 0 .*by-hand.*malformed: .*{words}"):
            envs.rollout(AGENT, T)
        for _ in range(3):
            assert envs.rollout(AGENT, T).num_steps == T
        stats = envs.stats()
        assert stats.num_refused == {"malformed": 1} and stats.workers[0].num_rollouts == 4
        assert np.isfinite(stats.workers[0].steps_per_s)


@pytest.mark.parametrize("credit", [1, 3])
@pytest.mark.parametrize("name", ["a cancellation that nobody asked for", "an end by the flags alone"])
def test_a_stream_keeps_its_credit(name, credit):
    """More wrong answers than it has credit, then good ones: each wrong one is an error, and the stream goes on."""
    wrong, words = IMPOSSIBLE[name]
    with cluster(Answers(*[good, wrong] * 4), credit=credit) as envs:
        stream = envs.stream(AGENT, T)
        for _ in range(4):
            assert next(stream).num_steps == T
            with pytest.raises(WorkerFailed, match=words):
                next(stream)
        for _ in range(2 * credit):
            assert next(stream).num_steps == T


def test_episodes_are_as_long_as_the_process_is_old():
    nine = with_ends(lengths=(2, 2, 9))
    with cluster(Answers(good, nine)) as envs:
        envs.rollout(AGENT, T)
        assert envs.rollout(AGENT, T).episode_lengths.tolist() == [2, 2, 9]
        with HandWorker(envs.address, num_envs=N, answers=Answers(nine), host="another"):
            wait_until(lambda: envs.stats().workers[0].host == "another", "another process has taken over")
            with pytest.raises(WorkerFailed, match=r"length of 9; possible: 4 to 4\n"):
                envs.rollout(AGENT, T)
            assert envs.rollout(AGENT, T).num_steps == T


def test_a_policy_that_chooses_what_there_is_not():
    """An env may take it all the same: the worker says whose fault it is."""
    with envfleet.ClusterEnv(CountingEnv, 1, N, backend="serial", timing={"timeout_s": 60.0}) as envs:
        with pytest.raises(PolicyFailed, match=r"step 0, env 0 is 7, which Discrete\(3\) does not have"):
            envs.rollout(Agent(7), T)
        assert envs.rollout(Agent(2), T).num_steps == T


# -- what envs may do --


def fill(value, obs=((3, 1),), rewards=(), finals=()):
    def change(arrays):
        ends(arrays)
        for place in obs:
            arrays["obs.0"][place][1] = value
        for place in rewards:
            arrays["rewards"][place] = value
        for place in finals:
            arrays["final_obs.0"][place][0] = value

    return changed(change)


NAN = float("nan")


@pytest.mark.parametrize(
    ("answer", "num_nan", "num_out_of_bounds"),
    [
        (fill(NAN, obs=[(3, 1), (4, 1), (4, 0)]), 3, 0),
        (fill(NAN, obs=[(0, 0)]), 0, 0),  # it was the last of the rollout before
        (fill(NAN, obs=[], rewards=[(0, 1), (4, 0)]), 2, 0),
        (fill(NAN, obs=[], finals=[0, 2]), 2, 0),
        (fill(NAN, obs=[(2, 1)], rewards=[(1, 1)]), 1, 0),  # of the same step
        (fill(-1.0, obs=[(5, 0), (1, 1)]), 0, 2),
        (fill(np.inf, obs=[(1, 0)], finals=[1]), 0, 2),
    ],
)
def test_nan_and_observations_out_of_bounds_are_passed_on_and_counted(answer, num_nan, num_out_of_bounds, caplog):
    with cluster(Answers(answer, answer)) as envs:
        for num_rollouts in (1, 2):
            assert envs.rollout(AGENT, T).num_steps == T
            worker = envs.stats().workers[0]
            assert worker.num_nan_rows == num_rollouts * num_nan
            assert worker.num_out_of_bounds_rows == num_rollouts * num_out_of_bounds
        assert (f"{2 * num_nan} rows with NaN" in envs.stats().summary) == bool(num_nan)
        assert not envs.stats().num_refused
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    told = [each for each in told if "passed on, and counted" in each]
    assert len(told) == (num_nan > 0) + (num_out_of_bounds > 0)  # not again with the second rollout
    assert all(re.match(r"env [01] of worker 0 \(host by-hand", each) for each in told)


# -- probes --


class Shown(Agent):
    def distribution(self, obs):
        return Categorical(np.zeros((len(obs), 3)) + self.weights["action"])


def probed(num_choices, **arrays):
    shown = {"probe.logits": np.zeros((T * N, num_choices)), **arrays}
    return changed(
        lambda arrays: arrays.update(shown, log_probs=np.zeros((T, N), np.float32)), distribution="categorical"
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (probed(5), r"its policy shows categorical with logits \(5,\); the learner's categorical with logits \(3,\)"),
        (changed(), "it has neither log_probs nor a distribution"),
        (probed(3, **{"probe_state.h": np.zeros((T * N, 1)), "state.h": np.zeros((N, 1))}), "remembers h float64"),
    ],
)
def test_a_probe_of_another_form_costs_that_answer_only(wrong, words):
    agent, answers = Shown(), Answers(probed(3), wrong)
    with cluster(answers, sync=APS(num_probes=T * N)) as envs:
        assert envs.rollout(agent, T).num_steps == T
        with pytest.raises(WorkerFailed, match=f"worker 0 .*malformed: .*{words}"):
            envs.rollout(agent, T)
        for _ in range(4):
            agent.weights = {"action": agent.weights["action"] + 1}
            answers.add(probed(3))
            assert envs.rollout(agent, T).num_steps == T
        assert envs.stats().num_measurements > 0
        assert envs.stats().num_refused == {"malformed": 1}


class Masked(Agent):
    """Shows how likely its actions are under the masks, which must fit."""

    def log_prob(self, obs, actions, action_mask=None):
        allowed = np.ones((len(obs), 3)) * action_mask
        return np.log(allowed[np.arange(len(obs)), actions] / allowed.sum(1)).astype(np.float32)


class MaskedShown(Masked):
    def distribution(self, obs, action_mask=None):
        return Categorical(np.zeros((len(obs), 3)) + np.where(action_mask, 0.0, -1e9))


def masked(*shape, is_shown=False):
    def change(arrays):
        arrays["action_mask"] = np.ones((T, N, *shape), np.bool_)
        arrays["log_probs"] = np.full((T, N), -np.log(3), np.float32)
        arrays.update({"probe.logits": np.zeros((T * N, 3))} if is_shown else {})

    return changed(change, distribution="categorical" if is_shown else None)


@pytest.mark.parametrize("kind", [Masked, MaskedShown])
@pytest.mark.parametrize("is_first", [True, False])
def test_action_masks_that_the_policy_cannot_take_cost_that_answer_only(kind, is_first):
    is_shown = kind is MaskedShown
    good, wrong = masked(3, is_shown=is_shown), masked(5, is_shown=is_shown)
    agent, answers = kind(), Answers(*([wrong, good] if is_first else [good, wrong]), *[good] * 3)
    with cluster(answers, sync=APS(num_probes=T * N)) as envs:

        def rollout():
            agent.weights = {"action": agent.weights["action"] + 1}
            assert envs.rollout(agent, T, action_mask="mask").action_masks.shape == (T, N, 3)

        if not is_first:
            rollout()
        with pytest.raises(WorkerFailed, match=r"worker 0 .*malformed: .* with action masks \(5,\): ValueError"):
            envs.rollout(agent, T, action_mask="mask")
        for _ in range(3):
            rollout()
        assert envs.stats().num_measurements > 0
        assert envs.stats().num_refused == {"malformed": 1}


class Picky(Agent):
    def log_prob(self, obs, actions):
        if np.isnan(obs).any():
            raise ArithmeticError("what is that?")
        return super().log_prob(obs, actions)


def test_rows_that_the_policy_cannot_take_fail_once():
    def likely(arrays):
        arrays["log_probs"] = np.zeros((T, N), np.float32)

    def likely_nan(arrays):
        likely(arrays)
        arrays["obs.0"][:] = NAN

    agent, answers = Picky(), Answers(changed(likely_nan), *[changed(likely)] * 4)
    with cluster(answers, sync=APS(num_probes=T * N)) as envs:
        assert envs.rollout(agent, T).num_steps == T
        agent.weights = {"action": agent.weights["action"] + 1}
        with pytest.raises(ArithmeticError, match="what is that"):
            envs.rollout(agent, T)
        for _ in range(4):
            assert envs.rollout(agent, T).num_steps == T
            agent.weights = {"action": agent.weights["action"] + 1}
        assert envs.stats().num_measurements > 0


def test_what_a_lost_process_has_shown_is_forgotten():
    agent, answers = Shown(), Answers(probed(3))
    with cluster(answers, sync=APS(num_probes=T * N)) as envs:
        envs.rollout(agent, T)
        agent.weights = {"action": agent.weights["action"] + 1}
        answers.add(probed(3))
        envs.rollout(agent, T)
        assert envs.stats().workers[0].divergence is not None
        with HandWorker(envs.address, num_envs=N, host="another"):
            wait_until(lambda: envs.stats().workers[0].host == "another", "another process has taken over")
            assert envs.stats().workers[0].divergence is None


# -- values of any form --


def last_action(raw):
    """An answer in which an env has failed, after this action, as it travels."""
    failure = EnvFailure(kind="E", env_id=0, error="e", traceback="", seed=None, last_action=msgspec.Raw(raw))
    return changed(failures=[failure])


def many(part, num_parts):
    return b"\xdd" + num_parts.to_bytes(4, "big") + part * num_parts


COLLIDING = [number * (2**61 - 1) for number in range(1, 2000)]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (many(b"\x80", 4 << 20), "entries in its lists"),
        (many(b"\x90", 4 << 20), "entries in its lists"),
        (many(b"\x91" * 50 + b"\xc0", 1 << 14), "entries in its lists"),
        (msgspec.msgpack.encode({1: 2}), "a key that is no text"),
        (msgspec.msgpack.encode(["list", {"a": {1.5: 2}}]), "a key that is no text"),
        (
            msgspec.msgpack.encode(["dict", *(each for key in COLLIDING for each in (["int", hex(key)], 0))]),
            "more than 64 have the same hash",
        ),
        (msgspec.msgpack.encode(["array", "bool", [3], b"\0\1\2"]), "neither 0 nor 1"),
    ],
)
def test_values_that_would_take_much_more_than_their_bytes_are_refused(raw, words):
    with cluster(Answers(good, last_action(raw))) as envs:
        envs.rollout(AGENT, T)
        tracemalloc.start()
        try:
            with pytest.raises(WorkerFailed, match=f"malformed.*{words}"):
                envs.rollout(AGENT, T)
            assert tracemalloc.get_traced_memory()[1] < 20_000_000 + 4 * len(raw)  # the hand worker is here, too
        finally:
            tracemalloc.stop()
        assert envs.rollout(AGENT, T).num_steps == T


def test_an_action_whose_text_cannot_be_shown():
    """Python makes no text of ints with more than 4,300 digits."""
    with cluster(Answers(last_action(msgspec.msgpack.encode(["int", "0x" + "f" * 10_000])))) as envs:
        with pytest.raises(EnvFailed) as caught:
            envs.rollout(AGENT, T)
        assert "last action: <int whose text cannot be shown: ValueError>" in str(caught.value)
        assert caught.value.last_action == 16**10_000 - 1


# -- names --


@pytest.mark.parametrize("host", ["", "a\x1b[2Jb", "two\nlines", "x" * 256, "h\u202eost", "r\u00e9seau"])
def test_hosts_with_names_that_cannot_be_shown_are_refused(host, caplog):
    with (
        cluster(Answers()) as envs,
        HandWorker(envs.address, num_envs=N, answers=Answers(), host=host) as other,
    ):
        wait_until(lambda: other.has(Refused), "it is refused")
        assert "printable ASCII" in next(each for each in other.received if isinstance(each, Refused)).why
        assert envs.rollout(AGENT, T).num_steps == T
        assert envs.stats().workers[0].host == "by-hand" and envs.stats().num_refused == {"joins refused": 1}
    assert "\x1b" not in caplog.text and "\u202e" not in caplog.text and "x" * 256 not in caplog.text


# -- anything --

NUMBERS = st.sampled_from([0, 1, 2, 3, -1, 5, 255, 2**31, 2**62, -(2**63)]) | st.floats(width=32)
CHANGES = st.tuples(
    st.sampled_from(["put", "put", "put", "drop", "cut", "dtype"]), st.integers(0, 9), st.integers(0, 60), NUMBERS
)


def mangled(steps, ends_too):
    def change(arrays):
        if ends_too:
            ends(arrays)
        for kind, which, place, number in steps:
            name = sorted(arrays)[which % len(arrays)]
            array = arrays[name]
            if kind == "drop":
                del arrays[name]
            elif kind == "cut":
                arrays[name] = array[:-1]
            elif kind == "dtype":
                arrays[name] = array.astype(np.float32)
            elif array.size:
                flat = array.reshape(-1)
                flat = flat.view(np.uint8) if flat.dtype == np.bool_ else flat
                with contextlib.suppress(ValueError, OverflowError):  # it does not hold that number
                    flat[place % len(flat)] = number

    return changed(change)


def test_mangled_rollouts_are_true_or_refused():
    answers = Answers()
    with cluster(answers) as envs:

        @settings(
            max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
        )
        @given(st.lists(CHANGES, min_size=1, max_size=3), st.booleans())
        def answer(steps, ends_too):
            answers.add(mangled(steps, ends_too))
            try:
                rollout = envs.rollout(AGENT, T)
            except WorkerFailed as error:
                assert "malformed" in str(error)
                return
            ended = rollout.terminations | rollout.truncations
            assert set(np.unique(ended.view(np.uint8))) <= {0, 1}
            assert np.array_equal(np.argwhere(ended), np.stack([rollout.final_steps, rollout.final_envs], 1))
            assert (rollout.episode_lengths >= 1).all()
            assert envs.single_action_space.contains(int(rollout.actions.min()))
            assert envs.single_action_space.contains(int(rollout.actions.max()))

        answer()
        assert envs.rollout(AGENT, T).num_steps == T
        assert set(envs.stats().num_refused) == {"malformed"} and envs.stats().workers[0].num_restarts == 0


class UnreadableWorker(HandWorker):
    """What it says of its pool is larger than it may be."""

    def _ready(self):
        ready, arrays = self._decoded_ready()
        return encode(msgspec.structs.replace(ready, metadata={"numbers": [0] * 400_000}), arrays)

    def _decoded_ready(self):
        env = CountingEnv()
        obs, obs_arrays = describe_space(env.observation_space, "observation_space")
        actions, action_arrays = describe_space(env.action_space, "action_space")
        return Ready(observation_space=obs, action_space=actions, metadata={}), {**obs_arrays, **action_arrays}


def test_a_worker_that_cannot_be_understood_when_it_is_ready_is_an_error():
    launcher = ByHand(lambda address: [UnreadableWorker(address, num_envs=N)])
    with (
        pytest.raises(WorkerFailed, match="cannot build its pool: what it says of its pool cannot be used"),
        envfleet.ClusterEnv(CountingEnv, 1, N, launcher=launcher, timing={"start_timeout_s": 60.0}),
    ):
        pass


def test_a_worker_that_asks_again_is_not_answered_again_while_the_answer_is_on_its_way():
    config = HeadConfig(
        plans=(PoolPlan(env=None, pool=PoolConfig(num_envs=1)),),
        env_pickles=(bytes(5_000_000),),
        sync=EveryUpdate(),
        timing=Timing(max_worker_restarts=3, join_timeout_s=10.0),
        network=Network(),
    )
    fleet = Fleet(config, lambda process, frames: Delivery.SENT, None, lambda *refused: None)
    for _ in range(3):
        fleet.join(b"p" * 16, Join(protocol=PROTOCOL_VERSION, worker=0, host="h", pid=1), time.monotonic())
        assert len(fleet[0].transfers.outgoing.queue) == 1
