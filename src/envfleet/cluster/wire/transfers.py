"""Transfers: large messages between two processes, in numbered chunks that survive a reconnect. Pure.

Each end has a Transfers for the other one. It hands out what is to be sent, a window of chunks at a time, and puts
together what comes. On a live connection ZeroMQ delivers everything, in order. So a chunk counts as lost only if the
receiver has seen a later one, or answers a probe that was sent behind the chunk and still expects it; then the sender
goes back to it. However slow a connection is, nothing is sent twice on it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envfleet.cluster.wire.codec import BadMessage, encode
from envfleet.cluster.wire.messages import CHUNK_BYTES, AboutChunks, Chunk, ChunkProbe, ChunksReceived, Limits
from envfleet.contract.arrays import Array

Frames = list[Any]

WINDOW = 16  # chunks that are sent and not yet received: 4 MiB
MOST_DAMAGED = 3  # times in a row that a message may arrive damaged
MOST_REPLIES = 256  # that wait to be sent; more only for a process that asks and does not read
PIECE_BYTES = 64  # of a chunk's header, for each piece in it


class Damaged(BadMessage):
    """A message has arrived damaged again and again."""


@dataclass(slots=True)
class Transfer:
    """A message that is sent in chunks."""

    frames: Frames
    first_number: int
    chunks: list[list[Array]]  # the parts of the frames in each chunk: views
    is_in_order: bool  # nothing else that is in order may overtake it
    done_s: float | None = None  # when the receiver had all of it

    @property
    def end_number(self) -> int:
        """The number of the first chunk that is not of this message."""
        return self.first_number + len(self.chunks)


@dataclass(slots=True)
class Outgoing:
    """What is sent to one process: a queue of messages, and how far it has come."""

    resend_s: float
    digest_of: Callable[[Frames], bytes] | None = None  # None: messages are not hashed
    chunk_bytes: int = CHUNK_BYTES
    window: int = WINDOW
    queue: deque[Transfer] = field(default_factory=deque)  # those that the receiver does not have whole
    progress_s: float = 0.0  # when the receiver was last known to have got on
    resent_bytes: int = 0
    _end_number: int = 0  # of all chunks that are queued or were
    _next_number: int = 0  # to be sent
    _received_number: int = 0  # that the receiver expects
    _most_number: int = 0  # that was sent, plus one
    _attempt: int = 0
    _probe: int = 0  # the number of the last one
    _probed_number: int | None = None  # chunks before this one were sent before the last probe; None: nobody asks
    _probe_s: float = 0.0  # no probe before this time

    def add(self, frames: Frames, now_s: float, is_in_order: bool = False) -> Transfer:
        """Queue a message; its arrays must not change until it is done."""
        transfer = Transfer(frames, self._end_number, _split(frames, self.chunk_bytes), is_in_order)
        if not self.queue:
            self._get_on(now_s)
        self.queue.append(transfer)
        self._end_number = transfer.end_number
        return transfer

    def to_send(self, now_s: float) -> Iterator[Frames]:
        """Messages to send now. One that was not sent when the iteration ends comes again with the next."""
        while self._next_number < min(self._end_number, self._received_number + self.window):
            transfer = next(each for each in self.queue if self._next_number < each.end_number)
            index = self._next_number - transfer.first_number
            pieces = transfer.chunks[index]
            yield self._chunk(transfer, index)
            if self._next_number < self._most_number:
                self.resent_bytes += sum(piece.nbytes for piece in pieces)
            self._next_number += 1
            self._most_number = max(self._most_number, self._next_number)
        if self._received_number < self._next_number and now_s >= self._probe_s:
            yield encode(ChunkProbe(self._probe + 1))
            self._probe += 1
            self._probed_number = self._next_number
            self._probe_s = now_s + self.resend_s

    def take(self, message: ChunksReceived, now_s: float) -> None:
        """The receiver says how far it is."""
        number, is_lost = message.next_number, message.lost_attempt == self._attempt
        if not 0 <= number <= self._most_number:
            raise BadMessage(f"chunk {number} is expected next; {self._most_number} were sent")
        if message.is_damaged:
            if is_lost and self.queue and number == self.queue[0].first_number:
                self._go_back(number)
            return
        if number > self._received_number:
            self._received_number = number
            self._next_number = max(self._next_number, number)
            self._get_on(now_s)
        while self.queue and self.queue[0].end_number <= number:
            self.queue.popleft().done_s = now_s
        is_answer = message.probe == self._probe and self._probed_number is not None and number < self._probed_number
        # The start of the message: it has arrived damaged, and the reply that said so was lost.
        is_known = number == self._received_number or (bool(self.queue) and number == self.queue[0].first_number)
        if (is_answer or is_lost) and is_known and number < self._next_number:
            self._go_back(number)

    def connected(self, now_s: float) -> None:
        """There is a new connection, so chunks may be lost: it is time to ask."""
        self._probe_s = now_s

    def _get_on(self, now_s: float) -> None:
        self.progress_s = now_s
        self._probe_s = now_s + self.resend_s

    def _go_back(self, number: int) -> None:
        self._next_number = self._received_number = number
        self._attempt += 1
        self._probed_number = None  # what was asked before is about what was sent before

    def _chunk(self, transfer: Transfer, index: int) -> Frames:
        is_first, is_last = index == 0, index == len(transfer.chunks) - 1
        message = Chunk(
            number=transfer.first_number + index,
            attempt=self._attempt,
            frame_bytes=[_view(frame).nbytes for frame in transfer.frames] if is_first else None,
            digest=self.digest_of(transfer.frames) if is_last and self.digest_of is not None else b"",
        )
        return encode(message, {str(place): piece for place, piece in enumerate(transfer.chunks[index])})


@dataclass(slots=True)
class Incoming:
    """What comes from one process: one message at a time is put together."""

    is_hashed: bool
    limits: Limits = field(default_factory=Limits)
    progress_s: float = 0.0  # when the last new chunk came
    repeated_bytes: int = 0  # that came although they had come before, or too early
    next_number: int = 0
    _first_number: int = 0  # of the message that comes at present
    _frames: list[Array] | None = None  # of that message; what has not come yet costs no memory
    _index: int = 0  # of the frame in which the next byte goes
    _offset: int = 0
    _num_damaged: int = 0
    _hashed: Any = None

    def take(self, chunk: Chunk, pieces: Sequence[Array], now_s: float) -> tuple[ChunksReceived, list[Array] | None]:
        """What to answer, and a message that is whole now. Raises BadMessage."""
        if not any(piece.nbytes for piece in pieces):
            raise BadMessage(f"chunk {chunk.number} has no bytes")
        if chunk.number != self.next_number:
            self.repeated_bytes += sum(piece.nbytes for piece in pieces)
            is_early = chunk.number > self.next_number
            return ChunksReceived(self.next_number, lost_attempt=chunk.attempt if is_early else -1), None
        if chunk.frame_bytes is not None:
            self._begin(chunk.number, chunk.frame_bytes)
        if self._frames is None:
            raise BadMessage(f"chunk {chunk.number} belongs to no message")
        for piece in pieces:
            self._put(piece)
        self.next_number += 1
        self.progress_s = now_s
        if self._index < len(self._frames):
            return ChunksReceived(self.next_number), None
        frames, self._frames = self._frames, None
        if self._hashed is not None and self._hashed.digest() != chunk.digest:
            self._num_damaged += 1
            if self._num_damaged >= MOST_DAMAGED:
                raise Damaged(f"a message has arrived damaged {MOST_DAMAGED} times: its hash is not what it should be")
            self.next_number = self._first_number
            return ChunksReceived(self.next_number, lost_attempt=chunk.attempt, is_damaged=True), None
        self._num_damaged = 0
        return ChunksReceived(self.next_number), frames

    def drop(self) -> None:
        """Forget the message that is not whole."""
        self._frames = None

    def _begin(self, number: int, frame_bytes: list[int]) -> None:
        limits = self.limits
        if self._frames is not None:
            raise BadMessage(f"chunk {number} begins a message in the middle of another")
        if not 0 < len(frame_bytes) <= limits.num_arrays + 1:
            raise BadMessage(f"a message of {len(frame_bytes)} frames; at most {limits.num_arrays + 1} are allowed")
        if min(frame_bytes) < 0 or max(frame_bytes) > limits.frame_bytes:
            raise BadMessage(f"frames of up to {max(frame_bytes)} bytes; at most {limits.frame_bytes} are allowed")
        if frame_bytes[0] > limits.header_bytes:
            raise BadMessage(f"a header of {frame_bytes[0]} bytes; at most {limits.header_bytes} are allowed")
        if not 0 < sum(frame_bytes) <= limits.total_bytes:
            raise BadMessage(f"a message of {sum(frame_bytes)} bytes; at most {limits.total_bytes} are allowed")
        try:
            self._frames = [np.empty(num_bytes, np.uint8) for num_bytes in frame_bytes]
        except MemoryError:
            raise BadMessage(f"a message of {sum(frame_bytes)} bytes does not fit in memory here") from None
        self._first_number, self._index, self._offset = number, 0, 0
        self._hashed = hashlib.blake2b(digest_size=16) if self.is_hashed else None
        self._skip_full_frames()

    def _put(self, piece: Array) -> None:
        """A piece lies within one frame."""
        assert self._frames is not None
        end = self._offset + piece.nbytes
        if self._index == len(self._frames) or end > self._frames[self._index].nbytes or piece.dtype != np.uint8:
            raise BadMessage("a chunk has more bytes than its message said")
        self._frames[self._index][self._offset : end] = piece.reshape(-1)
        if self._hashed is not None:
            self._hashed.update(piece.data)
        self._offset = end
        self._skip_full_frames()

    def _skip_full_frames(self) -> None:
        assert self._frames is not None
        while self._index < len(self._frames) and self._offset == self._frames[self._index].nbytes:
            self._index, self._offset = self._index + 1, 0


class Transfers:
    """Both directions between this process and another."""

    def __init__(self, resend_s: float, digest_of: Callable[[Frames], bytes] | None) -> None:
        """`digest_of` hashes messages; None: they are not checked. Over ipc the kernel copies from memory to memory."""
        self.outgoing = Outgoing(resend_s, digest_of)
        self.incoming = Incoming(is_hashed=digest_of is not None)
        self._replies: deque[Frames] = deque(maxlen=MOST_REPLIES)

    def add(self, frames: Frames, now_s: float, is_in_order: bool = False) -> Transfer | None:
        """Queue a message if it is large, or would overtake another one that is in order. None: send it as it is."""
        overtakes = is_in_order and any(transfer.is_in_order for transfer in self.outgoing.queue)
        if not overtakes and num_bytes(frames) <= CHUNK_BYTES:
            return None
        return self.outgoing.add(frames, now_s, is_in_order)

    def drop(self) -> None:
        """The other process is gone: forget what was under way."""
        self.outgoing.queue.clear()
        self.incoming.drop()
        self._replies.clear()

    def is_sending(self, frames: Frames) -> bool:
        """Is this very message on its way?"""
        return any(transfer.frames is frames for transfer in self.outgoing.queue)

    @property
    def is_open(self) -> bool:
        """Whether there is something to send."""
        return bool(self.outgoing.queue or self._replies)

    @property
    def has_outgoing(self) -> bool:
        """Whether there are messages that the other process does not have whole."""
        return bool(self.outgoing.queue)

    @property
    def resent_bytes(self) -> int:
        """Bytes of chunks that were sent more than once."""
        return self.outgoing.resent_bytes

    @property
    def progress_s(self) -> float:
        """When a chunk last arrived, in either direction."""
        return max(self.outgoing.progress_s, self.incoming.progress_s)

    def connected(self, now_s: float) -> None:
        """There is a new connection: chunks that were under way on the old one may be lost."""
        self.outgoing.connected(now_s)

    def take(self, message: AboutChunks, arrays: Mapping[str, Array], now_s: float) -> list[Array] | None:
        """What came about chunks. Returns the frames of a message that is whole now. Raises BadMessage."""
        if isinstance(message, ChunksReceived):
            self.outgoing.take(message, now_s)
            return None
        if isinstance(message, ChunkProbe):
            self._replies.append(encode(ChunksReceived(self.incoming.next_number, probe=message.number)))
            return None
        reply, frames = self.incoming.take(message, list(arrays.values()), now_s)
        self._replies.append(encode(reply))
        return frames

    def to_send(self, now_s: float) -> Iterator[Frames]:
        """Messages to send now; what is not sent comes again."""
        while self._replies:
            reply = self._replies[0]
            yield reply
            if self._replies and self._replies[0] is reply:
                self._replies.popleft()
        yield from self.outgoing.to_send(now_s)


class Digests:
    """Hashes of messages. The last ones are remembered: the same weights go to many workers."""

    def __init__(self) -> None:
        self._known: deque[tuple[Frames, bytes]] = deque(maxlen=2)

    def of(self, frames: Frames) -> bytes:
        """The hash of a message that does not change."""
        for known, digest in self._known:
            if known is frames:
                return digest
        digest = digest_of(frames)
        self._known.append((frames, digest))
        return digest


def digest_of(frames: Frames) -> bytes:
    """The hash of a message."""
    hashed = hashlib.blake2b(digest_size=16)
    for frame in frames:
        hashed.update(_view(frame).data)
    return hashed.digest()


def num_bytes(frames: Frames) -> int:
    """The bytes of all frames of a message."""
    return sum(len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes for frame in frames)


def _view(frame: Any) -> Array:
    """The bytes of a frame, not copied."""
    if isinstance(frame, np.ndarray):
        return frame.reshape(-1).view(np.uint8)
    return np.frombuffer(frame, np.uint8)


def _split(frames: Frames, chunk_bytes: int) -> list[list[Array]]:
    """All bytes in chunks of `chunk_bytes`; each piece of a chunk lies within one frame."""
    chunks: list[list[Array]] = [[]]
    num_free = chunk_bytes
    for frame in frames:
        view = _view(frame)
        while view.nbytes:
            if num_free <= 0:
                chunks.append([])
                num_free = chunk_bytes
            piece = view[:num_free]
            chunks[-1].append(piece)
            view = view[piece.nbytes :]
            num_free -= piece.nbytes + (PIECE_BYTES if view.nbytes == 0 else 0)
    return chunks
