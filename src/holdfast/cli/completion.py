"""`holdfast completion SHELL`: the script that completes words of `holdfast` in a shell."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Argument
from holdfast.cli.screen import Result

EXAMPLES = (
    'eval "$(holdfast completion bash)"                             # in ~/.bashrc',
    'eval "$(holdfast completion zsh)"               # in ~/.zshrc, after compinit',
    "holdfast completion fish > ~/.config/fish/completions/holdfast.fish",
)
WHAT = "bash, zsh or fish: print its script. words: complete LINE, which the scripts call."


def run(
    what: Annotated[str, Argument("SHELL", WHAT)],
    line: Annotated[str | None, Argument("[LINE]", "For words: the line so far.")] = None,
) -> Result:
    """Print the script that completes verbs, options, and the steps and labels of a local root in a shell.

    In runs/gpt@ it completes steps and labels; elsewhere the shell completes the names of files.
    """
    from holdfast.cli.work import completion

    return completion.run(what, line)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("completion")
