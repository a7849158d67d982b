"""`holdfast ls URL`: the steps of a root, and whether each is complete."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from holdfast.base.errors import FormatError, HoldfastError, UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.base.text import listed
from holdfast.cli.options import wrapped
from holdfast.cli.screen import Result, heading, say, say_lines, table
from holdfast.cli.words import age, age_s, bad, dim, good, many, size
from holdfast.core.checkpoint.claiming import newest_claim
from holdfast.core.checkpoint.listing import Listing, Step, survey_root
from holdfast.core.checkpoint.lone import root_at
from holdfast.core.checkpoint.names import Saved
from holdfast.core.checkpoint.notes import Notes, read_notes
from holdfast.core.format.manifest import Manifest, decode_manifest
from holdfast.core.layout import Mesh
from holdfast.core.store import Store
from holdfast.formats.read.below import below
from holdfast.formats.read.detect import detect, near_path, open_as, steps_as
from holdfast.formats.read.folder import file_key
from holdfast.tiers.records.log import leading

FOREIGN_COLUMNS = (">step", ">size", "format", ">tensors", ">files", "state")
_COUNTS = {"tensors": "num_tensors", "files": "num_files"}
"""Columns that `--columns` adds besides metrics, by the key of their value."""
_LOOK_S = 2.0
"""Seconds that an agent has to answer."""


def run(url: str, columns: str | None) -> Result:
    """See `holdfast.cli.verbs`."""
    asked = [] if columns is None else [name.strip() for name in columns.split(",")]
    foreign = detect(url)
    if foreign is not None:
        steps = [_look(url, foreign, step) for step in steps_as(foreign, url)]
        found: dict[str, Any] = {"url": url, "format": foreign, "steps": steps}
        _check_columns(asked, [])
        is_bad = not steps or any(row["problem"] for row in steps)
        return Result(lambda: found, lambda: _show_foreign(found, url), int(is_bad))
    store = root_at(url)
    listing = survey_root(store)
    found = _found(listing, store.url) | _noted(store) | _recorded(store, listing)
    for row in found["steps"]:
        row["labels"] = found["labels"].get(row["step"], [])
        row["metrics"] |= found["metrics"].values(row["run"], row["step"])
    del found["labels"], found["metrics"]
    if not found["steps"]:
        found["below"] = [asdict(one) for one in below(url)]
    found |= _in_memory(store.url)
    metrics = [*dict.fromkeys(name for row in found["steps"] for name in row["metrics"])]
    shown = _shown_metrics(found["best_by"], metrics)
    _check_columns(asked, metrics)
    shown += [name for name in asked if name not in shown]
    is_bad = not found["steps"] or any(row["problem"] for row in found["steps"])
    is_bad |= bool(found["notes_problem"])
    return Result(lambda: found, lambda: _show(found, url, shown, metrics), int(is_bad))


def _shown_metrics(best_by: str | None, metrics: Sequence[str]) -> list[str]:
    """Return the metrics that are shown without being asked for."""
    if best_by is not None and best_by in metrics:
        return [best_by]
    return [*metrics] if len(metrics) == 1 else []


def _check_columns(asked: Sequence[str], metrics: Sequence[str]) -> None:
    """UsageError for a column that there is not."""
    for name in asked:
        known = [*metrics, *_COUNTS]
        if name not in known:
            hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
            raise UsageError(f"--columns: no step has {name!r}", hint=hint)


def _noted(store: Store) -> dict[str, Any]:
    try:
        notes, problem = read_notes(store), None
    except FormatError as error:
        notes, problem = Notes(), error.message
    return {"labels": notes.pinned, "metrics": notes, "notes_problem": problem}


def _found(listing: Listing, url: str) -> dict[str, Any]:
    return {
        "url": url,
        "newest": listing.steps[-1].step if listing.steps else None,
        "newest_good": listing.newest_good,
        "steps": [_step(s) for s in listing.steps],
        "unreferenced": [
            {"step": a.step, "attempt": a.name, "files": a.num_files, "bytes": a.bytes}
            for a in listing.attempts
        ],
    }


def _recorded(store: Store, listing: Listing) -> dict[str, Any]:
    """Return the full step from which newer records lead on, if that is not the newest step, and the metric
    by which the last run keeps its best steps."""
    sound, begins = [Saved(s.run, s.step) for s in listing.steps if s.problem is None], None
    with suppress(HoldfastError):  # `holdfast log` says what is wrong with records
        begins = leading(store, sound) if sound else None
    claim = newest_claim(store)
    best = None if claim is None else claim.best
    return {
        "went_back_to": begins if begins != listing.newest_good else None,
        "best_by": None if best is None else best[0],
    }


def _step(step: Step) -> dict[str, Any]:
    m = step.manifest
    row: dict[str, Any] = {
        "step": step.step,
        "run": step.run if step.run >= 0 else None,
        "tier": "durable",
        "complete": step.problem is None,
        "problem": step.problem,
        "metrics": {} if m is None else dict(m.metrics),
    }
    return row if m is None else row | _facts(m)


def _facts(m: Manifest) -> dict[str, Any]:
    return {
        "bytes": m.total_bytes,
        "created": m.created,
        "age_s": age_s(m.created),
        "mesh": dict(m.mesh),
        "num_tensors": len(m.tensors),
        "num_files": len(m.objects),
    }


def _look(url: str, name: str, step: int) -> dict[str, Any]:
    """Return a step of a foreign checkpoint; only `verify` checks that its files are whole."""
    row: dict[str, Any] = {"step": step, "bytes": None, "num_tensors": None, "num_files": None}
    try:
        m = open_as(name, url, step).manifest
    except HoldfastError as error:
        return row | {"problem": error.message}
    num_files = len({file_key(f) for f in m.files})
    known = {"bytes": m.total_bytes, "num_tensors": len(m.tensors), "num_files": num_files}
    return row | known | {"problem": None}


# -- snapshots ------------------------------------------------------------------------------------


def _in_memory(url: str) -> dict[str, Any]:
    """Return the snapshots of a root that the agent of this node holds, if one runs, and why they are not
    known.  Starts none."""
    from holdfast.tiers.memory.node.home import SOCKET, home

    rows: list[dict[str, Any]] = []
    if not (home() / SOCKET).exists():
        return {"snapshots": rows, "snapshots_problem": None}
    from holdfast.tiers.memory.node import messages as w
    from holdfast.tiers.memory.node.client import Client

    client, problem = Client(deadline_s=_LOOK_S), None
    try:
        jobs = client.ask(w.Status(), w.AgentReport).jobs
        for job in (one.job for one in jobs if one.root == url):
            held: w.Held = client.ask(w.Ask(job), w.Held)
            manifests = [decode_manifest(data, f"snapshot of {job}") for data in held.manifests]
            rows += [{"step": m.step, "run": m.run, "job": job, **_facts(m)} for m in manifests]
    except HoldfastError as error:
        is_there = client.look() != "nobody"  # a dead agent leaves its socket
        problem = error.message if is_there else None
    rows.sort(key=lambda row: (row["run"], row["step"]))
    return {"snapshots": rows, "snapshots_problem": problem}


# -- for people -----------------------------------------------------------------------------------


def _show_foreign(found: dict[str, Any], url: str) -> None:
    name = found["format"]
    say(f"{url}  {dim(f'{name} checkpoint')}", "bold")
    rows = []
    for row in found["steps"]:
        state = bad(row["problem"]) if row["problem"] else good("can be opened")
        counts = ("?", name, "?", "?")
        if row["bytes"] is not None:
            counts = (size(row["bytes"]), name, row["num_tensors"], row["num_files"])
        rows.append((str(row["step"]), *counts, state))
    table(FOREIGN_COLUMNS, rows, indent=0)
    _show_total(found["steps"])


def _show(found: dict[str, Any], url: str, shown: list[str], metrics: list[str]) -> None:
    steps = found["steps"]
    if not (steps or found["unreferenced"] or found["snapshots"]):
        _show_nothing(found, url)
        return
    say(found["url"], "bold")
    if steps:
        columns = (
            "",
            ">step",
            ">size",
            "age",
            ">run",
            "mesh",
            *(f">{name}" for name in shown),
            "state",
        )
        table(columns, [_cells(row, found, shown) for row in steps], indent=0)
        _show_total(steps)
    others = [name for name in metrics if name not in shown]
    if others:
        text = f"metrics: {listed(others, 8)} (--columns NAME,... shows them)"
        say_lines(wrapped(text, "", "  "), "dim")
    _show_remarks(found)
    if found["unreferenced"]:
        heading("Not referenced by any step (left by a crash, or a save under way)")
        rows = [
            (str(a["step"]), a["attempt"], many(a["files"], "file"), size(a["bytes"]))
            for a in found["unreferenced"]
        ]
        table((">step", "attempt", ">files", ">size"), rows)
    if found["snapshots"]:
        heading("In memory, held by the agent of this node")
        facts = [(str(s["step"]), *_known(s)) for s in found["snapshots"]]
        table((">step", ">size", "age", ">run", "mesh"), facts)
    if found["snapshots_problem"]:
        say(f"snapshots in memory are not known: {found['snapshots_problem']}", "yellow")


def _show_nothing(found: dict[str, Any], url: str) -> None:
    """Say that there are no steps, and what lies below."""
    there = found["below"]
    hint = None if there else near_path(url)
    say(f"no steps in {found['url']}" + (f" ({hint})" if hint else ""))
    if there:
        heading("Below it")
        rows = [
            (one["path"], one["format"], len(one["steps"]), str(max(one["steps"], default="?")))
            for one in there
        ]
        table(("path", "format", ">steps", ">highest"), rows)


def _show_total(steps: list[dict[str, Any]]) -> None:
    total = sum(row.get("bytes") or 0 for row in steps)
    say(dim(f"{many(len(steps), 'step')}, {size(total)}"))


def _show_remarks(found: dict[str, Any]) -> None:
    """Say which step a restart takes where that is not the newest one, and why."""
    steps, newest_good = found["steps"], found["newest_good"]
    remarks = []
    if found["notes_problem"]:
        text = f"{found['notes_problem']}: no step is deleted, and none is known to be pinned"
        remarks.append(text)
    if steps and steps[-1]["problem"]:
        text = f"The newest step is damaged: restore() goes back to step {newest_good}."
        remarks.append("No step is complete." if newest_good is None else text)
    if found["went_back_to"] is not None:
        step = found["went_back_to"]
        text = f"The newest records lead on from step {step}: a run went back to it."
        remarks.append(f"{text}  `holdfast log` shows them.")
    unproved = [str(row["step"]) for row in steps if row["run"] is None]
    if unproved and newest_good is not None:
        which = f"Step {unproved[0]}" if len(unproved) == 1 else f"One of {', '.join(unproved)}"
        told = f"but its manifest cannot be read: restore() takes step {newest_good}."
        remarks.append(f"{which} may be the newest, {told}")
    for text in remarks:
        say()
        say(text, "yellow")


def _cells(row: dict[str, Any], found: dict[str, Any], shown: list[str]) -> tuple[str | int, ...]:
    newest, is_taken = found["steps"][-1], row["step"] == found["newest_good"]
    state = bad(row["problem"]) if row["problem"] else good("complete")
    if row is newest:
        state += dim("  newest")
    elif newest["problem"] and is_taken:
        state += dim("  newest good")
    state += "".join(f"  [{label}]" for label in row["labels"])
    values = [
        row.get(_COUNTS[name], "?") if name in _COUNTS else _value(row, name) for name in shown
    ]
    return ("→" if is_taken else "", str(row["step"]), *_known(row), *values, state)


def _known(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return size, age, run and mesh of a step."""
    run = "?" if row["run"] is None else str(row["run"])
    if "bytes" not in row:
        return "?", "?", run, "?"
    return size(row["bytes"]), age(row["created"]), run, str(Mesh(tuple(row["mesh"].items())))


def _value(row: dict[str, Any], metric: str) -> str:
    value = row["metrics"].get(metric, "")
    return "nan" if value is None else value if value == "" else f"{value:.6g}"


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("ls")
