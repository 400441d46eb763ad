"""The worker: one pool, its copies of the policy, one connection to the head. `python -m envfleet.cluster.worker`

Carries out the head's orders one after the other, and answers each. An error in the user's code is an answer, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from envfleet.cluster.sync import News, SyncRule
from envfleet.cluster.wire.codec import named
from envfleet.cluster.wire.evaluations import CODE, WEIGHT
from envfleet.cluster.wire.messages import (
    Call,
    ChangeEnvs,
    Collect,
    Evaluate,
    EvaluationReady,
    GetState,
    NotReady,
    OrderCancelled,
    OrderFailed,
    Ready,
    Reset,
    RestoreState,
    RolloutReady,
    RowsReady,
    SaveState,
    SetAttr,
    SetState,
    StateReady,
    StateRestored,
    Step,
    ValuesReady,
    Welcome,
)
from envfleet.cluster.wire.plain_values import from_plain, to_plain
from envfleet.cluster.wire.spaces import describe_space
from envfleet.cluster.wire.states import states_to_plain
from envfleet.cluster.wire.weights import unpacked
from envfleet.cluster.wire.worker_states import STATE
from envfleet.cluster.worker.collecting.first_ready import FirstReadyCollector
from envfleet.cluster.worker.collecting.policy_copies import PolicyCopies
from envfleet.cluster.worker.collecting.policy_state import PolicyError
from envfleet.cluster.worker.evaluation_pool import EvaluationHung, EvaluationPool
from envfleet.cluster.worker.keys import take_keys
from envfleet.cluster.worker.link import Cancelled, Leave, Link
from envfleet.cluster.worker.plain_answers import plain_parts, sendable
from envfleet.cluster.worker.pool_states import PoolStates
from envfleet.cluster.worker.pool_stepping import PoolStepping
from envfleet.cluster.worker.watchdog import leave_with_stdin
from envfleet.cluster.worker.worker_pool import WorkerPool
from envfleet.cluster.worker.worker_state import (
    OWN_NUMBERS,
    SavedPolicy,
    decoded,
    encoded,
    lacks_random_state,
    saved_sequence,
    sequence_of,
)
from envfleet.contract.arrays import Arrays
from envfleet.contract.errors import EnvFailed, PoolTimeout, StepOnEndedEpisode
from envfleet.contract.policy import Policy, SavesRandomState
from envfleet.contract.pool_config import Line
from envfleet.contract.worker_environment import CPUS_VARIABLE, KEYS_VARIABLE, cpus_in
from envfleet.policies.seeding import random_numbers_kept, random_states, seed_policy, set_random_states
from envfleet.pool.process.tolerant_output import tolerate_full_disk

logger = logging.getLogger("envfleet.worker")


FAILED = 1  # the exit code of all that WorkerExit does not name
MOST_LEFT_OUT_CHARS = 2048  # that StateReady takes


class Worker:
    """Carries out the head's orders."""

    def __init__(self, link: Link, welcome: Welcome, arrays: Arrays) -> None:
        """Build the pool that the head wants."""
        self._link = link
        self._sync: SyncRule = welcome.sync
        self._pool = WorkerPool(welcome, arrays, link.look)
        self._stepping, self._states = PoolStepping(self._pool), PoolStates(self._pool)
        self._evaluations = EvaluationPool(*self._pool.env_settings, link.look)
        self._device = welcome.device
        self._copies = PolicyCopies(has_several=welcome.plan.pool.line is Line.FIRST_READY, device=self._device)
        self._first_env_id = welcome.plan.first_env_id
        seed = welcome.plan.seed
        self._seeds = np.random.SeedSequence(None if seed is None else (seed, self._first_env_id, welcome.epoch, 1))
        self._saved_policy: SavedPolicy | None = None  # of a checkpoint, until the policy is built
        self._random_states: dict[str, Any] = {}  # of a checkpoint, until torch is imported
        self._ready = self._introduction()

    def run(self) -> NoReturn:
        """Carry out orders until the head tells the worker to stop, or is gone."""
        self._link.say_ready(*self._ready)
        while True:
            order, arrays = self._link.next_order()
            try:
                self._carry_out(order, arrays)
            except (Leave, KeyboardInterrupt):
                raise
            except Cancelled:
                self._link.answer(OrderCancelled(order=order.order))
            except PolicyError as error:
                self._fail(order.order, "policy", error)
            except PoolTimeout as error:
                line = f"PoolTimeout: {self._pool.give_up(error)}"
                logger.warning("order %d failed: %s", order.order, line)
                self._link.answer(OrderFailed(order=order.order, kind="env", error=sendable(line), traceback=""))
            except EvaluationHung as error:
                self._link.answer(OrderFailed(order=order.order, kind="env", error=sendable(str(error)), traceback=""))
            except Exception as error:
                self._fail(order.order, "env" if isinstance(error, EnvFailed) else "order", error)

    def close(self) -> None:
        """Close the pool and its envs."""
        self._evaluations.close()
        self._pool.close()

    def _introduction(self) -> tuple[Ready, Arrays]:
        """What the head must know of the pool. Raises UsageError for spaces that cannot cross the wire."""
        pool = self._pool.envs
        obs, obs_arrays = describe_space(pool.single_observation_space, "observation_space")
        actions, action_arrays = describe_space(pool.single_action_space, "action_space")
        metadata = {key: value for key, value in pool.metadata.items() if key != "autoreset_mode"}
        ready = Ready(
            observation_space=obs,
            action_space=actions,
            metadata=plain_parts(metadata, "metadata"),
            why_no_changes=pool.why_no_changes,
        )
        return ready, {**obs_arrays, **action_arrays}

    def _carry_out(self, order: Any, arrays: Arrays) -> None:
        link = self._link
        if isinstance(order, ChangeEnvs | RestoreState):  # also a cancelled one: it is for all that follows
            return self._carry_out_always(order, arrays)
        if link.is_cancelled(order.order):
            raise Cancelled
        if isinstance(order, Step):
            link.answer(*self._stepping.step(order, arrays))
        elif isinstance(order, Collect):
            link.answer(*self._collect(order))
        elif isinstance(order, Evaluate):
            link.answer(*self._evaluate(order, arrays))
        elif isinstance(order, SaveState):
            link.answer(*self._state(order))
        elif isinstance(order, Reset):
            link.answer(*self._reset(order))
        else:
            link.answer(ValuesReady(order=order.order, values=self._values(order)))

    def _values(self, order: Call | SetAttr | GetState | SetState) -> Any:
        """The answer to an order about single envs: a value for each env of the pool, as a message carries it."""
        pool = self._pool
        if isinstance(order, GetState):
            return states_to_plain(self._states.get_state(order.env_ids))
        if isinstance(order, Call):
            pool.require_idle()
            envs, args, kwargs = pool.envs, from_plain(order.args), from_plain(order.kwargs)
            env_ids = range(envs.num_envs) if order.env_ids is None else order.env_ids
            values = dict(zip(env_ids, envs.call_some(list(env_ids), order.name, *args, **kwargs), strict=True))
            return to_plain([values.get(env_id) for env_id in range(envs.num_envs)], f"the result of {order.name!r}")
        if isinstance(order, SetAttr):
            pool.set_attr(order.name, from_plain(order.values))
        else:
            self._states.set_state(order)
        return to_plain([None] * pool.envs.num_envs)

    def _reset(self, order: Reset) -> tuple[RowsReady, Arrays]:
        if order.seeds[0] is not None:
            self._seeds = np.random.SeedSequence((order.seeds[0], self._first_env_id, 1))
            self._copies.forget_seeds()
            self._forget_saved_numbers()
        return self._stepping.reset(order)

    def _carry_out_always(self, order: ChangeEnvs | RestoreState, arrays: Arrays) -> None:
        if isinstance(order, RestoreState):
            self._restore(order, arrays)
            self._link.answer(StateRestored(order=order.order))
        else:
            self._pool.change(order)
            nothing = to_plain([None] * self._pool.envs.num_envs)
            self._link.answer(ValuesReady(order=order.order, values=nothing))

    def _collect(self, order: Collect) -> tuple[RolloutReady, Arrays]:
        self._bring_up_to_date(order)
        copies = self._copies
        copies.seed_new(self._seed)
        started_s = time.monotonic()
        failures: list[Exception] = []
        try:
            collector = self._pool.collector(failures)
            rest = order.num_steps, failures, partial(self._between_steps, order), self._sync.num_probes, order.infos
            if isinstance(collector, FirstReadyCollector):
                arrays, distribution, infos = collector.collect(copies, *rest, stream=order.stream)
            else:
                arrays, distribution, infos = collector.collect(copies.newest, *rest)
        except StepOnEndedEpisode as ended:
            self._pool.drop_collector()
            if (cause := _cause_of(ended, failures)) is not None:
                raise cause from None
            raise
        ready = RolloutReady(
            order=order.order,
            version=int(arrays["versions"].max()) if "versions" in arrays else copies.version,
            distribution=distribution,
            seconds=time.monotonic() - started_s,
            failures=[self._pool.failure(each) for each in failures],
            infos=infos,
        )
        return ready, arrays

    def _evaluate(self, order: Evaluate, arrays: Arrays) -> tuple[EvaluationReady, Arrays]:
        """With the policy that the order brings: the copy for rollouts stays as it is."""
        with random_numbers_kept():  # those of rollouts go on as if nothing had been built or played
            copies = PolicyCopies(device=self._device)
            copies.build(order.code, named(arrays, CODE))
            copies.load(order.weights, named(arrays, WEIGHT))
            return self._evaluations.play(order, copies.newest, partial(self._between_steps, order), self._link.say)

    # -- checkpoints --

    def _state(self, order: SaveState) -> tuple[StateReady, Arrays]:
        """All that decides what this worker does next."""
        self._pool.require_idle()
        pool, why_no_envs = self._states.saved()
        left_out = [] if why_no_envs is None else [f"its envs have no states: {why_no_envs}"]
        copies, link, waiting = self._copies, self._link, self._saved_policy
        code_id, version, weights = copies.code_id, copies.version, dict[str, Any]()
        is_seeded, random_state = copies.is_seeded, None
        if waiting is not None:  # it has not built its policy since it was restored
            code_id, version = waiting.weights.code_id, waiting.weights.version
            is_seeded, random_state = waiting.is_seeded, waiting.random_state
            weights = unpacked(waiting.weights, waiting.arrays)
        elif copies.has_weights:
            policy, weights = copies.newest, copies.newest.get_weights()
            if isinstance(policy, SavesRandomState):
                random_state = policy.get_random_state()
            elif lacks_random_state(policy):
                left_out.append(OWN_NUMBERS)
        values = {
            "pool": pool,
            "seeds": saved_sequence(self._seeds),
            "news": [link.news.version, link.news.divergence, link.news.measured_version],
            "random": {**self._random_states, **random_states()},
            "is_seeded": is_seeded,
            "random_state": random_state,
        }
        ready = StateReady(
            order=order.order,
            code_id=code_id,
            version=version,
            has_env_states=why_no_envs is None,
            left_out=[sendable(each)[:MOST_LEFT_OUT_CHARS] for each in left_out],
        )
        sent = {} if version == order.version else {f"{WEIGHT}{name}": each for name, each in weights.items()}
        return ready, {STATE: encoded(values), **sent}

    def _restore(self, order: RestoreState, arrays: Arrays) -> None:
        saved = decoded(arrays[STATE])
        self._states.restore(saved["pool"])
        self._seeds, self._link.news = sequence_of(saved["seeds"]), News(*saved["news"])
        self._random_states = {} if set_random_states(saved["random"]) else {"torch": saved["random"]["torch"]}
        if order.weights is None:
            self._pool.forget_memory()
        else:
            own = saved["is_seeded"], saved["random_state"]
            self._saved_policy = SavedPolicy(order.weights, named(arrays, WEIGHT), *own)

    def _forget_saved_numbers(self) -> None:
        """The policy is to be seeded anew, also that of a checkpoint which is not built yet."""
        if self._saved_policy is not None:
            self._saved_policy = replace(self._saved_policy, is_seeded=False)

    def _build_saved(self, order: Collect) -> None:
        """Build the policy of the checkpoint, as it was then. If the learner has another one now, that is built later.

        What its building draws at random counts for nobody.
        """
        saved, held = self._saved_policy, self._copies
        if saved is not None and saved.weights.code_id == order.code_id:
            with random_numbers_kept():
                code = self._link.pull_code(held.code_id, order.order)
                self._saved_policy = None
                held.build(*code)
                if held.code_id == saved.weights.code_id:
                    held.load(saved.weights, saved.arrays)
            if held.has_weights and saved.is_seeded:
                if isinstance(held.newest, SavesRandomState):
                    held.newest.set_random_state(saved.random_state)
                if not lacks_random_state(held.newest):
                    held.mark_seeded()
        self._saved_policy = None
        if self._random_states and set_random_states(self._random_states):
            self._random_states = {}
        if not held.has_weights:
            self._pool.forget_memory()

    def _between_steps(self, order: Collect | Evaluate) -> None:
        self._link.look()
        if self._link.is_cancelled(order.order):
            raise Cancelled

    def _seed(self, policy: Policy) -> None:
        """Never the numbers of another worker, of the envs, or of a copy before this one."""
        seed_policy(policy, int(self._seeds.spawn(1)[0].generate_state(1, np.uint64)[0]))

    def _bring_up_to_date(self, order: Collect) -> None:
        """Pull the newest policy if there is none yet, or if the rule says so."""
        link, held = self._link, self._copies
        link.drain()
        if self._saved_policy is not None:
            self._build_saved(order)
        news = link.news.after_order(order)
        is_due = news.should_pull(self._sync, held.version, order.max_lag)
        if not held.is_built or held.code_id < order.code_id:
            held.build(*link.pull_code(held.code_id, order.order))
        # It has none yet if it was just built, or if the order for which it was built has been cancelled.
        if not held.has_weights or is_due:
            weights, arrays = link.pull_weights(held.version, news.version, order.order)
            while weights.code_id != held.code_id:  # the learner has changed its policy meanwhile
                held.build(*link.pull_code(held.code_id, order.order))
                weights, arrays = link.pull_weights(held.version, news.version, order.order)
            held.load(weights, arrays, in_use=self._pool.versions_in_use(order.stream))

    def _fail(self, order: int, kind: str, error: BaseException) -> None:
        logger.warning("order %d failed", order, exc_info=error)
        text = sendable("".join(traceback.format_exception(error)))
        line = sendable(str(error) if isinstance(error, PolicyError) else f"{type(error).__name__}: {error}")
        failures = [self._pool.failure(error)] if isinstance(error, EnvFailed) else []
        self._link.answer(OrderFailed(order=order, kind=kind, error=line, traceback=text, failures=failures))


def _cause_of(ended: StepOnEndedEpisode, failures: list[Exception]) -> EnvFailed | None:
    """Why the env has no episode, if it failed in the same order."""
    env_id = getattr(ended, "env_id", None)
    return next((each for each in reversed(failures) if isinstance(each, EnvFailed) and each.env_id == env_id), None)


def main(argv: list[str] | None = None) -> int:
    """Run one worker until its head has no more use for it."""
    parser = argparse.ArgumentParser(prog="python -m envfleet.cluster.worker", description=main.__doc__)
    parser.add_argument("--head", required=True, help="address of the head")
    parser.add_argument(
        "--silence-s", type=float, default=30.0, help="close a connection that is silent for this many seconds"
    )
    parser.add_argument("--worker", type=int, required=True, help="which worker of the run this is, from 0")
    parser.add_argument("--keys-file", type=Path, help=f"file with the run's keys, mode 0600; else {KEYS_VARIABLE}")
    parser.add_argument("--ends-with-stdin", action="store_true", help="leave when the standard input is closed")
    arguments = parser.parse_args(argv)
    tolerate_full_disk()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    _keep_to_cpus()
    link = Link(arguments.head, arguments.worker, take_keys(arguments.keys_file), arguments.silence_s)
    signal.signal(signal.SIGTERM, lambda *_: setattr(link, "leave_because", "SIGTERM"))
    signal.signal(signal.SIGUSR1, lambda *_: setattr(link, "finish_because", "its time limit is near (SIGUSR1)"))
    if arguments.ends_with_stdin:
        leave_with_stdin(lambda why: setattr(link, "leave_because", why))
    why, code = "an error of its own", FAILED
    try:
        why = _serve(link)
    except Leave as leave:
        why, code = str(leave), leave.code
    finally:
        logger.info("leaving: %s", why)
        link.close(why, is_failure=code == FAILED)
    return code


def _serve(link: Link) -> str:
    """Join and carry out orders until Leave is raised. Returns the error if the pool cannot be built."""
    welcome, arrays = link.join()
    logger.info("joined: process %d of worker %d", welcome.epoch, link.worker)
    try:
        worker = Worker(link, welcome, arrays)
    except (Leave, KeyboardInterrupt):
        raise
    except BaseException as error:
        logger.exception("the pool cannot be built")
        line = sendable(f"{type(error).__name__}: {error}")
        link.say(NotReady(error=line, traceback=sendable("".join(traceback.format_exception(error)))))
        return line
    try:
        worker.run()
    finally:
        worker.close()


def _keep_to_cpus() -> None:
    """Keep to the CPUs that the launcher has given to this worker."""
    cpus = os.environ.get(CPUS_VARIABLE)
    if cpus:
        try:
            os.sched_setaffinity(0, cpus_in(cpus))
        except (OSError, ValueError) as error:
            logger.warning("this worker cannot keep to CPUs %s: %s", cpus, error)
