"""From agents to policies, code and weights; and back to a policy in another process."""

import pickle
import subprocess
import sys
import threading

import cloudpickle
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet
from envfleet.contract.policy import PolicyCode
from envfleet.policies.adapting import as_policy, build_policy, code_of, is_policy_like, weights_of
from envfleet.policies.by_path import PolicySpec
from envfleet.policies.functions import FunctionPolicy
from envfleet.policies.torch.policy import TorchPolicy

torch = pytest.importorskip("torch")
nn = torch.nn

from tests.policies.torch.test_torch_policy import Discrete, Gaussian  # noqa: E402  # needs torch

OBS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


class OwnPolicy:
    def __init__(self, gain=1.0):
        self.gain = np.array([gain])

    def act(self, obs):
        return np.zeros(len(obs)), None, {}

    def log_prob(self, obs, actions):
        return np.zeros(len(obs), np.float32)

    def values(self, obs):
        return obs.sum(1) * self.gain

    def get_weights(self):
        return {"gain": self.gain}

    def set_weights(self, weights):
        self.gain = weights["gain"].copy()


def _act(obs):
    return np.zeros(len(obs), np.int64)


def _log_prob(obs, actions):
    return np.zeros(len(obs))


OWN_SPEC = PolicySpec("tests.policies.test_adapting:OwnPolicy", {"gain": 2.0})
AGENTS = [OwnPolicy(), Discrete(), TorchPolicy(Discrete()), (_act, _log_prob), FunctionPolicy(_act), OWN_SPEC]
ACTIONS = [
    np.zeros(4),
    np.float32(1),
    3,
    [1, 2],
    [np.zeros(2), np.zeros(2)],
    (np.zeros(2), np.zeros(2)),
    (1, 2),
    (),
    {"a": np.zeros(2)},
    torch.zeros(4),
    [_act, _log_prob],
    None,
    OwnPolicy,
    Discrete,
]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: type(agent).__name__)
def test_agents_are_told_from_actions(agent):
    assert is_policy_like(agent)
    assert as_policy(agent).act(OBS)[0].shape == (5,)


@pytest.mark.parametrize("actions", ACTIONS, ids=lambda actions: type(actions).__name__)
def test_actions_are_no_agents(actions):
    assert not is_policy_like(actions)
    with pytest.raises(envfleet.UsageError, match=r"an agent is a Policy \(act, log_prob, values, "):
        as_policy(actions)


def test_refused_agents_are_described():
    class Half:
        def act(self, obs): ...

        def log_prob(self, obs, actions): ...

    class NoModule:
        def get_action_and_value(self, obs, action=None): ...

    for agent, words in (
        (nn.Linear(1, 1), "got Linear, a torch module without get_action_and_value"),
        (Discrete, "got the class Discrete, not an object of it"),
        (Half(), "got Half, which lacks values, get_weights, set_weights"),
        (NoModule(), r"got NoModule, which has get_action_and_value but is no torch.nn.Module"),
        ((nn.Linear(1, 1), nn.Linear(1, 1)), "got a tuple of Linear, Linear"),
    ):
        with pytest.raises(envfleet.UsageError, match=words):
            as_policy(agent)
    with pytest.raises(
        envfleet.UsageError, match=r"\(obs, lstm_state, done, action=None\).* goes into EpsilonGreedy, SAC's"
    ):
        as_policy(nn.Linear(1, 1))
    assert is_policy_like(nn.Linear(1, 1))  # never actions: as_policy() says what is wrong with it


def test_a_policy_is_its_own_policy():
    agent = OwnPolicy()
    assert as_policy(agent) is agent


def test_a_torch_module_shares_its_weights():
    module = Discrete()
    weights = weights_of(module)
    with torch.no_grad():
        module.actor.weight.fill_(3)
    assert (weights["actor.weight"] == 3).all()


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: type(agent).__name__)
def test_code_and_weights_make_the_same_policy(agent):
    policy = build_policy(code_of(agent))
    if weights := weights_of(agent):
        policy.set_weights(weights)
    original = as_policy(agent)
    assert {name: array.tobytes() for name, array in policy.get_weights().items()} == {
        name: array.tobytes() for name, array in original.get_weights().items()
    }
    if not isinstance(agent, FunctionPolicy):
        actions = np.zeros(5, np.int64)
        assert_array_equal(policy.log_prob(OBS, actions), original.log_prob(OBS, actions))


def test_only_a_spec_travels_without_a_pickle():
    assert code_of(OWN_SPEC) == PolicyCode(factory="tests.policies.test_adapting:OwnPolicy", kwargs={"gain": 2.0})
    assert code_of(Discrete()).pickled is not None


@pytest.mark.parametrize(
    "learner",
    [OwnPolicy(7.0), {"gain": np.array([7.0])}, {"gain": torch.tensor([7.0], dtype=torch.float64)}],
    ids=["policy", "arrays", "tensors"],
)
def test_a_spec_acts_with_the_learners_weights(learner):
    spec = PolicySpec("tests.policies.test_adapting:OwnPolicy", weights=learner)
    assert weights_of(spec) == {"gain": np.array([7.0])}
    assert as_policy(spec).gain == 7.0


def test_a_spec_with_a_torch_module():
    module = Gaussian()
    spec = PolicySpec("tests.policies.torch.test_torch_policy:Gaussian", weights=module)
    actions = np.zeros((5, 2), np.float32)
    assert_array_equal(as_policy(spec).log_prob(OBS, actions), as_policy(module).log_prob(OBS, actions))
    plain = nn.Linear(2, 2)  # no agent, but it has weights
    assert list(weights_of(PolicySpec("any:thing", weights=plain))) == ["weight", "bias"]


def test_a_spec_without_weights_publishes_none():
    assert weights_of(OWN_SPEC) == {}
    assert as_policy(OWN_SPEC).gain == 2.0


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("no_such_module:name", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.policies.test_adapting:Nothing", "module 'tests.policies.test_adapting' has no attribute 'Nothing'"),
        ("tests.policies.test_adapting:dict", "has no attribute 'dict'"),
        ("collections:OrderedDict", "what the factory 'collections:OrderedDict' returned is no agent: .* OrderedDict"),
    ],
)
def test_factories_that_cannot_be_used_are_named(factory, words):
    with pytest.raises(envfleet.UsageError, match=words):
        build_policy(PolicyCode(factory=factory))
    with pytest.raises(envfleet.UsageError, match="neither a pickle nor a factory"):
        build_policy(PolicyCode())


def test_a_module_in_training_is_pickled():
    module = Discrete()
    module.get_action_and_value(torch.from_numpy(OBS))[1].sum().backward()
    module.cached = module.actor(torch.from_numpy(OBS))  # no leaf: deepcopy refuses it
    assert module.cached.grad_fn is not None
    copy = build_policy(code_of(module)).module
    assert torch.equal(copy.cached, module.cached) and copy.actor.weight.requires_grad
    assert module.cached.grad_fn is not None


def test_devices_in_the_pickle_are_the_cpu():
    module = Discrete()
    module.device = torch.device("cuda:1")
    assert build_policy(code_of(module)).module.device == torch.device("cpu")
    assert module.device == torch.device("cuda:1")


def test_tensors_elsewhere_are_pickled_for_the_cpu(monkeypatch):
    """Without a GPU: the CPU's tensors say that they are elsewhere, so they take the way of those that are."""
    module = Discrete()
    module.register_buffer("mean", torch.arange(3.0))
    module.tied, module.scale = module.actor, torch.ones(2, requires_grad=True)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    pickled = code_of(module)
    acted = as_policy(module).act(OBS)
    monkeypatch.undo()
    assert acted.log_probs.shape == (5,)
    copy = build_policy(pickled).module
    assert {name: tensor.tolist() for name, tensor in copy.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in module.state_dict().items()
    }
    assert copy.tied is copy.actor and copy.scale.requires_grad and isinstance(copy.actor.weight, nn.Parameter)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_on_a_gpu_are_pickled_for_the_cpu():
    module = Discrete().cuda()
    copy = build_policy(code_of(module)).module
    assert copy.actor.weight.is_cpu and module.actor.weight.is_cuda
    assert torch.equal(copy.actor.weight, module.actor.weight.cpu())


def test_an_agent_that_cannot_be_pickled_names_the_cause():
    module = Discrete()
    module.lock = threading.Lock()
    words = r"agent \(Discrete\) cannot be pickled for the workers: TypeError: cannot pickle '_thread.lock' object"
    with pytest.raises(envfleet.UsageError, match=words):
        code_of(module)


def test_a_pickle_of_an_unknown_module_keeps_the_error():
    pickled = b"\x80\x04cmodule_of_the_head\nAgent\n."
    with pytest.raises(envfleet.UsageError, match=r"No module named 'module_of_the_head'.*PYTHONPATH") as caught:
        build_policy(PolicyCode(pickled=pickled))
    assert isinstance(caught.value.__cause__, ImportError)


def test_lambdas_travel():
    gain = 3
    policy = build_policy(code_of((lambda obs: obs[:, 0] * gain, lambda obs, actions: actions)))
    assert_array_equal(policy.act(OBS).actions, OBS[:, 0] * 3)


MAIN_SCRIPT = """
import pickle, sys
import numpy as np, torch
from torch import nn
from torch.distributions import Normal
from envfleet.policies.adapting import as_policy, code_of, weights_of

hidden = 16

def layer(size_in, size_out):
    return nn.Linear(size_in, size_out)

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean = layer(4, hidden), layer(hidden, 2)
        self.log_std = nn.Parameter(torch.zeros(1, 2))
    def get_action_and_value(self, x, action=None):
        chances = Normal(self.mean(torch.tanh(self.body(x))), self.log_std.exp())
        if action is None:
            action = chances.sample()
        return action, chances.log_prob(action).sum(1), chances.entropy().sum(1), x[:, 0]

agent = Agent()
obs, actions = np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
expected = as_policy(agent).log_prob(obs, actions)
code = code_of(agent)
with torch.no_grad():
    agent.body.weight.add_(1)
newer = as_policy(agent).log_prob(obs, actions)
pickle.dump((code.pickled, weights_of(agent), obs, actions, expected, newer), sys.stdout.buffer)
"""


def test_an_agent_of_a_script_acts_in_another_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(MAIN_SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    pickled, weights, obs, actions, expected, newer = pickle.loads(done.stdout)
    policy = build_policy(PolicyCode(pickled=pickled))
    assert_array_equal(policy.log_prob(obs, actions), expected)
    policy.set_weights(weights)
    assert_array_equal(policy.log_prob(obs, actions), newer)
    assert policy.act(obs).actions.shape == (3, 2)


def test_a_pickle_is_of_a_callable_without_arguments():
    assert cloudpickle.loads(code_of(Discrete()).pickled)().act(OBS).actions.shape == (5,)
