"""Connections without the run's key: they cost the head little memory and few descriptors, and keep no worker out."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import zmq  # noqa: TID253 - this process is a cluster's own

from envfleet.cluster.head.handshake_limits import MOST_PENDING
from envfleet.cluster.head.socket import HeadSocket
from envfleet.cluster.wire.sockets import RunKeys, open_dealer
from tests.support.cluster import attacker
from tests.support.scripts import script_environment
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MOST_GROWTH_BYTES = 20 << 20
ATTACK_S = 6.0
PUSH_S = 2.5  # at hundreds of megabytes a second
NUM_DESCRIPTORS = 300  # of the head's process
NAME = b"a worker's name."


class SocketHead:
    """The head's socket in a process of its own."""

    def __init__(self, folder):
        self.output = folder / "output"
        with self.output.open("w") as log:
            command = [sys.executable, "-m", "tests.support.cluster.socket_head", "30", str(NUM_DESCRIPTORS)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, env=script_environment())
        wait_until(lambda: self.output.read_text().count("\n") == 1, "the head listens")
        self.address, self.keys = json.loads(self.output.read_text())
        self.port = int(self.address.rpartition(":")[2])

    @property
    def resident_bytes(self):
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    @property
    def num_descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def heard(self, text):
        return self.output.read_text().count(f"{text}\n")


@pytest.fixture
def head(tmp_path):
    made = SocketHead(tmp_path)
    with worker(made) as dealer:
        dealer.send_multipart([NAME, b"first"])
        wait_until(lambda: made.heard("first"), "a worker is let in before")
    yield made
    made.process.stdin.close()
    assert made.process.wait(20.0) == 0


def is_heard(head, dealer, text):
    """Says it again and again, as workers do when they join."""
    dealer.send_multipart([NAME, text.encode()], zmq.NOBLOCK)
    time.sleep(0.05)
    return head.heard(text)


@contextlib.contextmanager
def worker(head, num_sockets=1):
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, num_sockets + 10)
    dealers = [open_dealer(context, head.address, head.keys, 30.0) for _ in range(num_sockets)]
    try:
        for dealer in dealers:
            dealer.connect(head.address)
        yield dealers[0] if num_sockets == 1 else dealers
    finally:
        for dealer in dealers:
            dealer.close()
        context.term()


@contextlib.contextmanager
def attack(head, kind, num_connections, seconds=ATTACK_S):
    command = [sys.executable, attacker.__file__, kind, str(head.port), str(num_connections), str(seconds)]
    process = subprocess.Popen(command)
    try:
        yield process
        assert process.wait(seconds + 30.0) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["raw", "null", "curve"])
def test_strangers_that_push_bytes_do_not_fill_the_heads_memory(head, kind):
    before = head.resident_bytes
    largest = 0
    with attack(head, kind, 50, PUSH_S) as process:
        while process.poll() is None:
            largest = max(largest, head.resident_bytes - before)
            time.sleep(0.01)
    assert largest < MOST_GROWTH_BYTES, f"{largest:,} bytes"


def test_idle_strangers_do_not_use_up_descriptors_nor_keep_workers_out(head):
    """There are three times as many of them as the head has descriptors."""
    before = head.num_descriptors
    with attack(head, "idle", num_connections=900) as process:
        num_workers = 0
        while process.poll() is None:
            num_workers += 1
            with worker(head) as dealer:
                wait_until(partial(is_heard, head, dealer, f"hello {num_workers}"), "a worker is let in meanwhile")
    assert num_workers > 1
    wait_until(lambda: head.num_descriptors <= before, "their descriptors are closed")


def test_many_workers_that_connect_at_once_are_all_let_in(head):
    num_workers = 2 * MOST_PENDING + 44
    with worker(head, num_workers) as dealers:
        for index, dealer in enumerate(dealers):
            wait_until(partial(is_heard, head, dealer, f"{index} of many"), "all are let in", timeout_s=60.0)


class Deaf:
    """See Receiver."""

    def connected(self, process):
        """Nobody here has the key."""

    receive = tick = connected


def test_a_fleet_has_room_among_strangers():
    """Besides MOST_PENDING strangers, as many connections as there are workers may wait for their handshake."""
    num_workers, num_more = 50, 20
    room = MOST_PENDING + num_workers
    head = HeadSocket("tcp://127.0.0.1:0", RunKeys.make(), 30.0, Deaf(), num_workers)
    address = ("127.0.0.1", int(head.address.rpartition(":")[2]))
    with contextlib.ExitStack() as stack:
        stack.callback(head.close)
        num_made = 0

        def one_is_refused():
            nonlocal num_made
            for _ in range(num_more if num_made else room + num_more):
                stack.enter_context(socket.create_connection(address, 20.0))
                num_made += 1
            with contextlib.suppress(AssertionError):
                wait_until(lambda: head.num_strangers, "one was refused", 1.0)
            return head.num_strangers

        wait_until(one_is_refused, "there are more than there is room for")  # ZeroMQ closes them after some seconds
        assert head.num_strangers <= num_made - room
