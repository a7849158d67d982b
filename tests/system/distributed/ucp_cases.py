"""The two kinds of cases of the Universal Checkpointing matrix, and what they leave for each other.

OUT/<layout>/checkpoint     what holdfast saved after `FIRST` steps
OUT/<layout>/theirs         what the framework saved itself at that moment, if it has a way
OUT/<layout>/truth.pt       the state, gathered by the framework
OUT/<layout>/losses.json    of all steps of the run, which was never interrupted
OUT/rows/*.json             one source restored into one target
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

import holdfast

from .cases import Case
from .ucp_gpt import EMBEDDING, FIRST, MORE, VOCAB

Tensors = dict[str, torch.Tensor]


class Job(Protocol):
    """A model and its optimizer in one layout, at the common beginning."""

    state: dict[str, Any]

    def run(self, first: int, steps: int) -> list[float]:
        """Losses over all ranks of some steps."""

    def gathered(self) -> Tensors:
        """Weights and Adam's moments, whole, as the framework gathers them."""

    def save(self, folder: Path) -> None:
        """Save as the framework does, if it has a way."""


def uninterrupted(name: str, build: Callable[[], Job]) -> Case:
    """A run that goes on; what others restore is taken on its way."""

    def case(root: Path) -> None:
        job = build()
        losses = job.run(0, FIRST)
        holdfast.save(root / "checkpoint", job.state, step=FIRST)
        job.save(root / "theirs")
        truth = job.gathered()
        losses += job.run(FIRST, MORE)
        if leads():
            torch.save(truth, root / "truth.pt")
            (root / "losses.json").write_text(json.dumps(losses))

    case.__name__ = name
    return case


def restored(name: str, build: Callable[[], Job], source: str) -> Case:
    """The checkpoint of a source, and the steps that follow it."""

    def case(root: Path) -> None:
        job = build()
        folder = root.parent / source
        assert holdfast.load(folder / "checkpoint", job.state) == FIRST
        found = job.gathered()
        losses = job.run(FIRST, MORE)
        if leads():
            row(folder, name, found, losses)

    case.__name__ = f"{source}_into_{name}"
    return case


def leads() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@dataclass(frozen=True)
class Row:
    """A restore: the largest difference of any element, and of the losses that followed, relative."""

    source: str
    target: str
    elements: float
    losses: float


def losses_of(folder: Path) -> list[float]:
    """After the checkpoint."""
    return json.loads((folder / "losses.json").read_text())[FIRST:]


def apart(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of losses."""
    assert len(found) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected))


def row(source: Path, target: str, found: Tensors, losses: list[float], of: str = "") -> Row:
    """What was restored of a run, and how it went on, against that run itself."""
    truth = torch.load(source / "truth.pt")
    assert found.keys() == truth.keys(), found.keys() ^ truth.keys()
    elements = max(float((_real(n, found[n]) - _real(n, truth[n])).abs().max()) for n in truth)
    made = Row(f"{source.name}{of}", target, elements, apart(losses, losses_of(source)))
    rows = source.parent / "rows"
    rows.mkdir(exist_ok=True)
    (rows / f"{made.source}--{target}.json").write_text(json.dumps(asdict(made)))
    return made


def rows(out: Path) -> list[Row]:
    return [Row(**json.loads(p.read_text())) for p in sorted((out / "rows").glob("*.json"))]


def _real(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Without the rows of padding, whose number is the layout's."""
    return tensor[:VOCAB] if EMBEDDING in name else tensor
