"""`holdfast replay URL DST --to STEP`: make a full step of a recorded one."""

from __future__ import annotations

from holdfast.base.errors import Exists
from holdfast.cli.options import own_root
from holdfast.cli.screen import Result, say
from holdfast.cli.words import many
from holdfast.core.checkpoint.names import committed
from holdfast.core.store import open_store
from holdfast.live.roots import require_native_root
from holdfast.session.save_and_load import save
from holdfast.tiers.records.offline import replay_to


def run(url: str, into: str, to: int) -> Result:
    """See `holdfast.cli.verbs`."""
    store = own_root(url, "has no records")
    require_native_root(into)
    target = open_store(into)
    if any(s.step == to for s in committed(target)):
        raise Exists(f"step {to} is in {target.url} already", hint="give another root")
    state, base, lost = replay_to(store, to)
    save(into, state, step=to)

    def show() -> None:
        replayed = f"{many(to - base, 'step')} replayed from step {base}"
        say(f"step {to}: {replayed}, saved in {target.url}")
        if lost:
            say(f"left out, since each rank had its own: {', '.join(lost)}")

    return Result(lambda: {"url": target.url, "step": to, "base": base, "left_out": lost}, show)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("replay")
