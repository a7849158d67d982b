"""Output of `holdfast plan --rules`: each tensor's layout, and what each rank would store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holdfast.base.errors import UsageError
from holdfast.cli.inspect import fold
from holdfast.cli.plan import coordinates
from holdfast.cli.screen import TableRow, heading, say, table
from holdfast.cli.words import and_more, dim, many, shape_text, size
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.manifest import MODEL_STATES, TensorEntry
from holdfast.core.layout.view import View
from holdfast.formats.rules.rule_plan import RuledTensor, RulePlan, Share

_MOST_ROWS = 60


def parse_let(texts: Sequence[str]) -> dict[str, int]:
    """Parse `heads=32` of each --let.  UsageError for anything else."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name.strip().isidentifier() or not value.strip().isdecimal() or len(value) > 18:
            raise UsageError(f"--let {text}: not a variable", hint="write it as heads=32")
        found[name.strip()] = int(value)
    return found


def show_plan(checkpoint: Checkpoint, plan: RulePlan, shares: list[Share], show_all: bool) -> None:
    """Show the tensors, then the ranks."""
    say(f"step {checkpoint.step}, by {plan.rules.path}, over {plan.mesh}", "bold")
    heading("Tensors")
    mine = [r for r in plan.tensors if show_all or r.entry.state in MODEL_STATES or not r.follows]
    rows = [_row(plan, name, group) for name, group in _fold(mine)]
    left_out = 0 if show_all else max(0, len(rows) - _MOST_ROWS)
    columns = ("name", "shape", "line", "layout", ">fragments", ">bytes per rank")
    table(columns, rows[: len(rows) - left_out])
    if left_out:
        say(f"  {and_more(left_out)}")
    others = len(plan.tensors) - len(mine)
    if others:
        what = f"  and {many(others, 'tensor')} of optimizer state, cut like their parameters"
        say(dim(f"{what}; counters are whole: --all lists them"))
    heading("Stored by each rank")
    ranks: list[TableRow] = [
        (
            str(s.rank),
            coordinates(plan.mesh, s.rank),
            s.num_tensors,
            size(s.bytes),
            size(s.padding_bytes) if s.padding_bytes else "-",
        )
        for s in shares
    ]
    if 2 < len(shares) < plan.mesh.world:
        ranks.insert(len(ranks) - 2, ("", and_more(plan.mesh.world - len(shares), how="")))
    table((">rank", "at", ">tensors", ">stored", ">padding"), ranks)
    say()
    say("Every element is held exactly once, not counting replicas.")


def plan_data(checkpoint: Checkpoint, plan: RulePlan, shares: list[Share]) -> dict[str, Any]:
    """Return the plan for JSON: each tensor by itself."""
    return {
        "url": checkpoint.store.url,
        "step": checkpoint.step,
        "rules": plan.rules.path,
        "mesh": dict(plan.mesh.axes),
        "tensors": [_tensor(plan, r) for r in plan.tensors],
        "ranks": [asdict(s) for s in shares],
    }


def _tensor(plan: RulePlan, ruled: RuledTensor) -> dict[str, Any]:
    views = _views(plan, ruled)
    rule = ruled.layout.rule if ruled.layout else None
    return {
        "name": ruled.entry.name,
        "shape": list(ruled.entry.shape),
        "dtype": ruled.entry.dtype,
        "replica": rule.replica if rule else "replicated",
        "layout": rule.text if rule else None,
        "rule": f"{rule.span.source.path}:{rule.span.line}" if rule else None,
        "bytes_per_rank": sorted({v.size * ruled.itemsize for v in views}),
        "fragments_per_rank": max(len(v.fragments()) for v in views),
    }


def _fold(tensors: Sequence[RuledTensor]) -> list[tuple[str, list[RuledTensor]]]:
    """Merge tensors that differ only in a layer's number into one row."""
    known = {r.entry.name: r for r in tensors}

    def lies(t: TensorEntry) -> object:
        layout = known[t.name].layout
        return None if layout is None else layout.rule

    folded = fold([r.entry for r in tensors], lies)
    return [(name, [known[t.name] for t in group]) for name, group in folded]


def _row(plan: RulePlan, name: str, group: list[RuledTensor]) -> tuple[str, ...]:
    first = group[0]
    views = _views(plan, first)
    sizes = sorted({v.size * first.itemsize for v in views})
    per_rank = " – ".join(dict.fromkeys((size(sizes[0]), size(sizes[-1]))))
    pieces = str(max(len(v.fragments()) for v in views))
    line, text = "-", dim("whole: a state of another shape than its parameter")
    if first.layout:
        span = first.layout.rule.span
        other = span.source.path != plan.rules.path
        line = f"{span.source.path}:{span.line}" if other else str(span.line)
        text = first.layout.rule.text
    return name, shape_text(first.entry.shape), line, text, pieces, per_rank


def _views(plan: RulePlan, ruled: RuledTensor) -> list[View]:
    if ruled.layout is None:
        return [View.whole(ruled.entry.shape)]
    return [view for _, view in ruled.layout.alike.views()]
