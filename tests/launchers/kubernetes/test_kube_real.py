"""Whether the tests of this folder have met a real API server."""

import os

import pytest


@pytest.mark.skipif(
    not os.environ.get("ENVFLEET_KUBE_BIN"),
    reason="set ENVFLEET_KUBE_BIN to a folder with etcd, kube-apiserver, kube-controller-manager and kube-scheduler: "
    "then all tests of tests/launchers/kubernetes run against these, too",
)
def test_the_servers_are_real(real_servers):
    assert "gitVersion" in real_servers.admin.get("/version")
