"""The other parties of a session, as one of them sees them: what they send is read as it comes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

from costmodel.generation.channel import Channel, Frame, GoneError

FAREWELL = "farewell"


class Peers:
    """Channels by rank, each read by a thread of its own, so that nobody waits for a party that is gone.

    on_gone: is told the rank of one that left without a farewell, at once and from that thread.
    """

    def __init__(self, channels: Mapping[int, Channel], on_gone: Callable[[int], None]) -> None:
        self._channels, self._on_gone = channels, on_gone
        self._frames: dict[int, SimpleQueue[Frame]] = {rank: SimpleQueue() for rank in channels}
        for rank in channels:
            Thread(target=self._read, args=(rank,), daemon=True).start()

    @property
    def sent_bytes(self) -> int:
        """To all of them so far."""
        return sum(channel.sent_bytes for channel in self._channels.values())

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._channels))

    def send(self, rank: int, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """To one of them; that it is gone is the reader's to say."""
        try:
            self._channels[rank].send(header, blobs)
        except GoneError:
            self._on_gone(rank)

    def send_all(self, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """The same to each."""
        for rank in self:
            self.send(rank, header, blobs)

    def receive(self, rank: int) -> Frame:
        """The next that this one sent; waits for it."""
        return self._frames[rank].get()

    def _read(self, rank: int) -> None:
        while True:
            try:
                frame = self._channels[rank].receive()
            except GoneError:
                self._on_gone(rank)
                return
            self._frames[rank].put(frame)
            if frame.header.get("kind") == FAREWELL:
                return
