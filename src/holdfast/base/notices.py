"""Warnings and errors of background work, kept until a call of the user's script can give them."""

from __future__ import annotations

from typing import Literal

from holdfast.base.errors import notice_text, warn_user


class Notices:
    """Warnings and errors that the user has not seen yet.  For one thread."""

    def __init__(self, on_error: Literal["warn", "raise"]) -> None:
        self.on_error = on_error
        self._warnings: list[str] = []
        self._errors: list[tuple[BaseException, str]] = []
        self._last: BaseException | None = None
        """The error of the last call of `complain_once`."""
        self._noticed: set[tuple[str, str]] = set()

    @property
    def texts(self) -> list[str]:
        return self._warnings + [text for _, text in self._errors]

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
        """Give all warnings, then raise the first error; further errors wait for the next calls."""
        texts, self._warnings = self._warnings, []
        for text in texts:
            warn_user(text)
        if self._errors:
            error, _ = self._errors.pop(0)
            raise error

    def tell_all(self) -> None:
        """Raise the first error and give everything else as warnings, because no call follows."""
        self._spare_errors(self._errors[1:])
        self._errors = self._errors[:1]
        self.tell()

    def _spare_errors(self, errors: list[tuple[BaseException, str]]) -> None:
        self._warnings += [text for _, text in errors]
