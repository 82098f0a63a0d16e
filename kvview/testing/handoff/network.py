"""A simulated network between engines: time, messages, and faults on every message.

The network reads a message from the sender's memory some time after ``send``, like a network card.
If the frames have changed since ``send``, the sender released or overwrote memory during a read
(HAND-4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, get_args

from kvview.handoff import Frame

Fault = Literal["lose", "late", "slow", "repeat", "cut", "flip", "replay", "elsewhere"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
"""Faults of one message: lost; delivered later; read later out of the sender's memory; delivered
twice; a frame cut or missing; delivered several times, each time with another bit changed; some
older messages delivered once more; delivered to all ranks of both engines as well."""

_MOST_KEPT = 30  # number of old messages that may be replayed
_NUM_LAST = 6  # number of small numbers at the end of a frame, of which a bit is changed
_NUM_REPLAYED = 4  # number of messages that are replayed at once
_MOST_WEIGHT = 128  # number of bytes from which a longer frame is not changed more often
_NUM_FLIPPED = 4  # number of bits that are changed anywhere in a frame


@dataclass(eq=False)
class _Sent:
    wire: SimulatedWire
    ticket: int
    address: str
    frames: Sequence[Frame]
    before: tuple[bytes, ...]
    read_at: float
    deliver_at: float
    fault: Fault | None


@dataclass(eq=False)
class SimulatedWire:
    """The wire of one rank in one life of an engine."""

    network: Network
    rank: int = 0
    is_dead: bool = False
    ended: list[int] = field(default_factory=list)
    inbox: list[Sequence[bytes]] = field(default_factory=list)

    def now(self) -> float:
        """Time of the network, in seconds."""
        return self.network.now

    def send(self, address: str, message: Sequence[Frame]) -> int:
        """Send frames, which the network reads some time later."""
        return self.network.send(self, address, message)

    def sent(self) -> Sequence[int]:
        """Return the tickets whose frames were read."""
        ended, self.ended = self.ended, []
        return ended

    def receive(self) -> Sequence[Sequence[bytes]]:
        """Return the messages that have arrived."""
        inbox, self.inbox = self.inbox, []
        return inbox

    def close(self) -> None:
        """Do nothing, because the next life of the engine ends this wire."""


class Network:
    """All wires, the time, and the faults.

    Args:
        seed: Seed for the random details of faults.
        longest: Maximum of seconds by which faults delay a message.
    """

    def __init__(self, seed: int, longest: int) -> None:
        self.now = 0.0
        self.faults: deque[Fault | None] = deque()
        """Faults of the next messages, in order; None for an intact message."""
        self.cut_off_until = 0.0
        """Time until which all messages are lost."""
        self.num_faults = 0
        self.overwritten: list[str] = []
        """Descriptions of messages whose frames changed before they were read."""
        self._rng = Random(seed)
        self._longest = longest
        self._wires: dict[tuple[str, int], SimulatedWire] = {}  # by address and rank
        self._unread: list[_Sent] = []
        self._on_the_way: list[tuple[float, tuple[str, int], tuple[bytes, ...]]] = []
        self._old: deque[tuple[tuple[str, int], tuple[bytes, ...]]] = deque(maxlen=_MOST_KEPT)
        self._num_tickets = 0

    def connect(self, address: str, rank: int = 0) -> SimulatedWire:
        """Make the wire of a new life; unread frames of the old life are lost."""
        if old := self._wires.get((address, rank)):
            old.is_dead = True
        self._unread = [one for one in self._unread if not one.wire.is_dead]
        wire = self._wires[address, rank] = SimulatedWire(self, rank)
        return wire

    def is_reading(self, address: str) -> bool:
        """Whether the network still reads frames of an engine."""
        wires = [wire for (place, _), wire in self._wires.items() if place == address]
        return any(one.wire in wires for one in self._unread)

    def heal(self) -> None:
        """Let later messages pass without faults."""
        self.faults.clear()
        self.cut_off_until = self.now

    def send(self, wire: SimulatedWire, address: str, frames: Sequence[Frame]) -> int:
        """Accept a message."""
        self._num_tickets += 1
        if wire.is_dead:
            return self._num_tickets
        fault = self.faults.popleft() if self.faults else None
        if self.now < self.cut_off_until:
            fault = "lose"
        self.num_faults += fault is not None
        read_at = deliver_at = self.now + 1
        later = self._rng.randint(1, self._longest)
        if fault == "slow":
            read_at = deliver_at = self.now + later
        elif fault == "late":
            deliver_at = self.now + later
        before = tuple(map(bytes, frames))
        self._unread.append(
            _Sent(wire, self._num_tickets, address, frames, before, read_at, deliver_at, fault)
        )
        return self._num_tickets

    def tick(self) -> None:
        """Advance the clock by one second, and read and deliver all messages that are due."""
        self.now += 1
        due = [one for one in self._unread if one.read_at <= self.now]
        self._unread = [one for one in self._unread if one.read_at > self.now]
        for one in due:
            one.wire.ended.append(one.ticket)
            frames = tuple(map(bytes, one.frames))
            if frames != one.before:
                self.overwritten.append(f"a message to {one.address}")
            self._put_on_the_way(one, frames)
        arrived = [one for one in self._on_the_way if one[0] <= self.now]
        self._on_the_way = [one for one in self._on_the_way if one[0] > self.now]
        for _, place, frames in arrived:
            if place in self._wires:
                self._wires[place].inbox.append(frames)

    def _put_on_the_way(self, one: _Sent, frames: tuple[bytes, ...]) -> None:
        rng, at, place = self._rng, one.deliver_at, (one.address, one.wire.rank)
        later = self.now + rng.randint(1, self._longest)
        self._old.append((place, frames))
        if one.fault == "lose":
            return
        if one.fault == "cut":
            frames = _cut(rng, frames)
        elif one.fault == "flip":
            self._on_the_way += [(at, place, changed) for changed in _flipped(rng, frames)]
            return
        elif one.fault == "repeat":
            self._on_the_way.append((later, place, frames))
        elif one.fault == "replay":
            self._on_the_way += [(later, *old) for old in rng.choices(self._old, k=_NUM_REPLAYED)]
        elif one.fault == "elsewhere":
            self._on_the_way += [(at, other, frames) for other in self._wires]
        self._on_the_way.append((at, place, frames))


def _cut(rng: Random, frames: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Drop the last frames, or the end of one frame."""
    place = rng.randrange(len(frames))
    rest = frames[:place]
    if place and rng.random() < 0.5:
        return rest
    return (
        *rest,
        frames[place][: rng.randrange(len(frames[place]) + 1) // 2],
        *frames[place + 1 :],
    )


def _flipped(rng: Random, frames: tuple[bytes, ...]) -> Iterator[tuple[bytes, ...]]:
    """Change one bit of a frame: a low bit of each of its last small numbers, or any bit."""
    weights = [min(len(frame), _MOST_WEIGHT) for frame in frames]  # a checksum is a short frame
    place = rng.choices(range(len(frames)), weights)[0] if any(weights) else 0
    frame = frames[place]
    numbers = [at for at, byte in enumerate(frame) if byte < 16 or chr(byte).isdigit()]
    bits = [8 * at + rng.randrange(2) for at in numbers[: -_NUM_LAST - 1 : -1]]
    bits += [rng.randrange(8 * len(frame)) for _ in range(_NUM_FLIPPED) if frame]
    for bit in bits:
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        yield (*frames[:place], bytes(changed), *frames[place + 1 :])
