"""The demo's comparisons: checkpoint against checkpoint, and state against state across layouts.

The first is done on the bytes that `holdfast.open` reads. The second is done on digests that
train.py took of its live state with torch alone (witness.py), so an error in saving that restoring
undoes would be found.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launch import Run
from witness import digest

import holdfast

LOSS_TOLERANCE = 1e-3  # between layouts: sums are taken in another order, and training amplifies it


@dataclass(slots=True)
class Verdict:
    """The outcome for one phase, and what went wrong, if anything."""

    when_good: str
    when_bad: str
    num_tensors: int = 0
    loss_difference: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.when_bad if self.problems else self.when_good

    def expect_equal(
        self, what: str, found: Mapping[str, object], expected: Mapping[str, object]
    ) -> None:
        """Compare by name; the names themselves must agree as well."""
        self.num_tensors += len(found)
        for name in sorted(found.keys() | expected.keys()):
            if name not in found or name not in expected:
                self.problems.append(f"{what}: {name} is on one side only")
            elif found[name] != expected[name]:
                self.problems.append(f"{what}: {name} differs")

    def expect_losses(self, run: Run, reference: Run, tolerance: float) -> None:
        self.loss_difference = loss_difference(run, reference)
        if not self.loss_difference <= tolerance:
            self.problems.append(
                f"{run.phase.name}: losses differ by {self.loss_difference:.3g}, allowed {tolerance:g}"
            )


def loss_difference(run: Run, reference: Run) -> float:
    """The largest over all steps of the run, those done twice included."""
    expected = dict(reference.losses())
    return max(abs(loss - expected[step]) for step, loss in run.losses())


def stored(root: Path, step: int) -> tuple[dict[str, str], dict[str, object]]:
    """Digest of every tensor of a saved step as holdfast reads it, and its extras."""
    with holdfast.open(str(root), step=step) as checkpoint:
        return {
            name: digest(checkpoint.read(name)) for name in checkpoint.names()
        }, checkpoint.extras


def against_reference(run: Run, reference: Run) -> Verdict:
    """Same layout: every saved step must equal the reference's bit for bit, and so must every loss."""
    verdict = Verdict("bit-exact", "not bit-exact")
    steps = common_steps(run, reference)
    for step in steps:
        found, extras = stored(run.phase.root, step)
        expected, expected_extras = stored(reference.phase.root, step)
        verdict.expect_equal(f"step {step}", found, expected)
        if extras != expected_extras:
            verdict.problems.append(f"step {step}: extras differ")
    verdict.expect_losses(run, reference, tolerance=0.0)
    if run.phase.until not in steps:
        verdict.problems.append(f"{run.phase.name}: its last step {run.phase.until} was not saved")
    return verdict


def common_steps(run: Run, reference: Run) -> Iterable[int]:
    """The steps saved by both, up to where the run's phase ended."""
    both = set(holdfast.steps(str(run.phase.root))) & set(holdfast.steps(str(reference.phase.root)))
    return sorted(step for step in both if step <= run.phase.until)


def across_layouts(run: Run, before: Run, reference: Run) -> Verdict:
    """Another layout: the restored state must equal, bit for bit, the one before and the saved one."""
    verdict = Verdict("exact restore", "not exact")
    restored, end = run.witnessed("restored"), before.witnessed("end")
    verdict.expect_losses(run, reference, LOSS_TOLERANCE)
    if restored["step"] != end["step"]:
        verdict.problems.append(
            f"{run.phase.name}: restored step {restored['step']}, not {end['step']}; see {before.output}"
        )
        return verdict
    verdict.expect_equal(
        f"{run.phase.name}: live before and after", restored["digests"], end["digests"]
    )
    saved, _ = stored(run.phase.root, restored["step"])
    verdict.expect_equal(f"{run.phase.name}: saved and restored", saved, end["digests"])
    return verdict
