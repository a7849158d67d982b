"""Write docs/strangers.md: which objects of others come back bit for bit, and which are refused.

cd tests && python -m system.strangers.table
"""

import importlib.metadata
import json
import os
from contextlib import nullcontext
from pathlib import Path

import zygote
from kernels import compiled
from live.optimizers.table import section
from system.strangers.trial import EQUAL, MARK, REFUSED

PAGE = Path(__file__).parents[3] / "docs/strangers.md"
PACKAGES = [
    "torch",
    "torchao",
    "bitsandbytes",
    "transformers",
    "peft",
    "torchtitan",
    "accelerate",
    "lightning",
    "pytorch-optimizer",
    "DeepSpeed",
]
HEAD = """# Strangers

Modules, optimizers, wrappers and tensors of torch and of nine packages that others wrote, tried with
holdfast. Each was built twice with other seeds. The first was trained for two steps and saved; the
second, once fresh and once trained on other data, was restored from that; then both were trained for two
more steps on the same data.

* *Equal*: what they computed, and what their own `state_dict()`s said, agreed bit for bit.
* *Refused*: `save` or `load` said what cannot be kept, and saved or loaded nothing.
* *Wrong*: restored without an error, and not equal. *Crash*: an error that is not one of holdfast's.

`make soak` tries all of it again, and `make test` what needs no other package than those of development.
This page is written by `python -m strangers.table` in `tests`.
"""


def tried(package: str) -> dict[str, dict[str, str]]:
    """Try all subjects of a package, in a process of their own: by name, verdict and why."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **ranks, "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *_paths()])
    with compiled(env) if package == "DeepSpeed" else nullcontext():
        done = zygote.run(["-m", "system.strangers.trial", package], env=env, timeout=500)
    lines = [x.removeprefix(MARK) for x in done.stdout.splitlines() if x.startswith(MARK)]
    assert done.returncode == 0, f"after {lines[-1:]}: {done.stderr[-3000:]}"
    return {line["name"]: line for line in map(json.loads, lines)}


def _paths() -> list[str]:
    return [path for path in [os.environ.get("PYTHONPATH")] if path]


def written(package: str, outcomes: dict[str, dict[str, str]]) -> str:
    """The section of one package."""
    equal = [name for name, line in outcomes.items() if line["verdict"] == EQUAL]
    refused = [line for line in outcomes.values() if line["verdict"] == REFUSED]
    version = importlib.metadata.version(package).partition("+")[0]
    parts = [f"## {package} {version}", f"| equal |\n|---|\n| {', '.join(equal)} |"]
    if refused:
        rows = [f"| {line['name']} | {sentence(line['why'])} |" for line in refused]
        parts.append("\n".join(["| refused | why |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def sentence(why: str) -> str:
    """The message without the step and without hints."""
    lines = [line.strip() for line in why.splitlines()]
    told = [line for line in lines if not line.startswith("hint:")]
    return " ".join(told[:2]).replace(" (step 2)", "").replace("|", "\\|")


def counted(everything: dict[str, dict[str, dict[str, str]]]) -> str:
    """The table of counts."""
    rows = ["| package | equal | refused | wrong | crash |", "|---|---|---|---|---|"]
    totals = [0, 0, 0, 0]
    for package, outcomes in everything.items():
        verdicts = [line["verdict"] for line in outcomes.values()]
        counts = [verdicts.count(v) for v in ("equal", "refused", "wrong", "crash")]
        totals = [a + b for a, b in zip(totals, counts)]
        rows.append(f"| {package} | {' | '.join(map(str, counts))} |")
    rows.append(f"| **all** | {' | '.join(map(str, totals))} |")
    return "\n".join(rows)


def main() -> None:
    everything = {}
    for package in PACKAGES:
        everything[package] = outcomes = tried(package)
        for name, line in outcomes.items():
            if line["verdict"] not in (EQUAL, REFUSED):
                print(f"{package}: {name}: {line['verdict']}: {line['why'][-600:]}", flush=True)
    sections = [written(package, outcomes) for package, outcomes in everything.items()]
    sections.append(section())
    PAGE.write_text("\n".join([HEAD, counted(everything), "", "\n\n".join(sections), ""]))
    print(counted(everything))


if __name__ == "__main__":
    main()
