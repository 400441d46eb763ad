"""A worker's end of the wire, with a socket that a test plays."""

import threading
import time

import numpy as np
import pytest

from envfleet.cluster.wire.codec import Decoder, encode
from envfleet.cluster.wire.messages import FromHead, FromWorker, PullWeights, Weights
from envfleet.cluster.worker import link as link_module
from envfleet.cluster.worker.link import Link


class PlayedSocket:
    """Notes what is sent, and answers a pull as soon as somebody receives. A chunk has always just come."""

    def __init__(self, address, keys, silence_s, take, while_alone):
        self._take = take
        self.sent = []
        self.log = []  # "sent" and "received", in turn
        self.head_is_gone = False
        self.lock = threading.RLock()

    @property
    def received_chunk_s(self):
        return time.monotonic()

    progress_s = received_chunk_s

    def send(self, frames, is_in_order=False):
        self.sent.append(Decoder(FromWorker).decode(frames)[0])
        self.log.append("sent")

    def receive(self, waits):
        self.log.append("received")
        if self.sent:
            weights = Weights(version=3, code_id=1, digest=b"", bfloat16=[])
            self._take(*Decoder(FromHead).decode(encode(weights, {"w": np.ones(2, np.float32)})))


@pytest.fixture
def link(monkeypatch):
    monkeypatch.setattr(link_module, "WorkerSocket", PlayedSocket)
    return Link("ipc://nowhere", 0, None, 30.0)


def test_a_pull_is_asked_for_at_once_though_chunks_of_an_earlier_answer_have_just_come(link):
    weights, arrays = link.pull_weights(held_version=2, newest=3, order=1)
    assert (weights.version, arrays["w"].tolist()) == (3, [1.0, 1.0])
    assert link._socket.sent == [PullWeights(held_version=2)]
    assert link._socket.log == ["sent", "received"]  # nothing was waited for before it was asked
