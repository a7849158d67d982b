"""The step that this process has done last, for whoever watches over it."""

from __future__ import annotations

last_step = 0
"""What `Checkpointer.step` was told last; 0 before."""
