"""Games of several agents (PettingZoo's parallel envs): one env for a pool, and rows of (env, agent) for a learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from envfleet.adapters.vector_source import SourceStep, VectorSource
from envfleet.contract.arrays import Array, BoolArray, FloatArray
from envfleet.contract.errors import UsageError
from envfleet.contract.infos.table import InfoTable, mask_key

AGENTS = "agents"  # in the metadata of an env: the names of its agents, in the order of their rows
REWARDS, TERMINATIONS, TRUNCATIONS = "agent_rewards", "agent_terminations", "agent_truncations"  # in its infos


class SharedEnv(gymnasium.Env[Any, Any]):
    """A PettingZoo parallel env of A agents as one Gymnasium env, which any pool or cluster runs.

    The observation is `{"agents": [A, ...], "active": [A]}`: a row for each of `possible_agents`, and which of them act
    next. The row of an agent whose episode has just ended is its last observation; rows of other absent agents are 0.
    The action is [A, ...]; the game gets those of active agents only. Every info has `agent_rewards`,
    `agent_terminations` and `agent_truncations`, each [A]. The reward is the sum over agents. The episode ends when no
    agent is left: truncated if all that left last were truncated only, else terminated.
    """

    def __init__(self, make_game: Callable[..., Any], **kwargs: Any) -> None:
        """Build the game.

        Args:
            make_game: Returns a parallel env, such as `pettingzoo.sisl.pursuit_v5.parallel_env`.
            kwargs: Its arguments.

        Raises:
            UsageError: It returns none, or the spaces of its agents differ.
        """
        game = make_game(**kwargs)
        names = getattr(game, "possible_agents", None)
        if not names or not callable(getattr(game, "observation_space", None)) or hasattr(game, "last"):
            raise UsageError(
                f"make_game must return a parallel env of PettingZoo, with possible_agents; got {type(game).__name__}. "
                "Of turn-based ones pettingzoo.utils.turn_based_aec_to_parallel makes such an env"
            )
        self.game = game
        self.agents = tuple(str(name) for name in names)
        self._names = tuple(names)
        self._obs_space = _shared([game.observation_space(name) for name in names], "observation_space")
        action_space = _shared([game.action_space(name) for name in names], "action_space")
        num_agents = len(names)
        self.observation_space = spaces.Dict(
            {"agents": batch_space(self._obs_space, num_agents), "active": spaces.MultiBinary(num_agents)}
        )
        self.action_space = batch_space(action_space, num_agents)
        self.metadata = {**_plain_metadata(game), AGENTS: list(self.agents)}
        self.render_mode = getattr(game, "render_mode", None)
        flags = np.dtype((np.bool_, (num_agents,)))
        self.info_columns = {
            REWARDS: np.dtype((np.float64, (num_agents,))),
            TERMINATIONS: flags,
            TRUNCATIONS: flags,
        }
        self._active = np.zeros(num_agents, np.bool_)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of all agents that the game begins with."""
        super().reset(seed=seed)
        seen, _ = self.game.reset(seed=seed, options=options)
        return self._observed(seen), self._info({}, {}, {})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the game with the actions of the active agents."""
        acts = {name: action[row] for row, name in enumerate(self._names) if self._active[row]}
        seen, rewards, terminations, truncations, _ = self.game.step(acts)
        obs, info = self._observed(seen), self._info(rewards, terminations, truncations)
        ended = not self._active.any()
        only_truncated = bool(info[TRUNCATIONS].any() and not info[TERMINATIONS].any())
        reward = float(info[REWARDS].sum())
        return obs, reward, ended and not only_truncated, ended and only_truncated, info

    def render(self) -> Any:
        """Render the game."""
        return self.game.render()

    def close(self) -> None:
        """Close the game."""
        self.game.close()

    def _observed(self, seen: dict[Any, Any]) -> dict[str, Array]:
        rows = np.zeros((len(self._names), *(self._obs_space.shape or ())), self._obs_space.dtype)
        for row, name in enumerate(self._names):
            if name in seen:
                rows[row] = seen[name]
        present = set(self.game.agents)
        self._active = np.array([name in present for name in self._names])
        return {"agents": rows, "active": self._active.astype(np.int8)}

    def _info(self, *by_agent: dict[Any, Any]) -> dict[str, Array]:
        dtypes = (np.float64, np.bool_, np.bool_)
        return {
            key: np.array([values.get(name, 0) for name in self._names], dtype)
            for key, values, dtype in zip((REWARDS, TERMINATIONS, TRUNCATIONS), by_agent, dtypes, strict=True)
        }


class AgentRows(VectorEnv[Any, Any, Any]):
    """A pool or a cluster of SharedEnv as a vector env whose N*A rows are (env, agent).

    Row `env * A + agent`. `info["active"]` says which rows act next; `info["env_id"]` and `info["agent_id"]` whose they
    are. Actions of rows that are not active are ignored. A row ends with its agent's episode; `info["final_obs"]` has
    its last observation then. Envs in which no agent is left begin anew in the same step, with all their rows.
    """

    def __init__(self, envs: Any) -> None:
        """Take the envs, which close() closes.

        Args:
            envs: A pool or a ClusterEnv of SharedEnv, with `autoreset_mode="same_step"`.

        Raises:
            UsageError: They are none, do not reset in the same step, or come in batches of some.
        """
        self._source = VectorSource(envs, "AgentRows")
        self.agents = agents_of(envs)
        num_agents, obs_space = len(self.agents), self._source.single_observation_space
        self._num_games = self._source.num_envs
        self.num_envs = self._num_games * num_agents
        self.single_observation_space = _one_of(obs_space["agents"])  # type: ignore[index]  # of SharedEnv, a Dict
        self.single_action_space = _one_of(self._source.single_action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = self._source.render_mode
        self._env_ids = np.repeat(np.arange(self._num_games), num_agents)
        self._agent_ids = np.tile(np.arange(num_agents), self._num_games)
        self._active = np.zeros((self._num_games, num_agents), np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Reset all envs.

        Args:
            seed: One for all envs, or one for each, as pools take it.
            options: Of the games.

        Returns:
            Observations [N*A, ...], and infos.
        """
        obs, _ = self._source.reset(seed, options)
        self._active = np.asarray(obs["active"], np.bool_)
        return self._rows(obs["agents"]), self._info()

    def step(self, actions: Any) -> tuple[Array, FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """Step all envs.

        Args:
            actions: [N*A, ...].

        Returns:
            Observations, rewards, terminations, truncations, a row for each (env, agent), and infos.

        Raises:
            EnvFailed: A game raised. recv() then returns this step, in which that game's agents are truncated.
        """
        actions = np.asarray(actions)
        if len(actions) != self.num_envs:
            raise UsageError(f"actions must have {self.num_envs} rows, one for each (env, agent); got {len(actions)}")
        return self._received(self._source.step(actions.reshape(self._num_games, -1, *actions.shape[1:])))

    def recv(self) -> tuple[Array, FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """Return the step that raised EnvFailed, as step() would."""
        return self._received(self._source.recv())

    def _received(self, step: SourceStep) -> tuple[Array, FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        next_obs = self._source.next_obs(step)
        rewards, terminated, truncated = _results(step, self._active.shape)
        truncated |= step.ended[:, None] & np.asarray(next_obs["active"], np.bool_)  # a limit of steps, or a failure
        acted = self._active
        rewards, terminated, truncated = rewards * acted, terminated & acted, truncated & acted
        self._active = np.asarray(step.obs["active"], np.bool_)
        infos = self._info()
        if (terminated | truncated).any():
            infos["final_obs"] = self._rows(next_obs["agents"])
            infos["_final_obs"] = (terminated | truncated).reshape(-1)
        flat = rewards.reshape(-1), terminated.reshape(-1), truncated.reshape(-1)
        return self._rows(step.obs["agents"]), *flat, infos

    def close(self, **kwargs: Any) -> None:
        """Close the envs; more than once does no harm."""
        self._source.close()

    def __enter__(self) -> Self:
        """Return the rows, which `with` closes."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the envs, whatever happened."""
        self.close()

    def _rows(self, by_env: Array) -> Array:
        return by_env.reshape(self.num_envs, *by_env.shape[2:])

    def _info(self) -> dict[str, Any]:
        return {"active": self._active.reshape(-1).copy(), "env_id": self._env_ids, "agent_id": self._agent_ids}


def agents_of(envs: Any) -> tuple[str, ...]:
    """Return the names of the agents of a pool or cluster of SharedEnv, in the order of their rows.

    Raises:
        UsageError: The envs are no SharedEnv.
    """
    names = getattr(envs, "metadata", {}).get(AGENTS)
    if names is None:
        raise UsageError("the envs are no SharedEnv: make them of envfleet.adapters.pettingzoo.SharedEnv")
    return tuple(names)


def _results(step: SourceStep, shape: tuple[int, ...]) -> tuple[FloatArray, BoolArray, BoolArray]:
    """Rewards, terminations and truncations of this step, each [N, A]; 0 of envs that failed."""
    results: list[Any] = []
    for key, dtype in ((REWARDS, np.float64), (TERMINATIONS, np.bool_), (TRUNCATIONS, np.bool_)):
        values = np.zeros(shape, dtype)
        _copy_column(step.table, key, values, ~step.ended)
        if step.ended.any():
            for row in np.flatnonzero(step.ended).tolist():
                values[row] = step.final_info(row).get(key, 0)
        results.append(values)
    return results[0], results[1], results[2]


def _copy_column(table: InfoTable, key: str, values: Array, rows: BoolArray) -> None:
    if key in table.columns:
        rows = rows & np.asarray(table.columns[mask_key(key)])
        values[rows] = table.columns[key][rows]


def _shared(each: list[spaces.Space[Any]], name: str) -> spaces.Space[Any]:
    if not isinstance(each[0], spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise UsageError(f"agents must have a Box or discrete {name}; got {each[0]}: flatten it with a wrapper")
    if different := [space for space in each if space != each[0]]:
        raise UsageError(
            f"all agents must have the same {name}; got {each[0]} and {different[0]}: pad them with a wrapper, such as "
            "SuperSuit's pad_observations_v0 and pad_action_space_v0"
        )
    return each[0]


def _one_of(batched: Any) -> spaces.Space[Any]:
    """The space of one row of a batch of A."""
    if isinstance(batched, spaces.Box):
        return spaces.Box(batched.low[0], batched.high[0], dtype=batched.dtype.type)
    if isinstance(batched, spaces.MultiDiscrete):
        if batched.nvec.ndim == 1:
            return spaces.Discrete(int(batched.nvec[0]), start=int(batched.start[0]))
        return spaces.MultiDiscrete(batched.nvec[0], start=batched.start[0])
    return spaces.MultiBinary(batched.shape[1:])


def _plain_metadata(game: Any) -> dict[str, Any]:
    """What Gymnasium's envs have in theirs; games may have values that cannot travel."""
    metadata = getattr(game, "metadata", {})
    return {key: metadata[key] for key in ("render_modes", "render_fps", "name") if key in metadata}
