"""agent_rows(): a cluster's rollout of games of several agents, with a column for each (env, agent)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.adapters.pettingzoo import REWARDS, TERMINATIONS, TRUNCATIONS
from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError
from envfleet.contract.rollout import Rollout


@dataclass(frozen=True, slots=True)
class AgentRollout:
    """T steps of R = N*A rows of (env, agent), time first; row `env * A + agent`. Only rows that are active count."""

    obs: Array  # [T, R, ...]
    actions: Array  # [T, R, ...]
    log_probs: Array | None  # [T, R] float32; None: the policy gave none of single agents
    extras: dict[str, Array]  # each [T, R, ...]: what a PolicyMapping's policies returned, such as "values"
    rewards: Array  # [T, R] float64
    terminations: Array  # [T, R] bool
    truncations: Array  # [T, R] bool
    active: Array  # [T, R] bool: the agent was there, and acted
    next_obs: Array  # [R, ...]: after the last step
    final_steps: Array  # [F] int64: the step in which an agent's episode ended
    final_rows: Array  # [F] int64: its row
    final_obs: Array  # [F, ...]: its last observation


def agent_rows(rollout: Rollout[Any]) -> AgentRollout:
    """Give a cluster's rollout of SharedEnv a column for each (env, agent).

    Args:
        rollout: Of NumPy arrays, with its infos.

    Returns:
        The rows, for estimates of advantages of each agent.

    Raises:
        UsageError: The envs are no SharedEnv, or the rollout was asked for without their infos.
    """
    if not isinstance(rollout.obs, dict) or "active" not in rollout.obs or REWARDS not in rollout.infos:
        raise UsageError("agent_rows() takes a rollout of SharedEnv with its infos: leave out infos=... of rollout()")
    obs: Any = rollout.obs
    active = np.asarray(obs["active"], np.bool_)
    num_steps, num_envs, num_agents = active.shape
    at = rollout.final_steps, rollout.final_envs

    def after(key: str) -> Array:
        """What the envs showed after each step: of ended episodes their last observation."""
        next_obs: Any = rollout.next_obs
        shown = np.concatenate([obs[key][1:], next_obs[key][None]])
        final_obs: Any = rollout.final_obs
        shown[at] = final_obs[key]
        return shown

    def said(key: str) -> Array:
        """What the infos of each step say: of ended episodes that of the last step."""
        values = np.array(rollout.infos[key])
        values[at] = rollout.final_infos.get(key, 0)
        return values

    def rows(array: Any) -> Array:
        return np.asarray(array).reshape(num_steps, num_envs * num_agents, *array.shape[3:])

    ended = (rollout.terminations | rollout.truncations)[:, :, None]
    terminated = said(TERMINATIONS) & active
    truncated = (said(TRUNCATIONS) | (ended & np.asarray(after("active"), np.bool_))) & active
    last = rows(after("agents"))
    final_steps, final_rows = np.nonzero(rows(terminated | truncated))
    extras = {key.removeprefix("agent_"): rows(each) for key, each in rollout.extras.items() if key[:6] == "agent_"}
    next_agents: Any = rollout.next_obs
    return AgentRollout(
        obs=rows(obs["agents"]),
        actions=rows(rollout.actions),
        log_probs=extras.pop("log_probs", None),
        extras=extras,
        rewards=rows(said(REWARDS) * active),
        terminations=rows(terminated),
        truncations=rows(truncated),
        active=rows(active),
        next_obs=next_agents["agents"].reshape(num_envs * num_agents, *last.shape[2:]),
        final_steps=final_steps,
        final_rows=final_rows,
        final_obs=last[final_steps, final_rows],
    )
