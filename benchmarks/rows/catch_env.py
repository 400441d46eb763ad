"""Catch: a ball falls, a paddle catches it; 84 x 84 pixels, four frames stacked. And the CNN that learns it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from torch import Tensor, nn  # noqa: TID253 - the agent is what this is about
from torch.distributions import Categorical  # noqa: TID253

SIZE, BALL, PADDLE, SPEED = 84, 6, 14, 6


class Catch(gymnasium.Env[Any, Any]):
    """+1 for each ball that is caught, -1 for each that is not; an episode has ten."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._paddle, self._num_balls = SIZE // 2, 0
        self._drop()
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._paddle = int(np.clip(self._paddle + SPEED * (int(action) - 1), 0, SIZE - PADDLE))
        self._y += SPEED
        reward = 0.0
        if self._y >= SIZE - BALL:
            reward = 1.0 if self._paddle - BALL < self._x < self._paddle + PADDLE else -1.0
            self._num_balls += 1
            self._drop()
        return self._draw(), reward, self._num_balls == 10, False, {}

    def _drop(self) -> None:
        self._x, self._y = int(self.np_random.integers(SIZE - BALL)), 0

    def _draw(self) -> Any:
        frame = np.zeros((SIZE, SIZE), np.uint8)
        frame[self._y : self._y + BALL, self._x : self._x + BALL] = 255
        frame[-4:, self._paddle : self._paddle + PADDLE] = 160
        return frame


def make_catch() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.FrameStackObservation(Catch(), 4)


class CatchAgent(nn.Module):
    """The Nature CNN: 1.69 M parameters, 6.8 MB."""

    def __init__(self, obs_space: Any, action_space: Any, num_hidden: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(
                nn.Conv2d(4, 32, 8, 4),
                nn.ReLU(),
                nn.Conv2d(32, 64, 4, 2),
                nn.ReLU(),
                nn.Conv2d(64, 64, 3, 1),
                nn.ReLU(),
            ),
            *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()),
        )
        self.actor, self.critic = nn.Linear(512, int(action_space.n)), nn.Linear(512, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def get_distribution(self, obs: Tensor) -> Categorical:
        return Categorical(logits=self.actor(self.trunk(obs.float() / 255)))

    def get_value(self, obs: Tensor) -> Tensor:
        return self.critic(self.trunk(obs.float() / 255)).squeeze(-1)

    def get_action_and_value(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = self.trunk(obs.float() / 255)
        distribution = Categorical(logits=self.actor(hidden))
        action = distribution.sample() if action is None else action
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(hidden).squeeze(-1)
