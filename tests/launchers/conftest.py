"""An sshd for all tests of this folder, and no run that leaves its folder behind."""

import os

import pytest

from tests.launchers.ssh.sshd import running_sshd
from tests.support.run_folders import own_run_folders


@pytest.fixture(autouse=True)
def run_folders(monkeypatch, tmp_path):
    """See own_run_folders. (tmp_path is asked for only to be made before: pytest would make it in this folder.)"""
    with own_run_folders(monkeypatch) as folders:
        yield folders


@pytest.fixture(scope="session")
def sshd_of_session(tmp_path_factory):
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def sshd(sshd_of_session, monkeypatch):
    """A real sshd: `ssh node1` and `ssh node2` get there."""
    monkeypatch.setenv("PATH", f"{sshd_of_session.folder}/bin:{os.environ['PATH']}")
    return sshd_of_session
