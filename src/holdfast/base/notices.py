"""Warnings and errors of background work, kept until a call of the user's script can give them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Literal

from holdfast.base.errors import notice_text, warn_user

AGAIN_S = 60.0
"""Seconds between two warnings that differ in their numbers alone."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Repeats:
    """Warnings that repeat, such as one at each step: the first is given, then one a minute at most.

    Of one kind are warnings that differ in their numbers alone.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._given: dict[str, float] = {}
        """When a warning of each kind was given last."""
        self._left_out: dict[str, tuple[int, str]] = {}
        """How many of each kind were left out since, and the last of them."""

    def pass_on(self, text: str) -> list[str]:
        """Return what to give for a warning: nothing, or itself, with the number of those left out."""
        kind, now = _NUMBER.sub("0", text), self._clock()
        num, _ = self._left_out.pop(kind, (0, ""))
        if now - self._given.get(kind, now - AGAIN_S) < AGAIN_S:
            self._left_out[kind] = num + 1, text
            return []
        self._given[kind] = now
        return [text + (f"\n  ({num} more of this kind since the last one)" if num else "")]

    def rest(self) -> list[str]:
        """Return what was left out and not made up for: the last of each kind, with their number."""
        return [
            text + (f"\n  ({num - 1} more of this kind before)" if num > 1 else "")
            for num, text in self._left_out.values()
        ]


class Notices:
    """Warnings and errors that the user has not seen yet.  For one thread."""

    def __init__(
        self, on_error: Literal["warn", "raise"], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.on_error = on_error
        self._repeats = Repeats(clock)
        self._warnings: list[str] = []
        self._errors: list[tuple[BaseException, str]] = []
        self._last: BaseException | None = None
        """The error of the last call of `complain_once`."""
        self._noticed: set[tuple[str, str]] = set()

    @property
    def texts(self) -> list[str]:
        errors = [text for _, text in self._errors]
        return self._repeats.rest() + self._warnings + errors

    def warn(self, *texts: str) -> None:
        self._warnings += texts

    def once(self, notice: str, text: str, *, about: str = "") -> None:
        """Give a notice once for each value of `about`."""
        if (notice, about) in self._noticed:
            return
        self._noticed.add((notice, about))
        told = notice_text(notice, text)
        if told is not None:
            self._warnings.append(told)

    def was_given(self, notice: str) -> None:
        """Record that a notice was given elsewhere, so `once` does not repeat it."""
        self._noticed.add((notice, ""))

    def complain(self, error: BaseException, text: str = "") -> None:
        """Report a failure: raise it or warn, as `on_error` says."""
        if self.on_error == "raise":
            self._errors.append((error, text or str(error)))
        else:
            self._warnings.append(text or str(error))

    def complain_once(self, error: BaseException | None, text: str) -> None:
        """Report an error unless the last call had the same one.  None: the failure is over."""
        if error is not None and error is not self._last:
            self.complain(error, text)
        self._last = error

    def was_told(self, error: BaseException | None) -> bool:
        """True if the last call of `complain_once` had this error; always true for None."""
        return error is None or error is self._last

    def only_warn(self) -> None:
        """Raise nothing from now on."""
        self.on_error = "warn"
        self._spare_errors(self._errors)
        self._errors = []

    def tell(self) -> None:
        """Give the warnings, of those that repeat one a minute, then raise the first error; further errors
        wait for the next calls."""
        texts, self._warnings = self._warnings, []
        self._give(texts)
        if self._errors:
            error, _ = self._errors.pop(0)
            raise error

    def tell_all(self) -> None:
        """Raise the first error and give everything else as warnings, because no call follows."""
        self._spare_errors(self._errors[1:])
        self._errors = self._errors[:1]
        texts, self._warnings = self._warnings, []
        self._give(texts, is_end=True)
        self.tell()

    def _give(self, texts: list[str], *, is_end: bool = False) -> None:
        """Warn of texts, as far as they do not repeat; at the end also of what was left out before."""
        passed = [text for each in texts for text in self._repeats.pass_on(each)]
        for text in passed + (self._repeats.rest() if is_end else []):
            warn_user(text)

    def _spare_errors(self, errors: list[tuple[BaseException, str]]) -> None:
        self._warnings += [text for _, text in errors]
