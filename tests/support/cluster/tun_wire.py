"""A real tcp wire for tests: workers in a network namespace of their own, joined to this one by a link that can fail.

    with TunWire(to_workers=Link(rate_bps=50e6), to_head=Link(rate_bps=50e6)) as wire:
        with ClusterEnv(..., launcher=wire.launcher()) as cluster:
            wire.cut()
            ...

The link is two TUN devices, one in each namespace, and a process that carries IP packets between them. It can limit
the rate, delay, lose, reorder and cut, and counts what it carries, for each direction. Nothing has a name that could be
left behind: devices and namespace belong to that process, which ends when this one does, however that ends.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
TCP = 6
MOST_PACKETS_A_TURN = 64  # of one device, before the other has its turn
ANSWER_S = 20.0
DIRECTIONS = ("to_workers", "to_head")


class NoWire(Exception):
    """There can be no such wire on this machine; the text says why."""


@dataclass(frozen=True)
class Link:
    """How one direction of the wire behaves."""

    rate_bps: float | None = None  # bits of IP packets per second; None: as fast as it goes
    queue_bytes: int = 256 << 10  # what waits for the link; packets that find it full are dropped
    delay_s: float = 0.0
    loss: float = 0.0  # share of packets that are lost
    reorder: float = 0.0  # share of packets that are held back, so that later ones overtake them
    reorder_s: float = 0.02  # how long they are held back
    is_cut: bool = False


@dataclass
class Counts:
    """What one direction has carried, and what it has not."""

    num_packets: int = 0  # delivered, as are the bytes
    ip_bytes: int = 0
    tcp_bytes: int = 0  # the payload of TCP segments, also of those that were sent again
    num_lost: int = 0  # by chance
    num_reordered: int = 0
    num_cut: int = 0
    num_dropped: int = 0  # the queue was full


@dataclass(frozen=True)
class WireCounts:
    """What both directions have carried."""

    to_workers: Counts
    to_head: Counts

    @property
    def tcp_bytes(self):
        return self.to_workers.tcp_bytes + self.to_head.tcp_bytes


# -- in the process that carries packets --


class Direction:
    """Packets of one direction, from device to device. The clock is an argument."""

    def __init__(self, link, seed):
        self.link = link
        self.counts = Counts()
        self._rng = random.Random(seed)
        self._free_s = 0.0  # when the link has sent what it has taken
        self._due = []  # (when it arrives, count, packet)
        self._count = itertools.count()

    @property
    def next_s(self):
        return self._due[0][0] if self._due else None

    def take(self, packet, now_s):
        link, counts = self.link, self.counts
        if packet[0] >> 4 != 4:
            return  # devices have something to say of IPv6, which nobody here uses
        if link.is_cut:
            counts.num_cut += 1
            return
        if link.loss and self._rng.random() < link.loss:
            counts.num_lost += 1
            return
        arrival_s = now_s
        if link.rate_bps is not None:
            begin_s = max(now_s, self._free_s)
            if (begin_s - now_s) * link.rate_bps / 8 > link.queue_bytes:
                counts.num_dropped += 1
                return
            arrival_s = self._free_s = begin_s + len(packet) * 8 / link.rate_bps
        arrival_s += link.delay_s
        if link.reorder and self._rng.random() < link.reorder:
            counts.num_reordered += 1
            arrival_s += link.reorder_s
        heapq.heappush(self._due, (arrival_s, next(self._count), packet))

    def deliver(self, write, now_s):
        """All that has arrived by now; a link that is cut loses what was on its way."""
        counts = self.counts
        while self._due and self._due[0][0] <= now_s:
            packet = heapq.heappop(self._due)[2]
            if self.link.is_cut:
                counts.num_cut += 1
                continue
            write(packet)
            counts.num_packets += 1
            counts.ip_bytes += len(packet)
            counts.tcp_bytes += tcp_payload_bytes(packet)


def tcp_payload_bytes(packet):
    """Bytes of payload of an IPv4 packet, if it is a TCP segment."""
    if packet[9] != TCP:
        return 0
    header_bytes = (packet[0] & 15) * 4
    return len(packet) - header_bytes - (packet[header_bytes + 12] >> 4) * 4


class Carrier:
    """Carries packets between two devices until its standard input is closed; there it is told what to do."""

    def __init__(self, head_device, worker_device, seed, mtu):
        self._fds = {"to_workers": (head_device, worker_device), "to_head": (worker_device, head_device)}
        self._directions = {name: Direction(Link(), seed + index) for index, name in enumerate(DIRECTIONS)}
        self._most_bytes = mtu + 64
        self._poll = select.poll()
        for fd in (0, head_device, worker_device):
            self._poll.register(fd, select.POLLIN)

    def run(self):
        while True:
            now_s = time.monotonic()
            times = [each.next_s for each in self._directions.values() if each.next_s is not None]
            wait_ms = max(0.0, min(times) - now_s) * 1000 if times else None
            ready = {fd for fd, _ in self._poll.poll(wait_ms)}
            if 0 in ready and not self._obey():
                return
            for name, (source, target) in self._fds.items():
                direction = self._directions[name]
                if source in ready:
                    self._read(source, direction)
                direction.deliver(lambda packet, target=target: os.write(target, packet), time.monotonic())

    def _read(self, source, direction):
        now_s = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            for _ in range(MOST_PACKETS_A_TURN):
                direction.take(os.read(source, self._most_bytes), now_s)

    def _obey(self):
        """A line of JSON: new settings of some directions. The answer is what all have counted."""
        line = sys.stdin.buffer.readline()
        if not line:
            return False
        for name, settings in json.loads(line).items():
            self._directions[name].link = Link(**settings)
        counts = {name: dataclasses.asdict(each.counts) for name, each in self._directions.items()}
        print(json.dumps(counts), flush=True)
        return True


def addresses(pid):
    """Of both ends: a network of four addresses for each process."""
    block = pid % (1 << 14)
    network = f"10.204.{block >> 6}"
    return tuple(f"{network}.{(block & 63) * 4 + index}" for index in (1, 2))


def open_tun(name):
    """A TUN device of this namespace; it goes when it is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def set_up(device, address, mtu):
    ip("addr", "add", f"{address}/30", "dev", device)
    ip("link", "set", device, "mtu", str(mtu), "txqueuelen", "5000", "up")


def ip(*argv):
    done = subprocess.run(["ip", *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise NoWire(f"ip {' '.join(argv)}: {done.stderr.strip()}")


def carry(seed, mtu):
    """The whole life of the process that carries packets. Its own namespace is that of the workers."""
    device = f"ef{os.getpid()}"
    head_address, worker_address = addresses(os.getpid())
    head_device = open_tun(device)
    set_up(device, head_address, mtu)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise NoWire(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    worker_device = open_tun("wire0")
    set_up("wire0", worker_address, mtu)
    ip("link", "set", "lo", "up")
    print("ready", flush=True)
    Carrier(head_device, worker_device, seed, mtu).run()


# -- in the test's process --


class TunWire:
    """The wire. Its settings are changed by set(), cut() and mend(); counts() says what it has carried."""

    def __init__(self, to_workers=None, to_head=None, seed=0, mtu=1500):
        """Raises NoWire if this machine cannot have one."""
        require_tun()
        self._links = {"to_workers": to_workers or Link(), "to_head": to_head or Link()}
        self._lock = threading.Lock()  # guards the pipes of the process
        argv = [sys.executable, "-I", __file__, "--seed", str(seed), "--mtu", str(mtu)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.head_address, self.worker_address = addresses(self._process.pid)
        try:
            self._read_line()
            self._tell(self._links)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def inside(self):
        """What to put before a command that is to run at the workers' end."""
        return ("nsenter", f"--net=/proc/{self._process.pid}/ns/net")

    @property
    def pid(self):
        return self._process.pid

    def set(self, **links):
        """New settings: to_workers=Link(...), to_head=Link(...)."""
        self._links |= links
        self._tell(links)

    def cut(self, *directions):
        """Both directions, unless some are named. What is under way is lost, too."""
        self._set_cut(directions, True)

    def mend(self, *directions):
        self._set_cut(directions, False)

    def counts(self):
        return WireCounts(**{name: Counts(**counts) for name, counts in self._tell({}).items()})

    def launcher(self, **settings):
        return TunLauncher(self, **settings)

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _set_cut(self, directions, is_cut):
        names = directions or DIRECTIONS
        self.set(**{name: dataclasses.replace(self._links[name], is_cut=is_cut) for name in names})

    def _tell(self, links):
        line = json.dumps({name: dataclasses.asdict(link) for name, link in links.items()})
        with self._lock:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._read_line())

    def _read_line(self):
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise NoWire(f"the process that carries packets says nothing; exit code {self._process.poll()}")
        return line


class TunLauncher:
    """A launcher: workers are processes of this machine, in the namespace at the other end of the wire."""

    is_on_this_host = False
    queue_timeout_s = None

    def __init__(self, wire, log_dir=None):
        self._wire = wire
        self._log_dir = log_dir
        self.head_address = wire.head_address

    def host_of_workers(self):
        return self._wire.worker_address

    def launch(self, job):
        from envfleet.launchers.owned_job import OwnedJob
        from envfleet.launchers.processes import Command, Processes
        from tests.support.scripts import script_environment

        environment = script_environment(**job.environment)

        def command_of(worker):
            return Command((*self._wire.inside, sys.executable, *job.arguments(worker)), environment)

        return OwnedJob(Processes(job.num_workers, self._log_dir or job.run_dir, command_of, "TunLauncher"))


def require_tun():
    """Raises NoWire, in words that a skipped test can show."""
    if os.geteuid():
        raise NoWire("a wire of TUN devices needs root")
    if not os.path.exists("/dev/net/tun"):
        raise NoWire("there is no /dev/net/tun: modprobe tun, or mknod /dev/net/tun c 10 200")
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            raise NoWire(f"a wire of TUN devices needs {program}: apt-get install iproute2 util-linux")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mtu", type=int, default=1500)
    arguments = parser.parse_args()
    carry(arguments.seed, arguments.mtu)
