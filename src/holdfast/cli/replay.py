"""`holdfast replay URL DST --to STEP`: any recorded step as a full one."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.screen import AsJson, Root, many, print_json, root_of_records, say
from holdfast.errors import Exists
from holdfast.store import open_store

Into = Annotated[str, typer.Argument(metavar="DST", help="Root of the full step; made if need be.")]
To = Annotated[int, typer.Option("--to", metavar="STEP", help="The recorded step.")]


def run(url: Root, into: Into, to: To, as_json: AsJson = False) -> None:
    """Do the steps from the nearest full one to STEP again, by the recorded gradients, and save the result.

    On the CPU, with the whole state in memory.  Optimizers of torch only.
    """
    from holdfast.checkpoint.names import committed
    from holdfast.delta.offline import replay_to
    from holdfast.once import save
    from holdfast.roots import check_own

    store = root_of_records(url)
    check_own(into)
    target = open_store(into)
    if any(s.step == to for s in committed(target)):
        raise Exists(f"step {to} is in {target.url} already", hint="give another root")
    state, base, lost = replay_to(store, to)
    save(into, state, step=to)
    if as_json:
        print_json({"url": target.url, "step": to, "base": base, "left_out": lost})
        return
    say(f"step {to}: {many(to - base, 'step')} replayed from step {base}, saved in {target.url}")
    if lost:
        say(f"left out, as each rank had its own: {', '.join(lost)}")


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("replay")
