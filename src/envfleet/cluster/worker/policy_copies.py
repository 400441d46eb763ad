"""PolicyCopies: a worker's copies of the policy, the newest version and older ones that unfinished rows began with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from envfleet.cluster.wire.messages import Weights
from envfleet.cluster.wire.plain_values import from_plain
from envfleet.cluster.wire.weights import digest, unpacked
from envfleet.cluster.worker.policy_state import PolicyError
from envfleet.contract.arrays import Arrays
from envfleet.contract.policy import MovesToDevice, Policy, PolicyCode
from envfleet.policies.adapting import build_policy
from envfleet.policies.torch_module import prepare_worker
from envfleet.pool.process.cpus import usable_cpus

logger = logging.getLogger("envfleet.worker")


class PolicyCopies:
    """Copies of one policy, each with the weights of one version. A copy that is not in use takes the next weights."""

    def __init__(self, has_several: bool = False, device: str | None = None) -> None:
        """`has_several`: versions may be in use beside the newest one; `device`: where they act, None: the CPU."""
        self._has_several = has_several
        self._device = device
        self.code_id = 0
        self.num_built = 0  # policies; copies of one are one
        self.version = -1  # the newest one here; -1: none
        self._code: PolicyCode | None = None
        self._blank: Policy | None = None  # built, without weights
        self._by_version: dict[int, Policy] = {}
        self._seeded: list[Policy] = []

    def __getitem__(self, version: int) -> Policy:
        """The copy with the weights of a version that is in use."""
        return self._by_version[version]

    def __len__(self) -> int:
        """Copies with weights."""
        return len(self._by_version)

    @property
    def is_built(self) -> bool:
        """Whether there is a copy, with or without weights, that can be used."""
        return self._blank is not None or self.version in self._by_version

    @property
    def has_weights(self) -> bool:
        """Whether there is a copy with weights."""
        return self.version >= 0

    @property
    def newest(self) -> Policy:
        """The copy with the newest weights."""
        return self._by_version[self.version]

    def build(self, message: Any, arrays: Arrays) -> None:
        """Build another policy; all copies of the one before it are dropped."""
        self._by_version, self._seeded, self._blank, self.version = {}, [], None, -1
        pickled = arrays.get("pickled")
        self._code = PolicyCode(
            pickled=None if pickled is None else pickled.tobytes(),
            factory=message.factory,
            kwargs=from_plain(message.kwargs),
        )
        self._blank, self.code_id = self._built(), message.code_id
        self.num_built += 1
        if not self._has_several:
            self._code = None  # a pickle may be as large as the weights, and is not needed again

    def load(self, message: Weights, arrays: Arrays, in_use: Collection[int] = ()) -> None:
        """Give a copy the newest weights: one whose version is not `in_use`, or a new one."""
        policy = self._free_copy(in_use)
        if arrays:  # a policy by its import path may bring its own
            weights = unpacked(message, arrays)
            try:
                policy.set_weights(weights)
                held = policy.get_weights()
            except Exception as error:
                raise PolicyError(f"the policy refused its weights: {type(error).__name__}: {error}") from error
            if digest(held) != message.digest:
                raise PolicyError(
                    f"the policy does not hold the weights that it was given: {_differing(held, weights)}"
                )
        self._by_version[message.version], self.version = policy, message.version

    def seed_new(self, seed: Callable[[Policy], None]) -> None:
        """Seed the copies that were not seeded."""
        for policy in self._by_version.values():
            if not any(policy is each for each in self._seeded):
                seed(policy)
        self._seeded = list(self._by_version.values())

    @property
    def is_seeded(self) -> bool:
        """Whether the copy with the newest weights is seeded."""
        return self.has_weights and any(self.newest is each for each in self._seeded)

    def mark_seeded(self) -> None:
        """The copy with the newest weights goes on with random numbers of its own."""
        self._seeded = [self.newest]

    def forget_seeds(self) -> None:
        """Have all copies seeded again."""
        self._seeded = []

    def _free_copy(self, in_use: Collection[int]) -> Policy:
        """Drop all copies that are not in use. The one returned has no version until its weights are checked."""
        free = [self._by_version.pop(version) for version in list(self._by_version) if version not in in_use]
        if self._blank is not None:
            free.append(self._blank)
            self._blank = None
        return free[-1] if free else self._built()

    def _built(self) -> Policy:
        assert self._code is not None
        try:
            policy = build_policy(self._code, self._device)
        except Exception as error:
            raise PolicyError(f"the policy cannot be built here: {type(error).__name__}: {error}") from error
        prepare_worker(usable_cpus())
        if self._device is not None:
            _move(policy, self._device)
        return policy


def _move(policy: Policy, device: str) -> None:
    """Have a policy act on a device of this worker. What does not move acts where its own library puts it."""
    if not isinstance(policy, MovesToDevice):
        logger.warning("worker_device=%r: %s has no to_device(device), and is not told", device, type(policy).__name__)
        return
    try:
        policy.to_device(device)
    except Exception as error:
        raise PolicyError(
            f"worker_device={device!r} cannot be used on this host: {type(error).__name__}: {error}. Have the launcher "
            f"ask for one (gpus_per_worker=1 of Slurm, Ray and Kubernetes), and install a build of the policy's "
            f"library that can use it; or leave worker_device out: the policy then acts on the CPU"
        ) from error


def _differing(held: Arrays, given: Arrays) -> str:
    if digest(given) == digest(held):
        return "they were changed on the way from the head"
    wrong = [name for name in {**given, **held} if digest(_only(held, name)) != digest(_only(given, name))]
    return f"get_weights() after set_weights() differs in {', '.join(wrong[:10])}"


def _only(weights: Arrays, name: str) -> Arrays:
    return {name: weights[name]} if name in weights else {}
