"""Every backend passes the conformance suite, in every autoreset mode."""

from functools import partial

import pytest

import envfleet
from envfleet.testing import CHECKS, check_leases

MAKERS = {
    "serial": partial(envfleet.make, backend="serial"),
    "process-1": partial(envfleet.make, backend="process", num_workers=1),
    "process-3": partial(envfleet.make, backend="process", num_workers=3),
}


@pytest.mark.parametrize("mode", list(envfleet.Autoreset), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("maker", MAKERS)
def test_conformance(maker, check, mode):
    check(MAKERS[maker], mode)


@pytest.mark.parametrize("maker", MAKERS)
def test_batches_are_leases(maker):
    check_leases(MAKERS[maker])
