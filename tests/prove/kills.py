"""Proofs at many kill points: each training is run whole once, and then killed at each step in turn.

    python -m prove.kills                       all trainings of below, 20 kills each; an hour
    python -m prove.kills train lightning-own   those with these names

A line is printed for each proof, and one for each training with how often each answer was given.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.prove.proving import Plan, _Proving
from holdfast.prove.running import CannotProve, kill_all
from holdfast.prove.workspace import Workspace
from prove import forked

ROOT = Path(__file__).parents[2]
KILLS, STEPS = 20, 20
_TRAINERS = {
    "transformers": (
        1, "transformers.trainer,transformers.models.gpt2.modeling_gpt2,holdfast.integrations.transformers",
    ),
    "accelerate": (1, "accelerate,holdfast.integrations.accelerate"),
    "lightning": (1, "lightning.pytorch.callbacks,holdfast.integrations.lightning"),
    "torchtitan": (2, "torchtitan.components.optimizer,holdfast.integrations.torchtitan"),
    "deepspeed": (2, "deepspeed,holdfast.integrations.deepspeed"),
    "dcp": (2, "holdfast.dcp,torch.distributed.checkpoint.state_dict"),
    "torch_save": (1, "torch.distributed.checkpoint.state_dict"),
}  # fmt: skip
_EXAMPLE = ["examples/train.py", "--root", "r", "--every", "4", "--batch", "4"]


@dataclass(frozen=True)
class Training:
    name: str
    words: list[str]
    ranks: int
    preload: str = ""


def trainings() -> Iterator[Training]:
    for ranks, tp in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
        words = [*_EXAMPLE, "--tp", str(tp), "--dropout", "0.1"]
        yield Training(f"train-{ranks}x{tp}", words, ranks)
    for name, (ranks, preload) in _TRAINERS.items():
        for form in ("own", "holdfast"):
            words = [f"tests/prove/trainers/train_{name}.py", "--root", "r", "--with", form]
            yield Training(f"{name}-{form}", words, ranks, preload)


def drawn(saved: list[int]) -> Iterator[list[int]]:
    """Yield the steps of `KILLS` proofs: each behind the first save, then two of them."""
    low = min(saved) + 1
    single = [[step] for step in range(low, STEPS)]
    double = [[at, at + 2 + at % 3] for at in range(low, STEPS - 4)]
    yield from (single + double * KILLS)[:KILLS]


def of(training: Training, place: Path) -> Counter[str]:
    """Prove a training at `KILLS` points; returns how often each answer was given."""
    said: Counter[str] = Counter()
    with forked.listening(place) as command:
        script, *rest = training.words
        plan = Plan([*command(training.ranks), str(ROOT / script), *rest], steps=STEPS, seed=0)
        workspace = Workspace(plan.command, plan.state, os.environ)
        try:
            proving = _Proving(plan, workspace, lambda _: None)
            proving._whole()
            for kill_at in drawn(proving.proof.saved):
                proving.proof.finding = None
                proving._killed(kill_at)
                finding = proving.proof.finding or proving.proof.nondeterminism
                said["exact" if finding is None else finding.cause] += 1
                words = "exact" if finding is None else f"{finding.cause}: {finding.what}"
                print(f"  {training.name} killed at {kill_at}: {words}", flush=True)
        except CannotProve as error:
            said[error.cause] += 1
            print(f"  {error}", flush=True)
        finally:
            kill_all(workspace.temporary.name)
            workspace.remove_temporary()
            workspace.remove()
    return said


def main(wanted: list[str]) -> None:
    for training in trainings():
        if wanted and not any(training.name.startswith(word) for word in wanted):
            continue
        pid = os.fork()  # each has a process to be forked from, with what the training imports
        if pid == 0:
            os.environ |= {"ZYGOTE_PRELOAD": training.preload, "DS_ACCELERATOR": "cpu"}
            os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # else it has a thread
            place = Path(tempfile.mkdtemp(prefix="kills-"))
            os.chdir(place)
            said = of(training, place)
            print(f"{training.name}: " + ", ".join(f"{n} {c}" for c, n in said.items()), flush=True)
            shutil.rmtree(place, ignore_errors=True)
            sys.exit()
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
