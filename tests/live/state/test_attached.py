"""Files beside a step: what may be one, when they are read, who carries them, and what damage does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.cli.main import run
from holdfast.core.checkpoint.names import manifest_key, read_manifest, step_prefix
from holdfast.core.checkpoint.verifying import verify
from holdfast.core.format.manifest import AttachedFile, decode_manifest, encode_manifest
from holdfast.errors import Corrupt, FormatError, StoreError, UsageError
from holdfast.store import LocalStore
from holdfast.tiers.memory.node.messages import Persist
from holdfast.tiers.memory.node.persist import commit_late

FILES = {"config.json": b'{"a": 1}', "tokenizer/vocab.txt": b"x" * 300_000, "empty": b""}


def state() -> dict[str, Any]:
    return {"x": torch.arange(12.0)}


def with_files(url: str, step: int = 1, files: Any = FILES) -> None:
    holdfast.save(url, state(), step=step, files=files)


def test_they_are_read_when_a_save_begins(tmp_path: Path) -> None:
    url, path = str(tmp_path / "run"), tmp_path / "config.json"
    path.write_bytes(b"one")
    asked: list[int] = []
    with holdfast.Checkpointer(
        url, state(), every=2, files={"c.json": path, "f": lambda: b"%d" % len(asked)}
    ) as ckpt:
        for step in range(1, 5):
            ckpt.step(step)
            asked.append(step)
            path.write_bytes(b"after %d" % step)
        ckpt.files["more"] = b"late"
        del ckpt.files["f"]
        ckpt.save(5, files={"c.json": b"for this step"})
        ckpt.save(6)
    found = {step: dict(holdfast.open(url, step=step).files) for step in holdfast.steps(url)}
    assert found == {
        2: {"c.json": b"after 1", "f": b"1"},
        4: {"c.json": b"after 3", "f": b"3"},
        5: {"c.json": b"for this step", "more": b"late"},
        6: {"c.json": b"after 4", "more": b"late"},
    }
    assert all(verify(LocalStore(url), step).good for step in found)


def test_a_step_without_files_is_as_it_was(tmp_path: Path) -> None:
    with_files(str(tmp_path), files=None)
    text = LocalStore(str(tmp_path)).get(manifest_key(1))
    assert b"attached" not in text and b"metrics" not in text
    assert dict(holdfast.open(str(tmp_path)).files) == {}


def test_what_cannot_be_read_costs_itself_alone(tmp_path: Path) -> None:
    url = str(tmp_path / "run")

    def fails() -> bytes:
        raise ValueError("no tokenizer")

    files = {"good": b"1", "lost": tmp_path / "lost", "bad": fails, "text": lambda: "text"}
    ckpt = holdfast.Checkpointer(url, state(), files=files)  # type: ignore[arg-type]
    ckpt.save(1).wait(300)
    with pytest.warns(holdfast.HoldfastWarning, match="saved without a file") as told:
        ckpt.close()
    texts = " ".join(str(one.message) for one in told)
    assert all(part in texts for part in ("'lost'", "no tokenizer", "returned 'text', not bytes"))
    assert dict(holdfast.open(url).files) == {"good": b"1"}
    with pytest.raises(StoreError, match="'lost' cannot be read"):
        holdfast.save(url, state(), step=2, files={"lost": tmp_path / "lost"})
    assert holdfast.steps(url) == [1]


def test_at_most_64_mib(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    url = str(tmp_path / "run")
    ckpt = holdfast.Checkpointer(url, state(), files={"large": path})
    ckpt.save(1).wait(300)
    with pytest.warns(holdfast.HoldfastWarning, match=r"67,108,864 bytes in all"):
        ckpt.close()
    assert dict(holdfast.open(url).files) == {}
    with pytest.raises(UsageError, match="67,108,864 bytes in all"):
        holdfast.save(url, state(), step=2, files={"large": path})


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a\\b", "a\0", "C:x", " a", "a\n", "." * 2,
             "x" * 201, 3],
)  # fmt: skip
def test_names_are_plain(name: Any, tmp_path: Path) -> None:
    with holdfast.Checkpointer(str(tmp_path), state()) as ckpt:
        with pytest.raises(UsageError, match="files"):
            ckpt.files[name] = b""
        with pytest.raises(UsageError, match="files"):
            ckpt.save(1, files={name: b""})
    assert holdfast.steps(str(tmp_path)) == []


@pytest.mark.parametrize("source", [None, 3, [b""], {}, lambda x: b"", object()])
def test_sources_are_paths_bytes_or_functions(source: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="files"):
        holdfast.Checkpointer(str(tmp_path), state(), files={"a": source})


def test_one_file_is_not_the_folder_of_another(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot both be"):
        holdfast.Checkpointer(str(tmp_path), state(), files={"a": b"", "a/b": b""})


# -- damage ---------------------------------------------------------------------------------------


def test_damage_is_found(tmp_path: Path) -> None:
    with_files(str(tmp_path))
    store = LocalStore(str(tmp_path))
    manifest = read_manifest(store, 1)
    assert manifest.attached is not None
    path = tmp_path / step_prefix(1) / manifest.attached.path
    whole = path.read_bytes()
    place = manifest.attached.files[1].start + 290_000
    path.write_bytes(whole[:place] + b"y" + whole[place + 1 :])
    assert any("tokenizer/vocab.txt" in p.message for p in verify(store, 1).problems)
    opened = holdfast.open(str(tmp_path))
    assert opened.files["config.json"] == FILES["config.json"]
    with pytest.raises(Corrupt):
        _ = opened.files["tokenizer/vocab.txt"]
    assert torch.equal(torch.as_tensor(opened.read("x")), state()["x"])
    path.write_bytes(whole[:-1])
    assert verify(store, 1, quick=True).problems and run(["ls", str(tmp_path)]) == 1
    path.unlink()
    assert verify(store, 1, quick=True).problems and run(["verify", str(tmp_path)]) == 1


def test_hostile_manifests(tmp_path: Path) -> None:
    with_files(str(tmp_path))
    manifest = read_manifest(LocalStore(str(tmp_path)), 1)
    pack = manifest.attached
    assert pack is not None
    one = AttachedFile("a", 8, pack.table - 8, "0" * 16)
    bad = [
        [], [msgspec.structs.replace(one, name="../a")], [msgspec.structs.replace(one, start=9)],
        [msgspec.structs.replace(one, bytes=pack.table)], [msgspec.structs.replace(one, name="/a")],
        [msgspec.structs.replace(one, bytes=-1)], [msgspec.structs.replace(one, digest="x")],
        [one, AttachedFile("a", pack.table, 0, "0" * 16)],
        [one, AttachedFile("a/b", pack.table, 0, "0" * 16)],
    ]  # fmt: skip
    assert decode_manifest(encode_manifest(manifest), "m") == manifest
    for files in bad:
        changed = msgspec.structs.replace(pack, files=tuple(files))
        with pytest.raises(FormatError):
            decode_manifest(
                encode_manifest(msgspec.structs.replace(manifest, attached=changed)), "m"
            )
    for path in ("../x", "/x", manifest.files[0].path):
        changed = msgspec.structs.replace(pack, path=path)
        with pytest.raises(FormatError):
            decode_manifest(
                encode_manifest(msgspec.structs.replace(manifest, attached=changed)), "m"
            )


# -- who carries them -----------------------------------------------------------------------------


def test_copied_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, into = str(tmp_path / "run"), str(tmp_path / "copy")
    with_files(url)
    assert run(["copy", url, into]) == 0
    assert dict(holdfast.open(into).files) == FILES
    assert verify(LocalStore(into), 1).good
    capsys.readouterr()
    assert run(["inspect", url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["attached"]
    assert {f["name"]: f["bytes"] for f in shown} == {k: len(v) for k, v in FILES.items()}
    assert run(["inspect", url]) == 0
    assert "config.json" in capsys.readouterr().out


def test_uploaded_with_labels_and_metrics(tmp_path: Path) -> None:
    url, behind = str(tmp_path / "run"), str(tmp_path / "behind")
    keep = holdfast.Keep(last=1)
    with holdfast.Checkpointer(
        url, state(), files=FILES, keep=keep, upload=behind, upload_keep=keep
    ) as ckpt:
        for step in (1, 2, 3):
            save = ckpt.save(step, metrics={"loss": 1.0 / step})
            ckpt.pin(1, "first")
            save.wait(300)
            ckpt._tiers.get("upload")._worker.settle(60)
        ckpt.metrics(3, accuracy=0.5)
    for root in (url, behind):
        assert holdfast.steps(root) == [1, 3]
        found = holdfast.open(root)
        assert dict(found.files) == FILES
        assert found.metrics == {"loss": 1.0 / 3, "accuracy": 0.5}
    with holdfast.Checkpointer(url, state(), keep=keep, upload=behind, upload_keep=keep) as ckpt:
        ckpt.restore()
        ckpt.unpin("first")
        ckpt.save(4)
    assert holdfast.steps(url) == holdfast.steps(behind) == [4]


@pytest.mark.parametrize("to", ["universal", "huggingface", "dcp"])
def test_converted(tmp_path: Path, to: str) -> None:
    url, into = str(tmp_path / "run"), tmp_path / "converted"
    model = {"model": torch.nn.Linear(2, 2)}
    with holdfast.Checkpointer(url, model, files=FILES) as ckpt:
        ckpt.save(1, metrics={"loss": 0.5})
        ckpt.save(2, metrics={"loss": float("nan")})
    made = holdfast.convert(url, into, to=to, step=1)
    assert not set(FILES) & set(made.left_out)
    if to == "universal":
        opened = holdfast.open(into)
        assert dict(opened.files) == FILES and opened.metrics == {"loss": 0.5}
        assert verify(LocalStore(str(into)), 1).good
    else:
        assert {name: (into / name).read_bytes() for name in FILES} == FILES


def test_one_file_holds_no_others(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": torch.nn.Linear(2, 2)}, step=1, files=FILES)
    made = holdfast.convert(tmp_path / "run", tmp_path / "weights.pt", to="torch")
    assert set(FILES) <= set(made.left_out)


def test_a_late_commit_without_its_files(tmp_path: Path) -> None:
    """Rank 0 died before it wrote them: the agent commits the step all the same."""
    url = str(tmp_path)
    with holdfast.Checkpointer(url, state(), files=FILES) as ckpt:
        ckpt.save(1).wait(300)
        ckpt._tiers.durable.settle(60)  # it sweeps files without a manifest
        store, claim = LocalStore(url), msgspec.json.encode(ckpt._tiers.claim)
        manifest = read_manifest(store, 1)
        order = Persist("job", manifest.attempt, 0, 0, url, "", 60.0, claim)
        store.delete(manifest_key(1))
        commit_late(order, manifest)
        assert dict(holdfast.open(url).files) == FILES
        store.delete(manifest_key(1))
        assert manifest.attached is not None
        store.delete(step_prefix(1) + manifest.attached.path)
        commit_late(order, manifest)
    opened = holdfast.open(url)
    assert dict(opened.files) == {} and verify(store, 1).good
