"""DETACH: the policy acts on the workers. Every row of a rollout is real: replayed on a pool here, it is the same."""

import dataclasses
import importlib.util
import subprocess
import sys
import textwrap
from copy import deepcopy

import numpy as np
import pytest
import torch  # noqa: TID253 - agents of torch are what this is about

import envfleet
from envfleet import ClusterEnv, EnvSpec, FunctionPolicy, PolicyFailed, PolicySpec, UsageError
from envfleet.contract.returns import gae_of
from envfleet.contract.spaces import SpaceTree
from envfleet.policies.adapting import as_policy
from envfleet.pool.process.cpus import usable_cpus
from envfleet.testing.cluster_arguments import cluster_arguments
from envfleet.testing.programs import require_equal
from tests.support.agents.detach_agents import CountingPolicy, DictAgent, DiscreteAgent, GaussianAgent
from tests.support.envs.detach_envs import BigEnv, EveryKindEnv, StackEnv
from tests.support.scripts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch",)


class Replay:
    """Plays the actions of rollouts on a pool of this machine; everything that the envs showed must be the same."""

    def __init__(self, env, num_envs, seed, **kwargs):
        self.pool = envfleet.make(env, num_envs, autoreset_mode="same_step", **kwargs)
        self.tree = SpaceTree(self.pool.single_observation_space)
        self.actions = SpaceTree(self.pool.single_action_space)
        self.obs = self.pool.reset(seed=seed)[0]
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self.num_finals = 0

    def check(self, rollout):
        leaves, actions = self.tree.flatten(rollout.obs), self.actions.flatten(rollout.actions)
        finals = []
        for t in range(rollout.num_steps):
            require_equal([leaf[t] for leaf in leaves], self.tree.flatten(self.obs), f"obs[{t}]")
            step = self.actions.unflatten([np.ascontiguousarray(leaf[t]) for leaf in actions])
            self.obs, rewards, terminated, truncated, info = self.pool.step(step)
            require_equal(rollout.rewards[t], rewards, f"rewards[{t}]")
            require_equal(rollout.terminations[t], terminated, f"terminations[{t}]")
            require_equal(rollout.truncations[t], truncated, f"truncations[{t}]")
            self.returns += rewards
            self.lengths += 1
            for env in np.flatnonzero(terminated | truncated):
                finals.append((t, env, info["final_obs"][env], self.returns[env], self.lengths[env]))
                self.returns[env] = self.lengths[env] = 0
        require_equal(self.tree.flatten(rollout.next_obs), self.tree.flatten(self.obs), "next_obs")
        final_leaves = self.tree.flatten(rollout.final_obs)
        found = {
            (int(t), int(env)): (
                self.tree.unflatten([leaf[row] for leaf in final_leaves]),
                rollout.episode_returns[row],
                rollout.episode_lengths[row],
            )
            for row, (t, env) in enumerate(zip(rollout.final_steps, rollout.final_envs, strict=True))
        }
        assert len(found) == len(finals) == len(rollout.final_steps)
        for t, env, obs, episode_return, episode_length in finals:
            got = found[t, int(env)]
            require_equal([np.asarray(leaf) for leaf in self.tree.flatten(got[0])],
                          [np.asarray(leaf) for leaf in self.tree.flatten(obs)], f"final_obs {t}, {env}")  # fmt: skip
            assert (got[1], got[2]) == (episode_return, episode_length)
        self.num_finals += len(finals)
        return self

    def close(self):
        self.pool.close()


def check_agent(agent, rollout, obs_tree, tolerance=1e-6):
    """What the workers' copy computed is what the agent computes here."""
    policy = as_policy(agent)
    leaves = obs_tree.flatten(rollout.obs)
    for t in range(rollout.num_steps):
        obs = obs_tree.unflatten([np.ascontiguousarray(leaf[t]) for leaf in leaves])
        actions = rollout.actions[t]
        np.testing.assert_allclose(rollout.log_probs[t], policy.log_prob(obs, actions), tolerance, tolerance)
        if "values" in rollout.extras:
            np.testing.assert_allclose(rollout.extras["values"][t], policy.values(obs), tolerance, tolerance)
    if rollout.next_values is None:
        return
    np.testing.assert_allclose(rollout.next_values, policy.values(rollout.next_obs), tolerance, tolerance)
    ended = rollout.terminations | rollout.truncations
    assert not rollout.final_values[~ended].any()
    if len(rollout.final_steps):
        expected = policy.values(rollout.final_obs)
        np.testing.assert_allclose(
            rollout.final_values[rollout.final_steps, rollout.final_envs], expected, tolerance, tolerance
        )


def check_form(rollout, cluster, num_steps, workers=(0, 1)):
    """Shapes and dtypes of every field, as contract/rollout.py has them."""
    per_worker = cluster.num_envs_per_worker
    num_envs, num_finals = per_worker * len(workers), len(rollout.final_steps)
    shape = (num_steps, num_envs)
    assert (rollout.num_steps, rollout.num_envs) == shape
    expected = {
        "rewards": (shape, np.float64),
        "terminations": (shape, np.bool_),
        "truncations": (shape, np.bool_),
        "log_probs": (shape, np.float32),
        "next_values": ((num_envs,), np.float32),
        "final_values": (shape, np.float32),
        "final_steps": ((num_finals,), np.int64),
        "final_envs": ((num_finals,), np.int64),
        "episode_returns": ((num_finals,), np.float64),
        "episode_lengths": ((num_finals,), np.int64),
        "episode_seconds": ((num_finals,), np.float64),
        "env_ids": ((num_envs,), np.int64),
        "workers": ((len(workers),), np.int64),
        "versions": ((len(workers),), np.int64),
        "lags": ((len(workers),), np.int64),
    }
    for name, (its_shape, dtype) in expected.items():
        array = getattr(rollout, name)
        if array is not None:
            assert (array.shape, array.dtype) == (its_shape, dtype), name
    for space, tree, leading in (
        (cluster.single_observation_space, rollout.obs, shape),
        (cluster.single_observation_space, rollout.next_obs, (num_envs,)),
        (cluster.single_observation_space, rollout.final_obs, (num_finals,)),
        (cluster.single_action_space, rollout.actions, shape),
    ):
        flat = SpaceTree(space)
        for leaf, array in zip(flat.leaves, flat.flatten(tree), strict=True):
            assert (array.shape, array.dtype) == ((*leading, *leaf.shape), leaf.dtype)
    assert rollout.workers.tolist() == list(workers)
    assert rollout.env_ids.tolist() == [w * per_worker + i for w in workers for i in range(per_worker)]
    assert sorted(zip(rollout.final_steps.tolist(), rollout.final_envs.tolist(), strict=True)) == list(
        zip(*(axis.tolist() for axis in np.nonzero(rollout.terminations | rollout.truncations)), strict=True)
    )


# -- rollouts of every kind of agent --


@pytest.fixture(scope="module")
def cartpoles():
    with ClusterEnv("CartPole-v1", 2, 3) as cluster:
        yield cluster


@pytest.fixture
def replay():
    made = []

    def make(*args, **kwargs):
        made.append(Replay(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_rollouts_are_real_and_go_on(cartpoles, replay):
    agent, here = DiscreteAgent(), replay("CartPole-v1", 6, 5)
    tree = SpaceTree(cartpoles.single_observation_space)
    cartpoles.reset(seed=5)
    for num_steps in (40, 1, 25):
        rollout = cartpoles.rollout(agent, num_steps)
        check_form(rollout, cartpoles, num_steps)
        here.check(rollout)
        check_agent(agent, rollout, tree)
        assert rollout.lag == 0 and rollout.extras.keys() == {"values"}
        assert rollout.extras["values"].dtype == np.float32
    assert here.num_finals


def test_a_step_is_a_rollout_of_one(cartpoles, replay):
    agent, here = DiscreteAgent(seed=3), replay("CartPole-v1", 6, 8)
    cartpoles.reset(seed=8)
    obs = here.obs
    policy, num_ended = as_policy(agent), 0
    for _ in range(60):
        next_obs, rewards, terminated, truncated, info = cartpoles.step(agent)
        np.testing.assert_allclose(info["log_probs"], policy.log_prob(obs, info["actions"]), 1e-6, 1e-6)
        np.testing.assert_allclose(info["values"], policy.values(obs), 1e-6, 1e-6)
        expected = here.pool.step(info["actions"])
        require_equal((next_obs, rewards, terminated, truncated), expected[:4])
        assert ("final_obs" in info) == ("final_obs" in expected[4])
        for key in ("final_obs", "_final_obs"):
            if key in info:
                require_equal(info[key], expected[4][key])
                num_ended += 1
        obs = next_obs
    assert num_ended


def test_a_rollout_continues_after_single_steps(cartpoles, replay):
    agent, here = DiscreteAgent(), replay("CartPole-v1", 6, 9)
    cartpoles.reset(seed=9)
    for _ in range(5):
        *_, info = cartpoles.step(agent)
        here.pool.step(info["actions"])
        here.returns += 1
        here.lengths += 1
    rollout = cartpoles.rollout(agent, 30)
    here.obs = rollout.obs[0]
    here.check(rollout)


def test_seeds_of_a_list_reach_rollouts(cartpoles, replay):
    seeds = [3, 1, 4, 1, 5, 9]
    here = replay("CartPole-v1", 6, seeds)
    cartpoles.reset(seed=seeds)
    here.check(cartpoles.rollout(DiscreteAgent(), 20))


def test_the_constructors_seed_reaches_the_first_rollout(replay):
    with ClusterEnv("CartPole-v1", 2, 2, seed=70) as cluster:
        replay("CartPole-v1", 4, 70).check(cluster.rollout(DiscreteAgent(), 30))


def test_after_steps_with_actions_rollouts_begin_anew(cartpoles):
    cartpoles.reset(seed=0)
    for _ in range(3):
        cartpoles.step(np.zeros(6, np.int64))
    rollout = cartpoles.rollout(DiscreteAgent(), 30)
    assert (np.abs(rollout.obs[0]) <= 0.05).all(), "CartPole begins near the middle"
    lengths = dict(zip(rollout.final_envs.tolist(), rollout.episode_lengths.tolist(), strict=True))
    assert lengths
    first = {}
    for env, step, length in zip(rollout.final_envs, rollout.final_steps, rollout.episode_lengths, strict=True):
        first.setdefault(int(env), (int(step) + 1, int(length)))
    assert all(steps == length for steps, length in first.values())


def test_steps_need_a_reset_after_rollouts(cartpoles):
    cartpoles.rollout(DiscreteAgent(), 2)
    with pytest.raises(envfleet.NotReset):
        cartpoles.step(np.zeros(6, np.int64))
    with envfleet.make("CartPole-v1", 6) as pool:
        require_equal(cartpoles.reset(seed=1), pool.reset(seed=1))
        require_equal(cartpoles.step(np.zeros(6, np.int64)), pool.step(np.zeros(6, np.int64)))


def test_gae_equals_the_slow_way(cartpoles):
    cartpoles.reset(seed=2)
    rollout = cartpoles.rollout(DiscreteAgent(), 50)
    got = gae_of(rollout, gamma=0.9, lam=0.8)
    num_steps, num_envs = rollout.rewards.shape
    values = rollout.extras["values"].astype(np.float64)
    for env in range(num_envs):
        for t in range(num_steps):
            advantage, weight = 0.0, 1.0
            for later in range(t, num_steps):
                ended = rollout.terminations[later, env] or rollout.truncations[later, env]
                if rollout.terminations[later, env]:
                    following = 0.0
                elif ended:
                    following = float(rollout.final_values[later, env])
                else:
                    following = float(rollout.next_values[env]) if later == num_steps - 1 else values[later + 1, env]
                advantage += weight * (rollout.rewards[later, env] + 0.9 * following - values[later, env])
                weight *= 0.9 * 0.8
                if ended:
                    break
            np.testing.assert_allclose(got.advantages[t, env], advantage, 1e-9, 1e-9)
    np.testing.assert_allclose(got.returns, got.advantages + values)


def test_tensors(cartpoles):
    rollout = cartpoles.rollout(DiscreteAgent(), 30)
    tensors = rollout.to_torch()
    for field in dataclasses.fields(rollout):
        if field.name in ("extras", "states", "infos", "final_infos", "action_masks", "changes"):
            continue
        array, tensor = getattr(rollout, field.name), getattr(tensors, field.name)
        assert isinstance(tensor, torch.Tensor)
        expected = np.float32 if array.dtype == np.float64 else array.dtype
        require_equal(tensor.numpy(), array.astype(expected))
    require_equal(tensors.extras["values"].numpy(), rollout.extras["values"])
    tensors.obs[:] = 0.0  # belongs to the learner


def test_gaussian_actions(replay):
    agent = GaussianAgent()
    with ClusterEnv(EnvSpec(id="Pendulum-v1", max_episode_steps=13), 2, 2) as cluster:
        cluster.reset(seed=4)
        here = replay("Pendulum-v1", 4, 4, max_episode_steps=13)
        for _ in range(2):
            rollout = cluster.rollout(agent, 30)
            check_form(rollout, cluster, 30)
            here.check(rollout)
            check_agent(agent, rollout, SpaceTree(cluster.single_observation_space))
        assert rollout.truncations.any() and not rollout.terminations.any()
        assert here.num_finals


def test_dictionaries_and_multi_discrete_actions(replay):
    agent, kwargs = DictAgent(), {"backend": "serial", "env_kwargs": {"actions": "multi_discrete"}}
    with ClusterEnv(EveryKindEnv, 2, 3, **cluster_arguments(kwargs)) as cluster:
        cluster.reset(seed=4)
        here = replay(EveryKindEnv, 6, 4, **kwargs)
        for _ in range(2):
            rollout = cluster.rollout(agent, 20)
            check_form(rollout, cluster, 20)
            here.check(rollout)
            check_agent(agent, rollout, SpaceTree(cluster.single_observation_space))
        tensors = rollout.to_torch()
        assert tensors.obs["pair"][0].shape == (20, 6) and tensors.obs["image"].dtype is torch.uint8


def act_with_dicts(obs):
    return {"move": np.tile(obs["place"][:, :1], 2).clip(-1, 1), "jump": obs["mode"] % 2}, np.zeros(len(obs["mode"]))


def act_with_tuples(obs):
    rows = len(obs["mode"])
    actions = (obs["bits"][:, 0], (obs["image"][:, 0, 0, 0] / 255).astype(np.float32), obs["mode"])
    return actions, np.zeros(rows)


@pytest.mark.parametrize(("actions", "act"), [("dict", act_with_dicts), ("tuple", act_with_tuples)])
def test_nested_actions(actions, act, replay):
    kwargs = {"backend": "serial", "env_kwargs": {"actions": actions}}
    with ClusterEnv(EveryKindEnv, 2, 1, **cluster_arguments(kwargs)) as cluster:
        cluster.reset(seed=6)
        rollout = cluster.rollout(FunctionPolicy(act), 25)
        check_form(rollout, cluster, 25)
        replay(EveryKindEnv, 2, 6, **kwargs).check(rollout)
        *_, info = cluster.step(FunctionPolicy(act))
        assert SpaceTree(cluster.single_action_space).flatten(info["actions"])[0].shape[0] == 2


# -- functions, import paths, code of __main__ --


def right_if_leaning(obs):
    actions = (obs[:, 2] > 0).astype(np.int64)
    return actions, np.full(len(obs), -0.5)


def log_prob_of_leaning(obs, actions):
    return np.full(len(obs), -0.5)


def test_a_pair_of_functions(cartpoles, replay):
    cartpoles.reset(seed=2)
    rollout = cartpoles.rollout((right_if_leaning, log_prob_of_leaning), 60)
    replay("CartPole-v1", 6, 2).check(rollout)
    require_equal(rollout.actions, (rollout.obs[:, :, 2] > 0).astype(np.int64))
    assert (rollout.log_probs == -0.5).all() and rollout.log_probs.dtype == np.float32
    assert rollout.next_values is None and rollout.final_values is None and not rollout.extras
    with pytest.raises(UsageError, match="GAE needs values"):
        gae_of(rollout)
    *_, info = cartpoles.step((right_if_leaning, log_prob_of_leaning))
    assert info["actions"].shape == (6,)


def test_functions_without_probabilities(cartpoles):
    rollout = cartpoles.rollout(FunctionPolicy(lambda obs: np.zeros(len(obs), np.int64)), 3)
    assert rollout.log_probs is None
    assert rollout.to_torch().log_probs is None
    assert cartpoles.step(FunctionPolicy(lambda obs: np.zeros(len(obs), np.int64)))[4]["log_probs"] is None


def test_functions_with_weights(cartpoles):
    weights = {"limit": np.zeros(1, np.float32)}
    policy = FunctionPolicy(
        lambda weights, obs: (
            (obs[:, 2] > weights["limit"]).astype(np.int64),
            np.full(len(obs), weights["limit"][0]),
            {"twice": np.stack([obs[:, 0], obs[:, 0]], axis=1)},
        ),
        weights=weights,
        values=lambda weights, obs: obs[:, 0] + weights["limit"],
    )
    versions = []
    for limit in (0.0, -9.0, 9.0, 9.0):
        weights["limit"][:] = limit
        rollout = cartpoles.rollout(policy, 10)
        require_equal(rollout.actions, (rollout.obs[:, :, 2] > limit).astype(np.int64))
        assert (rollout.log_probs == limit).all()
        require_equal(rollout.extras["twice"][..., 1], rollout.obs[..., 0])
        np.testing.assert_allclose(rollout.next_values, rollout.next_obs[:, 0] + limit)
        versions.append(rollout.version)
    assert np.diff(versions).tolist() == [1, 1, 0]


def test_an_import_path_is_never_pickled(cartpoles, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("something was pickled")

    monkeypatch.setattr("cloudpickle.dumps", refuse)
    monkeypatch.setattr("cloudpickle.Pickler.dump", refuse)
    learner = CountingPolicy()
    learner.weights["threshold"][:] = 0.25
    spec = PolicySpec(
        "tests.support.agents.detach_agents:CountingPolicy", {"scale": 10.0, "names": ("b", "c")}, weights=learner
    )
    rollout = cartpoles.rollout(spec, 10)
    require_equal(rollout.actions, (rollout.obs[:, :, 0] * 10.0 > 0.25).astype(np.int64))
    assert rollout.extras["hidden"].dtype == np.float16 and rollout.extras["hidden"].shape == (10, 6, 2)
    np.testing.assert_allclose(rollout.log_probs, -1.25)
    frames = cartpoles._head.versions.code_frames()
    assert (
        len(frames) == 1
        and b"pickled" not in bytes(frames[0])
        and b"tests.support.agents.detach_agents:CountingPolicy" in frames[0]
    )
    learner.weights["threshold"][:] = 0.5
    np.testing.assert_allclose(cartpoles.rollout(spec, 2).log_probs, -1.5)


def test_a_torch_module_by_its_import_path(cartpoles):
    learner = DiscreteAgent(seed=77)
    rollout = cartpoles.rollout(
        PolicySpec("tests.support.agents.detach_agents:DiscreteAgent", {"seed": 1}, weights=learner), 5
    )
    check_agent(learner, rollout, SpaceTree(cartpoles.single_observation_space))


def test_a_policy_as_a_notebook_has_it(cartpoles):
    """A class of __main__ or of no module at all travels by value."""
    names = {"__name__": "__main__"}
    exec(
        textwrap.dedent(
            """
            import torch
            from torch.distributions import Categorical

            class CellAgent(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.actor = torch.nn.Linear(4, 2)

                def get_action_and_value(self, obs, action=None):
                    distribution = Categorical(logits=self.actor(obs))
                    action = distribution.sample() if action is None else action
                    return action, distribution.log_prob(action), distribution.entropy(), None
            """
        ),
        names,
    )
    agent = names["CellAgent"]()
    rollout = cartpoles.rollout(agent, 10)
    assert rollout.next_values is None
    check_agent(agent, rollout, SpaceTree(cartpoles.single_observation_space))


def test_a_policy_of_a_main_script(tmp_path):
    script = tmp_path / "learner.py"
    script.write_text(
        textwrap.dedent(
            """
            import numpy as np, envfleet

            print("runs once")
            SCALE = 3.0

            class Policy:
                def __init__(self):
                    self.limit = np.zeros(1)
                def act(self, obs):
                    return envfleet.Acted((SCALE * obs[:, 0] > self.limit).astype(int), self.log_prob(obs, None), {})
                def log_prob(self, obs, actions):
                    return np.full(len(obs), self.limit[0], np.float32)
                def values(self, obs):
                    return None
                def get_weights(self):
                    return {"limit": self.limit}
                def set_weights(self, weights):
                    self.limit = weights["limit"].copy()

            policy = Policy()
            with envfleet.ClusterEnv("CartPole-v1", 2, 1) as cluster:
                for limit in (0.0, 0.1):
                    policy.limit[:] = limit
                    rollout = cluster.rollout(policy, 8)
                    assert (rollout.actions == (3.0 * rollout.obs[:, :, 0] > limit)).all()
                    assert np.allclose(rollout.log_probs, limit)
            print("done")
            """
        )
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, env=environment)
    assert (ran.returncode, ran.stdout) == (0, "runs once\ndone\n"), ran.stderr


# -- versions --


def pulls(cluster):
    return [each.num_pulls for each in cluster.stats().workers]


def test_versions_and_pulls(cartpoles):
    agent = DiscreteAgent(seed=5)
    first = cartpoles.rollout(agent, 2)
    before = pulls(cartpoles)
    again = cartpoles.rollout(agent, 2)
    assert again.version == first.version and again.versions.tolist() == [first.version] * 2
    assert cartpoles.publish(agent) == first.version
    assert pulls(cartpoles) == before, "nothing has changed: nothing is pulled"
    for number in (1, 2, 3):
        with torch.no_grad():
            agent.actor.bias[0] += 0.5
        changed = cartpoles.rollout(agent, 2)
        assert changed.version == first.version + number and changed.lag == 0
        assert pulls(cartpoles) == [each + number for each in before]
        check_agent(agent, changed, SpaceTree(cartpoles.single_observation_space))
    stats = cartpoles.stats()
    assert stats.version == changed.version and all(each.version == changed.version for each in stats.workers)


def test_versions_published_between_rollouts_are_pulled_once(cartpoles):
    agent = DiscreteAgent(seed=6)
    version = cartpoles.rollout(agent, 2).version
    before = pulls(cartpoles)
    for _ in range(5):
        with torch.no_grad():
            agent.actor.bias[0] += 0.5
        version += 1
        assert cartpoles.publish(agent) == version
    rollout = cartpoles.rollout(agent, 2)
    assert rollout.versions.tolist() == [version, version]
    assert pulls(cartpoles) == [each + 1 for each in before]


def test_what_is_not_published_changes_nothing(cartpoles):
    """The learner changes its module in place all the time."""
    agent = DiscreteAgent(seed=7)
    frozen = deepcopy(agent)
    stream = cartpoles.stream(agent, 4)
    for number, rollout in enumerate(stream):
        check_agent(frozen, rollout, SpaceTree(cartpoles.single_observation_space))
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter += 1.0
        if number == 8:
            break
    stream.close()


def test_an_equal_agent_is_the_same_policy(cartpoles):
    agent = DiscreteAgent(seed=8)
    version = cartpoles.rollout(agent, 2).version
    other = DiscreteAgent(seed=9)
    rollout = cartpoles.rollout(other, 3)
    check_agent(other, rollout, SpaceTree(cartpoles.single_observation_space))
    assert rollout.version == version + 1
    rollout = cartpoles.rollout(agent, 3)
    check_agent(agent, rollout, SpaceTree(cartpoles.single_observation_space))
    assert rollout.version == version + 2


# -- streams --


def test_streamed_rollouts_are_of_the_version_they_say(cartpoles):
    """Log-probs tell with which weights the worker really acted."""
    agent, tree = DiscreteAgent(seed=11), SpaceTree(cartpoles.single_observation_space)
    copies, lags, versions_of = {}, [], {0: [], 1: []}
    stream = cartpoles.stream(agent, 3)
    copies[cartpoles.publish(agent)] = deepcopy(agent)
    first = min(copies)
    for number, rollout in enumerate(stream):
        worker = int(rollout.workers[0])
        check_form(rollout, cartpoles, 3, workers=(worker,))
        check_agent(copies[rollout.version], rollout, tree)
        lags.append(rollout.lag)
        versions_of[worker].append(rollout.version)
        for _ in range(number % 3):
            with torch.no_grad():
                agent.actor.weight += 0.1
            copies[cartpoles.publish(agent)] = deepcopy(agent)
        if number == 40:
            break
    stream.close()
    assert max(copies) == first + len(copies) - 1
    for versions in versions_of.values():
        assert versions == sorted(versions) and versions, "a worker never goes back"
    assert max(map(max, versions_of.values())) > first


def test_a_worker_is_never_more_than_its_credit_ahead(cartpoles):
    """A learner that does nothing for a while: what was collected ahead is bounded, and its lag grows."""
    agent = DiscreteAgent(seed=12)
    before = [each.num_rollouts for each in cartpoles.stats().workers]

    def num_collected():
        return [each.num_rollouts - start for each, start in zip(cartpoles.stats().workers, before, strict=True)]

    stream = cartpoles.stream(agent, 2)
    next(stream)
    taken = 1
    for _ in range(5):
        for _ in range(200):  # each turns the loop
            collected = num_collected()
        assert sum(collected) <= taken + 2 * 2
        assert all(each <= 2 + taken for each in collected)
        next(stream)
        taken += 1
    version = cartpoles.publish(agent)
    for _ in range(4):
        with torch.no_grad():
            agent.actor.bias += 1.0
        cartpoles.publish(agent)
    rollouts = [next(stream) for _ in range(12)]
    assert max(rollout.version for rollout in rollouts) == version + 4
    stream.close()


def test_lag_grows_while_the_learner_publishes(cartpoles):
    agent = DiscreteAgent(seed=13)
    stream = cartpoles.stream(agent, 40)
    version = next(stream).version
    lags = []
    for _ in range(8):
        for _ in range(3):
            with torch.no_grad():
                agent.actor.bias += 1.0
            cartpoles.publish(agent)
        rollout = next(stream)
        assert rollout.version <= cartpoles.stats().version
        assert 0 <= rollout.lag <= cartpoles.stats().version - version
        lags.append(rollout.lag)
    stream.close()
    assert max(lags) >= 1


def test_after_a_stream_all_goes_on(cartpoles, replay):
    agent = DiscreteAgent(seed=14)
    for leave in ("break", "close", "abandon"):
        stream = cartpoles.stream(agent, 5)
        for _ in stream:
            break
        if leave == "close":
            stream.close()
        if leave == "abandon":
            del stream
        cartpoles.reset(seed=20)
        rollout = cartpoles.rollout(agent, 12)
        replay("CartPole-v1", 6, 20).check(rollout)
        next(cartpoles.stream(agent, 3))
        cartpoles.rollout(agent, 3)
        next(cartpoles.stream(agent, 3))
        with envfleet.make("CartPole-v1", 6) as pool:
            require_equal(cartpoles.reset(seed=20), pool.reset(seed=20))
            require_equal(cartpoles.step(np.ones(6, np.int64)), pool.step(np.ones(6, np.int64)))
        next(cartpoles.stream(agent, 3))
        cartpoles.step(agent)


def test_streams_are_real(cartpoles, replay):
    agent, num_taken = DiscreteAgent(seed=15), {0: 0, 1: 0}
    cartpoles.reset(seed=30)
    here = {worker: replay("CartPole-v1", 3, 30 + 3 * worker) for worker in (0, 1)}
    for rollout in cartpoles.stream(agent, 7):
        worker = int(rollout.workers[0])
        here[worker].check(rollout)
        num_taken[worker] += 1
        if sum(num_taken.values()) == 30:
            break
    assert all(num_taken.values()) and all(each.num_finals for each in here.values())


def test_a_stream_of_another_length_or_agent(cartpoles):
    for num_steps, agent in ((2, DiscreteAgent()), (5, DiscreteAgent()), (5, DiscreteAgent(seed=3))):
        stream = cartpoles.stream(agent, num_steps)
        for _ in range(3):
            rollout = next(stream)
            assert rollout.num_steps == num_steps
            check_agent(agent, rollout, SpaceTree(cartpoles.single_observation_space))


# -- observations: stacked, big, few --


def act_at_random(obs):
    return np.random.default_rng(int(obs.ravel()[:100].sum())).integers(0, 3, len(obs))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_stacked_frames(compression, replay):
    if compression and importlib.util.find_spec("zstandard") is None:
        pytest.skip("zstandard is not installed")
    kwargs = {"backend": "serial"}
    with ClusterEnv(StackEnv, 2, 2, **cluster_arguments(kwargs, compression=compression)) as cluster:
        cluster.reset(seed=3)
        here = replay(StackEnv, 4, 3, **kwargs)
        for num_steps in (30, 1, 8):
            here.check(cluster.rollout(FunctionPolicy(act_at_random), num_steps))
        assert here.num_finals > 2
        plain_bytes = 39 * 4 * 4 * 84 * 84
        sent_bytes = sum(each.rollout_bytes for each in cluster.stats().workers)
        assert sent_bytes < 0.6 * plain_bytes, "frames that are in several stacks were sent several times"
        cluster.reset(seed=4)
        alone = {worker: replay(StackEnv, 2, 4 + 2 * worker, **kwargs) for worker in (0, 1)}
        for number, rollout in enumerate(cluster.stream(FunctionPolicy(act_at_random), 12)):
            alone[int(rollout.workers[0])].check(rollout)
            if number == 5:
                break


def test_stacks_that_one_worker_packs_and_the_other_does_not(replay):
    """Episodes of one step: whole stacks are cheaper there."""
    kwargs = {"backend": "serial", "env_kwargs": [{"length": 1}, {"length": 1000}]}
    with ClusterEnv(StackEnv, 2, 1, **cluster_arguments(kwargs)) as cluster:
        cluster.reset(seed=3)
        replay(StackEnv, 2, 3, **kwargs).check(cluster.rollout(FunctionPolicy(act_at_random), 10))


def test_big_observations(replay):
    policy = FunctionPolicy(lambda obs: (obs[:, 0] > 0.8).astype(np.int64))
    with ClusterEnv(BigEnv, 2, 1, backend="serial") as cluster:
        cluster.reset(seed=3)
        here = replay(BigEnv, 2, 3, backend="serial")
        here.check(cluster.rollout(policy, 6)).check(cluster.rollout(policy, 1))


def test_one_env_for_each_worker(replay):
    with ClusterEnv("CartPole-v1", 3, 1) as cluster:
        cluster.reset(seed=3)
        here, agent = replay("CartPole-v1", 3, 3), DiscreteAgent()
        for num_steps in (1, 1, 30):
            rollout = cluster.rollout(agent, num_steps)
            check_form(rollout, cluster, num_steps, workers=(0, 1, 2))
            here.check(rollout)


# -- misuse --


@pytest.mark.parametrize("num_steps", [0, -1, 1.5, "2", True])
def test_wrong_numbers_of_steps(cartpoles, num_steps):
    for call in (cartpoles.rollout, cartpoles.stream):
        with pytest.raises(UsageError, match="num_steps must be a whole number"):
            call(DiscreteAgent(), num_steps)


@pytest.mark.parametrize(
    "agent",
    [None, 7, "agent", object(), DiscreteAgent, (1, 2)],
    ids=["None", "a number", "text", "an object", "a class", "a tuple"],
)
def test_what_is_no_agent(cartpoles, agent):
    with pytest.raises(UsageError, match="an agent is a Policy"):
        cartpoles.rollout(agent, 3)
    cartpoles.rollout(DiscreteAgent(), 1)


def wrong_shape(obs):
    return np.zeros(len(obs) + 1, np.int64)


def wrong_dtype(obs):
    return np.full(len(obs), 0.5)


def raises(obs):
    raise RuntimeError("told to fail")


def changes_its_extras(obs):
    extras = {"a": obs[:, 0]} if (np.abs(obs[:, 1]) < 0.06).all() else {}
    return np.zeros(len(obs), np.int64), np.zeros(len(obs)), extras


def words_as_extras(obs):
    return np.zeros(len(obs), np.int64), np.zeros(len(obs)), {"words": np.array(["a"] * len(obs))}


def objects_as_extras(obs):
    return np.zeros(len(obs), np.int64), np.zeros(len(obs)), {"objects": np.array([{}] * len(obs))}


def too_few_log_probs(obs):
    return np.zeros(len(obs), np.int64), np.zeros(len(obs) - 1)


FAILING = [wrong_shape, wrong_dtype, raises, changes_its_extras, words_as_extras, objects_as_extras, too_few_log_probs]


@pytest.mark.parametrize("act", FAILING)
def test_a_policy_that_fails_is_named_and_the_cluster_goes_on(cartpoles, act):
    for collect in (cartpoles.rollout, lambda *arguments: next(cartpoles.stream(*arguments))):
        cartpoles.reset(seed=0)
        with pytest.raises((PolicyFailed, UsageError), match=r"worker \d .*(policy|extra)"):
            collect(FunctionPolicy(act), 5)
    cartpoles.reset(seed=0)
    check_agent(DiscreteAgent(), cartpoles.rollout(DiscreteAgent(), 5), SpaceTree(cartpoles.single_observation_space))


def test_a_number_of_numpy_is_a_number_of_steps(cartpoles):
    assert cartpoles.rollout(DiscreteAgent(), np.int64(3)).num_steps == 3


def tells_its_threads(obs):
    num_threads = torch.get_num_threads()
    return np.zeros(len(obs), np.int64), np.zeros(len(obs)), {"threads": np.full(len(obs), num_threads)}


def test_torch_on_the_workers_does_not_want_more_threads_than_there_are_cpus(cartpoles):
    num_threads = cartpoles.rollout(FunctionPolicy(tells_its_threads), 1).extras["threads"][0, ::3]
    assert num_threads.sum() <= max(usable_cpus(), cartpoles.num_workers)
