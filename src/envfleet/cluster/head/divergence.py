"""Divergence: how far each worker's policy is from the learner's, on rows of that worker's own last rollouts.

Pure. Exact where the policy shows its distribution; else estimated from the log-probs of the actions it took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.cluster.sync import probe_places
from envfleet.cluster.wire.rollouts import Collected, named
from envfleet.contract import distributions
from envfleet.contract.arrays import Array
from envfleet.contract.distributions import Distribution
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import ExposesDistribution, Policy, Recurrent, State
from envfleet.contract.spaces import SpaceTree


@dataclass(frozen=True, slots=True)
class Probes:
    """Rows that a worker collected with one policy: what it saw, what it did, and how likely that was."""

    version: int  # of that policy
    obs: Sequence[Array]  # leaves, each [P, ...]
    actions: Sequence[Array]
    log_probs: Array | None  # [P]
    distribution: Distribution | None  # of P rows
    state: State | None  # of recurrent policies: before each of these rows
    action_mask: Array | None = None  # [P, ...] bool: under which the actions were chosen

    def tree(self) -> dict[str, Any]:
        """The probes as a checkpoint has them."""
        shown = self.distribution
        return {
            "version": self.version,
            "obs": list(self.obs),
            "actions": list(self.actions),
            "log_probs": self.log_probs,
            "kind": None if shown is None else shown.kind,
            "distribution": {} if shown is None else shown.arrays(),
            "state": None if self.state is None else dict(self.state),
            "action_mask": self.action_mask,
        }

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Probes:
        """The inverse of tree()."""
        kind = tree["kind"]
        return cls(
            version=tree["version"],
            obs=tree["obs"],
            actions=tree["actions"],
            log_probs=tree["log_probs"],
            distribution=None if kind is None else distributions.from_arrays(kind, tree["distribution"]),
            state=tree["state"],
            action_mask=tree["action_mask"],
        )

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the policy's methods beside these observations."""
        arguments: dict[str, Any] = {} if self.state is None else {"state": self.state}
        return arguments if self.action_mask is None else {**arguments, "action_mask": self.action_mask}


@dataclass(frozen=True, slots=True)
class ShownForm:
    """The shapes, without that of the batch, in which a policy shows itself."""

    distribution: str | None  # None: it shows none
    state: str


def probes_of(
    part: Collected, obs: Sequence[Array], actions: Sequence[Array], log_probs: Array | None, num_probes: int
) -> Probes:
    """Of one worker's rollout; the arrays are its own part, [T, N, ...] each. Rows are copied."""
    steps, envs = probe_places(part.num_steps, part.column_versions, num_probes)
    state = {name: rows.copy() for name, rows in named(part.arrays, "probe_state.").items()}
    masks = part.arrays.get("action_mask")
    return Probes(
        version=part.version,
        obs=[leaf[steps, envs] for leaf in obs],
        actions=[leaf[steps, envs] for leaf in actions],
        log_probs=None if log_probs is None else log_probs[steps, envs],
        distribution=None
        if part.distribution is None
        else distributions.from_arrays(
            part.distribution, {name: rows.copy() for name, rows in named(part.arrays, "probe.").items()}
        ),
        state=state or None,
        action_mask=None if masks is None else masks[steps, envs],
    )


def has_probabilities(part: Collected) -> bool:
    """Whether a worker's rollout says how likely its actions were."""
    return part.distribution is not None or "log_probs" in part.arrays


def form_of(policy: Policy, obs: Any, num_rows: int, action_mask: Array | None = None) -> ShownForm:
    """What a policy like `policy` shows of itself; `obs` are `num_rows` observations of any kind."""
    state: dict[str, Array] = {}
    if isinstance(policy, Recurrent):
        state = {name: np.asarray(rows) for name, rows in policy.initial_state(num_rows).items()}
    shown = None
    if isinstance(policy, ExposesDistribution):
        masks = {} if action_mask is None else {"action_mask": action_mask}
        shown = policy.distribution(obs, **({"state": state} if state else {}), **masks)
    return ShownForm(None if shown is None else _shown_form(shown), _state_form(state))


def difference(probes: Probes, expected: ShownForm) -> str | None:
    """Why these probes cannot be compared with a policy that shows `expected`; None: they can."""
    remembered = _state_form(probes.state or {})
    if remembered != expected.state:
        return f"its policy remembers {remembered}; the learner's {expected.state}"
    if probes.distribution is None or expected.distribution is None:
        return None  # they are compared by their log-probs
    shown = _shown_form(probes.distribution)
    if shown == expected.distribution:
        return None
    return f"its policy shows {shown}; the learner's {expected.distribution}"


def added(held: Probes | None, new: Probes, num_probes: int) -> Probes:
    """The newest rows of the newest policy: a short rollout alone would be a poor sample."""
    if held is not None and held.version > new.version:  # columns that were begun earlier, and took longer
        return held
    if held is None or held.version != new.version or _num_rows(new) >= num_probes or _form(held) != _form(new):
        return new
    return _joined([_last(held, num_probes - _num_rows(new)), new])


def measured(policy: Policy, probes: Sequence[Probes], obs: SpaceTree, actions: SpaceTree) -> list[float]:
    """The divergence of each worker: the mean over its rows of KL(worker || learner). `policy` is the learner's.

    All workers' rows go through the policy at once: that is what the measurement costs.
    """
    if len({_form(part) for part in probes}) > 1:  # they cannot be put together
        return [measured(policy, [part], obs, actions)[0] for part in probes]
    together = _joined(probes)
    arguments = together.arguments()
    seen = obs.unflatten(list(together.obs))
    each = None
    if together.distribution is not None and isinstance(policy, ExposesDistribution):
        newest = policy.distribution(seen, **arguments)
        each = None if newest is None else _compared(_kl, together.distribution, newest)
    if each is None:
        if together.log_probs is None:
            raise UsageError(
                "APS compares policies by their probabilities, and this one gives none: let act() return log_probs and "
                "write log_prob(), or distribution(); or choose another rule, such as EveryUpdate()"
            )
        log_probs = policy.log_prob(seen, actions.unflatten(list(together.actions)), **arguments)
        each = _compared(distributions.k3, together.log_probs, log_probs)
    ends = np.cumsum([_num_rows(part) for part in probes])[:-1]
    means = [float(part.mean()) for part in np.split(each, ends)]
    return [mean if np.isfinite(mean) else np.inf for mean in means]


def _compared(compare: Callable[[Any, Any], Array], worker: Any, learner: Any) -> Array:
    """Without NumPy's warnings: numbers that have no end are a divergence like others, and lead to a pull."""
    with np.errstate(over="ignore", invalid="ignore"):
        return compare(worker, learner)


def _kl(worker: Distribution, learner: Distribution) -> Array:
    """What cannot be compared is infinitely far, and leads to a pull: to fail here would be to fail for ever."""
    try:
        return distributions.kl(worker, learner)
    except UsageError:
        return np.full(len(next(iter(worker.arrays().values()))), np.inf)


def _joined(probes: Sequence[Any]) -> Probes:
    """Of probes that are alike."""
    first: Probes = probes[0]
    if len(probes) == 1:
        return first
    return Probes(
        version=first.version,
        obs=_concatenated([part.obs for part in probes]),
        actions=_concatenated([part.actions for part in probes]),
        log_probs=None if first.log_probs is None else np.concatenate([part.log_probs for part in probes]),
        distribution=None
        if first.distribution is None
        else distributions.from_arrays(
            first.distribution.kind, _joined_arrays([part.distribution.arrays() for part in probes])
        ),
        state=None if first.state is None else _joined_arrays([part.state or {} for part in probes]),
        action_mask=None if first.action_mask is None else np.concatenate([part.action_mask for part in probes]),
    )


def _concatenated(leaves: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.concatenate(each) for each in zip(*leaves, strict=True)]


def _form(probes: Probes) -> tuple[Any, ...]:
    shown = {} if probes.distribution is None else probes.distribution.arrays()
    kind = None if probes.distribution is None else probes.distribution.kind
    shapes = [(name, rows.shape[1:]) for part in (shown, probes.state or {}) for name, rows in part.items()]
    mask = None if probes.action_mask is None else probes.action_mask.shape[1:]
    return probes.log_probs is None, kind, mask, *shapes


def _last(probes: Probes, num_rows: int) -> Probes:
    shown = probes.distribution
    return Probes(
        version=probes.version,
        obs=[leaf[-num_rows:] for leaf in probes.obs],
        actions=[leaf[-num_rows:] for leaf in probes.actions],
        log_probs=None if probes.log_probs is None else probes.log_probs[-num_rows:],
        distribution=None
        if shown is None
        else distributions.from_arrays(shown.kind, {name: rows[-num_rows:] for name, rows in shown.arrays().items()}),
        state=None if probes.state is None else {name: rows[-num_rows:] for name, rows in probes.state.items()},
        action_mask=None if probes.action_mask is None else probes.action_mask[-num_rows:],
    )


def _shown_form(shown: Distribution) -> str:
    return f"{shown.kind} with {_shapes(shown.arrays())}"


def _state_form(state: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {rows.dtype} {rows.shape[1:]}" for name, rows in sorted(state.items())) or "nothing"


def _shapes(arrays: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {tuple(rows.shape[1:])}" for name, rows in sorted(arrays.items()))


def _joined_arrays(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _num_rows(probes: Probes) -> int:
    return len(probes.obs[0]) if probes.obs else len(probes.actions[0])
