from dataclasses import fields
from functools import partial

import numpy as np
import pytest

from envfleet import APS, EnvSpec, Every, Network, Pixels, PoolSettings, Timing
from envfleet.contract.checks import LARGEST, positive, positive_or_none, true_or_false, whole_number
from envfleet.contract.errors import UsageError
from envfleet.contract.pool_config import PoolConfig


@pytest.mark.parametrize("value", [1, 7, np.int64(7), np.uint8(7)], ids=repr)
def test_a_whole_number_is_returned_as_int(value):
    number = whole_number("k", value)
    assert type(number) is int
    assert number == value


@pytest.mark.parametrize("value", [0, -1, 1.0, np.float64(2.0), True, np.True_, "2", None, [1]], ids=repr)
def test_what_is_no_count_is_refused(value):
    with pytest.raises(UsageError) as refused:
        whole_number("k", value)
    assert str(refused.value) == f"k must be a whole number of at least 1; got {value!r}"


def test_limits_of_a_whole_number():
    assert whole_number("port", 0, at_least=0) == 0
    assert whole_number("port", 65535, at_most=65535) == 65535
    with pytest.raises(UsageError, match="port must be a whole number from 1 to 65535; got 65536"):
        whole_number("port", 65536, at_most=65535)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), float("inf")], ids=repr)
def test_positive_numbers_are_returned(value):
    assert positive("timeout_s", value) is value
    assert positive_or_none("timeout_s", value) is value


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "1"], ids=repr)
def test_what_is_not_positive_is_refused(value):
    with pytest.raises(UsageError) as refused:
        positive("timeout_s", value, hint=". Wait longer")
    assert str(refused.value) == f"timeout_s must be positive; got {value!r}. Wait longer"
    with pytest.raises(UsageError) as refused:
        positive_or_none("timeout_s", value)
    assert str(refused.value) == f"timeout_s must be positive, or None for no limit; got {value!r}"


def test_what_no_message_can_carry_is_refused():
    assert whole_number("k", LARGEST) == positive("k", LARGEST) == LARGEST
    assert whole_number("seed", 2**70, at_most=None) == 2**70
    assert positive("timeout_s", 2.0**70) == 2.0**70
    for check in (whole_number, positive, positive_or_none):
        with pytest.raises(UsageError, match=r"k must be less than 2\*\*63, or no message could carry it; got 11805"):
            check("k", 2**70)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[(PoolSettings, name) for name in ("num_workers", "max_env_restarts", "timeout_s")],
        *[(partial(PoolConfig, num_envs=2), name) for name in ("num_envs", "batch_size", "start_timeout_s")],
        *[(Timing, each.name) for each in fields(Timing)],
        (Network, "credit"),
        *[(APS, name) for name in ("max_lag", "num_probes", "measure_every")],
        (Every, "k"),
        (partial(EnvSpec, id="CartPole-v1"), "max_episode_steps"),
        *[(Pixels, name) for name in ("height", "width")],
    ],
)
def test_settings_that_travel_are_bounded(kind, name):
    with pytest.raises(UsageError, match=f"{name}.* must be "):
        kind(**{name: 2**70})


def test_none_only_where_it_means_no_limit():
    assert positive_or_none("timeout_s", None) is None
    with pytest.raises(UsageError, match="timeout_s must be positive; got None"):
        positive("timeout_s", None)


def test_switches_are_bools():
    assert true_or_false("grayscale", True) is True
    for value in (1, 0, None, "yes", np.True_):
        with pytest.raises(UsageError, match="grayscale must be True or False"):
            true_or_false("grayscale", value)
