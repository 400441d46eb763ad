"""RealServers: etcd, kube-apiserver, kube-controller-manager and kube-scheduler of the folder ENVFLEET_KUBE_BIN names.

They listen on loopback, with keys made by openssl and users by static tokens. These programs are not available where
EnvFleet is developed; the tests of 0.6.0 were run with those of Kubernetes 1.34.11.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.support.kubernetes.rest import Refused, Rest

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
READY_S = 90.0


class RealServers:
    """A control plane. Users are known by tokens: `admin`, who may do all, and `head`, who may what its Roles say."""

    def __init__(self, bin_folder: Path, folder: Path) -> None:
        self._bin, self._folder = bin_folder, folder
        self._processes: list[subprocess.Popen] = []
        self._tokens = {"admin": secrets.token_hex(16), "head": secrets.token_hex(16)}
        self._make_keys()
        etcd_port, peer_port, port = _free_port(), _free_port(), _free_port()
        self.url = f"https://127.0.0.1:{port}"
        self.admin = self.user("admin")
        try:
            self._start_etcd(etcd_port, peer_port)
            self._start_api_server(port, etcd_port)
            self._wait(self._is_ready, "the API server is ready")
            config = str(self.admin.kubeconfig(folder, "admin", "default"))
            # Loopback addresses cannot be leader-elected about, and need not: there is one of each.
            common = [f"--kubeconfig={config}", "--leader-elect=false", "--bind-address=127.0.0.1"]
            keys = [f"--service-account-private-key-file={folder}/server.key", f"--root-ca-file={folder}/ca.crt"]
            ports = [f"--secure-port={_free_port()}", f"--secure-port={_free_port()}"]
            self._start("kube-controller-manager", *common, *keys, ports[0], "--node-monitor-grace-period=20s")
            self._start("kube-scheduler", *common, ports[1])
            self._wait(self._has_default_account, "the controller manager works")
        except BaseException:
            self.close()
            raise

    def user(self, name: str) -> Rest:
        return Rest(self.url, self._tokens[name], self._folder / "ca.crt")

    @property
    def node_certificate(self) -> tuple[Path, Path]:
        return self._folder / "server.crt", self._folder / "server.key"

    def close(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + 10
        for process in reversed(self._processes):
            try:
                process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _make_keys(self):
        folder = self._folder
        names = "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,IP:10.0.0.1"
        (folder / "names").write_text(names)
        for command in (
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=envfleet-test-ca -keyout ca.key -out ca.crt",
            "req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -keyout server.key -out server.csr",
            "x509 -req -days 2 -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile names -out server.crt",
        ):
            subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
        groups = {"admin": '"system:masters"', "head": '"people"'}
        lines = [f"{token},{user},{user},{groups[user]}" for user, token in self._tokens.items()]
        (folder / "tokens.csv").write_text("\n".join(lines) + "\n")

    def _start_etcd(self, port, peer_port):
        url, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        self._start(
            "etcd",
            f"--data-dir={self._folder}/etcd",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )

    def _start_api_server(self, port, etcd_port):
        folder = self._folder
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            # The API server would write its loopback address into Endpoints, which no server accepts.
            "--endpoint-reconciler-type=none",
            f"--secure-port={port}",
            f"--tls-cert-file={folder}/server.crt",
            f"--tls-private-key-file={folder}/server.key",
            f"--client-ca-file={folder}/ca.crt",
            f"--token-auth-file={folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={folder}/server.key",
            f"--service-account-key-file={folder}/server.key",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--kubelet-preferred-address-types=InternalIP",
        )

    def _start(self, program, *arguments):
        with open(self._folder / f"{program}.log", "wb") as log:
            process = subprocess.Popen(
                [str(self._bin / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "HOME": str(self._folder)},
                start_new_session=True,
            )
        self._processes.append(process)

    def _is_ready(self):
        return self.admin.text("/readyz") == b"ok"

    def _has_default_account(self):
        return bool(self.admin.get("/api/v1/namespaces/default/serviceaccounts/default"))

    def _wait(self, condition, what):
        deadline_s, last = time.monotonic() + READY_S, None
        while time.monotonic() < deadline_s:
            for process in self._processes:
                assert process.poll() is None, f"{process.args[0]} has ended; its log is in {self._folder}"
            try:
                if condition():
                    return
            except (OSError, Refused, json.JSONDecodeError) as error:
                last = error
            time.sleep(0.2)
        raise AssertionError(f"after {READY_S:g} s still not true: {what} ({last})")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
