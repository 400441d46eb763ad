"""FunctionPolicies in plain NumPy, one for each kind of action; the Gumbel and logistic tricks draw them."""

import numpy as np

from envfleet import Bernoulli, Categorical, FunctionPolicy, Gaussian, MultiCategorical

RANDOM = np.random.default_rng(5)


def _weights(num_out):
    return {"w": RANDOM.normal(size=(4, num_out)), "b": RANDOM.normal(size=num_out), "v": RANDOM.normal(size=4)}


def _values(weights, obs):
    return (obs["position"] if isinstance(obs, dict) else obs) @ weights["v"]


def _log_softmax(logits):
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def _draw(logits):
    return np.argmax(logits + np.random.gumbel(size=logits.shape), -1)


def _pick(logits, actions):
    return np.take_along_axis(_log_softmax(logits), actions[:, None], -1)[:, 0]


def _policy(num_out, shown, draw, log_prob, kind=FunctionPolicy):
    def act(weights, obs):
        actions = draw(shown(weights, obs))
        return actions, log_prob(shown(weights, obs), actions)

    return kind(
        act,
        lambda weights, obs, actions: log_prob(shown(weights, obs), actions),
        _weights(num_out),
        _values,
        distribution=shown,
    )


def discrete(kind=FunctionPolicy, num_actions=3):
    """Two actions are those of CartPole. Workers are spared torch, which takes each of them seconds to import."""
    return _policy(
        num_actions,
        lambda weights, obs: Categorical(obs @ weights["w"] + weights["b"]),
        lambda shown: _draw(shown.logits),
        lambda shown, actions: _pick(shown.logits, actions),
        kind,
    )


def masked():
    """Dict observations; what the mask rules out has a logit of -inf."""
    return _policy(
        3,
        lambda weights, obs: Categorical(
            np.where(obs["mask"] == 1, obs["position"] @ weights["w"] + weights["b"], -np.inf)
        ),
        lambda shown: _draw(shown.logits),
        lambda shown, actions: _pick(shown.logits, actions),
    )


def multi_discrete():
    def shown(weights, obs):
        logits = obs @ weights["w"] + weights["b"]
        return MultiCategorical((logits[:, :3], logits[:, 3:]))

    return _policy(
        5,
        shown,
        lambda shown: np.stack([_draw(each) for each in shown.logits], -1),
        lambda shown, actions: sum(_pick(each, column) for each, column in zip(shown.logits, actions.T, strict=True)),
    )


def multi_binary():
    return _policy(
        4,
        lambda weights, obs: Bernoulli(obs @ weights["w"] + weights["b"]),
        lambda shown: (shown.logits + np.random.logistic(size=shown.logits.shape) > 0).astype(np.int8),
        lambda shown, actions: -np.logaddexp(0, np.where(actions == 1, -shown.logits, shown.logits)).sum(-1),
    )


def continuous():
    def shown(weights, obs):
        mean = obs @ weights["w"]
        return Gaussian(mean, np.broadcast_to(weights["b"] * 0.3, mean.shape))

    def log_prob(shown, actions):
        distance = (actions - shown.mean) * np.exp(-shown.log_std)
        return (-0.5 * distance**2 - shown.log_std - 0.5 * np.log(2 * np.pi)).sum(-1)

    return _policy(
        2,
        shown,
        lambda shown: (shown.mean + np.exp(shown.log_std) * np.random.normal(size=shown.mean.shape)).astype(np.float32),
        log_prob,
    )
