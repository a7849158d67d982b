"""What the processes of a training tell `holdfast prove`, and its answers; over a Unix socket.

A message is a msgpack array after its length (u32, little-endian).  A process sends `BeforeStep` before
each optimizer step, and waits for one byte: `GO`, or `LAST`, upon which it sends `AfterStep` when the step
is made.  It waits for ever where a run is to end: whoever runs it kills it there.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Sequence

import msgspec

from holdfast.base.wire import decode_msgpack

ADDRESS = "HOLDFAST_PROVE"
"""Environment variable: the path of the socket."""
OWN = "HOLDFAST_PROVE_OWN"
"""Environment variable: the folders that a run may write to, separated by `os.pathsep`."""
GO, LAST = b"g", b"l"
WIDTH = 8
"""Numbers in a sketch."""
_LENGTH = struct.Struct("<I")


class Item(msgspec.Struct, array_like=True):
    """A value at one moment: its digest, and for people and tolerances a little more."""

    digest: int
    text: str = ""
    """A number or a short text, as Python writes it; empty for a tensor."""
    sketch: list[float] | None = None
    """Sums with random signs, whose differences estimate the distance of tensors (`inside/values.py`)."""
    sums: bool = False
    """True for a part of a tensor: sketches of its parts add up."""
    narrow: bool = False
    """True if each of the float32 values is one that bfloat16 or float16 has."""


class Batch(msgspec.Struct, array_like=True):
    """A batch that a DataLoader gave: its place in its iterator, its digest, those of its samples."""

    place: int
    digest: int
    samples: list[int]
    is_drawn: bool = False
    """Whether its sampler draws from torch's own generator."""


class BeforeStep(msgspec.Struct, tag=True, array_like=True):
    """An optimizer that is about to step, and everything as it takes it."""

    rank: int
    world: int
    pid: int
    attempt: int
    """Number of the attempt in this process: a restart in place begins another."""
    optimizer: str
    items: dict[str, Item]
    """By kind and name, as in `param model.fc.weight`."""
    batches: list[Batch]
    """Given since the step before, by any DataLoader of the process."""
    losses: list[Item]
    """The values with which `backward` began since the step before."""
    unseen: dict[str, str]
    """What was not looked at, by name, and why."""


class AfterStep(msgspec.Struct, tag=True, array_like=True):
    """Everything as the last step left it."""

    items: dict[str, Item]


class WasSaved(msgspec.Struct, tag=True, array_like=True):
    """What `torch.save`, DCP, pickle, json, numpy or safetensors was given: digests by the path of keys."""

    leaves: dict[str, Item]


class WasLoaded(msgspec.Struct, tag=True, array_like=True):
    """An object that has taken a state_dict, and its values right after it."""

    kind: str
    owner: int
    """`id` of the object; `BeforeStep` of the same process, later, tells names."""
    items: dict[str, Item]


class LoadedNames(msgspec.Struct, tag=True, array_like=True):
    """Names of the objects that took a state_dict, by their `id`, and which of them the loop trains."""

    names: dict[int, str]
    trained: list[int]


class Trouble(msgspec.Struct, tag=True, array_like=True):
    """Something upon which a run cannot go on: `input`, or `outside` with a path."""

    kind: str
    about: str


Message = BeforeStep | AfterStep | WasSaved | WasLoaded | LoadedNames | Trouble
_encoder = msgspec.msgpack.Encoder()


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the estimated L2 distance of two tensors with these sketches."""
    return math.dist(a, b) / math.sqrt(WIDTH)


def send(channel: socket.socket, message: Message) -> None:
    """Send a message; blocks while the other side does not read."""
    data = _encoder.encode(message)
    channel.sendall(_LENGTH.pack(len(data)) + data)


class Incoming:
    """Messages of one process, taken from its bytes as they come."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self._buffer = bytearray()

    def read(self) -> list[Message] | None:
        """Return the messages that have arrived whole; None if the process has closed its end."""
        try:
            data = self.channel.recv(1 << 20)
        except ConnectionError:
            return None
        if not data:
            return None
        self._buffer += data
        out: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            out.append(decode_msgpack(bytes(self._buffer[_LENGTH.size : end]), Message))
            del self._buffer[:end]
        return out
