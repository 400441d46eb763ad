"""Random programs of resets and steps, run on a pool and on Gymnasium's own SyncVectorEnv side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.testing import assert_array_equal

from envfleet.contract.arrays import Array
from envfleet.testing.envs import Act, ScriptedEnv

HARMLESS = (Act.GO_ON, Act.TERMINATE, Act.TRUNCATE, Act.END_BOTH)


class _FreshObs(ScriptedEnv):
    """Never reuses an observation: in same-step mode SyncVectorEnv does not copy the final one before the reset."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode with a new observation."""
        self._state = self._state.copy()
        return super().reset(seed=seed, options=options)


@dataclass(frozen=True)
class Program:
    """What to do with a pool of ScriptedEnv.

    An op is ("step", actions), ("reset", seed) or ("reset_some", mask): lists with an entry for each env.
    """

    num_envs: int
    ops: Sequence[tuple[str, Any]]


def run_program(pool: VectorEnv[Any, Any, Any], program: Program) -> None:
    """Run it on `pool` and on a SyncVectorEnv with the same autoreset mode; all results must be equal, bit for bit."""
    oracle = SyncVectorEnv([_FreshObs] * program.num_envs, autoreset_mode=pool.metadata["autoreset_mode"])
    try:
        seed_of_run: Any = 1
        require_equal(pool.reset(seed=seed_of_run), oracle.reset(seed=seed_of_run))
        ended = np.zeros(program.num_envs, dtype=np.bool_)
        for op, argument in program.ops:
            if op == "reset":
                require_equal(pool.reset(seed=argument), oracle.reset(seed=argument))
                ended[:] = False
            elif op == "reset_some":
                ended &= ~_reset_some(pool, oracle, np.array(argument))
            else:
                if pool.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
                    ended &= ~_reset_some(pool, oracle, ended.copy())
                result, expected = pool.step(np.array(argument)), oracle.step(np.array(argument))
                require_equal(result, expected)
                ended = expected[2] | expected[3]
    finally:
        oracle.close()


def _reset_some(pool: Any, oracle: Any, mask: Array) -> Array:
    if mask.any():
        got = pool.reset(options={"reset_mask": mask.copy()})
        expected_obs, expected_infos = oracle.reset(options={"reset_mask": mask.copy()})
        require_equal(got[0], expected_obs)
        require_equal(got[1]["first"][mask], expected_infos["first"][mask])
    return mask


def require_equal(got: Any, expected: Any, where: str = "result") -> None:
    """Equal structure, equal dtype, equal bits."""
    if isinstance(expected, dict):
        assert isinstance(got, dict) and got.keys() == expected.keys(), f"{where}: {got} is not {expected}"
        for key in expected:
            require_equal(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, tuple | list):
        assert len(got) == len(expected), f"{where}: {got} is not {expected}"
        for index, (each, each_expected) in enumerate(zip(got, expected, strict=True)):
            require_equal(each, each_expected, f"{where}[{index}]")
    elif isinstance(expected, np.ndarray) and expected.dtype == object:
        require_equal(list(got), list(expected), where)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype, f"{where}: dtype {got.dtype} is not {expected.dtype}"
        if not np.array_equal(got, expected):  # ten times as quick as the assertion, which says where, and knows NaN
            assert_array_equal(got, expected, err_msg=where)
    else:
        assert got == expected, f"{where}: {got} is not {expected}"


def random_program(num_envs: int, num_ops: int, draw: Callable[[int], int]) -> Program:
    """A program from a source of integers: `draw(n)` is between 0 and n - 1."""
    ops: list[tuple[str, Any]] = []
    for _ in range(num_ops):
        kind = draw(8)
        if kind == 0:
            ops.append(("reset", [None, 7, draw(100)][draw(3)]))
        elif kind == 1:
            ops.append(("reset_some", [bool(draw(2)) for _ in range(num_envs)]))
        else:
            ops.append(("step", [int(HARMLESS[draw(len(HARMLESS)) if draw(3) == 0 else 0]) for _ in range(num_envs)]))
    return Program(num_envs, ops)
