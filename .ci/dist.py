"""Build what would be published, and try it as somebody who installs it: `make dist`.

The sdist is made from the tree, the wheel from the sdist; both are checked.  The wheel is installed into an
empty environment, where a training is killed in the middle and resumed, and has to end as one that was not.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
TRAINING = """
import hashlib, sys, time
import torch
import holdfast

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
optim = torch.optim.AdamW(model.parameters())
state = {"model": model, "optim": optim, "rng": holdfast.Rng()}
with holdfast.Checkpointer(sys.argv[1], state, every=1) as ckpt:
    step = ckpt.restore()
    print("from", int(step), flush=True)
    while step < 60:
        optim.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optim.step()
        step += 1
        ckpt.step(step)
        time.sleep(float(sys.argv[2]))
values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("end", hashlib.sha256(values).hexdigest())
"""


def build() -> Path:
    """The wheel, and beside it the sdist that it was made from."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True)
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir()], check=True
    )
    (wheel,) = DIST.glob("torch_holdfast-*.whl")
    return wheel


def installed(wheel: Path, place: Path) -> Path:
    """The folder of programs of an environment that has the wheel and what it needs, and nothing else."""
    venv.create(place, with_pip=True)
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", f"{wheel}[torch]"], check=True)
    return place / "bin"


def training(programs: Path, place: Path, name: str, pause_s: float) -> subprocess.Popen[str]:
    """A training that saves at each step into a root of that name."""
    script = place / "train.py"
    script.write_text(TRAINING)
    words = [programs / "python", script, place / name, str(pause_s)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.Popen(words, cwd=place, env=environment, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> dict[str, str]:
    """What a training said of itself, at its end."""
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    return dict(line.split() for line in printed.splitlines())


def main() -> None:
    wheel = build()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        programs = installed(wheel, place / "environment")
        whole = ended(training(programs, place, "whole", 0.0))
        killed = training(programs, place, "killed", 0.05)
        until = time.monotonic() + 120
        while not list(place.glob("killed/steps/0000000010*/**/manifest.json")):
            assert killed.poll() is None and time.monotonic() < until, "no step 10"
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        again = ended(training(programs, place, "killed", 0.0))
        assert int(again["from"]) >= 10, again
        assert again["end"] == whole["end"], (again, whole)
        shown = subprocess.run(
            [programs / "holdfast", "ls", place / "killed"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "newest" in shown.stdout, shown.stdout
    print(
        f"{wheel.name}: killed, resumed from step {again['from']}, ended as a run that was not killed"
    )


if __name__ == "__main__":
    main()
