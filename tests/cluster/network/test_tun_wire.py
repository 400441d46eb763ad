"""The wire of the tests itself: it carries, counts, limits, loses and cuts, and leaves nothing behind."""

import dataclasses
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.cluster.tun_wire import Direction, Link, TunWire, addresses, tcp_payload_bytes
from tests.support.scripts import script_environment
from tests.support.waiting import is_running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tun_wire_or_skip")]

NUM_BYTES = 3_000_000
RECEIVER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as connection:
    received = b""
    while len(received) < int(sys.argv[3]):
        received += connection.recv(1 << 20)
    connection.sendall(received[-4:])
"""


def send_through(wire, num_bytes=NUM_BYTES):
    """Send from this end to the other, which answers with the last four bytes. Returns seconds."""
    payload = os.urandom(num_bytes)
    with socket.create_server((wire.head_address, 0)) as server:
        argv = [wire.head_address, str(server.getsockname()[1]), str(num_bytes)]
        receiver = subprocess.Popen([*wire.inside, sys.executable, "-c", RECEIVER, *argv])
        server.settimeout(60)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(60)
            begin_s = time.monotonic()
            connection.sendall(payload)
            assert connection.recv(4) == payload[-4:]
            seconds = time.monotonic() - begin_s
        assert receiver.wait(60) == 0
    return seconds


def test_it_carries_and_counts():
    with TunWire() as wire:
        send_through(wire)
        counts = wire.counts()
    assert NUM_BYTES <= counts.to_workers.tcp_bytes < 1.02 * NUM_BYTES  # some may have been sent again, by TCP
    assert counts.to_workers.ip_bytes > counts.to_workers.tcp_bytes + 40 * counts.to_workers.num_packets
    assert counts.to_head.tcp_bytes == 4


def test_it_limits_the_rate():
    with TunWire(to_workers=Link(rate_bps=20e6)) as wire:
        assert send_through(wire) > 0.9 * NUM_BYTES * 8 / 20e6  # never quicker; slower on a busy machine


def test_tcp_gets_through_loss_delay_and_disorder():
    bad = Link(rate_bps=100e6, delay_s=0.005, loss=0.01, reorder=0.05, reorder_s=0.01)
    with TunWire(bad, bad) as wire:
        send_through(wire)
        counts = wire.counts()
    assert counts.to_workers.num_lost > 0 and counts.to_workers.num_reordered > 0


def test_a_cut_is_mended():
    with TunWire() as wire:
        wire.cut()
        with pytest.raises(TimeoutError):
            socket.create_connection((wire.worker_address, 1), 0.5)
        assert wire.counts().to_workers.num_cut > 0
        wire.mend()
        with pytest.raises(ConnectionRefusedError):  # somebody answers again
            socket.create_connection((wire.worker_address, 1), 20)


def test_nothing_is_left_when_its_owner_is_killed():
    code = """
    import time
    from tests.support.cluster.tun_wire import TunWire
    print(TunWire().pid, flush=True)
    time.sleep(600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=script_environment()
    )
    pid = int(owner.stdout.readline())
    device = Path(f"/sys/class/net/ef{pid}")
    assert device.exists()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not is_running(pid) and not device.exists(), "process, device and namespace are gone")


# -- one direction, without devices --


def packet(num_bytes, number=0):
    """An IPv4 packet with a TCP segment of 20 bytes of header."""
    return bytes([0x45, *[0] * 8, 6, *[0] * 22, 0x50, *[0] * 7]) + number.to_bytes(num_bytes, "big")


def delivered(direction, now_s):
    packets = []
    direction.deliver(packets.append, now_s)
    return [int.from_bytes(each[40:], "big") for each in packets]


def test_payload_of_a_packet():
    assert tcp_payload_bytes(packet(100)) == 100
    assert tcp_payload_bytes(packet(100)[:9] + b"\x11" + packet(100)[10:]) == 0  # UDP


def test_a_queue_has_an_end():
    direction = Direction(Link(rate_bps=8000, queue_bytes=2000), seed=0)  # 1,000 bytes each second
    for number in range(5):
        direction.take(packet(960, number), 0.0)
    assert direction.counts.num_dropped == 2
    assert [delivered(direction, now_s) for now_s in (0.5, 1.0, 2.5, 9.0)] == [[], [0], [1], [2]]


def test_held_back_packets_are_overtaken():
    direction = Direction(Link(reorder=1.0, reorder_s=1.0), seed=0)
    direction.take(packet(8, 1), 0.0)
    direction.link = dataclasses.replace(direction.link, reorder=0.0)
    direction.take(packet(8, 2), 0.5)
    assert delivered(direction, 2.0) == [2, 1]


def test_what_is_under_way_when_the_link_is_cut_is_lost():
    direction = Direction(Link(delay_s=1.0), seed=0)
    direction.take(packet(8, 1), 0.0)
    direction.link = Link(is_cut=True)
    assert delivered(direction, 2.0) == []
    assert direction.counts.num_cut == 1 and direction.counts.tcp_bytes == 0


def test_each_process_has_addresses_of_its_own():
    assert addresses(1) == ("10.204.0.5", "10.204.0.6")
    assert len({addresses(pid) for pid in range(1 << 14)}) == 1 << 14
