"""evaluate(): exactly the episodes that were assigned, whatever the envs; the mode of every kind of policy."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.testing import assert_array_equal

import envfleet
from envfleet import Categorical, EnvFailed, FunctionPolicy, Gaussian, PoolTimeout, UsageError
from envfleet.contract.evaluation import seeds_of_episodes
from envfleet.contract.infos.table import InfoTable
from envfleet.contract.policy import ActsDeterministically
from envfleet.policies.deterministic import deterministic_act
from envfleet.policies.evaluate import evaluate
from tests.support.envs.evaluation_envs import (
    LONG,
    BareAgent,
    LengthEnv,
    ModalAgent,
    RememberingAgent,
    expected_length,
)

SEED, NUM_EPISODES = 3, 23


def require_same(one, other):
    for name in ("returns", "lengths", "terminated", "truncated", "seeds"):
        assert_array_equal(getattr(one, name), getattr(other, name), name, strict=True)
    assert one.seed == other.seed
    assert list(one.infos) == list(other.infos)
    table, its_table = (InfoTable(each.num_episodes, each.infos) for each in (one, other))
    for episode in range(one.num_episodes):
        np.testing.assert_equal(table.row(episode), its_table.row(episode))
    assert len(one.frames) == len(other.frames)
    for frames, its_frames in zip(one.frames, other.frames, strict=True):
        assert_array_equal(frames, its_frames, strict=True)


@pytest.fixture(scope="module")
def expected():
    """Played by hand, one episode after the other."""
    env, agent = LengthEnv(), ModalAgent()
    returns, lengths = [], []
    for seed in seeds_of_episodes(SEED, NUM_EPISODES):
        obs, _ = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            action = agent.act_deterministically(obs[None]).actions[0]
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + reward, terminated or truncated
        returns.append(total)
        lengths.append(env.length)
    return np.array(returns), np.array(lengths)


@pytest.mark.parametrize("autoreset_mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize(("backend", "num_envs"), [("serial", 1), ("serial", 5), ("serial", 40), ("process", 4)])
def test_equals_episodes_played_by_hand(expected, backend, num_envs, autoreset_mode):
    with envfleet.make(LengthEnv, num_envs, backend=backend, autoreset_mode=autoreset_mode) as pool:
        evaluation = envfleet.evaluate(pool, ModalAgent(), NUM_EPISODES, seed=SEED)
    returns, lengths = expected
    assert_array_equal(evaluation.returns, returns)
    assert_array_equal(evaluation.lengths, lengths)
    assert_array_equal(evaluation.truncated, lengths % 2 == 1)
    assert_array_equal(evaluation.terminated, lengths % 2 == 0)
    assert_array_equal(evaluation.infos["distance"], lengths / 2)
    assert_array_equal(evaluation.infos["position"], np.arange(2) + lengths[:, None])
    assert_array_equal(evaluation.infos["_success"], lengths % 3 == 0)
    assert_array_equal(evaluation.infos["by"]["_name"], lengths % 3 == 0)
    assert evaluation.num_episodes == NUM_EPISODES and not evaluation.failed.any()
    assert evaluation.mean_return == returns.mean() and evaluation.mean_length == lengths.mean()
    assert str(evaluation).startswith("23 episodes: return ") and "\n" not in str(evaluation)


def test_short_episodes_do_not_count_more_often():
    """The first 30 that finish are short ones; the 30 that are assigned are what their seeds are."""
    with envfleet.make(LengthEnv, 30, backend="serial") as pool:
        evaluation = evaluate(pool, ModalAgent(), 30, seed=0)
        pool.reset(seed=evaluation.seeds.tolist())
        first, running = [], np.zeros(30, np.int64)
        while len(first) < 30:
            _, _, terminated, truncated, _ = pool.step(np.zeros(30, np.int64))
            running += 1
            ended = terminated | truncated
            first += running[ended].tolist()
            running[ended] = -1  # a reset takes a step
    assert_array_equal(evaluation.lengths, [expected_length(seed) for seed in evaluation.seeds])
    assert evaluation.mean_length > np.mean(first[:30]) + 2, "this env would not show the bias"


@pytest.mark.parametrize("kind", ["sync", "vector"])
def test_vector_envs_of_others(expected, kind):
    if kind == "sync":
        envs = gymnasium.vector.SyncVectorEnv([LengthEnv] * 5)
    else:
        envs = envfleet.make(
            lambda num_envs: gymnasium.vector.SyncVectorEnv([LengthEnv] * num_envs), 5, backend="vector"
        )
    evaluation = evaluate(envs, ModalAgent(), NUM_EPISODES, seed=SEED)
    envs.close()
    assert_array_equal(evaluation.returns, expected[0])


def _towards_the_fall(obs):
    return (obs[:, 2] > 0).astype(np.int64)


def test_native_envs():
    policy = FunctionPolicy(_towards_the_fall, act_deterministically=_towards_the_fall)
    results = []
    for num_envs, backend in ((7, "native"), (3, "serial")):
        with envfleet.make("CartPole-v1", num_envs, backend=backend) as pool:
            results.append(evaluate(pool, policy, 20, seed=1))
    require_same(*results)
    assert len(set(results[0].lengths)) > 5


def test_memory_begins_anew_with_each_episode():
    with envfleet.make(LengthEnv, 3, backend="serial") as pool:
        evaluation = evaluate(pool, RememberingAgent(), 20, seed=0)
    lengths = evaluation.lengths
    sums = np.array([sum(step % 3 for step in range(length)) for length in lengths])
    assert_array_equal(evaluation.returns, sums + lengths**2)


def test_frames_of_the_first_episodes():
    with envfleet.make(LengthEnv, 2, backend="process", render_mode="rgb_array") as pool:
        evaluation = evaluate(pool, ModalAgent(), 6, seed=0, num_recorded=3)
    assert len(evaluation.frames) == 3
    for frames, length in zip(evaluation.frames, evaluation.lengths, strict=False):
        assert frames.shape == (length + 1, 2, 4, 3)
        assert_array_equal(frames[:, 0, 0, 0], np.arange(length + 1))


def test_chance_stays_as_it_was_and_seeds_are_named():
    with envfleet.make(LengthEnv, 2, backend="serial") as pool:
        np.random.seed(5)
        state = np.random.get_state()[1].copy()
        drawing = FunctionPolicy(
            lambda obs: np.random.randint(3, size=len(obs)), distribution=lambda obs: Categorical(obs * [1, -1, 2])
        )
        first = evaluate(pool, drawing, 5)
        assert_array_equal(np.random.get_state()[1], state)
        require_same(evaluate(pool, drawing, 5, seed=first.seed), first)
        assert not np.array_equal(evaluate(pool, drawing, 5).seeds, first.seeds)
        samples = [evaluate(pool, ModalAgent(), 5, seed=0, deterministic=False).returns for _ in range(2)]
        assert not np.array_equal(*samples)


def test_failures():
    with envfleet.make(lambda: LengthEnv(fails_at=4), 3, backend="serial") as pool:
        with pytest.raises(EnvFailed, match="the gripper broke"):
            evaluate(pool, ModalAgent(), 60, seed=0)
        with pytest.raises(EnvFailed, match="the gripper broke"):
            evaluate(pool, ModalAgent(), 60, seed=0)
    with envfleet.make(lambda: LengthEnv(fails_at=4), 3, backend="serial", on_env_error="restart") as pool:
        evaluation = evaluate(pool, ModalAgent(), 60, seed=0)
    planned = np.array([expected_length(seed) for seed in evaluation.seeds])
    assert_array_equal(evaluation.failed, planned == 4)
    assert_array_equal(evaluation.lengths, planned)
    assert f"{(planned == 4).sum()} cut short by failures" in str(evaluation)


def test_endless_episodes_end_with_an_error():
    class Endless(LengthEnv):
        def step(self, action):
            return self._obs(), 0.0, False, False, {}

    with envfleet.make(Endless, 2, backend="serial") as pool, pytest.raises(PoolTimeout, match="0 of 3 are"):
        evaluate(pool, ModalAgent(), 3, timeout_s=0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_episodes": 0}, "num_episodes must be"),
        ({"num_recorded": 1}, "render_mode='rgb_array'"),
        ({"seed": -1}, "seed must be"),
        ({"deterministic": 1}, "deterministic must be"),
        ({"agent": BareAgent()}, r"act_deterministically\(obs\)"),
        ({"agent": 3}, "an agent is"),
        ({"agent": FunctionPolicy(lambda obs: np.zeros(len(obs), np.int64))}, "distribution.* shows nothing"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = {"agent": ModalAgent(), "num_episodes": 3} | change
    with envfleet.make(LengthEnv, 2, backend="serial") as pool, pytest.raises(UsageError, match=message):
        evaluate(pool, arguments.pop("agent"), **arguments)


def test_asynchronous_pools_are_refused():
    with envfleet.make(LengthEnv, 2, batch_size=1) as pool, pytest.raises(UsageError, match="asynchronous"):
        evaluate(pool, ModalAgent(), 3)
    with pytest.raises(UsageError, match="must be a pool"):
        evaluate(LengthEnv(), ModalAgent(), 3)


# -- policies --


def test_the_mode_of_a_distribution_of_functions():
    logits = np.array([[0, 2, 1], [3, 0, 0.5]])
    policy = FunctionPolicy(lambda obs: np.zeros(2, np.int64), distribution=lambda obs: Categorical(logits))
    assert not isinstance(policy, ActsDeterministically)
    act = deterministic_act(policy, spaces.Discrete(3, start=5))
    assert act(np.zeros((2, 1))).actions.tolist() == [6, 5]
    squashed = FunctionPolicy(lambda obs: obs, distribution=lambda obs: Gaussian(obs, obs))
    with pytest.raises(UsageError, match="act_deterministically=function"):
        deterministic_act(squashed, spaces.Box(-1, 1, (2,)))


def test_modes_of_torch():
    torch = pytest.importorskip("torch")
    distributions = torch.distributions

    class Module(torch.nn.Module):
        def __init__(self, make):
            super().__init__()
            self.make = make

        def get_action_and_value(self, x, action=None):
            probs = self.make(x)
            action = probs.sample() if action is None else action
            return action, None, None, None

    x = np.array([[-1.5, 0.2, 0.7], [0.9, -0.4, 0.1]], np.float32)
    tanh = [distributions.TanhTransform(cache_size=1), distributions.AffineTransform(1.0, 2.0)]
    kinds = {
        "Categorical": (lambda x: distributions.Categorical(logits=x), x.argmax(1)),
        "Bernoulli": (lambda x: distributions.Bernoulli(logits=x), (x > 0).astype(np.float32)),
        "Normal": (lambda x: distributions.Normal(x, 3.0), x),
        "Independent": (lambda x: distributions.Independent(distributions.Normal(x, 3.0), 1), x),
        "Multivariate": (lambda x: distributions.MultivariateNormal(x, torch.eye(3)), x),
        "tanh": (lambda x: distributions.TransformedDistribution(distributions.Normal(x, 1), tanh), np.tanh(x) * 2 + 1),
    }
    for name, (make, expected) in kinds.items():
        torch.manual_seed(0)
        before = torch.get_rng_state()
        actions = envfleet.TorchPolicy(Module(make)).act_deterministically(x).actions
        np.testing.assert_allclose(actions, expected, rtol=1e-6, err_msg=name)
        assert torch.equal(before, torch.get_rng_state()), name
        samples = make(torch.from_numpy(x)).sample((50,)).numpy()
        assert any(not np.array_equal(sample, expected) for sample in samples), "outside it draws as before"
    beta = Module(lambda x: distributions.Beta(x.exp(), x.exp()))
    with pytest.raises(UsageError, match=r"get_deterministic_action\(obs\)"):
        envfleet.TorchPolicy(beta).act_deterministically(x)
    beta.get_deterministic_action = lambda obs: obs + 1
    assert_array_equal(envfleet.TorchPolicy(beta).act_deterministically(x).actions, x + 1)


def test_the_longest_episode_is_long():
    assert max(map(expected_length, range(200))) == LONG


class _Corridor(gymnasium.Env):
    """Of a given length; one action is allowed in each step, and its info says which."""

    observation_space, action_space = gymnasium.spaces.Discrete(100), gymnasium.spaces.Discrete(2)

    def __init__(self, length):
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place = 0
        return self._place, self._info()

    def step(self, action):
        assert action == self._place % 2, f"action {action} is not allowed at {self._place}"
        self._place += 1
        return self._place, 1.0, self._place == self._length, False, self._info()

    def _info(self):
        return {"mask": np.array([self._place % 2 == 0, self._place % 2 == 1])}


def _first_allowed(obs, action_mask):
    return action_mask.argmax(1)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("num_episodes", [2, 4, 6])
def test_vector_envs_whose_envs_step_together(mode, num_episodes):
    """Those without an episode are stepped too, with masks, and reset where they must be."""
    envs = SyncVectorEnv([lambda length=length: _Corridor(length) for length in (7, 3, 4, 3)], autoreset_mode=mode)
    agent = envfleet.FunctionPolicy(_first_allowed, act_deterministically=_first_allowed)
    evaluation = envfleet.evaluate(envs, agent, num_episodes, seed=1, action_mask="mask")
    assert evaluation.lengths.tolist() == [7, 3, 4, 3, 7, 3][:num_episodes]
    with pytest.raises(envfleet.UsageError, match="action_mask must be a key"):
        envfleet.evaluate(envs, agent, 1, action_mask=True)
    envs.close()
