"""Conversions into stores without renames: whole or not taken for whole, and gone on with."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from builders import FSDP_TP, build, memory, transformer
from cli.calling import call
from core.store.objects.fixtures import fresh
from core.store.objects.servers import Moto
from holdfast.core.checkpoint.diffing import compare_checkpoints
from holdfast.core.checkpoint.names import committed
from holdfast.core.checkpoint.verifying import verify
from holdfast.errors import Corrupt, FormatError, HoldfastError, UsageError
from holdfast.formats import converting
from holdfast.formats.write import bucket
from holdfast.store import MemoryStore, Store, open_store
from holdfast.testing import StopAfter, Stopped

FORMATS = ("universal", "deepspeed", "dcp", "huggingface", "torch")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("converting") / "run"
    build(open_store(path), FSDP_TP, transformer(), step=7, extras={"epoch": 3})
    return path


def options(to: str) -> dict[str, Any]:
    return {"to": to, "max_file_bytes": 3000}


def url_in(root: str, to: str) -> str:
    """The URL to convert to: of a file, where the format is one."""
    place, mark, query = root.partition("?")
    return f"{place}/weights.pt{mark}{query}" if to == "torch" else root


@pytest.mark.parametrize("to", FORMATS)
def test_into_a_bucket_as_into_a_folder(source: Path, moto: Moto, tmp_path: Path, to: str) -> None:
    url = url_in(moto.url(fresh()), to)
    folder = tmp_path / ("weights.pt" if to == "torch" else "there")
    made = holdfast.convert(source, url, **options(to))
    on_disk = holdfast.convert(source, folder, **options(to))
    assert (made.num_files, made.bytes, made.num_resumed) == (on_disk.num_files, on_disk.bytes, 0)
    with holdfast.open(url) as found, holdfast.open(folder) as expected:
        assert found.format == expected.format
        assert compare_checkpoints(expected, found).identical
        assert len(found.names()) == len(expected.names())
    if to == "universal":
        assert verify(open_store(url), 7).good


def test_the_command(source: Path, moto: Moto) -> None:
    url = moto.url(fresh())
    code, out, err = call("convert", source, url, "--to", "huggingface")
    assert code == 0, err
    assert "every byte read back" in out
    code, _, err = call("convert", source, url, "--to", "huggingface")
    assert code == 2 and "exists" in err


def test_what_converted_files_hold_for_torch(source: Path, moto: Moto, tmp_path: Path) -> None:
    url = url_in(moto.url(fresh()), "torch")
    holdfast.convert(source, url, to="torch")
    place = url.replace("/weights.pt", "")
    (tmp_path / "w.pt").write_bytes(open_store(place).get("weights.pt"))
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    expected = transformer()
    assert all(np.array_equal(w, expected[f"model.{n}"].values) for n, w in weights.items())


# -- stopped anywhere -----------------------------------------------------------------------------


class Stops:
    """Opens one store, in memory, that dies at its n-th change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inner: MemoryStore = memory()
        self.store = StopAfter(self.inner, None)
        for module in (bucket, converting):
            monkeypatch.setattr(module, "open_store", self.open)

    def open(self, url: str) -> Store:
        return self.store if url.startswith("memory://") else open_store(url)

    def dies(self, n: int | None) -> None:
        self.store = StopAfter(self.inner, n)


@pytest.mark.soak
@pytest.mark.parametrize("to", [to for to in FORMATS if to != "torch"])
def test_wherever_it_stops_it_is_not_taken_for_whole(
    source: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    stops = Stops(monkeypatch)
    url = stops.inner.url
    holdfast.convert(source, url, memory_bytes=8 << 20, **options(to))
    total, whole = len(stops.store.operations), {k: stops.inner.get(k) for k in stops.inner.list()}
    resumed = []
    for n in range(1, total + 1):
        for key in stops.inner.list():
            stops.inner.delete(key)
        stops.dies(n)
        with suppress(Stopped):
            holdfast.convert(source, url, memory_bytes=8 << 20, **options(to))
        there = [key for key in stops.inner.list() if key in whole]
        if len(there) < len(whole):
            check_not_whole(url, to)
        stops.dies(None)
        with suppress(UsageError):  # it had ended but for the last word
            resumed.append(
                holdfast.convert(source, url, memory_bytes=8 << 20, **options(to)).num_resumed
            )
        assert stops.inner.list() == sorted(whole)
    assert max(resumed) > 0


def check_not_whole(url: str, to: str) -> None:
    if to == "universal":
        assert committed(open_store(url)) == []
        return
    name = {"deepspeed": "deepspeed", "dcp": "dcp", "huggingface": "huggingface"}[to]
    with pytest.raises(HoldfastError):
        holdfast.open(f"{name}:{url}")


def test_a_conversion_that_is_not_complete_is_told(source: Path, moto: Moto) -> None:
    url = moto.url(fresh())
    open_store(url).put("holdfast-conversion.json", b"{}")
    with pytest.raises(FormatError, match="conversion that is not complete") as caught:
        holdfast.open(url)
    assert caught.value.hint is not None and "it goes on" in caught.value.hint


def test_another_conversion_begins_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = Stops(monkeypatch)
    stops.dies(6)
    with suppress(Stopped):
        holdfast.convert(source, stops.inner.url, **options("huggingface"))
    stops.dies(None)
    made = holdfast.convert(source, stops.inner.url, to="dcp")
    assert made.num_resumed == 0
    assert not any(key.endswith(".safetensors") for key in stops.inner.list())
    assert holdfast.open(stops.inner.url).format == "dcp"


# -- what is in the way ---------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_is_overwritten(source: Path, to: str) -> None:
    store = memory()
    store.put("weights.pt" if to == "torch" else "notes.txt", b"of somebody")
    with pytest.raises(UsageError):
        holdfast.convert(source, url_in(store.url, to), to=to)
    assert len(store.list()) == 1


def test_a_step_that_is_there_stays(source: Path) -> None:
    store = memory()
    build(store, FSDP_TP, transformer(seed=3), step=7)
    with pytest.raises(UsageError, match="has a step 7 already"):
        holdfast.convert(source, store.url)
    build(store, FSDP_TP, transformer(seed=3), step=8)
    store.delete("steps/0000000007/manifest.json")
    holdfast.convert(source, store.url)
    assert sorted(s.step for s in committed(store)) == [7, 8]


def test_not_among_the_files_of_a_root() -> None:
    store = memory()
    build(store, FSDP_TP, transformer(), step=7)
    with pytest.raises(UsageError, match="where holdfast keeps its files"):
        holdfast.convert(store.url, f"{store.url}/steps/x", to="dcp")


def test_a_source_that_changes_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.convert(source, tmp_path / "hf", to="huggingface")
    there = memory()
    for path in (tmp_path / "hf").iterdir():
        there.put(path.name, path.read_bytes())
    target = memory()

    def change(phase: str, done: int, total: int) -> None:
        if phase == "verify":
            there.put("more.txt", b"x")

    with pytest.raises(Corrupt, match="has changed while it was converted"):
        holdfast.convert(there.url, target.url, to="dcp", progress=change)
    assert ".metadata" not in target.list()
    shutil.rmtree(tmp_path / "hf")
