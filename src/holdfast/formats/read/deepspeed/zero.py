"""ZeRO's partitions: the places of parameters in flat arrays.

DeepSpeed flattens the parameters of an optimizer group and cuts the result over the data-parallel ranks.

    stages 1, 2   all parameters end to end, then one cut into equal parts: a part may begin in the middle
                  of a parameter; what the last parts lack is padding
    stage 3       each parameter by itself into ceil(n / ranks) elements per rank, the last ones padded; the
                  parts that a rank has of a (sub)group's parameters lie end to end

Either way a parameter is a list of `FlatCut`s, which also apply to its master and to every elementwise
state of the optimizer.

Experts have two numberings: a rank numbers its own from 0; files and holdfast number those of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from holdfast.base.errors import FormatError
from holdfast.formats.read.deepspeed.trees import Tree
from holdfast.formats.read.sections import Locator
from holdfast.formats.read.torchfile import TensorRef

Shape = tuple[int, ...]
ZERO_MASTER = "fp32"


@dataclass(frozen=True, slots=True)
class FlatCut:
    """Elements `start..stop` of a flattened parameter, at element `at` of the flat array of `rank`."""

    rank: int
    at: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatGroup:
    """A parameter group cut over ranks: flat arrays by state, and states of the whole group."""

    shapes: dict[str, Shape]
    cuts: dict[str, list[FlatCut]]
    states: dict[str, list[TensorRef]]
    """Flat arrays of the ranks, by state; `fp32`: the master."""
    scalars: dict[str, Any]
    """States with one number for the whole group: a 0-dim TensorRef, or plain."""
    opaque: dict[str, TensorRef]
    """Tensors that belong to no single parameter, such as quantisation constants of a part."""
    hyper: int
    """Index of its optimizer group."""

    @cached_property
    def sources(self) -> dict[str, list[Locator]]:
        """Locators of each rank's flat array, by state."""
        return {state: [ref.source for ref in refs] for state, refs in self.states.items()}


def flat_cuts(shapes: dict[str, Shape], gaps: Sequence[int], part: int) -> dict[str, list[FlatCut]]:
    """Cuts of parameters laid end to end, with `gaps` after them, into parts of `part` elements."""
    found: dict[str, list[FlatCut]] = {}
    begin = 0
    for (name, shape), gap in zip(shapes.items(), gaps):
        end = begin + prod(shape)
        found[name] = [
            FlatCut(rank, low - rank * part, low - begin, high - begin)
            for rank in range(begin // part, -(-end // part))
            for low, high in [(max(begin, rank * part), min(end, (rank + 1) * part))]
            if low < high
        ]
        begin = end + gap
    return found


def even_cuts(shapes: dict[str, Shape], ranks: int) -> dict[str, list[FlatCut]]:
    """Cuts of parameters that are each divided over `ranks`."""
    found: dict[str, list[FlatCut]] = {}
    at = 0
    for name, shape in shapes.items():
        size = prod(shape)
        part = -(-size // ranks)
        found[name] = [
            FlatCut(rank, at, rank * part, min(size, (rank + 1) * part))
            for rank in range(ranks)
            if rank * part < size
        ]
        at += part
    return found


def stages_1_2(
    shapes: Sequence[dict[str, Shape]], ranks: Sequence[Tree], config: Mapping[str, Any]
) -> list[FlatGroup]:
    """The groups of a ZeRO-1 or 2 optimizer; `ranks` are its files, by data-parallel rank.

    A group of experts is cut over fewer ranks: those that hold the same experts.
    """
    counts = ranks[0].maybe("partition_count", list) or [len(ranks)] * len(shapes)
    _same(len(counts), len(shapes), "partition counts", ranks[0].path)
    flats = []
    for g, these in enumerate(shapes):
        parts = counts[g]
        if len(ranks) % parts:
            raise FormatError(
                f"{len(ranks)} ranks, group {g} is cut over {parts}", key=ranks[0].path
            )
        blocks = len(ranks) // parts
        for block in range(blocks):
            data_first = config.get("use_data_before_expert_parallelism")
            mine = ranks[block * parts :][:parts] if data_first else ranks[block::blocks]
            if blocks > 1 and not all(map(is_expert, these)):
                raise FormatError(
                    f"group {g} is cut over {parts} ranks, and not of MoE", key=mine[0].path
                )
            names = expert_numbers(these, block) if blocks > 1 else {n: n for n in these}
            named = {names[n]: shape for n, shape in these.items()}
            flats.append(_end_to_end(named, mine, g, len(shapes)))
            if not _zero_config(config).get(
                "round_robin_gradients"
            ):  # its slices do not list these
                _check_slices(flats[-1], list(these), mine, g)
    return flats


def _zero_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("zero_optimization")
    return found if isinstance(found, dict) else {}


def _end_to_end(shapes: dict[str, Shape], ranks: Sequence[Tree], g: int, groups: int) -> FlatGroup:
    """One group, its parameters end to end over `ranks`."""
    first = ranks[0]
    masters = [t.get("single_partition_of_fp32_groups", list) for t in ranks]
    said = [t.maybe("param_alignment_paddings", list) for t in ranks]
    if any(s != said[0] for s in said):
        raise FormatError("paddings differ from other ranks'", key=first.path)
    gaps = said[0] or [[0] * len(shapes)] * groups
    paddings = [t.maybe("group_paddings", list) or [0] * groups for t in ranks]
    for found in (*masters, gaps, *paddings):
        _same(len(found), groups, "groups", first.path)
    refs = [_flat(t, m[g]) for t, m in zip(ranks, masters)]
    _same(len(gaps[g]), len(shapes), "paddings", first.path)
    total = sum(map(prod, shapes.values())) + sum(gaps[g])
    part = refs[0].shape[0]
    _check_parts(ranks, refs, part, total)
    cuts = flat_cuts(shapes, gaps[g], max(part, 1))
    lengths = [{r.shape[0], r.shape[0] + p[g]} for r, p in zip(refs, paddings)]
    return sorted_group(ranks, g, g, shapes, cuts, refs, lengths)


def _check_slices(flat: FlatGroup, names: Sequence[str], ranks: Sequence[Tree], g: int) -> None:
    """FormatError unless the slices that each rank lists equal the cuts."""
    cuts = dict(zip(names, flat.cuts.values()))
    for rank, tree in enumerate(ranks):
        listed = tree.maybe("param_slice_mappings", list)
        if listed is None or any(not isinstance(d, dict) for d in listed) or len(listed) <= g:
            continue
        said = {n: (a.get("start"), a.get("numel")) for n, a in listed[g].items()}
        mine = {n: (c.at, c.stop - c.start) for n, cs in cuts.items() for c in cs if c.rank == rank}
        if said != mine:
            odd = next((n for n in (*mine, *said) if said.get(n) != mine.get(n)), "?")
            raise FormatError(
                f"the slice of {odd!r} is {said.get(odd)} here (start, elements), by the shapes in the "
                f"model file it is {mine.get(odd)}",
                key=tree.path,
                hint="files of two saves: copy the folder again, whole",
            )


def _check_parts(ranks: Sequence[Tree], refs: list[TensorRef], part: int, total: int) -> None:
    """FormatError unless parts have equal lengths, except for padding cut off at the end."""
    for rank, (tree, ref) in enumerate(zip(ranks, refs)):
        lean = max(0, min(part, total - rank * part))
        if ref.shape[0] not in (lean, part) and not (part >= total and rank):
            raise FormatError(
                f"rank {rank}'s part of {total} elements has {ref.shape[0]}; {lean} were expected",
                key=tree.path,
                hint="the files are of different saves, or of another number of ranks",
            )
    if part * len(ranks) < total:
        raise FormatError(
            f"{len(ranks)} parts of {part} elements do not hold {total}", key=ranks[0].path
        )


def stage_3(shapes: Sequence[dict[str, Shape]], ranks: Sequence[Tree]) -> list[FlatGroup]:
    """The sub-groups of a ZeRO-3 optimizer."""
    masters = [t.get("fp32_flat_groups", list) for t in ranks]
    for tree, found in zip(ranks, masters):
        _same(len(found), len(shapes), "sub-groups", tree.path)
    owners = _owners(ranks[0], len(shapes))
    flats = []
    for g, these in enumerate(shapes):
        refs = [_flat(t, m[g]) for t, m in zip(ranks, masters)]
        size = sum(-(-prod(shape) // len(ranks)) for shape in these.values())
        for rank, (tree, ref) in enumerate(zip(ranks, refs)):
            if ref.shape[0] != size:
                raise FormatError(
                    f"rank {rank}'s part of sub-group {g} has {ref.shape[0]} elements; {size} expected",
                    key=tree.path,
                    hint="parts on NVMe are not in these files" if not ref.shape[0] else None,
                )
        cuts = even_cuts(these, len(ranks))
        flats.append(sorted_group(ranks, g, owners[g], these, cuts, refs, [{size}] * len(ranks)))
    return flats


def _owners(tree: Tree, count: int) -> list[int]:
    """The optimizer group of each sub-group."""
    groups = param_groups(tree)
    found = {i: g for g, group in enumerate(groups) for i in group.get("params") or ()}
    if sorted(found) != list(range(count)):
        raise FormatError(f"the groups list {len(found)} of {count} sub-groups", key=tree.path)
    return [found[i] for i in range(count)]


def base(tree: Tree) -> Any:
    """The state_dict of the optimizer that ZeRO wraps; in elastic checkpoints a list of states."""
    key = "base_optimizer_state" if "base_optimizer_state" in tree.root else "optimizer_state_dict"
    return tree.get(key, object)


def param_groups(tree: Tree) -> list[dict[str, Any]]:
    """The hyper-parameters of the wrapped optimizer's groups; none in an elastic checkpoint."""
    found = tree.root if "param_groups" in tree.root else base(tree)
    groups = found.get("param_groups") if isinstance(found, dict) else []
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise FormatError("the optimizer's param_groups are malformed", key=tree.path)
    return groups


def flat_states(tree: Tree, group: int) -> dict[str, Any]:
    """Return the states that the wrapped optimizer keeps for one flat array, by name."""
    found = base(tree)
    states = found.get("state") if isinstance(found, dict) else dict(enumerate(found))
    state = states.get(group, {}) if isinstance(states, dict) else None
    if not isinstance(state, dict):
        raise FormatError(f"the optimizer's state of group {group} is malformed", key=tree.path)
    return {str(k): v for k, v in state.items()}


def _flat(tree: Tree, ref: Any) -> TensorRef:
    if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or not ref.contiguous:
        raise FormatError("a part that is no flat array", key=tree.path)
    return ref


def _same(found: int, expected: int, what: str, path: str) -> None:
    if found != expected:
        raise FormatError(f"{found} {what} where {expected} were expected", key=path)


def sorted_group(
    ranks: Sequence[Tree],
    index: int,
    hyper: int,
    shapes: dict[str, Shape],
    cuts: dict[str, list[FlatCut]],
    masters: list[TensorRef],
    lengths: Sequence[set[int]],
) -> FlatGroup:
    """Make a group, with the optimizer's states sorted into elementwise, scalar and opaque ones."""
    flat = FlatGroup(shapes, cuts, {ZERO_MASTER: masters}, {}, {}, hyper)
    found = [flat_states(tree, index) for tree in ranks]
    for name in dict.fromkeys(name for state in found for name in state):
        lacking = next((t.path for t, state in zip(ranks, found) if name not in state), None)
        if lacking:
            raise FormatError(f"group {index} has no {name!r} here, other ranks do", key=lacking)
        values = [state[name] for state in found]
        if all(_fits(v, n) for v, n in zip(values, lengths)):
            flat.states[name] = values
        elif _agree(ranks, index, name, values):
            flat.scalars[name] = values[0]
        else:
            flat.opaque.update({f"group{index}.rank{r}.{name}": v for r, v in enumerate(values)})
    for name, refs in flat.states.items():
        if len({ref.dtype for ref in refs}) > 1:
            raise FormatError(f"{name!r} of group {index} has several dtypes", key=ranks[0].path)
    return flat


def _fits(value: Any, lengths: set[int]) -> bool:
    """True if a state is a flat array of one of these lengths."""
    flat = isinstance(value, TensorRef) and len(value.shape) == 1 and value.contiguous
    return flat and value.shape[0] in lengths


def _agree(ranks: Sequence[Tree], group: int, name: str, values: list[Any]) -> bool:
    """True if a state is one number, the same on every rank.  FormatError if `step` differs."""
    if any(isinstance(v, TensorRef) and v.shape for v in values):
        return False
    if name == "step" and group:  # only the first group's step counts
        return True
    texts = [repr(t.values(v) if isinstance(v, TensorRef) else v) for t, v in zip(ranks, values)]
    odd = next((i for i, text in enumerate(texts) if text != texts[0]), None)
    if odd is not None and name == "step":
        raise FormatError(
            f"the optimizer is at another step than in {ranks[0].path}",
            key=ranks[odd].path,
            hint="the files are of two saves: copy the folder again, whole",
        )
    return odd is None


# -- experts --------------------------------------------------------------------------------------


_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(\..*)")


def is_expert(name: str) -> bool:
    """True if a parameter is an expert's."""
    return _EXPERT.fullmatch(name) is not None


def expert_numbers(names: Iterable[str], rank: int) -> dict[str, str]:
    """Map a rank's names to names with the experts' numbers among all expert-parallel ranks.

    `names`: all names of the rank; every rank has equally many experts of a layer.
    """
    matches = {name: _EXPERT.fullmatch(name) for name in names}
    local: dict[str, set[str]] = {}
    for match in filter(None, matches.values()):
        local.setdefault(match[1], set()).add(match[2])
    return {
        name: f"{m[1]}{rank * len(local[m[1]]) + int(m[2])}{m[3]}" if m else name
        for name, m in matches.items()
    }


def experts_of_rank(names: Iterable[str], rank: int, ranks: int) -> list[str]:
    """Return the names, numbered among all ranks, of one rank's experts."""
    matches = [m for m in map(_EXPERT.fullmatch, names) if m]
    numbers: dict[str, set[int]] = {}
    for m in matches:
        numbers.setdefault(m[1], set()).add(int(m[2]))
    return [m[0] for m in matches if int(m[2]) * ranks // len(numbers[m[1]]) == rank]
