"""A game whose agents die and come, in the form of PettingZoo's parallel envs, without PettingZoo."""

import numpy as np
from gymnasium.spaces import Box, Discrete


class ComingAndGoing:
    """Agent k begins at step ARRIVES[k] and dies after LIVES[k] steps of its own; action 3 kills it at once.

    An agent sees (steps so far, its number, a random number of the episode, its last action).
    """

    possible_agents = ("a", "b", "c")
    ARRIVES, LIVES = (0, 0, 2), (3, 5, 4)

    def __init__(self, limit=100, fails_at=None):
        self.agents, self.limit, self.fails_at = [], limit, fails_at
        self.random = np.random.default_rng()
        self.metadata = {"name": "coming_and_going", "is_parallelizable": True}

    def observation_space(self, agent):
        return Box(-10, 10, (4,), np.float32)

    def action_space(self, agent):
        return Discrete(4)

    def _see(self, agents, acts):
        names = self.possible_agents
        return {
            name: np.array([self.time, names.index(name), self.luck, acts.get(name, 0)], np.float32) for name in agents
        }

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.time, self.luck = 0, self.random.uniform()
        self.agents = ["a", "b"]
        return self._see(self.agents, {}), {name: {} for name in self.agents}

    def step(self, acts):
        assert set(acts) == set(self.agents)  # only live agents act
        self.time += 1
        if self.time == self.fails_at:
            raise ValueError("the game is broken")
        acted, names = list(self.agents), self.possible_agents
        lived = {name: self.time - self.ARRIVES[names.index(name)] for name in acted}
        dead = {name: lived[name] >= self.LIVES[names.index(name)] or acts[name] == 3 for name in acted}
        late = {name: self.time >= self.limit for name in acted}
        coming = [name for name, arrives in zip(names, self.ARRIVES, strict=True) if arrives == self.time]
        self.agents = [name for name in acted if not dead[name] and not late[name]] + coming
        rewards = {name: float(acts[name] + 10 * names.index(name)) for name in acted}
        return self._see(acted + coming, acts), rewards, dead, late, {name: {} for name in acted}

    def close(self):
        pass
