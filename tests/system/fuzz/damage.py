"""Damages to the files of a checkpoint, drawn at random: of bytes, of files, and lies under a true seal."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.core.codec.digest import digest, hexdigest
from holdfast.tiers.records.segment import HEAD_BYTES, aligned

OF_BYTES = {
    "flip": 30, "byte": 10, "zero": 6, "extend": 6, "insert": 5, "remove": 5, "number": 14, "copy": 5,
    "swap": 6, "replace": 6, "digit": 4, "several": 3, "stale": 1,
}  # fmt: skip
"""Kinds of damage that leave other bytes, which formats without digests may take for values, and how often
each is drawn."""
OF_FILES = {
    "cut": 10, "delete": 2, "empty": 2, "directory": 1, "fifo": 1, "loop": 1, "dangling": 1, "sparse": 1,
    "double": 1,
}  # fmt: skip
NUMBERS = (0, 1, 2, 127, 255, 65535, 2**31 - 1, 2**32 - 1, 1 << 40, 2**63 - 1, 2**64 - 1)


def files_in(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def damage(rng: random.Random, root: Path, prefer: str = "") -> str:
    """Damage one file, or two; return the kind.  `prefer`: the folder whose files it mostly is."""
    files = files_in(root)
    inside = [path for path in files if prefer and path.is_relative_to(root / prefer)]
    path = rng.choice(inside if inside and rng.random() < 0.75 else files)
    kinds = OF_BYTES | OF_FILES
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    if kind in ("swap", "replace", "stale"):
        _exchange(rng, kind, path, rng.choice(files))
    elif kind in OF_FILES and kind != "cut":
        _refile(rng, kind, path)
    else:
        data = bytearray(path.read_bytes())
        _rewrite(rng, kind, data)
        path.write_bytes(data)
    return kind


def _place(rng: random.Random, size: int) -> int:
    """A byte of a file: often near its beginning or end, where headers are."""
    where, near = rng.random(), int(rng.expovariate(1 / 300))
    if where < 0.65:
        return max(0, min(size - 1, near if where < 0.45 else size - 1 - near))
    return rng.randrange(max(1, size))


def _rewrite(rng: random.Random, kind: str, data: bytearray) -> None:
    at, length = _place(rng, len(data)), rng.choice((1, 2, 8, 100))
    if kind == "flip" and data:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "byte" and data:
        data[at] = rng.randrange(256)
    elif kind == "zero":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "cut":
        del data[at:]
    elif kind == "extend":
        data += rng.randbytes(rng.choice((1, 8, 4096)))
    elif kind == "insert":
        data[at:at] = rng.randbytes(length)
    elif kind == "remove":
        del data[at : at + length]
    elif kind == "number":
        form = rng.choice(("<I", "<Q", ">I", "<H"))
        value = rng.choice((*NUMBERS, len(data), len(data) + 1)) % (1 << 8 * struct.calcsize(form))
        new = struct.pack(form, value)
        data[at : at + len(new)] = new[: len(data) - at]
    elif kind == "copy":
        block = data[(start := rng.randrange(len(data) + 1)) : start + rng.choice((16, 256, 4096))]
        data[at : at + len(block)] = block
    elif kind == "digit" and (digits := [i for i, b in enumerate(data) if 48 <= b <= 57]):
        data[rng.choice(digits)] = 48 + rng.randrange(10)
    elif kind == "several" and data:
        for _ in range(rng.randrange(2, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)


def _exchange(rng: random.Random, kind: str, path: Path, other: Path) -> None:
    """One file's bytes in the place of another's, or its copy in another's folder."""
    mine, theirs = path.read_bytes(), other.read_bytes()
    if kind == "stale":
        (other.parent / path.name).write_bytes(mine)
        return
    path.write_bytes(theirs)
    if kind == "swap":
        other.write_bytes(mine)


def _refile(rng: random.Random, kind: str, path: Path) -> None:
    if kind == "sparse":
        os.truncate(path, rng.choice((1 << 30, 5 << 30, 1 << 40)))
    elif kind == "double":
        shutil.copy(path, f"{path}{rng.choice(('.1', '0', '.json', '.pt', '.safetensors'))}")
    else:
        path.unlink()
        if kind == "empty":
            path.touch()
        elif kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "dangling":
            path.symlink_to("/nowhere/x")


# -- lies: what a manifest, or the header of a segment, says under a true seal ---------------------

LIES: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 8, 255, 1 << 31, 1 << 60, 1 << 62, (1 << 63) - 1, 1 << 64, 10**30, 1.5, -0.0, 1e308,
    None, True, "", "x", "../../x", "/etc/passwd", "a/../b", ".", "\0", "\ud800", "x" * 5000,
    "r00000.safetensors", [], {}, [0], [1 << 40], ["dp"], {"a": 1}, [[]], {"$at": "model.w"},
    {"$optimizer": {}}, {"$tensor": ["float32", [1 << 40], ""]}, {"$array": ["f4", [3], "AAAA"]},
    {"$int": "9" * 5000}, {"$float": "nan"}, {"$dict": [[[1], 2]]}, {"$set": [{"$set": [1]}]},
    {"$object": {"a": 1}},
)  # fmt: skip


def lie_in_manifest(rng: random.Random, root: Path) -> str:
    path = root / f"steps/{rng.choice((1, 2)):010d}/manifest.json"
    tree = json.loads(path.read_bytes())
    del tree["digest"]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _lie(rng, tree)
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    body = text.encode("utf-8", "surrogatepass")[:-1]
    path.write_bytes(body + b',"digest":"' + hexdigest(body).encode() + b'"}')
    return "lie"


def lie_in_records(rng: random.Random, root: Path) -> str:
    """A lie in a segment's header; or in a plan, under the name that its new digest is."""
    logs = sorted((root / "log").rglob("*.log"))
    path = rng.choice([*logs, *sorted((root / "log").rglob("plan-*.json"))])
    if path.suffix == ".log":
        _reseal(path, lambda tree: _lie(rng, tree))
        return "lie"
    tree = json.loads(path.read_bytes())
    _lie(rng, tree)
    data = json.dumps(tree, separators=(",", ":")).encode()
    (path.parent / f"plan-{hexdigest(data)}.json").write_bytes(data)
    for log in logs:
        if log.is_relative_to(path.parent):
            _reseal(log, lambda tree: tree.__setitem__("plan", hexdigest(data)))
    return "lie"


def _reseal(path: Path, change: Callable[[Any], object]) -> None:
    """Change the header of a segment."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[8:16], "little")
    tree = json.loads(raw[HEAD_BYTES : HEAD_BYTES + size])
    change(tree)
    body = json.dumps(tree, separators=(",", ":")).encode()
    head = raw[:8] + len(body).to_bytes(8, "little") + digest(body).to_bytes(8, "little") + body
    path.write_bytes(head.ljust(aligned(len(head)), b"\0") + raw[aligned(HEAD_BYTES + size) :])


def _paths(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = (
        enumerate(tree)
        if isinstance(tree, list)
        else tree.items()
        if isinstance(tree, dict)
        else ()
    )
    for key, value in pairs:
        yield (*at, key)
        yield from _paths(value, (*at, key))


def _lie(rng: random.Random, tree: Any) -> None:
    """Say something else at one place."""
    every = list(_paths(tree))
    head = rng.choice(sorted({path[0] for path in every}))
    path, other = rng.choice([p for p in every if p[0] == head]), rng.choice(every)
    node, copied = tree, tree
    for key in path[:-1]:
        node = node[key]
    for key in other:
        copied = copied[key]
    key, kind = path[-1], rng.random()
    old = node[key]
    if kind < 0.2 and isinstance(old, int):
        node[key] = old + rng.choice((-1, 1, 8, -8, 4096, -4096, old))
    elif kind < 0.35:
        node[key] = json.loads(json.dumps(copied))
    elif kind < 0.45 and isinstance(node, list):
        node.append(json.loads(json.dumps(old)))
    elif kind < 0.55:
        node.pop(key)
    elif kind < 0.6 and isinstance(old, str):
        node[key] = old[:-1] + rng.choice("0123456789abcdefx")
    else:
        node[key] = rng.choice(LIES)
