"""One Ray cluster for each file of this folder; a test leaves no worker, no actor and no placement group in it."""

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest

from tests.launchers.ray import ray_lab
from tests.support.run_folders import own_run_folders
from tests.support.waiting import is_running, wait_until

HAS_RAY = importlib.util.find_spec("ray") is not None


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_RAY and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason='ray is not installed: pip install "envfleet[ray]"'))


@pytest.fixture(scope="module")
def ray_nodes():
    """A cluster with two nodes of two CPUs, and this process connected to it."""
    with ray_lab.ray_cluster([2, 2]) as cluster:
        yield cluster


@pytest.fixture
def more_nodes(ray_nodes):
    """Adds nodes that go with the test."""
    with contextlib.ExitStack() as stack:

        def add(**settings):
            node = ray_nodes.add_node(**settings)
            stack.callback(lambda: node in ray_nodes.worker_nodes and ray_nodes.remove_node(node, allow_graceful=False))
            return node

        yield add


@pytest.fixture(autouse=True)
def run_folders():
    """In place of that for all launchers: see nothing_is_left."""


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path):
    """In place of the check for all tests: Ray keeps idle processes, for others, as it likes."""
    with own_run_folders(monkeypatch, for_children=False):  # Ray looks for its clusters in TMPDIR
        yield
    wait_until(lambda: not any(map(is_running, ray_lab.worker_processes())), "no worker's process is left")
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        wait_until(lambda: ray_lab.alive_actors() == [], "no actor is left")
        wait_until(lambda: ray_lab.groups() == [], "no placement group is left")
