"""Labels of steps that are being saved: each is kept here until its step is committed.

    pin(200, "best")     the notes say {"best":100}, and "best" waits for step 200
    committed            {"best":200}, in one write
    failed, or killed    {"best":100}, as it was

So no label names a step that may never exist, and the former step keeps its label, which protects it, until
the new step exists.  If a label was given to several steps, it ends at the last of them that is committed,
in whichever order they are committed.
"""

from __future__ import annotations

import threading


class PendingLabels:
    """The labels that wait for a commit, on rank 0.  Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[int, int] = {}
        """Steps of the saves that have begun and are not committed, by the number of the save."""
        self._steps: dict[str, list[int]] = {}
        """Steps that each label waits for, in the order of the calls."""
        self._kept: dict[int, list[str]] = {}
        """Labels that a step has, and keeps when it is saved again."""

    def begin(self, number: int, step: int) -> None:
        """Note that a save of a step has begun."""
        with self._lock:
            self._coming[number] = step

    def give(self, label: str, step: int) -> bool:
        """Keep a label for a step that is being saved; False if the step is not."""
        with self._lock:
            if step not in self._coming.values():
                return False
            others = (other for other in self._steps.get(label, ()) if other != step)
            self._steps[label] = [*others, step]
            return True

    def keep(self, step: int, labels: list[str]) -> None:
        """Let a step that is about to be saved again, unchanged, keep its labels."""
        with self._lock:
            self._kept[step] = labels

    def forget(self, label: str) -> None:
        """Drop a label that was removed, or that names another step."""
        with self._lock:
            self._steps.pop(label, None)
            self._kept = {s: [k for k in some if k != label] for s, some in self._kept.items()}

    def commit(self, number: int, step: int) -> list[str]:
        """Note that a save has committed its step; return the labels that the step gets."""
        with self._lock:
            self._coming.pop(number, None)
            labels = self._waiting_for(step)
            for label in labels:
                steps = self._steps[label]
                del steps[: steps.index(step) + 1]
            return list(dict.fromkeys([*labels, *self._kept.pop(step, ())]))

    def end(self, number: int, step: int) -> list[str]:
        """Note that a save has ended.  If its step is not committed, and no other save of it is under way,
        drop the labels that wait for it, and return them."""
        with self._lock:
            self._coming.pop(number, None)
            if step in self._coming.values():
                return []
            self._kept.pop(step, None)
            labels = self._waiting_for(step)
            for label in labels:
                self._steps[label].remove(step)
            return labels

    def _waiting_for(self, step: int) -> list[str]:
        return [label for label, steps in self._steps.items() if step in steps]
