"""Opening a DeepSpeed checkpoint: its files, and the tensors that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.errors import FormatError, NotFound, UsageError
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.manifest import owner_of
from holdfast.core.store import Store
from holdfast.formats.read.deepspeed import other_state, stage0, tensors, universal
from holdfast.formats.read.deepspeed.grid import (
    ModelRank,
    buffer_names,
    checked_shapes,
    frozen_3,
    is_stage_3,
    param_shapes,
    parameter_refs,
    shards,
    tied,
)
from holdfast.formats.read.deepspeed.tags import (
    TagFiles,
    folders,
    latest,
    marked_folder,
    step_of_tag,
    tag_files,
)
from holdfast.formats.read.deepspeed.tensors import INFO, Layouts
from holdfast.formats.read.deepspeed.trees import Tree, read_tree
from holdfast.formats.read.deepspeed.zero import FlatGroup, Shape, experts_of_rank, is_expert
from holdfast.formats.read.foreign import Foreign, foreign
from holdfast.formats.read.torchfile import TensorRef
from holdfast.formats.read.unpickle import MALFORMED


def open_deepspeed(store: Store, step: int | None = None) -> Checkpoint:
    """A tag of a DeepSpeed directory as a checkpoint: the newest, or that of a step.

    FormatError or Corrupt, naming the file; NotFound if there is no such step.
    """
    folder = _folder(store, step)
    try:
        return _open(store, folder)
    except MALFORMED as error:
        raise FormatError(f"malformed: {error}", key=folder or None) from error


def steps_deepspeed(store: Store) -> list[int]:
    """The steps that the tags of a directory are of, ascending."""
    return sorted({_step(store, folder) for folder in folders(store)})


def _folder(store: Store, step: int | None) -> str:
    if step is None:
        return latest(store)
    if (newest := marked_folder(store)) is not None and _step(store, newest) == step:
        return newest
    found = [f for f in folders(store) if _step(store, f) == step]
    found = [f for f in found if not f.endswith("_universal/")] or found
    if not found:
        raise NotFound(f"{store.url} is a deepspeed checkpoint; it has no step {step}")
    if len(found) > 1:
        names = ", ".join(f.rstrip("/") for f in found)
        raise UsageError(
            f"step {step} is that of {names}", hint="give the folder of one of them as the path"
        )
    return found[0]


def _step(store: Store, folder: str) -> int:
    """Return the step in the tag's name, else the one in its first model file."""
    named = step_of_tag(store, folder)
    if named is not None:
        return named
    files = tag_files(store, folder)
    return _counted(read_tree(store, files.model[min(files.model)]))


def _counted(tree: Tree) -> int:
    steps = tree.maybe("global_steps", int)
    return steps if steps is not None and 0 <= steps < 1 << 62 else 0


@dataclass
class _TagContents:
    """The files and ranks of a tag, and the tensors, extras and aliases collected from them."""

    store: Store
    folder: str
    files: TagFiles
    grid: Sequence[ModelRank]
    tensors: list[Foreign] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, tensors: Sequence[Foreign], values: dict[str, Any]) -> None:
        """Add tensors and extras; extras of one key are joined."""
        self.tensors += tensors
        for key, value in values.items():
            self.extras[key] = {**self.extras[key], **value} if key in self.extras else value

    def tie(self, ties: dict[str, str]) -> None:
        """Add aliases of parameters and of their optimizer states."""
        if not ties:
            return
        names: dict[str, list[str]] = {}
        for alias, name in ties.items():
            names.setdefault(name, []).append(alias)
        for t in self.tensors:
            key, _, rest_ = t.name.partition(".")
            param = owner_of(rest_, t.state)
            for alias in names.get(param, ()) if key in ("model", "optim") else ():
                self.aliases[f"{key}.{alias}{rest_.removeprefix(param)}"] = t.name
        if "optim" in self.extras:
            other_state.tie(self.extras["optim"], names)


def _open(store: Store, folder: str) -> Checkpoint:
    files = tag_files(store, folder)
    found = _TagContents(store, folder, files, shards(store, files))
    first = found.grid[0]
    found.add(*other_state.of_model(first.tree))
    if files.universal:
        trained = _add_universal(found)
    else:
        trained = _add_trained(found) if first.flats else _add_whole(found)
    trained |= _add_frozen(found)
    _add_others(found, trained)
    found.add([], other_state.engine(found.extras))
    named = step_of_tag(store, folder)
    return foreign(
        store,
        found.tensors,
        step=_counted(first.tree) if named is None else named,
        software={"deepspeed": str(first.tree.root.get("ds_version", "unknown"))},
        extras=found.extras,
        aliases=found.aliases,
    )


def _layouts(grid: Sequence[ModelRank], shapes: dict[str, list[Shape]]) -> Layouts:
    """Return layouts from the tensor-parallel info of the user's model, or of DeepSpeed."""
    trees = [grid[0].tree, *grid[0].optim[:1]]
    for tree in trees:
        info = tree.maybe(INFO, dict)
        if info:
            return Layouts(info, tree.path, shapes)
    return Layouts(None, trees[0].path, shapes)


def _columns(
    grid: Sequence[ModelRank], name: str, flats: Sequence[dict[str, FlatGroup]]
) -> list[list[FlatGroup]]:
    """For each stage that has a parameter, the groups that hold it on its tensor-parallel ranks."""
    stages: dict[int, list[FlatGroup]] = {}
    for shard, held in zip(grid, flats):
        if name in held:
            stages.setdefault(shard.pp, []).append(held[name])
    ranks = grid[-1].tp + 1
    for pp, column in stages.items():
        if len(column) != ranks:
            raise FormatError(f"stage {pp} has {len(column)} of {ranks} parts of {name!r}")
    return [stages[pp] for pp in sorted(stages)]


def _add_trained(found: _TagContents) -> set[str]:
    """Add the parameters and states that ZeRO has cut over the ranks; return the parameters' names."""
    grid = found.grid
    flats = [shard.trained for shard in grid]
    names = dict.fromkeys(name for held in flats for name in held)
    columns = {name: _columns(grid, name, flats) for name in names}
    shapes = {name: [f.shapes[name] for f in held[0]] for name, held in columns.items()}
    layouts = _layouts(grid, shapes)
    for name, held in columns.items():
        if any([f.shapes[name] for f in column] != shapes[name] for column in held):
            raise FormatError(f"{name!r} has other shapes in another pipeline stage")
        found.tensors += tensors.trained(layouts.of(name), held)
    stages = [shard for shard in grid if shard.tp == 0]
    found.add([], {"optim": other_state.optim_extra([(s.optim[0], s.flats) for s in stages])})
    found.add(*other_state.of_optimizer(grid[0].optim[0]))
    for mp, shard in enumerate(grid):
        found.add(
            *other_state.opaque(shard.optim[0], shard.flats, f"mp{mp}." if len(grid) > 1 else "")
        )
    return set(names)


def _add_universal(found: _TagContents) -> set[str]:
    """Add the universal format's parameters and states; return the parameters' names."""
    said: list[dict[str, Shape]] = []
    store, files = found.store, found.files.universal
    for shard in found.grid:
        for g, group in enumerate(param_shapes(shard.tree) or ()):
            said[g : g + 1] = [{**said[g], **group} if g < len(said) else group]
    known = {name: shape for group in said for name, shape in group.items()}
    tree = read_tree(store, found.folder + universal.STATE)
    held, numbers = universal.trained_parameters(store, files, known)
    more, other_numbers = universal.subgroup_steps(tree, said, files)
    held, numbers = held + more, numbers | other_numbers
    universal.check_steps({name: files[name] for name in known or files}, held, numbers)
    found.add(held, {"optim": universal.universal_optim_extra(tree, said, numbers)})
    found.add(*other_state.of_optimizer(tree))
    return set(known or files)


def _add_whole(found: _TagContents) -> set[str]:
    """Add a complete model file, without ZeRO; return the parameters that have a master."""
    grid, files = found.grid, found.files
    tree = grid[0].tree
    if tree.maybe("optimizer", dict) is None:
        return set()
    if len(grid) > 1:
        raise FormatError(
            "an optimizer without ZeRO, of several model-parallel ranks: its states have no names",
            key=tree.path,
            hint="save with zero_optimization stage 1",
        )
    params = parameter_refs(tree, grid[0].module)
    ranks = sorted({rank for rank, _ in files.expert_optim})
    if ranks != list(range(len(ranks))):
        raise NotFound(f"of expert-parallel ranks only {ranks} have files", key=tree.path)
    held: list[Foreign] = []
    for rank in ranks or [0]:
        file = read_tree(found.store, files.expert_optim[rank, 0]) if ranks else tree
        mine = set(experts_of_rank(params, rank, len(ranks))) if ranks else set()
        own = {n: r for n, r in params.items() if n in mine or not is_expert(n)}
        more, values = stage0.optimizer(file, own, rank)
        if rank:
            stage0.join(found.extras["optim"], values["optim"])
        else:
            found.add([], values)
        held += more
    found.tensors += held
    return {t.name.partition(".")[2] for t in held if t.name.startswith("model.")}


def _add_frozen(found: _TagContents) -> set[str]:
    """Add frozen parameters of ZeRO-3, which are cut over the ranks; return their names."""
    model, tree = found.files.model, found.grid[0].tree
    shapes = tree.maybe("frozen_param_shapes", dict)
    if not shapes or not is_stage_3(tree):
        return set()
    if len(found.grid) > 1:
        raise FormatError("frozen parameters of ZeRO-3 under tensor parallelism", key=tree.path)
    trees = [tree] + [read_tree(found.store, model[at]) for at in sorted(model)[1:]]
    found.tensors += frozen_3(trees, checked_shapes(tree, shapes))
    return set(shapes)


def _add_others(found: _TagContents, trained: set[str]) -> None:
    """Add the other tensors of `module`: buffers, frozen and tied parameters."""
    grid, done = found.grid, set(trained)
    for first in (shard for shard in grid if shard.tp == 0):
        column = [shard for shard in grid if shard.pp == first.pp]
        buffers = buffer_names(first.tree)
        ties = tied(first.tree, first.module, trained)
        for name, value in first.module.items():
            if name in done or name in ties:
                continue
            done.add(name)
            if isinstance(value, TensorRef):
                found.tensors.append(_other(grid, name, column, name in buffers))
            else:
                found.add([], {f"model.{name}": first.tree.encode(value)})
        found.tie(ties)


def _other(
    grid: Sequence[ModelRank], name: str, column: Sequence[ModelRank], is_buffer: bool
) -> Foreign:
    """A buffer, taken from the first rank, or a frozen parameter."""
    tree = column[0].tree
    refs = [ref for s in column if isinstance(ref := s.module.get(name), TensorRef)]
    if is_buffer:
        return refs[0].foreign(f"model.{name}", "buffer")
    if refs[0].shape == (0,) and is_stage_3(tree):
        raise FormatError(f"no file holds the values of {name!r}", key=tree.path)
    if len(column) == 1:
        return refs[0].foreign(f"model.{name}", "param")
    if len(refs) != len(column):
        raise FormatError(f"not all tensor-parallel ranks hold {name!r}", key=tree.path)
    layouts = _layouts(grid, {name: [ref.shape for ref in refs]})
    return tensors.viewed(layouts.of(name), refs)
