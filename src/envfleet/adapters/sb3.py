"""SB3VecEnv: a pool or a cluster as Stable-Baselines3's VecEnv."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import envfleet
from envfleet.adapters.vector_source import VectorSource, env_ids_of
from envfleet.contract.arrays import Array
from envfleet.contract.errors import MissingExtra, UsageError

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise MissingExtra(
        f'envfleet.adapters.sb3 needs Stable-Baselines3: pip install "envfleet[sb3]" ({error})'
    ) from error

Indices = int | Iterable[int] | None
StepReturn = tuple[Any, Array, Array, list[dict[str, Any]]]


class SB3VecEnv(VecEnv):
    """A pool, or a cluster that is stepped with actions, as Stable-Baselines3's algorithms and wrappers take it.

    Of the episodes that end, `info["terminal_observation"]` has the last observation, and the rest of the info is that
    of the last step; every info has `TimeLimit.truncated`. Episode statistics come from `VecMonitor`, or from a
    `Monitor` around each env, as `make_vec_env(..., vec_env_cls=SB3VecEnv)` puts it there.
    """

    def __init__(self, envs: Any, **options: Any) -> None:
        """Take the envs, which close() closes.

        Args:
            envs: A pool or a ClusterEnv with `autoreset_mode="same_step"`; or a list of functions, each of which makes
                an env, as Stable-Baselines3's own classes take it: they run in a pool.
            options: Of that pool, as for `envfleet.make`; only with a list of functions.

        Raises:
            UsageError: The envs do not reset in the same step, come in batches of some, or are no envs; or there are
                options that nobody takes.
            EnvFailed: An env cannot be built.
        """
        self._source = VectorSource(_envs_of(envs, options), "SB3VecEnv")
        self._was_reset = False
        self.spec = getattr(self._source.envs, "spec", None)
        super().__init__(self._source.num_envs, self._source.single_observation_space, self._source.single_action_space)

    # -- stepping --

    def reset(self) -> Any:
        """Reset all envs, with what seed() and set_options() were given.

        Returns:
            Observations, a row for each env; `reset_infos` has the infos.
        """
        seeds = None if all(each is None for each in self._seeds) else self._seeds  # None: the pool's own seed, if any
        obs: Any = None
        for options, rows in self._rows_by_options():
            # A pool's first reset is one of all envs, so with several options most are reset once more.
            if not self._was_reset or len(rows) == self.num_envs:
                rows = list(range(self.num_envs))
                obs, table = self._source.reset(seeds, options or None)
            else:
                obs, table = self._source.reset(seeds, options, rows)
            self._was_reset = True
            infos = table.rows()
            for row in rows:
                self.reset_infos[row] = infos[row]
        self._reset_seeds()
        self._reset_options()
        return obs

    def _rows_by_options(self) -> list[tuple[dict[str, Any], list[int]]]:
        groups: list[tuple[dict[str, Any], list[int]]] = []
        for row, options in enumerate(self._options):
            rows = next((rows for each, rows in groups if _are_same(each, options)), None)
            if rows is None:
                groups.append((options, [row]))
            else:
                rows.append(row)
        return groups

    def step_async(self, actions: Any) -> None:
        """Start a step of all envs.

        Args:
            actions: A row for each env; or a list or tuple with an action for each. With a Tuple space, a tuple of
                arrays or lists is a batch, a row for each env in each part; a tuple of tuples has an action for each.
        """
        self._source.send(self._source.batch_of(actions))

    def step_wait(self) -> StepReturn:
        """Wait for the step that was started.

        Returns:
            Observations, rewards, whether each episode has ended, and an info for each env.

        Raises:
            EnvFailed: An env raised; the next step_wait() returns the step, in which its row is truncated.
        """
        step = self._source.recv()
        dones = step.ended
        ended_rows = np.flatnonzero(dones).tolist()
        infos = step.infos(ended_rows)
        for info, is_cut in zip(infos, (step.truncated & ~step.terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = is_cut
        for row in ended_rows:
            infos[row]["terminal_observation"] = step.final_obs(row)
            self.reset_infos[row] = step.reset_info(row)
        return step.obs, step.rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """Close the pool, or end the cluster's workers; more than once does no harm."""
        self._source.close()

    # -- the single envs --

    def has_attr(self, attr_name: str) -> bool:
        """Say whether all envs have an attribute, or a wrapper of theirs does.

        Args:
            attr_name: Name of the attribute.

        Returns:
            Whether they do.
        """
        return self._source.has_attr(env_ids_of(None, self.num_envs), attr_name)

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Get an attribute of some envs; of a cluster's, plain values and arrays only.

        Args:
            attr_name: Name of the attribute.
            indices: Which envs; None: all.

        Returns:
            A value for each of them.

        Raises:
            AttributeError: An env does not have it.
        """
        env_ids = env_ids_of(indices, self.num_envs)
        if attr_name == "render_mode":  # asked of every VecEnv; a native env would have to be built in Python for it
            return [self._source.render_mode] * len(env_ids)
        return self._source.get_attr(env_ids, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of some envs to the same value.

        Args:
            attr_name: Name of the attribute.
            value: Its value; on a cluster a plain value or an array.
            indices: Which envs; None: all. On a cluster: all envs of some workers.

        Raises:
            UsageError: The envs are native, or the value is not plain.
        """
        self._source.set_attr(env_ids_of(indices, self.num_envs), attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of some envs.

        Args:
            method_name: Name of the method.
            method_args: Its positional arguments; on a cluster plain values and arrays.
            indices: Which envs; None: all.
            method_kwargs: Its named arguments, likewise.

        Returns:
            What it returned for each of them.

        Raises:
            EnvFailed: An env raised.
        """
        return self._source.call(env_ids_of(indices, self.num_envs), method_name, *method_args, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Say whether each env is in a wrapper of this class.

        Args:
            wrapper_class: The class, known by its module and name in the process that runs the env.
            indices: Which envs; None: all.

        Returns:
            Whether each of them is.
        """
        return self._source.is_wrapped(env_ids_of(indices, self.num_envs), wrapper_class)

    def get_images(self) -> Sequence[Array | None]:
        """Draw all envs; they must be made with `render_mode="rgb_array"`.

        Returns:
            A picture of each env.
        """
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"pictures need envs with render_mode='rgb_array'; these have {self.render_mode!r}", stacklevel=2
            )
            return [None] * self.num_envs
        return self._source.call(env_ids_of(None, self.num_envs), "render")


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    try:
        return one is other or bool(one == other)
    except ValueError:  # arrays are in them
        return False


def _envs_of(envs: Any, options: dict[str, Any]) -> Any:
    """The pool of a list of functions; pools and clusters are used as they are."""
    if isinstance(envs, list | tuple):
        if "autoreset_mode" in options:
            raise UsageError("SB3VecEnv(functions) makes a pool with autoreset_mode='same_step': leave it out")
        if options.get("batch_size") is not None:
            raise UsageError("SB3VecEnv steps all envs at once: leave batch_size out")
        functions: list[Callable[[], Any]] = list(envs)
        return envfleet.make(functions, autoreset_mode="same_step", **options)
    if options:
        raise UsageError(
            f"options are for the pool of a list of functions; these envs are made already: {', '.join(options)}"
        )
    return envs
