"""The oldest torch that holdfast works with, and the refusal of an older one when holdfast is imported.

The version is read in torch's own `version.py`, since the commands work where torch is slow to import or
missing, and since `importlib.metadata` would take most of the time of `import holdfast`.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec

OLDEST = (2, 6)
"""The oldest version that the tests pass with (`make versions`); `pyproject.toml` says it, too."""


def refuse_older() -> None:
    """Raise UsageError if the torch that would be imported is older than `OLDEST`; import nothing.

    Without torch, or with one that does not say its version, nothing happens.
    """
    version = installed() or ""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= OLDEST:
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
    spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            with open(os.path.join(folder, "version.py")) as file:
                found = re.search(r"^__version__ = ['\"](.+?)['\"]", file.read(), re.MULTILINE)
        except OSError:
            continue
        return found and found[1]
    return None
