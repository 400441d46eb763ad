"""Modules that act by forward(obs, action=None), as ClusterEnv's example agent does: found without being told."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import envfleet
from envfleet.contract.distributions import Categorical, kl
from envfleet.policies.adapting import as_policy, build_policy, code_of
from envfleet.policies.torch_forward import acts_by_forward
from envfleet.policies.torch_module import TorchPolicy

torch = pytest.importorskip("torch")
nn = torch.nn

from tests.support.agents.forward_agents import ForwardAgent, ForwardGaussian, WarmAgent  # noqa: E402  # needs torch
from tests.support.agents.torch_agents import DiscreteAgent, LstmAgent, QNetwork, SacActor  # noqa: E402

OBS = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def with_forward(function):
    """A module with this forward."""
    return type("Module", (nn.Module,), {"forward": function})()


def four(x, action=None):
    return action, x, x, x


@pytest.mark.parametrize(
    "module",
    [
        ForwardAgent(),
        ForwardGaussian(),
        with_forward(lambda self, obs, action=None: four(obs, action)),
        with_forward(lambda self, obs, action=None, action_mask=None: four(obs, action)),
        with_forward(lambda self, obs, action=None, **kwargs: four(obs, action)),
    ],
)
def test_found_by_its_signature(module):
    assert acts_by_forward(module)
    assert type(as_policy(module)) is TorchPolicy


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 2),
        QNetwork(),
        SacActor([-1], [1]),
        nn.LSTM(4, 4),
        with_forward(lambda self, obs, action: four(obs, action)),  # a critic of SAC
        with_forward(lambda self, obs, actions=None: four(obs, actions)),
        with_forward(lambda self, obs, action=0: four(obs, action)),
        with_forward(lambda self, obs, state, action=None: four(obs, action)),
        with_forward(lambda self, obs, action=None, *, temperature: four(obs, action)),
        with_forward(lambda self, *args: four(*args)),
        nn.Module(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_others_are_refused_with_the_known_forms(module):
    assert not acts_by_forward(module)
    with pytest.raises(
        envfleet.UsageError,
        match=r"get_action_and_value\(obs, action=None\) or forward\(obs, action=None\) -> action, log_prob, entropy, "
        r"value or, if it remembers, .*\(obs, lstm_state, done, action=None\).*its forward is not",
    ):
        as_policy(module)
    with pytest.raises(envfleet.UsageError, match="nor a forward of this form"):
        TorchPolicy(module)


def test_get_action_and_value_comes_first():
    class Both(DiscreteAgent):
        def forward(self, x, action=None):
            raise AssertionError("not this one")

    assert not acts_by_forward(Both()) and not acts_by_forward(LstmAgent())
    assert as_policy(Both()).act(OBS).actions.shape == (16,)


def test_it_acts_as_the_module_does():
    module = ForwardAgent(num_actions=3)
    policy = as_policy(module)
    torch.manual_seed(3)
    acted = policy.act(OBS)
    torch.manual_seed(3)
    with torch.no_grad():
        actions, log_probs, _, values = module(torch.from_numpy(OBS))
    assert_array_equal(acted.actions, actions.numpy())
    assert_array_equal(acted.log_probs, log_probs.numpy())
    assert_array_equal(acted.extras["values"], values[:, 0].numpy())
    assert_array_equal(policy.log_prob(OBS, acted.actions), acted.log_probs)
    assert_array_equal(policy.values(OBS), acted.extras["values"])
    best = policy.act_deterministically(OBS)
    assert_array_equal(best.actions, module.actor(torch.from_numpy(OBS)).argmax(1).numpy())
    copy = build_policy(code_of(module))
    copy.set_weights(policy.get_weights())
    assert_array_equal(copy.log_prob(OBS, acted.actions), acted.log_probs)


def test_hooks_of_the_module_are_called():
    module, seen = ForwardAgent(), []
    module.register_forward_hook(lambda *_: seen.append(True))
    as_policy(module).act(OBS)
    assert seen


def test_the_actor_makes_divergences_exact():
    one, other = ForwardAgent(num_actions=3), ForwardAgent(num_actions=3)
    shown = [as_policy(each).distribution(OBS) for each in (one, other)]
    assert all(isinstance(each, Categorical) for each in shown)
    p, q = (torch.log_softmax(each.actor(torch.from_numpy(OBS)), 1).detach().numpy() for each in (one, other))
    assert_allclose(kl(*shown), (np.exp(p) * (p - q)).sum(1), rtol=1e-4, atol=1e-6)


def test_showing_it_draws_no_random_numbers():
    policy, before = as_policy(ForwardAgent()), torch.get_rng_state()
    policy.distribution(OBS)
    assert torch.equal(torch.get_rng_state(), before)


class NoActor(ForwardAgent):
    def __init__(self):
        super().__init__()
        self.policy_head = self.actor
        del self.actor

    def forward(self, x, action=None):
        chances = torch.distributions.Categorical(logits=self.policy_head(x))
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), None, None


class TwoChoices(nn.Module):
    """MultiDiscrete: the actor's logits are those of two choices."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(4, 5)

    def forward(self, x, action=None):
        parts = [torch.distributions.Categorical(logits=each) for each in self.actor(x).split([3, 2], 1)]
        action = torch.stack([each.sample() for each in parts], 1) if action is None else action
        log_probs = [each.log_prob(action[:, i]) for i, each in enumerate(parts)]
        return action, sum(log_probs), None, None


@pytest.mark.parametrize("agent", [WarmAgent(), ForwardGaussian(), NoActor(), TwoChoices()])
def test_an_actor_that_gives_something_else_is_not_believed(agent):
    policy = as_policy(agent)
    assert policy.distribution(OBS) is None
    acted = policy.act(OBS)
    assert_allclose(policy.log_prob(OBS, acted.actions), acted.log_probs, rtol=1e-5)


def test_an_actor_knows_of_no_mask():
    assert as_policy(ForwardAgent()).distribution(OBS, action_mask=np.ones((16, 2), np.bool_)) is None


def test_a_wrong_outcome_is_named():
    with pytest.raises(envfleet.UsageError, match=r"^forward must return action, log_prob, entropy, value; got Tensor"):
        as_policy(with_forward(lambda self, obs, action=None: obs)).act(OBS)


def test_it_can_be_traced():
    module = ForwardAgent()
    plain, traced = TorchPolicy(module), TorchPolicy(module, traced=True)
    torch.manual_seed(5)
    expected = plain.act(OBS)
    traced.act(OBS)
    torch.manual_seed(5)
    acted = traced.act(OBS)
    assert_array_equal(acted.actions, expected.actions)
    assert all(acting is not None for acting in traced._acting.values())
