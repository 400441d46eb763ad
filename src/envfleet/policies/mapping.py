"""PolicyMapping: several policies for the agents of one game, some of which may be older versions of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import Acted, ActsDeterministically, Policy, Recurrent, Seedable
from envfleet.policies.adapting import as_policy
from envfleet.policies.checks import joined, require_weights, split_weights


class PolicyMapping:
    """Acts for all A agents of envfleet.adapters.pettingzoo.SharedEnv: each agent by the policy that is mapped to it.

    All rows of one policy are acted on at once, over envs and agents. The log-prob of an env's action is the sum over
    its active agents; those of single agents, and what the policies return besides, are the extras `agent_log_probs`,
    `agent_values` and so on, [B, A, ...] each.

    Args:
        policies: By name, without dots; as a cluster takes agents. They are used, not copied.
        policy_of: The name of the policy of each agent, by the agent's name.
        agents: Names of the agents in the order of their rows, as agents_of(envs) returns them.

    Raises:
        UsageError: An agent has no policy, a policy is missing or recurrent, or a name has a dot.
    """

    def __init__(self, policies: Mapping[str, Any], policy_of: Mapping[str, str], agents: Sequence[str]) -> None:
        self.policies: dict[str, Policy] = {name: as_policy(each) for name, each in policies.items()}
        self.agents = tuple(agents)
        for name, policy in self.policies.items():
            if "." in name or isinstance(policy, Recurrent):
                raise UsageError(f"policies of a PolicyMapping have no dot in their names, and no memory; got {name!r}")
        if without := [agent for agent in self.agents if policy_of.get(agent) not in self.policies]:
            raise UsageError(f"agents without a policy: {', '.join(without)}; policies: {', '.join(self.policies)}")
        by_policy = {name: [row for row, each in enumerate(agents) if policy_of[each] == name] for name in policies}
        self._rows = {name: np.array(rows, np.intp) for name, rows in by_policy.items() if rows}

    def keep_version(self, name: str, of: str) -> None:
        """Give one policy the present weights of another, which it keeps: an opponent for self-play.

        Args:
            name: Of the policy that changes.
            of: Of the policy whose weights are copied.

        Raises:
            UsageError: There is no such policy, or its weights do not fit.
        """
        if unknown := [each for each in (name, of) if each not in self.policies]:
            raise UsageError(f"no policy is called {unknown[0]!r}; known: {', '.join(self.policies)}")
        weights = self.policies[of].get_weights()
        self.policies[name].set_weights({key: np.array(array) for key, array in weights.items()})

    def seed(self, seed: int) -> None:
        """Restart the random numbers of those policies that have their own.

        Args:
            seed: Of the first policy; each other has the next one.
        """
        for place, policy in enumerate(self.policies.values()):
            if isinstance(policy, Seedable):
                policy.seed(seed + place)

    def act(self, obs: Any) -> Acted:
        """Choose the actions of all agents; those of absent ones are drawn, too, but the game does not get them.

        Args:
            obs: B observations of SharedEnv.

        Returns:
            Actions [B, A, ...], log-probs of active agents, and extras of each agent.

        Raises:
            UsageError: Only some policies have log-probs or an extra.
        """
        acted = {name: self.policies[name].act(_taken(obs["agents"], rows)) for name, rows in self._rows.items()}
        return self._acted(acted, obs)

    def act_deterministically(self, obs: Any) -> Acted:
        """Choose the actions of all agents without chance.

        Args:
            obs: B observations of SharedEnv.

        Returns:
            As act() returns them.

        Raises:
            UsageError: A policy has no act_deterministically().
        """
        acted: dict[str, Acted] = {}
        for name, rows in self._rows.items():
            policy = self.policies[name]
            if not isinstance(policy, ActsDeterministically):
                raise UsageError(
                    f"the policy {name!r} has no act_deterministically(obs): give it one, or evaluate with "
                    "deterministic=False"
                )
            acted[name] = policy.act_deterministically(_taken(obs["agents"], rows))
        return self._acted(acted, obs)

    def log_prob(self, obs: Any, actions: Any) -> Array:
        """Compute the log-probabilities of the actions of active agents, summed over them.

        Args:
            obs: B observations of SharedEnv.
            actions: [B, A, ...].

        Returns:
            [B] float32.
        """
        parts = {
            name: self.policies[name].log_prob(_taken(obs["agents"], rows), _taken(actions, rows))
            for name, rows in self._rows.items()
        }
        return _summed(self._joined(parts, len(obs["active"])), obs)

    def values(self, obs: Any) -> None:
        """Return None: values are those of agents, in the extra `agent_values`.

        Args:
            obs: B observations of SharedEnv.
        """

    def get_weights(self) -> dict[str, Array]:
        """Return the weights of all policies, as `policy.name`.

        Returns:
            The arrays by name; they may be views.
        """
        return joined(**{name: policy.get_weights() for name, policy in self.policies.items()})

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace the weights of all policies.

        Args:
            weights: As get_weights() of another copy gives them.

        Raises:
            UsageError: Names or shapes differ; nothing is changed.
        """
        require_weights(weights, {name: array.shape for name, array in self.get_weights().items()})
        for name, policy in self.policies.items():
            policy.set_weights(split_weights(weights, name))

    def _acted(self, acted: Mapping[str, Acted], obs: Any) -> Acted:
        """Join what the policies returned for their rows."""
        num_rows = len(obs["active"])
        actions = self._joined({name: each.actions for name, each in acted.items()}, num_rows)
        columns: dict[str, dict[str, Any]] = {}
        for name, each in acted.items():
            found = dict(each.extras) if each.log_probs is None else {**each.extras, "log_probs": each.log_probs}
            for key, array in found.items():
                columns.setdefault(key, {})[name] = array
        for key, by_policy in columns.items():
            if len(by_policy) != len(self._rows):
                raise UsageError(f"only some policies return {key!r}: {', '.join(by_policy)}; all must, or none")
        extras = {f"agent_{key}": self._joined(by_policy, num_rows) for key, by_policy in columns.items()}
        log_probs = extras.get("agent_log_probs")
        return Acted(actions, None if log_probs is None else _summed(log_probs, obs), extras)

    def _joined(self, by_policy: Mapping[str, Any], num_rows: int) -> Array:
        """[B, A, ...] of what each policy gave for its rows."""
        result: Array | None = None
        for name, rows in self._rows.items():
            part = np.asarray(by_policy[name])
            if result is None:
                result = np.empty((num_rows, len(self.agents), *part.shape[1:]), part.dtype)
            result[:, rows] = part.reshape(num_rows, len(rows), *part.shape[1:])
        assert result is not None  # there is an agent, and each has a policy
        return result


def _taken(array: Array, rows: Array) -> Array:
    """[B * len(rows), ...]: the rows of some agents of all envs."""
    taken = np.asarray(array)[:, rows]
    return np.asarray(taken.reshape(-1, *taken.shape[2:]))


def _summed(by_agent: Array, obs: Any) -> Array:
    return np.asarray(np.where(np.asarray(obs["active"], np.bool_), by_agent, 0).sum(1), np.float32)
