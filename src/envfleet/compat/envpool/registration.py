"""make() and its kin, as EnvPool has them in `envpool.registration`."""

from __future__ import annotations

import difflib
import importlib.util
from typing import Any, NoReturn

from envfleet.compat.envpool import gym_form
from envfleet.compat.envpool.errors import WrongSetting
from envfleet.compat.envpool.gymnasium_form import gymnasium_class
from envfleet.compat.envpool.real_envpool import is_installed, real_envpool
from envfleet.compat.envpool.rendering import RenderSettings
from envfleet.compat.envpool.spec import EnvSpec, make_env_spec
from envfleet.compat.envpool.tasks import Task, find_task, task_ids

_ENV_TYPES = ("dm", "gym", "gymnasium")


class EnvRegistry:
    """EnvPool's tasks: those that are envs of ours, and those of the real EnvPool if it is installed."""

    def make(self, task_id: str, env_type: str, **kwargs: Any) -> Any:
        """Make a pool.

        Args:
            task_id: EnvPool's id of a task, such as "Pong-v5".
            env_type: "gymnasium", "gym" or "dm".
            kwargs: EnvPool's arguments: `num_envs`, `batch_size`, `num_threads`, `seed`, `max_episode_steps`, those of
                the task, `render_mode`.

        Returns:
            The pool. Tasks that are no envs of ours are the real EnvPool's.

        Raises:
            WrongSetting: There is no such task or type, or a value is outside its limits.
            UnknownSetting: The task has no such argument.
        """
        if env_type not in _ENV_TYPES:
            raise WrongSetting(f"env_type must be one of {', '.join(map(repr, _ENV_TYPES))}; got {env_type!r}")
        task = find_task(task_id)
        if task is None:
            _require_real(task_id)
            with real_envpool() as envpool:
                return envpool.make(task_id, env_type=env_type, **kwargs)
        render = RenderSettings.take_from(kwargs)
        spec = _spec_of(task, kwargs)
        if env_type == "dm":
            from envfleet.compat.envpool.dm_form import dm_class

            return dm_class(task.kind.name)(spec, render)
        if env_type == "gym":
            return _make_gym(task, spec, render, kwargs)
        if not spec.settings["gym_reset_return_info"]:
            raise WrongSetting("reset() of Gymnasium returns infos: gym_reset_return_info=False is for env_type='gym'")
        return gymnasium_class(task.kind.name)(spec, render)

    def make_dm(self, task_id: str, **kwargs: Any) -> Any:
        """Make a pool whose batches are TimeSteps of dm_env.

        Args:
            task_id: EnvPool's id of a task.
            kwargs: As for make().

        Returns:
            The pool.
        """
        return self.make(task_id, "dm", **kwargs)

    def make_gym(self, task_id: str, **kwargs: Any) -> Any:
        """Make a pool for a script that uses OpenAI's gym.

        Args:
            task_id: EnvPool's id of a task.
            kwargs: As for make().

        Returns:
            The pool.
        """
        return self.make(task_id, "gym", **kwargs)

    def make_gymnasium(self, task_id: str, **kwargs: Any) -> Any:
        """Make a pool that is a vector env of Gymnasium.

        Args:
            task_id: EnvPool's id of a task.
            kwargs: As for make().

        Returns:
            The pool.
        """
        return self.make(task_id, "gymnasium", **kwargs)

    def make_spec(self, task_id: str, **kwargs: Any) -> Any:
        """Describe a pool without making it.

        Args:
            task_id: EnvPool's id of a task.
            kwargs: As for make().

        Returns:
            Its spec: settings, spaces, arrays.

        Raises:
            WrongSetting: There is no such task, or a value is outside its limits.
        """
        task = find_task(task_id)
        if task is None:
            _require_real(task_id)
            with real_envpool() as envpool:
                return envpool.make_spec(task_id, **kwargs)
        RenderSettings.take_from(kwargs)
        return _spec_of(task, kwargs)

    def list_all_envs(self) -> list[str]:
        """List the tasks that make() knows.

        Returns:
            Their ids: first those that are envs of ours, then the others of the real EnvPool, if it is installed.
        """
        ours = task_ids()
        if not is_installed():
            return ours
        with real_envpool() as envpool:
            return [*ours, *(task_id for task_id in envpool.list_all_envs() if task_id not in ours)]

    @property
    def specs(self) -> dict[str, Any]:
        """The tasks that make() knows, by id."""
        return {task_id: find_task(task_id) for task_id in self.list_all_envs()}

    def register(self, task_id: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: EnvPool registers C++ classes of its own build.

        Args:
            task_id: The id.
            args: Not used.
            kwargs: Not used.

        Raises:
            WrongSetting: Always.
        """
        raise WrongSetting(
            f"{task_id!r} cannot be registered here: register it with Gymnasium and use envfleet.make(), or see "
            "docs/native_env.md for envs in C++"
        )


def _spec_of(task: Task, kwargs: dict[str, Any]) -> EnvSpec:
    if kwargs.pop("from_pixels", False):
        raise WrongSetting("from_pixels is not available here: envfleet.make(..., pixels=envfleet.Pixels()) draws envs")
    return make_env_spec(task.kind, {**task.settings, **kwargs})


def _make_gym(task: Task, spec: EnvSpec, render: RenderSettings, kwargs: dict[str, Any]) -> Any:
    """In the form of the gym that the script has imported; without one, that of Gymnasium, as EnvPool since 1.0."""
    gym = gym_form.imported_gym()
    if gym_form.is_old(gym) and "gym_reset_return_info" not in kwargs:
        spec.settings["gym_reset_return_info"] = False
    if gym is None and spec.settings["gym_reset_return_info"]:
        return gymnasium_class(task.kind.name)(spec, render)
    has_five_values = gym is not None and not gym_form.is_old(gym)
    return gym_form.gym_class(task.kind.name, gym, has_five_values)(spec, render)


def _require_real(task_id: str) -> None:
    """Refuse a task that is no env of ours, unless the real EnvPool has it."""
    if is_installed():
        with real_envpool() as envpool:
            known = envpool.list_all_envs()
        if task_id in known:
            return
    near = difflib.get_close_matches(str(task_id), registry.list_all_envs(), 3)
    advice = f"; did you mean {', '.join(near)}?" if near else ""
    if not is_installed():
        advice += "; tasks that only EnvPool has need it: pip install envpool"
    if str(task_id).endswith("-v5") and importlib.util.find_spec("ale_py") is None:
        advice += "; Atari games need ale-py: pip install 'envfleet[atari]'"
    raise WrongSetting(f"{task_id!r} is no task of EnvPool's that runs here{advice}. list_all_envs() lists them")


registry = EnvRegistry()
make = registry.make
make_dm = registry.make_dm
make_gym = registry.make_gym
make_gymnasium = registry.make_gymnasium
make_spec = registry.make_spec
list_all_envs = registry.list_all_envs
register = registry.register
