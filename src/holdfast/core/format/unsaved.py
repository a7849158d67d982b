"""The refusal of a value that cannot be saved, with its place in the state."""

from __future__ import annotations

from holdfast.base.errors import UsageError


class Unsaved(UsageError):
    """A value that cannot be saved; `path`: its place inside the outer value."""

    def __init__(self, path: str, why: str, hint: str | None = None) -> None:
        self.path, self.why = path.encode(errors="backslashreplace").decode(), why
        super().__init__(f"{self.path.strip() or 'value'}: {why}", hint=hint)

    def within(self, key: str) -> UsageError:
        """Return the error with `key` of the state in front of its path."""
        dot = "" if self.path[:1] in ("", " ") else "."
        return UsageError(f"{key}{dot}{self.path}: {self.why}", hint=self.hint)


def no_text(error: UnicodeEncodeError, path: str = "") -> Unsaved:
    part = error.object[max(error.start - 20, 0) : error.start + 20]
    return Unsaved(
        path,
        f"a text with half of a surrogate pair ({part!a}) cannot be saved",
        "if it is a file's name, save os.fsencode(name), which is bytes",
    )
