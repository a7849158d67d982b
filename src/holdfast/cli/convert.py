"""`holdfast convert SRC[@STEP] DST --to FORMAT`: write any checkpoint in the format of another system."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from holdfast.base.errors import UsageError
from holdfast.base.sizes import parse_size
from holdfast.cli.options import Argument, Option, TargetArgument, split_target
from holdfast.cli.screen import Result, phases, say
from holdfast.cli.words import good, many, size

if TYPE_CHECKING:
    from holdfast.formats.converting import Converted

EXAMPLES = (
    "holdfast convert runs/gpt@1000 out/weights --to huggingface --dtype bfloat16",
    "holdfast convert runs/gpt weights.safetensors --to safetensors",
    "holdfast convert deepspeed:runs/old runs/new",
)
FORMATS = "universal, deepspeed, dcp, huggingface, safetensors, torch"
"""`TARGET_FORMATS` of `formats.converting`, which the help does not import."""


def run(
    source: TargetArgument,
    target: Annotated[str, Argument("DST", "A new folder, or a root that gets one more step.")],
    to: Annotated[str, Option(f"One of {FORMATS}.", "FORMAT")] = "universal",
    from_: Annotated[
        str | None, Option("Format of the source, if not recognised: dcp, ...", "FORMAT", "--from")
    ] = None,
    key: Annotated[str, Option("Of weights alone: the model's key.", "KEY")] = "model",
    dtype: Annotated[str | None, Option("Cast these weights: bfloat16, ...", "DTYPE")] = None,
    rules: Annotated[str | None, Option("Rules that rename the weights.", "FILE")] = None,
    max_file: Annotated[str, Option("Largest size of one file.", "SIZE")] = "5GB",
    memory: Annotated[str, Option("Most memory for buffers.", "SIZE")] = "2GiB",
    no_verify: Annotated[bool, Option("No CRC-32 of the source, no reading back.")] = False,
) -> Result:
    """Rewrite a checkpoint in another format.  After an interruption, run the same command again: it goes
    on where it was, or in a bucket with the files that are not written yet.

    universal: holdfast's own format with whole tensors, which Hugging Face's loaders read too.
    deepspeed: DeepSpeed's universal format.  dcp: torch.distributed.checkpoint.
    huggingface: weights alone, as safetensors in the folder DST; safetensors, torch: weights alone, in the
    one file DST.  Under torchrun the ranks share the work.
    """
    from holdfast.formats.converting import convert

    url, step = split_target(source)
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
            verify=not no_verify,
            progress=told,
        )
    return Result(lambda: asdict(made), lambda: _show(made, not no_verify), is_quiet=not is_first)


def _renaming(url: str, step: int | None, key: str, file: str) -> Callable[[str], str]:
    """Return the function that renames a checkpoint's weights.  RuleError if names and renames do not
    fit."""
    from holdfast.formats.looking import open as open_checkpoint
    from holdfast.formats.rules import RuleSet
    from holdfast.formats.write.file_plans import WriteOptions, weights

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
