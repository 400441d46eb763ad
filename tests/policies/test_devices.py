"""Agents on another device than the CPU. There is no GPU here: tests.support.fake_gpu says what stands in for one."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces
from numpy.testing import assert_allclose, assert_array_equal

import envfleet
from envfleet import EpsilonGreedy, GaussianNoise, NormalizedPolicy, SquashedGaussian, UsageError
from envfleet.contract.policy import MovesToDevice
from envfleet.policies.adapting import as_policy, build_policy, code_of, weights_of
from envfleet.policies.by_path import PolicySpec
from envfleet.policies.seeding import random_numbers_kept, seed_policy
from envfleet.policies.torch.arrays import tensor_arrays
from envfleet.testing.policy_conformance import POLICY_CHECKS, PolicyCase
from tests.support.scripts import ROOT, script_environment

torch = pytest.importorskip("torch")
pytest.importorskip("torch.utils.backend_registration", reason="torch cannot have a device that is written in Python")

from tests.support.agents import torch_agents as agents  # noqa: E402  # needs torch
from tests.support.agents.forward_agents import ForwardAgent  # noqa: E402

NUM_ROWS = 6
OBS = spaces.Box(-2, 2, (4,), np.float32)
DISCRETE, UNBOUNDED = spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (2,), np.float32)
BOUNDED = spaces.Box(np.float32([-1, -2]), np.float32([3, 2]))
MODULES = {  # how a module becomes an agent, the module, its actions
    "discrete": (lambda module: module, agents.DiscreteAgent, DISCRETE),
    "continuous": (lambda module: module, agents.ContinuousAgent, UNBOUNDED),
    "multi-discrete": (lambda module: module, agents.MultiDiscreteAgent, spaces.MultiDiscrete([3, 2])),
    "multi-binary": (lambda module: module, agents.MultiBinaryAgent, spaces.MultiBinary(4)),
    "lstm": (lambda module: module, agents.LstmAgent, DISCRETE),
    "own memory": (lambda module: module, agents.OwnMemoryAgent, DISCRETE),
    "forward": (lambda module: module, lambda: ForwardAgent(num_actions=3), DISCRETE),
    "epsilon-greedy": (lambda module: EpsilonGreedy(module, 0.2), agents.QNetwork, DISCRETE),
    "squashed": (SquashedGaussian, lambda: agents.SacActor(BOUNDED.low, BOUNDED.high), BOUNDED),
    "noise": (lambda module: GaussianNoise(module, 0.3, -100, 100), agents.Td3Actor, UNBOUNDED),
    "normalized": (lambda module: NormalizedPolicy(module, OBS), agents.DiscreteAgent, DISCRETE),
}
OF_CHANCE = "seeded_acting_repeats_itself"  # a copy on the CPU draws other numbers than the device does


def twins(kind, fake_gpu):
    """The same agent on the CPU and on the device, as policies, and its action space."""
    wrap, make, actions = MODULES[kind]
    torch.manual_seed(0)
    module = make()
    moved = make()
    moved.load_state_dict(module.state_dict())
    return as_policy(wrap(module)), as_policy(wrap(moved.to(fake_gpu.NAME))), actions


def start(policy, num_rows=NUM_ROWS):
    return {"state": policy.initial_state(num_rows)} if hasattr(policy, "initial_state") else {}


def obs(num_rows=NUM_ROWS):
    return np.random.default_rng(0).normal(size=(num_rows, 4)).astype(np.float32)


def require_equal(one, other):
    """An LSTM is another operation there, and may round otherwise."""
    for mine, theirs in zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
        else:
            assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_device_is_as_strict_as_a_real_one(fake_gpu):
    here, there = torch.ones(3), torch.ones(3, device=fake_gpu.NAME)
    assert there.device == fake_gpu.DEVICE and not there.is_cpu and (there + 1).device == fake_gpu.DEVICE
    assert torch.equal((there + there).cpu(), here + here)
    for mixed in (lambda: here + there, lambda: torch.cat([there, here]), lambda: torch.where(there > 0, here, there)):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    for as_array in (there.numpy, lambda: np.asarray(there)):
        with pytest.raises((RuntimeError, TypeError)):
            as_array()
    with pytest.raises(AssertionError, match="the learner's device"):
        pickle.dumps(there)
    before = torch.get_rng_state()
    torch.rand(3, device=fake_gpu.NAME)
    assert torch.equal(torch.get_rng_state(), before)
    with fake_gpu.counted_copies() as copies:
        there.cpu(), here.to(fake_gpu.NAME), there.sum().item(), there.to(fake_gpu.NAME)
    assert (copies.to_device, copies.to_host) == (1, 2)


@pytest.mark.parametrize("kind", MODULES)
def test_a_policy_does_there_what_it_does_on_the_cpu(fake_gpu, kind):
    here, there, _ = twins(kind, fake_gpu)
    arguments = start(here)
    require_equal(start(there), arguments)
    acted = there.act(obs(), **arguments)
    log_probs = [each.log_prob(obs(), acted.actions, **arguments) for each in (here, there)]
    require_equal(*log_probs)
    assert_allclose(acted.log_probs, log_probs[0], rtol=1e-5, atol=1e-6)
    require_equal(*(each.values(obs(), **arguments) for each in (here, there)))
    require_equal(*(each.distribution(obs(), **arguments).arrays() for each in (here, there)))
    require_equal(*(list(each.act_deterministically(obs(), **arguments)) for each in (here, there)))
    require_equal(here.get_weights(), there.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [each for each in POLICY_CHECKS if each.__name__ != OF_CHANCE], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("kind", ["discrete", "lstm", "forward", "epsilon-greedy", "squashed"])
def test_conformance_of_agents_on_a_device(fake_gpu, kind, check):
    _, there, actions = twins(kind, fake_gpu)
    check(PolicyCase(there, OBS, actions, is_squashed=kind == "squashed"))


@pytest.mark.parametrize("kind", MODULES)
def test_a_workers_copy_is_moved_and_acts_there(fake_gpu, kind):
    """The learner's agent is on the CPU, and its worker's copy is not."""
    here, _, _ = twins(kind, fake_gpu)
    copy = build_policy(code_of(here), fake_gpu.NAME)
    assert isinstance(copy, MovesToDevice)
    copy.to_device(fake_gpu.NAME)
    copy.set_weights(here.get_weights())
    arguments = start(here)
    acted = []
    for _ in range(2):
        seed_policy(copy, 3)
        acted.append(copy.act(obs(), **arguments))
    require_equal(list(acted[0]), list(acted[1]))
    require_equal(
        copy.log_prob(obs(), acted[0].actions, **arguments), here.log_prob(obs(), acted[0].actions, **arguments)
    )
    require_equal(copy.get_weights(), here.get_weights())
    module = next(each for each in vars(getattr(copy, "_policy", copy)).values() if isinstance(each, torch.nn.Module))
    assert {each.device for each in module.parameters()} == {fake_gpu.DEVICE}


def test_weights_come_in_one_copy_for_each_dtype(fake_gpu):
    module = agents.DiscreteAgent()
    module.register_buffer("count", torch.arange(3))
    module.register_parameter("halves", torch.nn.Parameter(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)))
    module.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 2)))
    module.register_parameter("number", torch.nn.Parameter(torch.tensor(4.0)))
    module.register_parameter("turned", torch.nn.Parameter(torch.randn(3, 2).T))
    expected = {name: array.copy() for name, array in weights_of(module).items()}
    module.to(fake_gpu.NAME)
    with fake_gpu.counted_copies() as copies:
        weights = weights_of(module)
    assert (copies.to_device, copies.to_host) == (0, 3)  # float32, int64, bfloat16
    assert list(weights) == list(expected) and weights["halves"].dtype == np.float32
    for name, array in expected.items():
        assert (weights[name].shape, weights[name].dtype) == (array.shape, array.dtype)
        assert_array_equal(weights[name], array)
    spec = PolicySpec("a:b", weights={"w": module.actor.weight, "x": np.ones(2)})
    assert_array_equal(weights_of(spec)["w"], expected["actor.weight"])


def test_observations_go_there_once_and_results_come_back_once(fake_gpu):
    _, policy, _ = twins("discrete", fake_gpu)
    policy.act(obs())
    torch.distributions.Distribution.set_default_validate_args(False)  # as on a worker
    try:
        with fake_gpu.counted_copies() as copies:
            policy.act(obs())
    finally:
        torch.distributions.Distribution.set_default_validate_args(True)
    assert (copies.to_device, copies.to_host) == (1, 3)  # observations; actions, log-probs, values


class KeepsADevice(agents.DiscreteAgent):
    def __init__(self, device):
        super().__init__()
        self.device, self.generator = torch.device(device), torch.Generator()
        self.constant = torch.arange(3.0, device=device)
        self.to(device)


def test_the_pickle_needs_no_device_of_the_learners(fake_gpu, tmp_path):
    """Unpickled by a process that has no such device."""
    code = code_of(KeepsADevice(fake_gpu.NAME))
    assert fake_gpu.NAME.encode() not in code.pickled
    (tmp_path / "code").write_bytes(code.pickled)
    script = (
        "import sys, pathlib, numpy as np, torch\n"
        "from envfleet.contract.policy import PolicyCode\n"
        "from envfleet.policies.adapting import build_policy\n"
        "policy = build_policy(PolicyCode(pickled=pathlib.Path(sys.argv[1]).read_bytes()))\n"
        "assert not hasattr(torch, 'fakegpu')\n"
        "module = policy.module\n"
        "print(policy.act(np.zeros((2, 4), np.float32)).actions.shape, module.device, module.constant.device,"
        " module.actor.weight.device, type(module.actor.weight).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "code")],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env=script_environment(),
    )  # fmt: skip
    assert done.stdout == "(2,) cpu cpu cpu Parameter\n", done.stderr


def test_a_device_that_the_module_keeps_is_the_workers(fake_gpu):
    module = agents.DiscreteAgent()
    module.device = torch.device("cuda:1")
    policy = build_policy(code_of(module), fake_gpu.NAME)
    assert policy.module.device == torch.device(fake_gpu.NAME)
    assert build_policy(code_of(module)).module.device == torch.device("cpu")


def test_weights_without_data_are_refused():
    with pytest.raises(UsageError, match=r"'actor\.weight' is on the device 'meta', and has no data"):
        weights_of(agents.DiscreteAgent().to("meta"))
    assert tensor_arrays({}) == {}


def test_a_device_that_is_not_there_raises():
    for policy in (as_policy(agents.DiscreteAgent()), as_policy(Empty())):
        with pytest.raises((RuntimeError, AssertionError)):
            policy.to_device("cuda:7")  # also on a machine with a GPU


class Empty(torch.nn.Module):
    """No weights, so that nothing of it says where it is."""

    def get_action_and_value(self, x, action=None):
        return torch.zeros(len(x), device=x.device), None, None, None


def test_a_module_without_weights_gets_its_observations_there(fake_gpu):
    policy = as_policy(Empty())
    policy.to_device(fake_gpu.NAME)
    with fake_gpu.counted_copies() as copies:
        assert policy.act(obs()).actions.shape == (NUM_ROWS,)
    assert copies.to_device == 1


class DrawsThere(agents.DiscreteAgent):
    def get_action_and_value(self, x, action=None):
        return super().get_action_and_value(x + torch.rand(x.shape, device=x.device), action)


def test_chance_on_the_device_is_noticed(fake_gpu):
    policy = as_policy(DrawsThere().to(fake_gpu.NAME))
    before = torch.fakegpu.get_rng_state()
    with pytest.raises(UsageError, match="get_action_and_value of DrawsThere draws random numbers whose mode is not"):
        policy.act_deterministically(obs())
    assert torch.equal(torch.fakegpu.get_rng_state(), before)
    with random_numbers_kept():
        policy.act(obs())
        assert not torch.equal(torch.fakegpu.get_rng_state(), before)
    assert torch.equal(torch.fakegpu.get_rng_state(), before)


@pytest.mark.parametrize("make", [agents.DiscreteAgent, agents.LstmAgent])
def test_evaluations(fake_gpu, make):
    module = make()
    module.actor = torch.nn.Linear(module.actor.in_features, 2)  # CartPole's actions
    with envfleet.make("CartPole-v1", 3, max_episode_steps=30) as pool:
        here = envfleet.evaluate(pool, module, 5, seed=0)
        there = envfleet.evaluate(pool, module.to(fake_gpu.NAME), 5, seed=0)
    require_equal([here.returns, here.lengths], [there.returns, there.lengths])


class DrawsOnDevice(SquashedGaussian):
    """Has its generator on the device of its actor."""

    def seed(self, seed):
        self._generator = DeviceGenerator()
        self._generator.manual_seed(seed)


class DeviceGenerator(torch.Generator):
    """torch has no generators for devices that are written in Python."""


def test_a_saved_generator_is_put_back_where_the_policy_draws():
    actor = agents.SacActor(BOUNDED.low, BOUNDED.high)
    policy, copy = DrawsOnDevice(actor), DrawsOnDevice(actor)
    policy.seed(3)
    copy.set_random_state(policy.get_random_state())
    assert isinstance(copy._generator, DeviceGenerator)
    assert copy.get_random_state() == policy.get_random_state()


@pytest.mark.parametrize("kind", ["epsilon-greedy", "squashed", "noise"])
def test_random_numbers_go_on_on_a_device(kind, fake_gpu):
    """From where they were saved, and the same as on the CPU."""
    obs = np.random.default_rng(0).normal(size=(NUM_ROWS, *OBS.shape)).astype(np.float32)
    on_cpu, on_device, _ = twins(kind, fake_gpu)
    _, copy, _ = twins(kind, fake_gpu)
    for policy in (on_cpu, on_device):
        policy.seed(3)
        policy.act(obs)
    copy.set_random_state(on_device.get_random_state())
    for _ in range(3):
        expected = on_device.act(obs).actions
        assert_array_equal(copy.act(obs).actions, expected)
        assert_allclose(on_cpu.act(obs).actions, expected, rtol=1e-5)
