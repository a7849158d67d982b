"""`holdfast convert SRC[@STEP] DST --to FORMAT`: write any checkpoint in the format of another system."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict

from holdfast.base.errors import UsageError
from holdfast.base.sizes import parse_size
from holdfast.cli.screen import Result, phases, say
from holdfast.cli.words import good, many, size
from holdfast.formats.converting import Converted, convert
from holdfast.formats.looking import open as open_checkpoint
from holdfast.formats.read.addresses import located
from holdfast.formats.rules import RuleSet
from holdfast.formats.write.file_plans import WriteOptions, weights


def run(
    source: str,
    target: str,
    *,
    to: str,
    from_: str | None,
    key: str,
    dtype: str | None,
    rules: str | None,
    max_file: str,
    memory: str,
    is_verified: bool,
) -> Result:
    """See `holdfast.cli.verbs`."""
    url, step = located(source)
    url = f"{from_}:{url}" if from_ else url
    rename = _renaming(url, step, key, rules) if rules is not None else None
    is_first = os.environ.get("RANK", "0") == "0"  # under torchrun the other ranks print nothing
    with phases(is_quiet=not is_first) as told:
        made = convert(
            url,
            target,
            to=to,
            step=step,
            key=key,
            dtype=dtype,
            rename=rename,
            max_file_bytes=parse_size("--max-file", max_file),
            memory_bytes=parse_size("--memory", memory),
            verify=is_verified,
            progress=told,
        )
    return Result(lambda: asdict(made), lambda: _show(made, is_verified), is_quiet=not is_first)


def _renaming(url: str, step: int | None, key: str, file: str) -> Callable[[str], str]:
    """Return the function that renames a checkpoint's weights.  RuleError if names and renames do not
    fit."""
    rules = RuleSet.load(file)
    if not rules.renames:
        raise UsageError(
            f"--rules {file}: no rename in it", hint="rename h.{n}.{x:**} -> layers.{n}.{x}"
        )
    with open_checkpoint(url, step=step) as source:
        found = weights(source, WriteOptions(key=key))
    new = rules.renamed([name for w in found for name in (w.name, *w.also)])

    def renamed(name: str) -> str:
        if name not in new:  # a name of a newer step
            raise UsageError(f"{url} got a new step meanwhile", hint="name the step: URL@STEP")
        return new[name]

    return renamed


def _show(made: Converted, verified: bool) -> None:
    speed = made.bytes / max(made.seconds, 1e-9)
    resumed = f"; {many(made.num_resumed, 'file')} of them from an earlier try"
    work = f"{many(made.num_files, 'file')}, {size(made.bytes)} in {made.seconds:.1f} s, {size(speed)}/s"
    say(f"{good('converted')}  step {made.step} to {made.to}: {made.path}")
    say(f"  {work}{resumed if made.num_resumed else ''}")
    say("  every byte read back" if verified else "  not read back (--no-verify)")
    if made.left_out:
        say(
            f"  left out, since {made.to} has no place for them: {', '.join(made.left_out)}",
            "yellow",
        )


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("convert")
