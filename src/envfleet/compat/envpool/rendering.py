"""RenderSettings: the arguments of make() that say how envs are drawn."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from envfleet.compat.envpool.errors import WrongSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderSettings:
    """EnvPool's, without "render_" before their names."""

    mode: str | None = None  # "rgb_array": render() returns pictures
    env_id: int = 0  # the env that render() draws if it is told none
    width: int | None = None  # None: as Gymnasium draws this env
    height: int | None = None
    camera_id: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        if self.mode == "human":
            raise WrongSetting("render_mode='human' opens no window here: use 'rgb_array', and show the pictures")
        if self.mode not in (None, "rgb_array"):
            raise WrongSetting(f"render_mode must be None or 'rgb_array'; got {self.mode!r}")

    @classmethod
    def take_from(cls, given: dict[str, Any]) -> RenderSettings:
        """Take them out of the arguments of make()."""
        names = {f"render_{field.name}": field.name for field in fields(cls)}
        return cls(**{names[name]: given.pop(name) for name in list(given) if name in names})

    def env_kwargs(self, family: str) -> dict[str, Any]:
        """The arguments with which an env is drawn like this, or WrongSetting: only MuJoCo's have a choice."""
        chosen = {"width": self.width, "height": self.height, "camera_id": self.camera_id}
        given = {name: value for name, value in chosen.items() if value is not None}
        if given and not family.startswith("mujoco"):
            names = ", ".join(f"render_{name}" for name in given)
            raise WrongSetting(f"{names}: envs are drawn in one size, that of Gymnasium, except those on MuJoCo")
        return given
