"""`pip install holdfast` has nothing of the memory tier's: who asks for it is told what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = "import sys; sys.modules['aiohttp'] = None\n"  # as an import that fails
RUN = """
import torch, holdfast
holdfast.Checkpointer({root!r}, {{"model": torch.nn.Linear(1, 1)}}, memory=holdfast.Memory())
"""
VERB = "from holdfast.cli.main import main; sys.argv = ['holdfast', 'agent', {action!r}]; main()"


@pytest.mark.parametrize("what", ["checkpointer", "start", "run"])
def test_what_to_install_is_told(tmp_path: Path, what: str) -> None:
    script = RUN.format(root=str(tmp_path / "root")) if what == "checkpointer" else None
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + (script or VERB.format(action=what))],
        capture_output=True, text=True, timeout=400, check=False,
        env=os.environ | {"HOLDFAST_MEMORY_DIR": str(tmp_path / "node"), "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode and "pip install 'torch-holdfast[memory]'" in done.stdout + done.stderr
    if what != "checkpointer":
        assert "Traceback" not in done.stderr
