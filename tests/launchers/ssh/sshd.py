"""A real sshd for tests: its own keys, settings and port; `ssh node1` and `ssh node2` lead to it."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.waiting import descendants, is_running, wait_until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
PRIVILEGE_FOLDER = Path("/run/sshd")  # sshd insists on it when it runs as root
USER = pwd.getpwuid(os.getuid()).pw_name


def skip_without_sshd():
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no sshd on this machine: apt-get install openssh-server")


class Sshd:
    """One server. `home` is where its sessions begin; a venv is there in which EnvFleet is installed."""

    def __init__(self, folder, address="127.0.0.1", prefix=(), max_startups=100):
        self.folder, self.address, self.prefix = Path(folder), address, tuple(prefix)
        self.home = self.folder / "home"
        self.port = free_port()  # free here; in a network of its own all are
        self._process = None
        self._write_files(max_startups)

    def _write_files(self, max_startups):
        self.home.mkdir()
        (self.home / "envfleet-venv").symlink_to(sys.prefix)
        for name in ("host_key", "user_key", "other_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name)
        shutil.copy(self.folder / "user_key.pub", self.folder / "authorized_keys")
        host_key = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text(f"[{self.address}]:{self.port} {host_key}")
        other_key = (self.folder / "other_key.pub").read_text()
        (self.folder / "wrong_hosts").write_text(f"[{self.address}]:{self.port} {other_key}")
        # Only the port, the keys and the home are not as on any host. sh is the plainest shell there is.
        (self.folder / "session").write_text(
            f"""cd {self.home}
export HOME={self.home} PATH={sysconfig.get_path("scripts")}:/usr/bin:/bin
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""
        )
        (self.folder / "sshd_config").write_text(
            f"""Port {self.port}
ListenAddress {self.address}
HostKey {self.folder}/host_key
AuthorizedKeysFile {self.folder}/authorized_keys
ForceCommand sh {self.folder}/session
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups {max_startups}
"""
        )
        (self.folder / "ssh_config").write_text(
            f"""Host node1 node2
  IdentityFile {self.folder}/user_key
Host stranger
  IdentityFile {self.folder}/other_key
Host impostor
  IdentityFile {self.folder}/user_key
  UserKnownHostsFile {self.folder}/wrong_hosts
Host far
  HostName 10.0.0.8
Host behind
  HostName 10.0.0.9
  ProxyJump node1
Host *
  HostName {self.address}
  Port {self.port}
  User {USER}
  IdentitiesOnly yes
  UserKnownHostsFile {self.folder}/known_hosts
  StrictHostKeyChecking yes
"""
        )
        # ssh reads the settings of the user who runs it, wherever HOME is: the tests' ssh reads only its own.
        (self.folder / "bin").mkdir()
        wrapper = self.folder / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)

    def start(self):
        with (self.folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self.prefix, SSHD, "-D", "-e", "-f", self.folder / "sshd_config"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._listens, f"sshd listens: {(self.folder / 'sshd.log').read_text()}")

    def sessions(self):
        """Processes that its sessions have started, and those that serve them."""
        return [pid for pid in descendants(self._process.pid) if is_running(pid)]

    def stop(self):
        """As if the host lost its power: nobody is told."""
        for pid in (*self.sessions(), self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(10)

    def _listens(self):
        assert self._process.poll() is None, (self.folder / "sshd.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1):
            return True
        return False


@contextlib.contextmanager
def running_sshd(folder, **settings):
    skip_without_sshd()
    server = Sshd(folder, **settings)
    if not os.getuid():  # it stays: the servers of another suite on this machine may need it
        PRIVILEGE_FOLDER.mkdir(mode=0o755, exist_ok=True)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run(*argv):
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout
