"""Make the drawings of how-it-works/: each from the code that does what it shows.

python docs/make_site.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from make_charts import BLUE, GREEN, GREY, ORANGE, plt, save

from holdfast.core.codec import stripes
from holdfast.core.layout import Cut, Mesh, Sharding
from holdfast.core.layout.pieces import Placement, Table
from holdfast.policy.wasted import Costs, Frequencies, Rates, wasted

COLOURS = (BLUE, ORANGE, GREEN, "#b0578d")
MIB = 1 << 20
MESH = Mesh((("replicate", 2), ("shard", 2)))
ROWS = (
    ("embedding", (1024, 1024), 4, Sharding((Cut(0, ("shard",)),))),
    ("layer.0", (640, 1024), 4, Sharding((Cut(0, ("shard",)),))),
    ("layer.1", (640, 1024), 4, Sharding((Cut(0, ("shard",)),))),
    ("norm", (256, 512), 4, Sharding()),
)
"""Name, shape, bytes per element and sharding of the tensors that are drawn."""


def write(folder: Path) -> None:
    """Write the drawings into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    threads(folder / "threads.svg")
    images(folder / "images.svg")
    reads(folder / "reads.svg")
    parity(folder / "parity.svg")
    waste(folder / "waste.svg")


def threads(path: Path) -> None:
    """What each thread of a rank does in a save, from left to right."""
    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    lanes = ("training", "saving", "persist", "tidy")
    for name, lane, start, stop, colour, text in PHASES:
        at = len(lanes) - 1 - lanes.index(lane)
        axis.add_patch(plt.Rectangle((start, at - 0.36), stop - start, 0.72, facecolor=colour))
        middle = (start + stop) / 2
        axis.text(middle, at, name, ha="center", va="center", fontsize=7, color=text)
    for x, bottom, top in ((1.6, 2.4, 2.6), (4.2, 1.4, 1.6), (8.6, 0.4, 0.6)):
        axis.annotate("", (x, bottom), (x, top), arrowprops={"arrowstyle": "->", "lw": 1})
    axis.annotate("", (6.6, 2.64), (6.6, 2.36), arrowprops={"arrowstyle": "->", "lw": 1})
    axis.set_yticks(range(len(lanes)), [f"{name}\nthread" for name in reversed(lanes)], fontsize=7)
    axis.set_xlim(0, 10)
    axis.set_ylim(-0.5, len(lanes) - 0.5)
    axis.set_xticks([])
    axis.set_xlabel("time")
    axis.tick_params(length=0)
    save(figure, path)


PHASES = (
    ("call: name,\nplace, encode,\nset aside", "training", 0, 1.6, BLUE, "white"),
    ("forward and backward of the next step", "training", 1.65, 6.0, "#dfe6ee", "black"),
    ("gate", "training", 6.05, 6.6, ORANGE, "white"),
    ("optimizer's step, and further steps", "training", 6.65, 10, "#dfe6ee", "black"),
    ("agree with\nall ranks", "saving", 1.6, 3.4, GREEN, "white"),
    ("copy into the image", "saving", 3.45, 6.6, GREEN, "white"),
    ("digest and write behind it", "persist", 4.2, 7.2, BLUE, "white"),
    ("report,\ncommit", "persist", 7.25, 8.6, BLUE, "white"),
    ("delete\nold steps", "tidy", 8.6, 10, GREY, "black"),
)
"""What is done, by which thread, from when to when, and how it is drawn."""


def images(path: Path) -> None:
    """Which rows of each tensor each rank writes (left), and how they lie in its file (right)."""
    placement = Placement(MESH, Table.of(ROWS))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for rank in range(MESH.world):
        pieces = placement.pieces(rank)
        for i, tensor in enumerate(pieces.tensor.tolist()):
            rows, first = ROWS[tensor][1][0], pieces.start[i][0]
            height = (pieces.stop[i][0] - first) / rows
            box = ((tensor - 0.4, 1 - first / rows - height), 0.8, height)
            draw(left, box, COLOURS[rank], f"rank {rank}")
            at, size = pieces.offset[i] / MIB, pieces.bytes[i] / MIB
            draw(right, ((at, 3 - rank - 0.35), size, 0.7), COLOURS[rank], ROWS[tensor][0])
    left.set_xticks(
        range(len(ROWS)), [f"{name}\n{shape}" for name, shape, _, _ in ROWS], fontsize=7
    )
    left.set_title("who writes which rows; 2 replicas of 2 shards", fontsize=9)
    left.set_xlim(-0.5, len(ROWS) - 0.5)
    left.set_yticks([])
    right.set_yticks([3, 2, 1, 0], [f"rank {rank}" for rank in range(4)])
    right.set_xlim(0, 3)
    right.set_ylim(-0.5, 3.5)
    right.set_xlabel("MiB from the first piece of its file")
    right.set_title("what lies in each image", fontsize=9)
    save(figure, path)


def draw(axis: Any, box: Any, colour: str, text: str) -> None:
    """Draw a box with a text in it."""
    (x, y), width, height = box
    axis.add_patch(plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor="white"))
    axis.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=6, color="white"
    )


def reads(path: Path) -> None:
    """How much of each saved image a rank of another layout needs."""
    targets = {
        "the same rows": Cut(0, ("shard",)),
        "rows on 4 ranks": Cut(0, ("all",)),
        "columns on 4 ranks": Cut(1, ("all",)),
    }
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.4), layout="constrained")
    saved = Placement(MESH, Table.of(ROWS))
    for axis, (title, cut) in zip(axes, targets.items()):
        mesh = MESH if cut.axes == ("shard",) else Mesh((("all", 4),))
        shares = np.array([wanted(saved, mesh, cut, rank) for rank in range(mesh.world)])
        axis.imshow(shares / MIB, cmap="Blues", vmin=0, vmax=3)
        for (i, j), size in np.ndenumerate(shares):
            axis.text(
                j, i, f"{size / MIB:.2g}" if size else "", ha="center", va="center", fontsize=7
            )
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(4), [f"file {rank}" for rank in range(4)], fontsize=7)
        axis.set_yticks(range(4), [f"rank {rank}" for rank in range(4)], fontsize=7)
    axes[0].set_ylabel("reads, MiB")
    save(figure, path)


def wanted(saved: Placement, mesh: Mesh, cut: Cut, rank: int) -> list[int]:
    """Bytes that a rank of a mesh needs of each saved image."""
    boxes = [Sharding((cut,)).box(shape, mesh, rank) for _, shape, _, _ in ROWS]
    start, stop = (np.array([getattr(box, edge) for box in boxes]) for edge in ("start", "stop"))
    located = saved.locate(np.arange(len(ROWS)), start, stop)
    itemsize = np.array([row[2] for row in ROWS])[located.want]
    size = np.prod(located.stop - located.start, axis=1) * itemsize
    return [int(size[located.rank == image].sum()) for image in range(MESH.world)]


def parity(path: Path) -> None:
    """Which member of a group of four holds which block of each stripe."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), layout="constrained")
    schemes = {
        "copy": stripes.copy([4 * MIB] * 4, 2),
        "parity": stripes.rs([4 * MIB] * 4, 1),
        "rs(2)": stripes.rs([4 * MIB] * 4, 2),
    }
    for axis, (title, scheme) in zip(axes, schemes.items()):
        for stripe in range(scheme.num_members):
            for number in range(scheme.num_data + scheme.num_parity):
                is_data = number < scheme.num_data
                text = f"data {number}" if is_data else f"parity {number - scheme.num_data}"
                text = "the copy" if not is_data and title == "copy" else text
                corner = (scheme.holder(stripe, number) - 0.47, 3 - stripe - 0.4)
                draw(axis, (corner, 0.94, 0.8), BLUE if is_data else ORANGE, text)
        axis.set_xlim(-0.5, 3.5)
        axis.set_ylim(-0.5, 3.5)
        axis.set_xticks(range(4), [f"node {member}" for member in range(4)], fontsize=7)
        axis.set_yticks([3, 2, 1, 0], [f"stripe {stripe}" for stripe in range(4)], fontsize=7)
        axis.set_title(title, fontsize=9)
    save(figure, path)


def waste(path: Path) -> None:
    """The share of time that is wasted, over the steps between two durable saves."""
    costs = Costs(
        step_s=5.0, durable_stall_s=0.05, durable_s=60.0, durable_load_s=60.0, memory_stall_s=0.05,
        memory_s=2.0, memory_load_s=2.0, record_stall_s=0.05, record_s=0.5, replay_s=1.0,
    )  # fmt: skip
    rates = Rates(process=0.5 / 28800, node=0.5 / 28800, beyond=0.01)
    ways = {
        "durable saves": {},
        "and snapshots every 10 steps": {"memory": 10},
        "and a record of every step": {"delta": 1, "batch": 1},
    }
    periods = np.unique(np.geomspace(12, 5000, 60).astype(int))
    figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
    for (name, options), colour in zip(ways.items(), (GREY, GREEN, BLUE)):
        shares = [
            100 * wasted(costs, rates, Frequencies(durable=int(n), **options)).total
            for n in periods
        ]
        axis.plot(periods, shares, color=colour, label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("steps of 5 s between two durable saves")
    axis.set_ylabel("wasted time, %")
    axis.set_title("a failure every 8 hours, by the model of holdfast.policy", fontsize=9)
    axis.legend(fontsize=8)
    save(figure, path)
