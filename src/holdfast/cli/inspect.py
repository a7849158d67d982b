"""`holdfast inspect URL[@STEP] [NAME]`: the contents of a step, or how one tensor is cut and stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from math import prod
from operator import attrgetter
from typing import Any

from msgspec import to_builtins

from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.cli.screen import Result, TableRow, fields, heading, progress, say, table
from holdfast.cli.tensor import entry_bytes, entry_data, in_parts, show_tensor, tensor_data
from holdfast.cli.words import age, and_more, bad, dim, many, shape_text, size
from holdfast.core.checkpoint.diffing import values_below
from holdfast.core.checkpoint.formatting import cut_short, format_value, full_value
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.checkpoint.opened import Checkpoint, plain_tensor
from holdfast.core.checkpoint.statistics import TensorStatistics, tensor_statistics
from holdfast.core.format.extras import decode
from holdfast.core.format.manifest import MODEL_STATES, Manifest, TensorEntry, to_sharding
from holdfast.formats.looking import open as open_checkpoint
from holdfast.formats.read.folder import file_key

_COLUMNS = ("name", ">", "shape", "dtype", "sharding", ">size")

_RULE_WORDS = {
    "same": "the same on every rank",
    "rank0": "rank 0's is taken",
    "redistribute": "the object redistributes it",
    "fresh": "starts anew",
    None: "no rule: restore on another mesh needs on_resize",
}


def run(target: str, name: str | None, stats: bool, show_all: bool) -> Result:
    """See `holdfast.cli.verbs`."""
    c = open_checkpoint(target)
    if name and name not in c.names():
        for path, value in _extras_for(c, name):
            if path == name:
                return Result(lambda: {"path": name, "value": value}, lambda: _show_value(value))
    if stats:
        return _stats(c, name, show_all)
    if name is None:
        return Result(lambda: _step_data(c), lambda: _show_step(c, show_all))
    if not _is_pattern(name):
        _check_name(c, name)
        return Result(lambda: tensor_data(c, name), lambda: show_tensor(c, name, show_all))
    names, m = _matching(c, name), c.manifest
    tensors = [(n, m.tensors[c.index(n)]) for n in names]
    return Result(
        lambda: [entry_data(m, t) | {"name": n} for n, t in tensors],
        lambda: _show_several(c, tensors),
    )


def _is_pattern(name: str) -> bool:
    return any(char in name for char in "*?[")


def _matching(c: Checkpoint, pattern: str) -> list[str]:
    """Return the tensors that match a pattern.  UsageError if none does."""
    names = [n for n in c.names() if fnmatchcase(n, pattern)]
    if not names:
        plain = re.sub(r"[*?\[\]]", "", pattern)
        raise UsageError(f"no tensor matches {pattern!r}", hint=did_you_mean(plain, c.names()))
    return names


def _check_name(c: Checkpoint, name: str) -> None:
    """UsageError for a name that is neither that of a tensor nor that of an extra."""
    if c.manifest.find(name) is None:
        known = [*c.names(), *(path for path, _ in _extras_for(c, name) if path)]
        what = f"no tensor and no extra {name!r:.300} in step {c.step}"
        raise UsageError(what, hint=did_you_mean(name, known))


def _extras_for(c: Checkpoint, name: str) -> Iterator[tuple[str, Any]]:
    """Each extra, and each value in it, by its path; of a rank those of the rank that is named."""
    yield from values_below("", c.extras)
    rank = re.match(r"rank(\d{1,9})\b", name)
    if rank is not None:
        own = {k: decode(v, plain_tensor) for k, v in c.rank_extras(int(rank[1])).items()}
        yield from values_below(rank[0], own)


def _show_value(value: Any) -> None:
    """Print an extra with nothing left out; a text as it is, for scripts."""
    say(value if isinstance(value, str) else full_value(value))


def _stats(c: Checkpoint, name: str | None, show_all: bool) -> Result:
    """Read the named tensors, or all, or those that are no optimizer's, and return their statistics."""
    left_out = 0
    if name is not None and not _is_pattern(name):
        _check_name(c, name)
        names = [name]
    elif name is not None:
        names = _matching(c, name)
    else:
        every = c.manifest.tensors
        names = [t.name for t in every if show_all or t.state in MODEL_STATES]
        left_out = len(every) - len(names)
    entries = [c.manifest.tensors[c.index(n)] for n in names]
    with progress("reading", sum(map(entry_bytes, entries))) as done:
        found = tensor_statistics(c, names, progress=done)
    data = {"url": c.store.url, "step": c.step, "tensors": [asdict(one) for one in found]}
    return Result(lambda: data, lambda: _show_stats(found, left_out))


def _show_stats(found: list[TensorStatistics], left_out: int) -> None:
    rows: list[TableRow] = []
    for one in found:
        numbers = (one.mean, one.deviation, one.least, one.most)
        texts = ("-" if n is None else f"{n:.4g}" for n in numbers)
        counts = (bad(f"{n:,}") if n else "0" for n in (one.num_nan, one.num_inf))
        rows.append((one.name, *texts, *counts))
    table(("name", ">mean", ">deviation", ">least", ">most", ">NaN", ">Inf"), rows, indent=0)
    if left_out:
        say(dim(f"and {many(left_out, 'tensor')} of optimizer state: --all reads them"))


def _show_several(c: Checkpoint, tensors: list[tuple[str, TensorEntry]]) -> None:
    table(_COLUMNS, [_tensor_row(c, n, [t]) for n, t in tensors], indent=0)
    total = sum(entry_bytes(t) for _, t in tensors)
    say(dim(f"{many(len(tensors), 'tensor')}, {size(total)}"))


# -- the whole step, for programs -----------------------------------------------------------------


def _step_data(c: Checkpoint) -> dict[str, Any]:
    m = c.manifest
    return _origin_data(c) | {
        "software": m.software,
        "bytes": m.total_bytes,
        "tensors": [entry_data(m, t) for t in m.tensors],
        "aliases": m.aliases,
        "totals": [
            {"state": s, "dtype": d, "tensors": a, "elements": b, "bytes": num_bytes}
            for (s, d), (a, b, num_bytes) in totals(m).items()
        ],
        "extras": c.extras,
    }


def _origin_data(c: Checkpoint) -> dict[str, Any]:
    m = c.manifest
    found = {"url": c.store.url, "format": c.format, "step": m.step}
    if c.format != "holdfast":
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
        "labels": _labels(c),
        "metrics": c.metrics,
        "attached": [] if m.attached is None else to_builtins(m.attached.files),
    }


def _labels(c: Checkpoint) -> list[str]:
    return read_notes(c.store).pinned.get(c.step, [])


def totals(m: Manifest) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return numbers of tensors, elements and bytes by (state, dtype)."""
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for t in m.tensors:
        a, b, c = found.get((t.state, t.dtype), (0, 0, 0))
        found[t.state, t.dtype] = (a + 1, b + prod(t.shape), c + entry_bytes(t))
    return found


def foreign_files(m: Manifest) -> dict[str, list[int]]:
    """Return the real files of a foreign checkpoint, and the sizes of the tensor parts in each."""
    sizes: dict[str, list[int]] = {}
    for f in m.files:
        sizes.setdefault(file_key(f), []).append(f.bytes)
    return dict(sorted(sizes.items()))


# -- the whole step, for people -------------------------------------------------------------------


def _show_step(c: Checkpoint, show_all: bool) -> None:
    m, is_foreign = c.manifest, c.format != "holdfast"
    say(f"step {m.step}", "bold")
    fields(header(c))
    heading("Tensors")
    _show_tensors(c, show_all)
    heading("Totals")
    table(("state", "dtype", ">tensors", ">elements", ">size"), _totals(m))
    heading("Files")
    if is_foreign:
        found = foreign_files(m).items()
        rows: list[TableRow] = [(name, len(parts), size(sum(parts))) for name, parts in found]
        table(("file", ">parts", ">of tensors"), _few(rows, show_all))
    else:
        rows = [(f.path, f.rank, size(f.bytes)) for f in m.files]
        left_out = dim(size(sum(f.bytes for f in m.files[4:-2])))
        table(("file", ">rank", ">size"), _few(rows, show_all, "", left_out))
        if m.attached is not None:
            heading("Attached files")
            table(
                ("file", ">size"),
                _few([(f.name, size(f.bytes)) for f in m.attached.files], show_all),
            )
    _show_extras(c, show_all)


def header(c: Checkpoint) -> list[tuple[str, str]]:
    m = c.manifest
    software = ", ".join(f"{k} {v}" for k, v in m.software.items())
    if c.format != "holdfast":
        num_files = len({file_key(f) for f in m.files})
        origin = [("at", c.store.url), ("format", c.format), ("software", software or "not stated")]
    else:
        num_files = len(m.objects)
        is_whole = m.mesh and m.mesh[0][0] == "file"
        ranks = "every tensor whole in one file" if is_whole else many(m.layout.world, "rank")
        origin = [
            ("root", c.store.url),
            ("created", f"{m.created}  ({age(m.created)}, run {m.run})"),
            ("software", software),
            *((("pinned as", ", ".join(labels)),) if (labels := _labels(c)) else ()),
            *(
                (("metrics", ", ".join(f"{k} {v:.6g}" for k, v in c.metrics.items())),)
                if c.metrics
                else ()
            ),
            ("mesh", f"{m.layout}  ({ranks})" if m.mesh else str(m.layout)),
        ]
    held = f"{many(len(m.tensors), 'tensor')} in {many(num_files, 'file')}, {size(m.total_bytes)}"
    left = c.left_out
    numbers = sum(prod(shape) for _, shape in left.values())
    text = f"{many(len(left), 'frozen parameter')} of {numbers:,} elements (trainable_only)"
    return [*origin, ("holds", held), *([("leaves out", text)] if left else [])]


def _show_tensors(c: Checkpoint, show_all: bool) -> None:
    m = c.manifest
    if show_all:
        rows, others = [(t.name, [t]) for t in m.tensors], []
    else:
        # every tensor of a foreign checkpoint has a sharding of its own
        lies = (lambda t: _lies(c, t)) if c.format != "holdfast" else attrgetter("sharding")
        rows = fold((t for t in m.tensors if t.state in MODEL_STATES), lies)
        others = [t for t in m.tensors if t.state not in MODEL_STATES]
    table(_COLUMNS, [_tensor_row(c, *row) for row in rows])
    for alias, to in m.aliases.items():
        say(f"  {alias} {dim('is')} {to}")
    if others:
        states = ", ".join(dict.fromkeys(t.state for t in others))
        count = many(len(others), "tensor")
        say(dim(f"  and {count} of optimizer state ({states}); --all shows all"))


def fold(
    tensors: Iterable[TensorEntry], lies: Callable[[TensorEntry], Any] = attrgetter("sharding")
) -> list[tuple[str, list[TensorEntry]]]:
    """Merge tensors that differ only in a layer's number into one row: `h.{0..31}.attn.weight`.

    `lies`: a further value that must be equal for all tensors of a row.
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


def _lies(c: Checkpoint, t: TensorEntry) -> str:
    """Return the sharding of a tensor; for a foreign tensor, its number of parts."""
    sharding = to_sharding(c.manifest.shardings[t.sharding])
    return str(sharding) if c.format == "holdfast" else in_parts(sharding)


def _tensor_row(c: Checkpoint, name: str, group: list[TensorEntry]) -> TableRow:
    t = group[0]
    times = f"{len(group):,} ×" if len(group) > 1 else ""
    total = size(sum(map(entry_bytes, group)))
    return (name, times, shape_text(t.shape), t.dtype, _lies(c, t), total)


def _totals(m: Manifest) -> list[TableRow]:
    found = totals(m)
    rows: list[TableRow] = [
        (state, dtype, a, b, size(num_bytes)) for (state, dtype), (a, b, num_bytes) in found.items()
    ]
    if len(found) > 1:
        a, b, num_bytes = (sum(column) for column in zip(*found.values()))
        rows.append((dim("all"), "", a, b, size(num_bytes)))
    return rows


def _few(rows: list[TableRow], show_all: bool, *more: str) -> list[TableRow]:
    """Return the rows; of more than ten, the first four, the number left out, and the last two."""
    if show_all or len(rows) <= 10:
        return rows
    return [*rows[:4], (and_more(len(rows) - 6, how=""), *more), *rows[-2:]]


def _show_extras(c: Checkpoint, show_all: bool) -> None:
    m = c.manifest
    width = None if show_all else 72
    if m.extras:
        heading("Extras")
        table(("key", "value"), [(k, value_text(v, width)) for k, v in c.extras.items()])
        if width is not None:
            say(dim(f"  `holdfast inspect URL {next(iter(c.extras))}` prints one"))
    if m.per_rank:
        heading("Extras of each rank")
        first = {k: decode(v, plain_tensor) for k, v in c.rank_extras(0).items()}
        rows = [
            (k, _RULE_WORDS[rule], value_text(first[k], width) if k in first else dim("none"))
            for k, rule in m.per_rank.items()
        ]
        table(("key", "on another mesh", "rank 0 has"), rows)


def value_text(value: Any, width: int | None) -> str:
    """Return a value on one line, with a width an optimizer by its groups, without its states."""
    if width is None:
        return full_value(value)
    if isinstance(value, dict) and value.keys() == {"param_groups", "state"}:
        try:
            groups = [
                {k: v for k, v in g.items() if k != "params"} | {"params": len(g["params"])}
                for g in value["param_groups"]
            ]
        except (AttributeError, KeyError, TypeError):  # no optimizer's
            return format_value(value, width)
        text = ", ".join(", ".join(f"{k} {v}" for k, v in _first(g)) for g in groups)
        return cut_short(f"{many(len(groups), 'group')}: {text}", width)
    return format_value(value, width)


def _first(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in group.items() if v is not None and v is not False]


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("inspect")
