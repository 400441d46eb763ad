"""Masks in the envs' infos reach the policy on the workers, with the observation that they belong to."""

import gymnasium
import numpy as np
import pytest
import torch  # noqa: TID253 - agents of torch are what this is about

import envfleet
from envfleet import APS, ClusterEnv, UsageError
from envfleet.policies.adapting import as_policy
from tests.support.agents.detach_agents import DiscreteAgent
from tests.support.agents.masked_agents import AGENTS, NUM_STATES, MaskedAgent

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch",)

SHORT_TAXI = envfleet.EnvSpec(id="Taxi-v4", max_episode_steps=9)
TAXI = gymnasium.make("Taxi-v4").unwrapped
MASKS = np.stack([TAXI.action_mask(state) for state in range(NUM_STATES)]).astype(bool)


@pytest.fixture(scope="module", params=["native", "process"])
def taxis(request):
    with ClusterEnv(SHORT_TAXI, 2, 3, backend=request.param, sync=APS(1e-9, 100)) as cluster:
        yield cluster


def check_masks(rollout):
    """They are those of the observations, and no action was taken that they exclude."""
    np.testing.assert_array_equal(rollout.action_masks, MASKS[rollout.obs])
    assert np.take_along_axis(rollout.action_masks, rollout.actions[..., None], 2).all()
    assert len(rollout.final_steps)
    assert not rollout.action_masks.all()


@pytest.mark.parametrize("form", AGENTS)
def test_no_policy_takes_a_masked_action(taxis, form):
    agent = AGENTS[form]()
    taxis.reset(seed=4)
    for _ in range(2):
        check_masks(taxis.rollout(agent, 20, action_mask="action_mask"))
    assert taxis.rollout(agent, 20, action_mask="action_mask", infos=()).infos == {}


def test_a_policy_without_the_mask_takes_some():
    """So that the test above can fail."""
    with ClusterEnv("Taxi-v4", 1, 3) as cluster:
        rollout = cluster.rollout(MaskedAgent(), 20)
    assert rollout.action_masks is None
    assert not np.take_along_axis(MASKS[rollout.obs], rollout.actions[..., None], 2).all()


def test_masks_from_one_rollout_to_the_next(taxis):
    """Also where the one before had no need of them."""
    agent = MaskedAgent()
    taxis.rollout(agent, 7)
    check_masks(taxis.rollout(agent, 13, action_mask="action_mask"))
    stream = taxis.stream(agent, 10, action_mask="action_mask", infos=("action_mask",))
    for _ in range(5):
        rollout = next(stream)
        check_masks(rollout)
        assert rollout.infos.keys() == {"action_mask", "_action_mask"}
    stream.close()


def test_the_learner_computes_the_same_log_probs_and_divergences(taxis):
    agent = MaskedAgent()
    rollout = taxis.rollout(agent, 20, action_mask="action_mask")
    flat = rollout.obs.reshape(-1), rollout.actions.reshape(-1), rollout.action_masks.reshape(-1, 6)
    again = as_policy(agent).log_prob(flat[0], flat[1], action_mask=flat[2])
    np.testing.assert_allclose(again, rollout.log_probs.reshape(-1), atol=1e-5)
    before = [worker.num_pulls for worker in taxis.stats().workers]
    with torch.no_grad():
        agent.actor.weight += 0.1 * torch.randn(agent.actor.weight.shape)
    taxis.rollout(agent, 20, action_mask="action_mask")
    divergences = [worker.divergence for worker in taxis.stats().workers]
    assert all(0 < divergence < np.inf for divergence in divergences), divergences
    assert [worker.num_pulls for worker in taxis.stats().workers] == [number + 1 for number in before]


def test_tensors(taxis):
    tensors = taxis.rollout(MaskedAgent(), 5, action_mask="action_mask").to_torch()
    assert tensors.action_masks.dtype == torch.bool and tensors.infos["action_mask"].shape == (5, 6, 6)


def test_mistakes_are_named(taxis):
    agent = MaskedAgent()
    with pytest.raises(UsageError, match=r"no such key; they have: 'prob', 'action_mask'"):
        taxis.rollout(agent, 5, action_mask="mask")
    with pytest.raises(UsageError, match=r"array of numbers there.*got float64 \(3,\) for 3 envs"):
        taxis.rollout(agent, 5, action_mask="prob")
    with pytest.raises(envfleet.PolicyFailed, match=r"unexpected keyword argument 'action_mask'"):
        taxis.rollout(DiscreteAgent(), 5, action_mask="action_mask")
    with pytest.raises(UsageError, match=r"must be a key"):
        taxis.rollout(agent, 5, action_mask=True)
    check_masks(taxis.rollout(agent, 20, action_mask="action_mask"))


@pytest.mark.parametrize("backend", ["native", "process"])
def test_masks_of_the_envs_that_are_ready_first(backend):
    agent = MaskedAgent()
    with ClusterEnv(SHORT_TAXI, 2, 4, worker_batch_size=2, backend=backend) as cluster:
        for _ in range(2):
            check_masks(cluster.rollout(agent, 20, action_mask="action_mask"))
        stream = cluster.stream(agent, 10, action_mask="action_mask", infos=("action_mask",))
        for _ in range(8):
            rollout = next(stream)
            check_masks(rollout)
            # Infos are those of the observation that follows.
            np.testing.assert_array_equal(rollout.infos["action_mask"][:-1], MASKS[rollout.obs[1:]])
            cluster.publish(agent)
        stream.close()


@pytest.mark.parametrize("backend", ["native", "process"])
def test_masks_in_an_evaluation(backend):
    """They decide what the agent does, on the cluster as here."""
    agent = MaskedAgent()
    with ClusterEnv(SHORT_TAXI, 2, 3, backend=backend) as cluster:
        on_cluster = cluster.evaluate(agent, 10, seed=3, action_mask="action_mask")
        with pytest.raises((UsageError, envfleet.WorkerFailed), match="no such key"):
            cluster.evaluate(agent, 2, seed=3, action_mask="mask")
    with envfleet.make(SHORT_TAXI, 4) as pool:
        here = envfleet.evaluate(pool, agent, 10, seed=3, action_mask="action_mask")
        without = envfleet.evaluate(pool, agent, 10, seed=3)
    np.testing.assert_array_equal(on_cluster.returns, here.returns)
    np.testing.assert_array_equal(on_cluster.lengths, here.lengths)
    assert (here.returns != without.returns).any()


def test_a_wrong_key_in_a_first_ready_stream():
    """Each order of the stream says so; none of them goes on with the masks of another one."""
    agent = MaskedAgent()
    with ClusterEnv(SHORT_TAXI, 1, 4, worker_batch_size=2) as cluster:
        check_masks(cluster.rollout(agent, 20, action_mask="action_mask"))
        stream = cluster.stream(agent, 5, action_mask="prob")
        for _ in range(3):
            with pytest.raises(UsageError, match="action_mask='prob'"):
                next(stream)
        stream.close()
        cluster.reset(seed=1)
        check_masks(cluster.rollout(agent, 20, action_mask="action_mask"))
