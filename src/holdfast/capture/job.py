"""One save: the handle that its caller holds, the plan that it follows, and what is known of it so far."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from holdfast.arguments import timeout_of
from holdfast.capture.exactness import Exactness
from holdfast.codec.digest import ALGORITHM, CHUNK_BYTES
from holdfast.errors import Deadline
from holdfast.format.image import Image
from holdfast.format.manifest import VERSION, Manifest
from holdfast.layout import Placement
from holdfast.patience import slowest
from holdfast.state.agreed import Agreement
from holdfast.state.live import Live
from holdfast.state.protocol import Verdict
from holdfast.state.snapshot import Buffer, Copies, Moment
from holdfast.state.window import Window, resting
from holdfast.threads import result_of


class Save:
    """A save under way.  `wait` raises what went wrong; `skipped` tells that another was in flight."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.kind = "save"
        self.skipped = False
        self.told = False
        """True if the caller of `wait` has been given the failure."""
        self._future: Future[bool] = Future()

    def done(self) -> bool:
        """True if the save is committed, failed or skipped."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the step is committed.  Raises the failure, or Deadline after `timeout` s.

        Without `timeout` for as long as the save gets on: it fails by itself, with Deadline, where storage
        or another rank does not answer for `deadline_s`.
        """
        timeout = timeout_of(timeout, "Save.wait")

        def late() -> Deadline:
            text = f"the save of step {self.step} is not done after {timeout:g} s"
            return Deadline(text, step=self.step, hint=slowest())

        try:
            with resting():
                result_of(self._future, timeout, late)
        except BaseException as error:
            self.told = self.told or error is self.error
            raise

    @property
    def error(self) -> BaseException | None:
        """The failure of a save that is done; None if it succeeded or is still under way."""
        return self._future.exception() if self._future.done() else None


@dataclass
class SavePlan:
    """An agreement and what follows from it for this rank."""

    agreement: Agreement
    digest: str
    placement: Placement
    image: Image | None = None
    copies: dict[int, tuple[memoryview, Copies]] = field(default_factory=dict)
    """Memory and the copies that fill it, by the id of the memory."""
    fingerprint: Any = None
    description: bytes = b""


def new_plan(agreement: Agreement, digest: str) -> SavePlan:
    """The closed form of where everything goes, from an agreement."""
    shell = Manifest(
        VERSION, 0, 0, "", "", {}, agreement.mesh, CHUNK_BYTES, ALGORITHM,
        agreement.shardings, agreement.tensors, agreement.aliases, (), {}, {},
    )  # fmt: skip
    return SavePlan(agreement, digest, shell.placement)


@dataclass
class SaveJob:
    """One save on this rank."""

    number: int
    step: int
    save: Save
    window: Window | None
    moment: Moment
    busy: bool
    durable: bool = False
    """True for a snapshot that goes on to storage."""
    follows: bool = False
    """True if it is copied from a replica, which waits for it, and not from the live tensors."""
    exactness: Exactness | None = None
    """Exactness of what was copied from a replica here."""
    notes: dict[str, str] = field(default_factory=dict)
    """On rank 0: what else its manifest says of how it was made."""
    description: bytes = b""
    buffer: Buffer | None = None
    """Memory that its image is laid out in, as long as it needs that."""
    released: bool = False
    """True if it needs no memory any more."""
    copies: Copies | None = None
    error: BaseException | None = None
    plan: SavePlan | None = None
    replaced: str | None = None
    """On rank 0: the attempt that the step had before."""
    uncertain: bool = False
    """On rank 0: storage did not answer the commit, so the manifest may still appear."""
    verdict: Verdict | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def live(self) -> Live:
        return self.moment.live

    def kind(self, tier: str) -> str:
        """Name of the job: that of its tier, but a snapshot that goes on to storage is a save."""
        return "save" if self.durable else tier

    @property
    def in_words(self) -> str:
        """Words for what other ranks wait for: `the save of step 1`."""
        if self.window is None:
            return "to prepare its saves"
        return f"the {self.save.kind} of step {self.step}"

    def close_window(self) -> None:
        """The next optimizer step may go ahead."""
        if self.window is not None:
            self.window.done()


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
