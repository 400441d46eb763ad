"""EnvSpec: how to build an environment. EnvTraits: what is known of it once it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.contract.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How to build one env: a Gymnasium id, or a factory by its import path.

    It has plain values only, so that it can travel to another machine without pickling code.
    """

    id: str | None = None  # "LunarLander-v3"
    factory: str | None = None  # "package.module:function"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None  # None: what is registered for the id
    render_mode: str | None = None

    def __post_init__(self) -> None:
        """Check that exactly one of `id` and `factory` is given."""
        if (self.id is None) == (self.factory is None):
            raise UsageError(f"EnvSpec takes either id= or factory=; got id={self.id!r}, factory={self.factory!r}")
        if self.factory is not None and self.factory.count(":") != 1:
            raise UsageError(f"factory must read 'package.module:function'; got {self.factory!r}")


@dataclass(frozen=True, slots=True)
class EnvTraits:
    """What is known of an env once it is built."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    gymnasium_spec: Any = None  # gymnasium.envs.registration.EnvSpec, if the env has one
    info_columns: Mapping[str, np.dtype[Any]] = field(default_factory=dict)  # numbers that every info of it has
