"""Who has no key can neither join, nor read, nor disturb."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq  # noqa: TID253 - this process is a cluster's own

import envfleet
from envfleet.cluster.wire.codec import encode
from envfleet.cluster.wire.messages import PROTOCOL_VERSION, Heartbeat, Join, PullWeights
from envfleet.cluster.wire.sockets import RunKeys
from envfleet.contract.errors import ClusterError, UsageError
from envfleet.contract.worker_environment import KEYS_VARIABLE
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.local import Local
from envfleet.launchers.processes import Command
from envfleet.launchers.ray.actor import ActorCommand
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.cluster_envs import Accounts, Agent, CountingEnv
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

JOIN = encode(Join(protocol=PROTOCOL_VERSION, worker=0, host="evil", pid=1))
NUM_ROLLOUTS = 30


class Noted:
    """Local(), and what it was asked to start."""

    is_on_this_host = True
    head_address = queue_timeout_s = None

    def host_of_workers(self):
        return "127.0.0.1"

    def launch(self, job):
        self.job = job
        return Local().launch(job)


class LookingEnv(CountingEnv):
    """Looks for the run's keys wherever code of a user may look without a debugger."""

    def places_of(self, keys):
        found = []
        looks = {
            "os.environ": lambda: repr(dict(os.environ)).encode(),
            "environment of a child": lambda: subprocess.run(["env"], capture_output=True, check=True).stdout,
            "local variables": lambda: repr([*map(_locals, sys._current_frames().values())]).encode(),
        }
        for process in [path for path in Path("/proc").iterdir() if path.name.isdigit()]:
            looks |= {f"{process / name}": (process / name).read_bytes for name in ("environ", "cmdline")}
        for number in os.listdir("/proc/self/fd"):
            if number.isdigit() and int(number) > 2:
                looks[f"fd {number}"] = lambda number=int(number): os.pread(number, 1_000_000, 0)
        for place, look in looks.items():
            with contextlib.suppress(OSError):
                text = look()
                found += [place for key in keys if key.encode() in text]
        return found


def _locals(frame):
    texts = []
    while frame is not None and frame.f_code.co_name != "places_of":
        texts += [value for value in frame.f_locals.values() if isinstance(value, str | bytes)]
        frame = frame.f_back
    return texts


@contextlib.contextmanager
def cluster(**settings):
    settings = {"backend": "serial", "heartbeat_s": 0.2, "resend_s": 1.0, "timeout_s": 60.0, **settings}
    launcher = Noted()
    with envfleet.ClusterEnv(LookingEnv, 2, launcher=launcher, **cluster_arguments(settings)) as envs:
        envs.worker_keys = launcher.job.environment.get(KEYS_VARIABLE, "").encode().split()
        yield envs


@pytest.fixture(scope="module")
def shared():
    """One cluster for all tests here: nothing that strangers do may show."""
    with cluster(address="tcp://127.0.0.1:0") as envs:
        yield envs, Accounts(), [worker.pid for worker in envs.stats().workers]


@pytest.fixture
def tcp(shared):
    """The cluster and its accounts; after the test both must be as if nothing had been."""
    envs, accounts, before = shared
    yield envs, accounts
    for _ in range(NUM_ROLLOUTS):
        accounts.add(envs.rollout(Agent(), 5))
    workers = envs.stats().workers
    assert [worker.pid for worker in workers] == before
    assert "evil" not in [worker.host for worker in workers]
    assert accounts.num_env_objects == 2


@contextlib.contextmanager
def dealer(address, prepare=lambda it: None):
    context = zmq.Context()
    it = context.socket(zmq.DEALER)
    it.linger = 0
    it.setsockopt(zmq.HANDSHAKE_IVL, 2000)
    prepare(it)
    events = it.get_monitor_socket()
    it.connect(address)
    try:
        yield it
    finally:
        it.disable_monitor()
        events.close()
        it.close()
        context.term()


def hears_nothing_of(it, envs, accounts):
    """Asks for everything it can think of while the run goes on."""
    for frames in (JOIN, encode(PullWeights(held_version=-1)), encode(Heartbeat(received=0))):
        it.send_multipart([b"a worker's name.", *frames])
    for _ in range(NUM_ROLLOUTS):
        accounts.add(envs.rollout(Agent(), 5))
        assert not it.poll(10)


def wrong_client(keys, server_key):
    public, secret = keys

    def prepare(it):
        it.curve_publickey, it.curve_secretkey, it.curve_serverkey = public, secret, server_key

    return prepare


def test_without_keys(tcp):
    envs, accounts = tcp
    with dealer(envs.address) as it:
        hears_nothing_of(it, envs, accounts)


def test_with_keys_of_its_own(tcp):
    envs, accounts = tcp
    right, wrong = envs.worker_keys[0], zmq.curve_keypair()[0]
    for server_key in (wrong, right):
        with dealer(envs.address, wrong_client(zmq.curve_keypair(), server_key)) as it:
            hears_nothing_of(it, envs, accounts)
    refused = envs.stats().num_refused
    assert any("key" in reason for reason in refused), refused  # who knew the head's key got as far as the doorman


def test_with_a_password(tcp):
    def plain(it):
        it.plain_username, it.plain_password = b"worker", b"letmein"

    envs, accounts = tcp
    with dealer(envs.address, plain) as it:
        hears_nothing_of(it, envs, accounts)


def test_garbage(tcp):
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
    garbage = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), b"\0" * 100_000, b"\xff" * 100_000]
    garbage += [greeting, greeting + os.urandom(1000), greeting + b"\x04" + b"\xff" * 8]
    envs, accounts = tcp
    host, port = envs.address.removeprefix("tcp://").split(":")
    with contextlib.ExitStack() as stack:
        for blob in garbage:
            it = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            with contextlib.suppress(OSError):
                it.sendall(blob)
            accounts.add(envs.rollout(Agent(), 5))
        for _ in range(NUM_ROLLOUTS):
            accounts.add(envs.rollout(Agent(), 5))


def test_many_that_only_connect(tcp):
    envs, accounts = tcp
    host, port = envs.address.removeprefix("tcp://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        accounts.add(envs.rollout(Agent(), 5))
    before = len(os.listdir("/proc/self/fd"))
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "nobody is left")


def test_a_worker_without_keys_says_so(tcp):
    envs, _ = tcp
    command = [sys.executable, "-m", "envfleet.cluster.worker", "--worker", "0", "--head", envs.address]
    environment = {name: value for name, value in os.environ.items() if name != KEYS_VARIABLE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode != 0
    assert KEYS_VARIABLE in done.stderr


def test_keys_are_not_on_the_command_line(tcp):
    envs, _ = tcp
    run = envs._run
    keys = envs.worker_keys
    assert len(keys) == 3  # the head's secret is not among them
    commands = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in envs.stats().workers]
    assert not any(key in command for key in keys for command in commands)
    logs = "".join(run._monitor.log(each) for each in range(2))
    assert not any(key.decode() in logs for key in keys)
    assert KEYS_VARIABLE not in os.environ


def test_envs_do_not_inherit_the_keys(tcp):
    """What an env starts must not get them."""
    envs, _ = tcp
    assert envs.call("variable", KEYS_VARIABLE) == (None, None)


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_envs_do_not_find_the_keys(backend):
    """Neither in the worker's process nor in one of its pool. Policies run in the worker's, too."""
    with cluster(address="tcp://127.0.0.1:0", backend=backend) as envs:
        keys = [key.decode() for key in envs.worker_keys]
        assert envs.call("places_of", keys) == ([], [])
        os.kill(envs.stats().workers[1].pid, signal.SIGKILL)
        envs.rollout(Agent(), 5)  # with a replacement, which needs the keys again
        assert envs.call("places_of", keys) == ([], [])


def test_keys_are_in_no_repr():
    keys = RunKeys.make()
    secret = keys.for_workers()
    environment = {KEYS_VARIABLE: secret}
    shown = repr(
        [
            keys,
            WorkerJob(num_workers=1, argv=("-m", "w"), environment=environment, run_dir=Path()),
            Command(("w",), environment, secret.encode()),
            ActorCommand(None, ("w",), environment, None, "w.log"),
        ]
    )
    for each in (keys.head_secret, keys.worker_secret):
        assert each.decode() not in shown and repr(each) not in shown


def test_each_run_has_its_own_keys(tcp):
    envs, _ = tcp
    with cluster(address="tcp://127.0.0.1:0") as other:
        assert not set(envs.worker_keys) & set(other.worker_keys)


def test_ipc_is_in_a_folder_of_our_own(run_folders):
    with cluster() as envs:
        (name,) = run_folders()
        folder = Path(os.environ["TMPDIR"]) / name
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        assert envs.address == f"ipc://{folder}/head"
        assert {path.name for path in folder.iterdir()} == {"head", "lock", "worker-0.log", "worker-1.log"}


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_worker_does_not_trust_a_folder_that_others_can_enter(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    command = [sys.executable, "-m", "envfleet.cluster.worker", "--worker", "0", "--head", f"ipc://{folder}/head"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "0700" in done.stderr


@pytest.mark.parametrize("address", ["udp://1.2.3.4:5", "inproc://x", "127.0.0.1:0", "", "ipc:///tmp/x"])
def test_other_transports_are_refused(address):
    with pytest.raises(UsageError, match="address"), cluster(address=address):
        pass


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:{busy}", "tcp://127.0.0.1:70000", "tcp://203.0.113.1:0", "tcp://x"]
)
def test_an_address_that_cannot_be_bound(address):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = address.format(busy=busy.getsockname()[1])
        with pytest.raises((ClusterError, UsageError), match=address), cluster(address=address):
            pass
