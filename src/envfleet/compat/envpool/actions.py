"""ActionReader: actions in any form that EnvPool takes, as our pools take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from envfleet.compat.envpool.array_spec import ArraySpec
from envfleet.compat.envpool.errors import WrongAction
from envfleet.contract.arrays import Array, IntArray


class ReadActions(NamedTuple):
    """Actions, and the envs that they are for; None: all."""

    actions: Array
    env_ids: IntArray | None


class ActionReader:
    """Reads arrays of any number type, rows of one number, and dicts as EnvPool's low-level API has them."""

    def __init__(self, our_space: spaces.Space[Any], spec: Mapping[str, ArraySpec]) -> None:
        """`our_space` is that of one env, `spec` EnvPool's of its actions."""
        self._dtype = np.dtype(our_space.dtype)
        self._is_discrete = isinstance(our_space, spaces.Discrete)
        self._num_values = int(our_space.n) if isinstance(our_space, spaces.Discrete) else 0
        self._spec = spec

    def read(self, action: Any, env_id: Any) -> ReadActions:
        """Take actions as EnvPool's step() and send() do.

        Args:
            action: An array with a row for each env, or a dict with "action" and maybe "env_id".
            env_id: Indices of some envs; None: those of the dict, or all.

        Returns:
            The actions in the dtype of our envs. Floats for discrete actions lose their fraction, as in EnvPool.

        Raises:
            WrongAction: A dict has no action, or a value of another dtype than EnvPool takes there; or a discrete
                action is none of the env's.
        """
        if isinstance(action, Mapping):
            given = _flat(action)
            self._require(given)
            action, env_id = given["action"], given.get("env_id") if env_id is None else env_id
        values = np.asarray(action)
        if self._is_discrete and values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.dtype != self._dtype:
            values = values.astype(self._dtype)
        if self._is_discrete and values.size and (values.min() < 0 or values.max() >= self._num_values):
            wrong = values[(values < 0) | (values >= self._num_values)].flat[0]
            raise WrongAction(f"actions must be from 0 to {self._num_values - 1}; got {wrong}")
        return ReadActions(values, None if env_id is None else env_ids_of(env_id))

    def read_compiled(self, jax: Any, action: Any, env_id: Any) -> tuple[Any, Any]:
        """The same inside of compiled programs, where arrays have no values yet: C++ looks at these."""
        if isinstance(action, Mapping):
            given = _flat(action)
            self._require_names(given)
            action, env_id = given["action"], given.get("env_id") if env_id is None else env_id
        values = jax.numpy.asarray(action)
        if self._is_discrete and values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        values = values.astype(jax.dtypes.canonicalize_dtype(self._dtype))
        return values, None if env_id is None else jax.numpy.atleast_1d(env_id)

    def _require_names(self, given: dict[str, Any]) -> None:
        if "action" not in given:
            raise WrongAction(f"a dict of actions needs the key 'action'; got {', '.join(given) or 'no key'}")
        for name in given:
            if name not in self._spec:
                raise WrongAction(f"a dict of actions may have the keys {', '.join(self._spec)}; got {name!r}")

    def _require(self, given: dict[str, Any]) -> None:
        self._require_names(given)
        for name, value in given.items():
            expected = np.dtype(self._spec[name].dtype)
            if (dtype := np.asarray(value).dtype) != expected:
                raise WrongAction(
                    f"{name!r} in a dict of actions must have dtype {expected}, as in EnvPool; got {dtype}: "
                    "convert it, or pass the array alone"
                )


def env_ids_of(env_id: Any) -> IntArray:
    """Indices of envs, as a vector."""
    return np.atleast_1d(np.asarray(env_id)).astype(np.int32, copy=False)


def _flat(action: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in action.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
