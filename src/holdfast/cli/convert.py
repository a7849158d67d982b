"""`holdfast convert SRC[@STEP] DST --to FORMAT`: any checkpoint as what another system loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from holdfast.cli.screen import AsJson, Target, good, many, print_json, say, size, split_target
from holdfast.converting import FORMATS, Converted, convert
from holdfast.errors import UsageError
from holdfast.sizes import parse_size

Destination = Annotated[
    str,
    typer.Argument(metavar="DST", help="Where to; new, or a root that gets one more step."),
]
To = Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="FORMAT", help="The source's, if not recognised: dcp, ..."),
]
Key = Annotated[
    str,
    typer.Option("--key", metavar="KEY", help="Whose weights huggingface, torch get."),
]
DType = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="Cast these weights: bfloat16, ..."),
]
MaxFile = Annotated[
    str, typer.Option("--max-file", metavar="SIZE", help="Largest size of one file.")
]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="For buffers, at most.")]
RulesFile = Annotated[
    str | None, typer.Option("--rules", metavar="FILE", help="Rules that rename the weights.")
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not read the result back.")]


def run(
    source: Target,
    target: Destination,
    to: To = "universal",
    from_: From = None,
    key: Key = "model",
    dtype: DType = None,
    rules: RulesFile = None,
    max_file: MaxFile = "5GB",
    memory: Memory = "2GiB",
    no_verify: NoVerify = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a checkpoint in another format.  Interrupted, the same command goes on where it was.

    universal: holdfast's own with whole tensors, also for Hugging Face's loaders.
    deepspeed: its universal format.  dcp: torch.distributed.checkpoint.
    huggingface, torch: weights alone, as safetensors or one file of torch.save.
    Under torchrun the ranks share the work.
    """
    url, step = split_target(source)
    url = f"{from_}:{url}" if from_ else url
    rename = _renaming(url, step, key, rules) if rules is not None else None
    with _shown() as told:
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
            verify=not no_verify,
            progress=told,
        )
    if _is_first():
        print_json(asdict(made)) if as_json else _show(made, not no_verify)


def _is_first() -> bool:
    """True if this is the only process, or rank 0 of a torchrun: the others keep quiet."""
    return os.environ.get("RANK", "0") == "0"


def _renaming(url: str, step: int | None, key: str, file: str) -> Callable[[str], str]:
    """New names of a checkpoint's weights.  RuleError if names and renames do not fit each other."""
    from holdfast.looking import open as open_checkpoint
    from holdfast.rules import RuleSet
    from holdfast.writers.planned import Options, weights

    rules = RuleSet.load(file)
    if not rules.renames:
        raise UsageError(
            f"--rules {file}: no rename in it", hint="rename h.{n}.{x:**} -> layers.{n}.{x}"
        )
    with open_checkpoint(url, step=step) as source:
        found = weights(source, Options(key=key))
    new = rules.renamed([name for w in found for name in (w.name, *w.also)])
    return lambda name: new.get(name, name)


def _show(made: Converted, verified: bool) -> None:
    speed = made.bytes / max(made.seconds, 1e-9)
    say(f"{good('converted')}  step {made.step} to {made.to}: {made.path}")
    say(
        f"  {many(made.num_files, 'file')}, {size(made.bytes)} in {made.seconds:.1f} s, {size(speed)}/s"
        + (
            f"; {many(made.num_resumed, 'file')} of them from an earlier try"
            * bool(made.num_resumed)
        )
    )
    say("  every byte read back" if verified else "  not read back (--no-verify)")
    if made.left_out:
        say(f"  left out, for want of a place: {', '.join(made.left_out)}", style="yellow")


@contextmanager
def _shown() -> Iterator[Callable[[str, int, int], object] | None]:
    """A bar per phase on stderr, if it is a terminal."""
    if not (sys.stderr.isatty() and _is_first()):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def told(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.advance(tasks[phase], done)

        yield told


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("convert")
