"""RolloutForm: what of a worker's arrays is taken, what is refused, and how parts are joined."""

import numpy as np
import pytest
from gymnasium import spaces

from envfleet.cluster.info_choice import InfoChoice
from envfleet.cluster.wire.codec import BadMessage
from envfleet.cluster.wire.messages import RolloutInfos
from envfleet.cluster.wire.plain_values import to_plain
from envfleet.cluster.wire.rollouts import stacks
from envfleet.cluster.wire.rollouts.joining import join_rollouts, join_rows
from envfleet.cluster.wire.rollouts.rollout_form import MOST_EXTRAS, RolloutForm
from envfleet.contract.spaces import SpaceTree
from envfleet.testing.programs import require_equal

T, N = 4, 2  # steps, envs of a worker
OBS = spaces.Dict({"a": spaces.Box(-1, 1, (3,), np.float32), "b": spaces.Discrete(5)})
ACTIONS = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float64)))
STACK = spaces.Box(0, 255, (4, 20, 20), np.uint8)


@pytest.fixture
def form():
    return RolloutForm(SpaceTree(OBS), SpaceTree(ACTIONS), N)


def rollout_arrays(seed=0, obs_space=OBS):
    """Two episodes end: env 1 in step 0, env 0 in step 2."""
    random = np.random.default_rng(seed)
    arrays = {
        "action.0": random.integers(0, 3, (T, N)),
        "action.1": random.random((T, N, 2)),
        "rewards": random.random((T, N)),
        "terminated": np.zeros((T, N), np.bool_),
        "truncated": np.zeros((T, N), np.bool_),
        "log_probs": random.random((T, N)).astype(np.float32),
        "extra.values": random.random((T, N)).astype(np.float32),
        "extra.hidden": random.random((T, N, 5)).astype(np.float16),
        "final_steps": np.array([0, 2]),
        "final_envs": np.array([1, 0]),
        "episode_returns": random.random(2),
        "episode_lengths": np.array([3, 9]),
        "episode_seconds": random.random(2),
        "next_values": random.random(N).astype(np.float32),
        "final_values": random.random(2).astype(np.float32),
    }
    arrays["terminated"][0, 1] = arrays["truncated"][2, 0] = True
    if obs_space is OBS:
        arrays |= {
            "obs.0": random.random((T + 1, N, 3)).astype(np.float32),
            "obs.1": random.integers(0, 5, (T + 1, N)),
            "final_obs.0": random.random((2, 3)).astype(np.float32),
            "final_obs.1": random.integers(0, 5, 2),
        }
    return arrays


def row_arrays(seed=0):
    random = np.random.default_rng(seed)
    return {
        "obs.0": random.random((N, 3)).astype(np.float32),
        "obs.1": random.integers(0, 5, N),
        "rewards": random.random(N),
        "terminated": random.random(N) < 0.5,
        "truncated": random.random(N) < 0.5,
    }


# -- rollouts that are refused --


def test_a_good_one_is_taken(form):
    arrays = rollout_arrays()
    collected = form.check_rollout(1, 7, 2, T, arrays)
    assert (collected.worker, collected.version, collected.lag, collected.num_steps) == (1, 7, 2, T)
    for optional in (("log_probs",), ("next_values", "final_values"), ("extra.values",), ("extra.hidden",)):
        form.check_rollout(0, 0, 0, T, {name: array for name, array in arrays.items() if name not in optional})


REQUIRED = [name for name in rollout_arrays() if name not in ("log_probs", "next_values") and "extra" not in name]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_array(form, name):
    arrays = rollout_arrays()
    del arrays[name]
    with pytest.raises(BadMessage, match="final_|missing" if name == "final_steps" else f"{name}.*is missing"):
        form.check_rollout(0, 0, 0, T, arrays)


@pytest.mark.parametrize(
    ("asked", "masks", "problem"),
    [
        (None, np.ones((T, N, 3), np.bool_), "came; no action masks were asked for"),
        ("allowed", None, "is missing; the masks in 'allowed' were asked for"),
        ("allowed", np.ones((T, N + 1, 3), np.bool_), "must be bool"),
        ("allowed", np.ones((T, N, 3), np.uint8), "must be bool"),
        ("allowed", np.ones(T, np.bool_), "must be bool"),
    ],
)
def test_action_masks_are_those_that_were_asked_for(form, asked, masks, problem):
    arrays = rollout_arrays() | ({} if masks is None else {"action_mask": masks})
    collected = form.check_rollout(0, 0, 0, T, arrays)
    with pytest.raises(BadMessage, match=f"'action_mask' {problem}"):
        form.with_infos(collected, RolloutInfos(), InfoChoice(action_mask=asked))


def test_values_of_finals_without_those_of_the_last_observation(form):
    """Nobody sends that; it must not be half used."""
    arrays = rollout_arrays()
    del arrays["next_values"]
    try:
        joined = join_rollouts(form, [form.check_rollout(0, 0, 0, T, arrays)])
    except BadMessage:
        return
    assert joined.next_values is None and joined.final_values is None


@pytest.mark.parametrize("name", [name for name in rollout_arrays() if not name.startswith("extra.")])
def test_another_dtype(form, name):
    arrays = rollout_arrays()
    arrays[name] = arrays[name].astype(np.float32 if arrays[name].dtype != np.float32 else np.float64)
    with pytest.raises(BadMessage, match=f"'{name}' must be"):
        form.check_rollout(0, 0, 0, T, arrays)


@pytest.mark.parametrize("change", ["longer", "shorter", "one more axis", "one less axis", "empty"])
@pytest.mark.parametrize("name", rollout_arrays())
def test_another_shape(form, name, change):
    arrays = rollout_arrays()
    array = arrays[name]
    arrays[name] = {
        "longer": lambda: np.concatenate([array, array[:1]]),
        "shorter": lambda: array[:-1],
        "one more axis": lambda: array[..., None],
        "one less axis": lambda: array[0],
        "empty": lambda: array[:0],
    }[change]()
    if name.startswith("extra.") and change == "one more axis":
        form.check_rollout(0, 0, 0, T, arrays)  # extras have any shape after [T, N]
        return
    if name == "extra.values" and change == "one less axis":
        arrays[name] = np.float32(1.0).reshape(())
    with pytest.raises(BadMessage, match=r"must be|outside"):
        form.check_rollout(0, 0, 0, T, arrays)


@pytest.mark.parametrize(
    ("name", "values"),
    [("final_steps", [0, T]), ("final_steps", [-1, 0]), ("final_envs", [0, N]), ("final_envs", [-1, 0]),
     ("final_steps", [0, 2**62]), ("final_envs", [-(2**63), 0])],
)  # fmt: skip
def test_places_outside(form, name, values):
    arrays = rollout_arrays()
    arrays[name] = np.array(values)
    with pytest.raises(BadMessage, match=f"{name}.*outside"):
        form.check_rollout(0, 0, 0, T, arrays)


def test_another_number_of_steps_than_was_ordered(form):
    with pytest.raises(BadMessage):
        form.check_rollout(0, 0, 0, T + 1, rollout_arrays())


def test_too_many_extras(form):
    arrays = rollout_arrays()
    arrays |= {f"extra.{index}": np.zeros((T, N)) for index in range(MOST_EXTRAS - 2)}
    form.check_rollout(0, 0, 0, T, arrays)
    arrays["extra.more"] = np.zeros((T, N))
    with pytest.raises(BadMessage, match=f"at most {MOST_EXTRAS}"):
        form.check_rollout(0, 0, 0, T, arrays)


# -- what a policy remembers, and shows of itself --

P = 3  # probes


@pytest.fixture
def probed_form():
    return RolloutForm(SpaceTree(OBS), SpaceTree(ACTIONS), N, P)


def policy_arrays(num_probes=P):
    random = np.random.default_rng(4)
    return {
        "state.h": random.random((N, 2, 5)).astype(np.float32),
        "state.count": np.arange(N),
        "probe_state.h": random.random((num_probes, 2, 5)).astype(np.float32),
        "probe_state.count": np.arange(num_probes),
        "probe.mean": random.random((num_probes, 2)).astype(np.float32),
        "probe.log_std": random.random((num_probes, 2)),
    }


def test_what_a_policy_shows_is_taken(probed_form):
    arrays = rollout_arrays() | policy_arrays()
    assert probed_form.check_rollout(0, 0, 0, T, arrays, "gaussian").distribution == "gaussian"
    assert probed_form.check_rollout(0, 0, 0, T, rollout_arrays(), None).distribution is None
    many = RolloutForm(SpaceTree(OBS), SpaceTree(ACTIONS), N, 1000)
    many.check_rollout(0, 0, 0, T, rollout_arrays() | policy_arrays(T * N), "gaussian")


@pytest.mark.parametrize("change", ["longer", "shorter", "empty", "no axis"])
@pytest.mark.parametrize("name", policy_arrays())
def test_another_number_of_rows(probed_form, name, change):
    arrays = rollout_arrays() | policy_arrays()
    array = arrays[name]
    arrays[name] = {
        "longer": lambda: np.concatenate([array, array[:1]]),
        "shorter": lambda: array[:-1],
        "empty": lambda: array[:0],
        "no axis": lambda: array.reshape(-1)[0].reshape(()),
    }[change]()
    rows = N if name.startswith("state.") else P
    with pytest.raises(BadMessage, match=f"'{name.partition('.')[2]}' of the policy must have {rows} rows"):
        probed_form.check_rollout(0, 0, 0, T, arrays, "gaussian")


def test_nothing_is_shown_where_nobody_asked(form):
    with pytest.raises(BadMessage, match="must have 0 rows"):
        form.check_rollout(0, 0, 0, T, rollout_arrays() | policy_arrays(), "gaussian")


@pytest.mark.parametrize("kind", ["categorical", "multi_categorical", "bernoulli", "", "Gaussian", "no such kind"])
def test_another_kind_of_distribution(probed_form, kind):
    with pytest.raises(BadMessage, match=f"no distribution of kind '{kind}' consists of log_std, mean"):
        probed_form.check_rollout(0, 0, 0, T, rollout_arrays() | policy_arrays(), kind)


@pytest.mark.parametrize("names", [(), ("mean",), ("mean", "log_std", "more")])
def test_a_distribution_of_other_parts(probed_form, names):
    arrays = rollout_arrays() | {f"probe.{name}": np.zeros((P, 2)) for name in names}
    with pytest.raises(BadMessage, match="no distribution of kind 'gaussian' consists of"):
        probed_form.check_rollout(0, 0, 0, T, arrays, "gaussian")


@pytest.mark.parametrize("dtype", [np.int64, np.float16, np.bool_, np.uint8])
def test_a_distribution_of_another_dtype(probed_form, dtype):
    arrays = rollout_arrays() | policy_arrays()
    arrays["probe.mean"] = arrays["probe.mean"].astype(dtype)
    with pytest.raises(BadMessage, match="float32 or float64"):
        probed_form.check_rollout(0, 0, 0, T, arrays, "gaussian")


@pytest.mark.parametrize(
    ("name", "shape"), [("probe.log_std", (P,)), ("probe.log_std", (P, 3)), ("probe.mean", (P, 2, 1))]
)
def test_parts_of_a_distribution_that_do_not_fit_together(probed_form, name, shape):
    arrays = rollout_arrays() | policy_arrays() | {name: np.zeros(shape)}
    with pytest.raises(BadMessage, match=r"two dimensions|must be alike"):
        probed_form.check_rollout(0, 0, 0, T, arrays, "gaussian")


@pytest.mark.parametrize(
    "wrong", [{"h": np.zeros((P, 5, 2), np.float32)}, {"h": np.zeros((P, 2, 5))}, {"other": np.zeros(P)}]
)
def test_probed_states_that_are_not_like_the_others(probed_form, wrong):
    arrays = rollout_arrays() | policy_arrays() | {f"probe_state.{name}": rows for name, rows in wrong.items()}
    with pytest.raises(BadMessage, match="state of probed rows must be like that of all"):
        probed_form.check_rollout(0, 0, 0, T, arrays, "gaussian")


@pytest.mark.parametrize("prefix", ["state", "probe"])
def test_too_many_arrays_of_a_policy(probed_form, prefix):
    rows = N if prefix == "state" else P
    arrays = rollout_arrays() | {f"{prefix}.{index}": np.zeros(rows) for index in range(MOST_EXTRAS)}
    probed_form.check_rollout(0, 0, 0, T, arrays)
    arrays[f"{prefix}.more"] = np.zeros(rows)
    with pytest.raises(BadMessage, match=f"at most {MOST_EXTRAS}"):
        probed_form.check_rollout(0, 0, 0, T, arrays)


def test_states_stand_side_by_side(probed_form):
    parts = [rollout_arrays() | policy_arrays(), rollout_arrays() | policy_arrays()]
    parts[1]["state.h"] = parts[1]["state.h"] + 1
    rollout = join_rollouts(
        probed_form, [probed_form.check_rollout(w, 0, 0, T, each, "gaussian") for w, each in enumerate(parts)]
    )
    assert rollout.states.keys() == {"h", "count"} and rollout.states["count"].tolist() == [0, 1, 0, 1]
    require_equal(rollout.states["h"], np.concatenate([each["state.h"] for each in parts]))
    assert not any(name.startswith(("probe", "state")) for name in rollout.extras)


def test_states_that_only_some_parts_have_are_left_out(probed_form):
    bare = probed_form.check_rollout(1, 0, 0, T, rollout_arrays())
    full = probed_form.check_rollout(0, 0, 0, T, rollout_arrays() | policy_arrays(), "gaussian")
    assert join_rollouts(probed_form, [bare]).states is None
    assert join_rollouts(probed_form, [full, bare]).states is None
    assert join_rollouts(probed_form, [bare, full]).states is None


# -- numbers that cannot be, and those that an env may have --


def test_actions(form):
    """Choices must be among those there are; quantities may be anything but NaN, as those of a Gaussian policy are."""
    arrays = rollout_arrays()
    arrays["action.1"][2, 1] = [-7.5, np.inf]
    form.check_rollout(0, 0, 0, T, arrays)
    arrays["action.1"][2, 1] = np.nan
    with pytest.raises(BadMessage, match=r"actions\[1\] of step 2, env 1 is \[nan nan\]"):
        form.check_rollout(0, 0, 0, T, arrays)
    arrays = rollout_arrays()
    arrays["action.0"][3, 0] = 3
    with pytest.raises(BadMessage, match=r"actions\[0\] of step 3, env 0 is 3, which Discrete\(3\) does not have"):
        form.check_rollout(0, 0, 0, T, arrays)


@pytest.mark.parametrize("name", ["terminated", "truncated", "extra.flag", "state.flag"])
def test_booleans_of_a_rollout(form, name):
    arrays = rollout_arrays() | {"extra.flag": np.zeros((T, N), np.bool_), "state.flag": np.zeros((N, 3), np.bool_)}
    form.check_rollout(0, 0, 0, T, arrays)
    arrays[name].view(np.uint8)[1, 1] = 3
    with pytest.raises(BadMessage, match=f"'({name.removeprefix('state.')})'.*neither 0 nor 1"):
        form.check_rollout(0, 0, 0, T, arrays)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_booleans_of_rows(form, name):
    arrays = row_arrays()
    arrays[name].view(np.uint8)[1] = 2
    with pytest.raises(BadMessage, match=f"'{name}' of bool"):
        form.check_rows(0, {}, arrays)


def test_suspect_rows(form):
    arrays = row_arrays()
    assert not form.check_rows(0, {}, arrays).suspects
    arrays["obs.0"][1, 2] = np.nan
    arrays["rewards"][1] = np.nan
    arrays["obs.1"][0] = 5
    found = form.check_rows(0, {}, arrays).suspects
    assert (found.num_nan, found.nan_env, found.num_out_of_bounds, found.out_of_bounds_env) == (1, 1, 1, 0)


@pytest.mark.parametrize("is_packed", [True, False])
def test_suspect_stacks(is_packed):
    """Each frame counts where it is new."""
    space = spaces.Box(0, 1, (4, 20, 20), np.float32)
    form = RolloutForm(SpaceTree(space), SpaceTree(ACTIONS), N)
    frames = np.random.default_rng(0).random((T + 4, N, 20, 20)).astype(np.float32)
    frames[5, 1, 3, 3] = np.nan  # it is new in obs[2], the observation after step 1
    frames[6, 0, 0, 0] = 1.5
    obs = np.stack([np.stack([frames[t : t + 4, env] for env in range(N)]) for t in range(T + 1)])
    sent = stacks.pack("obs.0", obs) if is_packed else {"obs.0": obs}
    arrays = rollout_arrays(0, space) | sent | {"final_obs.0": np.zeros((2, 4, 20, 20), np.float32)}
    found = form.check_rollout(0, 0, 0, T, arrays).suspects
    assert (found.nan_env, found.out_of_bounds_env) == (1, 0)
    # Whole stacks have the frame as often as it is in them.
    assert (found.num_nan, found.num_out_of_bounds) == ((1, 1) if is_packed else (3, 2))


# -- rows --


def test_rows(form):
    info = {"count": np.arange(N), "_count": np.ones(N, np.bool_)}
    rows = form.check_rows(1, to_plain(info), row_arrays())
    assert rows.worker == 1
    require_equal(rows.info, info)


@pytest.mark.parametrize("name", row_arrays())
def test_wrong_rows(form, name):
    good = row_arrays()
    without = {other: array for other, array in good.items() if other != name}
    wrong = [good[name].astype(np.float16), good[name][:1], good[name][None], np.zeros(0)]
    for arrays in [without, *({**good, name: each} for each in wrong)]:
        with pytest.raises(BadMessage, match=name):
            form.check_rows(0, {}, arrays)


@pytest.mark.parametrize(
    "info", [None, 3, ["list"], ["tuple", 1], ["no such kind"], {"a": ["array", "object", [1], b""]}]
)
def test_infos_that_are_none(form, info):
    with pytest.raises(BadMessage):
        form.check_rows(0, info, row_arrays())


# -- joining --


def test_one_part(form):
    arrays = rollout_arrays()
    rollout = join_rollouts(form, [form.check_rollout(3, 5, 1, T, arrays)])
    require_equal(rollout.rewards, arrays["rewards"])
    require_equal(rollout.obs["a"], arrays["obs.0"][:T])
    require_equal(rollout.next_obs["a"], arrays["obs.0"][T])
    assert rollout.env_ids.tolist() == [6, 7] and rollout.workers.tolist() == [3]
    assert rollout.final_envs.tolist() == [1, 0]
    assert (rollout.version, rollout.lag) == (5, 1)


def test_large_arrays_of_one_part_are_not_copied():
    space = spaces.Box(-1, 1, (300, 400), np.float32)
    form = RolloutForm(SpaceTree(space), SpaceTree(ACTIONS), N)
    arrays = rollout_arrays(0, space)
    arrays |= {"obs.0": np.ones((T + 1, N, 300, 400), np.float32), "final_obs.0": np.ones((2, 300, 400), np.float32)}
    rollout = join_rollouts(form, [form.check_rollout(0, 0, 0, T, arrays)])
    assert np.shares_memory(rollout.obs, arrays["obs.0"]) and np.shares_memory(rollout.next_obs, arrays["obs.0"])


def test_parts_stand_side_by_side(form):
    parts = [rollout_arrays(seed) for seed in (1, 2, 3)]
    workers, versions, lags = (0, 1, 4), (7, 5, 6), (0, 2, 1)
    checked = [
        form.check_rollout(w, v, lag, T, arrays)
        for w, v, lag, arrays in zip(workers, versions, lags, parts, strict=True)
    ]
    rollout = join_rollouts(form, checked)
    assert (rollout.num_steps, rollout.num_envs, rollout.version, rollout.lag) == (T, 6, 5, 2)
    assert rollout.env_ids.tolist() == [0, 1, 2, 3, 8, 9]
    assert rollout.workers.tolist() == [0, 1, 4] and rollout.versions.tolist() == [7, 5, 6]
    for position, arrays in enumerate(parts):
        rows = slice(position * N, (position + 1) * N)
        require_equal(rollout.obs["a"][:, rows], arrays["obs.0"][:T])
        require_equal(rollout.next_obs["b"][rows], arrays["obs.1"][T])
        require_equal(rollout.actions[0][:, rows], arrays["action.0"])
        require_equal(rollout.rewards[:, rows], arrays["rewards"])
        require_equal(rollout.log_probs[:, rows], arrays["log_probs"])
        require_equal(rollout.extras["hidden"][:, rows], arrays["extra.hidden"])
        require_equal(rollout.next_values[rows], arrays["next_values"])
        assert rollout.final_values[0, rows.start + 1] == arrays["final_values"][0]
        assert rollout.final_values[2, rows.start] == arrays["final_values"][1]
        finals = slice(position * 2, position * 2 + 2)
        require_equal(rollout.final_obs["a"][finals], arrays["final_obs.0"])
        require_equal(rollout.episode_lengths[finals], arrays["episode_lengths"])
        assert rollout.final_envs[finals].tolist() == [rows.start + 1, rows.start]
    assert np.count_nonzero(rollout.final_values) == 6 and rollout.final_values.dtype == np.float32
    assert rollout.terminations.sum() == rollout.truncations.sum() == 3


def test_what_only_some_parts_have_is_left_out(form):
    full, bare = rollout_arrays(1), rollout_arrays(2)
    for name in ("log_probs", "next_values", "final_values", "extra.values"):
        del bare[name]
    bare["extra.hidden"] = bare["extra.hidden"].astype(np.float32)
    rollout = join_rollouts(form, [form.check_rollout(i, 0, 0, T, each) for i, each in enumerate((full, bare))])
    assert rollout.log_probs is None and rollout.next_values is None and rollout.final_values is None
    assert not rollout.extras


def test_no_episode_ended(form):
    arrays = rollout_arrays()
    for name in ("final_steps", "final_envs", "episode_returns", "episode_lengths", "episode_seconds", "final_values"):
        arrays[name] = arrays[name][:0]
    for name in ("final_obs.0", "final_obs.1"):
        arrays[name] = arrays[name][:0]
    arrays["terminated"][:] = arrays["truncated"][:] = False
    rollout = join_rollouts(form, [form.check_rollout(i, 0, 0, T, arrays) for i in (0, 1)])
    assert rollout.final_obs["a"].shape == (0, 3) and not rollout.final_values.any()


def test_rows_are_joined_and_may_be_written(form):
    parts = [form.check_rows(w, {"n": ["array", "int64", [2], bytes(16)]}, row_arrays(w)) for w in (0, 1)]
    obs, rewards, terminated, truncated, info = join_rows(form, parts)
    require_equal(obs["a"], np.concatenate([row_arrays(0)["obs.0"], row_arrays(1)["obs.0"]]))
    require_equal(rewards, np.concatenate([row_arrays(0)["rewards"], row_arrays(1)["rewards"]]))
    require_equal(info["n"], np.zeros(4, np.int64))
    for array in (obs["a"], obs["b"], rewards, terminated, truncated):
        assert array.flags.writeable
    frozen = row_arrays()
    for array in frozen.values():
        array.flags.writeable = False
    assert join_rows(form, [form.check_rows(0, {}, frozen)])[0]["a"].flags.writeable


# -- stacks --


@pytest.fixture
def stack_form():
    return RolloutForm(SpaceTree(STACK), SpaceTree(ACTIONS), N)


def stack_arrays(seed=0, is_packed=True, finals_are_packed=True):
    """Both the plain and what is sent."""
    random = np.random.default_rng(seed)
    frames = random.integers(0, 256, (T + 4, N, 20, 20)).astype(np.uint8)
    obs = np.stack([np.stack([frames[t : t + 4, env] for env in range(N)]) for t in range(T + 1)])
    arrays = rollout_arrays(seed, STACK)
    steps, envs = arrays["final_steps"], arrays["final_envs"]
    finals = np.concatenate([obs[steps, envs][:, 1:], random.integers(0, 256, (2, 1, 20, 20)).astype(np.uint8)], axis=1)
    sent = stacks.pack("obs.0", obs) if is_packed else {"obs.0": obs}
    packed = stacks.pack_finals("final_obs.0", finals, obs[steps, envs]) if finals_are_packed else None
    assert sent is not None
    sent = {**arrays, **sent, **(packed or {"final_obs.0": finals})}
    return obs, finals, sent


@pytest.mark.parametrize("finals_are_packed", [True, False])
@pytest.mark.parametrize("packed", [(True,), (False,), (True, True), (True, False), (False, True, True)])
def test_stacks_are_unpacked(stack_form, packed, finals_are_packed):
    made = [stack_arrays(seed, is_packed, finals_are_packed) for seed, is_packed in enumerate(packed)]
    if len(packed) == 1 and finals_are_packed:
        assert any("/newest" in name for name in made[0][2])
    rollout = join_rollouts(
        stack_form, [stack_form.check_rollout(w, 0, 0, T, sent) for w, (_, _, sent) in enumerate(made)]
    )
    require_equal(rollout.obs, np.concatenate([obs[:T] for obs, _, _ in made], axis=1))
    require_equal(rollout.next_obs, np.concatenate([obs[T] for obs, _, _ in made]))
    require_equal(rollout.final_obs, np.concatenate([finals for _, finals, _ in made]))


PACKED = [name for name in stack_arrays()[2] if "/" in name]


@pytest.mark.parametrize("change", ["missing", "dtype", "shape"])
@pytest.mark.parametrize("name", PACKED)
def test_wrong_stacks(stack_form, name, change):
    """Whether at the check or when they are unpacked: BadMessage, and nothing else."""
    _, _, sent = stack_arrays()
    if change == "missing":
        del sent[name]
    elif change == "dtype":
        sent[name] = sent[name].astype(np.float32)
    else:
        sent[name] = sent[name][None]
    with pytest.raises(BadMessage):
        join_rollouts(stack_form, [stack_form.check_rollout(0, 0, 0, T, sent)])


@pytest.mark.parametrize("name", ["obs.0", "final_obs.0"])
def test_neither_packed_nor_plain(stack_form, name):
    _, _, sent = stack_arrays()
    sent = {key: array for key, array in sent.items() if not key.startswith(f"{name}/")}
    with pytest.raises(BadMessage):
        join_rollouts(stack_form, [stack_form.check_rollout(0, 0, 0, T, sent)])


def test_what_is_no_stack_must_be_plain(form):
    _, _, sent = stack_arrays()
    arrays = {name: array for name, array in rollout_arrays().items() if name != "obs.0"}
    arrays |= {name: array for name, array in sent.items() if "/" in name}
    with pytest.raises(BadMessage, match=r"'obs\.0' is missing"):
        form.check_rollout(0, 0, 0, T, arrays)


# -- columns of the envs that were ready first --


@pytest.fixture
def wide_form():
    """A worker has 5 envs; its rollouts have N of them."""
    return RolloutForm(SpaceTree(OBS), SpaceTree(ACTIONS), 5, num_probes=3)


def columns(env_ids=(1, 4), versions=(6, 8)):
    return {"env_ids": np.array(env_ids, np.int64), "versions": np.array(versions, np.int64)}


def test_columns_have_their_own_versions(wide_form):
    arrays = rollout_arrays()
    arrays["rewards"][1, 1] = np.nan
    collected = wide_form.check_rollout(2, 8, 1, T, arrays | columns(), num_columns=N)
    assert collected.suspects.nan_env == 4, "the env, not the column"
    other = wide_form.check_rollout(0, 7, 2, T, rollout_arrays(1) | columns((0, 3), (7, 7)), num_columns=N)
    rollout = join_rollouts(wide_form, [other, collected])
    assert rollout.env_ids.tolist() == [0, 3, 11, 14]
    assert rollout.parts.tolist() == [0, 0, 1, 2]
    assert rollout.workers.tolist() == [0, 2, 2]
    assert rollout.versions.tolist() == [7, 6, 8] and rollout.lags.tolist() == [2, 3, 1]
    assert (rollout.version, rollout.lag) == (6, 3)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"env_ids": (4, 1)}, "'env_ids' must have 2 of the worker's 5 envs, in ascending order"),
        ({"env_ids": (1, 1)}, "'env_ids' must have"),
        ({"env_ids": (-1, 1)}, "'env_ids' must have"),
        ({"env_ids": (1, 5)}, "'env_ids' must have"),
        ({"env_ids": (1, 2, 3)}, "'env_ids' must be int64"),
        ({"versions": (6, 7)}, "'versions' must have 8 as its newest version"),
        ({"versions": (6, 9)}, "'versions' must have 8"),
        ({"versions": (-1, 8)}, "'versions' must have 8"),
        ({"versions": (8,)}, "'versions' must be int64"),
    ],
)
def test_wrong_columns_are_refused(wide_form, wrong, problem):
    with pytest.raises(BadMessage, match=problem):
        wide_form.check_rollout(0, 8, 0, T, rollout_arrays() | columns(**wrong), num_columns=N)


def test_only_columns_of_the_newest_version_are_probed(wide_form):
    """One column of T rows is new: there can be no more probes than that, and no fewer than 3."""
    arrays = rollout_arrays() | columns()
    shown = {"probe.mean": np.zeros((3, 2), np.float32), "probe.log_std": np.zeros((3, 2), np.float32)}
    wide_form.check_rollout(0, 8, 0, T, arrays | shown, "gaussian", num_columns=N)
    many = RolloutForm(SpaceTree(OBS), SpaceTree(ACTIONS), 5, num_probes=64)
    shown = {name: np.zeros((T, 2), np.float32) for name in shown}
    many.check_rollout(0, 8, 0, T, arrays | shown, "gaussian", num_columns=N)
    with pytest.raises(BadMessage, match=f"must have {2 * T} rows"):
        many.check_rollout(0, 8, 0, T, arrays | columns(versions=(8, 8)) | shown, "gaussian", num_columns=N)
