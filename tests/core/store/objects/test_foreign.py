"""Checkpoints of others in a bucket: read where they lie, by ranges, and found by few requests."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import holdfast
from capabilities import ALONE
from cli.calling import call
from core.store.objects.fixtures import fresh
from core.store.objects.servers import Moto
from holdfast.errors import NotFound
from holdfast.formats.read import detect
from holdfast.formats.read.detect import SOURCE_FORMATS, open_as
from holdfast.formats.read.folder import ListedFolder
from holdfast.store import Store, open_store
from holdfast.testing import Counting

GOLDEN = Path(__file__).parents[2] / "format" / "golden" / "megatron_0_14.tar.xz"


def upload(folder: Path, url: str) -> None:
    store = open_store(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(str(path.relative_to(folder)), path.read_bytes())


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        f"layers.{i}.{name}": torch.randn(40, 30) for i in range(6) for name in ("weight", "bias")
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each format that one process can write, of the same values."""
    top = tmp_path_factory.mktemp("foreign")
    made = {name: top / name for name in ("dcp", "huggingface", "torch", "deepspeed")}
    dcp.save({"model": values(), "epoch": 7}, checkpoint_id=made["dcp"], **ALONE)
    for name in ("huggingface", "torch"):
        made[name].mkdir()
    halves = list(values().items())[:6], list(values().items())[6:]
    index: dict[str, str] = {}
    for number, half in enumerate(halves):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file(dict(half), made["huggingface"] / file)
        index |= {name: file for name, _ in half}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (made["huggingface"] / "model.safetensors.index.json").write_text(text)
    torch.save({"model": values(), "epoch": 7}, made["torch"] / "rank0.pt")
    holdfast.save(top / "run", {"model": values(), "epoch": 7}, step=5)
    holdfast.convert(top / "run", made["deepspeed"], to="deepspeed")
    return made


@pytest.fixture
def root(moto: Moto) -> str:
    return moto.url(fresh())


@pytest.mark.parametrize("name", ["dcp", "huggingface", "torch", "deepspeed"])
@pytest.mark.parametrize("prefix", [False, True])
def test_read_from_a_bucket(folders: dict[str, Path], root: str, name: str, prefix: bool) -> None:
    read_alike(folders[name], root, name, prefix)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["dcp", "huggingface", "torch", "deepspeed"])
@pytest.mark.parametrize("server", ["google", "azurite", "seaweed"])
def test_read_from_other_buckets(
    request: pytest.FixtureRequest, folders: dict[str, Path], server: str, name: str
) -> None:
    url = request.getfixturevalue(server).url(fresh())
    read_alike(folders[name], url, name, prefix=False)


def read_alike(folder: Path, root: str, name: str, prefix: bool) -> None:
    """Put a folder into a bucket; what is read there is what is read on the disk."""
    upload(folder, root)
    url = f"{name}:{root}" if prefix else root
    on_disk = holdfast.open(folder)
    with holdfast.open(url) as found:
        assert found.format == name
        assert found.names() == on_disk.names()
        assert any(n.endswith("layers.3.weight") for n in found.names())
        for tensor in found.names():
            assert np.array_equal(found.read(tensor), on_disk.read(tensor))
    assert holdfast.steps(url) == holdfast.steps(folder)


def test_megatron_from_a_bucket(root: str, tmp_path: Path) -> None:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path)  # our own file; `filter` is not in every Python 3.10
    upload(tmp_path / "iter_0000003", f"{root.replace('?', '/iter_0000003?')}")
    on_disk = holdfast.open(tmp_path / "iter_0000003")
    with holdfast.open(root.replace("?", "/iter_0000003?")) as found:
        assert (found.format, found.step) == (on_disk.format, on_disk.step) == ("megatron", 3)
        assert found.names() == on_disk.names()
        for tensor in found.names():
            assert np.array_equal(found.read(tensor), on_disk.read(tensor))


@pytest.mark.parametrize("name", ["dcp", "huggingface", "torch"])
def test_into_live_tensors(folders: dict[str, Path], root: str, name: str) -> None:
    upload(folders[name], root)
    live = {"model": {n: torch.zeros_like(v) for n, v in values().items()}}
    holdfast.load(root, live)
    assert all(torch.equal(live["model"][n], v) for n, v in values().items())


def test_a_run_begins_from_one(folders: dict[str, Path], root: str, tmp_path: Path) -> None:
    upload(folders["huggingface"], root)
    live = {"model": {n: torch.zeros_like(v) for n, v in values().items()}}
    with holdfast.Checkpointer(tmp_path, live) as checkpointer:
        checkpointer.restore(source=root)
    assert all(torch.equal(live["model"][n], v) for n, v in values().items())


def test_a_file_in_a_bucket(folders: dict[str, Path], moto: Moto) -> None:
    """The options of a URL stay behind the file's name."""
    prefix = fresh()
    upload(folders["torch"], moto.url(prefix))
    upload(folders["huggingface"], moto.url(prefix))
    for file, name in (("rank0.pt", "torch"), ("model.safetensors.index.json", "huggingface")):
        with holdfast.open(moto.url(f"{prefix}/{file}")) as found:
            assert found.format == name
            assert any(n.endswith("layers.3.weight") for n in found.names())


def test_nothing_is_there(root: str) -> None:
    with pytest.raises(NotFound, match="no dcp checkpoint"):
        holdfast.open(f"dcp:{root}")
    assert holdfast.steps(root) == []


# -- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("dcp", 4), ("huggingface", 6), ("torch", 24)])
def test_opening_lists_once_and_reads_heads_alone(
    folders: dict[str, Path], root: str, name: str, most: int
) -> None:
    upload(folders[name], root)
    store = Counting(open_store(root))
    store.read_bytes, store.read_threads = 4 << 20, 4  # type: ignore[attr-defined]
    SOURCE_FORMATS[name].open(ListedFolder(store), None)
    assert store.calls["entries"] == 1
    assert store.calls["size"] == store.calls["list"] == 0
    assert store.calls["read"] + store.calls["get"] <= most


def test_only_wanted_bytes_are_read(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"a": torch.randn(1500, 1000), "b": torch.randn(10)}
    file = io.BytesIO()
    torch.save({"model": large}, file)
    stores: list[Counting] = []

    def counted(url: str) -> Store:
        stores.append(Counting(open_store(url)))
        return ListedFolder(stores[-1])

    open_store(root).put("rank0.pt", file.getvalue())
    monkeypatch.setattr(detect, "open_place", counted)
    found = open_as("torch", root)
    assert np.array_equal(found.read("model.b"), large["b"].numpy())
    assert sum(s.bytes_read for s in stores) < 1 << 20


# -- the command line -----------------------------------------------------------------------------


def test_verbs_take_urls_of_others(folders: dict[str, Path], root: str) -> None:
    upload(folders["dcp"], root)
    for verb in (["ls"], ["inspect"], ["verify"], ["plan", "--mesh", "dp=2"]):
        code, out, err = call(verb[0], root, *verb[1:])
        assert code == 0, (verb, out, err)
    code, _, err = call("diff", root, folders["dcp"])
    assert code == 0, err
    code, _, err = call("prune", root, "--keep-last", "1")
    assert code == 2 and "dcp checkpoint" in err
