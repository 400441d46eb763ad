"""BatchedPool: what EnvPool's pools have in common, over one of ours. The forms above it say what is returned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from envfleet.compat.envpool.actions import ActionReader, env_ids_of
from envfleet.compat.envpool.array_library import NUMPY, ArrayLibrary
from envfleet.compat.envpool.config import seeds_of
from envfleet.compat.envpool.errors import NotDrawn
from envfleet.compat.envpool.forms_of_spaces import observation_form
from envfleet.compat.envpool.frame_stack import FrameStack
from envfleet.compat.envpool.infos import acrobot_state, columns_of
from envfleet.compat.envpool.mujoco_infos import MujocoInfos
from envfleet.compat.envpool.opening import open_pool
from envfleet.compat.envpool.rendering import RenderSettings
from envfleet.compat.envpool.rows import EngineProgress, Progress, Rows, joined
from envfleet.compat.envpool.spec import EnvSpec
from envfleet.contract.arrays import Array, IntArray
from envfleet.contract.errors import UsageError
from envfleet.contract.spaces import SpaceTree
from envfleet.pool.batch_rows import StepResult, rows_of_result


class BatchedPool:
    """N envs of ours with EnvPool's methods. Not made by users: make() does."""

    spec: Any  # an EnvSpec; Gymnasium's classes declare another one

    def __init__(self, spec: EnvSpec, render: RenderSettings | None = None) -> None:
        self._render = render or RenderSettings()
        self._kind = spec.kind
        self._settings = spec.settings
        self._pool = open_pool(spec.kind, spec.settings, self._render.mode, self._render.env_kwargs(spec.kind.family))
        spec.our_spaces = self._pool.single_observation_space, self._pool.single_action_space
        self.spec = spec
        num_envs = self._pool.num_envs
        self._actions = ActionReader(self._pool.single_action_space, spec.action_array_spec)
        self._obs_form = observation_form(self._pool.single_observation_space)[1]
        self._stack = FrameStack(num_envs, spec.frame_stack) if spec.frame_stack > 1 else None
        self._all_env_ids: IntArray = np.arange(num_envs, dtype=np.int32)
        self._progress: Progress | EngineProgress = Progress(num_envs)
        self._obs_tree = SpaceTree(self._pool.single_observation_space)
        self._steps_at_once = not self.is_async
        self._is_new = np.ones(num_envs, np.bool_)  # never reset by the caller: an action resets it, as in EnvPool
        self._any_new = True
        self._was_reset = False
        self._num_batches = 0
        self._held: Rows | None = None  # a batch that is there already, for recv()

    # -- EnvPool's properties --

    def __len__(self) -> int:
        """Return the number of envs."""
        return int(self._settings["num_envs"])

    @property
    def config(self) -> dict[str, Any]:
        """All arguments of the pool."""
        return dict(self._settings)

    @property
    def all_env_ids(self) -> IntArray:
        """The indices of all envs."""
        return self._all_env_ids

    @property
    def is_async(self) -> bool:
        """Whether recv() returns fewer envs than there are: the first that are ready."""
        return bool(self._settings["batch_size"] != self._settings["num_envs"])

    def __repr__(self) -> str:
        """Return the name of the class with all arguments."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"{type(self).__name__}({arguments})"

    __str__ = __repr__

    def seed(self, seed: Any = None) -> None:
        """Warn that EnvPool takes seeds in make() only.

        Args:
            seed: Not used.
        """
        warnings.warn("seed() does nothing, as in EnvPool: pass seed to make()", UserWarning, stacklevel=2)

    def xla(self) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """Return a handle, and functions that receive, send and step inside `jax.jit` and `lax.scan`, on the CPU.

        Each takes a handle first and returns the next one: `handle, batch = recv(handle)`,
        `handle = send(handle, action, env_id)`, `handle, batch = step(handle, action, env_id)`. Reset the pool in
        Python, before the first step.

        Returns:
            `handle, recv, send, step`. Batches have the form of this pool.

        Raises:
            UsageError: The envs are not native, or their observations are stacked here.
            MissingExtra: JAX is not installed.
        """
        if self._pool.backend != "native":
            raise UsageError(
                f"xla() needs native envs, and {self._kind.name} runs in processes here: step the pool outside of "
                "jax.jit, or in jax.experimental.io_callback"
            )
        if self._stack is not None:
            raise UsageError("xla() returns single observations: leave frame_stack out, and stack them in the program")
        from envfleet.pool.native.xla import require_jax
        from envfleet.pool.xla_pool import XlaPool, share_with_xla

        ours = share_with_xla(self._pool, has_elapsed_step=True)
        assert isinstance(self._pool, XlaPool)
        self._progress = EngineProgress(self._pool)
        jax = require_jax()
        read = partial(self._actions.read_compiled, jax)

        def recv(handle: Any) -> Any:
            handle, result = ours.recv(handle)
            return handle, self._as_step(self._compiled_rows(jax, result))

        def send(handle: Any, action: Any, env_id: Any = None) -> Any:
            return ours.send(handle, *read(action, env_id))

        def step(handle: Any, action: Any, env_id: Any = None) -> Any:
            handle, result = ours.step(handle, *read(action, env_id))
            return handle, self._as_step(self._compiled_rows(jax, result))

        return ours.handle, recv, send, step

    # -- asynchronously --

    def async_reset(self) -> None:
        """Start resetting all envs; recv() returns the first that are ready."""
        self._pool.async_reset(seed=self._first_seeds())
        self._mark_reset(None)

    def send(self, action: Any, env_id: Any = None) -> None:
        """Start one step of all envs, or of those in `env_id`; envs that were never reset are reset instead.

        Args:
            action: A row for each of these envs, or a dict with "action" and maybe "env_id".
            env_id: Indices of some envs; None: all.
        """
        self._send(*self._actions.read(action, env_id))

    def recv(self, reset: bool = False, return_info: bool = True) -> Any:
        """Wait for the next batch.

        Args:
            reset: Return it as reset() does.
            return_info: Whether a reset returns infos, where the form leaves a choice.

        Returns:
            The batch, in the form of this pool.
        """
        rows = self._receive()
        return self._as_reset(rows, return_info) if reset else self._as_step(rows)

    # -- all at once --

    def step(self, action: Any, env_id: Any = None) -> Any:
        """Send actions, and receive a batch.

        Args:
            action: A row for each env, or a dict with "action" and maybe "env_id".
            env_id: Indices of some envs; None: all.

        Returns:
            The batch, in the form of this pool.
        """
        actions, env_ids = self._actions.read(action, env_id)
        if env_ids is not None and np.array_equal(env_ids, self._all_env_ids):  # some learners name all of them
            env_ids = None
        if env_ids is None and self._steps_at_once and not self._any_new:
            return self._as_step(self._rows(self._pool.step(actions), self._all_env_ids.copy()))
        self._send(actions, env_ids)
        return self._as_step(self._receive())

    def render(self, env_ids: Any = None, camera_id: int | None = None) -> Any:
        """Draw some envs.

        Args:
            env_ids: One index, or several; None: the one that make() was told as `render_env_id`.
            camera_id: Only the camera that make() was told as `render_camera_id`.

        Returns:
            [N, height, width, 3] uint8: a picture for each of these envs.

        Raises:
            NotDrawn: The pool was not made with render_mode="rgb_array", or for another camera.
        """
        if self._render.mode is None:
            raise NotDrawn("nothing is drawn: pass render_mode='rgb_array' to make()")
        if camera_id is not None and camera_id != self._render.camera_id:
            raise NotDrawn(f"pass render_camera_id={camera_id} to make(): an env is drawn by one camera")
        chosen = env_ids_of(self._render.env_id if env_ids is None else env_ids)
        frames = self._pool.render(chosen)
        assert frames is not None
        return np.stack(frames)

    def close(self, **kwargs: Any) -> None:
        """Close the envs; a second time does nothing.

        Args:
            kwargs: Not used; Gymnasium's vector envs take some.
        """
        if hasattr(self, "_pool"):  # not if it could not be made: Gymnasium closes that, too
            self._pool.close()

    def __enter__(self) -> Self:
        """Return the pool, which `with` closes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool, whatever happened."""
        self.close()

    # -- the form --

    def _infos(self, rows: Rows) -> dict[str, Any]:
        """The infos of a batch, as EnvPool nests them."""
        infos = rows.infos()
        if self._kind.requires != "mujoco" or rows.library is not NUMPY:
            return infos
        return MujocoInfos(infos, partial(self._first_state, rows, self._num_batches))

    def _as_step(self, rows: Rows) -> Any:
        raise NotImplementedError

    def _as_reset(self, rows: Rows, return_info: bool) -> Any:
        raise NotImplementedError

    # -- inside --

    def _first_seeds(self) -> list[int] | None:
        """The seeds, for the first reset; later the generators go on."""
        return None if self._was_reset else seeds_of(self._settings)

    def _mark_reset(self, env_ids: IntArray | None) -> None:
        """These envs were reset; None: all."""
        self._was_reset = True
        self._is_new[... if env_ids is None else env_ids] = False
        self._any_new = bool(self._is_new.any())
        self._progress.were_reset(env_ids)
        self._held = None

    def _reset_rows(self, env_ids: IntArray | None) -> Rows:
        """Reset all envs, or some, and take their rows."""
        if self.is_async:
            if env_ids is None or len(env_ids) == len(self):
                self.async_reset()
            else:
                self._async_reset_some(env_ids)
            return self._receive()
        options = None
        if env_ids is not None and self._was_reset:
            mask = np.zeros(len(self), np.bool_)
            mask[env_ids] = True
            options = {"reset_mask": mask}
        obs, infos = self._pool.reset(seed=self._first_seeds(), options=options)  # the first time, always all
        self._mark_reset(env_ids)
        num_envs = len(self)
        result = (obs, np.zeros(num_envs), np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.bool_), infos)
        if env_ids is None:
            return self._rows(result, self._all_env_ids.copy())
        return self._rows(rows_of_result(self._obs_tree, result, env_ids), env_ids)

    def _async_reset_some(self, env_ids: IntArray) -> None:
        """Start resetting some envs of an asynchronous pool; recv() has their rows among others."""
        if not self._was_reset:  # ours resets all envs first; nobody sees that, for each is reset before it steps
            self._pool.reset(seed=seeds_of(self._settings))
        is_new = self._is_new[env_ids]
        for some, seed in ((env_ids[is_new], seeds_of(self._settings)), (env_ids[~is_new], None)):
            if len(some):
                self._pool.async_reset(seed=seed, env_id=some)
        self._mark_reset(env_ids)

    def _send(self, actions: Any, env_ids: IntArray | None) -> None:
        if self._any_new and self._is_new[... if env_ids is None else env_ids].any():
            self._send_to_new(actions, self._all_env_ids if env_ids is None else env_ids)
        else:
            self._pool.send(actions, env_ids)

    def _send_to_new(self, actions: Any, env_ids: IntArray) -> None:
        """Reset the envs that were never reset, and step the others; recv() has both."""
        if self.is_async:
            is_new = self._is_new[env_ids]
            if is_new.all() and len(env_ids) == len(self):
                self.async_reset()
                return
            self._async_reset_some(env_ids[is_new])
            if not is_new.all():
                self._pool.send(actions[~is_new], env_ids[~is_new])
            return
        held, self._held = self._held, None  # of a send before this one
        is_new = self._is_new[env_ids]
        parts = [self._reset_rows(env_ids[is_new])]
        if not is_new.all():
            self._pool.send(actions[~is_new], env_ids[~is_new])
            parts.append(self._receive())
        order = np.argsort(np.concatenate([np.flatnonzero(is_new), np.flatnonzero(~is_new)]))
        rows = parts[0] if len(parts) == 1 else joined(parts, order)
        num_rows = len(env_ids) + (0 if held is None else len(held.env_ids))
        self._held = rows if held is None else joined([held, rows], np.arange(num_rows))

    def _receive(self) -> Rows:
        if self._held is not None:
            held, self._held = self._held, None
            return held
        result = self._pool.recv()
        return self._rows(result, result[4]["env_id"])

    def _first_state(self, rows: Rows, batch: int) -> tuple[Array, Array]:
        """Positions and velocities, [N, nq] and [N, nv], of envs on MuJoCo that this batch, the last one, has reset."""
        if batch != self._num_batches or self.is_async or not rows.is_first.all():
            raise KeyError("qpos0 and qvel0 can be had straight after reset(), of a synchronous pool")
        num_positions = self._pool.call_some(rows.env_ids[:1], "model")[0].nq
        states = np.stack(self._pool.call_some(rows.env_ids, "state_vector"))
        return states[:, :num_positions], states[:, num_positions:]

    def _rows(self, result: StepResult, env_ids: IntArray) -> Rows:
        """A batch of ours as EnvPool has it."""
        self._num_batches += 1
        ours, rewards, terminated, truncated, infos = result
        if truncated.any():
            terminated = terminated & ~truncated
        is_first, elapsed_step = self._progress.seen(env_ids, terminated | truncated)
        if "elapsed_step" in infos:  # Atari games count through all their lives
            elapsed_step = infos["elapsed_step"].astype(np.int32)
        obs = self._obs_form(ours)
        columns = columns_of(self._kind.infos, infos, len(env_ids))
        if self._kind.name == "Acrobot":
            columns["state"] = acrobot_state(obs)
        if self._stack is not None:
            obs = self._stack.push(env_ids, obs, is_first)
        return Rows(env_ids, obs, rewards.astype(np.float32), terminated, truncated, is_first, elapsed_step, columns)

    def _compiled_rows(self, jax: Any, result: StepResult) -> Rows:
        """The same inside of a compiled program."""
        library = ArrayLibrary(jax.numpy, jax.dtypes.canonicalize_dtype)
        ours, rewards, terminated, truncated, infos = result
        obs = observation_form(self._pool.single_observation_space, library=library)[1](ours)
        elapsed_step = infos["elapsed_step"]
        columns = columns_of(self._kind.infos, infos, len(rewards), library)
        if self._kind.name == "Acrobot":
            columns["state"] = acrobot_state(obs, library)
        return Rows(
            infos["env_id"],
            obs,
            rewards.astype(np.float32),
            terminated & ~truncated,
            truncated,
            elapsed_step == 0,
            elapsed_step,
            columns,
            library,
        )
