"""An old torch is refused when holdfast is imported, and none is imported for that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.base.torch_version import OLDEST, installed

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
try:
    import holdfast
except ValueError as error:
    print(type(error).__name__, error)
else:
    print("imported", holdfast.__version__)
assert ("torch" in sys.modules) is {is_loaded}
"""


def imported(folder: Path, version: str | None, *, is_loaded: bool = False) -> str:
    """What a Python prints that has such a torch before its own; None: a torch that says no version."""
    package = folder / "torch"
    package.mkdir()
    says = f"__version__ = {version!r}\n" if version else ""
    package.joinpath("version.py").write_text(
        f"from typing import Optional\n\n{says}debug = False\n"
    )
    package.joinpath("__init__.py").write_text(says or "raise SystemExit('torch was imported')\n")
    program = "import torch\n" * is_loaded + PROGRAM.format(is_loaded=is_loaded)
    path = os.pathsep.join([str(folder), str(Path(holdfast.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("is_loaded", [False, True], ids=["not imported", "imported"])
@pytest.mark.parametrize("version", ["2.5.1+cu124", "1.13.1", "0.4"])
def test_an_older_torch_is_refused_in_a_sentence(
    tmp_path: Path, version: str, is_loaded: bool
) -> None:
    oldest = ".".join(map(str, OLDEST))
    assert imported(tmp_path, version, is_loaded=is_loaded) == (
        f"UsageError holdfast works with torch {oldest} and newer, and this Python has torch {version}\n"
        f"  hint: pip install 'torch>={oldest}', or use a Python environment that has it"
    )


@pytest.mark.parametrize(
    "version",
    [".".join(map(str, OLDEST)) + ".0a0+git1", "2.10.0", "2.15.0+cpu", "3.0.0", None]
    + ["0+untagged.12.gabc", "2rc1.3", "2", "nightly", ""],
)
def test_others_are_not(tmp_path: Path, version: str | None) -> None:
    assert imported(tmp_path, version) == f"imported {holdfast.__version__}"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.7.0'  # x\n", "2.7.0"),
        ('__version__ = "2.7.0"\n', "2.7.0"),
        ("__version__ = ''\n", None),
        ("__version__ = found()\n__version__ = '2.7.1'\n", "2.7.1"),
        ("__version__: str = '2.7.0'\n", None),
    ],
)
def test_only_a_version_in_quotes_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    (tmp_path / "torch/version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed() == version


def test_what_is_installed_is_read_without_importing_it() -> None:
    """As torch itself says it."""
    program = (
        "import sys; from holdfast.base.torch_version import installed; before = installed();"
        "assert 'torch' not in sys.modules; import torch; print(before == torch.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    assert installed()


def test_packages_and_pages_say_the_same_floor() -> None:
    oldest = ".".join(map(str, OLDEST))
    texts = {
        name: (ROOT / name).read_text() for name in ("pyproject.toml", "README.md", "docs/start.md")
    }
    assert re.findall(r'"torch>=([\d.]+)"', texts["pyproject.toml"]) == [oldest]
    assert re.findall(r"torch ≥ ([\d.]+\d)", texts["README.md"]) == [oldest]
    assert re.findall(r"torch ([\d.]+) or newer", texts["docs/start.md"]) == [oldest]
