"""`holdfast inspect URL[@STEP] [NAME]`: what a step holds, or how one tensor of it is cut and stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Annotated, Any

import typer

from holdfast.checkpoint.brief import brief, cut_short
from holdfast.checkpoint.opened import Checkpoint, plain_tensor
from holdfast.cli.figures import foreign_files, in_parts, tensor_bytes, totals
from holdfast.cli.inspect_json import one_json, overview_json, several_json
from holdfast.cli.inspect_one import one
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
    say,
    shape_text,
    size,
    table,
)
from holdfast.errors import UsageError
from holdfast.format.extras import decode
from holdfast.format.manifest import Manifest, TensorEntry, to_sharding
from holdfast.interop.foreign import file_of
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


def _tensor_row(
    m: Manifest, name: str, group: list[TensorEntry], *, foreign: bool = False
) -> tuple[str, ...]:
    t = group[0]
    times = f"{len(group):,} ×" if len(group) > 1 else ""
    sharding = to_sharding(m.shardings[t.sharding])
    total = size(sum(map(tensor_bytes, group)))
    lies = in_parts(sharding) if foreign else str(sharding)
    return (name, times, shape_text(t.shape), t.dtype, lies, total)


def _totals(m: Manifest) -> list[tuple[str, ...]]:
    found = totals(m)
    rows: list[tuple[str, ...]] = [
        (state, dtype, f"{a:,}", f"{b:,}", size(c)) for (state, dtype), (a, b, c) in found.items()
    ]
    if len(found) > 1:
        sums = [sum(column) for column in zip(*found.values())]
        rows.append((dim("all"), "", f"{sums[0]:,}", f"{sums[1]:,}", size(sums[2])))
    return rows


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


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("inspect")
