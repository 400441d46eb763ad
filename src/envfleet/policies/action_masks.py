"""ActionMasks: which actions each env allows in the observation it shows, as its infos say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError
from envfleet.contract.infos.table import Infos, mask_key


def checked_key(action_mask: Any) -> str | None:
    """The argument `action_mask` of a call: a key of the infos, or None. Raises UsageError."""
    if action_mask is not None and not isinstance(action_mask, str):
        raise UsageError(f"action_mask must be a key of the envs' infos, or None; got {action_mask!r}")
    return action_mask


class ActionMasks:
    """The mask of each env's present observation: from the info of the reset or step that returned it."""

    def __init__(self, num_envs: int, infos: Infos | None) -> None:
        """`infos` are those of the present observations; None: they are not known."""
        self._num_envs = num_envs
        self._infos = infos  # None: they came in batches of some envs, and no key was known
        self._key: str | None = None
        self._current: Array | None = None  # [N, ...] bool
        self._recorded: Array | None = None  # [T, N, ...] bool

    def saved(self) -> tuple[Infos | None, str | None, Array | None]:
        """For a checkpoint: the infos of the present observations, the key, and the present masks."""
        return self._infos, self._key, self._current

    def restore(self, infos: Infos | None, key: str | None, current: Array | None) -> None:
        """Go on from a checkpoint."""
        self._infos, self._key, self._current = infos, key, current

    def begin(self, key: str | None, num_steps: int, num_columns: int | None = None) -> None:
        """Begin a rollout.

        Args:
            key: Of the masks in the infos; None: the policy gets none.
            num_steps: Number of steps.
            num_columns: Number of columns that are recorded; None: one for each env.

        Raises:
            UsageError: The infos have no such key, or no array under it.
        """
        if key is None:
            self._key = self._current = self._recorded = None
            return
        if key != self._key:
            if self._infos is None:
                raise UsageError(
                    f"action_mask={key!r} was not asked for in the rollout before, or when states were saved: call "
                    "reset() first"
                )
            self._key, self._current = None, self._taken(key, self._infos, self._num_envs)
            self._key = key
        assert self._current is not None
        num_columns = self._num_envs if num_columns is None else num_columns
        self._recorded = np.empty((num_steps, num_columns, *self._current.shape[1:]), np.bool_)

    def argument(self, rows: Array | None = None) -> dict[str, Any]:
        """The keyword argument of the policy's methods: masks of all envs, or of `rows`."""
        if self._current is None:
            return {}
        return {"action_mask": self._current if rows is None else self._current[rows]}

    def write(self, steps: int | Array, rows: Array | None = None, columns: Array | None = None) -> None:
        """Record the masks under which the policy acts in these steps, of all envs or of `rows`, in their columns."""
        if self._recorded is not None:
            assert self._current is not None
            if rows is None:
                self._recorded[steps] = self._current
            else:
                self._recorded[steps, rows if columns is None else columns] = self._current[rows]

    def see(self, infos: Infos, rows: Array | None = None) -> None:
        """Take the masks of new observations, of all envs or of `rows`. Raises UsageError as `begin` does."""
        self._infos = infos if rows is None else None
        if self._key is None:
            return
        num_rows = self._num_envs if rows is None else len(rows)
        key, self._key = self._key, None  # until all is well: masks that lack some rows are not used again
        taken = self._taken(key, infos, num_rows)
        self._key = key
        if rows is None:
            self._current = taken
        else:
            assert self._current is not None
            self._current = self._current.copy()  # the policy may have kept the one before
            self._current[rows] = taken

    def of(self, env_id: int) -> dict[str, Any]:
        """The mask of an env, in plain values; empty: there is none, or no key was asked for."""
        if self._key is None or self._current is None:
            return {}
        mask = self._current[env_id]
        return {"mask_key": self._key, "mask": mask.tobytes(), "mask_shape": mask.shape}

    def restored(self, running: Mapping[int, Mapping[str, Any]]) -> None:
        """Some envs show other observations now; by env id, what of() gave with these, or nothing."""
        keys = {each.get("mask_key") for each in running.values()}
        if None in keys or len(keys) > 1 or (len(running) < self._num_envs and keys != {self._key}):
            self._infos = self._key = self._current = None
            return
        masks = {
            env_id: np.frombuffer(each["mask"], np.bool_).reshape(each["mask_shape"])
            for env_id, each in running.items()
        }
        self._infos = None  # they are of other observations
        (self._key,) = keys
        if len(masks) < self._num_envs and self._current is not None:
            masks = {**dict(enumerate(self._current)), **masks}
        self._current = np.stack([masks[env_id] for env_id in range(self._num_envs)])

    def arrays(self, columns: Array | None = None) -> dict[str, Array]:
        """The masks of the rollout, of all columns or some, under their name on the wire."""
        if self._recorded is None:
            return {}
        return {"action_mask": self._recorded if columns is None else self._recorded[:, columns]}

    def _taken(self, key: str, infos: Infos, num_rows: int) -> Array:
        masks, has = infos.get(key), infos.get(mask_key(key))
        failed = infos.get(mask_key("env_error"), np.zeros(num_rows, np.bool_))
        if masks is None and self._current is not None and failed.all():
            return np.ones((num_rows, *self._current.shape[1:]), np.bool_)
        if masks is None:
            known = ", ".join(repr(each) for each in infos if mask_key(each) in infos) or "none"
            raise UsageError(f"action_mask={key!r}: the envs' infos have no such key; they have: {known}")
        if not isinstance(masks, np.ndarray) or masks.dtype.kind not in "biuf" or masks.ndim < 2:
            kind = f"{masks.dtype} {masks.shape}" if isinstance(masks, np.ndarray) else type(masks).__name__
            raise UsageError(
                f"action_mask={key!r}: each env must have an array of numbers there, of one shape, 0 for each action "
                f"that is not allowed; got {kind} for {num_rows} envs"
            )
        allowed: Array = masks != 0
        missing = failed if has is None else ~has
        if missing.any():
            if (missing & ~failed).any():
                rows = np.flatnonzero(missing & ~failed).tolist()
                raise UsageError(f"action_mask={key!r}: the infos of these envs of the worker lack it: {rows}")
            allowed[missing] = True  # an env that could not be reset has no mask: it will fail again, or be restarted
        if self._current is not None and self._current.shape[1:] != allowed.shape[1:]:
            raise UsageError(
                f"action_mask={key!r}: masks must keep their shape; they were {self._current.shape[1:]}, and are now "
                f"{allowed.shape[1:]}"
            )
        return allowed
