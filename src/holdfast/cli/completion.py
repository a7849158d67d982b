"""`holdfast completion SHELL`: the scripts that complete words in shells, and the words that they ask for.

A script knows nothing of verbs: it hands over the line up to the cursor, and gets the words that can stand
at its end, so it need not change when holdfast does.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence

from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.cli.main import LAUNCH, parser_of
from holdfast.cli.screen import Result, say_lines
from holdfast.cli.verbs import ACTIONS, FORMATS, VERBS

SCRIPTS = {
    "bash": r"""
_holdfast() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##*[[:space:]]}"
    local before="${word%"${word##*[=:]}"}"  # bash replaces what is behind these alone,
    [[ $COMP_WORDBREAKS == *@* && $word == *@* ]] && before="${word%@*}"  # and from an @ on
    COMPREPLY=($(holdfast completion words -- "$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
complete -o default -F _holdfast holdfast
""",
    "zsh": r"""
_holdfast() {
    local -a found
    found=(${(f)"$(holdfast completion words -- "$LBUFFER" 2>/dev/null)"})
    (( $#found )) && compadd -- $found || _files
}
compdef _holdfast holdfast
""",
    "fish": r"""
complete -c holdfast -a '(holdfast completion words -- (commandline -cp) 2>/dev/null)'
""",
}
_PLAIN = re.compile(r"[\w.+-]+")
"""Labels that need no quotes in a shell; others are not offered."""
_OF_RUN = (
    "--nproc-per-node",
    "--nnodes",
    "--spares",
    "--nproc-min",
    "--preload",
    "--hang-s",
    "--help",
)


def run(what: str, line: str | None) -> Result:
    """See `holdfast.cli.verbs`."""
    if what == "words":
        found = words_for(line or "")
        return Result(lambda: found, lambda: say_lines("\n".join(found)) if found else None)
    if what not in SCRIPTS:
        hint = did_you_mean(what, SCRIPTS) or f"there are {', '.join(SCRIPTS)}"
        raise UsageError(f"there is no script for {what!r}", hint=hint)
    script = SCRIPTS[what].strip()
    return Result(lambda: {"script": script}, lambda: say_lines(script))


def words_for(line: str) -> list[str]:
    """Return the words that can stand at the end of a line, instead of its last word; none where the shell
    should complete the names of files."""
    _, *words = re.split(r"\s+", line.lstrip()) or [""]
    if not words:
        return []
    *before, last = words
    return sorted({word for word in _possible(before, last) if word.startswith(last)})


def _possible(before: Sequence[str], last: str) -> Sequence[str]:
    if not before or before == ["help"]:
        return (*VERBS, LAUNCH, "help", "--help", "--version")
    verb = before[0]
    if verb == LAUNCH:
        return _OF_RUN if last.startswith("-") else ()
    if verb not in VERBS:
        return ()
    if last.startswith("-"):
        return parser_of(verb).names
    if verb == "convert" and before[-1] == "--to":
        return FORMATS.split(", ")
    if len(before) == 1 and verb in ("agent", "completion"):
        return ACTIONS if verb == "agent" else [*SCRIPTS]
    url, at, _ = last.rpartition("@")
    if at:
        return [f"{url}@{name}" for name in _names_in(url)]
    placed = [word for word in before[1:] if not word.startswith("-")]
    return _names_in(placed[0]) if verb == "pin" and len(placed) == 1 else ()


def _names_in(url: str) -> list[str]:
    """Return the steps and labels of a local root; none of a bucket, as each is a request."""
    from holdfast.core.checkpoint.lone import root_at
    from holdfast.core.checkpoint.notes import read_notes
    from holdfast.formats.looking import steps
    from holdfast.formats.read.detect import detect

    if "://" in url:
        return []
    url = os.path.expanduser(url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the verb itself warns
        try:
            found = [*map(str, steps(url))]
            labels = [] if detect(url) else [*read_notes(root_at(url)).live_labels]
        except HoldfastError:
            return []
    return found + [label for label in labels if _PLAIN.fullmatch(label)]


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("completion")
