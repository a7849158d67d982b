"""The files for Slurm and Kubernetes: what they call exists, and the script does what it says.

There is no cluster here: `srun` and `torchrun` are stood in for, the agent is real.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"

CLI = "from holdfast.cli.main import main; main()"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
TORCHRUN = """#!/bin/bash
echo "$@" >> runs
test -S "$HOLDFAST_MEMORY_DIR/agent.sock" || sleep 3
holdfast agent status --json >> agents
test $(wc -l < runs) -ge 3
"""


@pytest.mark.slow
def test_the_slurm_script_keeps_the_agent_and_restarts_torchrun(tmp_path: Path) -> None:
    """torchrun fails twice; the same agent is there all the time, and gone at the end."""
    bin_, home = tmp_path / "bin", Path("/dev/shm/holdfast-77")
    bin_.mkdir()
    scontrol, hostname = "#!/bin/bash\necho node0\n", "#!/bin/bash\necho 127.0.0.1\n"
    holdfast = f"#!/bin/bash\nexec {sys.executable} -c '{CLI}' \"$@\"\n"
    for name, text in (
        ("srun", SRUN), ("torchrun", TORCHRUN), ("scontrol", scontrol), ("hostname", hostname),
        ("holdfast", holdfast),
    ):  # fmt: skip
        (bin_ / name).write_text(text)
        (bin_ / name).chmod((bin_ / name).stat().st_mode | stat.S_IXUSR)
    env = os.environ | {
        "PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "node0",
    }  # fmt: skip
    try:
        done = subprocess.run(
            ["bash", str(DEPLOY / "slurm.sh"), "train.py"], env=env, cwd=tmp_path, timeout=120,
            capture_output=True, text=True,
        )  # fmt: skip
    finally:
        shutil.rmtree(home, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    runs = (tmp_path / "runs").read_text().splitlines()
    assert len(runs) == 3 and all(run.endswith("train.py") for run in runs)
    pids = set(re.findall(r'"pid": (\d+)', (tmp_path / "agents").read_text()))
    assert len(pids) == 1, done.stderr
    assert not Path(f"/proc/{pids.pop()}").exists()


def test_the_kubernetes_file_runs_commands_that_exist() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    (command,) = re.findall(r'command: \["holdfast", (.*)\]', text)
    words = re.findall(r'"([^"]*)"', command)
    assert words[:2] == ["agent", "run"]
    shown = subprocess.run(
        [sys.executable, "-c", CLI, "agent", "--help"],
        capture_output=True,
        text=True,
    )
    for word in words[2:]:
        assert not word.startswith("--") or word in shown.stdout
    assert text.count("HOLDFAST_MEMORY_DIR") == 2 and text.count("/memory/holdfast") == 2
