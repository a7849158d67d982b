"""When each tensor of a save is copied: at the call, or in the window.  That depends on its writers.

A step holds the state at the call.  A tensor that is copied in the window, in the background, must not be
written meanwhile.  The window ends with the next optimizer's step, which waits; no other writer waits.  So:

    the tensor                                                             is copied
    an optimizer of the state moves it, and the optimizer's steps are seen    in the window
    it was never seen to be written, such as a frozen base                    in the window
    it was written by anything else: an average, a target network,            at the call
      weights that the loop itself updates, that a forward pass writes, or
      into which an average is swapped for an evaluation
    buffers, tensors that the user handed over                                at the call
    any, of a state that is copied as soon as arranged                        at the call

The writes of a loop are learned.  The first save is always copied before its call returns.  A tensor that
is written between it and the next optimizer's step, or by anything but optimizers until the next save, is
copied at the call from then on.  A new tensor that no optimizer moves holds up its first save, too.  A
tensor that is written in the window all the same, for the first time, makes that save fail, by name.

Writes are seen by their count, and by a few elements (`writes.corner`), which also tell of writes that are
not counted (`p.data.lerp_`, numpy, other libraries), if they change most of a tensor on the host.  A device
is not asked at the call, which would wait for all its work: instead the first two saves of tensors that no
optimizer moves are held up, and a tensor that differs between their images is written by something.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from holdfast.core.layout import Box
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.writes import corner, write_count

COPIED_AT_CALL_BYTES = 16 << 20
"""Size of a state that is copied at the call as a whole: with less, the copy takes no longer than what is
arranged for one beside the training (`bench/claims/at_call.py`)."""

Corners = dict[tuple[str, int], bytes]
"""A few elements of parts of tensors, by name and number of the part."""


class LastSeen:
    """A tensor as it was at the last save.  All are looked at within each call, so this is quick."""

    __slots__ = ("elements", "is_on_host", "memory", "tensor", "version", "views")

    def __init__(self, tensor: LiveTensor) -> None:
        self.tensor = tensor
        self.is_on_host = is_on_host(tensor)
        self.memory = tensor.counted
        self.views = [corner(raw_array(p.local)) for p in tensor.parts] if self.is_on_host else []
        self.version = tensor.version
        self.elements = [view.tobytes() for view in self.views]
        """A few of each part, if it is on the host."""

    def has_changed(self) -> bool:
        """True if the tensor was written since it was looked at; it lies where it did."""
        version = write_count(self.tensor.source, self.memory)
        elements = [view.tobytes() for view in self.views]
        if version == self.version and elements == self.elements:
            return False
        self.version, self.elements = version, elements
        return True

    def differs(self, before: LastSeen) -> bool:
        """True if the tensor was written or moved since, or is another."""
        one, other = self.tensor, before.tensor
        return (self.version, self.elements) != (before.version, before.elements) or (
            one.source is not other.source
            or one.placed.local.data_ptr() != other.placed.local.data_ptr()
        )


class CopyTiming:
    """Learns which tensors of a run are written, and how: that decides when each is copied.

    Called on the training thread, but for `learn` and `compare_images`.
    """

    def __init__(self) -> None:
        self._written: set[str] = set()
        """Names of steady tensors that were seen to be written outside of optimizers' steps."""
        self._seen: dict[str, LastSeen] = {}
        """Tensors that no optimizer moves, by name."""
        self._views: dict[str, tuple[LiveTensor, list[np.ndarray[Any, Any]]]] = {}
        """A few elements of the parts of tensors, by name; those of other tensors are no use."""
        self._watched: tuple[Collected, list[int], Corners] | None = None
        """The state at a call whose window is looked at as a whole."""
        self._is_first = True
        self._images: dict[tuple[str, Box], bytes] = {}
        """A few elements, as they were last copied, of tensors on a device that no optimizer moves."""
        self._compared: set[str] = set()
        """Names of those tensors whose images of two saves were compared."""

    def sort(self, live: Collected) -> bool:
        """Set the tensors that are copied at the call (`Collected.aside`).  True if the save has to hold up
        the training until all is copied, since too little is known of the writes."""
        self.look()
        if is_small(live):
            live.aside, self._seen, self._views = set(live.tensors), {}, {}
            return False
        live.aside = {name for name, t in live.tensors.items() if not t.steady}
        loose, is_new = {n for n in live.tensors if n not in live.moved} - live.aside, False
        self._views = {name: one for name, one in [*self._views.items()] if name in live.tensors}
        seen = {}
        for name in loose - self._written:
            before, tensor = self._seen.get(name), live.tensors[name]
            if before is not None and before.tensor is tensor:  # it lies where it did
                now, is_written = before, before.has_changed()
            else:
                now = LastSeen(tensor)
                is_written = before is not None and now.differs(before)
            seen[name] = now
            if before is None or not (now.is_on_host or name in self._compared):
                is_new = True
            elif is_written:
                self._written.add(name)
        self._seen = seen
        live.aside |= self._written & live.tensors.keys()
        return self._is_first or is_new

    def watch(self, live: Collected) -> None:
        """Look at all that is written from now on until `look`: a save was held up."""
        self._is_first = False
        self._watched = live, versions(live), self.corners(live)

    def look(self) -> None:
        """Learn what was written since `watch`."""
        if self._watched is not None:
            (live, before, corners), self._watched = self._watched, None
            self.learn(
                {*written_since(live, before), *differing_corners(corners, self.corners(live))}
            )

    def learn(self, names: set[str]) -> None:
        """Copy these tensors at the call from now on.  From any thread."""
        self._written = self._written | names

    def forget(self) -> None:
        """The state was restored, which has written to all of it: begin anew."""
        self._seen, self._watched, self._is_first = {}, None, True
        self._images, self._compared = {}, set()

    def compare_images(self, live: Collected, images: dict[tuple[str, Box], bytes]) -> None:
        """Learn from what was copied of tensors on a device, which is asked nothing at the call.  On the
        saving thread."""
        before, self._images = self._images, images
        differing = {
            key[0] for key, elements in images.items() if before.get(key, elements) != elements
        }
        if differing:
            self.learn(differing)
        self._compared |= {name for name, _ in images.keys() & before.keys()}
        self._compared |= live.tensors.keys() - {name for name, _ in images}  # others copy them

    def corners(
        self, live: Collected, known: Mapping[str, LastSeen] = MappingProxyType({})
    ) -> Corners:
        """Return a few elements of each weight that is copied in the window, where it is on the host.

        States of optimizers are left out, to which scripts do not write.
        """
        return {
            (name, number): elements
            for name, t in live.tensors.items()
            if t.state == "param" and name not in live.aside
            for number, elements in enumerate(
                known[name].elements if name in known else self._elements(t)
            )
        }

    def corners_at_call(self, live: Collected) -> Corners:
        """Like `corners`, with the elements that `sort` has just read."""
        return self.corners(live, self._seen)

    def _elements(self, t: LiveTensor) -> list[bytes]:
        return [view.tobytes() for view in self._views_of(t)]

    def _views_of(self, t: LiveTensor) -> list[np.ndarray[Any, Any]]:
        if not is_on_host(t):
            return []
        known = self._views.get(t.name)
        if known is None or known[0] is not t:
            views = [corner(raw_array(part.local)) for part in t.parts]
            known = self._views[t.name] = t, views
        return known[1]


def is_on_host(t: LiveTensor) -> bool:
    """True if elements of a tensor may be looked at without a wait for a device."""
    return t.placed.local.is_cpu


def is_small(live: Collected) -> bool:
    """True if all that could be copied in the window has `COPIED_AT_CALL_BYTES` at most."""
    left = COPIED_AT_CALL_BYTES
    for t in live.tensors.values():
        for part in t.parts:
            left -= part.local.nbytes
        if left < 0:
            return False
    return True


def versions(live: Collected) -> list[int]:
    """Version counters of the tensors that are copied in the window."""
    return [t.version for name, t in live.tensors.items() if name not in live.aside]


def written_since(live: Collected, before: list[int]) -> list[str]:
    """Names of the tensors, copied in the window, that were written since the counters were at `before`."""
    now = versions(live)
    if now == before:
        return []
    names = [name for name in live.tensors if name not in live.aside]
    return [name for name, was, is_now in zip(names, before, now) if was != is_now]


def differing_corners(before: Corners, now: Corners) -> list[str]:
    """Names of the tensors whose elements differ; what only one side has is not compared."""
    return [key[0] for key, elements in before.items() if now.get(key, elements) != elements]
