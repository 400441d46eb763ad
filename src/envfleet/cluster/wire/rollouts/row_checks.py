"""RowChecks: the numbers in what a worker sends, compared with its spaces and with each other.

What no worker of ours can send is refused: actions that the space does not have, booleans other than 0 and 1, ends of
episodes in one array and not in the other. What an env makes of its observations and rewards is its own business, and
counted: see SuspectRows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from gymnasium import spaces

from envfleet.cluster.wire.codec import BadMessage
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.bounds import Bounds
from envfleet.contract.spaces import Leaf, SpaceTree, has_nan

Bounded = tuple[Bounds, Array]


@dataclass(frozen=True, slots=True)
class SuspectRows:
    """Rows of one answer that show NaN, or an observation outside its space. Envs may do so: nothing is refused.

    An env is named by its row among the worker's.
    """

    num_nan: int = 0  # in the observation or the reward
    nan_env: int | None = None  # the first of them
    num_out_of_bounds: int = 0
    out_of_bounds_env: int | None = None

    def __bool__(self) -> bool:
        """Whether any row is suspect."""
        return bool(self.num_nan or self.num_out_of_bounds)

    def of_envs(self, env_ids: Array) -> SuspectRows:
        """The same, where the rows are those of `env_ids` instead of all envs."""
        nan, outside = (None if row is None else int(env_ids[row]) for row in (self.nan_env, self.out_of_bounds_env))
        return replace(self, nan_env=nan, out_of_bounds_env=outside)


NONE_SUSPECT = SuspectRows()


class RowChecks:
    """Of one worker's rows and rollouts, whose shapes and dtypes have been checked."""

    def __init__(self, obs: SpaceTree, actions: SpaceTree) -> None:
        self.obs = [Bounds(leaf) for leaf in obs.leaves]
        self.frames = [Bounds(_newest_frame(leaf)) for leaf in obs.leaves]  # of stacks: what is new in each
        self._actions = [Bounds(leaf) for leaf in actions.leaves]

    def require_actions(self, actions: Sequence[Array]) -> None:
        """Refuse NaN, and choices that the space does not have. A Box may be left: Gaussian policies often do."""
        for bounds, values in zip(self._actions, actions, strict=True):
            wrong = bounds.rows_outside(values) if bounds.is_choice else bounds.rows_with_nan(values)
            if wrong is not None:
                row = tuple(int(index) for index in np.argwhere(wrong)[0])
                name, space = bounds.leaf.name_in("actions"), bounds.leaf.space
                raise BadMessage(f"{name} of step {row[0]}, env {row[1]} is {values[row]}, which {space} does not have")

    @staticmethod
    def suspects(seen: Iterable[Bounded], finals: Iterable[Bounded], arrays: Arrays) -> SuspectRows:
        """`seen` shows what follows each step, [..., N, *shape]; `finals` what episodes came to, [F, *shape]."""
        rewards = arrays["rewards"]
        with_nan, outside = (np.isnan(rewards) if has_nan(rewards) else None), None
        for bounds, values in seen:
            its_nan, its_outside = bounds.suspects(values)
            with_nan, outside = _either(with_nan, its_nan), _either(outside, its_outside)
        for bounds, values in finals:
            if len(values):
                its_nan, its_outside = bounds.suspects(values)
                with_nan = _either(with_nan, _ends_at(its_nan, arrays))
                outside = _either(outside, _ends_at(its_outside, arrays))
        if with_nan is None and outside is None:
            return NONE_SUSPECT
        return SuspectRows(*_counted(with_nan), *_counted(outside))


def require_ends(arrays: Arrays, num_steps_before: int | None) -> None:
    """The ends of episodes are those of the flags, and their lengths are the steps since the end before.

    `num_steps_before` have been ordered of this process before: the first episode of each env may have begun there.
    """
    steps, envs, lengths = arrays["final_steps"], arrays["final_envs"], arrays["episode_lengths"]
    ended_steps, ended_envs = np.nonzero(arrays["terminated"] | arrays["truncated"])
    if not (np.array_equal(steps, ended_steps) and np.array_equal(envs, ended_envs)):
        raise BadMessage(
            f"{len(ended_steps)} episodes end by their flags, {len(steps)} by final_steps and final_envs, which must "
            f"name the same ones, step by step"
        )
    if not len(steps):
        return
    order = np.lexsort((steps, envs))
    steps, envs, lengths = steps[order], envs[order], lengths[order]
    is_first = np.ones(len(steps), np.bool_)
    is_first[1:] = envs[1:] != envs[:-1]
    least = steps + 1
    least[~is_first] = np.diff(steps)[~is_first[1:]]
    most = np.where(is_first, np.iinfo(np.int64).max if num_steps_before is None else least + num_steps_before, least)
    wrong = np.flatnonzero((lengths < least) | (lengths > most))
    if len(wrong):
        which = wrong[0]
        allowed = str(least[which]) if not is_first[which] else f"{least[which]} to {most[which]}"
        raise BadMessage(
            f"the episode of env {envs[which]} that ends in step {steps[which]} has a length of {lengths[which]}; "
            f"possible: {allowed}"
        )


def _either(one: Array | None, other: Array | None) -> Array | None:
    return other if one is None else one if other is None else one | other


def _ends_at(wrong: Array | None, arrays: Arrays) -> Array | None:
    """Rows of final observations as rows of the rollout."""
    if wrong is None:
        return None
    rows = np.zeros(arrays["rewards"].shape, np.bool_)
    rows[arrays["final_steps"][wrong], arrays["final_envs"][wrong]] = True
    return rows


def _counted(rows: Array | None) -> tuple[int, int | None]:
    """How many, and the env of the first."""
    if rows is None:
        return 0, None
    return int(np.count_nonzero(rows)), int(np.argwhere(rows)[0][-1])


def _newest_frame(leaf: Leaf) -> Leaf:
    """What the last part of a stacked Box is; other leaves are none."""
    if not isinstance(leaf.space, spaces.Box) or not leaf.shape or not leaf.shape[0]:
        return leaf
    space = spaces.Box(leaf.space.low[-1], leaf.space.high[-1], leaf.shape[1:], leaf.space.dtype)
    return replace(leaf, space=space, shape=leaf.shape[1:])
