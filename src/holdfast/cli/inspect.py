"""`holdfast inspect URL[@STEP] [NAME]`: what a step holds, or how one tensor of it is cut and stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from operator import attrgetter
from typing import Annotated, Any

import numpy as np
import typer

from holdfast.checkpoint.brief import brief, cut_short
from holdfast.checkpoint.opened import Checkpoint, plain_tensor
from holdfast.cli import drawing
from holdfast.cli.screen import (
    AsJson,
    ShowAll,
    Target,
    age,
    dim,
    fields,
    heading,
    many,
    opened,
    print_json,
    ranks_text,
    say,
    shape_text,
    size,
    table,
)
from holdfast.errors import UsageError
from holdfast.format.dtypes import DTYPES
from holdfast.format.extras import decode
from holdfast.format.manifest import FileEntry, Manifest, TensorEntry, to_sharding
from holdfast.interop.foreign import file_of
from holdfast.interop.sections import Place, Sections
from holdfast.layout import Box, Placement, Sharding, whole
from holdfast.near import near

KINDS = ("param", "buffer", "tensor")
"""States that are not an optimizer's."""

COLUMNS = ("name", ">", "shape", "dtype", "sharding", ">size")

RULES = {
    "same": "the same on every rank",
    "rank0": "rank 0's is taken",
    "redistribute": "the object redistributes it",
    "fresh": "starts anew",
    None: "no rule: restore on another mesh needs on_resize",
}

Name = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="A tensor, or a pattern such as '*.bias'.")
]


def run(
    target: Target, name: Name = None, show_all: ShowAll = False, as_json: AsJson = False
) -> None:
    """Show what a step holds; with NAME, how that tensor is cut, drawn, and where its bytes lie."""
    checkpoint = opened(target)
    if name is None:
        overview_json(checkpoint) if as_json else overview(checkpoint, show_all)
        return
    if any(c in name for c in "*?["):
        names = [n for n in checkpoint.names() if fnmatchcase(n, name)]
        if not names:
            plain = re.sub(r"[*?\[\]]", "", name)
            raise UsageError(f"no tensor matches {name!r}", hint=near(plain, checkpoint.names()))
        several_json(checkpoint, names) if as_json else several(checkpoint, names)
        return
    one_json(checkpoint, name) if as_json else one(checkpoint, name, show_all)


# -- the whole step -------------------------------------------------------------------------------


def overview(checkpoint: Checkpoint, show_all: bool) -> None:
    """Header, tensors, totals, files, extras."""
    m = checkpoint.manifest
    say(f"step {m.step}", style="bold")
    fields(header(checkpoint))
    mine = [t for t in m.tensors if show_all or t.state in KINDS]
    folded = [t for t in m.tensors if not show_all and t.state not in KINDS]
    heading("Tensors")
    foreign = checkpoint.format != "holdfast"  # there every tensor has a sharding of its own
    lies = (lambda t: in_parts(to_sharding(m.shardings[t.sharding]))) if foreign else None
    folded_rows = fold(mine, lies) if lies else fold(mine)
    shown = [(t.name, [t]) for t in m.tensors] if show_all else folded_rows
    table(COLUMNS, [_tensor_row(m, *row, foreign=foreign) for row in shown])
    for alias, to in m.aliases.items():
        say(f"  {alias} {dim('is')} {to}")
    if folded:
        states = ", ".join(dict.fromkeys(t.state for t in folded))
        say(
            dim(
                f"  and {many(len(folded), 'tensor')} of optimizer state ({states}): --all lists them"
            )
        )
    heading("Totals")
    table(("state", "dtype", ">tensors", ">elements", ">size"), _totals(m))
    heading("Files")
    if checkpoint.format == "holdfast":
        table(("file", ">rank", ">size"), _file_rows(m, show_all))
    else:
        table(("file", ">parts", ">of tensors"), _foreign_file_rows(m, show_all))
    _extras(checkpoint, show_all)


def header(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    m = checkpoint.manifest
    if checkpoint.format != "holdfast":
        files = {file_of(f) for f in m.files}
        return [
            ("at", checkpoint.store.url),
            ("format", checkpoint.format),
            ("software", ", ".join(f"{k} {v}" for k, v in m.software.items()) or "not stated"),
            ("holds", f"{many(len(m.tensors), 'tensor')} in {many(len(files), 'file')}, "
                      f"{size(m.total_bytes)}"),
        ]  # fmt: skip
    consolidated = m.mesh and m.mesh[0][0] == "file"
    ranks = "every tensor whole in one file" if consolidated else many(m.layout.world, "rank")
    world = f"  ({ranks})" if m.mesh else ""
    return [
        ("root", checkpoint.store.url),
        ("created", f"{m.created}  ({age(m.created)}, run {m.run})"),
        ("software", ", ".join(f"{k} {v}" for k, v in m.software.items())),
        ("mesh", f"{m.layout}{world}"),
        ("holds", f"{many(len(m.tensors), 'tensor')} in {many(len(m.files), 'file')}, "
                  f"{size(m.total_bytes)}"),
    ]  # fmt: skip


def fold(
    tensors: Iterable[TensorEntry], lies: Callable[[TensorEntry], Any] = attrgetter("sharding")
) -> list[tuple[str, list[TensorEntry]]]:
    """Tensors that differ in the number of a layer alone become one row: `h.{0..31}.attn.weight`.

    `lies`: what tensors of one row have in common besides.
    """
    groups: dict[tuple[Any, ...], list[TensorEntry]] = {}
    for t in tensors:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "#", t.name)
        groups.setdefault((pattern, t.dtype, t.shape, lies(t), t.state), []).append(t)
    return [(_folded_name(key[0], group), group) for key, group in groups.items()]


def _folded_name(pattern: str, group: list[TensorEntry]) -> str:
    if len(group) == 1:
        return group[0].name
    numbers = [re.findall(r"(?<=\.)\d+(?=\.)", t.name) for t in group]
    for column in zip(*numbers):
        found = sorted({int(n) for n in column})
        whole_run = found == list(range(found[0], found[-1] + 1))
        text = f"{found[0]}..{found[-1]}" if whole_run else ",".join(map(str, found))
        if len(text) > 20:
            text = f"{found[0]},…,{found[-1]}"
        pattern = pattern.replace("#", str(found[0]) if len(found) == 1 else f"{{{text}}}", 1)
    return pattern


def in_parts(sharding: Sharding) -> str:
    """How a tensor of a foreign checkpoint lies, in words."""
    count = len(sharding.held or ())
    return "whole" if count < 2 else f"{count:,} parts"


def _tensor_row(
    m: Manifest, name: str, group: list[TensorEntry], *, foreign: bool = False
) -> tuple[str, ...]:
    t = group[0]
    times = f"{len(group):,} ×" if len(group) > 1 else ""
    sharding = to_sharding(m.shardings[t.sharding])
    total = size(sum(map(tensor_bytes, group)))
    lies = in_parts(sharding) if foreign else str(sharding)
    return (name, times, shape_text(t.shape), t.dtype, lies, total)


def tensor_bytes(t: TensorEntry) -> int:
    return prod(t.shape) * DTYPES[t.dtype].bytes


def totals(m: Manifest) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(state, dtype) -> tensors, elements, bytes."""
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for t in m.tensors:
        a, b, c = found.get((t.state, t.dtype), (0, 0, 0))
        found[t.state, t.dtype] = (a + 1, b + prod(t.shape), c + tensor_bytes(t))
    return found


def _totals(m: Manifest) -> list[tuple[str, ...]]:
    found = totals(m)
    rows: list[tuple[str, ...]] = [
        (state, dtype, f"{a:,}", f"{b:,}", size(c)) for (state, dtype), (a, b, c) in found.items()
    ]
    if len(found) > 1:
        sums = [sum(column) for column in zip(*found.values())]
        rows.append((dim("all"), "", f"{sums[0]:,}", f"{sums[1]:,}", size(sums[2])))
    return rows


def foreign_files(m: Manifest) -> dict[str, list[int]]:
    """Real files of a foreign checkpoint, and the sizes of the parts of tensors in each."""
    sizes: dict[str, list[int]] = {}
    for f in m.files:
        sizes.setdefault(file_of(f), []).append(f.bytes)
    return dict(sorted(sizes.items()))


def _foreign_file_rows(m: Manifest, show_all: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (name, f"{len(parts):,}", size(sum(parts))) for name, parts in foreign_files(m).items()
    ]
    if len(rows) > 10 and not show_all:
        rows[4:-2] = [(dim(f"… {len(rows) - 6:,} more"), "", "")]
    return rows


def _file_rows(m: Manifest, show_all: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [(f.path, str(f.rank), size(f.bytes)) for f in m.files]
    if len(rows) > 10 and not show_all:
        left_out = m.files[4:-2]
        more = dim(f"… {len(left_out):,} more")
        rows[4:-2] = [(more, "", dim(size(sum(f.bytes for f in left_out))))]
    return rows


def _extras(checkpoint: Checkpoint, show_all: bool) -> None:
    m = checkpoint.manifest
    width = 2000 if show_all else 72
    if m.extras:
        heading("Extras")
        table(("key", "value"), [(k, value_text(v, width)) for k, v in checkpoint.extras.items()])
    if m.per_rank:
        heading("Extras of each rank")
        first = {k: decode(v, plain_tensor) for k, v in checkpoint.rank_extras(0).items()}
        rows = [
            (k, RULES[rule], value_text(first[k], width) if k in first else dim("none"))
            for k, rule in m.per_rank.items()
        ]
        table(("key", "on another mesh", "rank 0 has"), rows)


def value_text(value: Any, width: int) -> str:
    """A value on one line; an optimizer's by its groups, not its states."""
    if isinstance(value, dict) and value.keys() == {"param_groups", "state"}:
        groups = [
            {k: v for k, v in g.items() if k != "params"} | {"params": len(g["params"])}
            for g in value["param_groups"]
        ]
        text = ", ".join(", ".join(f"{k} {v}" for k, v in _first(g)) for g in groups)
        return cut_short(f"{many(len(groups), 'group')}: {text}", width)
    return brief(value, width)


def _first(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in group.items() if v is not None and v is not False]


# -- some tensors ---------------------------------------------------------------------------------


def several(checkpoint: Checkpoint, names: list[str]) -> None:
    m = checkpoint.manifest
    foreign = checkpoint.format != "holdfast"
    rows = [_tensor_row(m, n, [m.tensors[checkpoint.index(n)]], foreign=foreign) for n in names]
    table(COLUMNS, rows, indent=0)
    total = sum(tensor_bytes(m.tensors[checkpoint.index(n)]) for n in names)
    say(dim(f"{many(len(names), 'tensor')}, {size(total)}"))


# -- one tensor -----------------------------------------------------------------------------------


def one(checkpoint: Checkpoint, name: str, show_all: bool) -> None:
    """Shape and sharding in words, drawn, and where each piece lies."""
    m = checkpoint.manifest
    index = checkpoint.index(name)
    t = m.tensors[index]
    held = drawing.held_boxes(m, t, m.placement)
    replicas = len(held[0][1]) if held else 0
    say(name, style="bold")
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


def _places(
    checkpoint: Checkpoint, t: TensorEntry, most: int | None = None
) -> list[tuple[Box, list[Place]]]:
    """Where the parts of a foreign tensor really begin, `most` of them."""
    m = checkpoint.manifest
    assert isinstance(checkpoint.store, Sections)
    held = sorted(to_sharding(m.shardings[t.sharding]).held or (), key=lambda h: h[1].start)
    return [(box, checkpoint.store.places(m.file_of[i].path)) for i, box in held[:most]]


def _place_rows(checkpoint: Checkpoint, t: TensorEntry, show_all: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for box, places in _places(checkpoint, t, None if show_all else 16):
        text = "whole" if box == whole(t.shape) else f"[{box}]"
        mean = f"mean of {len(places)}" if len(places) > 1 else ""
        num_bytes = box.size * DTYPES[t.dtype].bytes
        rows.append((places[0][0], text, size(num_bytes), f"{places[0][1]:,}", mean))
    count = len(checkpoint.info(t.name).sharding.held or ())
    if count > len(rows):
        rows.append((dim(f"… {count - len(rows):,} more (--all lists them)"), "", "", "", ""))
    return rows


def _in_files(m: Manifest) -> Callable[[Sequence[int]], str]:
    """In a drawing, the file instead of the number of a part."""
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


def _piece_rows(m: Manifest, index: int, boxes: list[Box], show_all: bool) -> list[tuple[str, ...]]:
    shape = m.tensors[index].shape
    boxes = sorted((b for b in boxes if b.size), key=lambda b: b.start)
    left_out = [] if show_all or len(boxes) <= 20 else boxes[12:-4]
    shown = [*boxes[:12], *boxes[-4:]] if left_out else boxes
    rows: list[tuple[str, ...]] = [
        (f.path, "whole" if box == whole(shape) else f"[{box}]", size(b - a), f"{a:,}", f"{b:,}")
        for f, box, a, b in pieces(m, index, shown)
    ]
    if left_out:
        more = dim(f"… of {many(len(left_out), 'more part')} (--all lists them)")
        rows.insert(len(rows) * 12 // 16, (more, "", "", "", ""))
    return rows


# -- JSON -----------------------------------------------------------------------------------------


def overview_json(checkpoint: Checkpoint) -> None:
    m = checkpoint.manifest
    print_json(
        _origin_json(checkpoint)
        | {
            "software": m.software,
            "bytes": m.total_bytes,
            "tensors": [_tensor_json(m, t) for t in m.tensors],
            "aliases": m.aliases,
            "totals": [
                {"state": s, "dtype": d, "tensors": a, "elements": b, "bytes": c}
                for (s, d), (a, b, c) in totals(m).items()
            ],
            "extras": checkpoint.extras,
        }
    )


def _origin_json(checkpoint: Checkpoint) -> dict[str, Any]:
    m = checkpoint.manifest
    found = {"url": checkpoint.store.url, "format": checkpoint.format, "step": m.step}
    if checkpoint.format != "holdfast":
        return found | {
            "files": [
                {"path": path, "parts": len(sizes), "tensor_bytes": sum(sizes)}
                for path, sizes in foreign_files(m).items()
            ]
        }
    return found | {
        "run": m.run,
        "created": m.created,
        "mesh": dict(m.mesh),
        "files": [{"path": f.path, "rank": f.rank, "bytes": f.bytes} for f in m.files],
        "per_rank": m.per_rank,
    }


def _tensor_json(m: Manifest, t: TensorEntry) -> dict[str, Any]:
    sharding = to_sharding(m.shardings[t.sharding])
    return {
        "name": t.name,
        "dtype": t.dtype,
        "shape": list(t.shape),
        "state": t.state,
        "bytes": tensor_bytes(t),
        "sharding": _sharding_json(sharding),
    }


def _sharding_json(s: Sharding) -> dict[str, Any]:
    cuts = [{"dim": c.dim, "axes": list(c.axes)} for c in s.cuts]
    return {"text": str(s), "cuts": cuts, "on": {a: list(at) for a, at in s.on}}


def several_json(checkpoint: Checkpoint, names: list[str]) -> None:
    m = checkpoint.manifest
    print_json([_tensor_json(m, m.tensors[checkpoint.index(n)]) | {"name": n} for n in names])


def one_json(checkpoint: Checkpoint, name: str) -> None:
    m = checkpoint.manifest
    index = checkpoint.index(name)
    t = m.tensors[index]
    row = _tensor_json(m, t) | {"name": name}
    if checkpoint.format != "holdfast":
        row["parts"] = [
            {"start": list(box.start), "stop": list(box.stop), "places": places}
            for box, places in _places(checkpoint, t)
        ]
        print_json(row)
        return
    held = drawing.held_boxes(m, t, m.placement)
    row["held"] = [
        {"start": list(b.start), "stop": list(b.stop), "ranks": list(ranks)} for b, ranks in held
    ]
    row["pieces"] = [
        {"file": f.path, "rank": f.rank, "start": list(b.start), "stop": list(b.stop),
         "from": first, "to": last}
        for f, b, first, last in pieces(m, index, [b for b, _ in held])
    ]  # fmt: skip
    print_json(row)
