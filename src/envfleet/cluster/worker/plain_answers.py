"""What a worker says of its envs, in values that the wire carries: their infos, and why they failed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from envfleet.cluster.wire.messages import EnvFailure
from envfleet.cluster.wire.plain_values import NotPlain, from_plain, to_plain
from envfleet.contract.errors import text_of
from envfleet.contract.infos.table import Infos

logger = logging.getLogger("envfleet.worker")

_FINALS = ("final_obs", "_final_obs", "final_info", "_final_info")  # of no use for the masks of present observations


def env_failure(error: Exception, first_env_id: int) -> EnvFailure:
    """What the head is told of an env that failed; `first_env_id` is that of the worker in the whole run."""
    env_id = getattr(error, "env_id", 0)
    text = str(error.args[0]) if error.args else str(error)
    return EnvFailure(
        kind=type(error).__name__,
        env_id=first_env_id + env_id,
        error=sendable(text.removeprefix(f"env {env_id}: ")),  # the head names the env of the whole run
        traceback=sendable(getattr(error, "child_traceback", "")),
        seed=getattr(error, "seed", None),
        last_action=_plain_action(getattr(error, "last_action", None)),
    )


def plain_parts(values: Mapping[str, Any], name: str) -> Any:
    """What of a dictionary can cross the wire; what cannot is left out, and the log says so once."""
    try:
        return to_plain(dict(values), name)
    except NotPlain:
        kept = {}
        for key, value in values.items():
            try:
                to_plain(value, f"{name}[{key!r}]")
                kept[key] = value
            except NotPlain as error:
                if str(error) not in _told:
                    _told.add(str(error))
                    logger.warning("left out, since the head takes plain values only: %s", error)
        return to_plain(kept, name)


_told: set[str] = set()


def kept_infos(infos: Infos) -> Infos:
    """What of the infos of present observations a checkpoint has."""
    kept = {name: each for name, each in infos.items() if name not in _FINALS}
    return from_plain(plain_parts(kept, "infos"))  # type: ignore[no-any-return]


def sendable(text: str) -> str:
    """Text of the user's code, which may hold half characters, as the wire can carry it."""
    return text.encode("utf-8", "replace").decode()


def _plain_action(action: Any) -> Any:
    try:
        return to_plain(action)
    except NotPlain:
        return to_plain(sendable(text_of(action)))
