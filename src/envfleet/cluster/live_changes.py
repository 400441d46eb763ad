"""LiveChanging: changes of remote envs, made at any time, also while a stream runs. Nothing waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envfleet.cluster.head.head import Head
from envfleet.cluster.wire.messages import ChangeEnvs
from envfleet.cluster.wire.plain_values import to_plain
from envfleet.contract.errors import UsageError
from envfleet.contract.live_changes import Change, attribute_change, call_change, options_change


class LiveChanging:
    """Numbers changes, and hands them to the head, which gives them to all workers, those to come included."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._num_changes = 0

    @property
    def num_changes(self) -> int:
        """The number of the last change, for a checkpoint."""
        return self._num_changes

    def restore(self, num_changes: int) -> None:
        """Go on from a checkpoint."""
        self._num_changes = num_changes

    def broadcast(self, name: str, value: Any) -> int:
        """See ClusterEnv."""
        return self._make(attribute_change(self._num_changes + 1, name, value))

    def call_at_reset(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """See ClusterEnv."""
        return self._make(call_change(self._num_changes + 1, name, args, kwargs))

    def set_reset_options(self, options: Mapping[str, Any] | None) -> int:
        """See ClusterEnv."""
        return self._make(options_change(self._num_changes + 1, options))

    def _make(self, change: Change) -> int:
        if self._head.fleet.why_no_changes is not None:
            raise UsageError(self._head.fleet.why_no_changes)
        self._head.change(message_of(change))
        self._num_changes = change.number
        return change.number


def message_of(change: Change) -> ChangeEnvs:
    """A change as it travels. Raises NotPlain."""
    args, kwargs = change.load()
    return ChangeEnvs(
        number=change.number,
        kind=change.kind,
        name=change.name,
        args=to_plain(tuple(args), "args"),
        kwargs=to_plain(dict(kwargs), "kwargs"),
    )
