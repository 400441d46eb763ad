"""EnvSpec: what it refuses, and how its arguments are merged with others."""

import numpy as np
import pytest

import envfleet
from envfleet import EnvSpec, Pixels, UsageError

WRONG = {
    "no steps": ({"max_episode_steps": 0}, "max_episode_steps must be a whole number of at least 1; got 0"),
    "negative": ({"max_episode_steps": -2}, "max_episode_steps must be a whole number of at least 1; got -2"),
    "fraction": ({"max_episode_steps": 1.5}, "max_episode_steps must be a whole number"),
    "pixels of another kind": ({"pixels": {"height": 84}}, r"pixels must be envfleet.Pixels\(\.\.\.\); got {'height'"),
    "pixels as text": ({"pixels": Pixels(), "render_mode": "ansi"}, "need render_mode='rgb_array'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_settings_are_refused_wherever_they_are_given(wrong):
    settings, message = WRONG[wrong]
    with pytest.raises(UsageError, match=message):
        EnvSpec(id="CartPole-v1", **settings)
    with pytest.raises(UsageError, match=message):
        envfleet.make("CartPole-v1", 2, **settings)


def test_numbers_of_numpy_become_plain():
    spec = EnvSpec(id="CartPole-v1", max_episode_steps=np.int64(7))
    assert type(spec.max_episode_steps) is int


def by_index(index):
    return {"b": index}


MERGED = {
    "dicts": ({"a": 1, "b": 1}, {"b": 2}, [{"a": 1, "b": 2}] * 2),
    "dict, list": ({"a": 1}, [{"b": 1}, {"b": 2}], [{"a": 1, "b": 1}, {"a": 1, "b": 2}]),
    "list, dict": ([{"a": 1}, {"a": 2}], {"b": 1}, [{"a": 1, "b": 1}, {"a": 2, "b": 1}]),
    "lists": ([{"a": 1}, {"a": 2}], [{"a": 3}, {}], [{"a": 3}, {"a": 2}]),
    "list, function": ([{"a": 1}, {"a": 2}], by_index, [{"a": 1, "b": 0}, {"a": 2, "b": 1}]),
    "dict, function": ({"a": 1}, by_index, [{"a": 1, "b": 0}, {"a": 1, "b": 1}]),
    "function, list": (by_index, [{"a": 1}, {"b": 9}], [{"b": 0, "a": 1}, {"b": 9}]),
}


@pytest.mark.parametrize("kinds", MERGED)
def test_arguments_are_merged_for_each_env(kinds):
    defaults, given, expected = MERGED[kinds]
    spec = EnvSpec.of(EnvSpec(id="CartPole-v1", kwargs=defaults), kwargs=given)
    assert [spec.kwargs_of(index, 2) for index in range(2)] == expected
    if "list" in kinds:
        with pytest.raises(UsageError, match="must have num_envs=3 entries; got 2"):
            spec.kwargs_of(0, 3)


def test_lists_of_different_lengths_cannot_be_merged():
    with pytest.raises(UsageError, match=r"EnvSpec\(kwargs=...\) has 2, env_kwargs has 3"):
        EnvSpec.of(EnvSpec(id="CartPole-v1", kwargs=[{}, {}]), kwargs=[{}, {}, {}])
