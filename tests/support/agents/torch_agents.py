"""Torch modules in CleanRL's forms: one for each kind of action, observation and memory."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn, distributions = torch.nn, torch.distributions
Bernoulli, Categorical, Normal = distributions.Bernoulli, distributions.Categorical, distributions.Normal


class DiscreteAgent(nn.Module):
    """ppo.py."""

    def __init__(self, num_obs=4, num_actions=3):
        super().__init__()
        self.actor, self.critic = nn.Linear(num_obs, num_actions), nn.Linear(num_obs, 1)

    def get_value(self, x):
        return self.critic(x)

    def get_distribution(self, x):
        return Categorical(logits=self.actor(x))

    def get_action_and_value(self, x, action=None):
        probs = self.get_distribution(x)
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class ContinuousAgent(nn.Module):
    """ppo_continuous_action.py."""

    def __init__(self):
        super().__init__()
        self.actor_mean, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)
        self.actor_logstd = nn.Parameter(torch.full((1, 2), -0.5))

    def get_value(self, x):
        return self.critic(x)

    def get_distribution(self, x):
        mean = self.actor_mean(x)
        return Normal(mean, self.actor_logstd.expand_as(mean).exp())

    def get_action_and_value(self, x, action=None):
        probs = self.get_distribution(x)
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


class MultiDiscreteAgent(nn.Module):
    """ppo_multidiscrete.py: choices among 3 and 2."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 5), nn.Linear(4, 1)

    def get_value(self, x):
        return self.critic(x)

    def get_distribution(self, x):
        return [Categorical(logits=logits) for logits in torch.split(self.actor(x), [3, 2], dim=1)]

    def get_action_and_value(self, x, action=None):
        parts = self.get_distribution(x)
        action = torch.stack([part.sample() for part in parts]) if action is None else action.T
        log_prob = torch.stack([part.log_prob(a) for a, part in zip(action, parts, strict=True)])
        entropy = torch.stack([part.entropy() for part in parts])
        return action.T, log_prob.sum(0), entropy.sum(0), self.critic(x)


class MultiBinaryAgent(nn.Module):
    """Four switches."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def get_distribution(self, x):
        return distributions.Independent(Bernoulli(logits=self.actor(x)), 1)

    def get_action_and_value(self, x, action=None):
        probs = self.get_distribution(x)
        action = probs.sample() if action is None else action.float()
        return action.to(torch.int8), probs.log_prob(action), probs.entropy(), self.critic(x)


class MaskedAgent(nn.Module):
    """Dict observations with a mask of the actions that are allowed."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 3), nn.Linear(4, 1)

    def get_value(self, x):
        return self.critic(x["position"])

    def get_distribution(self, x):
        logits = self.actor(x["position"])
        return Categorical(logits=torch.where(x["mask"].bool(), logits, torch.tensor(-1e8)))

    def get_action_and_value(self, x, action=None):
        probs = self.get_distribution(x)
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.get_value(x)


class LstmAgent(nn.Module):
    """ppo_atari_lstm.py, with a small network."""

    def __init__(self, num_layers=1):
        super().__init__()
        self.network = nn.Linear(4, 6)
        self.lstm = nn.LSTM(6, 5, num_layers)
        self.actor, self.critic = nn.Linear(5, 3), nn.Linear(5, 1)

    def get_states(self, x, lstm_state, done):
        hidden = torch.tanh(self.network(x))
        batch_size = lstm_state[0].shape[1]
        hidden = hidden.reshape((-1, batch_size, self.lstm.input_size))
        done = done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done, strict=True):
            kept = (1.0 - d).view(1, -1, 1)
            h, lstm_state = self.lstm(h.unsqueeze(0), (kept * lstm_state[0], kept * lstm_state[1]))
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

    def get_value(self, x, lstm_state, done):
        return self.critic(self.get_states(x, lstm_state, done)[0])

    def get_distribution(self, x, lstm_state, done):
        return Categorical(logits=self.actor(self.get_states(x, lstm_state, done)[0]))

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state


class GruAgent(nn.Module):
    """One tensor of state; no get_value, no get_distribution."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 5, num_layers=2)
        self.actor, self.critic = nn.Linear(5, 3), nn.Linear(5, 1)

    def get_action_and_value(self, x, gru_state, done, action=None):
        hidden, gru_state = self.gru(x.unsqueeze(0), gru_state * (1 - done).view(1, -1, 1))
        probs = Categorical(logits=self.actor(hidden[0]))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden[0]), gru_state


class OwnMemoryAgent(LstmAgent):
    """Begins with a state of its own, which is learned."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 5))

    def initial_state(self, num_envs):
        return self.first.expand(1, num_envs, 5), torch.zeros(1, num_envs, 5)


class QNetwork(nn.Module):
    """dqn.py."""

    def __init__(self, num_actions=3):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, num_actions))

    def forward(self, x):
        return self.network(x)


class SacActor(nn.Module):
    """sac_continuous_action.py."""

    def __init__(self, low, high):
        super().__init__()
        self.fc1, self.fc_mean, self.fc_logstd = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 2)
        low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
        self.register_buffer("action_scale", torch.tensor((high - low) / 2.0))
        self.register_buffer("action_bias", torch.tensor((high + low) / 2.0))

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        log_std = torch.tanh(self.fc_logstd(x))
        return self.fc_mean(x), -5 + 0.5 * (2 + 5) * (log_std + 1)

    def get_action(self, x):
        mean, log_std = self(x)
        normal = Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return y_t * self.action_scale + self.action_bias, log_prob.sum(1)


class Td3Actor(nn.Module):
    """td3_continuous_action.py."""

    def __init__(self):
        super().__init__()
        self.fc_mu = nn.Linear(4, 2)

    def forward(self, x):
        return torch.tanh(self.fc_mu(x)) * 2.0
