"""A row whose contenders step the same environments: how it is declared, and how its contenders are started."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.rows import Comparison, NotInstalled, Row, Start, Target
from benchmarks.rows.contenders import GYMNASIUM_SYNC, Actions, Contender, EnvFn, Running

NUM_ACTION_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Peer:
    """A contender to be compared with, and the ratio to reach."""

    contender: Contender
    target_ratio: float | None = None  # None: for reference


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow(Row):
    """Environments that all contenders step."""

    num_envs: int
    # (env_id, burn iterations a second) -> how to build that env. The second argument is measured once in a
    # run, so that a microsecond of CPU is the same amount of work for every contender.
    env_fn: Callable[[int, float], EnvFn]


def pool_row(
    *,
    name: str,
    title: str,
    num_envs: int,
    env_fn: Callable[[int, float], EnvFn],
    subject: Contender,
    peers: tuple[Peer, ...],
    requires: tuple[str, ...] = (),
    is_native: bool = False,  # the subject's envs are C++: it wins by more than the number of cores
) -> PoolRow:
    has_one_core_peer = not is_native and any(peer.contender is GYMNASIUM_SYNC for peer in peers)
    return PoolRow(
        name=name,
        title=f"{title}, {num_envs} env{'s' if num_envs > 1 else ''}",
        unit="env steps/s",
        number=lambda window: window.rate,
        comparisons=tuple(
            Comparison(subject, peer.contender, Target.RATIO_AT_LEAST, peer.target_ratio) for peer in peers
        ),
        requires=requires,
        one_core_peer=GYMNASIUM_SYNC.name if has_one_core_peer else None,
        num_envs=num_envs,
        env_fn=env_fn,
    )


def start_pools(row: PoolRow, machine: dict[str, Any], arguments: argparse.Namespace) -> Start:
    """All contenders get the same environments and the same actions."""
    env_fns = [row.env_fn(env_id, machine["burn_iterations_per_s"]) for env_id in range(row.num_envs)]
    actions = _sample_actions(env_fns[0], row.num_envs)
    # Objects of imported libraries would be scanned by every full collection, in windows that allocate much.
    gc.collect()
    gc.freeze()

    def start(contender: Contender) -> Running:
        if not contender.is_installed():
            raise NotInstalled(contender.package)
        return contender.build(env_fns, actions)

    return start


def _sample_actions(env_fn: EnvFn, num_envs: int) -> Actions:
    env = env_fn()
    env.action_space.seed(0)
    batches = [[env.action_space.sample() for _ in range(num_envs)] for _ in range(NUM_ACTION_BATCHES)]
    env.close()
    return np.array(batches)
