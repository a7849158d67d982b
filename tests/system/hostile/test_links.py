"""Links in a root, planted or unpacked: what they lead to is never deleted, and nothing of it is copied."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import holdfast
from holdfast import Keep
from holdfast.core.checkpoint.claiming import claim
from holdfast.core.checkpoint.names import manifest_key, read_manifest
from holdfast.core.checkpoint.pruning import delete_step, prunable, prune
from holdfast.core.checkpoint.tidying import discard, sweep
from holdfast.core.checkpoint.transfer import transfer
from holdfast.core.format.manifest import encode_manifest
from holdfast.core.store.directories import LinkedFolder, opened_below, remove_empty_directories
from holdfast.errors import HoldfastWarning, UsageError
from holdfast.store import LocalStore
from holdfast.tiers.memory.node.segment import Segments
from holdfast.tiers.records.log import tidy_log
from holdfast.tiers.records.segment import segment_key

pytestmark = pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for step in (1, 2, 3):
        holdfast.save(root, {"w": torch.full((9,), float(step))}, step=step)
    return root


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Somebody's folder, outside of the root."""
    home = tmp_path / "home"
    for name in ("thesis/a.txt", "thesis/chapters/1.txt", "0001-000001/r00000.safetensors"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("precious")
    (home / "empty/folder").mkdir(parents=True)
    return home


def all_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def attempt_of(root: Path) -> Path:
    return next(path for path in (root / manifest_key(1)).parent.iterdir() if path.is_dir())


def in_the_attempt(root: Path, home: Path) -> None:
    (attempt_of(root) / "x").symlink_to(home / "thesis")


def the_attempt(root: Path, home: Path) -> None:
    there = attempt_of(root)
    for path in there.iterdir():
        shutil.move(path, home / "thesis" / path.name)
    there.rmdir()
    there.symlink_to(home / "thesis")


def the_step(root: Path, home: Path) -> None:
    """Its manifest is sound, and calls a folder of the home its attempt."""
    store = LocalStore(root)
    manifest = read_manifest(store, 1)
    (file,) = manifest.files
    file = msgspec.structs.replace(file, path="thesis/a.txt")
    forged = msgspec.structs.replace(manifest, attempt="thesis", files=(file,))
    (home / "manifest.json").write_bytes(encode_manifest(forged))
    there = (root / manifest_key(1)).parent
    shutil.rmtree(there)
    there.symlink_to(home)


def all_steps(root: Path, home: Path) -> None:
    shutil.move(root / "steps", home / "steps")
    (root / "steps").symlink_to(home / "steps")


PLANTED = [in_the_attempt, the_attempt, the_step, all_steps]
Plant = Callable[[Path, Path], None]


@pytest.mark.parametrize("plant", PLANTED)
def test_pruning_deletes_nothing_behind_a_link(root: Path, home: Path, plant: Plant) -> None:
    plant(root, home)
    before, store = all_below(home), LocalStore(root)
    due = prunable(store, Keep(last=1))
    assert prune(store, Keep(last=1)) == due
    assert all_below(home) == before
    assert set(holdfast.steps(root)) == {1, 2, 3} - set(due)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_run_deletes_nothing_behind_a_link(root: Path, home: Path, plant: Plant) -> None:
    plant(root, home)
    before, w = all_below(home), torch.zeros(9)
    with holdfast.Checkpointer(root, {"w": w}, keep=Keep(last=1)) as ckpt:
        ckpt.restore()
        for step in (10, 11):
            ckpt.save(step).wait()
    assert before <= all_below(home)
    assert (home / "thesis/a.txt").read_text() == "precious"


def test_deleting_an_attempt_or_a_step_takes_no_folder_within(root: Path, home: Path) -> None:
    in_the_attempt(root, home)
    store, there = LocalStore(root), attempt_of(root)
    (there / "mine").mkdir()
    (there / "mine/notes.txt").write_text("x")
    before = all_below(home)
    (root / manifest_key(1)).unlink()
    discard(store, 1, there.name)
    assert {path.name for path in there.iterdir()} == {"x", "mine"}
    assert delete_step(store, 2)
    assert all_below(home) == before and (there / "mine/notes.txt").exists()


def test_sweeping_passes_no_link(root: Path, home: Path) -> None:
    """Neither for attempts, nor for unfinished files, nor for records."""
    store = LocalStore(root)
    mine = msgspec.structs.replace(claim(store), run=9)
    (root / "steps/0000000009").symlink_to(home)
    (home / f".tmp-unknown-1-{'0' * 16}").write_text("of another")
    record = home / segment_key(1, 1, 1, 0).removeprefix("log/")
    record.parent.mkdir(parents=True)
    record.write_text("precious")
    (root / "log").symlink_to(home)
    before = all_below(home)
    sweep(store, mine, 99)
    tidy_log(store)
    assert all_below(home) == before


def test_a_link_is_told_once_and_itself_stays(root: Path, home: Path) -> None:
    the_attempt(root, home)
    store, key = LocalStore(root), f"steps/0000000001/{attempt_of(root).name}/a.txt"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        store.delete(key)
        store.delete(key)
    (one,) = [str(w.message) for w in told if w.category is HoldfastWarning]
    assert f"'{attempt_of(root)}' is a link" in one
    assert attempt_of(root).is_symlink() and (home / "thesis/a.txt").exists()


def test_an_object_that_is_a_link_goes_alone(root: Path, home: Path) -> None:
    (image,) = attempt_of(root).iterdir()
    image.unlink()
    image.symlink_to(home / "thesis/a.txt")
    assert delete_step(LocalStore(root), 1)
    assert not image.is_symlink() and (home / "thesis/a.txt").exists()


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert prune(LocalStore(tmp_path / "link"), Keep(last=1)) == [1, 2]
    assert holdfast.steps(root) == [3]


def test_a_folder_that_becomes_a_link_is_not_passed(root: Path, home: Path) -> None:
    """Whoever holds a folder open stays in it; whoever opens it sees what it is now."""
    steps = root / "steps"
    with opened_below(str(steps), str(root)) as (*_, folder):
        all_steps(root, home)
        assert os.path.samestat(os.fstat(folder), os.stat(home / "steps"))
    with pytest.raises(LinkedFolder), opened_below(str(steps / "0000000001"), str(root)):
        raise AssertionError("it was passed")
    (root / "log").symlink_to(home / "empty")
    remove_empty_directories(str(root / "log/folder"), str(root))
    assert (home / "empty/folder").is_dir()


def test_an_index_is_copied_if_it_says_what_the_manifest_says(tmp_path: Path, home: Path) -> None:
    """And not if it says anything else: no digest proves it, and it may be a link to a secret."""
    holdfast.save(tmp_path / "a", {"model": torch.nn.Linear(3, 2)}, step=1)
    with holdfast.open(tmp_path / "a") as source:
        holdfast.convert(source, tmp_path / "whole")
    step = (tmp_path / "whole" / manifest_key(1)).parent
    index = step / "model.safetensors.index.json"
    written = json.loads(index.read_bytes())
    said = {
        "more": written | {"token": "secret"},
        "metadata": written | {"metadata": {"token": "secret"}},
        "tensors": written | {"weight_map": {"secret": written["weight_map"]["weight"]}},
        "files": written | {"weight_map": {"weight": "secret"}},
    }
    for name, what in said.items():
        (home / name).write_text(json.dumps(what))
    for name in (*said, "thesis/a.txt", "empty", "nowhere"):
        (step / f"{os.path.basename(name)}.safetensors.index.json").symlink_to(home / name)
    (step / "zero.safetensors.index.json").symlink_to("/dev/zero")
    with pytest.warns(HoldfastWarning, match="a.txt.safetensors.index.json' is not copied"):
        transfer(LocalStore(tmp_path / "whole"), LocalStore(tmp_path / "copy"), 1)
    there = (tmp_path / "copy" / manifest_key(1)).parent
    assert [path.name for path in there.glob("*.index.json")] == [index.name]
    assert (there / index.name).read_bytes() == index.read_bytes()


def test_an_agents_home_is_swept_without_passing_links(tmp_path: Path, home: Path) -> None:
    (home / ".profile").write_text("precious")
    (home / "share-00000-0").write_text("precious")
    before = all_below(home)
    node = tmp_path / "node"
    segments = Segments(node)
    (node / "jobs/planted").symlink_to(home)
    (node / "jobs/job").mkdir()
    (node / "jobs/job/manifest-0000000001-x").symlink_to(home / "thesis/a.txt")
    (node / "jobs/job/share-00001-0").symlink_to(home / "share-00000-0")
    (node / "gone/planted").symlink_to(home)
    assert [job.name for job in segments.find()] == ["job"]
    segments.delete_removed()
    assert list((node / "gone").iterdir()) == list((node / "jobs/job").iterdir()) == []
    assert not (node / "jobs/planted").is_symlink()
    assert all_below(home) == before


@pytest.mark.parametrize("where", ["", "files", "files/model.safetensors", "files/folder"])
def test_a_conversion_writes_and_deletes_nothing_behind_a_link(
    root: Path, home: Path, tmp_path: Path, where: str
) -> None:
    (home / "model.safetensors").write_text("precious")
    before, link = all_below(home), tmp_path / "out.partial" / where
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(home / "model.safetensors" if "." in where else home)
    if where:
        (tmp_path / "out.partial/holdfast-conversion.json").write_text('{"x": "y"}')
    with pytest.raises(UsageError, match=f"'{link}' is a link"):
        holdfast.convert(root, tmp_path / "out", to="dcp")
    assert all_below(home) == before and not (tmp_path / "out").exists()
    assert (home / "model.safetensors").read_text() == "precious"


def test_a_conversion_moves_no_file_behind_a_link(root: Path, home: Path, tmp_path: Path) -> None:
    """The name of the folder that it makes in a root can be worked out by others."""
    holdfast.convert(root, tmp_path / "out")
    (image,) = (tmp_path / "out" / manifest_key(3)).parent.glob("*/*.safetensors")
    shutil.rmtree((tmp_path / "out" / manifest_key(3)).parent)
    (home / image.name).write_text("precious")
    image.parent.parent.mkdir()
    image.parent.symlink_to(home)
    with pytest.raises(UsageError, match=f"'{image.parent}' is a link"):
        holdfast.convert(root, tmp_path / "out")
    assert (home / image.name).read_text() == "precious"
