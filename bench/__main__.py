"""Measure what is claimed, one script of `bench/claims` after the other, and say which claims hold.

    python -m bench                                   all: five hours on a quiet machine with two cores
    python -m bench --only load,stall --root /disk    some; what is not known here goes to the scripts
    python -m bench --table                           measure nothing: what the records show

The table at the end has each claim's bound, its figures now (`bench/results`) and as last committed.  The
exit status is 1 if a script has failed, or if a claim no longer holds that held as last committed; with
`--small`, which shows no claim, only the former.  Each script runs by itself, too:
`python -m bench.claims.load --help`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from bench.lib.claims import NO_LONGER, RESULTS, TRIED, judged, scripts, table

ALONE = {
    "at_call": "needs another checkout: --before PATH",
    "before": "needs another checkout: --before PATH",
    "busy": "needs a machine on which nobody else works",
    "gpu": "needs a GPU: make gpu",
    "object": "needs s3torchconnector, tenacity and s3fs",
    "optimizer_matrix": "takes hours",
    "packing": "needs zstandard and lz4",
}
"""Scripts that run only if they are named by --only."""


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--only", help="names of scripts, by comma (default: all that need nothing more)"
    )
    p.add_argument("--table", action="store_true", help="measure nothing")
    p.add_argument("--small", action="store_true", help="try the scripts out, with small states")
    p.add_argument(
        "--out",
        type=Path,
        help="where the records are (default: bench/results; build/bench if --small)",
    )
    args, options = p.parse_known_args()
    args.out = args.out or (TRIED if args.small else RESULTS)
    options += ["--small"] * args.small
    chosen = args.only.split(",") if args.only else scripts()
    if unknown := set(chosen) - set(scripts()):
        p.error(f"--only: there is no {', '.join(sorted(unknown))}")
    failed = [] if args.table else [name for name in chosen if not _run(name, args, options)]
    lines = [line for name in chosen for line in judged(name, args.out)]
    print("\n" + table(lines))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    sys.exit(not args.small and any(line.verdict == NO_LONGER for line in lines))


def _run(name: str, args: argparse.Namespace, options: list[str]) -> bool:
    """Run a script; whether it has not failed."""
    if not args.only and name in ALONE:
        print(f"{name} is left out: {ALONE[name]}")
        return True
    print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
    command = [sys.executable, "-m", f"bench.claims.{name}", *options, f"--out={args.out}"]
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    main()
