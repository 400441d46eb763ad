"""PoolPlace: where the envs of a worker's pool are, between two orders."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envfleet.cluster.wire.messages import PoolPlan
from envfleet.cluster.worker.collecting.collector import Collector
from envfleet.cluster.worker.collecting.episode_changes import EpisodeChanges
from envfleet.cluster.worker.collecting.first_ready import FirstReadyCollector
from envfleet.contract.arrays import Array
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvFailed
from envfleet.contract.infos.table import Infos


class Episodes(enum.Enum):
    """How it is with the episodes of this worker's envs."""

    NONE = enum.auto()  # never reset since the pool was built
    CUT_SHORT = enum.auto()  # the head was told that they ended with an earlier process or pool; to be reset next
    FRESH = enum.auto()  # reset by the head, and not stepped since
    RESTORED = enum.auto()  # put back into saved states, and not stepped since: they go on in any autoreset mode
    RUNNING = enum.auto()


BEGUN = (Episodes.FRESH, Episodes.RESTORED, Episodes.RUNNING)


@dataclass(slots=True)
class PoolPlace:
    """Written by all parts of a worker that have orders for its envs carried out."""

    autoreset: Autoreset
    epoch: int  # processes that this worker has had
    num_beginnings: int = 0  # of all envs, in this process
    episodes: Episodes = Episodes.NONE
    collector: Collector | FirstReadyCollector | None = None  # of the rollouts that go on; None: another is made
    reset_arguments: dict[str, Any] = field(default_factory=dict)
    reset_infos: Infos = field(default_factory=dict)  # of the last reset of all envs
    last_obs: Any = None
    seed: int | None = None  # for the first reset that brings none
    has_ended: Array = field(default_factory=lambda: np.zeros(0, np.bool_))  # [num_envs]: the next step is a reset
    changes: EpisodeChanges = field(default_factory=lambda: EpisodeChanges(0))  # of the running episodes
    hung: EnvFailed | None = None  # the last pool was given up, and the head was sent no rows since
    num_hung: int = 0  # pools that were given up since an episode was finished
    untold: list[EnvFailed] = field(
        default_factory=list
    )  # of envs that a stream had left at work, for the next rollout

    def begin_anew(self, plan: PoolPlan) -> None:
        """No env has been reset yet, or each is to be reset next."""
        self.episodes, self.collector = Episodes.NONE, None
        self.seed = _first_seed(plan, self.epoch, self.num_beginnings)
        self.num_beginnings += 1


def _first_seed(plan: PoolPlan, epoch: int, num_beginnings: int) -> int | None:
    """Later beginnings have seeds of their own, the same ones in each run: those of the first episodes are used up."""
    if plan.seed is None:
        return None
    seed = plan.seed + plan.first_env_id
    if epoch == 1 and num_beginnings == 0:
        return seed
    return int(np.random.SeedSequence((seed, epoch, num_beginnings)).generate_state(1)[0])
