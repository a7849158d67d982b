"""`prove` itself: it changes nothing, leaves nothing, and says at once what it cannot do."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.base.errors import UsageError
from holdfast.prove.proving import Plan
from holdfast.prove.proving import prove as prove_plan
from holdfast.prove.running import CannotProve, _with
from holdfast.testing import prove
from prove.forked import listening

CAUSES = Path(__file__).with_name("causes")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"


def train(root: Path, with_generator: bool = True) -> None:
    """A training with dropout that saves every third step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    path, step = root / "last.pt", 0
    root.mkdir(exist_ok=True)
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optim"])
        step = saved["step"]
        if with_generator:
            torch.set_rng_state(saved["generator"])
    while step < 8:
        optim.zero_grad()
        model(torch.full((2, 4), float(step))).sum().backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            states = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            torch.save({**states, "generator": torch.get_rng_state()}, root / "new")
            os.replace(root / "new", path)


def train_without(root: Path) -> None:
    """The same, whose generator is not restored."""
    train(root, with_generator=False)


@pytest.mark.soak
def test_a_function_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert prove(train, steps=8, seed=1)
    proof = prove(train_without, steps=8, seed=1)
    assert not proof and proof.cause == "generator"
    assert "generator torch" in repr(proof)
    assert [*tmp_path.iterdir()] == []


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(UsageError, match="a new process cannot import it"):
        prove(lambda root: None)
    with pytest.raises(UsageError, match="a new process cannot import it"):
        prove(functools.partial(train, with_generator=False))


def test_a_script_computes_what_it_computes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(CAUSES, tmp_path / "scripts"))
    with listening(tmp_path) as command:
        words = [*command(), "generator.py", "--root", "root", "--right"]
        proof = prove_plan(Plan(words, steps=12, kill_at=8, keep=True))
    assert proof.exact
    done = subprocess.run(
        [sys.executable, "generator.py", "--root", "root", "--right"], check=False
    )
    assert done.returncode == 0
    whole = min(Path(proof.kept).iterdir(), key=lambda path: int(path.name))
    files = {p.name: p for p in (whole / "cwd" / "root").iterdir()}
    own = {p.name: p for p in Path("root").iterdir()}
    compared = 0
    for name in files.keys() & own.keys():
        a, b = torch.load(files[name]), torch.load(own[name])
        for key, value in a["model"].items():
            assert torch.equal(value, b["model"][key]), (name, key)
            compared += 1
    assert compared


def test_what_is_there_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(CAUSES, tmp_path / "scripts"))
    real = Path("runs/real")
    real.mkdir(parents=True)
    (real / "0003.pt").write_text("a real run")
    Path("runs/other").mkdir()
    with listening(tmp_path) as command:
        words = [*command(), "generator.py", "--root", "runs/real", "--right"]
        assert prove_plan(Plan(words, steps=12, kill_at=8)).exact
    assert [p.read_text() for p in real.iterdir()] == ["a real run"]
    assert not list(Path().glob("holdfast-prove-*"))


@pytest.mark.soak
def test_the_command_says_it_in_json_and_ends_with_its_runs(tmp_path: Path) -> None:
    shutil.copytree(CAUSES, tmp_path / "scripts")
    verb = [sys.executable, "-m", "holdfast", "prove", "--steps", "12", "--kill-at", "8"]
    script = ["--", sys.executable, "fresh_optimizer.py", "--root", "root"]
    done = subprocess.run(
        [*verb, "--json", *script],
        cwd=tmp_path / "scripts",
        capture_output=True,
        text=True,
        check=False,
    )
    said = json.loads(done.stdout)
    assert (done.returncode, said["exact"], said["cause"]) == (1, False, "fresh-optimizer")

    running = subprocess.Popen([*verb, *script], cwd=tmp_path / "scripts")
    while not list((tmp_path / "scripts").glob("holdfast-prove-*/1/output.log")):
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    assert running.wait() == 128 + signal.SIGTERM
    assert not list((tmp_path / "scripts").glob("holdfast-prove-*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state": ["s3://bucket/run"]}, "is not a folder"),
        ({"state": ["../elsewhere"]}, "is not inside of"),
        ({"state": ["/somewhere/else"]}, "neither in the command nor in the environment"),
        ({"command": ["pyton", "train.py"]}, "no program 'pyton'\n  hint: did you mean 'python'"),
        ({"command": ["/etc/passwd", "20"]}, "/etc/passwd is not executable"),
        ({"command": ["python 'train.py"]}, "No closing quotation"),
        ({"then": " "}, "no program ''"),
        ({"then": "A=1 python train.py"}, "no program 'A=1'\n  hint: env sets variables"),
        ({"then": "python 'train.py"}, "No closing quotation"),
        ({"resume_with": "'"}, "No closing quotation"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        prove_plan(Plan(**{"command": ["python", "train.py"], **options}))  # type: ignore[arg-type]


OF_ITS_OWN = """
import os, sys, torch
path, crash, anew = sys.argv[1], "--crash" in sys.argv, "--anew" in sys.argv
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step, resumed = 0, os.path.exists(path) and not anew
if resumed:
    saved = torch.load(path)
    model.load_state_dict(saved["model"]), optim.load_state_dict(saved["optim"])
    step = saved["step"]
while step < 12:
    if resumed and crash and step == 10:
        sys.exit(3)
    optim.zero_grad()
    model(torch.full((1, 2), float(step))).sum().backward()
    optim.step()
    step += 1
    if step % 3 == 0:
        torch.save({"model": model.state_dict(), "optim": optim.state_dict(), "step": step}, path)
"""


def test_a_file_that_is_there_is_not_written_by_what_python_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.save` opens its file in C++."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(OF_ITS_OWN)
    Path("real.pt").write_text("a real run")
    with (
        listening(tmp_path) as command,
        pytest.raises(CannotProve, match=r"writes .*real\.pt") as caught,
    ):
        prove_plan(Plan([*command(), "script.py", "real.pt", "--anew"], steps=12))
    assert caught.value.cause == "one-place"
    assert Path("real.pt").read_text() == "a real run"


def test_packages_may_be_imported_before_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is observed of them needs no torch; in a new interpreter, which has not imported it."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("import safetensors, safetensors.numpy, json\n" + OF_ITS_OWN)
    assert prove_plan(Plan([sys.executable, "script.py", "last.pt"], steps=6, kill_at=4)).exact
    Path("script.py").write_text(
        "import safetensors.numpy as s, numpy as np\n"
        "s.save_file({'a': np.ones(2)}, 'real.safetensors')\n"
    )
    Path("real.safetensors").write_text("a real run")
    with pytest.raises(CannotProve, match=r"writes .*real\.safetensors"):
        prove_plan(Plan([sys.executable, "script.py"], steps=6))
    assert Path("real.safetensors").read_text() == "a real run"


def test_a_resumed_run_that_ends_too_early_is_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(OF_ITS_OWN)
    with listening(tmp_path) as command:
        words = [*command(), "script.py", "last.pt"]
        assert prove_plan(Plan(words, steps=12, kill_at=7)).exact
        with pytest.raises(CannotProve, match="ended with status 3 behind step 9") as caught:
            prove_plan(Plan([*words, "--crash"], steps=12, kill_at=7))
    assert caught.value.cause == "ended-early"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "cause"), [("older_step.py", "older-step"), ("scaler.py", "scaler")]
)
def test_what_a_launcher_recovers_is_proved(
    script: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts the ranks again in the same launch; a fault is found there, too."""
    monkeypatch.chdir(shutil.copytree(CAUSES, tmp_path / "scripts"))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        "1",
    ]
    words = [*torchrun, script, "--root", "root"]
    proof = prove_plan(Plan(words, steps=12, kill_at=8, kill="one"))
    assert proof.cause == cause, repr(proof)
    proof = prove_plan(Plan([*words, "--right"], steps=12, kill_at=8, kill="one"))
    assert proof.exact and proof.resumes == [((8,), (6,))]


def test_what_is_no_program_is_refused_as_it_is_started(tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.write_text("neither a script nor a binary")
    path.chmod(0o700)
    with pytest.raises(UsageError, match="train cannot be started: Exec format error"):
        prove_plan(Plan([str(path), "20"]))


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize("kill", ["all", "one"])
def test_a_spare_process_is_no_rank(kill: str, tmp_path: Path) -> None:
    """It makes a step of its own to be warm, and takes the place of a rank that is lost."""
    verb = [sys.executable, "-m", "holdfast", "prove", "--kill", kill, "--kill-at", "8"]
    launcher = [sys.executable, "-m", "holdfast", "run", "--nproc-per-node", "2", "--spares", "1"]
    script = [str(EXAMPLE), "--root", "root", "--every", "3"]
    done = subprocess.run(
        [*verb, "--steps", "12", "--", *launcher, *script],
        cwd=tmp_path, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert "bit-exact: 12 steps, 2 ranks, killed at 8\n" in done.stdout, done.stdout + done.stderr
    assert "went on from 6" in done.stdout


@pytest.mark.soak
def test_a_proof_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    shutil.copytree(CAUSES, tmp_path / "scripts")
    verb = [sys.executable, "-m", "holdfast", "prove", "--steps", "12", "--kill-at", "8"]
    words = [*verb, "--", sys.executable, "fresh_optimizer.py", "--root", "root"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    running = subprocess.Popen(words, cwd=tmp_path / "scripts", env=env)
    while not any(_with(str(temporary / "hp-"))):
        assert running.poll() is None
        time.sleep(0.1)
    running.kill()
    running.wait()
    while _with(str(temporary / "hp-")):
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.parametrize("form", ["words", "a line"])
def test_other_ranks_go_on_from_a_root_outside(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of each run takes the place of one that the command names by its whole path."""
    monkeypatch.chdir(shutil.copytree(CAUSES, tmp_path / "scripts"))
    (root := tmp_path / "outside").mkdir()
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words += ["generator.py", "--root", str(root), "--right"]
    command = words if form == "words" else [shlex.join(words)]
    proof = prove_plan(Plan(command, steps=12, kill_at=8, ranks=1, state=[str(root)], seed=1))
    assert proof.exact and proof.elsewhere_ranks == 1
    assert not [*root.iterdir()]
