"""Recurrent modules in the form of CleanRL's ppo_atari_lstm.py."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import envfleet
from envfleet import RecurrentTorchPolicy, TorchPolicy
from envfleet.contract.policy import Policy, Recurrent
from envfleet.policies.adapting import as_policy, build_policy, code_of, is_policy_like
from envfleet.policies.torch.recurrent import is_recurrent

torch = pytest.importorskip("torch")

from tests.support.agents.torch_agents import DiscreteAgent, GruAgent, LstmAgent, OwnMemoryAgent  # noqa: E402  # needs torch

NUM_STEPS, NUM_ENVS = 4, 3
OBS = np.random.default_rng(0).normal(size=(NUM_STEPS, NUM_ENVS, 4)).astype(np.float32)


def test_the_form_is_told_by_the_signature():
    class Masked(torch.nn.Module):
        def get_action_and_value(self, x, action=None, invalid_action_masks=None, envs=None): ...

    class Loose(torch.nn.Module):
        def get_action_and_value(self, *args, **kwargs): ...

    class OtherNames(torch.nn.Module):
        def get_action_and_value(self, obs, memory, resets, taken=None): ...

    class Defaults(torch.nn.Module):
        def get_action_and_value(self, x, state=None, done=None, action=None): ...

    assert [is_recurrent(each()) for each in (Masked, Loose, OtherNames, Defaults)] == [False, False, True, True]
    policy = as_policy(LstmAgent())
    assert isinstance(policy, RecurrentTorchPolicy) and isinstance(policy, Policy) and isinstance(policy, Recurrent)
    assert is_policy_like(LstmAgent())
    assert isinstance(as_policy(DiscreteAgent()), TorchPolicy)
    assert not isinstance(as_policy(DiscreteAgent()), Recurrent)
    with pytest.raises(
        envfleet.UsageError, match=r"a recurrent module must have get_action_and_value\(obs, lstm_state, done"
    ):
        RecurrentTorchPolicy(DiscreteAgent())


def test_it_steps_as_the_module_does_over_a_whole_sequence():
    """With ends of episodes inside: rows put back to the initial state are what `done` does in CleanRL."""
    module = LstmAgent(num_layers=2)
    policy = as_policy(module)
    ended = np.zeros((NUM_STEPS, NUM_ENVS), bool)
    ended[2, 1] = True  # this env's episode begins at step 2
    state, steps = policy.initial_state(NUM_ENVS), []
    for t in range(NUM_STEPS):
        first = policy.initial_state(NUM_ENVS)
        state = {name: np.where(ended[t][:, None, None], first[name], array) for name, array in state.items()}
        steps.append(policy.act(OBS[t], state=state))
        assert_allclose(policy.values(OBS[t], state=state), steps[-1].extras["values"], rtol=1e-5)
        assert_allclose(
            policy.log_prob(OBS[t], steps[-1].actions, state=state), steps[-1].log_probs, rtol=1e-5, atol=1e-6
        )
        state = steps[-1].state
    zeros = torch.zeros(2, NUM_ENVS, 5)
    with torch.no_grad():
        _, log_probs, _, values, (hidden, cell) = module.get_action_and_value(
            torch.from_numpy(OBS.reshape(-1, 4)),
            (zeros, zeros),
            torch.from_numpy(ended.reshape(-1)).float(),
            torch.from_numpy(np.concatenate([step.actions for step in steps])),
        )
    assert_allclose(np.concatenate([step.log_probs for step in steps]), log_probs.numpy(), rtol=1e-4, atol=1e-5)
    assert_allclose(np.concatenate([step.extras["values"] for step in steps]), values[:, 0].numpy(), atol=1e-5)
    assert_allclose(state["h"], hidden.transpose(0, 1).numpy(), atol=1e-5)
    assert_allclose(state["c"], cell.transpose(0, 1).numpy(), atol=1e-5)


def test_states_have_a_row_for_each_env():
    lstm, gru = as_policy(LstmAgent(num_layers=2)), as_policy(GruAgent())
    assert {name: array.shape for name, array in lstm.initial_state(3).items()} == {"h": (3, 2, 5), "c": (3, 2, 5)}
    assert {name: array.shape for name, array in gru.initial_state(3).items()} == {"h": (3, 2, 5)}
    assert all(array.flags.c_contiguous and not array.any() for array in lstm.initial_state(3).values())
    after = gru.act(OBS[0], state=gru.initial_state(3)).state
    assert after["h"].shape == (3, 2, 5) and after["h"].dtype == np.float32 and after["h"].any()


def test_an_initial_state_of_the_modules_own():
    module = OwnMemoryAgent()
    state = as_policy(module).initial_state(2)
    assert_array_equal(state["h"], np.broadcast_to(module.first.detach().numpy(), (2, 1, 5)))
    state["h"][:] = 0  # a copy
    assert module.first.detach().any()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_projected_lstm():
    class Projected(LstmAgent):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(6, 7, proj_size=5)

    policy = as_policy(Projected())
    assert {name: array.shape for name, array in policy.initial_state(3).items()} == {"h": (3, 1, 5), "c": (3, 1, 7)}
    policy.act(OBS[0], state=policy.initial_state(3))


def test_a_module_whose_state_is_not_known():
    class Two(LstmAgent):
        def __init__(self):
            super().__init__()
            self.other = torch.nn.GRU(1, 1)

    with pytest.raises(envfleet.UsageError, match=r"Two has 2 nn.LSTM or nn.GRU, .* give it initial_state\(num_envs\)"):
        as_policy(Two())


def test_misuse_is_named():
    policy = as_policy(LstmAgent())
    with pytest.raises(envfleet.UsageError, match="this policy is recurrent: pass state="):
        policy.act(OBS[0])
    with pytest.raises(envfleet.UsageError, match="this policy's state has h, c; got h"):
        policy.act(OBS[0], state={"h": np.zeros((3, 1, 5), np.float32)})
    with pytest.raises(envfleet.UsageError, match="state 'h' must have a row for each of 3 observations; got 2"):
        policy.values(OBS[0], state=policy.initial_state(2))

    class Four(LstmAgent):
        def get_action_and_value(self, x, lstm_state, done, action=None):
            return super().get_action_and_value(x, lstm_state, done, action)[:4]

    four = as_policy(Four())
    with pytest.raises(envfleet.UsageError, match="must return action, log_prob, entropy, value, lstm_state; got 4"):
        four.act(OBS[0], state=four.initial_state(3))


def test_distributions_where_the_module_has_them():
    lstm, gru = as_policy(LstmAgent()), as_policy(GruAgent())
    state = lstm.initial_state(3)
    shown = lstm.distribution(OBS[0], state=state)
    assert shown.kind == "categorical" and shown.logits.shape == (3, 3)
    assert gru.distribution(OBS[0], state=gru.initial_state(3)) is None


def test_a_worker_gets_its_copy():
    policy = build_policy(code_of(LstmAgent()))
    assert isinstance(policy, RecurrentTorchPolicy)
