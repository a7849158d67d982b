"""Comparing checkpoint and live state over all ranks: every difference in one error, on every rank.

Values of tied weights are compared where there is no other difference: they have to be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import msgspec
import numpy as np

from holdfast.base.errors import HoldfastError, LayoutError, StateMismatch, warn_user
from holdfast.base.events import emit
from holdfast.base.suggest import did_you_mean, did_you_mean_pattern, matching_nothing
from holdfast.base.text import first_of
from holdfast.base.wire import WireError, decode_msgpack
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.peers import of_the_step
from holdfast.core.format.extras import DCP_NAMES, MADE_OF
from holdfast.core.group import Group
from holdfast.core.layout import Axis, Mesh, common_mesh
from holdfast.live.restore.mismatches import Mismatch, Problems, differs
from holdfast.live.restore.targets import RestoreOptions, entry_of, is_known
from holdfast.live.state.customised import OWN_EXTRA
from holdfast.live.state.named import Prepared
from holdfast.live.state.nameless_parameters import WAYS_OUT

MAX_UNTOUCHED = 20
MAX_HINTS = 20
"""Most near misses that are looked for per list: each takes time."""

OTHER_NAMES = (
    "; transformers 5 writes other names than a live model of some families has (GPT-NeoX, ViT, mixtures "
    "of experts): docs/how-to/hugging-face.md, 'Names of transformers 5', has rules for them"
)


def compare_tensors(checkpoint: Checkpoint, live: Prepared, options: RestoreOptions) -> Problems:
    """Find differences between this rank's live tensors and the checkpoint."""
    found = Problems()
    for name, t in live.tensors.items():
        entry, placed = entry_of(checkpoint, name), t.placed
        if entry is None:
            found.missing.append(name)
            continue
        rows_differ = name in live.padded and _differ_in_rows(entry.shape, placed.shape)
        if entry.shape != placed.shape and not rows_differ:
            said = f"saved with shape {entry.shape}, here {placed.shape}"
            found.found.append(differs(name, said))
        elif entry.dtype != placed.dtype and not (options.cast or name in live.recast):
            said = f"saved as {entry.dtype}, here {placed.dtype} (cast=True converts)"
            found.found.append(differs(name, said))
    if live.frozen or checkpoint.left_out:
        from holdfast.live.restore.frozen import compare_frozen

        compare_frozen(checkpoint, live, options, found)
    if live.apart or any(name + MADE_OF in checkpoint.manifest.extras for name in found.missing):
        from holdfast.live.restore.composite_states import made_otherwise

        made_otherwise(checkpoint, live, found)
    if live.aliases:
        from holdfast.live.restore.tied import saved_twice

        found.twice = saved_twice(checkpoint, live)
    if checkpoint.manifest.aliases:
        from holdfast.live.restore.tied import tell_untied

        tell_untied(checkpoint, live)
    return found


def _differ_in_rows(saved: tuple[int, ...], here: tuple[int, ...]) -> bool:
    """True if shapes are alike but for the length of dim 0."""
    return len(saved) == len(here) and saved[1:] == here[1:]


class _Compared(msgspec.Struct, frozen=True, array_like=True):
    """A rank's findings on their way to rank 0."""

    found: list[Mismatch]
    missing: list[str]
    claimed: bytes
    axes: list[tuple[int, int, str | None]]
    error: WireError | None
    taken: list[str]
    unexpected: list[Mismatch]
    matching_nothing: list[str]
    """Patterns of `only` that match no tensor of this rank."""
    left_out: bytes = b""
    """One bit per parameter that the checkpoint lists as left out: set if this rank has it."""
    keys: list[str] = []
    """Keys of this rank's state."""
    twice: dict[str, str] = {}
    """Further names of tied weights that the checkpoint has as tensors, too, with the first names."""


class _Together(msgspec.Struct, frozen=True, array_like=True):
    """All ranks' findings."""

    problems: list[Mismatch]
    resized: bool
    untouched: list[Mismatch]
    having: list[tuple[str, str, list[int]]]
    """(further name, first name, ranks that have both) of tied weights that were saved under both names."""
    damage: tuple[int, WireError] | None = None
    """A rank, and the fault of the step that it found."""


def judge_together(
    checkpoint: Checkpoint,
    live: Prepared,
    problems: Problems,
    error: Exception | None,
    group: Group,
    options: RestoreOptions,
) -> bool:
    """Return True if the mesh differs from the saved one.  StateMismatch on every rank if any has a
    problem; the fault of the step itself if a rank found one.  Collective."""
    mine = _Compared(
        problems.found,
        problems.missing,
        _claimed(checkpoint, live),
        sorted({(a.stride, a.size, a.name) for t in live.tensors.values() for _, a in t.placed.cuts or ()},
               key=str),
        None if error is None else WireError.of(error),
        sorted(live.taken),
        problems.unexpected,
        _matching_nothing(checkpoint, live, options),
        _having(checkpoint, live),
        sorted(live.keys),
        problems.twice,
    )  # fmt: skip
    group.asked += 1
    answer = group.ask(
        f"compare/{group.asked}",
        msgspec.msgpack.encode(mine),
        lambda answers: _combine(checkpoint, live, answers, group.size, options),
        awaited=f"compared its state with step {checkpoint.step}",
    )
    together = decode_msgpack(answer, _Together)
    found, untouched = together.problems, together.untouched
    if together.having and not found:
        from holdfast.live.restore.tied import differing_together

        untied = differing_together(checkpoint, problems.twice, together.having, group)
        found, untouched = (untied, untouched) if options.strict else ([], [*untied, *untouched])
    if found:
        # until all have read it: rank 0, which holds the answer for them, may end at once
        with suppress(HoldfastError):  # a rank that is gone is not what is to be told
            group.any(True)
    if error is not None and len(found) == 1:
        raise error
    if together.damage is not None:
        rank, found_there = together.damage
        raise found_there.error(rank=rank, step=checkpoint.step) from error
    if found:
        raise _mismatch(checkpoint, live, found)
    tell_untouched(checkpoint, untouched, group)
    return together.resized


def _mismatch(checkpoint: Checkpoint, live: Prepared, found: list[Mismatch]) -> StateMismatch:
    kinds = {one.kind for one in found}
    named = bool(kinds & {"missing", "unexpected"})
    lines = [one.text for one in found]
    return StateMismatch(
        f"step {checkpoint.step} does not fit the live state:\n  "
        + "\n  ".join(first_of(lines, 50)),
        tuple(lines),
        step=checkpoint.step,
        hint=_refused(checkpoint, live)
        or ("correct the pattern: `holdfast inspect` lists the names" * (kinds == {"pattern"}))
        or WAYS_OUT * (kinds == {"order"})
        or "build the same model and optimizer"
        + (", or pass strict=False: it ignores missing and unexpected names" * named)
        + (OTHER_NAMES * (named and checkpoint.format == "huggingface"))
        + (f"; for parameters without names: {WAYS_OUT}" * ("order" in kinds)),
    )


def tell_untouched(checkpoint: Checkpoint, untouched: list[Mismatch], group: Group) -> None:
    """HoldfastWarning, on rank 0, of everything that a load leaves as it is: missing and unexpected names
    without `strict`, and extra states that no module takes."""
    if not untouched or group.rank:
        return
    lines = [one.text for one in untouched]
    emit("restore.untouched", step=checkpoint.step, names=lines)
    warn_user(
        f"step {checkpoint.step} and the live state have not all in common; what only one side has was, "
        "unless its line says otherwise, left as it is:\n  "
        + "\n  ".join(first_of(lines, MAX_UNTOUCHED))
    )


def _refused(checkpoint: Checkpoint, live: Prepared) -> str:
    """The reasons why the checkpoint does not offer keys that the state asks for."""
    return "; ".join(why for key, why in checkpoint.refused.items() if key in live.keys)


def _claimed(checkpoint: Checkpoint, live: Prepared) -> bytes:
    """One bit per saved tensor: set if this rank has a place for it."""
    bits = np.zeros(len(checkpoint.manifest.tensors), bool)
    found = map(checkpoint.manifest.find, (*live.tensors, *live.aliases, *live.owned))
    bits[[index for index in found if index is not None]] = True
    return np.packbits(bits).tobytes()


def _combine(
    checkpoint: Checkpoint, live: Prepared, answers: list[bytes], size: int, options: RestoreOptions
) -> bytes:
    found = [decode_msgpack(a, _Compared) for a in answers]
    missing = list(dict.fromkeys(n for f in found for n in f.missing))
    problems = list(dict.fromkeys(x for f in found for x in f.found))
    untouched: list[Mismatch] = []
    failed = {rank: f.error for rank, f in enumerate(found) if f.error is not None}
    if not failed:
        names = checkpoint.manifest.aliases.keys() | checkpoint.manifest.by_name.keys()
        untouched = [
            Mismatch("missing", n, _near(n, names) if i < MAX_HINTS else "")
            for i, n in enumerate(missing)
        ]
        untouched += dict.fromkeys(one for f in found for one in f.unexpected)
        untouched += _unexpected(checkpoint, found, live, options)
        untouched += _beside_states(checkpoint, live, options)
        untouched += _left_out_in_vain(checkpoint, found, live, options)
    if options.strict:
        problems += untouched
        untouched = []
    if not failed:
        # some kinds of one layer have states that others can do without
        extra = _unexpected_extras(checkpoint, found, live, options)
        untouched += [x for x in extra if not options.strict or not x.name.endswith(OWN_EXTRA)]
        problems += [x for x in extra if options.strict and x.name.endswith(OWN_EXTRA)]
        problems += _idle_patterns(checkpoint, found, live.keys, options)
    if not problems and len({(f.claimed, *f.keys) for f in found}) > 1:
        from holdfast.live.saving.missing_notices import tell_lacking

        tell_lacking(checkpoint.manifest, [f.claimed for f in found], [f.keys for f in found])
    axes = {a for f in found for a in f.axes}
    resized = _resized(checkpoint, axes, size, options.mesh)
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, f in enumerate(found):
        for both in f.twice.items():
            ranks.setdefault(both, []).append(rank)
    having = [(name, first, some) for (name, first), some in ranks.items()]
    together = _Together(problems, resized, untouched, having, of_the_step(failed))
    return msgspec.msgpack.encode(together)


def _having(checkpoint: Checkpoint, live: Prepared) -> bytes:
    """One bit per parameter that was left out: set if this rank has it, frozen or trained."""
    known = live.frozen.keys() | live.tensors.keys() | live.aliases.keys()
    return np.packbits(np.array([n in known for n in checkpoint.left_out], bool)).tobytes()


def _left_out_in_vain(
    checkpoint: Checkpoint, found: list[_Compared], live: Prepared, options: RestoreOptions
) -> list[Mismatch]:
    """Parameters that the save left out and that no rank has."""
    masks = [np.unpackbits(np.frombuffer(f.left_out, np.uint8)) for f in found]
    having = np.bitwise_or.reduce(masks)
    return [
        Mismatch("left out", name)
        for name, known in zip(checkpoint.left_out, having)
        if not known and name.split(".", 1)[0] in live.keys and options.wanted(name)
    ]


def _near(name: str, names: Iterable[str]) -> str:
    hint = did_you_mean(name, names)
    return f" ({hint})" if hint else ""


def _unexpected(
    checkpoint: Checkpoint, found: list[_Compared], live: Prepared, options: RestoreOptions
) -> list[Mismatch]:
    """Saved tensors under the keys of the state that no rank has a place for."""
    bits = np.zeros(-(-len(checkpoint.manifest.tensors) // 8), np.uint8)
    for f in found:
        bits |= np.frombuffer(f.claimed, np.uint8)
    tensors = checkpoint.manifest.tensors
    out: list[Mismatch] = []
    for i in np.flatnonzero(np.unpackbits(bits, count=len(tensors)) == 0).tolist():
        name = tensors[i].name
        mine = name.split(".", 1)[0] in live.keys and options.wanted(name)
        if mine and name not in live.owned:
            hint = _near(name, live.tensors) if len(out) < MAX_HINTS else ""
            out.append(Mismatch("unexpected", name, hint))
    return out


def _beside_states(
    checkpoint: Checkpoint, live: Prepared, options: RestoreOptions
) -> list[Mismatch]:
    """Values of optimizers deeper in a state, or beside states and groups, in files that torch wrote: no
    live optimizer has a place for them."""
    saved = checkpoint.manifest.extras
    is_torchs = checkpoint.format in ("dcp", "torch") or DCP_NAMES in saved
    if options.only is not None or not is_torchs:
        return []
    trees = {key: saved.get(key) for key in live.keys}
    begins = tuple(f"{k}." for k, t in trees.items() if isinstance(t, dict) and "$optimizer" in t)
    return [Mismatch("unexpected", name) for name in saved if name.startswith(begins)]


def _unexpected_extras(
    checkpoint: Checkpoint, found: list[_Compared], live: Prepared, options: RestoreOptions
) -> list[Mismatch]:
    """Saved extras of modules that no rank has."""
    if options.only is not None:
        return []
    taken = {name for f in found for name in f.taken}
    saved = dict.fromkeys([*checkpoint.manifest.extras, *checkpoint.manifest.per_rank])
    return [
        Mismatch("unexpected", name)
        for name in saved
        if name.endswith(("._extra_state", f".{OWN_EXTRA}"))
        and name.partition(".")[0] in live.keys
        and name not in taken
        and name not in live.owned
    ]


def _matching_nothing(checkpoint: Checkpoint, live: Prepared, options: RestoreOptions) -> list[str]:
    if not options.only:
        return []
    loaded = [n for n in (*live.tensors, *live.aliases, *live.owned) if is_known(checkpoint, n)]
    return matching_nothing(options.only, loaded)


def _idle_patterns(
    checkpoint: Checkpoint, found: list[_Compared], keys: set[str], options: RestoreOptions
) -> list[Mismatch]:
    """Patterns of `only` that match no tensor of any rank: misspelled, or names of extras."""
    names = [n for n in checkpoint.names() if n.split(".", 1)[0] in keys]
    out = []
    for pattern in options.only or ():
        if all(pattern in f.matching_nothing for f in found):
            hint = did_you_mean_pattern(pattern, names)
            given = ", ".join(map(repr, sorted(keys)))
            why = hint or f"the state that was handed over has {given}"
            out.append(Mismatch("pattern", pattern, why))
    return out


def _resized(
    checkpoint: Checkpoint,
    axes: set[tuple[int, int, str | None]],
    size: int,
    known: Mesh | None,
) -> bool:
    """True if the mesh of ranks is another than that of the save."""
    named = [Axis(known.strides[name], n, name) for name, n in known.axes] if known else []
    try:
        mesh = common_mesh([*(Axis(*a) for a in axes), *named], size)[0]
    except LayoutError:
        mesh = Mesh((("rank", size),))
    saved = checkpoint.manifest.layout
    if mesh.world != saved.world:
        return True
    return (
        [n for _, n in mesh.axes] != [n for _, n in saved.axes]
        and len(mesh.axes) > 0
        and (len(saved.axes) > 0)
    )
