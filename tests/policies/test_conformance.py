"""Every kind of policy passes the conformance suite, and the suite catches those that are wrong."""

from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces

from envfleet import (
    Acted,
    Categorical,
    EpsilonGreedy,
    FunctionPolicy,
    GaussianNoise,
    NormalizedPolicy,
    SquashedGaussian,
    TorchPolicy,
)
from envfleet.policies.adapting import as_policy
from envfleet.testing.policy_conformance import POLICY_CHECKS, PolicyCase, check_policy
from tests.support.agents import numpy_agents

torch = pytest.importorskip("torch")

from tests.support.agents import torch_agents as agents  # noqa: E402  # needs torch
from tests.support.agents.forward_agents import ForwardAgent, ForwardGaussian  # noqa: E402

pytestmark = pytest.mark.slow

OBS = spaces.Box(-2, 2, (4,), np.float32)
MASKED_OBS = spaces.Dict({"mask": spaces.MultiBinary(3), "position": OBS})
DISCRETE = spaces.Discrete(3)
SHIFTED = spaces.Discrete(3, start=-1)
MULTI_DISCRETE = spaces.MultiDiscrete([3, 2])
MULTI_BINARY = spaces.MultiBinary(4)
UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,), np.float32)
BOUNDED = spaces.Box(np.float32([-1, -2]), np.float32([3, 2]))


def _masked_obs(num_rows):
    generator = np.random.default_rng(0)
    mask = generator.integers(2, size=(num_rows, 3)).astype(np.int8)
    mask[np.arange(num_rows), generator.integers(3, size=num_rows)] = 1
    return {"mask": mask, "position": generator.normal(size=(num_rows, 4)).astype(np.float32)}


def _random_act(obs):
    return np.random.randint(3, size=len(obs)), np.full(len(obs), -np.log(3))


def _random_log_prob(obs, actions):
    return np.full(len(obs), -np.log(3))


def _normalized(agent, observation_space=OBS, obs=None):
    policy = NormalizedPolicy(agent, observation_space)
    policy.update(SimpleNamespace(obs=np.random.default_rng(1).normal(0.5, 2, (3, 5, 4)) if obs is None else obs))
    return policy


def _cases():
    torch.manual_seed(0)
    sac, std = SquashedGaussian(agents.SacActor(BOUNDED.low, BOUNDED.high)), [0.3, 0.5]
    return {
        "discrete": PolicyCase(agents.DiscreteAgent(), OBS, DISCRETE),
        "traced": PolicyCase(TorchPolicy(agents.DiscreteAgent(), traced=True), OBS, DISCRETE),
        "forward": PolicyCase(ForwardAgent(num_actions=3), OBS, DISCRETE),
        "traced forward": PolicyCase(TorchPolicy(ForwardAgent(num_actions=3), traced=True), OBS, DISCRETE),
        "forward continuous": PolicyCase(ForwardGaussian(), OBS, UNBOUNDED),
        "continuous": PolicyCase(agents.ContinuousAgent(), OBS, UNBOUNDED),
        "multi-discrete": PolicyCase(agents.MultiDiscreteAgent(), OBS, MULTI_DISCRETE),
        "multi-binary": PolicyCase(agents.MultiBinaryAgent(), OBS, MULTI_BINARY),
        "masked": PolicyCase(agents.MaskedAgent(), MASKED_OBS, DISCRETE, make_obs=_masked_obs),
        "lstm": PolicyCase(agents.LstmAgent(num_layers=2), OBS, DISCRETE),
        "gru": PolicyCase(agents.GruAgent(), OBS, DISCRETE),
        "own memory": PolicyCase(agents.OwnMemoryAgent(), OBS, DISCRETE),
        "function pair": PolicyCase((_random_act, _random_log_prob), OBS, DISCRETE),
        "numpy discrete": PolicyCase(numpy_agents.discrete(), OBS, DISCRETE),
        "numpy masked": PolicyCase(numpy_agents.masked(), MASKED_OBS, DISCRETE, make_obs=_masked_obs),
        "numpy multi-discrete": PolicyCase(numpy_agents.multi_discrete(), OBS, MULTI_DISCRETE),
        "numpy multi-binary": PolicyCase(numpy_agents.multi_binary(), OBS, MULTI_BINARY),
        "numpy continuous": PolicyCase(numpy_agents.continuous(), OBS, UNBOUNDED),
        "epsilon-greedy": PolicyCase(EpsilonGreedy(agents.QNetwork(), 0.2, start=-1), OBS, SHIFTED),
        "squashed": PolicyCase(sac, OBS, BOUNDED, is_squashed=True),
        "noise": PolicyCase(GaussianNoise(agents.Td3Actor(), 0.3, -100, 100), OBS, UNBOUNDED),
        "noise for each dimension": PolicyCase(GaussianNoise(agents.Td3Actor(), std, -100, 100), OBS, UNBOUNDED),
        "normalized discrete": PolicyCase(_normalized(agents.DiscreteAgent()), OBS, DISCRETE),
        "normalized lstm": PolicyCase(_normalized(agents.LstmAgent()), OBS, DISCRETE),
        "normalized pair": PolicyCase(_normalized((_random_act, _random_log_prob)), OBS, DISCRETE),
        "normalized epsilon-greedy": PolicyCase(_normalized(EpsilonGreedy(agents.QNetwork(), 0.2)), OBS, DISCRETE),
        "normalized squashed": PolicyCase(_normalized(sac), OBS, BOUNDED, is_squashed=True),
        "normalized masked": PolicyCase(
            _normalized(agents.MaskedAgent(), MASKED_OBS, _masked_obs(9)), MASKED_OBS, DISCRETE, make_obs=_masked_obs
        ),
    }


CASES = _cases()


@pytest.mark.parametrize("check", POLICY_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", CASES)
def test_conformance(kind, check):
    check(CASES[kind])


def test_clipped_noise_passes_all_but_the_estimate():
    case = PolicyCase(GaussianNoise(agents.Td3Actor(), 0.5, BOUNDED.low, BOUNDED.high), OBS, BOUNDED)
    for check in POLICY_CHECKS:
        if check.__name__ != "estimates_agree_with_the_exact_divergence":
            check(case)


class WrongLogProb(agents.DiscreteAgent):
    def get_action_and_value(self, x, action=None):
        taken, log_prob, entropy, value = super().get_action_and_value(x, action)
        return taken, log_prob if action is None else log_prob - 0.1, entropy, value


class WrongValue(agents.DiscreteAgent):
    def get_value(self, x):
        return self.critic(x) + 1


class WrongDistribution(agents.DiscreteAgent):
    def get_distribution(self, x):
        return torch.distributions.Categorical(logits=2 * self.actor(x))

    def get_action_and_value(self, x, action=None):
        probs = torch.distributions.Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Uniform(WrongDistribution):
    """Shows a distribution that never changes."""

    def get_distribution(self, x):
        return torch.distributions.Categorical(logits=torch.zeros(len(x), 3))


class WrongSampling(agents.DiscreteAgent):
    """Tells its log-probs truly, but draws from another distribution."""

    def get_action_and_value(self, x, action=None):
        action = torch.randint(3, (len(x),)) if action is None else action
        return super().get_action_and_value(x, action)


class BatchAgent(agents.DiscreteAgent):
    """Rows depend on each other, as with batch normalisation that is still training."""

    def get_distribution(self, x):
        return torch.distributions.Categorical(logits=self.actor(x - x.mean(0)))


class LeastLikely(agents.DiscreteAgent):
    def get_deterministic_action(self, x):
        return self.actor(x).argmin(-1)


class LeakyMemory(agents.LstmAgent):
    """One env's memory reaches the others."""

    def get_states(self, x, lstm_state, done):
        hidden, (h, c) = super().get_states(x, lstm_state, done)
        return hidden + lstm_state[0].mean((0, 1)), (h, c)


class GrowingMemory(agents.GruAgent):
    """Its state after acting is of another dtype."""

    def get_action_and_value(self, x, gru_state, done, action=None):
        *acted, gru_state = super().get_action_and_value(x, gru_state, done, action)
        return *acted, gru_state.half()


class HalfTakes(TorchPolicy):
    """Takes what fits, as load_state_dict(strict=False) would."""

    def __reduce__(self):
        return HalfTakes, (self.module,)

    def set_weights(self, weights):
        own = self.get_weights()
        super().set_weights({name: weights.get(name, own[name]) for name in own})


class Rounds(TorchPolicy):
    """Does not give back the weights it was given."""

    def __reduce__(self):
        return Rounds, (self.module,)

    def get_weights(self):
        return {
            name: array.astype(np.float16).astype(np.float32) + 1e-3 for name, array in super().get_weights().items()
        }


class LosesWeights(TorchPolicy):
    """Begins anew on its device."""

    def __reduce__(self):
        return LosesWeights, (self.module,)

    def to_device(self, device):
        super().to_device(device)
        self.module.actor.reset_parameters()


class Keeps(FunctionPolicy):
    """Keeps the arrays of the message."""

    def set_weights(self, weights):
        self._weights = dict(weights)


class WritesObs:
    def act(self, obs):
        obs -= obs.mean()
        return Acted(np.zeros(len(obs), np.int64), None, {})

    def log_prob(self, obs, actions):
        return np.zeros(len(obs), np.float32)

    def values(self, obs):
        return None

    def get_weights(self):
        return {}

    def set_weights(self, weights):
        pass


def _writable_obs(num_rows):
    return np.random.default_rng(0).normal(size=(num_rows, 4)).astype(np.float32)


def _outside(obs):
    return np.full(len(obs), 3)


def _depends_on_other_rows(obs):
    return np.argsort(np.argsort(obs[:, 0])) % 3


def _own_random_act(obs):
    return numpy_agents.RANDOM.integers(3, size=len(obs))


def _keeps():
    plain = numpy_agents.discrete()
    return Keeps(plain._act, plain._log_prob, plain._weights)


WRONG = {
    "is_taken_as_an_agent": [(3, OBS, DISCRETE)],
    "acts_in_the_form_of_the_spaces": [
        (FunctionPolicy(_outside), OBS, DISCRETE),
        (agents.ContinuousAgent(), OBS, DISCRETE),
        (WritesObs(), OBS, DISCRETE),
        (FunctionPolicy(lambda obs: (_outside(obs) - 1, None, {"note": ["a"] * len(obs)})), OBS, DISCRETE),
    ],
    "log_probs_are_those_of_the_actions": [(WrongLogProb(), OBS, DISCRETE), (BatchAgent(), OBS, DISCRETE)],
    "values_are_those_of_acting": [(WrongValue(), OBS, DISCRETE)],
    "weights_make_a_copy_equal": [(Rounds(agents.DiscreteAgent()), OBS, DISCRETE), (_keeps(), OBS, DISCRETE)],
    "wrong_weights_are_refused_whole": [(HalfTakes(agents.DiscreteAgent()), OBS, DISCRETE)],
    "seeded_acting_repeats_itself": [(FunctionPolicy(_own_random_act), OBS, DISCRETE)],
    "the_distribution_gives_the_log_probs": [(WrongDistribution(), OBS, DISCRETE)],
    "estimates_agree_with_the_exact_divergence": [(Uniform(), OBS, DISCRETE), (WrongSampling(), OBS, DISCRETE)],
    "what_it_remembers_has_a_row_for_each_env": [(LeakyMemory(), OBS, DISCRETE), (GrowingMemory(), OBS, DISCRETE)],
    "acting_without_chance_gives_the_mode": [
        (FunctionPolicy(_random_act, _random_log_prob, act_deterministically=_random_act), OBS, DISCRETE),
        (FunctionPolicy(_random_act, _random_log_prob, act_deterministically=_outside), OBS, DISCRETE),
        (FunctionPolicy(_random_act, _random_log_prob, act_deterministically=_depends_on_other_rows), OBS, DISCRETE),
        (LeastLikely(), OBS, DISCRETE),
    ],
    "moving_to_a_device_keeps_what_it_is": [(LosesWeights(agents.DiscreteAgent()), OBS, DISCRETE)],
}


@pytest.mark.parametrize(
    ("check", "wrong"),
    [(check, wrong) for check in POLICY_CHECKS for wrong in WRONG[check.__name__]],
    ids=lambda value: getattr(value, "__name__", type(value[0]).__name__ if isinstance(value, tuple) else None),
)
def test_what_is_wrong_is_caught(check, wrong):
    # Larger weights make what is wrong show more.
    for array in as_policy(wrong[0]).get_weights().values() if check is not POLICY_CHECKS[0] else ():
        array *= 3
    with pytest.raises(AssertionError):
        check(PolicyCase(*wrong, make_obs=_writable_obs))
    with pytest.raises(AssertionError):
        check_policy(*wrong, make_obs=_writable_obs)


def test_a_policy_need_not_show_anything():
    check_policy((_random_act, _random_log_prob), OBS, DISCRETE)
    check_policy(FunctionPolicy(lambda obs: np.zeros(len(obs), np.int64)), OBS, DISCRETE)
    check_policy(
        FunctionPolicy(_random_act, _random_log_prob, distribution=lambda obs: Categorical(np.zeros((len(obs), 3)))),
        OBS,
        DISCRETE,
    )
