"""A worker written by hand: it speaks the protocol, and does with the head's orders what a test wants."""

import os
import threading
import time

import numpy as np
import zmq  # noqa: TID253 - this process is a cluster's own

from envfleet.cluster.wire.codec import Decoder, encode
from envfleet.cluster.wire.messages import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Collect,
    FromHead,
    Heartbeat,
    Join,
    OrderCancelled,
    Ready,
    RolloutReady,
    Welcome,
)
from envfleet.cluster.wire.spaces import describe_space
from envfleet.cluster.wire.transfers import Outgoing, num_bytes
from envfleet.launchers.launcher import WorkerState, WorkerStatus
from tests.support.envs.cluster_envs import CountingEnv


class HandWorker:
    """A member that answers Collect orders through `answers`, a function (hand worker, order) -> list of frames."""

    def __init__(self, address, worker=0, num_envs=1, answers=None, host="by-hand"):
        self.worker, self.num_envs, self.host = worker, num_envs, host
        self.process = os.urandom(16)
        self.received = []  # all messages of the head
        self._answers = answers or (lambda hand, order: [hand.rollout(order)])
        self._decoder = Decoder(FromHead)
        self._address = address
        self._outgoing = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._num_obs = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        self._is_over.set()
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def has(self, kind):
        return any(isinstance(message, kind) for message in self.received)

    def send(self, frames):
        with self._lock:
            self._outgoing.append(frames)

    def rollout(self, order, version=1, change=lambda arrays: None, **fields):
        """The frames of an answer: rows like CountingEnv's; the name in them says which process made them.

        `change` may do anything to the arrays before they are sent; `fields` are those of RolloutReady.
        """
        shape = (order.num_steps, self.num_envs)
        obs = np.empty((order.num_steps + 1, self.num_envs, 2))
        obs[:, :, 0] = int.from_bytes(self.process[:6]) + np.arange(self.num_envs)
        obs[:, :, 1] = (self._num_obs + np.arange(order.num_steps + 1))[:, None]
        self._num_obs += order.num_steps
        arrays = {
            "obs.0": obs,
            "action.0": np.zeros(shape, np.int64),
            "rewards": np.zeros(shape),
            "terminated": np.zeros(shape, np.bool_),
            "truncated": np.zeros(shape, np.bool_),
            "final_steps": np.zeros(0, np.int64),
            "final_envs": np.zeros(0, np.int64),
            "final_obs.0": np.zeros((0, 2)),
            "episode_returns": np.zeros(0),
            "episode_lengths": np.zeros(0, np.int64),
            "episode_seconds": np.zeros(0),
        }
        change(arrays)
        return encode(RolloutReady(**{"order": order.order, "version": version, "seconds": 0.1, **fields}), arrays)

    def _run(self):
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(self._address)

        outgoing_chunks = Outgoing(resend_s=60.0, window=1 << 20)

        def send(frames):
            for each in _in_chunks(frames, outgoing_chunks):
                dealer.send_multipart([self.process, *each])

        send(encode(Join(protocol=PROTOCOL_VERSION, worker=self.worker, host=self.host, pid=os.getpid())))
        last_order, next_beat_s = 0, 0.0
        try:
            while not self._is_over.is_set():
                if dealer.poll(10):
                    message, _ = self._decoder.decode(dealer.recv_multipart())
                    self.received.append(message)
                    if isinstance(message, Welcome):
                        last_order = message.first_order - 1
                        send(self._ready())
                    if isinstance(message, Collect) and message.order == last_order + 1:
                        last_order = message.order
                        for frames in self._answers(self, message):
                            send(frames)
                with self._lock:
                    outgoing, self._outgoing = self._outgoing, []
                for frames in outgoing:
                    send(frames)
                if self.has(Welcome) and time.monotonic() > next_beat_s:
                    next_beat_s = time.monotonic() + 0.2
                    send(encode(Heartbeat(received=last_order)))
        finally:
            dealer.close()
            context.term()

    def _ready(self):
        env = CountingEnv()
        obs, obs_arrays = describe_space(env.observation_space, "observation_space")
        actions, action_arrays = describe_space(env.action_space, "action_space")
        ready = Ready(observation_space=obs, action_space=actions, metadata={})
        return encode(ready, {**obs_arrays, **action_arrays})


def _in_chunks(frames, outgoing):
    if num_bytes(frames) <= CHUNK_BYTES:
        return [frames]
    outgoing.add(frames, time.monotonic())
    return outgoing.to_send(time.monotonic())


def cancelled(order):
    return encode(OrderCancelled(order=order))


class ByHand:
    """A launcher whose workers are HandWorkers: `then(address)` is called when it is to start them."""

    is_on_this_host = True
    head_address = None
    queue_timeout_s = None
    revives = False

    def __init__(self, then):
        self._then = then
        self.started = []

    def launch(self, job):
        address = job.argv[job.argv.index("--head") + 1]
        self.started = list(self._then(address))
        return self

    def status(self, worker):
        return WorkerStatus(WorkerState.RUNNING)

    def log(self, worker, max_bytes=4000):
        return ""

    def log_place(self, worker):
        return "nowhere"

    def restart(self, worker):
        pass

    def cancel(self, grace_s):
        for worker in self.started:
            worker.close()
