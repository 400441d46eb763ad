"""Learners and workers on devices, over real workers. There is no GPU here: see tests.support.fake_gpu."""

import logging

import numpy as np
import pytest
import torch  # noqa: TID253 - devices of torch are what this is about

import envfleet
from envfleet import (
    APS,
    Acted,
    ClusterEnv,
    FunctionPolicy,
    Kubernetes,
    Local,
    PolicyFailed,
    PolicySpec,
    Ray,
    Slurm,
    UsageError,
    losses,
)
from envfleet.cluster.sync import probe_rows
from envfleet.cluster.worker_device import warn_if_no_gpu_was_asked_for
from envfleet.contract.distributions import kl
from envfleet.policies.adapting import as_policy
from tests.support.agents.detach_agents import DiscreteAgent
from tests.support.agents.forward_agents import TellsDevice
from tests.support.agents.torch_agents import LstmAgent

pytest.importorskip("torch.utils.backend_registration")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers", "fake_gpu")]
FORKED_WITH = ("torch", "tests.support.fake_gpu")

T, N = 16, 4
DEVICE = "fakegpu"


@pytest.fixture(scope="module")
def on_cpu():
    """Its workers act on the CPU."""
    with ClusterEnv("CartPole-v1", 2, N, seed=0, sync=APS(threshold=10.0, num_probes=T * N)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def on_device():
    """Its workers act on the device."""
    with ClusterEnv("CartPole-v1", 2, N, seed=0, worker_device=DEVICE) as cluster:
        yield cluster


class ShowsItself(DiscreteAgent):
    def get_distribution(self, obs):
        return torch.distributions.Categorical(logits=self.actor(obs))


# -- the learner's device --


def test_a_learner_on_a_device_trains(on_cpu, fake_gpu):
    """What it publishes is what workers act with, and all its tensors stay where it is."""
    agent = ShowsItself(seed=5).to(DEVICE)
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.05)
    on_cpu.reset(seed=0)
    on_cpu.publish(agent)  # the first time with its code
    for _ in range(3):
        with fake_gpu.counted_copies() as copies:
            on_cpu.publish(agent)
        assert copies.to_host == 1  # all its weights are float32
        rollout = on_cpu.rollout(agent, T)
        batch = rollout.to_torch(DEVICE)
        found = losses.gae(
            batch.rewards, batch.extras["values"], batch.next_values, batch.terminations, batch.truncations,
            batch.final_values,
        )  # fmt: skip
        _, log_probs, entropy, values = agent.get_action_and_value(batch.obs.flatten(0, 1), batch.actions.flatten())
        loss = losses.ppo_decoupled_loss(
            log_probs, log_probs.detach(), batch.log_probs.flatten(), found.advantages.flatten()
        )
        loss = loss + (values.flatten() - found.returns.flatten()).square().mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert {each.device.type for each in agent.parameters()} == {DEVICE}
    on_cpu.rollout(agent, T)
    last = on_cpu.stats()
    assert last.version >= 3 and all(each.divergence is not None for each in last.workers)


@pytest.mark.parametrize("make", [ShowsItself, DiscreteAgent])
def test_divergences_are_measured_on_the_agents_device(on_cpu, make):
    """Exactly, or by log-probs: the same numbers as with an agent on the CPU."""
    found = []
    for device in ("cpu", DEVICE):
        agent = make(seed=11).to(device)
        on_cpu.reset(seed=3)
        rollout = on_cpu.rollout(agent, T)
        with torch.no_grad():
            for each in agent.parameters():
                each.mul_(1.5)
        on_cpu.rollout(agent, T)
        found.append([each.divergence for each in on_cpu.stats().workers])
    if make is ShowsItself:
        rows = probe_rows(T, N, T * N)
        obs = rollout.obs[:, :N].reshape(-1, 4)[rows]
        old = as_policy(make(seed=11)).distribution(obs)
        new_agent = make(seed=11)
        with torch.no_grad():
            for each in new_agent.parameters():
                each.mul_(1.5)
        assert found[1][0] == pytest.approx(kl(old, as_policy(new_agent).distribution(obs)).mean(), rel=1e-4)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert min(found[1]) > 0


def test_evaluations_of_an_agent_on_a_device(on_cpu):
    agent = DiscreteAgent(seed=7)
    with envfleet.make("CartPole-v1", 3) as pool:
        expected = envfleet.evaluate(pool, agent, 7, seed=1)
    agent.to(DEVICE)
    evaluation = on_cpu.evaluate(agent, 7, seed=1)
    np.testing.assert_array_equal(evaluation.returns, expected.returns)


# -- the workers' device --


def test_workers_act_on_their_device(on_device, on_cpu):
    """The agent's values say where it acts."""
    agent = TellsDevice()
    assert on_cpu.rollout(agent, T).extras["values"].tolist() == [[len("cpu")] * 2 * N] * T
    for agent in (TellsDevice(), TellsDevice().to(DEVICE)):
        rollout = on_device.rollout(agent, T)
        assert rollout.extras["values"].tolist() == [[len(DEVICE)] * 2 * N] * T
        here = as_policy(TellsDevice())
        here.set_weights(as_policy(agent).get_weights())
        log_probs = here.log_prob(rollout.obs.reshape(-1, 4), rollout.actions.reshape(-1))
        np.testing.assert_allclose(rollout.log_probs.reshape(-1), log_probs, rtol=1e-5, atol=1e-6)
    *_, info = on_device.step(agent)
    assert info["values"].tolist() == [len(DEVICE)] * 2 * N
    stream = on_device.stream(agent, 4)
    with torch.no_grad():
        agent.actor[0].weight.mul_(2.0)
    on_device.publish(agent)
    assert all((next(stream).extras["values"] == len(DEVICE)).all() for _ in range(4))
    stream.close()


def test_recurrent_policies_and_evaluations_there(on_device):
    agent = LstmAgent()
    agent.actor = torch.nn.Linear(5, 2)  # CartPole's actions
    rollout = on_device.rollout(agent, T)
    assert rollout.states is not None and np.isfinite(rollout.log_probs).all()
    with envfleet.make("CartPole-v1", 3) as pool:
        expected = envfleet.evaluate(pool, agent, 5, seed=1)
    np.testing.assert_array_equal(on_device.evaluate(agent, 5, seed=1).returns, expected.returns)


class ToldPolicy:
    """No torch: its values are the length of the device that it was told, 0 if none."""

    def __init__(self):
        self.device = ""

    def to_device(self, device):
        if device == "cuda:3":
            raise LookupError("there is no fourth one")
        self.device = device

    def act(self, obs):
        return Acted(np.zeros(len(obs), np.int64), None, {"values": self.values(obs)})

    def log_prob(self, obs, actions):
        return np.zeros(len(obs), np.float32)

    def values(self, obs):
        return np.full(len(obs), len(self.device), np.float32)

    def get_weights(self):
        return {}

    def set_weights(self, weights):
        pass


def test_other_policies_are_told_by_to_device(on_device, on_cpu):
    by_path = PolicySpec("tests.cluster.test_devices:ToldPolicy")
    for agent in (ToldPolicy(), by_path):
        assert (on_device.rollout(agent, 2).extras["values"] == len(DEVICE)).all()
        assert (on_cpu.rollout(agent, 2).extras["values"] == 0).all()


def test_policies_without_to_device_act_as_ever(on_device):
    agent = FunctionPolicy(lambda obs: np.zeros(len(obs), np.int64))
    assert not on_device.rollout(agent, 2).actions.any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_worker_without_the_device_says_so():
    with ClusterEnv("CartPole-v1", 2, 1, worker_device="cuda:3") as cluster:
        for agent, words in ((DiscreteAgent(), "CUDA"), (ToldPolicy(), "LookupError: there is no fourth one")):
            with pytest.raises(
                PolicyFailed,
                match=rf"worker \d \(host .*\): worker_device='cuda:3' cannot be used on this host: .*{words}.*"
                r"gpus_per_worker=1 of Slurm, Ray and Kubernetes.*leave worker_device out",
            ):
                cluster.rollout(agent, 2)
        with pytest.raises(PolicyFailed, match="worker_device='cuda:3' cannot be used"):
            cluster.evaluate(DiscreteAgent(), 2)
        assert cluster.reset(seed=0)[0].shape == (2, 4)  # the envs are as they were


@pytest.mark.parametrize(
    "device", ["", "cuda:", "cuda:x", "CUDA", "cuda 1", "cuda\n", 0, torch.device("cpu"), "cuda:99999"]
)
def test_refused_devices(device):
    with pytest.raises(
        UsageError, match="worker_device must be a text such as 'cpu', 'cuda', 'cuda:1' or 'mps', or None"
    ):
        ClusterEnv("CartPole-v1", 1, 1, worker_device=device)


def test_a_launcher_that_asks_for_no_gpu_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, logger="envfleet.cluster"):
        for launcher in (
            Slurm(gpus_per_worker=1),
            Slurm(gpus_per_worker="a100:2"),
            Ray(gpus_per_worker=0.25),
            None,
            Local(),
        ):
            warn_if_no_gpu_was_asked_for(launcher, "cuda")
        for device in (None, "cpu"):
            warn_if_no_gpu_was_asked_for(Slurm(), device)
        assert caplog.messages == []
        for launcher in (Slurm(), Slurm(gpus_per_worker="a100:0"), Ray(), Kubernetes("image")):
            warn_if_no_gpu_was_asked_for(launcher, "cuda")
    assert len(caplog.messages) == 4
    assert caplog.messages[0] == (
        "worker_device='cuda', but Slurm(gpus_per_worker=0) asks for no GPU: Slurm(gpus_per_worker=1) asks for one "
        "for each worker"
    )
