"""A node that vanishes: its worker is replaced once its connection is lost, and not before."""

import os
import signal
import sys

import pytest

import envfleet
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.cluster_envs import Agent
from tests.support.inside import fleet
from tests.support.kubernetes.node_stand_in import NodeStandIn
from tests.support.kubernetes.tiny_jobs import ENDED, LONG_S, RUNNING, running, settings, wait_for, wait_for_another
from tests.support.waiting import is_running, wait_until

AGENT = Agent()


@pytest.fixture
def second_node(kube, request, tmp_path):
    certificate = None if kube.api is not None else request.getfixturevalue("real_servers").node_certificate
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(tmp_path)}
    node = NodeStandIn(kube.admin, "node-2", certificate=certificate, env=env)
    yield node
    kube.come_back(kube.node)
    node.close()
    kube.admin.delete(f"/api/v1/nodes/{node.name}")  # else the next test's pods may be put there


@pytest.mark.usefixtures("looks_often")
def test_the_worker_of_a_vanished_node_gets_another_job(kube, tmp_path, second_node):
    with running(kube, tmp_path, num_workers=1, node_selector={"kubernetes.io/hostname": "node-1"}) as job:
        wait_for(job, 0, RUNNING)
        pid = wait_for_another(tmp_path, 0, set())
        kube.vanish(kube.node)
        assert "its node does not report" in wait_for(job, 0, ENDED).detail
        assert is_running(pid) and len(kube.names("jobs")) == 1  # it is for the head to say whether it works
        job.restart(0)
        assert len(kube.names("jobs")) == 2
        kube.come_back(kube.node)
        wait_for_another(tmp_path, 0, {pid})
        wait_for(job, 0, RUNNING)


def test_a_node_that_only_the_api_server_misses(kube):
    """The worker's connection is open: it works on, whatever its node reports."""
    with cluster(kube, num_workers=1) as envs:
        envs.rollout(AGENT, 4)
        before = envs.stats().workers[0].pid
        kube.vanish(kube.node)
        wait_until(lambda: "does not report" in str(fleet(envs)[0].status), "the launcher has told", LONG_S)
        for _ in range(5):
            envs.rollout(AGENT, 4)
        assert envs.stats().workers[0].pid == before and len(kube.names("jobs")) == 1
        kube.come_back(kube.node)


def cluster(kube, **options):
    return envfleet.ClusterEnv(
        "CartPole-v1",
        options.pop("num_workers"),
        2,
        launcher=settings(kube),
        backend="serial",
        **cluster_arguments(options, address="tcp://127.0.0.1:0", timeout_s=180.0),
    )


def test_the_run_goes_on_elsewhere(kube, second_node):
    """As soon as the node is known to be gone; to wait for join_timeout_s would take longer than this test may."""
    with cluster(kube, num_workers=1, join_timeout_s=600.0, heartbeat_s=0.5, silence_s=3.0) as envs:
        envs.rollout(AGENT, 4)
        before = envs.stats().workers[0].pid
        node = kube.node if before in kube.node.pids() else second_node
        os.kill(before, signal.SIGSTOP)
        try:
            kube.vanish(node)
            wait_until(
                lambda: envs.stats().workers[0].stage == "present" and envs.stats().workers[0].pid != before,
                "another worker has come",
                180.0,
            )
            assert envs.rollout(AGENT, 4).rewards.shape == (4, 2)
        finally:
            os.kill(before, signal.SIGCONT)
            kube.come_back(node)
    assert kube.leftovers() == []
