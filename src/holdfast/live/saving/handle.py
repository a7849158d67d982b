"""The handle of a save, which its caller gets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from holdfast.base.arguments import function_of, timeout_of
from holdfast.base.calls import result_of
from holdfast.base.entry import public
from holdfast.base.errors import Deadline
from holdfast.base.sizes import size_text
from holdfast.base.storage_deadlines import slowest
from holdfast.base.text import one_line
from holdfast.live.state.window import resting


class Save:
    """A save under way.  `wait` raises its failure; `skipped` is True if it was left out because another
    save was in flight.  Any thread may use it."""

    def __init__(self, step: int, kind: str = "save") -> None:
        self.step = step
        self.kind = kind
        self.skipped = False
        self.told = False
        """True if `wait` has raised the failure."""
        self.uploaded = False
        """True once the step is also in the home behind the root (`Checkpointer(upload=)`)."""
        self.image_bytes = 0
        """Bytes of this rank's image; 0 until that is known."""
        self.seconds: float | None = None
        """Seconds from the call to the commit; None until then."""
        self._future: Future[bool] = Future()

    def __repr__(self) -> str:
        kind = "snapshot" if self.kind == "snapshot" else "save"
        return f"<Save: {kind} of step {self.step}, {self._fate}>"

    @property
    def _fate(self) -> str:
        if not self.done():
            return "under way"
        if self.error is not None:
            return f"failed with {one_line(error_text(self.error))}"
        if self.skipped or self.seconds is None:
            return "left out"
        return f"committed: {size_text(self.image_bytes)} of this rank in {self.seconds:.3g} s"

    def done(self) -> bool:
        """True if the save is committed, failed or skipped."""
        return self._future.done()

    def add_done_callback(self, call: Callable[[Save], object]) -> None:
        """Call `call(save)` when the save has ended in any way: on a thread of holdfast, which waits for
        it, or at once if the save has ended already.  An exception of `call` is only logged.
        """
        checked = function_of(call, "Save.add_done_callback", "call", "that takes the Save", 1)
        self._future.add_done_callback(lambda _: checked(self))

    @public
    def wait(self, timeout: float | None = None) -> None:
        """Block until the step is committed, or the save was left out.  Raises the failure, or Deadline
        after `timeout` seconds.

        Without `timeout` the wait also ends: a save fails, with Deadline, if storage or another rank does
        not answer for `deadline_s`.
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

    def _conclude(self, error: BaseException | None = None) -> None:
        """Say that the save has ended, with `error` if it failed.  Called by the operation, once."""
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(not self.skipped)

    @property
    def error(self) -> BaseException | None:
        """The failure of a save that is done; None if it succeeded or is still under way."""
        return self._future.exception() if self._future.done() else None


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
