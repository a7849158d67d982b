"""Prove each trainer's own resume, and the same training with holdfast, and make the page of it.

    python docs/make_proved.py                  all of it, in a clone: an hour
    python docs/make_proved.py lightning dcp    these trainers
    python docs/make_proved.py --page           the page alone, from what was recorded

The commands are those that the page prints.  What each of them said is recorded in docs/proved/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RECORDS = DOCS / "proved"
PAGE = DOCS / "proved.md"
FORMS = ("own", "holdfast")
SEED = 7
"""Of the steps at which runs are killed."""
ONE, TWO = "python", "torchrun --standalone --nproc-per-node 2"


@dataclass(frozen=True)
class Trainer:
    """A trainer, what starts its script, and the sentences that the page has on it."""

    name: str
    title: str
    package: str
    launcher: str
    resume: str
    """What its own resume is."""
    why: str
    """Why it is exact or not, by its source, and what holdfast does about it."""

    @property
    def script(self) -> str:
        return f"tests/prove/trainers/train_{self.name}.py"

    def command(self, form: str) -> str:
        """The command of a proof, as the page prints it."""
        words = f"{self.launcher} {self.script} --root runs/{self.name} --with {form}"
        return f"holdfast prove --seed {SEED} -- {words}"


TRAINERS = (
    Trainer(
        "transformers", "transformers", "transformers", ONE,
        "`Trainer.train(resume_from_checkpoint=...)`",
        "Its checkpoints have the generators of Python, numpy and torch, and a resumed epoch "
        "sets them when its first batches have been fetched.",
    ),
    Trainer(
        "accelerate", "Accelerate", "accelerate", ONE,
        "`save_state`, `load_state` and `skip_first_batches`",
        "`load_state` sets the generators, and then the loader's iterator draws a seed from "
        "torch's, so in the middle of an epoch dropout draws other numbers. From the end of "
        "an epoch, where the uninterrupted training draws, too, it goes on exactly. holdfast "
        "sets the generators when the loader has begun.",
    ),
    Trainer(
        "lightning", "Lightning", "lightning", ONE,
        '`ModelCheckpoint(save_last=True)` and `fit(ckpt_path="last")`, with a `StatefulDataLoader`',
        "Its checkpoints have no generator, so dropout draws other numbers.",
    ),
    Trainer(
        "torchtitan", "torchtitan", "torchtitan", TWO,
        "`CheckpointManager`",
        "It saves the model, the optimizers, the schedulers, the loader and the train state, "
        "and no generator, so dropout draws other numbers. Of torchtitan's own models only "
        "Flux draws any.",
    ),
    Trainer(
        "deepspeed", "DeepSpeed", "deepspeed", TWO,
        "`save_checkpoint` and `load_checkpoint`, with the place in the data in `client_state`",
        "They keep no generator, so dropout draws other numbers, and not the engine's count "
        "of batches (`micro_steps`), which begins at 0. With holdfast the script calls "
        "[`restore_rng`](how-to/loaders.md#dropout-in-the-middle-of-an-epoch) when its loader"
        " has begun.",
    ),
    Trainer(
        "dcp", "DCP", "torch", TWO,
        "`dcp.save` and `dcp.load` of the recipe's `AppState`, with the scheduler and the step in it",
        "DCP saves what it is given, and the recipe gives it no generator, so dropout draws "
        "other numbers. `holdfast.dcp` keeps DCP's calls and saves the same; a "
        "[`Checkpointer`](start.md) adds the generators.",
    ),
    Trainer(
        "torch_save", "torch.save", "torch", ONE,
        "the dict of PyTorch's recipe after each epoch, with the scheduler in it",
        "It has no generator, so the next epoch has the order of the first one, and dropout "
        "draws its numbers. A [`Checkpointer`](start.md) adds the generators.",
    ),
)  # fmt: skip
HEAD = """# Proved

What [`holdfast prove`](reference/cli/prove.md) says of each trainer's own resume, and of the same training
with holdfast. The trainings are small and real: dropout, shuffled data, AdamW, a schedule, and gradients
of two batches a step where the trainer accumulates. They resume as the trainer's documentation says.

Each makes 20 steps of the optimizer, is killed behind a save and goes on, and is killed twice. Then every
value at every step is to be that of the training that was not killed. A row says what differs first, by
[its cause](reference/causes.md).
"""
FOOT = """
`python docs/make_proved.py` runs the commands below in a clone, where `make soak` has installed its
packages, and writes this page; it did so on {dates}. `make soak` runs them again, and compares what
they say.
"""


def prove(trainer: Trainer, form: str) -> dict[str, Any]:
    """Run a command of the page; returns what it said, as it is recorded.  RuntimeError if it could not."""
    command = trainer.command(form)
    print(f"$ {command}", flush=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{command} ended with status {done.returncode}")
    return {
        "trainer": trainer.name,
        "with": form,
        "command": command,
        "exit": done.returncode,
        "said": done.stdout.rstrip().splitlines(),
        "versions": {name: _version(name) for name in sorted({"torch", trainer.package})},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _version(package: str) -> str:
    return version(package).partition("+")[0]


def write(page: Path) -> None:
    """Write the page."""
    records = {(one["trainer"], one["with"]): one for one in map(_read, RECORDS.glob("*.json"))}
    columns = [
        "| trainer | version | its own resume | with holdfast | commands |",
        "|---|---|---|---|---|",
    ]
    days = " and ".join(sorted({one["date"] for one in records.values()}))
    rows = [_row(one, records) for one in TRAINERS]
    lines = [HEAD, *columns, *rows, FOOT.format(dates=days)]
    page.write_text("\n".join([*lines, *(_section(one, records) for one in TRAINERS)]))


def _read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _row(trainer: Trainer, records: dict[tuple[str, str], dict[str, Any]]) -> str:
    both = [records[trainer.name, form] for form in FORMS]
    cells = (
        trainer.title,
        f"{trainer.package} {both[0]['versions'][trainer.package]}",
        *map(answer, both),
        f"[below](#{trainer.title.lower().replace('.', '')})",
    )
    return f"| {' | '.join(cells)} |"


def answer(record: dict[str, Any]) -> str:
    """The answer in a few words: bit-exact, or the cause and the step."""
    if not record["exit"]:
        return "bit-exact"
    cause = cause_of(record["said"])
    step = next(line for line in record["said"] if line.startswith("step ")).partition(",")[0]
    return f"differs at {step}: `{cause}`"


def cause_of(said: list[str]) -> str | None:
    """The cause that the lines of an answer name; None if it is exact."""
    causes = [line.partition("cause: ")[2] for line in said if line.startswith("  cause: ")]
    return causes[0] if causes else None


def _section(trainer: Trainer, records: dict[tuple[str, str], dict[str, Any]]) -> str:
    blocks = []
    for form in FORMS:
        one = records[trainer.name, form]
        options = "exit=1 soak" if one["exit"] else "soak"
        blocks += [f"```console {options}", f"$ {one['command']}", *one["said"], "```", ""]
    about = f"Its own resume is {trainer.resume}. {trainer.why}"
    return "\n".join([f"## {trainer.title}", "", about, "", *blocks])


def main(words: list[str]) -> None:
    if words != ["--page"]:
        RECORDS.mkdir(exist_ok=True)
        for trainer in TRAINERS:
            for form in FORMS if not words or trainer.name in words else ():
                text = json.dumps(prove(trainer, form), indent=1)
                (RECORDS / f"{trainer.name}-{form}.json").write_text(text + "\n")
    write(PAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
