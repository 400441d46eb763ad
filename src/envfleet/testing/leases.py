"""Returned arrays are leases: they are never overwritten while they are held, and reused when nobody holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.testing import assert_array_equal

from envfleet.testing.envs import Act, ScriptedEnv


def check_leases(make: Callable[..., Any], num_batches: int = 1000) -> None:
    """Hold on to many batches, some of them only by a view of one row, and compare them at the end."""
    with make(ScriptedEnv, 3) as pool:
        obs, _ = pool.reset(seed=0)
        held: list[tuple[Any, Any]] = [(obs, obs.copy())]
        for step in range(num_batches):
            actions = [Act.GO_ON, Act.TERMINATE if step % 7 == 0 else Act.GO_ON, Act.TRUNCATE]
            obs, rewards, terminations, truncations, _ = pool.step(np.array(actions))
            held.append((obs[1], obs[1].copy()))
            held.append((rewards, rewards.copy()))
            held.append(((terminations, truncations), (terminations.copy(), truncations.copy())))
        del obs, rewards, terminations, truncations
        for kept, copied in held:
            for array, expected in zip(kept, copied, strict=True) if isinstance(kept, tuple) else [(kept, copied)]:
                assert_array_equal(array, expected)
    for kept, copied in held[:3]:  # also after the pool is closed
        assert_array_equal(kept, copied)
