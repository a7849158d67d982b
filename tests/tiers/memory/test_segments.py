"""What an agent left in shared memory, damaged: the next one begins, with what is sound."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.tiers.memory.node.messages import Slot
from holdfast.tiers.memory.node.segment import JobNote, Segments

SOUND, OTHER = "share-00000-0", "share-00001-1"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of a job with two images and a manifest."""
    segments = Segments(tmp_path / "node")
    for rank, name in enumerate((SOUND, OTHER)):
        segments.make("job", name, 4096)
        segments.note("job", Slot(name, 4096, "share", rank))
    segments.note_job("job", JobNote("root", 1))
    segments.keep_peers("job", ())
    segments.keep_manifest("job", "0001-000001", 1, b"{}")
    return tmp_path / "node/jobs/job"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a link to nothing": lambda path: path.symlink_to("/nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a file": lambda path: path.symlink_to(__file__),
    "a folder": lambda path: (path.mkdir(), (path / "x").touch()),
    "a pipe": os.mkfifo,
}
NAMES = [OTHER, f"{OTHER}.json", f".{OTHER}.json.new", "job.json", "peers.json"]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", [*NAMES, "manifest-0000000001-0001-000001"])
def test_the_next_agent_begins(job: Path, name: str, damage: Callable[[Path], object]) -> None:
    (job / name).unlink(missing_ok=True)
    damage(job / name)
    segments = Segments(job.parents[1])
    (found,) = segments.find()
    assert set(found.slots) == ({SOUND} if name.startswith(OTHER) else {SOUND, OTHER})
    assert found.run == (0 if name == "job.json" else 1)
    assert len(found.commits) == (not name.startswith("manifest"))
    segments.note("job", Slot(OTHER, 4096, "share", 1))
    segments.note_job("job", JobNote("root", 2))
    segments.keep_peers("job", ())
    segments.delete_removed()
    assert not list((job.parents[1] / "gone").iterdir())


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["", "jobs", "gone"])
def test_something_else_in_the_place_of_the_home(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    place = tmp_path / "node" / name
    place.parent.mkdir(mode=0o700, exist_ok=True)
    damage(place)
    os.chmod(place, 0o755) if place.is_dir() else None
    with pytest.raises(UsageError, match=f"{place} is not a directory of this user alone"):
        Segments(tmp_path / "node")
