"""`holdfast pin URL STEP LABEL`: keep a step, whatever tidies up."""

from __future__ import annotations

from typing import Annotated

from holdfast.base.arguments import step_of
from holdfast.base.errors import NotFound, UsageError
from holdfast.cli.options import Argument, Option, Root, own_root
from holdfast.cli.screen import Result, say
from holdfast.core.checkpoint import notes

STEP_AND_LABEL = "The step, and a label for it; with --remove the label alone."


def run(
    url: Root,
    words: Annotated[list[str], Argument("STEP LABEL", STEP_AND_LABEL)],
    remove: Annotated[bool, Option("Take the label away.")] = False,
) -> Result:
    """Let a label name a step. A step that a label names is deleted by no training and no `prune`.

    A label names one step: it is moved from the step that it named before. `holdfast ls` shows labels.
    """
    if len(words) != (1 if remove else 2):
        takes = "--remove LABEL" if remove else "STEP LABEL"
        raise UsageError(f"holdfast pin takes URL {takes}, and not {len(words)} words after URL")
    label = notes.label_of(words[-1], "pin")
    store = own_root(url, "holdfast only reads")
    step = None if remove else step_of(_number(words[0]), "pin")
    if step is not None:
        notes.pin(store, step, label, second_look_s=notes.SECOND_LOOK_S)
        text = f"step {step} of {store.url} is pinned as {label!r}"
    elif notes.unpin(store, label):
        text = f"{label!r} pins no step of {store.url} any more"
    else:
        there = ", ".join(map(repr, sorted(notes.read_notes(store).live_labels))) or "none"
        raise NotFound(f"no label {label!r} in {store.url}", hint=f"labels there: {there}")
    return Result(lambda: {"url": store.url, "step": step, "label": label}, lambda: say(text))


def _number(word: str) -> object:
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 40 else word


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("pin")
