"""Connections that die with bytes under way: the learner's process lives on."""

import json
import subprocess
import sys
import time

import pytest
import zmq  # noqa: TID253 - this process is a cluster's own

from envfleet.cluster.wire.sockets import open_dealer
from tests.support.cluster.relay import Relay
from tests.support.scripts import script_environment
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NAME = b"a worker's name."
HEAD_SILENCE_S = 6.0  # the head's socket asks every 2 s whether the other side is there


def test_a_connection_dies_that_a_worker_has_replaced(tmp_path):
    """What ended the learner in 0.6.0: bytes come on a connection after its worker has made another, and it dies."""
    output = tmp_path / "output"
    command = [sys.executable, "-m", "tests.support.cluster.socket_head", str(HEAD_SILENCE_S), "256"]
    with output.open("w") as log:
        head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, env=script_environment())
    wait_until(lambda: output.read_text().count("\n") == 1, "the head listens")
    address, keys = json.loads(output.read_text())
    context = zmq.Context()
    with Relay(("127.0.0.1", int(address.rpartition(":")[2]))) as relay:
        dealer = open_dealer(context, relay.address, keys, silence_s=1.0)
        try:
            dealer.connect(relay.address)
            dealer.send_multipart([NAME, b"first"])
            wait_until(lambda: "first" in output.read_text(), "the first message came")
            relay.hold()
            dealer.send_multipart([NAME, b"late"])
            wait_until(lambda: relay.num_connections > 1, "the worker connects again")
            dealer.send_multipart([NAME, b"second"])
            wait_until(lambda: "second" in output.read_text(), "a message came on the new connection")
            relay.release()
            wait_until(lambda: "late" in output.read_text(), "what was under way came as well")
            deadline_s = time.monotonic() + HEAD_SILENCE_S / 3 + 1.0
            while time.monotonic() < deadline_s:
                assert head.poll() is None, "the head's process has ended"
                time.sleep(0.05)
            dealer.send_multipart([NAME, b"last"])
            wait_until(lambda: "last" in output.read_text(), "the head still listens")
        finally:
            dealer.close()
            context.term()
            head.stdin.close()
            assert head.wait(20.0) == 0
