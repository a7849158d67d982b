"""Conversions that are killed, run out of room, or read damage: never half a result, and then go on."""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.checkpoint.diffing import compare_checkpoints
from holdfast.errors import Corrupt, HoldfastError, UsageError
from holdfast.formats import converting
from holdfast.formats.write.begun import BLOCKS

FORMATS = ("universal", "dcp", "deepspeed", "huggingface")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6)))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 1024)).sum().backward()
    optim.step()
    url = tmp_path_factory.mktemp("run")
    holdfast.save(url, {"model": model, "optim": optim}, step=1)
    return url


def command(source: Path, target: Path, to: str) -> list[str]:
    options = ["--to", to, "--max-file", "8MB", "--memory", "20MB"]
    run = "from holdfast.cli.main import main; main()"
    return [sys.executable, "-c", run, "convert", str(source), str(target), *options]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.soak_except("huggingface")
@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_killed_at_random_it_goes_on(source: Path, tmp_path: Path, to: str) -> None:
    chance = random.Random(to)
    target = tmp_path / "out"
    subprocess.run(command(source, tmp_path / "whole", to), check=True, capture_output=True)
    kills = 0
    for _ in range(8):
        process = subprocess.Popen(
            command(source, target, to), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while not (tmp_path / "out.partial").exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), said
        if process.returncode == 0:
            break
        kills += 1
        if to == "universal":
            assert not target.exists() or holdfast.steps(target) in ([], [1])
        else:
            assert not target.exists() or not (tmp_path / "out.partial").exists()
    if not target.exists() or (to == "universal" and not holdfast.steps(target)):
        subprocess.run(command(source, target, to), check=True, capture_output=True)
    assert kills
    if to == "universal":
        assert compare_checkpoints(holdfast.open(source), holdfast.open(target)).identical
    else:
        assert files(target) == files(tmp_path / "whole")


def interrupted(source: Path, target: Path, to: str, after: int) -> None:
    """Convert, and stop by an error once `after` bytes are written."""
    done = 0

    def stop(phase: str, size: int, total: int) -> None:
        nonlocal done
        done += size
        if phase == "write" and done > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        holdfast.convert(source, target, to=to, max_file_bytes=8_000_000, progress=stop)


@pytest.mark.soak_except("universal")
@pytest.mark.parametrize("to", FORMATS)
def test_finished_files_are_not_written_again(source: Path, tmp_path: Path, to: str) -> None:
    target = tmp_path / "out"
    interrupted(source, target, to, 1)
    found = [p for p in (tmp_path / "out.partial").rglob("*") if p.is_file()]
    whole = [p for p in found if p.suffix not in (".begun", ".blocks", ".json")]
    there = {p: p.stat().st_ino for p in whole}
    assert there
    made = holdfast.convert(source, target, to=to, max_file_bytes=8_000_000)
    assert made.num_resumed == len(there) < made.num_files
    kept = {p.stat().st_ino for p in target.rglob("*") if p.is_file()}
    assert len(kept & set(there.values())) == made.num_resumed


def test_a_finished_file_that_was_changed_is_found_out(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "out", "huggingface", 1)
    victim = next((tmp_path / "out.partial").rglob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-5] ^= 1
    victim.write_bytes(data)
    with pytest.raises(Corrupt, match="not what was written") as caught:
        holdfast.convert(source, tmp_path / "out", to="huggingface", max_file_bytes=8_000_000)
    assert caught.value.key == victim.name
    assert not (tmp_path / "out").exists()


CHANGES = ("mkdir", "rmdir", "link", "rename", "replace", "unlink", "fsync", "pwrite", "ftruncate")
"""Calls by which files and names come and go."""


def killed_at(change: int, source: Path, target: Path, to: str) -> bool:
    """Convert in a process that dies just before its `change`th such call; whether it came so far."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(120, exit=True)
        left = itertools.count(change, -1)

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def change(*args: Any, **kwargs: Any) -> Any:
                if next(left) == 0:
                    os._exit(9)
                return call(*args, **kwargs)

            return change

        for name in CHANGES:
            setattr(os, name, dying(getattr(os, name)))
        try:
            holdfast.convert(source, target, to=to, max_file_bytes=600)
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


def die_before_blocks_go(source: str, target: str) -> None:
    unlink = os.unlink

    def dying(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith(BLOCKS):
            os._exit(9)
        unlink(path, *args, **kwargs)

    os.unlink = dying
    holdfast.convert(source, target, to="huggingface")


def test_blocks_of_a_file_that_is_whole_are_no_part_of_the_result(
    source: Path, tmp_path: Path
) -> None:
    """A process dies between the last rename of a file and the end of what was noted of its blocks."""
    module, target = "system.crash.test_converting", tmp_path / "out"
    call = f"die_before_blocks_go({str(source)!r}, {str(target)!r})"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", f"from {module} import *; {call}"], env=env)
    assert done.returncode == 9 and [*tmp_path.rglob(f"*{BLOCKS}")]
    holdfast.convert(source, target, to="huggingface")
    holdfast.convert(source, tmp_path / "whole", to="huggingface")
    assert files(target) == files(tmp_path / "whole")


@pytest.mark.soak_except("huggingface")
@pytest.mark.slow
@pytest.mark.parametrize("to", [*FORMATS, "torch"])
def test_killed_at_every_change(tmp_path: Path, to: str) -> None:
    """Dead before every call that writes: never half a result, and the next try gives a whole one.

    In a process of its own: a fork of one with the threads of other tests may find what they had locked.
    """
    module = "system.crash.test_converting"
    code = f"from {module} import die_at_every_change as run; run({str(tmp_path)!r}, {to!r})"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def die_at_every_change(place: str, to: str) -> None:
    tmp_path = Path(place)
    small = torch.nn.Linear(9, 11)
    holdfast.save(tmp_path / "src", {"model": small}, step=1)
    whole = tmp_path / "whole"
    holdfast.convert(tmp_path / "src", whole, to=to, max_file_bytes=600)
    for change in itertools.count():
        target = tmp_path / f"{change}"
        dead = killed_at(change, tmp_path / "src", target, to)
        there = target.exists() and (to != "universal" or holdfast.steps(target) == [1])
        if not there or Path(f"{target}.partial/holdfast-conversion.json").exists():
            holdfast.convert(tmp_path / "src", target, to=to, max_file_bytes=600)
        if to == "universal":
            assert compare_checkpoints(holdfast.open(whole), holdfast.open(target)).identical
        elif to == "torch":
            assert target.read_bytes() == whole.read_bytes()
        else:
            assert files(target) == files(whole), change
        if not dead:
            break
    assert change > 10


@pytest.mark.parametrize("to", [*FORMATS, "torch"])
def test_interrupted_after_the_last_rename(
    source: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is there and nothing else is in it; the same command cleans up and succeeds."""
    with monkeypatch.context() as patch:
        patch.setattr(
            converting.shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            holdfast.convert(source, tmp_path / "out", to=to)
    holdfast.convert(source, tmp_path / "whole", to=to)
    assert holdfast.convert(source, tmp_path / "out", to=to).num_resumed > 0
    assert not (tmp_path / "out.partial").exists()
    if to == "universal":
        assert compare_checkpoints(holdfast.open(source), holdfast.open(tmp_path / "out")).identical
    elif to == "torch":
        assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    else:
        assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_source_that_changes_meanwhile_gives_no_result(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(300_000), "b": torch.zeros(300_000)}, tmp_path / "x.pt")

    def meanwhile(phase: str, size: int, total: int) -> None:
        if phase == "write" and not size:
            torch.save({"a": torch.ones(300_000), "b": torch.ones(300_000)}, tmp_path / "x.pt")

    with pytest.raises(Corrupt, match="has changed while it was converted"):
        holdfast.convert(tmp_path / "x.pt", tmp_path / "out", to="dcp", progress=meanwhile)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_two_conversions_do_not_meet(source: Path, tmp_path: Path) -> None:
    def meanwhile(phase: str, size: int, total: int) -> None:
        if phase == "write" and not size:
            with pytest.raises(UsageError, match="another conversion"):
                holdfast.convert(source, tmp_path / "out", to="dcp")

    holdfast.convert(source, tmp_path / "out", to="dcp", progress=meanwhile)
    assert (tmp_path / "out/.metadata").exists()


def test_another_conversion_starts_anew(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "out", "huggingface", 1)
    made = holdfast.convert(source, tmp_path / "out", to="huggingface", dtype="bfloat16")
    assert made.num_resumed == 0
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_source_gives_no_result(source: Path, tmp_path: Path, to: str) -> None:
    import shutil

    shutil.copytree(source, tmp_path / "src")
    image = next((tmp_path / "src").rglob("r00000.safetensors"))
    with image.open("r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Corrupt):
        holdfast.convert(tmp_path / "src", tmp_path / "out", to=to)
    assert not (tmp_path / "out/steps").exists() and not (tmp_path / "out/.metadata").exists()
    assert to == "universal" or not (tmp_path / "out").exists()


def test_a_full_disk_is_told_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        with pytest.raises(HoldfastError, match=r"bytes are to be written .* are free"):
            holdfast.convert(source, small / "out", to="dcp")
        assert not (small / "out").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)
