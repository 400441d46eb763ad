"""TorchPolicy: CleanRL's modules as they are, discrete, continuous and with dict observations."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import envfleet
from envfleet.contract.policy import Policy
from envfleet.policies.torch.policy import TorchPolicy, prepare_worker

torch = pytest.importorskip("torch")
nn, Categorical, Normal = torch.nn, torch.distributions.Categorical, torch.distributions.Normal


class Discrete(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 3), nn.Linear(4, 1)

    def get_value(self, obs):
        return self.critic(obs)

    def get_action_and_value(self, obs, action=None):
        chances = Categorical(logits=self.actor(obs))
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), chances.entropy(), self.critic(obs)


class Gaussian(nn.Module):
    """No get_value; log-probs [B] by sum(1), [B, 1] by sum(1, keepdim=True), or wrongly [B, A]."""

    def __init__(self, reduce=lambda log_probs: log_probs.sum(1)):
        super().__init__()
        self.mean, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)
        self.log_std = nn.Parameter(torch.zeros(1, 2))
        self.reduce = reduce

    def get_action_and_value(self, obs, action=None):
        chances = Normal(self.mean(obs), self.log_std.exp(), validate_args=False)
        action = chances.sample() if action is None else action
        return action, self.reduce(chances.log_prob(action)), None, self.critic(obs).flatten()


class Camera(nn.Module):
    """Dict and tuple observations, a dict of actions; notes what it was given."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def get_action_and_value(self, obs, action=None):
        self.seen = {"image": obs["image"], "left": obs["pair"][0], "right": obs["pair"][1]}
        chances = Categorical(logits=self.head(obs["image"].float().flatten(1)))
        index = chances.sample() if action is None else action["index"]
        action = {"index": index, "force": (obs["pair"][0],)}
        return action, chances.log_prob(index), None, None


class Fixed(nn.Module):
    """Returns what it was made with."""

    def __init__(self, *outcome):
        super().__init__()
        self.outcome = outcome

    def get_action_and_value(self, obs, action=None):
        return self.outcome if len(self.outcome) != 1 else self.outcome[0]


def _obs(num_rows=8, dtype=np.float32):
    return np.random.default_rng(0).normal(size=(num_rows, 4)).astype(dtype)


def test_discrete_actions():
    module = Discrete()
    policy, obs = TorchPolicy(module), _obs()
    assert isinstance(policy, Policy)
    acted = policy.act(obs)
    assert acted.actions.shape == (8,) and acted.actions.dtype == np.int64
    assert acted.log_probs.shape == (8,) and acted.log_probs.dtype == np.float32
    assert list(acted.extras) == ["values"] and acted.extras["values"].shape == (8,)
    assert_array_equal(policy.log_prob(obs, acted.actions), acted.log_probs)
    assert_array_equal(policy.values(obs), acted.extras["values"])
    with torch.no_grad():
        assert_array_equal(module.critic(torch.from_numpy(obs))[:, 0].numpy(), acted.extras["values"])


@pytest.mark.parametrize("keepdim", [False, True])
def test_continuous_actions_without_get_value(keepdim):
    policy, obs = TorchPolicy(Gaussian(lambda log_probs: log_probs.sum(1, keepdim=keepdim))), _obs()
    acted = policy.act(obs)
    assert acted.actions.shape == (8, 2) and acted.actions.dtype == np.float32
    assert acted.log_probs.shape == (8,)
    assert_array_equal(policy.log_prob(obs, acted.actions), acted.log_probs)
    assert_array_equal(policy.values(obs), acted.extras["values"])


def test_trees_of_observations_and_actions():
    module = Camera()
    policy = TorchPolicy(module)
    image = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    obs = {"image": image, "pair": (np.ones((3, 1)), np.arange(3))}
    acted = policy.act(obs)
    assert {name: tensor.dtype for name, tensor in module.seen.items()} == {
        "image": torch.uint8,
        "left": torch.float32,
        "right": torch.int64,
    }
    assert module.seen["image"].data_ptr() == image.ctypes.data  # no copy
    assert_array_equal(acted.actions["force"][0], np.ones((3, 1), np.float32))
    assert acted.extras == {} and policy.values(obs) is None
    assert_array_equal(policy.log_prob(obs, acted.actions), acted.log_probs)


def test_read_only_observations_do_not_warn():
    policy, obs = TorchPolicy(Discrete()), _obs()
    obs.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acted = policy.act(obs)
        policy.log_prob(obs, acted.actions)


def test_nothing_is_recorded_for_gradients_and_training_goes_on():
    module = Discrete()
    policy, obs = TorchPolicy(module), _obs()
    policy.act(obs), policy.values(obs), policy.log_prob(obs, np.zeros(8, np.int64))
    _, log_probs, _, _ = module.get_action_and_value(torch.from_numpy(obs))
    log_probs.sum().backward()
    assert module.actor.weight.grad is not None


def test_log_prob_leaves_what_the_learner_keeps_fit_for_training():
    class Normalized(Discrete):
        scale = torch.ones(4)

        def get_action_and_value(self, obs, action=None):
            self.scale = 0.9 * self.scale + 0.1 * obs.abs().mean(0)
            return super().get_action_and_value(obs / self.scale, action)

    module = Normalized()
    TorchPolicy(module).log_prob(_obs(), np.zeros(8, np.int64))
    module.get_action_and_value(torch.from_numpy(_obs()))[1].sum().backward()


def test_log_probs_for_each_dimension_are_an_error():
    policy = TorchPolicy(Gaussian(lambda log_probs: log_probs))
    with pytest.raises(envfleet.UsageError, match=r"log_probs .* shape \(8,\) .* got \(8, 2\): sum the log-probs over"):
        policy.act(_obs())


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ((torch.zeros(8), torch.zeros(8), None), "must return action, log_prob, entropy, value; got 3 values"),
        ((torch.zeros(8),), "got Tensor"),
        ((torch.zeros(8), torch.zeros(()), None, None), r"log_probs .* got \(\)"),
        ((torch.zeros(8), torch.zeros(1), None, None), r"log_probs .* got \(1,\)"),
        ((torch.zeros(8), torch.zeros(8), None, torch.zeros(8, 2)), r"values .* got \(8, 2\)"),
    ],
)
def test_wrong_outcomes_are_named(outcome, words):
    with pytest.raises(envfleet.UsageError, match=words):
        TorchPolicy(Fixed(*outcome)).act(_obs())


def test_a_policy_without_log_probs():
    policy = TorchPolicy(Fixed(torch.zeros(8), None, None, None))
    assert policy.act(_obs()).log_probs is None
    with pytest.raises(envfleet.UsageError, match="Fixed gives no log-probs"):
        policy.log_prob(_obs(), np.zeros(8))


def test_what_is_no_such_module_is_refused():
    with pytest.raises(envfleet.UsageError, match=r"takes a torch.nn.Module; got dict"):
        TorchPolicy({})
    with pytest.raises(envfleet.UsageError, match="Linear has no get_action_and_value"):
        TorchPolicy(nn.Linear(1, 1))


def test_nan_is_noticed_without_torchs_validation():
    gaussian = Gaussian()
    policy, obs = TorchPolicy(gaussian), _obs()
    obs[5, 1] = np.nan
    with pytest.raises(envfleet.UsageError, match=r"NaN in rows 5: the observations are not finite"):
        policy.act(obs)
    gaussian.mean.weight.data[0, 0] = np.nan
    with pytest.raises(envfleet.UsageError, match=r"rows 0, 1, 2, .* weights mean.weight are not finite"):
        policy.act(_obs())


def test_infinite_log_probs_are_no_nan():
    log_probs = torch.tensor([-np.inf, 1e30, np.inf, 0.0])
    assert_array_equal(
        TorchPolicy(Fixed(torch.zeros(4), log_probs, None, None)).act(_obs(4)).log_probs, log_probs.numpy()
    )


def test_strided_outcomes():
    both = torch.arange(16.0).reshape(8, 2)
    acted = TorchPolicy(Fixed(both, both[:, 0], None, both[:, 1])).act(_obs())
    assert_array_equal(acted.log_probs, np.arange(0.0, 16, 2))
    assert_array_equal(acted.extras["values"], np.arange(1.0, 16, 2))


def test_weights_come_back_bit_for_bit():
    one, other = Discrete(), Discrete()
    one.register_buffer("count", torch.tensor(7))
    other.register_buffer("count", torch.tensor(0))
    one.actor.weight.data[0, 0] = -0.0
    weights = TorchPolicy(one).get_weights()
    assert weights["count"].shape == () and weights["actor.weight"].dtype == np.float32
    assert weights["actor.weight"].ctypes.data == one.actor.weight.data_ptr()  # a view
    for array in weights.values():
        array.flags.writeable = False
    kept = other.actor.weight
    TorchPolicy(other).set_weights(weights)
    assert other.actor.weight is kept and kept.requires_grad
    for name, tensor in one.state_dict().items():
        assert tensor.numpy().tobytes() == other.state_dict()[name].numpy().tobytes()


def test_bfloat16_weights_travel_as_float32():
    one, other = Discrete().bfloat16(), Discrete().bfloat16()
    weights = TorchPolicy(one).get_weights()
    assert weights["actor.weight"].dtype == np.float32
    TorchPolicy(other).set_weights(weights)
    assert other.actor.weight.dtype == torch.bfloat16
    assert torch.equal(one.actor.weight, other.actor.weight)


def test_bfloat16_outcomes_become_float32():
    outcome = torch.arange(8, dtype=torch.bfloat16)
    acted = TorchPolicy(Fixed(outcome, outcome, None, outcome)).act(_obs())
    assert acted.actions.dtype == acted.log_probs.dtype == acted.extras["values"].dtype == np.float32


def test_weights_that_do_not_fit_are_named_and_none_is_taken():
    module = Discrete()
    policy = TorchPolicy(module)
    before = module.actor.weight.clone()
    weights = {name: np.full_like(array, 9) for name, array in policy.get_weights().items()}
    weights["tail"], weights["critic.bias"] = weights.pop("actor.bias"), np.zeros((2, 2), np.float32)
    words = r"missing: actor.bias; unexpected: tail; of another shape: critic.bias \(2, 2\) instead of \(1,\)"
    with pytest.raises(envfleet.UsageError, match=words):
        policy.set_weights(weights)
    assert torch.equal(module.actor.weight, before)


def test_modules_without_a_shape_yet_and_extra_state_are_refused():
    class Lazy(Discrete):
        def __init__(self):
            super().__init__()
            self.late = nn.LazyLinear(2)

    class Stateful(Discrete):
        def get_extra_state(self):
            return {"anything": 1}

    with pytest.raises(envfleet.UsageError, match=r"'late.weight' has no shape yet"):
        TorchPolicy(Lazy()).get_weights()
    with pytest.raises(envfleet.UsageError, match="'_extra_state' is dict"):
        TorchPolicy(Stateful()).get_weights()


def test_a_compiled_module_has_the_names_of_the_plain_one():
    module = Discrete()
    policy = TorchPolicy(torch.compile(module, backend="eager"))
    assert policy.module is module and "actor.weight" in policy.get_weights()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_module_on_a_gpu():
    policy = TorchPolicy(Discrete().cuda())
    acted = policy.act(_obs())
    assert acted.log_probs.shape == (8,) and isinstance(policy.get_weights()["actor.weight"], np.ndarray)


def _in_python(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_prepare_worker():
    program = (
        "import torch; from torch.distributions import Distribution\n"
        "from envfleet.policies.torch.policy import prepare_worker\n"
        "prepare_worker(1); print(torch.get_num_threads(), Distribution._validate_args)"
    )
    assert _in_python(program) == ["1", "False"]


def test_importing_policies_and_prepare_worker_do_not_import_torch():
    program = (
        "import sys, envfleet.policies.adapting; from envfleet.policies.torch.policy import prepare_worker\n"
        "prepare_worker(1); print('torch' in sys.modules)"
    )
    assert _in_python(program) == ["False"]


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    prepare_worker(1)
    with pytest.raises(envfleet.MissingExtra, match=r"envfleet\[torch\]"):
        TorchPolicy(object())


class Branching(nn.Module):
    """What it does depends on the values of its observations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def get_action_and_value(self, obs, action=None):
        logits = self.layer(obs) if obs.sum() != 0 else torch.zeros(len(obs), 2)
        choice = Categorical(logits=logits)
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), logits[:, :1]


class Straight(Branching):
    def get_action_and_value(self, obs, action=None):
        choice = Categorical(logits=self.layer(obs))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), obs.sum(1, keepdim=True)


def test_a_traced_policy_acts_as_the_policy_does():
    module = Straight()
    plain, traced = TorchPolicy(module), TorchPolicy(module, traced=True)
    rng = np.random.default_rng(0)
    for num_rows in (4, 4, 7):
        obs = rng.normal(size=(num_rows, 3)).astype(np.float32)
        traced.act(obs)  # the first time it is recorded
        torch.manual_seed(num_rows)
        expected = plain.act(obs)
        torch.manual_seed(num_rows)
        given = traced.act(obs)
        np.testing.assert_array_equal(given.actions, expected.actions)
        np.testing.assert_array_equal(given.log_probs, expected.log_probs)
        np.testing.assert_array_equal(given.extras["values"], expected.extras["values"])
        # New weights count at once.
        traced.set_weights({name: array + 0.5 for name, array in plain.get_weights().items()})
    assert all(acting is not None for acting in traced._acting.values())


def test_a_policy_that_branches_on_values_is_not_traced(caplog):
    policy = TorchPolicy(Branching(), traced=True)
    obs = np.ones((4, 3), np.float32)
    assert policy.act(obs).extras["values"].shape == (4,)
    assert "does not act as the policy does" in caplog.text
    assert list(policy._acting.values()) == [None]


def test_a_traced_policy_is_pickled_as_one():
    again = pickle.loads(pickle.dumps(TorchPolicy(Straight(), traced=True)))
    assert again._is_traced
