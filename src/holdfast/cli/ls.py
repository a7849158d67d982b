"""`holdfast ls URL`: which steps there are, and which of them are complete."""

from __future__ import annotations

from typing import Any

import typer

from holdfast.checkpoint.listing import Listing, Step, survey
from holdfast.cli.screen import (
    AsJson,
    Root,
    age,
    age_s,
    bad,
    dim,
    good,
    heading,
    many,
    print_json,
    say,
    size,
    table,
)
from holdfast.errors import HoldfastError
from holdfast.interop.detect import detect, near_path, open_as, steps_as
from holdfast.interop.foreign import file_of
from holdfast.store import open_store


def run(url: Root, as_json: AsJson = False) -> None:
    """List steps: size, age, and whether each is complete.  Exit 1 if one is not."""
    foreign = detect(url)
    if foreign is not None:
        _run_foreign(url, foreign, as_json)
        return
    store = open_store(url)
    listing = survey(store)
    if as_json:
        print_json(_plain(listing, store.url))
    elif not listing.steps and not listing.attempts:
        hint = near_path(url)
        say(f"no steps in {store.url}" + (f" ({hint})" if hint else ""))
    else:
        _show(listing, store.url)
    if not listing.steps or any(s.problem for s in listing.steps):
        raise typer.Exit(1)


def _run_foreign(url: str, name: str, as_json: bool) -> None:
    """Steps of a foreign checkpoint; whether files are whole only `verify` tells."""
    found = [_look(url, name, step) for step in steps_as(name, url)]
    if as_json:
        print_json({"url": url, "format": name, "steps": found})
    else:
        say(f"{url}  {dim(f'{name} checkpoint')}", style="bold")
        rows = [
            (
                str(row["step"]),
                size(row["bytes"]) if row["bytes"] is not None else "?",
                name,
                f"{row['num_tensors']:,}" if row["num_tensors"] is not None else "?",
                f"{row['num_files']:,}" if row["num_files"] is not None else "?",
                bad(row["problem"]) if row["problem"] else good("can be opened"),
            )
            for row in found
        ]
        table((">step", ">size", "format", ">tensors", ">files", "state"), rows, indent=0)
    if not found or any(row["problem"] for row in found):
        raise typer.Exit(1)


def _look(url: str, name: str, step: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "bytes": None, "num_tensors": None, "num_files": None}
    try:
        m = open_as(name, url, step).manifest
    except HoldfastError as error:
        return row | {"problem": error.message}
    files = {file_of(f) for f in m.files}
    return row | {
        "bytes": m.total_bytes,
        "num_tensors": len(m.tensors),
        "num_files": len(files),
        "problem": None,
    }


def _show(listing: Listing, url: str) -> None:
    say(url, style="bold")
    if listing.steps:
        columns = (
            "",
            ">step",
            ">size",
            "tier",
            "age",
            ">run",
            "mesh",
            ">tensors",
            ">files",
            "state",
        )
        table(columns, [_row(s, listing) for s in listing.steps], indent=0)
    newest, found = (listing.steps[-1] if listing.steps else None), listing.newest_good
    unproved = [str(s.step) for s in listing.steps if s.run < 0]
    if newest is not None and newest.problem:
        say()
        if found is None:
            say("No step is complete.", style="red")
        else:
            say(f"The newest step is damaged: restore() goes back to step {found}.", style="yellow")
    if unproved and found is not None:
        which = f"Step {unproved[0]}" if len(unproved) == 1 else f"One of {', '.join(unproved)}"
        say()
        say(
            f"{which} may be the newest, which its manifest would say: restore() takes step {found}.",
            style="yellow",
        )
    if listing.attempts:
        heading("Not referenced by any step (left by a crash, or a save under way)")
        rows = [
            (str(a.step), a.name, many(a.num_files, "file"), size(a.bytes))
            for a in listing.attempts
        ]
        table((">step", "attempt", ">files", ">size"), rows)


def _row(step: Step, listing: Listing) -> tuple[str, ...]:
    m = step.manifest
    newest = step is listing.steps[-1]
    state = bad(step.problem) if step.problem else good("complete")
    if newest:
        state += dim("  newest")
    elif listing.steps[-1].problem and step.step == listing.newest_good:
        state += dim("  newest good")
    mark = "→" if step.step == listing.newest_good else ""
    if m is None:
        unknown = ("?", "durable", "?", str(step.run) if step.run >= 0 else "?", "?", "?", "?")
        return (mark, str(step.step), *unknown, state)
    return (
        mark,
        str(step.step),
        size(m.total_bytes),
        "durable",
        age(m.created),
        str(m.run),
        str(m.layout),
        f"{len(m.tensors):,}",
        f"{len(m.files):,}",
        state,
    )


def _plain(listing: Listing, url: str) -> dict[str, Any]:
    return {
        "url": url,
        "newest": listing.steps[-1].step if listing.steps else None,
        "newest_good": listing.newest_good,
        "steps": [_plain_step(s) for s in listing.steps],
        "unreferenced": [
            {"step": a.step, "attempt": a.name, "files": a.num_files, "bytes": a.bytes}
            for a in listing.attempts
        ],
    }


def _plain_step(step: Step) -> dict[str, Any]:
    m = step.manifest
    row: dict[str, Any] = {
        "step": step.step,
        "run": step.run if step.run >= 0 else None,
        "tier": "durable",
        "complete": step.problem is None,
        "problem": step.problem,
    }
    if m is not None:
        row |= {
            "bytes": m.total_bytes,
            "created": m.created,
            "age_s": age_s(m.created),
            "mesh": dict(m.mesh),
            "num_tensors": len(m.tensors),
            "num_files": len(m.files),
        }
    return row


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("ls")
