"""Transfers: large messages in chunks, over a wire that delivers in order until its connection dies."""

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.cluster.wire.codec import BadMessage, Decoder, encode
from envfleet.cluster.wire.messages import (
    CHUNK_BYTES,
    MOST_FRAME_BYTES,
    AboutChunks,
    Chunk,
    ChunkProbe,
    ChunksReceived,
    Limits,
)
from envfleet.cluster.wire.transfers import (
    MOST_DAMAGED,
    MOST_REPLIES,
    WINDOW,
    Damaged,
    Digests,
    Incoming,
    Outgoing,
    Transfers,
    digest_of,
    num_bytes,
)

RESEND_S = 5.0
DECODER = Decoder(AboutChunks)


class Wire:
    """Two ends and a connection between them: what is under way is lost when it dies."""

    def __init__(self, chunk_bytes=16, is_hashed=True, window=4):
        self.ends = [Transfers(RESEND_S, digest_of if is_hashed else None) for _ in range(2)]
        for end in self.ends:
            end.outgoing.chunk_bytes, end.outgoing.window = chunk_bytes, window
        self.under_way = [deque(), deque()]  # from end 0, from end 1
        self.received = [[], []]  # whole messages, by receiver
        self.num_chunk_bytes = 0
        self.numbers = []  # of all chunks that were sent
        self.now_s = 0.0

    def add(self, end, frames):
        return self.ends[end].outgoing.add(frames, self.now_s)

    def send(self, end, most=10**6):
        for count, frames in enumerate(self.ends[end].to_send(self.now_s)):
            if count == most:
                break  # this one could not be sent
            message, arrays = DECODER.decode([bytes(frame) for frame in frames])
            self.under_way[end].append((message, arrays))
            if isinstance(message, Chunk):
                self.num_chunk_bytes += sum(piece.nbytes for piece in arrays.values())
                self.numbers.append(message.number)

    def deliver(self, end, most=10**6):
        """What `end` has sent."""
        for _ in range(min(most, len(self.under_way[end]))):
            message, arrays = self.under_way[end].popleft()
            whole = self.ends[1 - end].take(message, arrays, self.now_s)
            if whole is not None:
                self.received[1 - end].append([frame.tobytes() for frame in whole])

    def reconnect(self):
        for end in (0, 1):
            self.under_way[end].clear()
            self.ends[end].outgoing.connected(self.now_s)

    def run(self):
        """Until nothing is left to do."""
        for _ in range(10**4):
            for end in (0, 1):
                self.send(end)
                self.deliver(end)
            if not any(self.under_way) and not any(end.is_open for end in self.ends):
                return
        raise AssertionError("it does not come to an end")


def message(*sizes):
    rng = np.random.default_rng(sum(sizes))
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


def as_bytes(frames):
    return [bytes(frame) for frame in frames]


SIZES = st.lists(st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any), min_size=1, max_size=4)


@given(SIZES, st.booleans())
def test_every_byte_travels_once_if_nothing_is_lost(sizes, is_hashed):
    wire = Wire(is_hashed=is_hashed)
    messages = [message(*each) for each in sizes]
    for frames in messages:
        wire.add(0, frames)
    wire.run()
    assert wire.received[1] == [as_bytes(frames) for frames in messages]
    assert wire.num_chunk_bytes == sum(map(num_bytes, messages))
    assert wire.ends[0].outgoing.resent_bytes == wire.ends[1].incoming.repeated_bytes == 0


@settings(max_examples=200)
@given(SIZES, SIZES, st.data())
def test_whatever_is_lost_with_connections_each_message_comes_once_and_in_order(sizes, other_sizes, data):
    """Both directions, with any delays; a connection may die at any time, with anything under way."""
    wire = Wire()
    messages = [[message(*each) for each in direction] for direction in (sizes, other_sizes)]
    to_add = [(end, frames) for end in (0, 1) for frames in messages[end]]
    for _ in range(data.draw(st.integers(0, 60))):
        what = data.draw(st.sampled_from(["add", "send", "deliver", "reconnect", "wait"]))
        end, most = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 6))
        if what == "add" and to_add:
            wire.add(*to_add.pop(0))
        elif what == "send":
            wire.send(end, most)
        elif what == "deliver":
            wire.deliver(end, most)
        elif what == "reconnect":
            wire.reconnect()
        else:
            wire.now_s += data.draw(st.sampled_from([0.1, RESEND_S, 100.0]))
    for each in to_add:
        wire.add(*each)
    for _ in range(100):
        for end in (0, 1):
            wire.send(end)
            wire.deliver(end)
        wire.now_s += 1.0
    assert wire.received[1] == [as_bytes(frames) for frames in messages[0]]
    assert wire.received[0] == [as_bytes(frames) for frames in messages[1]]
    assert not any(end.is_open for end in wire.ends)


@settings(max_examples=100)
@given(st.integers(1, 30), st.integers(0, 2**32))
def test_a_live_connection_never_carries_a_byte_twice_however_slow_it_is(num_chunks, seed):
    rng = random.Random(seed)
    wire = Wire()
    frames = message(16 * num_chunks)
    wire.add(0, frames)
    while not wire.received[1] or wire.ends[0].is_open:
        wire.now_s += rng.choice([0.5, 3 * RESEND_S, 1000.0])
        for end in (0, 1):
            wire.send(end)
            wire.deliver(end, rng.randrange(3))
        assert wire.now_s < 10**6, "it does not come to an end"
    assert wire.num_chunk_bytes == num_bytes(frames)


@given(st.integers(1, 20), st.integers(0, 20))
def test_a_reconnect_costs_a_window_at_most(num_delivered, num_under_way):
    wire = Wire(window=4)
    frames = message(16 * 40)
    wire.add(0, frames)
    for _ in range(num_delivered):
        wire.send(0)
        wire.deliver(0, 1)
        wire.send(1)
        wire.deliver(1)
    wire.send(0, num_under_way)
    wire.reconnect()
    wire.run()
    assert wire.received[1] == [as_bytes(frames)]
    assert wire.num_chunk_bytes - num_bytes(frames) == wire.ends[0].outgoing.resent_bytes <= 4 * 16
    first_resent = next((n for n, before in zip(wire.numbers[1:], wire.numbers, strict=False) if n <= before), None)
    assert first_resent in (None, num_delivered), "it goes on at the chunk that is missing"


def test_a_chunk_that_is_lost_is_known_from_the_next_one_without_waiting():
    """A worker's socket keeps what it has not sent, and sends it on the next connection: there is a gap."""
    wire = Wire(window=8)
    frames = message(16 * 8)
    wire.add(0, frames)
    wire.send(0)
    for _ in range(3):
        wire.under_way[0].popleft()
    wire.run()
    assert wire.now_s == 0.0 and wire.received[1] == [as_bytes(frames)]
    assert wire.numbers == [*range(8), *range(8)], "went back once, though five chunks came too early"


def test_old_chunks_that_come_late_are_dropped():
    wire = Wire(window=8)
    wire.add(0, message(16 * 8))
    wire.send(0)
    late = list(wire.under_way[0])
    wire.reconnect()
    wire.run()
    num_received = len(wire.received[1])
    wire.under_way[0].extend(late)
    wire.run()
    assert len(wire.received[1]) == num_received == 1
    assert wire.ends[1].incoming.repeated_bytes == 16 * 8


def test_a_message_that_arrives_damaged_is_sent_again():
    wire = Wire(window=8)
    frames = message(16 * 5)
    wire.add(0, frames)
    wire.add(0, message(3))
    wire.send(0)
    damaged, arrays = wire.under_way[0][2]
    wire.under_way[0][2] = (damaged, {name: array ^ 1 for name, array in arrays.items()})
    wire.run()
    assert wire.received[1] == [as_bytes(frames), as_bytes(message(3))]


def test_a_transfer_goes_on_if_the_news_of_the_damage_is_lost():
    wire = Wire(chunk_bytes=16, window=4)
    wire.add(0, message(60))
    while not wire.ends[1]._replies or not wire.ends[1].incoming._num_damaged:
        wire.send(0)
        wire.under_way[0] = deque(
            (each, {name: array ^ 1 for name, array in arrays.items()}) for each, arrays in wire.under_way[0]
        )
        wire.deliver(0)
        if not wire.ends[1].incoming._num_damaged:
            wire.send(1)
            wire.deliver(1)
    wire.ends[1]._replies.clear()
    wire.reconnect()
    wire.run()
    assert wire.received[1] == [as_bytes(message(60))]


def test_a_chunk_has_bytes():
    with pytest.raises(BadMessage, match="chunk 0 has no bytes"):
        Incoming(is_hashed=False).take(Chunk(number=0, attempt=0, frame_bytes=[4]), [], 0.0)


def test_replies_to_a_process_that_does_not_read_are_bounded():
    end = Transfers(RESEND_S, None)
    for number in range(10 * MOST_REPLIES):
        end.take(ChunkProbe(number), {}, 0.0)
    assert len(list(end.to_send(0.0))) == MOST_REPLIES


def test_many_small_frames_fit_in_the_frames_of_a_socket():
    frames = [np.zeros(size, np.uint8) for size in (CHUNK_BYTES, *[100] * 4000)]
    for chunk in Outgoing(RESEND_S, window=10**6).add(frames, 0.0).chunks:
        encoded = encode(Chunk(number=0, attempt=0), {str(place): piece for place, piece in enumerate(chunk)})
        assert max(num_bytes([frame]) for frame in encoded) <= MOST_FRAME_BYTES


def test_a_message_that_arrives_damaged_again_and_again_is_an_error():
    wire = Wire(window=8)
    frames = message(40)
    wire.add(0, frames)
    with pytest.raises(Damaged, match=f"{MOST_DAMAGED} times"):
        for _ in range(100):
            wire.send(0)
            frames[0][7] ^= 1  # somebody changes what is under way
            wire.ends[0].outgoing.digest_of = digest_of
            for index, (chunk, arrays) in enumerate(wire.under_way[0]):
                wire.under_way[0][index] = (chunk, {name: array ^ 1 for name, array in arrays.items()})
            wire.deliver(0)
            wire.send(1)
            wire.deliver(1)


def test_small_messages_are_sent_as_they_are_unless_they_must_follow_a_large_one():
    transfers = Transfers(RESEND_S, None)
    small, large = [b"small"], [bytes(CHUNK_BYTES + 1)]
    assert transfers.add(small, 0.0, is_in_order=True) is None
    assert transfers.add([bytes(CHUNK_BYTES)], 0.0) is None
    transfer = transfers.add(large, 0.0)
    assert transfer is not None and transfers.is_sending(large) and not transfers.is_sending(small)
    assert transfers.add(small, 0.0, is_in_order=True) is None, "orders may overtake weights"
    assert transfers.add(large, 0.0, is_in_order=True) is not None
    assert transfers.add(small, 0.0) is None, "it may overtake"
    assert transfers.add(small, 0.0, is_in_order=True) is not None, "orders do not overtake each other"


def test_a_window_is_sent_at_once_and_the_rest_as_it_is_received():
    outgoing = Outgoing(RESEND_S, None)
    transfer = outgoing.add([np.zeros(CHUNK_BYTES * (WINDOW + 3), np.uint8)], 0.0)
    assert len(list(outgoing.to_send(0.0))) == WINDOW
    assert list(outgoing.to_send(0.0)) == []
    outgoing.take(ChunksReceived(2), 1.0)
    assert len(list(outgoing.to_send(1.0))) == 2 and outgoing.progress_s == 1.0
    outgoing.take(ChunksReceived(WINDOW + 2), 2.0)
    assert transfer.done_s is None and len(list(outgoing.to_send(2.0))) == 1
    outgoing.take(ChunksReceived(WINDOW + 3), 3.0)
    assert transfer.done_s == 3.0 and not outgoing.queue


def test_arrays_are_not_copied_on_their_way_out():
    array = np.arange(2 * CHUNK_BYTES, dtype=np.float32)
    outgoing = Outgoing(RESEND_S, None)
    outgoing.add([b"header", array], 0.0)
    assert all(
        np.shares_memory(frame, array) for frames in outgoing.to_send(0.0) for frame in frames[1:] if frame.nbytes > 10
    )


def test_what_could_not_be_sent_comes_again():
    outgoing = Outgoing(RESEND_S, None, chunk_bytes=4)
    outgoing.add([bytes(8)], 0.0)
    for _ in outgoing.to_send(0.0):
        break
    numbers = [DECODER.decode([bytes(each) for each in frames])[0].number for frames in outgoing.to_send(0.0)]
    assert numbers == [0, 1] and outgoing.resent_bytes == 0


def test_a_probe_is_sent_only_after_a_while_without_progress():
    outgoing = Outgoing(RESEND_S, None, chunk_bytes=4)
    outgoing.add([bytes(8)], 0.0)
    assert len(list(outgoing.to_send(0.0))) == 2
    assert list(outgoing.to_send(RESEND_S - 0.1)) == []
    outgoing.take(ChunksReceived(1), RESEND_S - 0.1)
    assert list(outgoing.to_send(RESEND_S + 0.1)) == []
    (probe,) = outgoing.to_send(2 * RESEND_S)
    assert DECODER.decode(probe)[0] == ChunkProbe(1)
    assert list(outgoing.to_send(2 * RESEND_S + 1)) == []


def test_the_same_message_is_hashed_once(monkeypatch):
    frames = message(100)
    digests = Digests()
    assert digests.of(frames) == digest_of(frames)
    monkeypatch.setattr("envfleet.cluster.wire.transfers.digest_of", None)
    assert digests.of(frames)


WRONG = {
    "in no message": [(Chunk(0, 0), [4])],
    "a negative frame": [(Chunk(0, 0, [-1, 5]), [4])],
    "no frames": [(Chunk(0, 0, []), [4])],
    "no bytes": [(Chunk(0, 0, [0]), [])],
    "too many frames": [(Chunk(0, 0, [1] * 12), [4])],
    "too large a frame": [(Chunk(0, 0, [1, 1001]), [4])],
    "too large a header": [(Chunk(0, 0, [101]), [4])],
    "too large in all": [(Chunk(0, 0, [1, 900, 900]), [4])],
    "more bytes than said": [(Chunk(0, 0, [4, 4]), [4, 5])],
    "more pieces than said": [(Chunk(0, 0, [4]), [4, 4])],
    "a piece across frames": [(Chunk(0, 0, [4, 4]), [8])],
    "a message in a message": [(Chunk(0, 0, [4, 4]), [4]), (Chunk(1, 0, [4]), [4])],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_chunks_that_cannot_be_true_are_refused(wrong):
    limits = Limits(header_bytes=100, num_arrays=10, frame_bytes=1000, total_bytes=1500)
    incoming = Incoming(is_hashed=False, limits=limits)
    with pytest.raises(BadMessage):
        for chunk, sizes in WRONG[wrong]:
            incoming.take(chunk, [np.zeros(size, np.uint8) for size in sizes], 0.0)


@pytest.mark.parametrize("number", [-1, 3])
def test_a_receiver_cannot_have_what_was_not_sent(number):
    outgoing = Outgoing(RESEND_S, None, chunk_bytes=4)
    outgoing.add([bytes(8)], 0.0)
    list(outgoing.to_send(0.0))
    with pytest.raises(BadMessage, match="expected next"):
        outgoing.take(ChunksReceived(number), 0.0)
