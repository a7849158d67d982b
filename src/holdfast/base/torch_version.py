"""The oldest torch that holdfast works with, and the refusal of an older one when holdfast is imported.

The version is read in torch's own `version.py`, since the commands work where torch is slow to import or
missing.  `import holdfast` itself imports neither `importlib.metadata` nor `re` nor `typing`, which would
take most of its time.
"""

from __future__ import annotations

import os
import sys

OLDEST = (2, 6)
"""The oldest version that the tests pass with (`make versions`); `pyproject.toml` says it, too."""
_DIGITS = "0123456789"


def refuse_older() -> None:
    """Raise UsageError if the torch that would be imported is older than `OLDEST`; import nothing.

    Without torch, or with one that does not say its version, nothing happens.
    """
    version = installed() or ""
    major, _, rest = version.partition(".")
    minor = rest[: len(rest) - len(rest.lstrip(_DIGITS))]
    if not (major.isdecimal() and minor) or (int(major), int(minor)) >= OLDEST:
        return
    from holdfast.base.errors import UsageError

    oldest = ".".join(map(str, OLDEST))
    raise UsageError(
        f"holdfast works with torch {oldest} and newer, and this Python has torch {version}",
        hint=f"pip install 'torch>={oldest}', or use a Python environment that has it",
    )


def installed() -> str | None:
    """The version of the torch that is imported, or would be; None if there is none, or it says none."""
    if "torch" in sys.modules:
        version = getattr(sys.modules["torch"], "__version__", None)
        return version and str(version)
    finders = (one for one in sys.meta_path if hasattr(one, "find_spec"))
    spec = next(filter(None, (one.find_spec("torch", None, None) for one in finders)), None)
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            with open(os.path.join(folder, "version.py")) as file:
                return next(filter(None, map(_stated, file)), None)
        except OSError:
            continue
    return None


def _stated(line: str) -> str | None:
    """The version in a line `__version__ = "VERSION"`; None for any other line."""
    name, _, value = line.partition(" = ")
    quote = value[:1]
    if name != "__version__" or quote not in ("'", '"'):
        return None
    return value[1:].partition(quote)[0] or None
