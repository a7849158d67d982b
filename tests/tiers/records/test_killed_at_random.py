"""SIGKILL at a random moment, with every optimizer: at most the step under way is lost, and what comes back
is the uninterrupted run at that step, bit for bit.

HOLDFAST_KILL_SEED draws the moments; what failed says which seed it had.
"""

from __future__ import annotations

import json
import os
import random

import pytest

import holdfast
from tiers.memory.zygote import KILLED, Lives

from .killed_cases import DURABLE, new
from .test_exact import OPTIMIZERS, equal

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("HOLDFAST_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
CASES = [(name, "float32") for name in OPTIMIZERS]
CASES += [
    (name, kind) for kind in ("bfloat16", "masters") for name in ("momentum", "adam", "adamw")
]


@pytest.mark.soak_except("sgd-float32", "adamw-masters")
@pytest.mark.parametrize(("name", "kind"), CASES, ids=[f"{name}-{kind}" for name, kind in CASES])
def test_at_a_random_moment(lives: Lives, name: str, kind: str) -> None:
    draw = random.Random(f"{SEED} {name} {kind}")
    what = {"name": name, "kind": kind, "batch": draw.choice([1, 1, 3]), "seed": draw.random()}
    (lives.place / "what.json").write_text(json.dumps(what))
    (told,) = lives.live(nodes=[0], case="tiers.records.killed_cases:trains")
    assert told.status == KILLED, (SEED, lives.errors())
    done = int.from_bytes((lives.place / "step").read_bytes(), "little")
    run, root = new(name, kind), lives.place / "root"
    with holdfast.Checkpointer(
        root, run.state, every=holdfast.Every(durable=DURABLE, delta=1), delta=holdfast.Delta()
    ) as ckpt:
        step = ckpt.restore()
        assert done - 1 <= step <= done + 1, (what, SEED)
        plain = new(name, kind)
        for number in range(1, step + 1):
            plain.step(number)
        mine, expected = run.everything(), plain.everything()
        assert mine.keys() == expected.keys()
        assert [k for k in mine if not equal(mine[k], expected[k])] == [], (what, SEED)
