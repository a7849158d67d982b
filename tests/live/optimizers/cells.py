"""Worker: makes checkpoints of every optimizer in every layout of as many ranks, or loads them.

    save ROOT SAVERS [OPTIMIZERS]     train two steps, save, and keep what two more steps come to
    load ROOT SAVERS [OPTIMIZERS]     load into fresh objects, compare, go on, and compare again

Lines of JSON are appended to ROOT/<phase>-<ranks>.jsonl.  Ranks that have lost each other (a saver that
fails on one of them, and leaves the other waiting) end with status `AGAIN`; a worker that is started again
goes on behind the last line (`driving`).
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

import holdfast

from .gathering import differences, gathered
from .layouts import LAYOUTS, OUT, TARGETS, WIDTH
from .savers import SAVERS
from .zoo import ZOO, Trained

EQUAL, REFUSED, WRONG, CRASH, UNTRAINED = "equal", "refused", "wrong", "crash", "untrained"
NO_CUDA = "needs CUDA"
WORSE = EQUAL, UNTRAINED, REFUSED, NO_CUDA, WRONG, CRASH
AGAIN = 17
WAIT_S = 240
"""What a collective operation may take, in seconds, before a rank is thought lost."""


class Cells:
    """One phase, on this rank."""

    def __init__(self, phase: str, root: Path, savers: list[str], optimizers: list[str]) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.root, self.savers, self.optimizers = root, savers, optimizers
        self.side = dist.new_group(timeout=timedelta(seconds=600)) if self.size > 1 else None
        """Where ranks tell each other how it went, apart from what savers do together."""
        self.lines = root / f"{phase}-{self.size}.jsonl"
        text = self.lines.read_text() if self.lines.exists() else ""
        self.done = {tuple(json.loads(line)["cell"]) for line in text.splitlines()}
        self.began = root / f"{phase}-{self.size}.began"
        self.ended = root / f"{phase}-{self.size}.ended"
        self.lost = False

    def layouts(self) -> list[str]:
        return [name for name, layout in LAYOUTS.items() if (layout.ranks > 1) == (self.size > 1)]

    # -- saving ------------------------------------------------------------------------------------

    def save_all(self) -> None:
        for layout in self.layouts():
            for name in self.optimizers:
                self.cell((name, layout), lambda n=name, s=layout: self.save(n, s))

    def save(self, name: str, layout: str) -> None:
        """Train, let each saver save, go on; anything else than training that fails is told at the load."""
        run = built(name, layout, 0)
        for n in (1, 2):
            step(run, n)
        before = gathered(run)
        for saver in self.savers:
            outcome = self.attempt(
                lambda s=saver: SAVERS[s]().save(self.place(name, layout, s), run)
            )
            if self.rank == 0:
                Path(self.place(name, layout, saver) + ".saved").write_text(json.dumps(outcome))
            if differences(gathered(run), before, same_layout=True):  # a saver that trains
                run = trained_again(name, layout)
        for n in (3, 4):
            step(run, n)
        after = gathered(run)
        if self.rank == 0:
            torch.save((before, after), self.place(name, layout, "whole"))

    # -- loading -----------------------------------------------------------------------------------

    def load_all(self) -> None:
        for target in self.layouts():
            for source in (s for s, targets in TARGETS.items() if target in targets):
                for name in self.optimizers:
                    for saver in self.savers:
                        cell = (name, source, target, saver)
                        self.cell(cell, lambda c=cell: self.load(*c))

    def load(self, name: str, source: str, target: str, saver: str) -> None:
        if not all(Path(self.place(name, one, "whole")).exists() for one in (source, target)):
            raise Told(UNTRAINED, "")
        saved = json.loads(Path(self.place(name, source, saver) + ".saved").read_text())
        if saved[0] != EQUAL:
            raise Told(*saved)
        before, after = torch.load(self.place(name, source, "whole"))
        run, same = built(name, target, 7), source == target
        SAVERS[saver]().load(self.place(name, source, saver), run)
        self.compare(run, before, "restored", same)
        for n in (3, 4):
            step(run, n)
        if same:
            self.compare(run, after, "two steps later", same)

    def compare(self, run: Trained, expected: Any, when: str, same: bool) -> None:
        lost = differences(gathered(run), expected, same_layout=same)
        if lost:
            raise Told(WRONG, f"{when}: {', '.join(lost[:4])}")

    # -- both --------------------------------------------------------------------------------------

    def place(self, name: str, layout: str, what: str) -> str:
        folder = self.root / "_".join([*name.split(), "in", *layout.split()])
        folder.mkdir(exist_ok=True)
        return str(folder / what)

    def cell(self, cell: tuple[str, ...], act: Callable[[], None]) -> None:
        """Run a cell, unless it was run, and write down what came of it."""
        if cell in self.done:
            return
        if self.rank == 0:
            self.began.write_text(json.dumps(cell))
        outcome = self.attempt(act, untrained=len(cell) == 2)
        if self.rank == 0:
            with self.lines.open("a") as file:
                line = {"cell": cell, "verdict": outcome[0], "why": outcome[1]}
                file.write(json.dumps(line) + "\n")
        if self.lost:
            os._exit(AGAIN)

    def attempt(self, act: Callable[[], Any], *, untrained: bool = False) -> tuple[str, str]:
        """What comes of an act on all ranks: the worst; ends the process if ranks have lost each other."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                act()
            mine = (EQUAL, "")
        except Told as told:
            mine = (told.verdict, told.why)
        except holdfast.HoldfastError as error:
            mine = (REFUSED, str(error))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error}"[:600]
            verdict = NO_CUDA if "not compiled with CUDA" in text else CRASH
            mine = (UNTRAINED if untrained else verdict, f"{text} ({Path(place.filename).name})")
        if self.size == 1:
            return mine
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.side)
        worst = max(found, key=lambda one: WORSE.index(one[0]))
        failed = [verdict in (CRASH, NO_CUDA, UNTRAINED) for verdict, _ in found]
        self.lost |= any(failed) and (not all(failed) or "imed out" in str(found))
        return worst[0], worst[1]


class Told(Exception):
    """An outcome that is known."""

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(why)
        self.verdict, self.why = verdict, why


def built(name: str, layout: str, seed: int) -> Trained:
    return ZOO[name](LAYOUTS[layout].build(seed))


def trained_again(name: str, layout: str) -> Trained:
    run = built(name, layout, 0)
    for n in (1, 2):
        step(run, n)
    return run


def step(run: Trained, number: int) -> None:
    """One step on the data of this number."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, WIDTH, generator=generator)
    y = torch.randn(8, OUT, generator=generator)

    def loss() -> torch.Tensor:
        out = run.model(x)
        return (out - (y if out.shape == y.shape else x)).square().mean()

    # Kron draws from numpy's generator, differently on each rank where nobody seeds it
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(100 + number)
    run.step(loss)


def main(phase: str, root: str, savers: str, optimizers: str = "") -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_S))
    names = optimizers.split(",") if optimizers else list(ZOO)
    cells = Cells(phase, Path(root), savers.split(","), names)
    (cells.save_all if phase == "save" else cells.load_all)()
    cells.ended.touch()
    os._exit(0)  # what strangers began is not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
