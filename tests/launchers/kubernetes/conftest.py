"""A cluster to test with: always our stand-in; also real servers if ENVFLEET_KUBE_BIN names a folder that has them."""

import os
import sys
import time
from pathlib import Path

import pytest

from envfleet.launchers.kubernetes import job as kubernetes_job
from tests.support.kubernetes.api_stand_in import ApiStandIn
from tests.support.kubernetes.kube_namespace import Kube, rules_of_deploy
from tests.support.kubernetes.node_stand_in import NodeStandIn
from tests.support.kubernetes.real_servers import PROGRAMS, RealServers

PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # "python" is this one


def pytest_collection_modifyitems(items):
    """Tests of this folder have deadlines of their own, which are longer than that for all on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def real_servers(tmp_path_factory):
    bin_folder = os.environ["ENVFLEET_KUBE_BIN"]
    missing = [each for each in PROGRAMS if not (Path(bin_folder) / each).is_file()]
    assert not missing, f"ENVFLEET_KUBE_BIN={bin_folder} lacks {', '.join(missing)}"
    servers = RealServers(Path(bin_folder), tmp_path_factory.mktemp("kube"))
    yield servers
    servers.close()


@pytest.fixture(scope="session", params=["stand-in", "real"] if os.environ.get("ENVFLEET_KUBE_BIN") else ["stand-in"])
def control_plane(request):
    """The real servers, or None: then each test has a stand-in of its own.

    Of the session, so that it is there before the fixtures of a test, which count the processes that it starts.
    """
    return request.getfixturevalue("real_servers") if request.param == "real" else None


@pytest.fixture
def kube(control_plane, tmp_path, monkeypatch):
    """A namespace with a node."""
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(tmp_path), "PATH": PATH}
    if control_plane is None:
        api = ApiStandIn()
        kube = Kube(api.admin, api.user("head"), tmp_path, api)
        node = NodeStandIn(api.admin, env=env)
    else:
        api = control_plane
        kube = Kube(api.admin, api.user("head"), tmp_path, None)
        node = NodeStandIn(api.admin, certificate=api.node_certificate, env=env)
    kube.node = node
    kube.allow(rules_of_deploy())
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    try:
        if control_plane is not None:  # pods cannot be made before
            deadline_s = time.monotonic() + 30
            while not kube.kind_exists(kube.path("serviceaccounts", "default")) and time.monotonic() < deadline_s:
                time.sleep(0.1)
        yield kube
    finally:
        if control_plane is None:
            node.close()
            api.close()
        else:
            kube.admin.delete(f"/api/v1/namespaces/{kube.namespace}")
            node.close()


@pytest.fixture
def head_environment(kube, tmp_path):
    """For a head that is a process of its own. If it is killed its folder is left, in one that goes with the test."""
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), "KUBECONFIG": str(kube.kubeconfig)}


@pytest.fixture
def looks_often(monkeypatch):
    """Ask the API server more often than in earnest."""
    monkeypatch.setattr(kubernetes_job, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(kubernetes_job, "LOOK_SOON_S", 0.1)
    monkeypatch.setattr(kubernetes_job, "LOOK_AGAIN_S", 0.2)
    monkeypatch.setattr(kubernetes_job, "WARNINGS_EVERY_S", 0.2)
