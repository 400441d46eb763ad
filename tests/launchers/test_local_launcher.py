"""Local: processes of this machine."""

import pytest

from envfleet import ClusterEnv
from envfleet.contract.errors import UsageError
from envfleet.launchers.local import Local
from envfleet.testing import LAUNCHER_CHECKS, LauncherCase

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", LAUNCHER_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check):
    check(LauncherCase(Local(), Local(python="/no/such/python"), "/no/such/python"))


def test_logs_stay_in_a_folder_of_the_user(tmp_path):
    folder = tmp_path / "logs"
    with ClusterEnv("CartPole-v1", 1, 1, launcher=Local(log_dir=folder), backend="serial"):
        pass
    assert "leaving: " in (folder / "worker-0.log").read_text()


def test_a_log_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="log_dir"):
        ClusterEnv("CartPole-v1", 1, 1, launcher=Local(log_dir=tmp_path / "file" / "logs"))
