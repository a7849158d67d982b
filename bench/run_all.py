"""Run every benchmark, one after the other, and print one Markdown table of all results.

Four to five hours on a quiet machine with 2 cores.  Each script runs by itself too (`--help`).
`--table` only prints the table from the JSON files of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from common import HERE, RESULTS, table

SCRIPTS = (
    "plan_scale", "many", "save_durable", "stall", "busy", "interference", "load", "load_resharded",
    "memory", "convert", "restart", "export", "erasure", "snapshot", "replica", "restart_memory", "failure",
    "recover", "goodput", "delta", "trained", "dcp", "trainers",
)  # fmt: skip


def markdown(out: Path) -> str:
    """The README's table: every row of every result, and what it was measured on."""
    found = [json.loads(p.read_text()) for name in SCRIPTS if (p := out / f"{name}.json").exists()]
    if not found:
        return f"no results in {out}"
    lines = [table([r for f in found for r in f["rows"]]), ""]
    small = (
        " Tried out with `--small`: no result."
        if any(f["arguments"]["small"] for f in found)
        else ""
    )
    m, rounds = found[0]["machine"], [f["arguments"]["rounds"] for f in found]
    lines.append(
        f"{m['cores']} cores ({m['cpu']}), {m['memory_gib']} GiB, {m['disk'].split()[-1]}, "
        f"PyTorch {m['torch']}, holdfast {m['holdfast']}, {found[0]['started'][:10]}. Medians of "
        f"{min(rounds)} to {max(rounds)} rounds; "
        f"a ratio is the median of the rounds' ratios.{small}"
    )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", help="names of scripts, by comma (default: all)")
    p.add_argument("--rounds", help="instead of each script's own number")
    p.add_argument(
        "--small", action="store_true", help="a tenth of the state, to try the scripts out"
    )
    p.add_argument(
        "--root", help="a directory on the disk to be measured (default: beside the repository)"
    )
    p.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    p.add_argument("--table", action="store_true", help="print the table of earlier results")
    args = p.parse_args()
    failed = [] if args.table else [name for name in _chosen(args.only) if not _run(name, args)]
    print("\n" + markdown(args.out))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _chosen(only: str | None) -> list[str]:
    return [s for s in SCRIPTS if only is None or s in only.split(",")]


def _run(name: str, args: argparse.Namespace) -> bool:
    options = [f"--{k}={v}" for k in ("rounds", "root", "out") if (v := getattr(args, k))]
    options += ["--small"] if args.small else []
    print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
    return (
        subprocess.run([sys.executable, str(HERE / f"{name}.py"), *options], check=False).returncode
        == 0
    )


if __name__ == "__main__":
    main()
