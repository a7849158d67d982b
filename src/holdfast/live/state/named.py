"""Tensors of a run by name, each with its place: collected for a save, or prepared for a restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from holdfast.base.errors import UsageError
from holdfast.core.format import extras
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.layout import Box
from holdfast.live.ragged import is_ragged
from holdfast.live.state.placed import Placed, is_apart, place, torch_dtype
from holdfast.live.state.writes import Origin, write_count

INLINE_BYTES = 64 << 10
"""Tensors inside the state_dict of an object that are no larger go into the extras."""


class LiveTensor(msgspec.Struct, frozen=True, eq=False):
    """A tensor of the run as this rank holds it."""

    name: str
    state: str
    placed: Placed
    steady: bool
    source: torch.Tensor
    """The tensor that the run writes to: a DTensor counts its writes, its local tensor does not."""
    rest: tuple[Placed, ...] = ()
    """This rank's other parts, if it has several (ZeRO); all lie in one tensor."""
    origin: Origin | None = None
    """Origin of `source` when it was placed; lets the next save reuse this entry (`Collected.before`).
    None if it must be placed anew."""

    @property
    def parts(self) -> tuple[Placed, ...]:
        return (self.placed, *self.rest)

    def holder(self, box: Box) -> int:
        """The number of the part in which a box lies."""
        if not self.rest:
            return 0
        return next(i for i, part in enumerate(self.parts) if part.box & box == box)

    @property
    def counted(self) -> torch.Tensor:
        """The tensor that counts writes beside `source`: its local part."""
        # a DTensor that is detached, as to place it, has a local part with a counter of its own
        return self.placed.local if self.origin is None else self.origin.memory

    @property
    def version(self) -> int:
        """Count that grows with every write by way of the tensor or of its local part."""
        return write_count(self.source, self.counted)


class Misfit(msgspec.Struct, frozen=True):
    """An optimizer, by its key, whose saved states do not fit, and why."""

    key: str
    why: str
    is_idle: bool = False
    """True if the states are put back, and the optimizer has no use for them itself."""


@dataclass
class NamedTensors:
    """Tensors of this rank by name, each with its place in the whole."""

    tensors: dict[str, LiveTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tensors, with the first ones."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Encoded values that are no tensors, by name."""
    apart: dict[str, list[str]] = field(default_factory=dict)
    """By the name of a tensor that is made of others, its parts' names (`state.composite_tensors`)."""
    padded: set[str] = field(default_factory=set)
    """Tensors whose dim 0 is padded for this layout: more or fewer rows may have been saved."""
    devices: list[torch.device] | None = None
    """The devices of the tensors, without the CPU; None until asked for (`state.devices`)."""

    def add(self, name: str, state: str, tensor: torch.Tensor, *, steady: bool) -> None:
        if is_apart(tensor) or is_ragged(tensor):
            from holdfast.live.state.composite_tensors import add_flattened

            if add_flattened(self, name, state, tensor, steady=steady):
                return
        if name in self.tensors:
            if self.tensors[name].placed.local.data_ptr() == place(tensor, name).local.data_ptr():
                return
            raise UsageError(f"two different tensors are named {name!r}")
        if not name.isascii():
            extras.encode(name, path=name, utf8=True)
        placed = place(tensor, name)
        local = placed.local
        # conjugated and negated values are nowhere in memory; writes to inference tensors are not counted
        lazy = local.is_conj() or local.is_neg() or tensor.is_inference()
        origin = Origin.of(tensor)
        self.tensors[name] = LiveTensor(
            name, state, placed, steady and not lazy, tensor, (), origin
        )

    def memory_of_parts(
        self,
        name: str,
        parts: dict[str, torch.Tensor],
        put: Callable[[dict[str, torch.Tensor]], None],
    ) -> dict[str, torch.Tensor]:
        """The memory for the parts of a tensor whose number of elements may change: the live one, or in a
        restore new memory, which `put` then copies into the tensor."""
        return parts

    def alias(self, name: str, other: str) -> None:
        """Give a tensor and its parts another name, too."""
        inner = self.apart.get(other, [other])
        self.aliases |= {name + one.removeprefix(other): one for one in inner}

    def add_parts(
        self,
        name: str,
        state: str,
        parts: tuple[Placed, ...],
        source: torch.Tensor,
        *,
        steady: bool,
    ) -> None:
        """Like `add`, for known places; this rank may have none."""
        if name in self.tensors:
            raise UsageError(f"two different tensors are named {name!r}")
        if parts:
            self.tensors[name] = LiveTensor(name, state, parts[0], steady, source, parts[1:])


@dataclass
class Collected(NamedTensors):
    """Everything that this rank holds at the moment of a save."""

    keys: set[str] = field(default_factory=set)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The kind that a value is saved as, and the name of its type, by key."""
    modules: dict[str, list[nn.Module]] = field(default_factory=dict)
    """Modules as they were handed over, by key."""
    trained: set[int] = field(default_factory=set)
    """Parameters, by id, that an optimizer moves whose steps are seen."""
    moved: set[str] = field(default_factory=set)
    """Steady tensors that an optimizer moves whose steps are seen."""
    aside: set[str] = field(default_factory=set)
    """Tensors that are copied at the call (`state.copy_timing`); the others are copied in the window."""
    contents: dict[str, list[str]] = field(default_factory=dict)
    """Digests of the tensors that an object's state refers to by name, by key."""
    inline_bytes: float = INLINE_BYTES
    """Largest size of tensors in the state_dict of an object that go into the extras, in bytes."""
    rules: dict[str, str] = field(default_factory=dict)
    """Rule of an extra when the number of ranks changes; `ask` for loaders without one."""
    before: Mapping[str, LiveTensor] = field(default_factory=dict)
    """Tensors found the last time, by name; those that lie where they did are not placed again."""

    def add(self, name: str, state: str, tensor: torch.Tensor, *, steady: bool) -> None:
        if not (self.before and self._take_over(name, state, tensor, steady)):
            super().add(name, state, tensor, steady=steady)

    def _take_over(self, name: str, state: str, tensor: torch.Tensor, steady: bool) -> bool:
        """Add the entry of the last save, if the tensor still lies in the same memory; True if so."""
        known = self.before.get(name)
        if known is None or known.source is not tensor or name in self.tensors:
            return False
        if (known.state, known.steady) != (state, steady):
            return False
        if known.origin is None or not known.origin.still_has(tensor):
            return False
        self.tensors[name] = known
        return True


@dataclass
class Prepared(NamedTensors):
    """The places to which a restore puts what it reads."""

    saved: Callable[[str], TensorEntry | None] = lambda name: None
    """The manifest's entry of a tensor, by name."""
    keys: set[str] = field(default_factory=set)
    owned: set[str] = field(default_factory=set)
    """Saved tensors that have a place, but none of their own in `tensors`: those of the state_dict of
    objects, and numbers that ZeRO keeps once for many parameters."""
    taken: set[str] = field(default_factory=set)
    """Extras of modules that have a place."""
    recast: set[str] = field(default_factory=set)
    """States that are saved in another dtype than they live in (`Master.stored`)."""
    frozen: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Dtype and shape of each parameter that is left out (`trainable_only`), by name."""
    misfits: list[Misfit] = field(default_factory=list)
    """Optimizers that cannot use their saved states, or do not look at them."""
    unfit: set[int] = field(default_factory=set)
    """Ids of parameters whose saved states a load without `strict` leaves out as misfits."""
    puts: list[Callable[[], None]] = field(default_factory=list)
    """Called once tensors are read, for tensors that are not filled in place."""

    def memory_of_parts(
        self,
        name: str,
        parts: dict[str, torch.Tensor],
        put: Callable[[dict[str, torch.Tensor]], None],
    ) -> dict[str, torch.Tensor]:
        saved = {part: self.saved(f"{name}.{part}") for part in parts}
        entries = {part: entry for part, entry in saved.items() if entry is not None}
        if len(entries) < len(parts):
            return parts
        read = {n: torch.empty(e.shape, dtype=torch_dtype(e.dtype)) for n, e in entries.items()}
        self.puts.append(partial(put, read))
        return read
