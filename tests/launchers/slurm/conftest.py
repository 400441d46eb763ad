"""Real Slurms for the tests of this folder; each is started once, and ended whatever happens."""

import pytest

from tests.launchers.slurm.slurm_cluster import SlurmCluster, why_not


@pytest.fixture(autouse=True)
def run_folders():
    """In place of that for all launchers: jobs of Slurm see no folder of a test."""


def _started(has_networks):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    SlurmCluster.end_forgotten()
    cluster = SlurmCluster(has_networks)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def networked_slurm():
    yield from _started(has_networks=True)


@pytest.fixture(scope="session")
def loopback_slurm():
    yield from _started(has_networks=False)


def _for_one_test(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.chdir(tmp_path)
    yield cluster
    left = cluster.queue("--states=PENDING,RUNNING,SUSPENDED")
    cluster.empty()
    assert left == [], "jobs are left in the queue"


@pytest.fixture
def slurm(networked_slurm, monkeypatch, tmp_path):
    """Four nodes, each with an address of its own."""
    yield from _for_one_test(networked_slurm, monkeypatch, tmp_path)


@pytest.fixture
def plain_slurm(loopback_slurm, monkeypatch, tmp_path):
    """Four nodes on this machine's loopback interface."""
    yield from _for_one_test(loopback_slurm, monkeypatch, tmp_path)
