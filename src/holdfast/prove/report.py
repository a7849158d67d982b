"""What `holdfast prove` says: one screen, from the proof alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.prove.causes import Finding
from holdfast.prove.comparing import Elsewhere

TO_DO = {
    "not-in-checkpoint": "add it to what is saved: register_buffer, or state_dict and load_state_dict",
    "overwritten": "restore after everything that writes to it: wrappers, initialisation, schedulers",
    "untrained-object": "make model and optimizer first, and restore into those that train",
    "scheduler": "save the scheduler, too; make it before restoring, and restore the optimizer first",
    "groups-reset": "save optimizer.state_dict(), which has the settings, and restore it last",
    "fresh-optimizer": "save optimizer.state_dict(), and restore it into the optimizer that steps",
    "swapped-moments": "keep the order of parameters, or save states by name",
    "low-precision": "save the float32 values, not those of a lower precision",
    "begun-anew": "load what was saved of it",
    "scaler": "save scaler.state_dict(), and restore it",
    "generator": "save the state of this generator, and set it after everything that draws",
    "sampler-order": "restore epoch and seed of the sampler (set_epoch) before the loader is iterated",
    "batches-repeated": "save the place in the epoch, and go on there",
    "batches-left-out": "save the place of the batch that was trained on, not of the one read ahead",
    "accumulation": "save where no gradients are accumulated, or save the gradients",
    "no-resume": "let the script look for its checkpoint when it starts; --resume-with ARGS adds arguments",
    "older-step": "take the newest complete step",
    "ranks-disagree": "agree on the step, over all ranks, before one restores",
    "replicas-differ": "restore every rank from the same values, or broadcast them",
    "weights": "save and load all of model.state_dict(), with strict=True",
    "not-deterministic": "seed all generators, torch.use_deterministic_algorithms(True); or --tolerance T",
    "elsewhere": "what is kept for each rank (batches, generators, batch size) has to be cut anew",
    "unexplained": "see what the script does at that step that it did not do before",
}


@dataclass
class ResumeProof:
    """What became of it; true if every resume was exact, or within the tolerance that was asked for."""

    exact: bool = True
    steps: int = 0
    ranks: int = 0
    saved: list[int] = field(default_factory=list)
    """Steps after which files had been written."""
    resumes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """For each run that was killed: at which steps, and from which it went on."""
    elsewhere: Elsewhere | None = None
    elsewhere_ranks: int = 0
    finding: Finding | None = None
    nondeterminism: Finding | None = None
    within: bool = False
    """Whether what is not deterministic stayed within the tolerance."""
    unseen: dict[str, str] = field(default_factory=dict)
    kept: str = ""
    seconds: float = 0.0
    seed: int = 0

    @property
    def cause(self) -> str | None:
        """The id of the cause of the first difference; None if there is none."""
        one = self.finding or self.nondeterminism
        return one.cause if one else None

    def __bool__(self) -> bool:
        return self.finding is None and (self.nondeterminism is None or self.within)

    def __repr__(self) -> str:
        return "\n".join(lines(self))


def lines(proof: ResumeProof) -> list[str]:
    """The answer in a few lines: what was run, and that it is exact, or what is not."""
    out = []
    runs = [f"killed at {_steps(kills)}" for kills, _ in proof.resumes]
    if proof.elsewhere is not None:
        runs.append(f"on {_ranks(proof.elsewhere_ranks)}")
    head = ", ".join([f"{proof.steps} steps", _ranks(proof.ranks), *runs])
    if proof.finding is None and proof.nondeterminism is None:
        out.append(f"bit-exact: {head}")
    elif proof:
        out.append(f"within tolerance: {head}")
    else:
        out.append(f"not exact: {head}")
    for kills, begins in proof.resumes:
        out.append(f"  killed at {_steps(kills)}: went on from {_steps(begins)}")
    if proof.elsewhere is not None:
        one = proof.elsewhere
        out.append(
            f"  on {_ranks(proof.elsewhere_ranks)}: after step {one.step}, {one.compared} parameters are "
            f"at most {one.worst:.1e} of their way apart"
            + ("" if "batches" in proof.unseen else f"; {one.samples or 'no'} samples differ")
        )
    for finding in (proof.finding, proof.nondeterminism):
        if finding is not None:
            out += ["", *_finding(finding)]
    if proof.unseen:
        out += [
            "",
            f"not looked at: {', '.join(f'{k} ({v})' for k, v in list(proof.unseen.items())[:3])}",
        ]
    if proof.kept:
        out += ["", f"kept: {proof.kept}"]
    return out


def _finding(finding: Finding) -> list[str]:
    return [
        f"step {finding.step}, rank {finding.rank}: {finding.what}",
        f"  why: {finding.why}",
        f"  cause: {finding.cause}",
        f"  what to do: {TO_DO[finding.cause]}",
    ]


def as_json(proof: ResumeProof) -> dict[str, object]:
    """What `--json` prints."""
    one = proof.finding or proof.nondeterminism
    return {
        "exact": proof.exact,
        "holds": bool(proof),
        "cause": proof.cause,
        "finding": None if one is None else {
            "step": one.step, "rank": one.rank, "what": one.what, "why": one.why, "to_do": TO_DO[one.cause],
        },
        "nondeterminism": None if proof.nondeterminism is None else proof.nondeterminism.what,
        "steps": proof.steps,
        "ranks": proof.ranks,
        "saved": proof.saved,
        "resumes": [{"killed_at": list(k), "went_on_from": list(b)} for k, b in proof.resumes],
        "elsewhere": None if proof.elsewhere is None else {
            "ranks": proof.elsewhere_ranks, "step": proof.elsewhere.step, "worst": proof.elsewhere.worst,
            "samples": proof.elsewhere.samples,
        },
        "not_looked_at": proof.unseen,
        "seed": proof.seed,
        "seconds": round(proof.seconds, 1),
    }  # fmt: skip


def _steps(steps: tuple[int, ...]) -> str:
    return " and ".join(map(str, steps))


def _ranks(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"
