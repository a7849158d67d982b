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
_SAYS = "__version__ = "


def refuse_older() -> None:
    """Raise UsageError if the torch that would be imported is older than `OLDEST`; import nothing.

    Without torch, or with one that does not say its version, nothing happens.
    """
    version = installed() or ""
    numbers = tuple(map(_leading_number, version.split(".")[:2]))
    if len(numbers) < 2 or -1 in numbers or numbers >= OLDEST:
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
    spec = next(filter(None, (one.find_spec("torch", None) for one in finders)), None)
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            with open(os.path.join(folder, "version.py")) as file:
                lines = [line for line in file if line.startswith(_SAYS)]
        except OSError:
            continue
        return lines[0][len(_SAYS) :].strip().strip("'\"") if lines else None
    return None


def _leading_number(text: str) -> int:
    """The number with which a text begins; -1 if it begins with none."""
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    return int(digits or -1)
