"""Draw the charts of speed.md from what the benchmarks have measured (bench/results).

python docs/make_site.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parents[1] / "bench" / "results"
RANKS = ("1", "2", "4")
BLUE, ORANGE, GREY, GREEN = "#3267a8", "#d98032", "#a6a6a6", "#4c9a6a"
matplotlib.rcParams.update(
    {"svg.hashsalt": "holdfast", "font.size": 9, "axes.spines.top": False}
    | {"axes.spines.right": False, "legend.frameon": False}
)

Series = dict[str, tuple[str, list[float]]]
"""Bars by contestant: their colour, and a value for each number of ranks."""


def write(folder: Path) -> None:
    """Write the three charts into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_and_load(folder / "speed-save-and-load.svg")
    held(folder / "speed-held.svg")
    restart(folder / "speed-restart.svg")


def save_and_load(path: Path) -> None:
    """Seconds of a durable save, and of a cold and a warm load, by number of ranks."""
    figure, axes = plt.subplots(3, 1, figsize=(6, 7), layout="constrained")
    saves, loads = found("save_durable"), found("load")
    bars(axes[0], "durable save", samples(saves, "holdfast", "dcp", "raw"))
    for axis, state in zip(axes[1:], ("cold", "warm")):
        by_rank = {rank: {"samples": loads[rank]["samples"][state]} for rank in RANKS}
        bars(axis, f"load, page cache {state}", samples(by_rank, "holdfast", "dcp", "raw"))
    for axis in axes:
        axis.set_ylabel("seconds for 1.5 GB")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(figure, path)


def held(path: Path) -> None:
    """Milliseconds for which training is held by one save, by number of ranks, on a log scale."""
    figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
    series = samples(found("stall"), "holdfast", "dcp staged", "dcp thread", scale=1000)
    bars(axis, "training held by a durable save of 1.5 GB", series)
    axis.set_yscale("log")
    axis.set_ylabel("milliseconds")
    axis.legend(ncols=3, loc="upper left")
    axis.set_ylim(1, 3000)
    save(figure, path)


def restart(path: Path) -> None:
    """Seconds of a restore from memory, beside one from storage and DCP's, by number of ranks."""
    figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
    series = samples(found("restart_memory"), "memory", "storage", "dcp")
    bars(axis, "restoring 1.5 GB", series)
    axis.set_ylabel("seconds")
    axis.legend()
    save(figure, path)


NAMES = {
    "holdfast": ("holdfast", BLUE),
    "dcp": ("DCP, cold", ORANGE),
    "raw": ("the raw device", GREY),
    "dcp thread": ("dcp.async_save", ORANGE),
    "dcp staged": ("the same, kept stager", GREEN),
    "memory": ("holdfast, from memory", BLUE),
    "storage": ("holdfast, from storage, cold", GREEN),
}


def samples(by_rank: dict[str, Any], *contestants: str, scale: float = 1.0) -> Series:
    """The medians of contestants' samples by number of ranks."""
    values = {
        name: [scale * median(by_rank[rank]["samples"][name]) for rank in RANKS]
        for name in contestants
    }
    return {NAMES[name][0]: (NAMES[name][1], values[name]) for name in contestants}


def bars(axis: Any, title: str, series: Series) -> None:
    """Draw grouped bars with their values above them."""
    width = 0.8 / len(series)
    for i, (name, (colour, values)) in enumerate(series.items()):
        label = name.removesuffix(", cold") if "raw" in " ".join(series) else name
        places = [rank + (i - (len(series) - 1) / 2) * width for rank in range(len(values))]
        drawn = axis.bar(places, values, width, color=colour, label=label)
        axis.bar_label(drawn, [f"{v:.3g}" for v in values], fontsize=7, padding=1)
    axis.set_xticks(range(len(RANKS)), [f"{n} rank{'s' * (n != '1')}" for n in RANKS])
    axis.set_title(title, fontsize=9)


def found(name: str) -> dict[str, Any]:
    """What a benchmark has found."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["found"]
    return result


def save(figure: Any, path: Path) -> None:
    """Write a figure, the same bytes each time."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
