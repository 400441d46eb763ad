"""ClusterEnv: pools on many machines, as one gymnasium VectorEnv, and with the policy beside the envs (DETACH).

The file is long because it is the whole public API with its documentation; what the methods do is in the activities
(stepping.py, rollout_activity.py, calling.py) and in run/.
"""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike

from envfleet.cluster.calling import Calling
from envfleet.cluster.checkpoint.checkpoint import Checkpoint, write_checkpoint
from envfleet.cluster.checkpoint.content import SavedForm, SavedRun, saved_space
from envfleet.cluster.checkpoint.file import Path_
from envfleet.cluster.checkpoint.resuming import Resumption
from envfleet.cluster.checkpoint.saving import StatesOfWorkers
from envfleet.cluster.checkpoint.tree import packed
from envfleet.cluster.evaluation import evaluate_on
from envfleet.cluster.head.config import HeadConfig
from envfleet.cluster.head.learner import Learner
from envfleet.cluster.info_choice import ALL_INFOS, InfoChoice
from envfleet.cluster.live_changes import LiveChanging
from envfleet.cluster.network import Network
from envfleet.cluster.rollout_activity import RolloutActivity
from envfleet.cluster.rollout_stream import OnStale, RolloutStream, StreamSettings
from envfleet.cluster.run.plans import env_pickles, gymnasium_spec_of, pool_plans
from envfleet.cluster.run.run import Run
from envfleet.cluster.stepping import Stepping, StepResult, rows_of_batch
from envfleet.cluster.sync import EveryUpdate, SyncRule
from envfleet.cluster.timing import Timing
from envfleet.cluster.wire.messages import PoolPlan
from envfleet.cluster.wire.plain_values import to_plain
from envfleet.cluster.worker_device import warn_if_no_gpu_was_asked_for
from envfleet.contract.checks import device_or_none, positive, true_or_false, whole_number
from envfleet.contract.episode import Autoreset
from envfleet.contract.errors import EnvBusy, NothingToReceive, PoolClosed, UsageError
from envfleet.contract.evaluation import Evaluation, fresh_seed
from envfleet.contract.pool_config import BackendName, PoolConfig, PoolSettings
from envfleet.contract.rollout import Rollout
from envfleet.contract.settings import names_checked, settings_of
from envfleet.contract.spec import EnvKwargs, EnvSpec
from envfleet.contract.state import EnvState
from envfleet.contract.stats import RunStats
from envfleet.launchers.launcher import Launcher
from envfleet.launchers.local import Local
from envfleet.policies.action_masks import checked_key
from envfleet.policies.adapting import is_policy_like
from envfleet.policies.evaluate import checked_counts
from envfleet.pool.arguments import autoreset_of, seeds_of, some_env_ids, take_reset_mask
from envfleet.pool.building import EnvLike
from envfleet.version import __version__

# Arguments of ClusterEnv in earlier versions, and where they are now.
_MOVED = {
    "pool_workers": "pool=PoolSettings(num_workers=...)",
    "pool_timeout_s": "pool=PoolSettings(timeout_s=...)",
    **{name: f"env=EnvSpec(id=..., {name}=...)" for name in ("max_episode_steps", "render_mode", "pixels")},
    **{
        field.name: f"{name}={kind.__name__}({field.name}=...)"
        for name, kind in (("pool", PoolSettings), ("timing", Timing), ("network", Network))
        for field in dataclasses.fields(kind)
        if field.name not in ("num_workers", "pin_workers")
    },
}


class ClusterEnv(VectorEnv[Any, Any, Any]):
    """`num_workers` workers with `num_envs_per_worker` envs each, behind Gymnasium's vector API.

    `step(actions)` steps the remote envs, as a pool on this machine would. `rollout(agent, num_steps)` and
    `stream(agent, num_steps)` let the policy act on the workers, which hold a copy of it: only rollouts and, when
    they are due, weights cross the network. Rows are in the order of envs, always; env i of the whole run belongs to
    worker `i // num_envs_per_worker`, and is seeded with `seed + i`.

    A cluster is for one thread at a time. After close(), and in a fork, every call but close() raises PoolClosed.
    """

    @names_checked("ClusterEnv", _MOVED)
    def __init__(
        self,
        env: EnvLike | Sequence[Callable[..., Any]],
        num_workers: int = 2,
        num_envs_per_worker: int = 1,
        *,
        launcher: Launcher | None = None,
        sync: SyncRule | None = None,
        batch_size: int | None = None,
        worker_batch_size: int | None = None,
        backend: BackendName = "auto",
        autoreset_mode: AutoresetMode | Autoreset | str | None = None,
        seed: int | None = None,
        env_kwargs: EnvKwargs | None = None,
        pool: PoolSettings | Mapping[str, Any] | None = None,
        timing: Timing | Mapping[str, Any] | None = None,
        network: Network | Mapping[str, Any] | None = None,
        worker_device: str | None = None,
        resume: Path_ | None = None,
    ) -> None:
        """Start the workers, and wait until their pools are built.

        Args:
            env: As for `envfleet.make`. What is no Gymnasium id or import path travels to the workers pickled.
                `EnvSpec(id=..., max_episode_steps=..., render_mode=..., pixels=...)` has what is no argument here.
            num_workers: Number of workers.
            num_envs_per_worker: Number of envs of each worker.
            launcher: Where workers run; None: as processes of this machine, `Local()`.
            sync: When workers pull new weights: `EveryUpdate()` (also None), `APS()`, `Every(k)` or `Never()`.
            batch_size: Rows of a batch, a multiple of `num_envs_per_worker`: with fewer than all envs `recv()` returns
                the workers that were ready first. None: all.
            worker_batch_size: Number of envs on which a worker's policy acts at a time, those that are ready first, in
                rollout() and stream(); for envs of different speed. Rollouts of stream() then have this number of
                columns. At most `num_envs_per_worker`; None: all envs of the worker.
            backend: Of each worker's pool; as for `envfleet.make`.
            autoreset_mode: For `step(actions)`; None: next-step, as Gymnasium has it. With a policy on the workers
                envs always reset in the same step.
            seed: For the first reset if that has no seed of its own.
            env_kwargs: As for `envfleet.make`; a list or callable counts the envs of all workers.
            pool: How each worker's pool runs its envs: `PoolSettings(num_workers=..., on_env_error=..., ...)`, or a
                dict of its fields. With `on_env_error="raise"` an env that fails, or is lost with its worker, raises
                EnvFailed; then `recv()` returns the batch, the same `rollout()` the rollout, `next()` of a stream the
                next one.
            timing: How long to wait, and how often to try again: `Timing(timeout_s=..., join_timeout_s=..., ...)`, or
                a dict of its fields.
            network: Where the head listens, and how messages travel: `Network(address=..., compression=..., ...)`, or
                a dict of its fields.
            worker_device: Where the workers' copies of the policy act, such as "cuda" or "cuda:1"; the launcher must
                ask for it (`Slurm(gpus_per_worker=1)`). None: the CPU. Policies that are no torch modules have a
                method `to_device(device)`, or are not told. The learner's agent may be on any device, whatever this is.
            resume: Path of a checkpoint that `save()` has written: the run goes on where it was. `resumed` has what the
                learner must put back; docs/checkpoints.md says what is exact. None: begin anew.

        Raises:
            UsageError: An argument is wrong; nothing was started.
            CheckpointError: The checkpoint cannot be read, is damaged, or is of another run.
            JoinTimeout: Not all workers were ready in time.
            WorkerFailed: A worker could not build its pool.
            WorkerLost: A worker does not start.
        """
        self._timing = settings_of(Timing, timing, "timing")
        self._network = settings_of(Network, network, "network")
        self._env = EnvSpec.of(env, kwargs=env_kwargs)
        self._pool = PoolConfig.of(
            settings_of(PoolSettings, pool, "pool"),
            num_envs=whole_number("num_envs_per_worker", num_envs_per_worker),
            batch_size=_worker_batch_size(worker_batch_size, num_envs_per_worker, backend),
            backend=backend,
            autoreset=Autoreset.SAME_STEP if autoreset_mode is None else autoreset_of(autoreset_mode),
            switches_autoreset=True,
            start_timeout_s=self._timing.start_timeout_s,
        )
        self.num_workers = whole_number("num_workers", num_workers)
        self.num_envs_per_worker = self._pool.num_envs
        self.num_envs = self.num_workers * self.num_envs_per_worker
        self._given_batch_size = batch_size
        self.batch_size = rows_of_batch(batch_size, self.num_envs, self.num_envs_per_worker)
        self._autoreset = Autoreset.NEXT_STEP if autoreset_mode is None else self._pool.autoreset
        resumption = None
        if resume is not None:
            resumption = Resumption(resume, self._saved_form, self.num_workers)
            seed = resumption.saved.seed if seed is None else seed
        self._first_seed = seed
        self._seed = seeds_of(seed, 1)[0]
        seeds_of(seed, self.num_envs)  # refused here, not at the first reset
        if self._timing.min_workers is not None and self._timing.min_workers > self.num_workers:
            raise UsageError(
                f"min_workers must be between 1 and num_workers={self.num_workers}; got {self._timing.min_workers}"
            )
        self._owner_pid = os.getpid()
        plans, pickles = self._plans_for(self.num_workers)
        config = HeadConfig(
            plans=plans,
            env_pickles=pickles,
            sync=EveryUpdate() if sync is None else sync,
            timing=self._timing,
            network=self._network,
            worker_device=device_or_none("worker_device", worker_device),
        )
        warn_if_no_gpu_was_asked_for(launcher, config.worker_device)
        saved = None if resumption is None else resumption.saved
        self._run = Run(config, Local() if launcher is None else launcher, None if saved is None else saved.head)
        self._finalizer = weakref.finalize(self, self._run.close_when_collected)
        try:
            form = self._run.wait_until_ready(self._timing.start_timeout_s, self._timing.min_workers)
            if saved is not None:
                saved.require_spaces(form.obs.space, form.actions.space)
                self._run.wait_until_restored(self._timing.start_timeout_s)
        except BaseException:
            self._finalizer()
            raise
        self._form = form
        self._head = self._run.head
        self._stepping = Stepping(self._run, form)
        self._calling = Calling(self._run, self._timing.timeout_s)
        self._changing = LiveChanging(self._head)
        self._learner = Learner(self._head, form, config.sync)
        self._collecting = RolloutActivity(self._run, form, self._learner)
        self._states = StatesOfWorkers(self._run)
        self._resumed: Checkpoint | None = None
        if resumption is not None:
            self._resumed = resumption.checkpoint
            self._go_on(resumption.saved)
        self.autoreset_mode = AutoresetMode(self._autoreset.value)
        self.metadata = {**self._run.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = self._env.render_mode if self._env.pixels is None else "rgb_array"
        self.spec = gymnasium_spec_of(self._env)
        self.single_observation_space = form.obs.space
        self.single_action_space = form.actions.space
        self._set_spaces()

    # -- Gymnasium's vector API --

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those in `options["reset_mask"]`, and return a row for each env.

        Results that were not received are dropped.

        Args:
            seed: Env i is seeded with `seed + i`, or with `seed[i]`. None: with the cluster's own seed at the first
                reset, later the generators go on.
            options: Passed to each env, without "reset_mask". That is an array of [num_envs] bool: the other envs
                repeat their last observation.

        Returns:
            Observations of all envs, and infos.

        Raises:
            EnvFailed: An env raised, or its worker was lost. `recv()` returns the batch.
            WorkerLost: A worker was given up.
            ClusterTimeout: Not all workers have answered after `timing.timeout_s`. `recv()` goes on waiting for them.
        """
        self._send_reset(seed, options, is_whole=True)
        obs, _, _, _, info = self._receive(self._timing.timeout_s)
        return obs, info

    def step(self, actions: Any, env_id: ArrayLike | None = None) -> StepResult:
        """Send one action to each env, or to those in `env_id`, and receive a batch.

        If `actions` is a policy, it chooses them on the workers, one step's: `info` has "actions", "log_probs" and what
        else the policy gave, beside the infos of the envs, and the statistics of episodes that ended under "episode"
        ("r", "l", "t", as Gymnasium's RecordEpisodeStatistics writes them). Envs reset in the same step then.

        Args:
            actions: A row for each env, or for each of `env_id`; or a policy.
            env_id: All envs of some workers, in any order. A synchronous cluster steps only these, and returns a row
                for each of them, in that order; `info["env_id"]` has the indices.

        Returns:
            Observations, rewards, terminations, truncations and infos, as Gymnasium's vector envs return them.

        Raises:
            InvalidAction: The actions do not fit the action space; nothing was sent.
            UsageError: `env_id` is given with a policy, or does not name all envs of some workers.
            NotReset: Envs are to be reset before the first step.
            EnvBusy: A worker that is to step has results to come.
            NothingToReceive: Fewer envs would be at work than a batch has rows.
            EnvFailed: An env raised, or its worker was lost. `recv()` returns the batch; for a policy, the same call.
            StepOnEndedEpisode: With autoreset disabled, an env must be reset first. `recv()` returns the batch.
            PolicyFailed: The policy raised on a worker.
            WorkerLost: A worker was given up.
            ClusterTimeout: Not all workers have answered after `timing.timeout_s`. `recv()` goes on waiting for them;
                for a policy, the same call.
        """
        if is_policy_like(actions):
            if env_id is not None:
                raise UsageError("a policy acts for all envs: step(agent) takes no env_id")
            return self._collecting.as_step(self._rollout(actions, 1, ALL_INFOS, self._timing.timeout_s))
        if env_id is not None and not self.closed:
            self._stepping.require_batch(self.batch_size, np.size(env_id) // self.num_envs_per_worker)
        self.send(actions, env_id)
        result = self._receive(self._timing.timeout_s)
        if env_id is not None or self.batch_size < self.num_envs:
            result[4]["env_id"] = self._stepping.last_env_ids
        return result

    def render(self, env_ids: ArrayLike | None = None) -> tuple[Any, ...] | None:
        """Render all envs, or some.

        Args:
            env_ids: Indices of some envs, in any order; None: all.

        Returns:
            A frame for each of these envs, in that order.

        Raises:
            EnvBusy: Workers have results to come, or a stream runs.
            EnvFailed: An env raised.
        """
        return self.call("render") if env_ids is None else self.call_some(env_ids, "render")

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or get an attribute. Arguments and results are plain values and arrays.

        Args:
            name: Name of the method or attribute.
            args: Positional arguments of the method.
            kwargs: Named arguments of the method.

        Returns:
            A result for each env.

        Raises:
            UsageError: An argument or a result is no plain value.
            EnvBusy: Workers have results to come, or a stream runs.
            EnvFailed: An env raised.
            ClusterTimeout: Not all workers have answered after `timing.timeout_s`; the result is dropped.
        """
        self._require_idle(f"call {name!r}")
        return self._calling.call(range(self.num_envs), name, args, kwargs)

    def call_some(self, env_ids: ArrayLike, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of some envs, or get an attribute. Arguments and results are plain values and arrays.

        Args:
            env_ids: Indices of some envs, in any order.
            name: Name of the method or attribute.
            args: Positional arguments of the method.
            kwargs: Named arguments of the method.

        Returns:
            A result for each of these envs, in that order.

        Raises:
            UsageError: An argument or a result is no plain value.
            EnvBusy: Workers have results to come, or a stream runs.
            EnvFailed: An env raised.
            ClusterTimeout: Not all workers have answered after `timing.timeout_s`; the result is dropped.
        """
        self._require_idle(f"call {name!r}")
        return self._calling.call(some_env_ids(env_ids, self.num_envs), name, args, kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Get an attribute of each env; as `call(name)`.

        Args:
            name: Name of the attribute.

        Returns:
            A value for each env.
        """
        return self.call(name)

    def set_attr(self, name: str, values: Any, env_ids: ArrayLike | None = None) -> None:
        """Set an attribute of each env, or of those in `env_ids`.

        Args:
            name: Name of the attribute.
            values: A list or tuple has a value for each of these envs; anything else is for all of them.
            env_ids: All envs of some workers, in any order; None: all.

        Raises:
            UsageError: A value is not plain, or the number of values is another one.
            EnvBusy: Workers have results to come, or a stream runs.
            EnvFailed: An env raised.
        """
        self._require_idle(f"set {name!r}")
        self._calling.set_attr(name, values, None if env_ids is None else np.asarray(env_ids))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as Gymnasium's SyncVectorEnv has it
        """The seed of each env's random generator."""
        return self.get_attr("np_random_seed")

    def close_extras(self, **kwargs: Any) -> None:
        """End all workers; called by close(). In a fork of the owner this does nothing.

        Args:
            kwargs: Not used; Gymnasium's close() passes its own on.
        """
        self._finalizer()

    def xla(self) -> NoReturn:
        """Refuse: programs of JAX can step native envs of their own process only.

        Raises:
            UsageError: Always. It says what to do instead.
        """
        raise UsageError(
            "xla() is for native pools: envs of a cluster are in other processes, which compiled programs cannot call. "
            "Collect with rollout() or stream(), or make() a pool in the process of the program"
        )

    # -- asynchronously --

    def async_reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Start resetting all envs; recv() returns the workers that are ready first.

        Args:
            seed: As for reset().
            options: Passed to each env; "reset_mask" is refused.

        Raises:
            UsageError: The options have a mask, or the seeds are wrong.
        """
        if options is not None and "reset_mask" in options:
            raise UsageError("async_reset() resets all envs; for some of them call reset() with reset_mask")
        self._send_reset(seed, options, is_whole=False)

    def send(self, actions: Any, env_id: ArrayLike | None = None) -> None:
        """Start one step of all envs, or of those in `env_id`.

        Args:
            actions: A row for each env, or for each of `env_id`.
            env_id: All envs of some workers, in any order; None: all envs.

        Raises:
            InvalidAction: The actions do not fit the action space; nothing was sent.
            NotReset: Envs are to be reset before the first step.
            EnvBusy: One of these workers has results to come; nothing was sent.
            UsageError: `env_id` has some envs of a worker, but not all; nothing was sent.
        """
        self._require_open()
        env_ids = None if env_id is None else np.asarray(env_id)
        self._stepping.send(actions, env_ids, keeps_order=self.batch_size == self.num_envs)

    def recv(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the next batch.

        A synchronous cluster returns the envs that were sent, in the order in which they were sent.
        After ClusterTimeout, EnvFailed or StepOnEndedEpisode, raised by this, step(actions) or reset(), nothing is
        lost: call it (again) for the same batch.

        Args:
            timeout_s: Seconds to wait; None: `timing.timeout_s`.

        Returns:
            Observations, rewards, terminations, truncations and infos; `info["env_id"]` says which env each row
            belongs to.

        Raises:
            NothingToReceive: Fewer envs are in flight than a batch has rows.
            EnvFailed: An env raised, or its worker was lost.
            StepOnEndedEpisode: With autoreset disabled, an env must be reset first.
            WorkerLost: A worker was given up.
            ClusterTimeout: The workers have not answered after `timeout_s`.
        """
        self._require_open()
        stepping = self._stepping
        if not stepping.has_results_to_come:
            raise NothingToReceive("no env is in flight: send() actions first")
        if not stepping.is_held:  # else a batch has come, and an error was raised for it
            stepping.require_batch(self.batch_size)
        result = self._receive(self._timing.timeout_s if timeout_s is None else timeout_s)
        result[4]["env_id"] = stepping.last_env_ids
        return result

    # -- DETACH: the policy acts on the workers --

    def rollout(
        self,
        agent: Any,
        num_steps: int,
        *,
        infos: Sequence[str] | None = None,
        action_mask: str | None = None,
        timeout_s: float | None = None,
    ) -> Rollout:
        """Collect `num_steps` steps of all envs, with actions chosen by `agent` on the workers.

        The agent's present weights are published first; workers pull them if the synchronisation rule says so.
        After ClusterTimeout or EnvFailed nothing is lost: make the same call for the same rollout.

        Args:
            agent: The policy. Pass the same object each time: another one is another policy, which all workers have to
                build.
            num_steps: Number of steps of each env.
            infos: Keys of the envs' infos that `Rollout.infos` and `final_infos` have, whatever their kind and size;
                `()`: none. None: all whose values are numbers, up to 16 MiB for each worker; the log says what is left
                out.
            action_mask: Key of the envs' infos under which the mask of allowed actions is. The policy's methods get it
                as `action_mask`, and the rollout as `action_masks`. None: the policy gets no mask.
            timeout_s: Seconds to wait; None: `timing.timeout_s`.

        Returns:
            The rollouts of all workers, side by side in the order of envs.

        Raises:
            UsageError: `agent` is no policy, `num_steps` no whole number of at least 1, or the infos have no
                `action_mask`.
            EnvFailed: An env raised, or its worker was lost.
            PolicyFailed: The policy raised on a worker, or cannot be built there.
            WorkerLost: A worker was given up.
            ClusterTimeout: Not all workers have answered after `timeout_s`.
        """
        timeout_s = self._timing.timeout_s if timeout_s is None else timeout_s
        return self._rollout(agent, num_steps, InfoChoice.of(infos, action_mask), timeout_s)

    def stream(
        self,
        agent: Any,
        num_steps: int,
        *,
        infos: Sequence[str] | None = None,
        action_mask: str | None = None,
        max_lag: int | None = None,
        on_stale: OnStale = "pace",
        num_rollouts: int = 1,
        timeout_s: float | None = None,
    ) -> RolloutStream:
        """Iterate over rollouts of single workers, as they come, without end; `publish()` sends news meanwhile.

        A worker waits for the learner only when it is `network.credit` rollouts ahead of it. One that is lost comes
        back, or the others go on without it. To leave the loop ends the stream: rollouts that were not taken are
        dropped. An error does not end it, if you keep it: `next()` goes on.

        Args:
            agent: The policy; its present weights are published first.
            num_steps: Number of steps of each env in a rollout.
            infos: As for rollout().
            action_mask: As for rollout().
            max_lag: `next()` returns no rollout whose policy is more versions behind the newest; None: any. A worker
                whose policy is more than `max_lag // 2` versions behind pulls first, whatever the rule of `sync` is.
            on_stale: "pace": workers wait, and a fast one waits for a slow one, so that no rollout gets too old while
                the learner publishes as often for each batch as before, at first once; what gets too old all the same
                is dropped. "drop": workers do not wait; rollouts that are too old are dropped. `stats()` counts them.
            num_rollouts: Number of rollouts that `next()` returns side by side, in the order in which they come. A
                worker may have several of them: its `env_ids` are there as often.
            timeout_s: Seconds to wait for each rollout; None: `timing.timeout_s`.

        Returns:
            The stream. Its `next()` raises EnvFailed, PolicyFailed, WorkerLost and ClusterTimeout as rollout() does.

        Raises:
            UsageError: `agent` is no policy, or a number is not a whole one, or too small.
        """
        self._require_open()
        settings = StreamSettings(
            num_steps=num_steps,
            infos=InfoChoice.of(infos, action_mask),
            credit=self._network.credit,
            timeout_s=self._timing.timeout_s if timeout_s is None else timeout_s,
            num_rollouts=num_rollouts,
            max_lag=max_lag,
            on_stale=on_stale,
        )
        self.publish(agent)
        return RolloutStream(self, self._run, self._form, self._learner, settings)

    def publish(self, agent: Any) -> int:
        """Make the agent's present weights the newest version, and tell the workers.

        Args:
            agent: The policy.

        Returns:
            The number of the version.

        Raises:
            UsageError: `agent` is no policy.
        """
        self._require_open()
        return self._learner.publish(agent)

    # -- live changes --

    def broadcast(self, name: str, value: Any) -> int:
        """Set an attribute of each env just before its next reset, also while a stream runs.

        Workers hear of it between two rollouts; nothing waits for them. Envs and workers that come later have it from
        their first reset on. `rollout.changes`, and `info["live_change"]` of resets, have the number of the last change
        that an episode was begun with.

        Args:
            name: Name of the attribute, which the envs must have; wrappers are looked through.
            value: A plain value or an array, the same for all envs.

        Returns:
            The number of the change: 1, 2, 3, ...

        Raises:
            UsageError: The value is not plain, the name is none, or the envs are native or come vectorized.
        """
        self._require_open()
        return self._changing.broadcast(name, value)

    def call_at_reset(self, name: str, *args: Any, **kwargs: Any) -> int:
        """Call a method of each env once, just before its next reset; see `broadcast`.

        An env that comes later gets the last call of each method only.

        Args:
            name: Name of the method; wrappers are looked through.
            args: Positional arguments of the method: plain values and arrays.
            kwargs: Named arguments of the method, likewise.

        Returns:
            The number of the change: 1, 2, 3, ...

        Raises:
            UsageError: An argument is not plain, the name is none, or the envs are native or come vectorized.
        """
        self._require_open()
        return self._changing.call_at_reset(name, args, kwargs)

    def set_reset_options(self, options: Mapping[str, Any] | None) -> int:
        """Pass these options to every later reset of each env, also when it resets itself; see `broadcast`.

        A reset() with options of its own has those instead.

        Args:
            options: A dict of plain values and arrays; None: no options, as at first.

        Returns:
            The number of the change: 1, 2, 3, ...

        Raises:
            UsageError: An option is not plain, or the envs are native or come vectorized.
        """
        self._require_open()
        return self._changing.set_reset_options(options)

    # -- saving and restoring --

    def get_state(self, env_ids: ArrayLike | None = None) -> list[EnvState]:
        """Save the states of all envs, or of some; see `EnvPool.get_state`.

        Args:
            env_ids: Indices of some envs, in any order; None: all.

        Returns:
            A state for each of these envs. An env that is put back into it repeats its trajectory, bit for bit.

        Raises:
            UsageError: The envs cannot be saved, or `env_ids` is wrong.
            NotReset: The envs were never reset.
            EnvBusy: Workers have results to come, a rollout is not finished, or a stream runs.
            EnvFailed: The `get_state()` of an env raised.
            ClusterTimeout: Not all workers have answered after `timing.timeout_s`.
        """
        self._require_idle("save the states of envs")
        ids = range(self.num_envs) if env_ids is None else some_env_ids(env_ids, self.num_envs)
        return self._calling.get_state(ids)

    def set_state(self, states: Sequence[EnvState], env_ids: ArrayLike | None = None) -> None:
        """Put all envs, or some, back into saved states; steps and rollouts go on from there.

        After all envs were restored `step(actions)` needs no reset(). A rollout goes on with the running episodes,
        their returns and lengths included if the state was saved between two rollouts; it resets envs whose episodes
        had ended first. A recurrent policy begins with its initial state.

        Args:
            states: What get_state() gave, of this cluster, another one, or a pool: a state for each of these envs.
            env_ids: Indices of some envs, in any order; None: all.

        Raises:
            UsageError: The envs cannot be saved, a state is of another kind of env, or the number of states is wrong;
                no state was restored.
            EnvBusy: Workers have results to come, a rollout is not finished, or a stream runs.
            EnvFailed: The `set_state()` of an env raised. All envs of its worker must be reset.
            ClusterTimeout: Not all workers have answered after `timing.timeout_s`.
        """
        self._require_idle("restore the states of envs")
        ids = range(self.num_envs) if env_ids is None else some_env_ids(env_ids, self.num_envs)
        self._calling.set_state(ids, list(states))
        self._stepping.restored(self._autoreset.value, is_all=len(ids) == self.num_envs)

    def evaluate(
        self,
        agent: Any,
        num_episodes: int = 100,
        *,
        deterministic: bool = True,
        seed: int | None = None,
        num_recorded: int = 0,
        action_mask: str | None = None,
        timeout_s: float | None = None,
    ) -> Evaluation:
        """Play exactly `num_episodes` whole episodes on the workers, and return what they came to.

        The result is that of `envfleet.evaluate` with the same seed. Workers play in envs of their own, which the first
        evaluation builds: those of steps, rollouts and streams stay where they are. A stream may run meanwhile; each
        worker plays between two of its rollouts.

        Args:
            agent: The policy, with its present weights; they are not published.
            num_episodes: Number of episodes, shared out among the workers before they start.
            deterministic: Act with the mode of the distribution, the mean, the best Q value; False: as in training.
            seed: From which the seeds of the episodes are made; None: a new one, which `Evaluation.seed` names.
            num_recorded: Number of episodes whose frames are kept, the first ones. The envs need
                `render_mode="rgb_array"`.
            action_mask: As for rollout().
            timeout_s: Seconds without a finished episode before ClusterTimeout; None: `timing.timeout_s`.

        Returns:
            Returns, lengths, ends, infos of the last steps and frames of the episodes.

        Raises:
            UsageError: `agent` is no policy or cannot act deterministically, or an argument is wrong.
            EnvFailed: An env raised, hung, or its process died.
            PolicyFailed: The policy raised on a worker, or cannot be built there.
            WorkerFailed: A native env of the evaluation hung.
            WorkerLost: All workers were given up.
            ClusterTimeout: No episode was finished for `timeout_s`. The evaluation is given up.
        """
        self._require_open()
        num_episodes, num_recorded = checked_counts(num_episodes, num_recorded, self.render_mode)
        seed = fresh_seed() if seed is None else whole_number("seed", seed, at_least=0, at_most=None)
        timeout_s = self._timing.timeout_s if timeout_s is None else positive("timeout_s", timeout_s)
        is_deterministic = true_or_false("deterministic", deterministic)
        space = self.single_action_space
        given = agent, num_episodes, seed, is_deterministic, num_recorded, checked_key(action_mask), timeout_s
        return evaluate_on(self._run, space, *given)

    # -- checkpoints --

    def save(self, path: Path_, *, extra: Any = None, timeout_s: float | None = None) -> None:
        """Write a checkpoint, from which `ClusterEnv(..., resume=path)` goes on.

        It has the newest version that was published, counters, seeds and, where the envs have them, their states, so
        that a run with a seed and native envs goes on bit for bit. The learner's own weights may be newer than those
        that were published: they belong into `extra`, with the optimiser. A file that was there before is replaced in
        one step: whenever this process is killed, one of the two is whole.

        While a stream runs, what was collected and not taken is not in the checkpoint.

        Args:
            path: Of the file.
            extra: What the learner adds: dicts (keys are text or ints), lists, tuples, numbers, text, bytes, None,
                NumPy arrays and torch tensors on any device. No pickle: anything else is refused.
            timeout_s: Seconds to wait for the workers; None: `timing.timeout_s`.

        Raises:
            UsageError: A part of `extra` is something else; the text names it.
            EnvBusy: Workers have results to come, or a rollout is not finished.
            ClusterTimeout: Not all workers have answered after `timeout_s`; nothing was written.
            CheckpointError: The file cannot be written.
        """
        self._require_open()
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"a checkpoint is named by its path; got {path!r}")
        timeout_s = self._timing.timeout_s if timeout_s is None else positive("timeout_s", timeout_s)
        if self._stepping.has_results_to_come or self._collecting.is_under_way:
            raise EnvBusy("workers have results to come: receive them, or finish the rollout, before you save")
        packed_extra = packed(extra, "extra")  # refused before the workers are asked
        states = self._states.ask(timeout_s)
        saved = SavedRun(
            envfleet_version=__version__,
            saved_s=time.time(),
            form=self._saved_form,
            observation_space=saved_space(self.single_observation_space),
            action_space=saved_space(self.single_action_space),
            seed=self._seed,
            is_first_seed_used=self._first_seed is None,
            generator=self._saved_generator(),
            was_reset=self._stepping.was_reset,
            autoreset=self._stepping.autoreset,
            attributes=dict(self._calling.attributes),
            num_changes=self._changing.num_changes,
            first_version=self._learner.first_version,
            head=self._head.saved(states),
        )
        write_checkpoint(path, saved, packed_extra)

    @property
    def resumed(self) -> Checkpoint | None:
        """The checkpoint from which this cluster goes on: its `extra` is for the learner. None: it began anew."""
        return self._resumed

    def scale(self, num_workers: int, *, timeout_s: float | None = None) -> None:
        """Change the number of workers: the last ones go. `num_envs`, `batch_size` and the spaces follow.

        While a stream runs it goes on: new workers join it when they are there, and rollouts of those that go, if they
        were not taken, are dropped. At other times this waits until new workers are ready, as the constructor does.
        Before the next step() all envs must be reset.

        Args:
            num_workers: Number of workers from now on.
            timeout_s: Seconds to wait at most, wherever the time goes; None: as the constructor waits.

        Raises:
            UsageError: The number does not fit the batch size, the env's list of factories, or its list of arguments.
            EnvBusy: Workers have results to come, or a rollout is not finished.
            JoinTimeout: Not all workers were ready in time; they may still come.
            ClusterError: The launcher's engine refuses; nothing has changed.
        """
        self._require_open()
        num_workers = whole_number("num_workers", num_workers)
        if self._stepping.has_results_to_come or self._collecting.is_under_way:
            raise EnvBusy("workers have results to come: receive them, or finish the rollout, before you scale")
        num_envs = num_workers * self.num_envs_per_worker
        batch_size = rows_of_batch(self._given_batch_size, num_envs, self.num_envs_per_worker)
        seeds_of(self._first_seed, num_envs)
        is_more = num_workers > self.num_workers
        self._run.resize(*self._plans_for(num_workers), self._calling.attributes)
        self.num_workers, self.num_envs, self.batch_size = num_workers, num_envs, batch_size
        self._stepping.drop()
        self._set_spaces()
        if is_more and not self._run.is_busy:
            self._run.wait_until_ready(self._timing.start_timeout_s, self._timing.min_workers, timeout_s)

    @property
    def address(self) -> str:
        """Where the head listens: "tcp://host:port", or "ipc://file" if all workers are on this machine."""
        return self._head.address

    def stats(self) -> RunStats:
        """Count what each worker has done.

        Returns:
            Counters for each worker; printed, they are one line.

        Raises:
            PoolClosed: The cluster was closed.
        """
        self._require_open()
        return self._head.stats()

    def __enter__(self) -> Self:
        """Return the cluster, which the end of the block closes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the cluster at the end of the block."""
        self.close()

    # -- inside --

    @property
    def _saved_form(self) -> SavedForm:
        return SavedForm.of(self._env, self.num_envs_per_worker)

    def _saved_generator(self) -> dict[str, Any] | None:
        if self._np_random is None:
            return None
        return {"state": dict(self._np_random.bit_generator.state), "seed": self._np_random_seed}

    def _go_on(self, saved: SavedRun) -> None:
        """Take over what a checkpoint has beside that of the head and the workers."""
        if saved.is_first_seed_used:
            self._first_seed = None
        if saved.generator is not None:
            generator = np.random.PCG64()
            generator.state = saved.generator["state"]
            self._np_random = np.random.Generator(generator)
            self._np_random_seed = saved.generator["seed"]
        if saved.was_reset and saved.autoreset == self._autoreset.value:
            self._stepping.restore(saved.autoreset)
        self._calling.attributes.update(saved.attributes)
        self._changing.restore(saved.num_changes)
        self._learner.restore(saved.first_version)

    def _rollout(self, agent: Any, num_steps: int, infos: InfoChoice, timeout_s: float | None) -> Rollout:
        self._require_open()
        num_steps = whole_number("num_steps", num_steps)
        if not self._collecting.is_begun(agent, num_steps, infos):
            self._learner.publish(agent)
            self._collecting.begin(agent, num_steps, infos)
        return self._collecting.finish(timeout_s)

    def _plans_for(self, num_workers: int) -> tuple[tuple[PoolPlan, ...], tuple[bytes | None, ...]]:
        plans = pool_plans(self._env, self._pool, self._seed, num_workers)
        return plans, env_pickles(self._env, plans)

    def _set_spaces(self) -> None:
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def _receive(self, timeout_s: float | None) -> StepResult:
        result = self._stepping.recv(self.batch_size, timeout_s)
        self._first_seed = None  # only now: a first reset() that timed out may be made again
        return result

    def _send_reset(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None, is_whole: bool
    ) -> None:
        self._require_open()
        if seed is None:
            seed = self._first_seed
        seeds = seeds_of(seed, self.num_envs)
        if isinstance(seed, int | np.integer):
            super().reset(seed=int(seed))  # for np_random
        options = None if options is None else dict(options)
        mask = None if options is None else take_reset_mask(options, self.num_envs)
        self._stepping.send_reset(self._autoreset.value, seeds, to_plain(options, "options"), mask, is_whole)

    def _require_idle(self, what: str) -> None:
        self._require_open()
        if self._stepping.has_results_to_come:
            raise EnvBusy(f"workers have results to come: receive them before you {what}")

    def _require_open(self) -> None:
        if self.closed:
            raise PoolClosed("this cluster was closed; make another one")
        if os.getpid() != self._owner_pid:
            raise PoolClosed(f"this cluster belongs to process {self._owner_pid}; a fork of it must make its own")


def _worker_batch_size(given: int | None, num_envs: int, backend: BackendName) -> int | None:
    if given is None:
        return None
    if whole_number("worker_batch_size", given) > num_envs:
        raise UsageError(f"worker_batch_size must be between 1 and num_envs_per_worker={num_envs}; got {given}")
    if backend == "vector" and given < num_envs:
        raise UsageError(f"a vector env steps all its envs together: leave worker_batch_size={given} out")
    return given
