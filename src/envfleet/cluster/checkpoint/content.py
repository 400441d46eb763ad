"""SavedRun: what a checkpoint's file has of a run, beside what the learner added. Plain values and arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from gymnasium import spaces

from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.plain_values import NotPlain, to_plain
from envfleet.cluster.wire.spaces import describe_space, space_of
from envfleet.contract.arrays import Array, Arrays
from envfleet.contract.errors import CheckpointError
from envfleet.contract.spec import EnvSpec


class _Saved:
    """A dataclass as a tree, and back."""

    __slots__ = ()

    def tree(self) -> dict[str, Any]:
        """Its fields; those that are saved values themselves as trees."""
        return {each.name: _as_tree(getattr(self, each.name)) for each in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def of_tree(cls, tree: Any) -> Self:
        """The inverse. Raises CheckpointError if the tree has other fields."""
        try:
            return cls(**tree)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"this checkpoint has other parts than expected: {error}") from None


def _as_tree(value: Any) -> Any:
    if isinstance(value, _Saved):
        return value.tree()
    return [_as_tree(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWorker(_Saved):
    """What the head knows of a worker, and what its process said of itself."""

    epoch: int = 0  # processes that it has had
    counters: dict[str, int] = field(default_factory=dict)  # of stats(), by name
    attributes: dict[str, Any] = field(default_factory=dict)  # that set_attr() has set, as they travel
    num_steps_ordered: int = 0  # see WorkerRecord
    process_versions: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # likewise
    measured: tuple[float | None, int, int] = (None, -1, 0)  # see Measurement
    probes: dict[str, Any] | None = None  # see Probes
    code_id: int = 0  # of the policy that it holds; 0: none
    version: int = -1  # of its weights; -1: none
    state: Array | None = None  # bytes that only workers read; None: it begins anew
    has_env_states: bool = False  # False: its envs begin new episodes

    def begun_anew(self) -> SavedWorker:
        """Without what its process said of itself."""
        kept = {name: getattr(self, name) for name in ("epoch", "counters", "attributes")}
        return SavedWorker(**kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedHead(_Saved):
    """What the head knows of a run, as a checkpoint has it."""

    code_id: int
    version: int
    weights: dict[int, Arrays]  # by version: the newest, and those that workers hold instead
    changes: list[dict[str, Any]]  # the last live change of each kind and name, as they travel
    episodes: list[dict[str, float]]  # see EpisodeMetrics
    num_refused: dict[str, int]
    num_measurements: int
    measure_s: float
    workers: list[SavedWorker]

    @classmethod
    def of_tree(cls, tree: Any) -> Self:
        """Make the value again from its tree."""
        workers = [SavedWorker.of_tree(each) for each in tree["workers"]]
        return super(SavedHead, cls).of_tree({**tree, "workers": workers})


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedForm(_Saved):
    """What a run must have in common with the one that goes on from its checkpoint."""

    env: str
    env_kwargs: Any  # as plain_values has it; None: not known
    max_episode_steps: int | None
    pixels: str
    num_envs_per_worker: int

    @classmethod
    def of(cls, spec: EnvSpec, num_envs_per_worker: int) -> SavedForm:
        """Of the envs that the user wants."""
        kwargs = None
        if isinstance(spec.kwargs, Mapping):
            try:
                kwargs = to_plain(dict(spec.kwargs))
            except NotPlain:
                kwargs = None
        return cls(
            env=_name_of(spec),
            env_kwargs=kwargs,
            max_episode_steps=spec.max_episode_steps,
            pixels="none" if spec.pixels is None else repr(spec.pixels),
            num_envs_per_worker=num_envs_per_worker,
        )

    def differences(self, here: SavedForm) -> list[str]:
        """What differs in the run that shall go on; empty: it fits."""
        found = []
        for each in dataclasses.fields(self):
            saved, wanted = getattr(self, each.name), getattr(here, each.name)
            is_unknown = each.name == "env_kwargs" and (saved is None or wanted is None)
            if not is_unknown and _comparable(saved) != _comparable(wanted):
                found.append(f"{each.name} is {saved!r} there, {wanted!r} here")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun(_Saved):
    """A run between two steps, rollouts or updates."""

    envfleet_version: str
    saved_s: float  # since 1970
    form: SavedForm
    observation_space: dict[str, Any]
    action_space: dict[str, Any]
    seed: int | None
    is_first_seed_used: bool
    generator: dict[str, Any] | None  # of ClusterEnv.np_random; None: never used
    was_reset: bool  # step(actions) may follow
    autoreset: str  # of these steps
    attributes: dict[str, Any]  # that set_attr() has set for all envs
    num_changes: int
    first_version: int  # of the policy's code
    head: SavedHead

    @classmethod
    def of_tree(cls, tree: Any) -> Self:
        """Make the value again from its tree."""
        try:
            parts = {"form": SavedForm.of_tree(tree["form"]), "head": SavedHead.of_tree(tree["head"])}
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"this checkpoint lacks parts that were expected: {error}") from None
        return super(SavedRun, cls).of_tree({**tree, **parts})

    def with_workers(self, num_workers: int) -> SavedRun:
        """For another number of workers: none of them goes on where one was."""
        workers = [each.begun_anew() for each in self.head.workers[:num_workers]]
        last_epoch = max(each.epoch for each in self.head.workers)
        workers += [SavedWorker(epoch=last_epoch) for _ in range(num_workers - len(workers))]
        return replace(self, head=replace(self.head, workers=workers))

    @property
    def has_all_env_states(self) -> bool:
        """Whether all envs can go on where they were."""
        return all(each.has_env_states for each in self.head.workers)

    def require_spaces(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Raise CheckpointError if the envs have other spaces than those of the saved run."""
        for name, saved, here in (
            ("observations", self.observation_space, observation_space),
            ("actions", self.action_space, action_space),
        ):
            there = read_space(saved)
            if there != here:
                raise CheckpointError(f"the checkpoint is of another run: {name} are {there} there, {here} here")


def saved_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """Describe a space as a tree of plain values."""
    described, arrays = describe_space(space, "space")
    return {"space": described, "arrays": dict(arrays)}


def read_space(saved: Mapping[str, Any]) -> spaces.Space[Any]:
    """The inverse of saved_space(). Raises CheckpointError."""
    try:
        return space_of(saved["space"], saved["arrays"], "space")
    except (BadMessage, KeyError, TypeError) as error:
        raise CheckpointError(f"a space in this checkpoint cannot be read: {error}") from None


def _name_of(spec: EnvSpec) -> str:
    if spec.id is not None:
        return spec.id
    if spec.is_list:
        return f"a list of {len(spec.factory)} factories"
    if isinstance(spec.factory, str):
        return spec.factory
    if isinstance(name := getattr(spec.factory, "id", None), str):  # Gymnasium's spec
        return name
    named = spec.factory if hasattr(spec.factory, "__qualname__") else type(spec.factory)
    return f"{named.__module__}.{named.__qualname__}"


def _comparable(value: Any) -> Any:
    """Tuples and lists of plain values are equal: MessagePack has one kind only."""
    return [_comparable(each) for each in value] if isinstance(value, list | tuple) else value
