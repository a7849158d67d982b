"""The cluster has changed: from what DeepSpeed saved to a loaded engine on another number of ranks.

A checkpoint of 2 ranks is to continue on 1, at the same ZeRO stage (DeepSpeed's converter makes no files
for stage 3 out of stage 1).  DeepSpeed's way: `ds_to_universal`, then `load_checkpoint` with
`load_universal`.  Ours: `holdfast.load` straight from DeepSpeed's files into the live engine.  Both then do
the same first step; starting processes and building the engine is the same for both and left out.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import measuring, ratio, report, row, scratch, seconds, take_turns
from bench.lib.files import files_below, warm
from bench.lib.watching import watch
from bench.lib.zero_state import ENV, make, started

CLAIMS = (
    Claim(
        "From DeepSpeed's files to an engine on another number of ranks takes a twentieth of its own way.",
        r"^restart (.+?) \|.*ds_to_universal",
        at_least=20,
    ),
)
CLI = "from holdfast.cli.main import main; main()"


class Restart:
    """One stage to restart at."""

    def __init__(self, source: Path, root: Path, stage: int, width: int, layers: int) -> None:
        self.source, self.root = source, root
        self.to = (stage, width, layers)
        self.parts: dict[str, list[float]] = {"convert": [], "load": []}

    def peer(self, _: int) -> float:
        out, tag = self.root / "ds", (self.source / "latest").read_text()
        command = [
            sys.executable,
            "-m",
            "deepspeed.checkpoint.ds_to_universal",
            "--inject_missing_state",
        ]
        command += ["--num_extract_workers=2", "--num_merge_workers=2"]
        command += ["--input_folder", str(self.source / tag), "--output_folder", str(out / "u")]
        converted = watch(command, env=ENV).seconds
        (out / "latest_universal").write_text("u")
        loaded = started("load", out, *self.to)
        shutil.rmtree(out)
        self.parts["convert"].append(converted)
        self.parts["load"].append(loaded)
        return converted + loaded

    def ours(self, _: int) -> float:
        return started("holdfast", self.source, *self.to)

    def copy(self, _: int) -> float:
        """From a copy in holdfast's format, made once: what a materialised checkpoint would gain."""
        out = self.root / "copy"
        if not out.exists():
            command = [sys.executable, "-c", CLI, "convert", str(self.source), str(out)]
            self.parts["copy"] = [watch(command, env=ENV).seconds]
            warm(files_below(out))
        return started("holdfast", out, *self.to)


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for what, f in found.items():
        peer = f"ds_to_universal + load_universal {seconds(f['seconds'], 'ds')}"
        out.append(
            row(f"restart {what}", seconds(f["seconds"], "holdfast", f["bytes"]), peer,
                ratio(f["seconds"], "ds", "holdfast"))
        )  # fmt: skip
        copy = f"a converted copy {seconds(f['seconds'], 'copy')}, made in {f['parts']['copy'][0]:.1f} s"
        out.append(
            row(f"restart {what}, in place", seconds(f["seconds"], "holdfast"), copy,
                ratio(f["seconds"], "copy", "holdfast"))
        )  # fmt: skip
    return out


def main() -> None:
    p = measuring(__doc__, rounds=3)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--layers", type=int, default=12)
    args = p.parse_args()
    width, layers = (256, 4) if args.small else (args.width, args.layers)
    began, found = time.time(), {}
    with scratch(args) as root:
        for stage in (1, 3):
            source = make(root / "source", stage, width, layers)
            warm(files_below(source))
            restart = Restart(source, root, stage, width, layers)
            turns = take_turns(
                {"ds": restart.peer, "holdfast": restart.ours, "copy": restart.copy}, args.rounds
            )
            size = sum(f.stat().st_size for f in files_below(source) if "optim" in f.name)
            found[f"at ZeRO-{stage}, 2 ranks to 1"] = {
                "seconds": turns,
                "parts": restart.parts,
                "bytes": size,
            }
            shutil.rmtree(source)
            shutil.rmtree(root / "copy")
    report(CLAIMS, __doc__, args, found, rows(found), began)


if __name__ == "__main__":
    main()
