"""Was a tensor written, was it moved?  The answers that can be had without a comparison of all its values.

    question                                                          answered by
    how often was it written?                                         `write_count`, `times_written`,
                                                                      `count_write`
    was it written, or does it lie elsewhere?                         `count_and_address`
    ... or is it another tensor than before?                          `Mark.of`
    ... also by writes that are not counted, of which samples tell?   `Mark.sampled`
    ... is that so of any of thousands of tensors?                    `Marks`
    was it written as a whole, counted or not?                        `corner`, a few of its elements
    may copies that were planned from there be made again?            `address_and_strides`
    may it be taken for placed as before, layout and all?             `Origin`

Three things are seen without touching the values:

* *The count.*  Torch adds one to a tensor's version counter with each write, when the kernel is done.
  Views and detached tensors share the counter of their base.  A DTensor and its local tensor have one
  each, so both are added.  Not counted: writes by way of `.data`, by numpy, and by some kernels, such as
  those of batch norm.
* *The address.*  `p.data = other` counts nothing, but the tensor lies elsewhere then.
* *Which tensor it is*, by weak references: an id may be given to another one.

A count says that a tensor was written, not that the write is over: `window` tells how that is found out.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch.distributed.tensor import DTensor

from holdfast.base.errors import need
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.placed import local_of, memory_of
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS

need("torch", torch.Tensor, "_version")

SAMPLES = 1 << 10
"""Number of elements in a sample, about."""
WHOLE_ELEMENTS = 1 << 10
"""Number of elements of an array of which all are looked at (`corner`): to copy them takes no time."""
SPREAD = 64
"""Number of elements that are looked at of a larger one, about."""
RUN_ELEMENTS = 8
"""Number of these that lie together, since each line of memory that is read takes a wait."""
_KNOWN = PLAIN_TENSORS | {DTensor}


def write_count(tensor: torch.Tensor, memory: torch.Tensor) -> int:
    """Number that grows with every write by way of a tensor or of the `memory` that has its values."""
    return tensor._version + memory._version


def times_written(tensor: torch.Tensor) -> int:
    """Number of counted writes to a tensor since it was made; 0 of one of inference mode, which counts
    none."""
    return 0 if tensor.is_inference() else write_count(tensor, memory_of(tensor))


def count_write(tensors: list[torch.Tensor]) -> None:
    """Count a write to each of these tensors, whose memory was filled past torch."""
    written = tensors + [t._local_tensor for t in tensors if isinstance(t, DTensor)]
    torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])


def count_and_address(tensor: torch.Tensor) -> tuple[int, int]:
    """Equal to what it is later only if the tensor was not written, so far as that is counted, nor moved.
    Another tensor in the same memory, such as a view that is made anew each time, is not told apart."""
    memory = memory_of(tensor)
    has_address = memory.layout is torch.strided  # a sparse one has several memories
    return write_count(tensor, memory), memory.data_ptr() if has_address else 0


def corner(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A view of a few elements from all over an array, two along each dim but the last, runs along that: a
    write to all of it, however it is made, changes some of them.  A small step in 16 bits rounds to none
    for most, hence some dozens.  A small array is seen whole.  Of two arrays of one shape, it has the same
    elements."""
    if values.size <= WHOLE_ELEMENTS:
        return values[...]
    *outer, last = values.shape
    halves: list[Any] = [slice(None, None, -(-n // 2)) for n in outer]
    rows = values[tuple([*halves, ...])]
    runs = max(2, (SPREAD >> len(outer)) // RUN_ELEMENTS)
    if last <= runs * RUN_ELEMENTS:
        return rows
    along = rows.strides[-1]
    strides = *rows.strides[:-1], last // runs * along, along
    return as_strided(rows, (*rows.shape[:-1], runs, RUN_ELEMENTS), strides, writeable=False)


def address_and_strides(memory: torch.Tensor) -> tuple[int, ...]:
    """Equal to what it is later only if copies of these elements may be made again as planned."""
    return memory.data_ptr(), *memory.stride()


@dataclass(frozen=True)
class Mark:
    """Tells if a tensor was written or moved since, or if it is another."""

    tensor: weakref.ref[torch.Tensor]
    seen: tuple[int, int]
    sample: bytes = b""
    """Values from all over the tensor, if it is on the host."""

    @staticmethod
    def of(tensor: torch.Tensor) -> Mark:
        return Mark(weakref.ref(tensor), count_and_address(tensor))

    @staticmethod
    def sampled(tensor: torch.Tensor) -> Mark:
        """A mark that sees uncounted writes, too, if they change an element of the sample."""
        return Mark(weakref.ref(tensor), count_and_address(tensor), _sample(local_of(tensor)))

    def differs(self, before: Mark) -> bool:
        same = self.tensor() is before.tensor()
        return not same or (self.seen, self.sample) != (before.seen, before.sample)


def _sample(local: torch.Tensor) -> bytes:
    if local.device.type != "cpu" or not local.numel():
        return b""
    flat = raw_array(local.reshape(-1)) if local.is_contiguous() else raw_array(local).ravel()
    return flat[:: max(1, len(flat) // SAMPLES)].tobytes()


class Marks:
    """Parameters and states as they are now: not equal to what is seen later if one of them was written,
    is another, or lies elsewhere.  Numbers and texts among them are compared.

    There may be thousands, and all are looked at several times per step: hence lists, not objects.
    """

    __slots__ = ("_counts", "_others", "_places", "_refs")

    def __init__(self, values: list[Any]) -> None:
        tensors, kinds = values, set(map(type, values))
        self._others: list[Any] = []
        if not kinds <= _KNOWN:
            found = list(_leaves(values))
            tensors = [v for v in found if isinstance(v, torch.Tensor)]
            others = (v for v in found if not isinstance(v, torch.Tensor))
            self._others = [v if isinstance(v, (int, float, str)) else id(v) for v in others]
        every = placed = tensors
        if not kinds <= PLAIN_TENSORS:
            inner = [t._local_tensor for t in tensors if isinstance(t, DTensor)]
            every = tensors + inner
            placed = inner + [t for t in tensors if not isinstance(t, DTensor)]
        self._refs = list(map(weakref.ref, tensors))
        self._counts = [t._version for t in every]
        self._places = [t.data_ptr() for t in placed]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Marks)
            and self._counts == other._counts
            and self._places == other._places
            and self._others == other._others
            and len(self._refs) == len(other._refs)
            and all(map(operator.is_, self._refs, other._refs))
        )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what nested lists and dicts hold."""
    if isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    else:
        yield value


class Origin(NamedTuple):
    """The memory and the placements of a tensor when it was placed."""

    memory: torch.Tensor
    placements: Any
    """A DTensor's, which are compared by identity; None of a plain tensor."""
    address: int
    layout: tuple[Any, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Origin:
        memory = memory_of(tensor)
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        return Origin(memory, placements, memory.data_ptr(), _layout(memory))

    def still_has(self, tensor: torch.Tensor) -> bool:
        """True if the tensor lies where it did, in the same layout.  To see that takes a tenth of the time
        of placing it."""
        memory, placements = tensor, None
        if isinstance(tensor, DTensor):
            memory, placements = tensor._local_tensor, tensor.placements
        return (
            memory is self.memory
            and placements is self.placements
            and memory.data_ptr() == self.address
            and _layout(memory) == self.layout
        )


def _layout(memory: torch.Tensor) -> tuple[Any, ...]:
    """Layout of the elements behind the address."""
    return memory.dtype, memory.shape, memory.stride(), memory.is_conj(), memory.is_neg()
