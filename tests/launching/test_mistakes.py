"""`holdfast run` as somebody meets it who mistypes an option, or whose script is broken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.launch.command import main, parser
from launching.test_run import environment, until

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
Launch = Callable[..., subprocess.CompletedProcess[str]]

RAISES = """
import holdfast
@holdfast.recoverable
def main():
    raise ValueError("a fault of mine")
main()
"""
SAVES = """
import os, signal, sys, time
import torch, holdfast
import torch.distributed as dist
@holdfast.recoverable
def main():
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    with holdfast.Checkpointer("root", {"model": model}, every=10**6, sigterm_s=60) as ckpt:
        for step in range(ckpt.restore() + 1, 10**6):
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
            ckpt.step(step)
            if step == 5 and dist.get_rank() == 0:
                open("begun", "w").close()
            time.sleep(0.02)
main()
"""


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    def run(text: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(text)
        words = [sys.executable, "-m", "holdfast", "run", *options, "script.py"]
        return subprocess.run(
            words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
        )

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no script is given"),
        (["--spares", "1"], "no script is given"),
        (["--sparse", "1", "x.py"], "did you mean '--spares'?"),
        (["--max-restarts", "many", "x.py"], "--max-restarts"),
        (["--numa-binding", "node", __file__], "--numa-binding node"),
    ],
)
def test_mistakes_are_told_in_two_lines(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--numa-binding" in words and "--numa-binding" not in parser().format_help():
        pytest.skip("this torch has no such option")
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert told in printed and printed.count("\n") <= 2
    assert printed.startswith("holdfast run: error: ")


def test_a_script_that_does_not_compile_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script.py"
    path.write_text("import os\nprint(1\n")
    assert main([str(path)]) == 2
    printed = capsys.readouterr().err
    assert f'File "{path}", line 2' in printed and "SyntaxError" in printed


@pytest.mark.soak
@pytest.mark.parametrize(
    ("option", "told"),
    [("--nproc-per-node=gpus", "--nproc-per-node gpus"), ("--nnodes=many", "--nnodes many")],
)
def test_what_torch_refuses(launch: Launch, option: str, told: str) -> None:
    ran = launch("pass", option)
    assert ran.returncode == 2
    assert f"error: {told}: " in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.soak
@pytest.mark.parametrize("text", ["import no_such_module", RAISES], ids=["import", "function"])
def test_a_script_that_fails_on_all_ranks(launch: Launch, text: str, tmp_path: Path) -> None:
    """Whichever rank fails first, three times are enough; the report has the lines of the script alone."""
    ran = launch(text, "--nproc-per-node=3")
    assert ran.returncode == 1
    assert ran.stderr.count("failed after step 0: ") == 3
    assert "3rd time in the same way" in ran.stderr
    assert f'File "{tmp_path}/script.py", line ' in ran.stderr.partition("Root Cause")[2]
    assert "/holdfast/run/" not in ran.stderr and "runpy" not in ran.stderr


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_to_every_process(number: signal.Signals, tmp_path: Path) -> None:
    """As Slurm sends it to a step: ranks save, and the fork server lets them."""
    (tmp_path / "script.py").write_text(SAVES)
    words = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node=2", "--spares=1"]
    started = subprocess.Popen(
        [*words, "--shutdown-timeout=100", "--signals-to-handle=SIGTERM,SIGUSR1", "script.py"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: (tmp_path / "begun").exists() or started.poll() is not None)
    everyone = [started.pid, *descendants(started.pid)]
    assert len(everyone) >= 4
    for pid in everyone:
        os.kill(pid, number)
    _, printed = started.communicate(timeout=240)
    assert started.returncode == 128 + number, printed
    (saved,) = (tmp_path / "root" / "steps").iterdir()
    assert (saved / "manifest.json").exists()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everyone))


def descendants(pid: int) -> list[int]:
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(one for child in children for one in descendants(child))]
