"""ClusterEvaluation: episodes shared out among the workers, beside whatever else they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.cluster.head.answers import Answered, errors_of
from envfleet.cluster.head.restarts import Stage
from envfleet.cluster.head.socket import MOST_EXTENSION
from envfleet.cluster.run.progress import Progress
from envfleet.cluster.run.run import Run
from envfleet.cluster.wire.evaluations import CODE, WEIGHT
from envfleet.cluster.wire.messages import Code, Evaluate, Weights
from envfleet.cluster.wire.orders import Order
from envfleet.cluster.wire.plain_values import to_plain
from envfleet.cluster.wire.weights import digest
from envfleet.contract.errors import ClusterTimeout, WorkerLost
from envfleet.contract.evaluation import Episodes, Evaluation, joined_episodes, seeds_of_episodes
from envfleet.policies.adapting import as_policy, code_of, weights_of
from envfleet.policies.by_path import PolicySpec
from envfleet.policies.deterministic import deterministic_act

GIVEN_UP = "The evaluation is given up; streams and rollouts are not affected"
TELL_EVERY_S = 0.5


class ClusterEvaluation:
    """One evaluation: who plays which episodes, and what came of them. Results do not depend on who plays."""

    def __init__(self, run: Run, seeds: Sequence[int], order_for: Callable[[list[int]], Order]) -> None:
        """Play nothing yet.

        Args:
            run: The run.
            seeds: Of the episodes, one each.
            order_for: Makes the order for some of them, given by their numbers.
        """
        self._run = run
        self._head = run.head
        self._fleet = run.head.fleet
        self._num_episodes = len(seeds)
        self._order_for = order_for
        self._shares: dict[int, tuple[int, list[int]]] = {}  # open ones: worker -> order, numbers of its episodes
        self._played: list[tuple[Sequence[int], Episodes]] = []

    def play(self, timeout_s: float) -> Episodes:
        """Play all episodes; `timeout_s` is the longest time without a finished one."""
        activity = self._run.activity  # a stream must not be collected meanwhile: that would cancel all orders
        progress = Progress()
        try:
            players = self._players()
            if not players:
                raise WorkerLost(f"all workers were given up.\n{GIVEN_UP}")
            self._share(list(range(self._num_episodes)), players)
            self._wait(timeout_s, progress)
        finally:
            progress.close()
            for worker, (order, _) in self._shares.items():
                self._head.cancel_aside(worker, order)
            del activity
        return joined_episodes(self._played)

    def _players(self) -> list[int]:
        """Workers that are ready; if there are none, those that may still come."""
        ready = [record.worker for record in self._fleet if record.is_ready]
        return ready or [record.worker for record in self._fleet if record.restarts.stage is not Stage.GIVEN_UP]

    def _share(self, episodes: list[int], workers: list[int]) -> None:
        """Worker i of W plays episodes i, i + W, i + 2W, ... of these."""
        workers = [worker for worker in workers if worker not in self._shares][: len(episodes)]
        shares = {worker: episodes[index :: len(workers)] for index, worker in enumerate(workers)}
        for worker in shares:
            self._fleet[worker].num_played = 0
        issued = self._head.issue({worker: self._order_for(numbers) for worker, numbers in shares.items()})
        self._shares |= {worker: (number, shares[worker]) for worker, number in issued.items()}

    def _wait(self, timeout_s: float, progress: Progress) -> None:
        num_done, since_s = 0, time.monotonic()
        while self._shares:
            self._head.wait(self._has_news, min(TELL_EVERY_S, timeout_s))
            self._take()
            self._replace_given_up()
            now_s, num_now = time.monotonic(), self._num_done()
            if num_now != num_done:
                num_done, since_s = num_now, now_s
            # Large weights on their way over a slow network count as progress, within limits.
            moved_s = min(self._fleet.last_progress_s(self._shares), since_s + (MOST_EXTENSION - 1) * timeout_s)
            if self._shares and now_s - max(since_s, moved_s) > timeout_s:
                late = self._run.about(self._shares)
                done = f"{num_done} of {self._num_episodes} are"
                raise ClusterTimeout(f"no episode was finished within {timeout_s:g} s; {done}: {late}.\n{GIVEN_UP}")
            progress.show(f"{num_done} of {self._num_episodes} episodes are played", is_news=True)

    def _has_news(self) -> bool:
        return any(self._fleet[worker].asides for worker in self._shares)

    def _is_given_up(self, worker: int) -> bool:
        return self._fleet[worker].restarts.stage is Stage.GIVEN_UP

    def _take(self) -> None:
        for worker in [worker for worker in self._shares if self._fleet[worker].asides]:
            answer: Answered = self._fleet[worker].asides.popleft()
            order, numbers = self._shares[worker]
            if answer.order != order:  # of an evaluation that was interrupted
                continue
            del self._shares[worker]
            if not isinstance(answer.result, Episodes):
                raise errors_of(answer, self._run.num_envs_per_worker, "", False, GIVEN_UP)[0]
            self._played.append((numbers, answer.result))

    def _replace_given_up(self) -> None:
        """Others play the episodes of workers that will not come back."""
        for worker in [worker for worker in self._shares if self._is_given_up(worker)]:
            players = [each for each in self._players() if each not in self._shares and not self._is_given_up(each)]
            if not players:
                if all(map(self._is_given_up, self._shares)):
                    raise WorkerLost(f"lost, and not replaced any more: {self._fleet[worker].problem}.\n{GIVEN_UP}")
                continue  # another one plays: it will be asked when it is done
            order, numbers = self._shares.pop(worker)
            self._head.cancel_aside(worker, order)
            self._share(numbers, players)

    def _num_done(self) -> int:
        playing = sum(self._fleet[worker].num_played for worker in self._shares)
        return playing + sum(len(numbers) for numbers, _ in self._played)


def evaluate_on(
    run: Run,
    action_space: spaces.Space[Any],
    agent: Any,
    num_episodes: int,
    seed: int,
    is_deterministic: bool,
    num_recorded: int,
    action_mask: str | None,
    timeout_s: float,
) -> Evaluation:
    """Evaluate an agent on the workers of a run. The arguments are checked."""
    if is_deterministic and not isinstance(agent, PolicySpec):
        deterministic_act(as_policy(agent), action_space)  # refused here, before workers are asked
    seeds = seeds_of_episodes(seed, num_episodes)
    code, weights = code_of(agent), {name: np.array(each, order="C") for name, each in weights_of(agent).items()}
    arrays = {f"{WEIGHT}{name}": each for name, each in weights.items()}
    if code.pickled is not None:
        arrays[f"{CODE}pickled"] = np.frombuffer(code.pickled, np.uint8)

    def order_for(numbers: list[int]) -> Order:
        message = Evaluate(
            seeds=[seeds[number] for number in numbers],
            num_recorded=sum(number < num_recorded for number in numbers),
            is_deterministic=is_deterministic,
            action_mask=action_mask,
            code=Code(code_id=1, factory=code.factory, kwargs=to_plain(dict(code.kwargs))),
            weights=Weights(version=1, code_id=1, digest=digest(weights), bfloat16=[]),
        )
        return Order(message, arrays)

    return Evaluation.of(ClusterEvaluation(run, seeds, order_for).play(timeout_s), seeds, seed)
