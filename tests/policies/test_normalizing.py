"""NormalizedPolicy and RewardScaler: exact statistics at the head, against NumPy and Gymnasium."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward
from numpy.testing import assert_allclose, assert_array_equal

import envfleet
from envfleet import FunctionPolicy, NormalizedPolicy, PolicySpec, RewardScaler, UsageError
from envfleet.contract.policy import Policy, Recurrent, Seedable
from envfleet.policies.adapting import as_policy, build_policy, code_of, is_policy_like

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
TREE = spaces.Dict(
    {"camera": spaces.Box(0, 255, (2, 2), np.uint8), "pair": spaces.Tuple([OBS, spaces.Discrete(3)]), "x": OBS}
)
RANDOM = np.random.default_rng(0)


def _seen(obs):
    """What the agent was given, as its log-probs."""
    return np.zeros(len(obs), np.int64), obs.sum(1)


def _policy(space=OBS, **settings):
    return NormalizedPolicy(FunctionPolicy(_seen, values=lambda obs: obs[:, 0]), space, **settings)


def _rollout(obs):
    return SimpleNamespace(obs=obs)


def test_statistics_are_exact_in_whatever_parts_they_come():
    policy = _policy(clip=1e9)
    obs = (RANDOM.normal(size=(60, 2, 3)) * [1, 10, 0.1] + [1e4, 0, -5]).astype(np.float32)
    for part in np.split(obs, [1, 4, 5, 33]):
        policy.update(_rollout(part))
    rows = obs.reshape(-1, 3).astype(np.float64)
    weights = policy.get_weights()
    assert_allclose(weights["normalizer.obs.mean"], rows.mean(0), rtol=1e-12)
    assert_allclose(weights["normalizer.obs.var"], rows.var(0), rtol=1e-9)
    assert weights["normalizer.obs.count"] == 120
    normal = policy.normalize(obs)
    assert normal.shape == obs.shape and normal.dtype == np.float32
    assert_allclose(normal, (obs - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-8), rtol=1e-5, atol=1e-6)
    assert_array_equal(policy.normalize(obs[3]), normal[3])


class Recording(gymnasium.vector.VectorWrapper):
    """Keeps what the envs gave before it was normalised."""

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        self.obs, self.rewards = [obs.copy()], []
        return obs, info

    def step(self, actions):
        outcome = self.env.step(actions)
        self.obs.append(outcome[0].copy())
        self.rewards.append(outcome[1].copy())
        return outcome


def _run(envs, num_steps):
    """The outcome of the last step."""
    envs.reset(seed=0)
    envs.action_space.seed(0)
    outcomes = [envs.step(envs.action_space.sample()) for _ in range(num_steps)]
    envs.close()
    return outcomes[-1]


def test_they_come_to_those_of_gymnasium():
    raw = Recording(gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync"))
    envs = NormalizeObservation(raw)
    last = _run(envs, 50)[0]
    policy = NormalizedPolicy(FunctionPolicy(_seen), envs.single_observation_space)
    policy.update(_rollout(np.stack(raw.obs)))
    weights = policy.get_weights()
    # Theirs begins with a ten-thousandth of a row of mean 0 and variance 1.
    assert_allclose(weights["normalizer.obs.mean"], envs.obs_rms.mean, rtol=1e-3, atol=1e-5)
    assert_allclose(weights["normalizer.obs.var"], envs.obs_rms.var, rtol=1e-3)
    assert_allclose(policy.normalize(raw.obs[-1]), last, rtol=1e-2, atol=1e-3)


def test_the_agent_sees_normal_observations():
    policy = _policy()
    obs = RANDOM.normal(3, 2, size=(5, 3)).astype(np.float32)
    assert isinstance(policy, Policy) and is_policy_like(policy)
    assert_array_equal(policy.act(obs).log_probs, obs.sum(1))  # before the first update: as they are
    policy.update(_rollout(obs[None]))
    assert_allclose(policy.act(obs).log_probs.sum(), 0, atol=1e-4)
    assert_allclose(policy.values(obs), policy.normalize(obs)[:, 0])
    assert_array_equal(policy.normalize(obs + 1e6), np.full((5, 3), 10, np.float32))
    assert_array_equal(_policy(clip=0.5).normalize(obs), np.clip(obs, -0.5, 0.5))


def test_only_floats_of_a_tree_are_normalised():
    policy = NormalizedPolicy(FunctionPolicy(lambda obs: np.zeros(len(obs["x"]))), TREE)
    left, right = (RANDOM.normal(2, 3, size=(4, 2, 3)).astype(np.float32) for _ in range(2))
    camera, choice = np.full((4, 2, 2, 2), 200, np.uint8), np.ones((4, 2), np.int64)
    obs = {"camera": camera, "pair": (left, choice), "x": right}
    policy.update(_rollout(obs))
    assert sorted(policy.get_weights()) == sorted(
        f"normalizer.obs{leaf}.{what}" for leaf in ("['pair'][0]", "['x']") for what in ("count", "mean", "var")
    )
    normal = policy.normalize(obs)
    assert normal["camera"] is camera and normal["pair"][1] is choice
    for part in (normal["pair"][0], normal["x"]):
        assert_allclose(part.mean((0, 1)), 0, atol=1e-5)
        assert_allclose(part.std((0, 1)), 1, rtol=1e-4)


def test_statistics_travel_with_the_weights_and_with_the_pickle():
    policy = NormalizedPolicy(FunctionPolicy(lambda w, obs: obs @ w["obs.mean"], weights={"obs.mean": np.ones(3)}), OBS)
    worker = build_policy(code_of(policy))
    policy.update(_rollout(RANDOM.normal(1, 2, size=(9, 3))))
    obs = RANDOM.normal(size=(4, 3)).astype(np.float32)
    before = worker.normalize(obs)
    worker.set_weights(policy.get_weights())
    assert not np.allclose(worker.normalize(obs), before)
    for copy in (worker, build_policy(code_of(policy))):
        assert_array_equal(copy.normalize(obs), policy.normalize(obs))
        assert_array_equal(copy.act(obs).actions, policy.act(obs).actions)
    policy.update(_rollout(RANDOM.normal(5, 2, size=(9, 3))))
    assert not np.allclose(worker.normalize(obs), policy.normalize(obs))
    weights = policy.get_weights()
    with pytest.raises(envfleet.UsageError, match=r"missing: normalizer\.obs\.var"):
        worker.set_weights({name: array for name, array in weights.items() if name != "normalizer.obs.var"})


def test_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    policy, obs = _policy(), RANDOM.normal(1, 2, size=(4, 2, 3)).astype(np.float32)
    policy.update(_rollout(torch.from_numpy(obs)))
    normal = policy.normalize(torch.from_numpy(obs))
    assert isinstance(normal, torch.Tensor) and normal.dtype is torch.float32
    assert_array_equal(normal.numpy(), policy.normalize(obs))


def test_it_is_what_its_agent_is():
    pytest.importorskip("torch")
    from tests.support.agents.torch_agents import DiscreteAgent, GruAgent, LstmAgent, QNetwork

    space, obs = spaces.Box(-1, 1, (4,)), np.ones((2, 4), np.float32)
    plain, greedy = (
        NormalizedPolicy(DiscreteAgent(), space),
        NormalizedPolicy(envfleet.EpsilonGreedy(QNetwork()), space),
    )
    assert not isinstance(plain, Recurrent) and not isinstance(plain, Seedable) and isinstance(greedy, Seedable)
    inner = as_policy(plain.agent)
    assert_array_equal(plain.distribution(obs).logits, inner.distribution(plain.normalize(obs)).logits)
    assert _policy().distribution(np.ones((2, 3), np.float32)) is None
    for agent in (LstmAgent(), GruAgent()):
        policy = NormalizedPolicy(agent, space)
        assert isinstance(policy, Recurrent)
        state = policy.initial_state(2)
        acted = policy.act(obs, state=state)
        assert acted.state.keys() == state.keys()
        assert policy.values(obs, state=acted.state).shape == policy.log_prob(obs, acted.actions, state=state).shape


def test_what_cannot_be_normalised():
    for space in (spaces.Discrete(3), spaces.Box(0, 255, (2,), np.uint8), spaces.Dict({"text": spaces.Text(3)})):
        with pytest.raises(envfleet.UsageError, match=r"has no Box of floats, so there is nothing to normalise"):
            _policy(space)
    with pytest.raises(envfleet.UsageError, match="observation_space must be a space of Gymnasium; got int"):
        _policy(3)
    with pytest.raises(envfleet.UsageError, match="clip and epsilon must be positive; got clip=0"):
        _policy(clip=0)
    policy = _policy()
    with pytest.raises(envfleet.UsageError, match="not finite cannot be normalised"):
        policy.update(_rollout(np.full((2, 3), np.nan)))
    assert policy.get_weights()["normalizer.obs.count"] == 0


def _rewards(rewards, ended=None, env_ids=None):
    ended = np.zeros(rewards.shape, bool) if ended is None else ended
    env_ids = np.arange(rewards.shape[1]) if env_ids is None else env_ids
    half = ended & (np.arange(len(rewards)) % 2 == 0)[:, None]
    return SimpleNamespace(rewards=rewards, terminations=half, truncations=ended & ~half, env_ids=env_ids)


def test_rewards_are_scaled_by_the_deviation_of_returns():
    rewards, ended = RANDOM.normal(1, 3, size=(40, 4)), RANDOM.random((40, 4)) < 0.1
    scaler, discount = RewardScaler(0.9), 0.9
    returns = np.zeros((40, 4))
    for env in range(4):
        running = 0.0
        for t in range(40):
            running = running * discount + rewards[t, env]
            returns[t, env] = running
            running = 0.0 if ended[t, env] else running
    scaler.update(_rewards(rewards, ended))
    assert scaler.std == pytest.approx(returns.std())
    assert_allclose(scaler.scale(rewards), rewards / returns.std())


def test_rollouts_of_single_workers_come_to_the_same():
    rewards, ended = RANDOM.normal(1, 3, size=(40, 4)), RANDOM.random((40, 4)) < 0.1
    whole, parts = RewardScaler(0.99), RewardScaler(0.99)
    whole.update(_rewards(rewards, ended))
    for steps, env_ids in (
        (slice(0, 8), [2, 3]),
        (slice(8, 40), [2, 3]),
        (slice(0, 30), [0, 1]),
        (slice(30, 40), [0, 1]),
    ):
        rollout = _rewards(rewards[steps][:, env_ids], env_ids=np.array(env_ids))
        rollout.terminations = ended[steps][:, env_ids]
        parts.update(rollout)
    assert parts.std == pytest.approx(whole.std)


def test_it_comes_to_gymnasiums():
    raw = Recording(gymnasium.make_vec("Pendulum-v1", 3, vectorization_mode="sync"))
    envs = NormalizeReward(raw, gamma=0.95)
    scaled = _run(envs, 100)[1]  # no episode ends
    scaler = RewardScaler(0.95)
    scaler.update(_rewards(np.stack(raw.rewards)))
    assert scaler.std == pytest.approx(np.sqrt(envs.return_rms.var), rel=1e-3)
    assert_allclose(scaler.scale(raw.rewards[-1]), scaled, rtol=1e-3)


def test_a_scaler_goes_on_with_the_statistics_of_another():
    rewards, ended = RANDOM.normal(1, 3, size=(20, 4)), RANDOM.random((20, 4)) < 0.1
    whole, first, second = RewardScaler(0.9), RewardScaler(0.9), RewardScaler(0.9)
    for each in (whole, first):
        each.update(_rewards(rewards, ended))
    state = first.state_dict()
    first.update(_rewards(rewards))  # the state is a copy
    second.load_state_dict(state)
    for each in (whole, second):
        each.update(_rewards(-rewards, ended))
    assert second.std == whole.std
    with pytest.raises(envfleet.UsageError, match="the state of a RewardScaler has 'mean'; got"):
        second.load_state_dict({"var": 1.0})


def test_wrong_discounts_are_refused():
    for wrong in (-0.1, 1.1):
        with pytest.raises(envfleet.UsageError, match=f"discount must be from 0 to 1; got {wrong}"):
            RewardScaler(wrong)
    with pytest.raises(envfleet.UsageError, match="epsilon must be positive; got 0"):
        RewardScaler(0.9, 0)


def test_a_policy_by_its_path_has_no_weights_to_share():
    with pytest.raises(UsageError, match="a factory that returns a NormalizedPolicy"):
        NormalizedPolicy(PolicySpec("package.module:Agent"), spaces.Box(-1, 1, (3,)))
