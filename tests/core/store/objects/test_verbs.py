"""Every verb takes the URL of a bucket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import holdfast
from builders import FSDP_TP, Tensor, build, transformer
from cli.calling import call, call_json
from core.store.objects.fixtures import fresh
from core.store.objects.servers import S3_ENV, Moto, SeaweedFS
from holdfast.core.checkpoint.names import committed
from holdfast.core.checkpoint.verifying import verify
from holdfast.layout import Cut, Mesh, Sharding
from holdfast.store import LocalStore, open_store
from tiers.records.test_log_transfer import put_segment


@pytest.fixture
def root(moto: Moto) -> str:
    """Steps 10, 20 and 30 of a small model, and a record after them."""
    url = moto.url(fresh())
    for step in (10, 20, 30):
        build(open_store(url), FSDP_TP, transformer(seed=step), step=step)
    put_segment(open_store(url), 31, 31, 0)
    return url


def at(url: str, step: int) -> str:
    """A step of a URL with options: it stands before these."""
    place, mark, query = url.partition("?")
    return f"{place}@{step}{mark}{query}"


def test_looking(root: str) -> None:
    code, found = call_json("ls", root)
    assert code == 0 and [s["step"] for s in found["steps"]] == [10, 20, 30]
    for verb in (["verify"], ["inspect"], ["plan", "--mesh", "dp=2"], ["log"]):
        code, out, err = call(verb[0], root, *verb[1:])
        assert code == 0, (verb, out, err)
    code, out, _ = call("verify", at(root, 20))
    assert code == 0 and "step 20 of" in out
    code, out, _ = call("verify", f"{root}@10")
    assert code == 0 and "step 10 of" in out
    code, out, _ = call("inspect", at(root, 20), "model.wte.weight")
    assert code == 0 and "model.wte.weight" in out
    code, found = call_json("diff", at(root, 20), root)
    assert code == 1


def test_prune(root: str) -> None:
    code, found = call_json("prune", root, "--keep-last", "2", "--dry-run")
    assert code == 0 and found["gone"] == [10]
    assert call("prune", root, "--keep-last", "2")[0] == 0
    assert sorted(s.step for s in committed(open_store(root))) == [20, 30]


def test_what_is_not_there(moto: Moto) -> None:
    url = moto.url(fresh())
    for verb, what in (("ls", "no steps in"), ("log", "no records in")):
        code, out, _ = call(verb, url)
        assert code == 1 and what in out and "there are no files" in out
    for verb in ("verify", "inspect"):
        code, _, err = call(verb, url)
        assert code == 1 and "no checkpoint in" in err
    code, _, err = call("verify", "s3://not-made/x?" + url.partition("?")[2])
    assert code == 1 and "there is no bucket 'not-made'" in err


@pytest.mark.soak_except("across")
@pytest.mark.parametrize("way", ["up", "down", "across"])
def test_copy_between_any_two(root: str, moto: Moto, tmp_path: Path, way: str) -> None:
    here, there = str(tmp_path / "here"), moto.url(fresh())
    code, _, err = call("copy", root, here, "--all")
    assert code == 0, err
    source = here if way == "up" else root
    target = str(tmp_path / "there") if way == "down" else there
    code, out, err = call("copy", source, target, "--all")
    assert code == 0, err
    assert out.count("copied  step") == 3 and "copied  records" in out
    store, given = open_store(target), open_store(source)
    assert all(verify(store, step).good for step in (10, 20, 30))
    assert {k: store.get(k) for k in store.list()} == {k: given.get(k) for k in given.list()}
    code, out, _ = call("copy", source, target, "--all")
    assert code == 0 and "has everything" in out


def test_in_a_process_of_its_own(root: str) -> None:
    command = [sys.executable, "-m", "holdfast", "verify", root]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | S3_ENV
    )
    assert done.returncode == 0, done.stderr
    assert "every digest checked" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.soak
def test_a_copy_that_is_killed_goes_on(seaweed: SeaweedFS, tmp_path: Path) -> None:
    """SIGKILL at about a third of it; then what had arrived is not copied again."""
    source, url = LocalStore(tmp_path / "run"), seaweed.url(fresh())
    mesh = Mesh((("dp", 8),))
    values = np.random.default_rng(0).standard_normal((2048, 2048)).astype("f4")
    tensors = {"model.w": Tensor(values, Sharding((Cut(0, ("dp",)),)))}
    build(source, mesh, tensors, step=5)
    target = open_store(url)
    command = [sys.executable, "-m", "holdfast", "copy", str(tmp_path / "run"), url]
    copying = subprocess.Popen(command, env=os.environ | S3_ENV)
    until = time.monotonic() + 60
    while len(target.list("steps/")) < 3 and copying.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    copying.send_signal(signal.SIGKILL)
    copying.wait()
    arrived = [key for key in target.list("steps/") if key.endswith(".safetensors")]
    is_whole = bool(committed(target))
    code, made = call_json("copy", tmp_path / "run", url)
    assert code == 0
    assert (
        3 <= len(arrived) <= 8 - made["steps"][0]["num_copied"]
    )  # a request may end after its client
    assert made["steps"][0]["outcome"] == ("there already" if is_whole else "copied")
    assert verify(target, 5).good
    with holdfast.open(url) as found:
        assert np.array_equal(found.read("model.w"), values)
