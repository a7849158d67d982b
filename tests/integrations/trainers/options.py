"""What ranks are told; without what they import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """What a rank is told."""

    stage: int
    dtype: str
    steps: int
    out: str
    root: str | None = None
    """Root of an attached engine; None for DeepSpeed alone."""
    memory: bool = False
    dropout: float = 0.1
    pause_s: float = 0.02
    """How long a step takes at least, so that a kill finds some left."""
    model: str = ""
    """Of DeepSpeed: `moe` or `pipe` for one with experts or stages."""
    tp: int = 1
    """Of Megatron: ranks among which weights are cut."""
    universal: str | None = None
    """Folder in DeepSpeed's universal format, to be loaded by DeepSpeed itself first."""
