"""InfoForm: the infos of envs that a user has chosen, as entries of a TensorDict, each with its mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.adapters.torchrl_forms import tensor_of
from envfleet.adapters.vector_source import SourceStep
from envfleet.contract.arrays import Array, BoolArray
from envfleet.contract.errors import MissingExtra, UsageError
from envfleet.contract.infos.table import Info, InfoTable, mask_key
from envfleet.contract.rollout import Rollout

try:
    import torch
    from torchrl.data import Binary, Composite, Unbounded
except ImportError as error:
    raise MissingExtra('the adapter for TorchRL needs it: pip install "envfleet[torchrl]"') from error

INFO, INFO_MASK = "info", "info_mask"


class InfoForm:
    """Chosen keys of infos: ("info", key) has the values, 0 where an env has none, ("info_mask", key) says where."""

    def __init__(self, infos: Mapping[str, Any] | None, device: Any) -> None:
        """Look whether these are numbers.

        Args:
            infos: The dtype of each key; `np.dtype((np.float32, (3,)))` for arrays.
            device: Where tensors are; None: the CPU.

        Raises:
            UsageError: A dtype is not one of numbers.
        """
        self.dtypes = {key: np.dtype(dtype) for key, dtype in (infos or {}).items()}
        self._device = device
        for key, dtype in self.dtypes.items():
            if dtype.base.kind not in "biuf":
                raise UsageError(f"infos of TorchRL are numbers; got {dtype} for {key!r}: leave it out")

    def add_spec(self, spec: Any, num_rows: int) -> None:
        """Add the entries to the spec of observations, a Composite."""
        if not self.dtypes:
            return
        infos, masks = (Composite(shape=(num_rows,), device=self._device) for _ in range(2))
        for key, dtype in self.dtypes.items():
            infos[key] = Unbounded((num_rows, *dtype.shape), dtype=torch_dtype_of(dtype), device=self._device)
            masks[key] = Binary(shape=(num_rows, 1), dtype=torch.bool, device=self._device)
        spec[INFO], spec[INFO_MASK] = infos, masks

    def put_step(self, rows: Any, step: SourceStep) -> None:
        """Add the infos of a step; where an episode has ended, of its last step."""
        finals = np.array([step.was_reset(row) for row in range(step.table.num_rows)]) if self.dtypes else None
        for key, dtype in self.dtypes.items():
            values, mask = _column(step.table, key, dtype)
            if finals is not None and finals.any():
                final_values, final_mask = _column(step.table.final_infos, key, dtype)
                values[finals], mask[finals] = final_values[finals], final_mask[finals]
            self._put(rows, key, values, mask)

    def put_reset(self, rows: Any, infos: Sequence[Info]) -> None:
        """Add the infos of a reset."""
        table = InfoTable.from_rows(dict(enumerate(infos)), len(infos)) if self.dtypes else InfoTable(0)
        for key, dtype in self.dtypes.items():
            self._put(rows, key, *_column(table, key, dtype))

    def _put(self, rows: Any, key: str, values: Array, mask: BoolArray) -> None:
        rows[INFO, key] = tensor_of(values, self._device)
        rows[INFO_MASK, key] = tensor_of(mask, self._device).unsqueeze(-1)


def rollout_infos(tensors: Rollout[Any], dtypes: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """The entries of a cluster's rollout, of tensors, each [T, N, ...].

    What came before the first step is not in a rollout: masks are False there.
    """
    entries: dict[tuple[str, ...], Any] = {}
    for key, dtype in dtypes.items():
        nothing = torch.zeros(dtype.shape, dtype=torch_dtype_of(dtype), device=tensors.rewards.device)
        no_mask = torch.zeros(1, dtype=torch.bool, device=nothing.device)
        for name, column, empty in ((INFO, key, nothing), (INFO_MASK, mask_key(key), no_mask)):
            shown, following = _infos_of_steps(tensors, column, empty)
            entries[name, key], entries["next", name, key] = shown, following
    return entries


def _infos_of_steps(tensors: Rollout[Any], column: str, empty: Any) -> tuple[Any, Any]:
    """What came with the observation before each step, and with the one after it; `empty` where nothing did."""
    num_steps, num_envs = tensors.rewards.shape
    shown = empty.expand(num_steps + 1, num_envs, *empty.shape).clone()
    if column in tensors.infos:
        shown[1:] = tensors.infos[column].reshape(shown[1:].shape).to(empty.dtype)
    following = shown[1:].clone()
    last = tensors.final_infos.get(column)
    final = empty if last is None else last.reshape(-1, *empty.shape).to(empty.dtype)
    following[tensors.final_steps, tensors.final_envs] = final
    return shown[:-1], following


def torch_dtype_of(dtype: Any) -> Any:
    """The dtype of tensors of such arrays."""
    return torch.from_numpy(np.empty(0, dtype.base)).dtype


def _column(table: InfoTable, key: str, dtype: Any) -> tuple[Array, BoolArray]:
    """The values of all rows, and where there are any."""
    values = np.zeros((table.num_rows, *dtype.shape), dtype.base)
    mask = np.zeros(table.num_rows, np.bool_)
    column = table.columns.get(key)
    if column is not None:
        mask[:] = table.columns[mask_key(key)]
        for row in np.flatnonzero(mask).tolist():
            try:
                values[row] = column[row]
            except (TypeError, ValueError, KeyError) as error:
                raise UsageError(f"the info {key!r} of an env is no {dtype}; got {column!r}") from error
    return values, mask
