"""The same pools and policy as the cluster's workers have, in one process: what a rollout costs without a cluster.

A plain loop, as a user would write it, that stores the arrays a Rollout has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks.rows.cluster_peers.serve import Served, count_for, serve


class LocalRollouts:
    """One pool and the loop around it."""

    def __init__(self, agent: Any, num_envs: int, num_steps: int, seed: int) -> None:
        import envfleet

        self._agent = agent
        self._num_steps = num_steps
        self._pool = envfleet.make("CartPole-v1", num_envs, autoreset_mode="same_step", num_workers=1, seed=seed)
        self._obs = self._pool.reset()[0]
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    def collect(self) -> dict[str, np.ndarray]:
        """The arrays of one rollout: time first."""
        import torch

        pool, agent = self._pool, self._agent
        shape = (self._num_steps, pool.num_envs)
        obs = np.empty((shape[0] + 1, shape[1], 4), np.float32)
        actions = np.empty(shape, np.int64)
        log_probs, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        rewards, terminated, truncated = np.empty(shape), np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        finals: list[Any] = []
        places: list[tuple[int, int]] = []
        episodes: list[tuple[float, int]] = []
        with torch.no_grad():
            for t in range(self._num_steps):
                obs[t] = self._obs
                action, log_prob, _, value = agent.get_action_and_value(torch.from_numpy(obs[t]))
                actions[t], log_probs[t], values[t] = action.numpy(), log_prob.numpy(), value.numpy()[:, 0]
                self._obs, rewards[t], terminated[t], truncated[t], info = pool.step(actions[t])
                self._returns += rewards[t]
                self._lengths += 1
                ended = np.flatnonzero(terminated[t] | truncated[t])
                if len(ended):
                    places += [(t, int(env)) for env in ended]
                    finals += [info["final_obs"][env] for env in ended]
                    episodes += list(zip(self._returns[ended].tolist(), self._lengths[ended].tolist(), strict=True))
                    self._returns[ended] = 0.0
                    self._lengths[ended] = 0
            obs[-1] = self._obs
            next_values = agent.get_value(torch.from_numpy(obs[-1])).numpy()[:, 0]
            final_values = np.zeros(shape, np.float32)
            if finals:
                steps, envs = np.array(places).T
                final_values[steps, envs] = agent.get_value(torch.from_numpy(np.stack(finals))).numpy()[:, 0]
        return {
            "obs": obs,
            "actions": actions,
            "log_probs": log_probs,
            "values": values,
            "rewards": rewards,
            "terminated": terminated,
            "truncated": truncated,
            "next_values": next_values,
            "final_values": final_values,
            "final_obs": np.array(finals),
            "episodes": np.array(episodes),
        }

    def close(self) -> None:
        """Close the pool."""
        self._pool.close()


class Other:
    """The same in another process, at the same time: cores that share caches and units slow each other down."""

    def __init__(self, settings: dict[str, Any]) -> None:
        command = [sys.executable, __file__, json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def say(self, request: dict[str, Any]) -> None:
        """Ask for something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it says."""
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        self.say({"close": True})
        self._process.wait(30.0)


def build(settings: dict[str, Any]) -> Served:
    import torch

    from benchmarks.rows.cluster_policy import Agent

    torch.set_num_threads(1)
    if not settings["checks_distributions"]:
        torch.distributions.Distribution.set_default_validate_args(False)
    agent = Agent()
    num_steps = settings.get("num_steps", 64)
    all_rollouts = [
        LocalRollouts(agent, settings["num_envs"], num_steps, seed=index * settings["num_envs"])
        for index in range(settings["num_pools"])
    ]

    others = [Other({**settings, "num_processes": 1}) for _ in range(settings["num_processes"] - 1)]

    def collect() -> int:
        return sum(int(rollouts.collect()["rewards"].size) for rollouts in all_rollouts)

    def run_window(window_s: float) -> dict[str, Any]:
        for other in others:
            other.say({"window_s": window_s})
        window = count_for(window_s, collect)
        return {**window, "count": window["count"] + sum(other.answer()["count"] for other in others)}

    def close() -> None:
        for rollouts in all_rollouts:
            rollouts.close()
        for other in others:
            other.close()

    return Served(run_window, close)


if __name__ == "__main__":
    serve(build)
