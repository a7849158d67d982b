"""`holdfast ls URL`: the steps of a root, and whether each is complete."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from holdfast.base.errors import FormatError, HoldfastError
from holdfast.cli.options import RootArgument
from holdfast.cli.screen import Result, heading, say, table
from holdfast.cli.words import age, age_s, bad, dim, good, many, size
from holdfast.core.checkpoint.listing import Listing, Step, survey_root
from holdfast.core.checkpoint.names import Saved
from holdfast.core.checkpoint.notes import Notes, read_notes
from holdfast.core.layout import Mesh
from holdfast.core.store import Store, open_store
from holdfast.formats.read.detect import detect, near_path, open_as, steps_as
from holdfast.formats.read.foreign import file_key
from holdfast.tiers.records.log import leading

_COLUMNS = ("", ">step", ">size", "tier", "age", ">run", "mesh", ">tensors", ">files", "state")
FOREIGN_COLUMNS = (">step", ">size", "format", ">tensors", ">files", "state")


def run(url: RootArgument) -> Result:
    """List steps: size, age, and whether each is complete.  Exit 1 if any is not."""
    foreign = detect(url)
    if foreign is not None:
        steps = [_look(url, foreign, step) for step in steps_as(foreign, url)]
        found: dict[str, Any] = {"url": url, "format": foreign, "steps": steps}
    else:
        store = open_store(url)
        listing = survey_root(store)
        found = _found(listing, store.url) | _noted(store) | _recorded(store, listing)
        for row in found["steps"]:
            row["labels"] = found["labels"].get(row["step"], [])
            row["metrics"] |= found["metrics"].values(row["run"], row["step"])
        del found["labels"], found["metrics"]
    is_bad = not found["steps"] or any(row["problem"] for row in found["steps"])
    is_bad |= bool(found.get("notes_problem"))
    show = _show if foreign is None else _show_foreign
    return Result(lambda: found, lambda: show(found, url), int(is_bad))


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
    """Return the full step from which newer records lead on, if that is not the newest step."""
    sound, begins = [Saved(s.run, s.step) for s in listing.steps if s.problem is None], None
    with suppress(HoldfastError):  # `holdfast log` says what is wrong with records
        begins = leading(store, sound) if sound else None
    return {"went_back_to": begins if begins != listing.newest_good else None}


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
    if m is not None:
        row |= {
            "bytes": m.total_bytes,
            "created": m.created,
            "age_s": age_s(m.created),
            "mesh": dict(m.mesh),
            "num_tensors": len(m.tensors),
            "num_files": len(m.objects),
        }
    return row


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


def _show(found: dict[str, Any], url: str) -> None:
    steps, newest_good = found["steps"], found["newest_good"]
    if not steps and not found["unreferenced"]:
        hint = near_path(url)
        say(f"no steps in {found['url']}" + (f" ({hint})" if hint else ""))
        return
    say(found["url"], "bold")
    if steps:
        table(_COLUMNS, [_cells(row, found) for row in steps], indent=0)
    if found["notes_problem"]:
        say()
        say(
            f"{found['notes_problem']}: no step is deleted, and none is known to be pinned",
            "yellow",
        )
    if steps and steps[-1]["problem"]:
        say()
        if newest_good is None:
            say("No step is complete.", "red")
        else:
            text = f"The newest step is damaged: restore() goes back to step {newest_good}."
            say(text, "yellow")
    if found["went_back_to"] is not None:
        text = (
            f"The newest records lead on from step {found['went_back_to']}: a run went back to it."
        )
        say()
        say(f"{text}  `holdfast log` shows them.", "yellow")
    unproved = [str(row["step"]) for row in steps if row["run"] is None]
    if unproved and newest_good is not None:
        which = f"Step {unproved[0]}" if len(unproved) == 1 else f"One of {', '.join(unproved)}"
        told = f"but its manifest cannot be read: restore() takes step {newest_good}."
        say()
        say(f"{which} may be the newest, {told}", "yellow")
    if found["unreferenced"]:
        heading("Not referenced by any step (left by a crash, or a save under way)")
        rows = [
            (str(a["step"]), a["attempt"], many(a["files"], "file"), size(a["bytes"]))
            for a in found["unreferenced"]
        ]
        table((">step", "attempt", ">files", ">size"), rows)


def _cells(row: dict[str, Any], found: dict[str, Any]) -> tuple[str | int, ...]:
    newest, is_taken = found["steps"][-1], row["step"] == found["newest_good"]
    state = bad(row["problem"]) if row["problem"] else good("complete")
    if row is newest:
        state += dim("  newest")
    elif newest["problem"] and is_taken:
        state += dim("  newest good")
    state += "".join(f"  [{label}]" for label in row["labels"])
    values = ((k, "nan" if v is None else f"{v:.6g}") for k, v in row["metrics"].items())
    state += dim("".join(f"  {name} {text}" for name, text in values))
    mark, step = "→" if is_taken else "", str(row["step"])
    run = "?" if row["run"] is None else str(row["run"])
    if "bytes" not in row:
        return (mark, step, "?", row["tier"], "?", run, "?", "?", "?", state)
    mesh = str(Mesh(tuple(row["mesh"].items())))
    counts = (row["num_tensors"], row["num_files"])
    return (
        mark,
        step,
        size(row["bytes"]),
        row["tier"],
        age(row["created"]),
        run,
        mesh,
        *counts,
        state,
    )


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("ls")
