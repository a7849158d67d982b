"""One tensor for `holdfast inspect`: in words, drawn, and where each piece of it lies.

                dim 1
                0            4            8
       dim 0  0 ┌────────────┬────────────┐
                │ 0, 4       │ 1, 5       │
              4 ├────────────┼────────────┤
                │ 2, 6       │ 3, 7       │
              8 └────────────┴────────────┘

The drawing needs only boxes, so regular and listed shardings are drawn alike: the edges of all boxes make a
grid, and each cell shows the ranks that hold its box.  Of more than two cut dims, the two with the most
cuts are drawn.  Long grids are abbreviated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from holdfast.cli.screen import TableRow, fields, heading, say, table
from holdfast.cli.words import and_more, many, ranks_text, shape_text, size
from holdfast.core.checkpoint.formatting import cut_short
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.manifest import FileEntry, Manifest, TensorEntry, to_sharding
from holdfast.core.layout import Box, Sharding, chunk, parts_of, whole
from holdfast.core.layout.pieces import Placement
from holdfast.formats.read.folder import file_key
from holdfast.formats.read.sections import FilePlace, Sections


def entry_bytes(t: TensorEntry) -> int:
    return prod(t.shape) * DTYPES[t.dtype].bytes


def in_parts(sharding: Sharding) -> str:
    """Return `whole`, or the number of parts of a tensor in a foreign checkpoint."""
    count = len(sharding.held or ())
    return "whole" if count < 2 else f"{count:,} parts"


def entry_data(m: Manifest, t: TensorEntry) -> dict[str, Any]:
    """Return a tensor for JSON."""
    s = to_sharding(m.shardings[t.sharding])
    cuts = [{"dim": c.dim, "axes": list(c.axes)} for c in s.cuts]
    return {
        "name": t.name,
        "dtype": t.dtype,
        "shape": list(t.shape),
        "state": t.state,
        "bytes": entry_bytes(t),
        "sharding": {"text": str(s), "cuts": cuts, "on": {a: list(at) for a, at in s.on}},
    }


def tensor_data(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Return a tensor and the places of its pieces for JSON."""
    m = checkpoint.manifest
    index = checkpoint.index(name)
    t = m.tensors[index]
    row = entry_data(m, t) | {"name": name}
    if checkpoint.format != "holdfast":
        parts = [
            {"start": box.start, "stop": box.stop, "places": places}
            for box, places in _places_of(checkpoint, t)
        ]
        return row | {"parts": parts}
    held = held_boxes(m, t, m.placement)
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
    """Print shape and sharding of a tensor, a drawing, and the place of each piece."""
    m = checkpoint.manifest
    index = checkpoint.index(name)
    t = m.tensors[index]
    held = held_boxes(m, t, m.placement)
    replicas = len(held[0][1]) if held else 0
    say(name, "bold")
    rows = [
        ("dtype", t.dtype),
        ("shape", shape_text(t.shape)),
        ("size", f"{size(entry_bytes(t))}  ({many(prod(t.shape), 'element')})"),
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
    for line in draw_grid(held, t.shape, label):
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
        return [("mesh", str(m.layout)), ("sharding", sharding_words(sharding, m, replicas))]
    copies = sum(t.name in c.manifest.by_name for c in checkpoint.others)
    text = f"{t.replica}, {many(copies + 1, 'copy', 'copies')}" if copies else t.replica
    return [("lies", in_parts(sharding)), ("replicas", text)]


def _places_of(
    checkpoint: Checkpoint, t: TensorEntry, most: int | None = None
) -> list[tuple[Box, list[FilePlace]]]:
    """Return boxes and places of the parts of a foreign tensor, at most `most` of them."""
    m = checkpoint.manifest
    assert isinstance(checkpoint.store, Sections)
    held = sorted(to_sharding(m.shardings[t.sharding]).held or (), key=lambda h: h[1].start)
    return [(box, checkpoint.store.places(m.file_of[i].path)) for i, box in held[:most]]


def _place_rows(checkpoint: Checkpoint, t: TensorEntry, show_all: bool) -> list[TableRow]:
    rows: list[TableRow] = []
    for box, places in _places_of(checkpoint, t, None if show_all else 16):
        text = "whole" if box == whole(t.shape) else f"[{box}]"
        mean = f"mean of {len(places)}" if len(places) > 1 else ""
        num_bytes = box.size * DTYPES[t.dtype].bytes
        rows.append((places[0][0], text, size(num_bytes), places[0][1], mean))
    count = len(checkpoint.info(t.name).sharding.held or ())
    if count > len(rows):
        rows.append((and_more(count - len(rows)),))
    return rows


def _in_files(m: Manifest) -> Callable[[Sequence[int]], str]:
    """Label parts in a drawing by their file instead of their number."""
    names = {f.rank: file_key(f) for f in m.files}
    return lambda parts: ", ".join(dict.fromkeys(cut_short(names[p], 24) for p in parts[:2])) or "-"


def _holders(noun: str, ranks: Sequence[int]) -> str:
    if not ranks:
        return "-"
    return f"{noun}{'s' if len(ranks) > 1 else ''} {ranks_text(ranks, 3)}"


_Piece = tuple[FileEntry, Box, int, int]
"""A piece of a tensor: its file, its box, and its first and last byte in the file."""


def pieces(m: Manifest, index: int, boxes: list[Box]) -> list[_Piece]:
    """Return the pieces that hold boxes of a tensor.  A fresh placement for every 64 boxes, since it
    caches."""
    rows: list[_Piece] = []
    for at in range(0, len(boxes), 64):
        placement = m.placement.fresh()
        rows += _located(m, index, boxes[at : at + 64], placement)
    return sorted(rows, key=lambda r: (r[1].start, r[0].rank))


def _located(m: Manifest, index: int, boxes: list[Box], placement: Placement) -> list[_Piece]:
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


def _piece_rows(m: Manifest, index: int, boxes: list[Box], show_all: bool) -> list[TableRow]:
    shape = m.tensors[index].shape
    boxes = sorted((b for b in boxes if b.size), key=lambda b: b.start)
    left_out = [] if show_all or len(boxes) <= 20 else boxes[12:-4]
    shown = [*boxes[:12], *boxes[-4:]] if left_out else boxes
    rows: list[TableRow] = [
        (f.path, "whole" if box == whole(shape) else f"[{box}]", size(b - a), a, b)
        for f, box, a, b in pieces(m, index, shown)
    ]
    if left_out:
        rows.insert(len(rows) * 12 // 16, (and_more(len(left_out)),))
    return rows


# -- drawing --------------------------------------------------------------------------------------


_Held = tuple[Box, tuple[int, ...]]
"""A box, and the ranks that hold it."""

_ROWS, _COLUMNS = 8, 6
_WIDTH = 88


def held_boxes(manifest: Manifest, tensor: TensorEntry, placement: Placement) -> list[_Held]:
    """Return every box into which a tensor is cut, with the ranks that hold it."""
    sharding = placement.table.shardings[tensor.sharding]
    if sharding.held is not None:
        return [(box, (rank,)) for rank, box in sharding.held]
    mesh = manifest.layout
    counts = [parts_of(mesh, cut.axes) for cut in sharding.cuts]
    found: list[_Held] = []
    boxes = [whole(tensor.shape)]
    for cut, parts in zip(sharding.cuts, counts):
        boxes = [chunk(box, cut.dim, part, parts) for box in boxes for part in range(parts)]
    for part, box in enumerate(boxes):
        found.append((box, tuple(placement.holders(sharding, part).tolist())))
    return found


def sharding_words(sharding: Sharding, manifest: Manifest, num_replicas: int) -> str:
    """Return a sharding in words."""
    if sharding.held is not None:
        return f"irregular: {len(sharding.held)} fragments, listed one by one"
    sizes = manifest.layout.sizes
    texts = [
        f"dim {c.dim} in {parts_of(manifest.layout, c.axes)} over {' × '.join(c.axes)}"
        for c in sharding.cuts
    ]
    text = ", then each part ".join(texts[:1] + [f"along {t}" for t in texts[1:]])
    text = f"cut along {text}" if texts else "whole"
    text += "".join(
        f"; only on {axis} {', '.join(map(str, at))} of {sizes[axis]}" for axis, at in sharding.on
    )
    if num_replicas > 1:
        text += f"; {num_replicas} replicas of each part" if texts else f"; {num_replicas} replicas"
    return text


def draw_grid(
    held: Sequence[_Held], shape: tuple[int, ...], label: Callable[[Sequence[int]], str]
) -> list[str]:
    """Return the drawing as lines of text; `label` writes a list of ranks."""
    filled = [(box, ranks) for box, ranks in held if box.size]
    idle = sorted(r for box, ranks in held if not box.size for r in ranks)
    edges = [
        sorted({0, n, *(e for b, _ in filled for e in (b.start[d], b.stop[d]))})
        for d, n in enumerate(shape)
    ]
    across, down, rest = _dims(edges, len(shape))
    for d in rest:
        filled = [(b, r) for b, r in filled if b.start[d] == 0]
    grid = _Grid(
        filled,
        edges[down] if down is not None else [0, 1],
        down,
        edges[across] if across is not None else [0, 1],
        across,
        label,
    )
    lines = grid.lines()
    lines += [
        f"(cut along dim {d} as well, in {len(edges[d]) - 1}: drawn where it is 0)" for d in rest
    ]
    if idle:
        lines.append(f"(no elements for {label(idle)})")
    return lines


def _dims(edges: list[list[int]], num_dims: int) -> tuple[int | None, int | None, list[int]]:
    """Return the dim that is drawn across, the one down, and the cut dims that are not drawn."""
    cut = sorted((d for d in range(num_dims) if len(edges[d]) > 2), key=lambda d: -len(edges[d]))
    rest, drawn = sorted(cut[2:]), sorted(cut[:2])
    if num_dims == 0:
        return None, None, []
    if num_dims == 1:
        return 0, None, []
    for d in range(num_dims):  # an uncut dim makes the picture two-dimensional
        if len(drawn) < 2 and d not in drawn:
            drawn = sorted([*drawn, d])
    return drawn[1], drawn[0], rest


def _kept(count: int, most: int) -> list[int | None]:
    """Return the indices to draw; None stands for the indices left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


class _Grid:
    """The picture of two dims; either may be None where a tensor lacks it."""

    def __init__(
        self,
        held: list[_Held],
        rows: list[int],
        down: int | None,
        columns: list[int],
        across: int | None,
        label: Callable[[Sequence[int]], str],
    ) -> None:
        self.held = held
        self.row_edges, self.down = rows, down
        self.column_edges, self.across = columns, across
        self.rows = _kept(len(rows) - 1, _ROWS)
        for most in range(_COLUMNS, 2, -1):
            self.columns = _kept(len(columns) - 1, most)
            self.cells = [[self._cell(r, c, label) for c in self.columns] for r in self.rows]
            self.widths = [self._width(i) for i in range(len(self.columns))]
            if sum(self.widths) <= _WIDTH:
                break
        self.margin = 0
        if down is not None:
            self.margin = len(f"dim {down}  ") + max(len(f"{e:,}") for e in rows) + 1

    def _cell(
        self, row: int | None, column: int | None, label: Callable[[Sequence[int]], str]
    ) -> str:
        if row is None or column is None:
            return "⋯" if column is None and row is not None else "⋮" if column is not None else "⋱"
        at_row, at_column = self.row_edges[row], self.column_edges[column]
        ranks = sorted(
            r
            for box, holders in self.held
            if _spans(box, self.down, at_row) and _spans(box, self.across, at_column)
            for r in holders
        )
        return label(ranks)

    def _width(self, i: int) -> int:
        longest = max(len(row[i]) for row in self.cells)
        column = self.columns[i]
        if column is None:
            return 3
        number = len(f"{self.column_edges[column]:,}") if self.across is not None else 0
        room = 12 if len(self.columns) < 4 else 8
        return max(longest + 2, number + 1, room)

    def lines(self) -> list[str]:
        out = self._top_labels() if self.across is not None else []
        for i, row in enumerate(self.cells):
            out.append(self._label(i) + self._rule(*("┌┬┐" if i == 0 else "├┼┤")))
            texts = "│".join(f" {t}".ljust(w) for t, w in zip(row, self.widths))
            out.append(" " * self.margin + f"│{texts}│")
        out.append(self._last_label() + self._rule(*"└┴┘"))
        return out

    def _rule(self, left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * w for w in self.widths) + right

    def _label(self, i: int) -> str:
        row = self.rows[i]
        edge = "" if row is None or self.down is None else f"{self.row_edges[row]:,}"
        name = f"dim {self.down}" if i == 0 and self.down is not None else ""
        return self._join(name, edge)

    def _last_label(self) -> str:
        return self._join("", f"{self.row_edges[-1]:,}" if self.down is not None else "")

    def _join(self, name: str, edge: str) -> str:
        return name + edge.rjust(self.margin - 1 - len(name)) + " " if self.margin else ""

    def _top_labels(self) -> list[str]:
        line = ""
        at = self.margin
        for column, width in zip(self.columns, self.widths):
            edge = "" if column is None else f"{self.column_edges[column]:,}"
            line = line.ljust(at) + edge
            at += width + 1
        line = line.ljust(at) + f"{self.column_edges[-1]:,}"
        return [" " * self.margin + f"dim {self.across}", line]


def _spans(box: Box, dim: int | None, at: int) -> bool:
    return dim is None or box.start[dim] <= at < box.stop[dim]
