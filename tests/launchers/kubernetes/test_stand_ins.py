"""The stand-ins themselves, and in which order pytest starts the servers."""

import http.client
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler

from tests.support.kubernetes.stand_in_server import StandInServer
from tests.support.scripts import ROOT


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def open_sockets():
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.islink(link) and "socket" in os.readlink(link)}


def test_a_closed_server_has_no_connection():
    """Though its clients keep theirs: its threads would close them later, when they are given time to."""
    before = open_sockets()
    server = StandInServer(Handler)
    clients = [http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10) for _ in range(5)]
    for client in clients:
        client.request("GET", "/")
        client.getresponse().read()
    server.close()
    assert len(open_sockets() - before) == len(clients)
    for client in clients:
        client.close()


def test_real_servers_are_started_before_processes_are_counted(tmp_path):
    """Else the first test with them finds processes that it has not started. (pytest only plans this; nothing runs.)"""
    test = "tests/launchers/kubernetes/test_kube_job.py::test_life"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--setup-plan", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env={**os.environ, "ENVFLEET_KUBE_BIN": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (started,) = [number for number, line in enumerate(lines) if "SETUP    S control_plane['real']" in line]
    *_, counted = [number for number, line in enumerate(lines) if "SETUP    F nothing_is_left" in line]
    assert started < counted
