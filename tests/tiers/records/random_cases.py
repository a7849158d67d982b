"""What a process does in `test_random_trainings`: a training that was drawn, until it ends or is killed.

A log outlives it: each state before the call of `Checkpointer.step`, what came back of a restore, and the
events that tell what a restart can have.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer, lr_scheduler
from xxhash import xxh3_64_hexdigest

import holdfast
from holdfast.errors import NotFound, NotRecoverable, StateMismatch
from tiers.records.deaths import die
from tiers.records.test_exact import OPTIMIZERS, Net

TOLD = ("save.committed", "snapshot.committed", "delta.broken", "restore.load")
FAULTS = (".failed", ".damaged", ".died", "_died", ".lost", ".drift", "passed_over", "replay.ended")
EDITS = ("hyper", "weights", "states", "load", "keep", "random")
"""What a script does beside its optimizers' steps."""


class Ended(Exception):
    """An error of the script itself."""


def raise_ended(*_: Any) -> None:
    raise Ended


class Life:
    """From a start of the script to its end.  `self.state` is all that must come back."""

    def __init__(self, root: Path) -> None:
        self.told = json.loads((root.parent / "life.json").read_text())
        self.root, self.case, self.number = root, self.told["case"], self.told["number"]
        self.script = self.case["lives"][self.number]
        self.draw = random.Random(f"{self.case['seed']} {self.number}")
        self.seen: list[int] = self.told["steps"]
        """Steps to go back to."""
        self.step, self.restores = 0, 0
        log = root.parent / f"log{self.number}"
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(self, **fields: Any) -> None:
        os.write(self.log, (json.dumps(fields) + "\n").encode())

    def heard(self, event: holdfast.events.Event) -> None:
        if event.name in TOLD:
            fields = {k: v for k, v in event.fields.items() if k in ("step", "tier")}
            self.tell(event=event.name, **fields)
        elif event.name.endswith(FAULTS):
            self.tell(fault=str(event))

    def run(self) -> None:
        """Once more, with a parameter group more or less, if the newest state has them otherwise."""
        holdfast.events.subscribe(self.heard)
        for grown in (self.told["grown"], not self.told["grown"]):
            self.make(grown=grown)
            try:
                with suppress(Ended, SystemExit):
                    self.train()
                break
            except StateMismatch:
                if self.number <= self.case["grows"] or grown != self.told["grown"]:
                    raise

    def make(self, *, grown: bool) -> None:
        """As a script does at each start; its values are others."""
        torch.manual_seed(self.case["seed"] + self.number)
        self.model, names = Net(), self.case["optimizers"]
        if self.case["tied"]:
            self.model.frozen.weight = self.model.sometimes.weight
        self.model.large_at = self.case["large_at"]
        early = [p for p in self.model.parameters() if p is not self.model.last.weight]
        self.optims = [OPTIMIZERS[n](early[i :: len(names)]) for i, n in enumerate(names)]
        self.own: dict[str, Any] = {"by": "", "mean": torch.zeros(3), "grown": grown}
        self.state: dict[str, Any] = {"model": self.model, "own": self.own}
        self.state |= {f"optim{i}": one for i, one in enumerate(self.optims)}
        if self.case["sched"]:
            self.state["sched"] = lr_scheduler.ExponentialLR(self.optims[0], 0.9)
        if self.case["scaler"]:
            self.state["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.grown = False
        if grown:
            self.edit("group")
        self.edit("keep")

    def train(self) -> None:
        script, steps = self.script, self.script["steps"]
        with ExitStack() as self.stack:
            self.open()
            self.die_at(-1)
            self.restore(None)
            for i in range(steps):
                self.die_at(i)
                self.one(script["acts"].get(str(i), []))
                time.sleep(self.draw.choice([0, script["pause"]]))
            match script["end"]:
                case "error":
                    raise Ended
                case "exit":
                    sys.exit(3)
                case "kill" if script["at"] < steps:
                    threading.Event().wait()
            self.tell(closing=True)
            self.die_at(steps)

    def die_at(self, i: int) -> None:
        if self.script["end"] == "kill" and self.script["at"] == i:
            threading.Timer(self.script["after"], die).start()

    def open(self, *, anew: bool = False) -> None:
        """`anew`: the live state is trained on, whatever a restart would restore of it."""
        case, every = self.case, holdfast.Every(**self.case["every"])
        ckpt = holdfast.Checkpointer(
            self.root,
            self.state,
            every=holdfast.Auto(mtbf_hours=0.02, overhead=0.5) if case["auto"] else every,
            memory=holdfast.Memory() if every.memory else None,
            delta=holdfast.Delta(**case["delta"]) if every.delta else None,
            keep=holdfast.Keep(last=case["keep"]),
            when_busy=case["when_busy"],
            deadline_s=300.0,
            anew=anew,
        )
        self.ckpt = self.stack.enter_context(ckpt)

    @property
    def chained(self) -> bool:
        """Whether a record leads to the live state, or one can lead on from it."""
        delta = self.ckpt._tiers.get("delta")
        return delta is not None and delta.parent is not None

    def one(self, acts: list[str]) -> None:
        """A step of the script, or a restore."""
        targets = [*self.seen] if self.grown else [None, *self.seen]
        if "restore" in acts and targets:
            self.restore(self.draw.choice(targets))
            return
        if "reopen" in acts:
            self.tell(closing=True)
            self.ckpt.close()
            self.tell(reopened=True)
            self.open(anew=True)
        edits = [act for act in acts if act in (*EDITS, "group")]
        if edits:  # what a save has not copied yet, it would have as written
            self.ckpt.wait()
        self.step += 1
        calls = [lambda: [self.edit(act) for act in edits], lambda: self.compute(acts)]
        for call in self.draw.sample(calls, 2):
            call()
        state = self.everything()
        self.tell(at=self.step, state=state, grown=self.grown)
        self.ckpt.step(self.step)
        self.tell(done=self.step, chained=self.chained)
        assert self.everything() == state, "step() has changed the live state"
        self.seen.append(self.step)
        if "save" in acts:
            self.ckpt.save(self.step)

    def compute(self, acts: list[str]) -> None:
        scaler = self.state.get("scaler")
        for one in self.optims:
            one.zero_grad()
        for _ in range(self.case["accumulate"]):
            x = torch.randn(4, 6) + random.random() + np.random.rand()
            loss = self.model(x, self.step).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        given = [p for p in self.model.parameters() if p.grad is not None]
        if "none" in acts:
            for p in self.draw.sample(given, self.draw.randint(1, len(given))):
                p.grad = None
        if "inf" in acts:
            given[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
        steps = [] if "skip" in acts else [*self.optims]
        if "fail" in acts:
            kinds = [Optimizer.register_step_pre_hook, Optimizer.register_step_post_hook]
            handle = self.draw.choice(kinds)(self.optims[0], raise_ended)
            with suppress(Ended):
                self.optims[0].step()
            handle.remove()
            del steps[:1]
        for one in steps:
            one.step() if scaler is None else scaler.step(one)
        if scaler is not None and steps:
            scaler.update()
        if "sched" in self.state:
            self.state["sched"].step()
        by = f"{self.number}.{self.restores}.{self.step}"
        self.own |= {"by": by, "mean": self.own["mean"] + x.mean()}

    def edit(self, act: str) -> None:
        match act:
            case "hyper":
                group = self.draw.choice([g for one in self.optims for g in one.param_groups])
                key = self.draw.choice(sorted({"lr", "weight_decay"} & group.keys()))
                group[key] = group[key] * 0.7 + 0.001
            case "weights":
                with torch.no_grad():
                    self.draw.choice(list(self.model.parameters())).mul_(0.9)
            case "states":
                states = [v for one in self.optims for s in one.state.values() for v in s.values()]
                for value in [v for v in states if torch.is_tensor(v) and v.ndim][:2]:
                    value.mul_(0.5)
            case "load":
                part, kept = self.draw.choice(self.kept)
                part.load_state_dict(copy.deepcopy(kept))
            case "keep":
                parts = [self.model, *self.optims]
                self.kept = [(part, copy.deepcopy(part.state_dict())) for part in parts]
            case "group":
                self.optims[0].add_param_group({"params": [self.model.last.weight], "lr": 0.03})
                self.grown = self.own["grown"] = True
                self.seen = []
                self.edit("keep")
            case "random":
                torch.rand(3), random.random(), np.random.rand()

    def restore(self, want: int | None) -> None:
        try:
            self.step = self.ckpt.restore(want)
        except (NotFound, NotRecoverable):
            if want is None:
                raise
            self.tell(refused=want)
            raise Ended from None
        if self.own["grown"] != self.grown:
            raise StateMismatch("another parameter group")
        self.restores += 1
        self.seen = [step for step in self.seen if step <= self.step]
        state = self.everything()
        self.tell(restored=self.step, want=want, state=state, chained=self.chained)

    def everything(self) -> dict[str, str]:
        whole = {k: v if k == "own" else v.state_dict() for k, v in self.state.items()}
        rng = [torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())]
        return dict(digests({**whole, "rng": rng}))


def digests(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield f"{name} {value.dtype} {[*value.shape]}", xxh3_64_hexdigest(value.numpy().tobytes())
    elif isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from digests(part, f"{name}.{key}")
    else:
        yield name, xxh3_64_hexdigest(repr(value).encode())


def trains(root: Path) -> None:
    warnings.simplefilter("ignore")
    Life(root).run()
