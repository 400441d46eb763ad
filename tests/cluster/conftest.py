"""Runs of this folder's tests leave no folder behind."""

import pytest

from tests.support.cluster.forked_workers import forked_workers
from tests.support.cluster.tun_wire import NoWire, require_tun
from tests.support.cluster.zero_copy import start_thread_of_pyzmq
from tests.support.run_folders import own_run_folders


@pytest.fixture(autouse=True)
def run_folders(monkeypatch, tmp_path):
    """See own_run_folders. (tmp_path is asked for only to be made before: pytest would make it in this folder.)"""
    with own_run_folders(monkeypatch) as folders:
        yield folders


@pytest.fixture(scope="session", autouse=True)
def thread_of_pyzmq():
    """The first test that sends large frames would seem to leave file descriptors behind."""
    start_thread_of_pyzmq()


@pytest.fixture
def tun_wire_or_skip():
    """For tests over a real tcp link: see tun_wire.py."""
    try:
        require_tun()
    except NoWire as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def quick_workers(request):
    """Workers of this module are forked, from a process that has imported it, and its `FORKED_WITH`.

    (Workers import a module that has the class of an env or of a policy.) See forked_workers.py.
    """
    modules = (*getattr(request.module, "FORKED_WITH", ()), request.module.__name__)
    with pytest.MonkeyPatch.context() as monkeypatch, forked_workers(monkeypatch, modules):
        yield
