"""`holdfast pin URL STEP LABEL`: keep a step from being deleted."""

from __future__ import annotations

from holdfast.base.arguments import named_step_of
from holdfast.base.errors import NotFound, UsageError
from holdfast.cli.options import own_root
from holdfast.cli.screen import Result, say
from holdfast.core.checkpoint import notes
from holdfast.core.checkpoint.naming import step_named
from holdfast.core.store import Store
from holdfast.formats.read.addresses import split_address


def run(url: str, words: list[str], remove: bool) -> Result:
    """See `holdfast.cli.verbs`."""
    root, named = (url, None) if remove else split_address(url)
    given = [*([] if named is None else [named]), *words]
    if len(given) != (1 if remove else 2):
        takes = "--remove LABEL" if remove else "STEP LABEL, or URL@STEP LABEL"
        raise UsageError(f"holdfast pin takes URL {takes}, not {len(words)} words after {url}")
    label = notes.label_of(given[-1], "pin")
    store = own_root(root, "holdfast only reads")
    step = None if remove else _number(store, given[0])
    if step is not None:
        notes.pin(store, step, label, second_look_s=notes.SECOND_LOOK_S)
        text = f"step {step} of {store.url} is pinned as {label!r}"
    elif notes.unpin(store, label):
        text = f"{label!r} no longer pins a step of {store.url}"
    else:
        there = ", ".join(map(repr, sorted(notes.read_notes(store).live_labels))) or "none"
        raise NotFound(f"no label {label!r} in {store.url}", hint=f"labels there: {there}")
    return Result(lambda: {"url": store.url, "step": step, "label": label}, lambda: say(text))


def _number(store: Store, word: int | str) -> int:
    """The number of the step that is typed: as such, as a label, `best` or `newest`."""
    is_number = isinstance(word, str) and word.isascii() and word.isdigit() and len(word) <= 40
    step = named_step_of(int(word) if is_number else word, "pin")
    return step_named(store, step) if isinstance(step, str) else step


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("pin")
