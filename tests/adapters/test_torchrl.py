"""TorchRLEnv passes TorchRL's own check, and shows what one sees who resets each env by hand."""

import itertools

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

import envfleet
from tests.support.envs.learner_envs import OftenEndingEnv, act_by_row, played_by_hand

torch = pytest.importorskip("torch")
TensorDictModule = pytest.importorskip("tensordict.nn").TensorDictModule
Collector = pytest.importorskip("torchrl.collectors").Collector
check_env_specs = pytest.importorskip("torchrl.envs.utils").check_env_specs
GAE = pytest.importorskip("torchrl.objectives.value").GAE
adapter = pytest.importorskip("envfleet.adapters.torchrl")
TensorForm = pytest.importorskip("envfleet.adapters.torchrl_forms").TensorForm

FORKED_WITH = ("tests.support.envs.learner_envs",)
NUM_ENVS = 4


def ours(env=OftenEndingEnv, backend="serial", num_envs=NUM_ENVS, categorical=True, **kwargs):
    pool = envfleet.make(env, num_envs, backend=backend, autoreset_mode="same_step", **kwargs)
    return adapter.TorchRLEnv(pool, categorical_action_encoding=categorical)


def on_workers():
    return envfleet.ClusterEnv(OftenEndingEnv, 2, 2, backend="serial", autoreset_mode="same_step", seed=5)


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("form", ["array", "dict", "tuple"])
def test_the_specs_are_those_of_the_data(form, categorical):
    env = ours(env_kwargs={"form": form}, categorical=categorical)
    check_env_specs(env, seed=0)
    check_env_specs(env, break_when_any_done="both")
    env.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_specs_of_native_envs(env_id):
    env = ours(env_id, "native")
    check_env_specs(env, seed=0)
    assert env.batch_size == (NUM_ENVS,)
    env.close()


def actions_of(num_steps, seed=1):
    return np.random.default_rng(seed).integers(3, size=(num_steps, NUM_ENVS))


class GivenActions:
    """A policy that takes actions from a list."""

    def __init__(self, actions):
        self.actions = itertools.cycle(actions)

    def __call__(self, observation):
        return torch.as_tensor(next(self.actions))


def assert_played(data, expected):
    """`data` is [N, T]."""
    by_time = data.transpose(0, 1)
    assert np.array_equal(by_time["observation"], expected.obs)
    assert np.array_equal(by_time["next", "observation"], expected.next_obs)
    assert np.array_equal(by_time["next", "reward"].squeeze(-1), expected.rewards.astype(np.float32))
    assert np.array_equal(by_time["next", "terminated"].squeeze(-1), expected.terminated)
    assert np.array_equal(by_time["next", "truncated"].squeeze(-1), expected.truncated)
    assert np.array_equal(by_time["next", "done"].squeeze(-1), expected.terminated | expected.truncated)
    assert not by_time["done"].any()


def test_a_rollout_goes_on_after_episodes_that_end():
    env, actions = ours(), actions_of(40)
    env.set_seed(5)
    data = env.rollout(40, GivenActions(actions), break_when_any_done=False)
    assert_played(data, played_by_hand([OftenEndingEnv() for _ in range(NUM_ENVS)], actions, 5, num_resets=2))
    env.close()


def test_native_envs_equal_gymnasium():
    env, actions = ours("CartPole-v1", "native"), np.ones((60, NUM_ENVS), int)
    env.set_seed(5)
    data = env.rollout(60, GivenActions(actions), break_when_any_done=False)
    assert data["next", "terminated"].sum() >= 4 * NUM_ENVS
    assert_played(data, played_by_hand([gymnasium.make("CartPole-v1") for _ in range(NUM_ENVS)], actions, 5, 2))
    env.close()


def test_a_collector_collects_without_a_seam():
    env = ours()
    env.set_seed(5)
    collector = Collector(env, GivenActions(actions_of(41)), frames_per_batch=10 * NUM_ENVS, total_frames=40 * NUM_ENVS)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    data = torch.cat(batches, 1)
    actions = data["action"].numpy().T
    assert_played(data, played_by_hand([OftenEndingEnv() for _ in range(NUM_ENVS)], actions, 5, num_resets=2))


def test_envs_whose_episode_has_ended_can_stand_still():
    env, actions = ours(), actions_of(12)
    env.set_seed(5)
    data = env.rollout(12, GivenActions(actions), break_when_any_done=False, break_when_all_done=True)
    expected = played_by_hand([OftenEndingEnv() for _ in range(NUM_ENVS)], actions, 5, num_resets=2)
    lengths = (expected.terminated | expected.truncated).argmax(0) + 1
    assert data.shape == (NUM_ENVS, lengths.max())
    for env_id, length in enumerate(lengths):
        assert np.array_equal(data["next", "observation"][env_id, :length], expected.next_obs[:length, env_id])
    assert data["next", "done"][:, -1].all()
    env.close()


def test_a_partial_reset_leaves_the_others_alone():
    env = ours()
    env.set_seed(5)
    data = env.reset()
    data = env.step(data.set("action", torch.zeros(NUM_ENVS, dtype=torch.int64)))["next"]
    chosen = torch.tensor([False, True, False, True]).unsqueeze(-1)
    fresh = env.reset(data.clone().set("_reset", chosen))
    assert fresh["observation"][1, 1] == fresh["observation"][3, 1] == 0
    assert torch.equal(fresh["observation"][[0, 2]], data["observation"][[0, 2]])
    env.close()


def test_a_cluster_is_an_env_too(quick_workers):
    env, actions = adapter.TorchRLEnv(on_workers(), categorical_action_encoding=True), actions_of(30)
    data = env.rollout(30, GivenActions(actions), break_when_any_done=False)
    assert_played(data, played_by_hand([OftenEndingEnv() for _ in range(NUM_ENVS)], actions, 5))
    env.close()


@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_rollout_of_a_cluster_as_a_tensordict(quick_workers, as_tensors):
    num_steps = 12
    with on_workers() as cluster:
        rollout = cluster.rollout(envfleet.FunctionPolicy(act_by_row), num_steps)
    data = adapter.to_tensordict(rollout.to_torch() if as_tensors else rollout)
    assert data.batch_size == (NUM_ENVS, num_steps)
    actions = np.tile(np.array([0, 1, 0, 1]), (num_steps, 1))
    assert_played(data, played_by_hand([OftenEndingEnv() for _ in range(NUM_ENVS)], actions, 5))
    assert np.array_equal(data["action"], actions.T)
    assert torch.allclose(data["values"], data["observation"][..., 0] * 2)
    assert data["env_id"][:, 0].tolist() == [0, 1, 2, 3]
    assert (data["policy_version"] == rollout.version).all()
    critic = TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["state_value"])
    GAE(gamma=0.9, lmbda=0.9, value_network=critic)(data)
    assert data["advantage"].shape == (NUM_ENVS, num_steps, 1)


# -- infos --

INFOS = {"num_steps": np.int64, "length": np.float32}  # of each step; of each reset


def assert_infos(data):
    """Of steps, also of last ones, the number of the step; of resets, the length of the episode."""
    begins = data["observation"][..., 1] == 0
    assert torch.equal(data["next", "info", "num_steps"].float(), data["next", "observation"][..., 1])
    assert data["next", "info_mask", "num_steps"].all() and not data["next", "info_mask", "length"].any()
    assert not data["next", "info", "length"].any()
    known = data[:, 1:]
    assert torch.equal(known["info_mask", "length"].squeeze(-1), begins[:, 1:])
    assert torch.equal(known["info", "length"], known["observation"][..., 2] * begins[:, 1:])
    assert torch.equal(known["info_mask", "num_steps"].squeeze(-1), ~begins[:, 1:])
    assert begins[:, 1:].any()


def test_infos_that_are_asked_for():
    pool = envfleet.make(OftenEndingEnv, NUM_ENVS, backend="serial", autoreset_mode="same_step", seed=5)
    env = adapter.TorchRLEnv(pool, categorical_action_encoding=True, infos=INFOS)
    check_env_specs(env)
    check_env_specs(env, break_when_any_done="both")
    data = env.rollout(20, break_when_any_done=False)
    assert_infos(data)
    assert data["info_mask", "length"][:, 0].all() and data["info", "num_steps"].dtype == torch.int64
    env.close()
    with pytest.raises(envfleet.UsageError, match="'word'"):
        adapter.TorchRLEnv(pool, infos={"word": str})


def test_infos_of_a_clusters_rollout(quick_workers):
    with on_workers() as cluster:
        rollout = cluster.rollout(envfleet.FunctionPolicy(act_by_row), 12)
    data = adapter.to_tensordict(rollout, infos={**INFOS, "speed": np.dtype((np.float32, (3,)))})
    assert_infos(data)
    assert not data["info_mask", "length"][:, 0].any()
    assert data["next", "info", "speed"].shape == (NUM_ENVS, 12, 3) and not data["info_mask", "speed"].any()


# -- forms --

SPACES = [
    spaces.Discrete(4, seed=1),
    spaces.Discrete(4, start=2, seed=1),
    spaces.MultiDiscrete([2, 3], seed=1),
    spaces.MultiDiscrete([2, 3], start=[5, -1], seed=1),
    spaces.MultiBinary(3, seed=1),
    spaces.Box(-1, 1, (2, 2), seed=1),
    spaces.Box(-np.inf, np.inf, (2,), np.float64, seed=1),
    spaces.Box(0, 255, (4, 4), np.uint8, seed=1),
    spaces.Tuple([spaces.Discrete(3), spaces.Dict(c=spaces.Tuple([spaces.Box(0, 1, (2,))]))], seed=1),
    spaces.Dict(a=spaces.Discrete(3), b=spaces.Dict(c=spaces.Box(0, 1, (2,))), seed=1),
]


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_values_go_to_tensors_and_back(space, one_hot):
    form = TensorForm(space, "action", is_nested=True, one_hot=one_hot, device=None)
    batch = batch_space(space, 5).sample()
    rows = form.tensors(batch)
    spec = form.spec(5)
    assert spec.is_in(rows)
    back = form.batch(rows)
    for got, expected in zip(leaves(back), leaves(batch), strict=True):
        assert got.dtype == expected.dtype and np.array_equal(got, expected)
    if not isinstance(space, spaces.Box):
        assert batch_space(space, 5).contains(form.batch(spec.rand()))


def leaves(value):
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [leaf for part in value.values() for leaf in leaves(part)] if isinstance(value, dict) else [value]


def test_spaces_without_a_spec_are_refused():
    with pytest.raises(envfleet.UsageError, match=r"obs\['word'\], Text"):
        TensorForm(spaces.Dict(word=spaces.Text(5)), "obs", is_nested=False, one_hot=False, device=None)


def test_parts_of_tuples_have_numbers_as_keys():
    env = ours(env_kwargs={"form": "tuple"}, seed=5)
    data = env.rollout(3)
    assert sorted(data["observation"].keys()) == ["0", "1"]
    assert torch.equal(data["next", "observation", "0"], data["next", "observation", "1"])
    assert adapter.entries_of((1, {"a": (2, 3)}), "observation", is_nested=False) == {
        ("observation", "0"): 1,
        ("observation", "1", "a", "0"): 2,
        ("observation", "1", "a", "1"): 3,
    }
    env.close()
