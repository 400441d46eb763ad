"""PolicySpec: what it takes, and what it refuses."""

import enum

import numpy as np
import pytest

import envfleet
from envfleet.policies.by_path import PolicySpec, imported


class Color(enum.StrEnum):
    RED = "red"


def test_plain_values_are_taken():
    kwargs = {"a": None, "b": [True, 1, 2.5, "text", b"bytes", (1, {"deep": [float("nan"), 2**64 - 1]})]}
    assert PolicySpec("package.module:name", kwargs).kwargs is kwargs


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"sizes": [64, {"x": np.zeros(2)}]}, r"kwargs\['sizes'\]\[1\]\['x'\] must be a plain .* got numpy.ndarray"),
        ({"lr": np.float64(1)}, r"kwargs\['lr'\] must be a plain value .* got numpy.float64"),
        ({"color": Color.RED}, r"got tests.policies.test_by_path.Color"),
        ({"f": print}, r"got builtins.builtin_function"),
        ({"d": {1: 2}}, r"keys of kwargs\['d'\] must be str; got 1"),
        ({"n": 2**64}, r"must fit into 64 bits"),
        ([("a", 1)], r"kwargs must be a mapping .* got list"),
    ],
)
def test_other_values_are_named(kwargs, words):
    with pytest.raises(envfleet.UsageError, match=words):
        PolicySpec("package.module:name", kwargs)


@pytest.mark.parametrize("path", ["package.module", ":name", "module:", "a:b:c", "", None, print])
def test_the_path_is_checked(path):
    with pytest.raises(envfleet.UsageError, match=r"must read 'package.module:name'"):
        PolicySpec(path)


def test_main_is_refused():
    with pytest.raises(envfleet.UsageError, match="workers cannot import '__main__:Agent'"):
        PolicySpec("__main__:Agent")


def test_nested_names_are_imported():
    assert imported("collections:OrderedDict.fromkeys")("a") == {"a": None}
