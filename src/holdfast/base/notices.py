"""What a run has to tell its user: collected in the background, told when a call of the script is done."""

from __future__ import annotations

from typing import Literal

from holdfast.base.errors import notice_text, warn_user


class Notices:
    """Warnings and errors that are still to be told.  For one thread."""

    def __init__(self, on_error: Literal["warn", "raise"]) -> None:
        self.on_error = on_error
        self._warnings: list[str] = []
        self._errors: list[tuple[BaseException, str]] = []
        self._last: BaseException | None = None
        """The error that `complain_once` was called with last."""
        self._noticed: set[tuple[str, str]] = set()

    @property
    def texts(self) -> list[str]:
        return self._warnings + [text for _, text in self._errors]

    def warn(self, *texts: str) -> None:
        self._warnings += texts

    def once(self, notice: str, text: str, *, about: str = "") -> None:
        """Warn of what was noticed, once for each thing that it is `about`."""
        if (notice, about) in self._noticed:
            return
        self._noticed.add((notice, about))
        told = notice_text(notice, text)
        if told is not None:
            self._warnings.append(told)

    def was_given(self, notice: str) -> None:
        """Note that somebody else has told a notice."""
        self._noticed.add((notice, ""))

    def complain(self, error: BaseException, text: str = "") -> None:
        """Tell of a failure: by raising it, or by a warning, as `on_error` says."""
        if self.on_error == "raise":
            self._errors.append((error, text or str(error)))
        else:
            self._warnings.append(text or str(error))

    def complain_once(self, error: BaseException | None, text: str) -> None:
        """Complain, unless it is the same error as at the last call.  None: there is none any more."""
        if error is not None and error is not self._last:
            self.complain(error, text)
        self._last = error

    def was_told(self, error: BaseException | None) -> bool:
        """True if `complain_once` was called with that error last; of None, always."""
        return error is None or error is self._last

    def only_warn(self) -> None:
        """Raise nothing from now on."""
        self.on_error = "warn"
        self._spare_errors(self._errors)
        self._errors = []

    def tell(self) -> None:
        """Give the warnings, and then raise the first error; others come with the next calls."""
        texts, self._warnings = self._warnings, []
        for text in texts:
            warn_user(text)
        if self._errors:
            error, _ = self._errors.pop(0)
            raise error

    def tell_all(self) -> None:
        """Tell all, the first error by raising it and the others as warnings: there is no next call."""
        self._spare_errors(self._errors[1:])
        self._errors = self._errors[:1]
        self.tell()

    def _spare_errors(self, errors: list[tuple[BaseException, str]]) -> None:
        self._warnings += [text for _, text in errors]
