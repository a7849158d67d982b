"""One tensor for `holdfast inspect`: in words, drawn, and where each piece of it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from holdfast.checkpoint.brief import cut_short
from holdfast.checkpoint.opened import Checkpoint
from holdfast.cli import drawing
from holdfast.cli.screen import (
    Row,
    dim,
    fields,
    heading,
    many,
    ranks_text,
    say,
    shape_text,
    size,
    table,
)
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import FileEntry, Manifest, TensorEntry, to_sharding
from holdfast.interop.foreign import file_of
from holdfast.interop.sections import Place, Sections
from holdfast.layout import Box, Placement, Sharding, whole


def tensor_bytes(t: TensorEntry) -> int:
    return prod(t.shape) * DTYPES[t.dtype].bytes


def in_parts(sharding: Sharding) -> str:
    """Say how a tensor of a foreign checkpoint lies, in words."""
    count = len(sharding.held or ())
    return "whole" if count < 2 else f"{count:,} parts"


def entry_data(m: Manifest, t: TensorEntry) -> dict[str, Any]:
    """A tensor, for JSON."""
    s = to_sharding(m.shardings[t.sharding])
    cuts = [{"dim": c.dim, "axes": list(c.axes)} for c in s.cuts]
    return {
        "name": t.name,
        "dtype": t.dtype,
        "shape": list(t.shape),
        "state": t.state,
        "bytes": tensor_bytes(t),
        "sharding": {"text": str(s), "cuts": cuts, "on": {a: list(at) for a, at in s.on}},
    }


def tensor_data(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """A tensor and where its pieces lie, for JSON."""
    m = checkpoint.manifest
    index = checkpoint.index(name)
    t = m.tensors[index]
    row = entry_data(m, t) | {"name": name}
    if checkpoint.format != "holdfast":
        parts = [
            {"start": box.start, "stop": box.stop, "places": places}
            for box, places in places_of(checkpoint, t)
        ]
        return row | {"parts": parts}
    held = drawing.held_boxes(m, t, m.placement)
    located = pieces(m, index, [box for box, _ in held])
    return row | {
        "held": [{"start": b.start, "stop": b.stop, "ranks": ranks} for b, ranks in held],
        "pieces": [
            {"file": f.path, "rank": f.rank, "start": b.start, "stop": b.stop,
             "from": first, "to": last}
            for f, b, first, last in located
        ],
    }  # fmt: skip


def show_tensor(checkpoint: Checkpoint, name: str, show_all: bool) -> None:
    """Shape and sharding in words, drawn, and where each piece lies."""
    m = checkpoint.manifest
    index = checkpoint.index(name)
    t = m.tensors[index]
    held = drawing.held_boxes(m, t, m.placement)
    replicas = len(held[0][1]) if held else 0
    say(name, "bold")
    rows = [
        ("dtype", t.dtype),
        ("shape", shape_text(t.shape)),
        ("size", f"{size(tensor_bytes(t))}  ({many(prod(t.shape), 'element')})"),
        ("state", t.state),
        *_lies(checkpoint, t, replicas),
    ]
    if t.name != name:
        rows.insert(0, ("tied to", t.name))
    fields(rows)
    say()
    foreign = checkpoint.format != "holdfast"
    noun = "file" if m.mesh and m.mesh[0][0] == "file" else "rank"  # consolidated: no ranks
    label = _in_files(m) if foreign else partial(_holders, noun)
    for line in drawing.draw(held, t.shape, label):
        say("  " + line)
    if foreign:
        heading("Stored")
        table(("file", "part", ">size", ">from byte", ""), _place_rows(checkpoint, t, show_all))
        return
    heading(f"Stored in step {m.step}" + ("; replicas share the writing" if replicas > 1 else ""))
    table(
        ("file", "part", ">size", ">from byte", ">to byte"),
        _piece_rows(m, index, [b for b, _ in held], show_all),
    )


def _lies(checkpoint: Checkpoint, t: TensorEntry, replicas: int) -> list[tuple[str, str]]:
    m = checkpoint.manifest
    sharding = to_sharding(m.shardings[t.sharding])
    if checkpoint.format == "holdfast":
        return [("mesh", str(m.layout)), ("sharding", drawing.words(sharding, m, replicas))]
    copies = sum(t.name in c.manifest.by_name for c in checkpoint.others)
    text = f"{t.replica}, {many(copies + 1, 'copy', 'copies')}" if copies else t.replica
    return [("lies", in_parts(sharding)), ("replicas", text)]


def places_of(
    checkpoint: Checkpoint, t: TensorEntry, most: int | None = None
) -> list[tuple[Box, list[Place]]]:
    """Return where the parts of a foreign tensor really begin, `most` of them."""
    m = checkpoint.manifest
    assert isinstance(checkpoint.store, Sections)
    held = sorted(to_sharding(m.shardings[t.sharding]).held or (), key=lambda h: h[1].start)
    return [(box, checkpoint.store.places(m.file_of[i].path)) for i, box in held[:most]]


def _place_rows(checkpoint: Checkpoint, t: TensorEntry, show_all: bool) -> list[Row]:
    rows: list[Row] = []
    for box, places in places_of(checkpoint, t, None if show_all else 16):
        text = "whole" if box == whole(t.shape) else f"[{box}]"
        mean = f"mean of {len(places)}" if len(places) > 1 else ""
        num_bytes = box.size * DTYPES[t.dtype].bytes
        rows.append((places[0][0], text, size(num_bytes), places[0][1], mean))
    count = len(checkpoint.info(t.name).sharding.held or ())
    if count > len(rows):
        rows.append((dim(f"… {count - len(rows):,} more (--all lists them)"),))
    return rows


def _in_files(m: Manifest) -> Callable[[Sequence[int]], str]:
    """Label parts in a drawing by their file instead of their number."""
    names = {f.rank: file_of(f) for f in m.files}
    return lambda parts: ", ".join(dict.fromkeys(cut_short(names[p], 24) for p in parts[:2])) or "-"


def _holders(noun: str, ranks: Sequence[int]) -> str:
    if not ranks:
        return "-"
    return f"{noun}{'s' if len(ranks) > 1 else ''} {ranks_text(ranks, 3)}"


Piece = tuple[FileEntry, Box, int, int]
"""A piece of a tensor: its file, its box, and where in the file it begins and ends."""


def pieces(m: Manifest, index: int, boxes: list[Box]) -> list[Piece]:
    """The pieces that hold some boxes of a tensor, a few boxes at a time: placements cache."""
    rows: list[Piece] = []
    for at in range(0, len(boxes), 64):
        placement = m.placement.fresh()
        rows += _located(m, index, boxes[at : at + 64], placement)
    return sorted(rows, key=lambda r: (r[1].start, r[0].rank))


def _located(m: Manifest, index: int, boxes: list[Box], placement: Placement) -> list[Piece]:
    t = m.tensors[index]
    width, n = placement.table.shape.shape[1], len(t.shape)
    start, stop = np.zeros((len(boxes), width), np.int64), np.ones((len(boxes), width), np.int64)
    for i, box in enumerate(boxes):
        start[i, :n], stop[i, :n] = box.start, box.stop
    found = placement.locate(np.full(len(boxes), index, np.int64), start, stop)
    columns = (found.rank, found.offset, found.piece_start, found.piece_stop)
    rows = []
    for rank, offset, a, b in zip(*(c.tolist() for c in columns)):
        file, part = m.file_of[rank], Box(tuple(a[:n]), tuple(b[:n]))
        begin = file.data + offset
        rows.append((file, part, begin, begin + part.size * DTYPES[t.dtype].bytes))
    return rows


def _piece_rows(m: Manifest, index: int, boxes: list[Box], show_all: bool) -> list[Row]:
    shape = m.tensors[index].shape
    boxes = sorted((b for b in boxes if b.size), key=lambda b: b.start)
    left_out = [] if show_all or len(boxes) <= 20 else boxes[12:-4]
    shown = [*boxes[:12], *boxes[-4:]] if left_out else boxes
    rows: list[Row] = [
        (f.path, "whole" if box == whole(shape) else f"[{box}]", size(b - a), a, b)
        for f, box, a, b in pieces(m, index, shown)
    ]
    if left_out:
        more = dim(f"… of {many(len(left_out), 'more part')} (--all lists them)")
        rows.insert(len(rows) * 12 // 16, (more,))
    return rows
