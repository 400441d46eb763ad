"""Every backend passes the conformance suite, in every autoreset mode."""

from functools import partial

import pytest

import envfleet
from envfleet.pool.native import backend as native
from envfleet.testing import CHECKS, PYTHON_ENV_CHECKS, check_leases
from tests.support.checks_and_modes import checks_and_modes
from tests.support.native_makers import make_native

pytestmark = pytest.mark.usefixtures("quick_spawners")

PYTHON_MAKERS = {
    "serial": partial(envfleet.make, backend="serial"),
    "process-3": partial(envfleet.make, backend="process", num_workers=3),
}
NATIVE_MAKERS = {
    "native-1": partial(make_native, num_workers=1),
    "native-3": partial(make_native, num_workers=3),
}
MAKERS = PYTHON_MAKERS | NATIVE_MAKERS
one_child = partial(envfleet.make, backend="process", num_workers=1)
MARKS = {"process-3": pytest.mark.slow}


def marked(makers):
    return [pytest.param(maker, marks=MARKS.get(maker, ())) for maker in makers]


modes = pytest.mark.parametrize("mode", list(envfleet.Autoreset), ids=lambda mode: mode.name.lower())


@pytest.fixture(autouse=True)
def helpers_are_always_called(monkeypatch):
    """These envs are so quick that a native pool would leave its helper threads alone."""
    monkeypatch.setattr(native, "HELP_WORTH_S", 0.0)


@modes
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("maker", marked(MAKERS))
def test_conformance(maker, check, mode):
    check(MAKERS[maker], mode)


@modes
@pytest.mark.parametrize("check", PYTHON_ENV_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("maker", marked(PYTHON_MAKERS))
def test_conformance_of_python_envs(maker, check, mode):
    check(PYTHON_MAKERS[maker], mode)


@pytest.mark.long
@pytest.mark.parametrize(("check", "mode"), checks_and_modes(CHECKS + PYTHON_ENV_CHECKS))
def test_conformance_of_one_child_for_all_envs(check, mode):
    """Another number of children than above: each check in one mode, or in all if it depends on the mode."""
    check(one_child, mode)


@pytest.mark.parametrize("maker", marked(MAKERS))
def test_batches_are_leases(maker):
    check_leases(MAKERS[maker])


@pytest.mark.slow
def test_batches_of_one_child_are_leases():
    check_leases(one_child)
