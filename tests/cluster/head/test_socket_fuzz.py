"""Whatever comes through the head's own socket: the run goes on, and what was dropped is counted."""

import contextlib
import os
import typing
from typing import Any

import msgspec
import pytest
import zmq  # noqa: TID253 - this process is a cluster's own
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envfleet
from envfleet.cluster.wire.codec import encode
from envfleet.cluster.wire.messages import PROTOCOL_VERSION, FromWorker, Heartbeat, Join, Leaving
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.envs.cluster_envs import Accounts, Agent, CountingEnv

pytestmark = pytest.mark.slow

SAMPLES = {int: 1, float: 0.0, str: "x", bool: True, dict[str, Any]: {}, Any: [], msgspec.Raw: []}
MESSAGES = [
    kind(**{each.name: SAMPLES[each.type] for each in msgspec.structs.fields(kind) if each.required})
    for kind in typing.get_args(FromWorker)
    if kind is not Join
]
MESSAGES += [Join(protocol=PROTOCOL_VERSION + version, worker=9 * (1 - version), host="x", pid=1) for version in (0, 1)]
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def mutated(draw):
    """A message of the protocol with some bytes changed, cut off, added; frames swapped, doubled or left out."""
    frames = [bytes(frame) for frame in encode(draw(st.sampled_from(MESSAGES)))]
    frames += draw(st.lists(st.binary(max_size=50), max_size=3))
    index = draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[index])
    for _ in range(draw(st.integers(0, 5))):
        if frame:
            frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    frames[index] = bytes(frame[: draw(st.integers(0, len(frame)))]) + draw(st.binary(max_size=10))
    return draw(st.sampled_from([frames, frames[::-1], frames * 2, [b"", *frames]]))


@st.composite
def well_formed(draw):
    """Fields of any value in headers that decode as far as they can."""
    fields = {"type": draw(st.sampled_from([type(message).__struct_config__.tag for message in MESSAGES]))}
    message = draw(st.sampled_from(MESSAGES))
    for name in type(message).__struct_fields__:
        fields[name] = draw(PLAIN)
    arrays = draw(
        st.lists(st.tuples(st.text(max_size=5), st.sampled_from(["float32", "object", "x"]), PLAIN), max_size=2)
    )
    return [msgspec.msgpack.encode((fields, arrays)), *(draw(st.binary(max_size=16)) for _ in arrays)]


INTACT = st.sampled_from(MESSAGES).map(lambda message: [bytes(frame) for frame in encode(message)])
ANY = INTACT | st.lists(st.binary(max_size=200), min_size=1, max_size=5) | mutated() | well_formed()


class Stranger:
    """Sends whatever it is given, after the name of its process, as all workers do."""

    def __init__(self, dealer, name):
        self._dealer, self._name = dealer, name

    def send_multipart(self, frames):
        self._dealer.send_multipart([self._name, *frames])


@contextlib.contextmanager
def stranger(address, name):
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(address)
    try:
        yield Stranger(dealer, name)
    finally:
        dealer.close()
        context.term()


@contextlib.contextmanager
def cluster():
    kwargs = {
        "backend": "serial",
        "heartbeat_s": 0.2,
        "resend_s": 1.0,
        "timeout_s": 60.0,
        "env_kwargs": {"step_s": 0.001},
    }
    with envfleet.ClusterEnv(CountingEnv, 2, **cluster_arguments(kwargs)) as envs:
        yield envs


def test_frames_of_strangers_while_a_stream_goes_on(caplog):
    caplog.set_level("CRITICAL")
    accounts = Accounts()
    with cluster() as envs, stranger(envs.address, b"the stranger 16b") as dealer:
        before = [worker.pid for worker in envs.stats().workers]
        stream = envs.stream(Agent(), 5)
        num_sent = 0

        @settings(
            max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
        )
        @given(st.lists(ANY, min_size=1, max_size=5))
        def feed(messages):
            nonlocal num_sent
            for frames in messages:
                dealer.send_multipart(frames)
            num_sent += len(messages)
            if num_sent % 10 == 0:
                accounts.add(next(stream))

        feed()
        while sum(envs.stats().num_refused.values()) < num_sent:  # each was counted: some by two names
            accounts.add(next(stream))
        for _ in range(20):
            accounts.add(next(stream))
        stats = envs.stats()
        assert [worker.pid for worker in stats.workers] == before
        assert [worker.num_restarts for worker in stats.workers] == [0, 0]
        assert accounts.num_env_objects == 2
        assert stats.num_refused["malformed"] > 0 and stats.num_refused["from no member"] > 0


@pytest.mark.parametrize("names", [[b"x" * 255], [b"\x01"], [b""], [os.urandom(16) for _ in range(50)]])
def test_strangers_of_any_name(names):
    accounts = Accounts()
    with cluster() as envs, contextlib.ExitStack() as stack:
        for name in names:
            dealer = stack.enter_context(stranger(envs.address, name))
            dealer.send_multipart(encode(Heartbeat(received=3)))
            dealer.send_multipart([b""])
        while sum(envs.stats().num_refused.values()) < 2 * len(names):
            accounts.add(envs.rollout(Agent(), 5))
        assert accounts.num_env_objects <= 2


def test_a_member_that_talks_nonsense():
    """A worker of this run, with the key and a place: the head must outlive it all the same."""
    accounts = Accounts()
    with cluster() as envs, stranger(envs.address, b"the madman - 16b") as dealer:
        accounts.add(envs.rollout(Agent(), 5))
        stream = envs.stream(Agent(), 5)

        @settings(
            max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
        )
        @given(st.lists(ANY, min_size=1, max_size=5))
        def feed(messages):
            for frames in messages:
                dealer.send_multipart(frames)
            envs.stats()

        dealer.send_multipart(encode(Join(protocol=PROTOCOL_VERSION, worker=1, host="mad", pid=1)))
        while envs.stats().workers[1].host != "mad":
            next(stream)
        feed()
        dealer.send_multipart(encode(Leaving(why="enough")))
        while envs.stats().workers[1].host == "mad":  # a sane one comes
            with contextlib.suppress(envfleet.EnvFleetError):
                next(stream)
        del stream
        rollout = envs.rollout(Agent(), 5)
        assert rollout.num_envs == 2
