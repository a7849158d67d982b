"""Ranks of a checkpoint: pipeline stages, their tensor-parallel ranks, and the data-parallel ranks of each.

`mp_rank` counts the tensor-parallel ranks of all stages.  Without pipeline and tensor parallelism
there is one shard, `mp_rank_00`.

A rank's model file also lists buffers, frozen and tied parameters, which no optimizer holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from holdfast.base.errors import FormatError, NotFound
from holdfast.core.store import Store
from holdfast.formats.read.deepspeed import other_state, zero
from holdfast.formats.read.deepspeed.tags import TagFiles
from holdfast.formats.read.deepspeed.tensors import flat_tensor
from holdfast.formats.read.deepspeed.trees import Tree, read_tree
from holdfast.formats.read.deepspeed.zero import FlatGroup, Shape, even_cuts
from holdfast.formats.read.foreign import Foreign
from holdfast.formats.read.torchfile import TensorRef
from holdfast.formats.read.unpickle import UnknownInstance


@dataclass(frozen=True)
class ModelRank:
    """A model-parallel rank: its model file, and the optimizer files of its data-parallel ranks."""

    pp: int
    tp: int
    tree: Tree
    module: dict[str, Any]
    """The state_dict; in a pipeline that of the layers."""
    optim: Sequence[Tree]
    flats: Sequence[FlatGroup]

    @property
    def trained(self) -> dict[str, FlatGroup]:
        """The group that holds each parameter, by name."""
        return {name: flat for flat in self.flats for name in flat.shapes}


def shards(store: Store, files: TagFiles) -> list[ModelRank]:
    """Read all model-parallel ranks.  FormatError for files of different saves; NotFound."""
    trees = _trees(store, files)
    tp = _tensor_ranks(trees[0], files, len(trees))
    layers = _layers(store, files, tp)
    cut = param_shapes(trees[0]) is not None and not files.universal
    optims = [_ranks(store, files, mp) if files.optim or cut else [] for mp in range(len(trees))]
    found = []
    named = [_named(tree, optim) for tree, optim in zip(trees, optims)]
    modules = _modules(layers, named, tp)
    for mp, (tree, optim) in enumerate(zip(trees, optims)):
        module = modules[mp] if tree.root.get("module") is None else tree.get("module", dict)
        module = module | _experts(store, files, mp)
        every = {n: v for one in modules[mp % tp :: tp] for n, v in one.items()} | module
        found.append(ModelRank(mp // tp, mp % tp, tree, module, optim, _flats(tree, every, optim)))
    _check_alike(found)
    return found


def _trees(store: Store, files: TagFiles) -> list[Tree]:
    """The model files, one per model-parallel rank; under ZeRO-3 its first data-parallel rank's."""
    first = {mp: min(at for at in files.model if at[1] == mp) for _, mp in files.model}
    for mp in range(max(first) + 1):
        if mp not in first:
            raise NotFound("this model file is missing", key=_renamed(files.model, "mp_rank", mp))
        if first[mp][0]:
            raise NotFound("rank 0's model file is missing", key=files.model[first[mp]])
    return [read_tree(store, files.model[first[mp]]) for mp in sorted(first)]


def _renamed(files: dict[tuple[int, int], str], what: str, number: int) -> str:
    """Name of a missing file, from that of a present one."""
    width = 2 if what == "mp_rank" else 1
    return re.sub(rf"{what}_\d+", f"{what}_{number:0{width}}", files[min(files)])


def _tensor_ranks(tree: Tree, files: TagFiles, ranks: int) -> int:
    """Number of tensor-parallel ranks that a pipeline stage has."""
    said = tree.maybe("checkpoint_parallel_dimensions", dict)
    tp = said.get("tp_degree") if said else len({t for _, t in files.layers}) or ranks
    if (
        type(tp) is not int
        or tp < 1
        or ranks % tp
        or (said and said.get("pp_degree") != ranks // tp)
    ):
        raise FormatError(
            f"{ranks} model files, where the first tells of {said or f'{tp} tensor-parallel ranks'}",
            key=tree.path,
            hint="files are missing, or of an older save into the same folder",
        )
    return tp


def _layers(store: Store, files: TagFiles, tp: int) -> dict[tuple[int, int], Tree]:
    for layer, t in files.layers:
        for other in range(tp):
            if (layer, other) not in files.layers or t >= tp:
                raise FormatError(
                    f"layer {layer} is not there of each of {tp} tensor-parallel ranks",
                    key=files.layers[layer, t],
                )
    return {at: read_tree(store, path) for at, path in files.layers.items()}


def _experts(store: Store, files: TagFiles, mp: int) -> dict[str, Any]:
    """Return what the expert files of a model-parallel rank hold."""
    found: dict[str, Any] = {}
    for _, path in sorted((at, path) for at, path in files.experts.items() if at[2] == mp):
        found |= read_tree(store, path).root
    return found


def _named(tree: Tree, optim: Sequence[Tree]) -> dict[str, Shape | None]:
    """Names in a shard's files: parameters, with shapes if stated, and buffers."""
    found: dict[str, Shape | None] = dict.fromkeys(buffer_names(tree))
    shapes = param_shapes(tree)
    for group in shapes or ():
        found |= group
    for one in optim if shapes is None else ():
        found |= {name: None for names in one.get("param_slice_mappings", list) for name in names}
    return found


def _modules(
    layers: dict[tuple[int, int], Tree], named: Sequence[dict[str, Shape | None]], tp: int
) -> list[dict[str, Any]]:
    """The layers' tensors of each model-parallel rank, by their names in the model."""
    found: list[dict[str, Any]] = [{} for _ in named]
    for (layer, t), file in sorted(layers.items()):
        mp, prefix = _owner(layer, file, named, range(t, len(named), tp))
        found[mp] |= {f"{prefix}{name}": value for name, value in file.root.items()}
    return found


def _owner(
    layer: int, file: Tree, named: Sequence[dict[str, Shape | None]], ranks: Sequence[int]
) -> tuple[int, str]:
    """The rank that owns a layer, and the prefix of its names: its number, or `tied_modules.<key>`.

    A layer that no rank names (all of it frozen) counts as the first's.
    """
    for mp in ranks:
        if any(f"{layer}.{name}" in named[mp] for name in file.root):
            return mp, f"{layer}."
    for mp in ranks:
        keys = {n.split(".")[1] for n in named[mp] if n.startswith("tied_modules.")}
        for prefix in (f"tied_modules.{key}." for key in sorted(keys)):
            if all(
                named[mp].get(f"{prefix}{name}", ()) in (None, getattr(ref, "shape", None))
                for name, ref in file.root.items()
            ):
                return mp, prefix
    return ranks[0], f"{layer}."


def _flats(tree: Tree, module: dict[str, Any], optim: Sequence[Tree]) -> list[FlatGroup]:
    if not optim:
        return []
    shapes = param_shapes(tree)
    if shapes is None:
        shapes = _mapped(optim, module)
    stage = _stage(optim[0])
    if stage == 3:
        return zero.stage_3(shapes, optim)
    return zero.stages_1_2(shapes, optim, tree.maybe("ds_config", dict) or {})


def _mapped(optim: Sequence[Tree], module: dict[str, Any]) -> list[dict[str, Shape]]:
    """Shapes by group from the slices that the ranks list, for a model file without shapes."""
    found: list[dict[str, Shape]] = []
    for tree in optim:
        for g, names in enumerate(tree.get("param_slice_mappings", list)):
            if g == len(found):
                found.append({})
            for name in names:
                ref = module.get(name)
                if not isinstance(ref, TensorRef):
                    raise FormatError(f"the model has no {name!r}", key=tree.path)
                found[g][name] = ref.shape
    return found


def _ranks(store: Store, files: TagFiles, mp: int) -> list[Tree]:
    """The optimizer files of a model-parallel rank, by data-parallel rank.  NotFound; FormatError."""
    mine = {at: path for at, path in files.optim.items() if at[1] == mp}
    if not mine:
        raise NotFound(
            f"the *_optim_states.pt files of model-parallel rank {mp} are missing: ZeRO keeps the "
            "optimizer and the fp32 weights in them"
        )
    first = read_tree(store, mine[min(mine)]).below("optimizer_state_dict")
    count = _partitions(first)
    for dp in range(max(count, max(mine)[0] + 1)):
        if (dp, mp) not in mine:
            raise NotFound(f"rank {dp} of {count} is missing", key=_renamed(mine, "pp_rank", dp))
        if dp >= count:
            raise FormatError(
                f"a part of rank {dp}, but the checkpoint is of {count} ranks",
                key=mine[dp, mp],
                hint="it is of an older save into the same folder: move it away",
            )
    others = [
        read_tree(store, mine[dp, mp]).below("optimizer_state_dict") for dp in range(1, count)
    ]
    return [first, *others]


def _partitions(tree: Tree) -> int:
    """Number of ranks that the optimizer is cut over; the largest if groups differ."""
    said: Any = tree.get("partition_count", object)
    counts: list[int] = said if isinstance(said, list) else [said]
    if not counts or not all(type(n) is int and 0 < n < 1 << 24 for n in counts):
        raise FormatError(f"partition_count is {said!r}", key=tree.path)
    return max(counts)


def _stage(tree: Tree) -> int:
    found = tree.root.get("zero_stage", 1)  # BF16_Optimizer does not state it
    stage = found.args[0] if isinstance(found, UnknownInstance) and found.args else found
    if stage not in (1, 2, 3):
        raise FormatError(f"ZeRO stage {stage!r}", key=tree.path)
    return int(stage)


def _check_alike(found: Sequence[ModelRank]) -> None:
    """FormatError if counters or options show files of different saves."""
    first = found[0]
    for shard in found:
        if len(shard.trained) != sum(len(flat.shapes) for flat in shard.flats):
            raise FormatError("a parameter is in two groups", key=shard.tree.path)
        if shard.tree.root.get("ds_autoep_layers") or shard.tree.root.get("autoep_layers"):
            raise FormatError("experts of AutoEP, which are not read yet", key=shard.tree.path)
    for shard in found[1:]:
        a, b = (s.tree.root.get("global_steps") for s in (first, shard))
        if a != b:
            raise _other_save(shard.tree.path, first.tree.path, f"global_steps {b}, not {a}")
    for shard in found:
        said = [other_state.signature(tree) for tree in shard.optim]
        for tree, options in zip(shard.optim, said):
            if options != said[0]:
                raise _other_save(tree.path, shard.optim[0].path, "other options or counters")


def _other_save(path: str, first: str, what: str) -> FormatError:
    return FormatError(
        f"{what}, as in {first}", key=path, hint="files of two saves: copy the folder again, whole"
    )


# -- model files ----------------------------------------------------------------------------------


_MAX_DIMS = 64


def param_shapes(tree: Tree) -> list[dict[str, Shape]] | None:
    """Shapes of each optimizer group's parameters, in the order in which they were flattened."""
    groups = tree.maybe("param_shapes", list)
    return None if groups is None else [checked_shapes(tree, group) for group in groups]


def checked_shapes(tree: Tree, group: Any) -> dict[str, Shape]:
    """Shapes by name, as they were read."""
    if not isinstance(group, dict):
        raise FormatError("malformed param_shapes", key=tree.path)
    for name, shape in group.items():
        sound = isinstance(name, str) and isinstance(shape, tuple) and len(shape) <= _MAX_DIMS
        if not sound or not all(type(n) is int and 0 <= n < 1 << 60 for n in shape):
            raise FormatError(f"{name!r} has the shape {shape!r}", key=tree.path)
    return group


def buffer_names(tree: Tree) -> set[str]:
    """Names of the buffers."""
    return set(tree.maybe("buffer_names", list) or ())


def parameter_refs(tree: Tree, module: dict[str, Any]) -> dict[str, TensorRef]:
    """The parameters of `module` in order, tied ones once, under their first name."""
    others = buffer_names(tree) | tied(tree, module, ()).keys()
    return {
        name: ref
        for name, ref in module.items()
        if isinstance(ref, TensorRef) and name not in others
    }


def tied(tree: Tree, module: dict[str, Any], trained: Iterable[str]) -> dict[str, str]:
    """Map each tied name to the name that has its values."""
    said = tree.maybe("shared_params", dict) or {}
    trained = list(trained)
    names = dict.fromkeys([*trained, *module])
    found = {str(a): str(n) for a, n in said.items() if n in names and a != n}
    first: dict[tuple[str, int, Shape], str] = {}
    for name in names:
        ref = module.get(name)
        if isinstance(ref, TensorRef) and all(ref.shape) and name not in found:
            known = first.setdefault((ref.path, ref.offset, ref.shape), name)
            if known != name:
                found[name] = known
    if found.keys() & {*found.values(), *trained}:
        raise FormatError("shared_params ties parameters in a circle", key=tree.path)
    return found


def is_stage_3(tree: Tree) -> bool:
    """True if each rank has a model file of its own (ZeRO-3)."""
    return tree.path.rpartition("/")[2].startswith("zero_pp_rank_")


def frozen_3(trees: Sequence[Tree], frozen: dict[str, Shape]) -> list[Foreign]:
    """Frozen parameters of ZeRO-3: each is cut over the ranks by itself."""
    found = []
    for name, shape in frozen.items():
        refs = [_fragment(t, name) for t in trees]
        part = -(-prod(shape) // len(trees))
        for tree, ref in zip(trees, refs):
            if ref.shape != (part,) or ref.dtype != refs[0].dtype or not ref.contiguous:
                raise FormatError(
                    f"{name!r}: a part of shape {ref.shape}, expected {(part,)}", key=tree.path
                )
        found.append(
            flat_tensor(f"model.{name}", shape, even_cuts({name: shape}, len(trees))[name], refs)
        )
    return found


def _fragment(tree: Tree, name: str) -> TensorRef:
    ref = tree.get("frozen_param_fragments", dict).get(name)
    if not isinstance(ref, TensorRef):
        raise FormatError(f"no part of the frozen parameter {name!r}", key=tree.path)
    return ref
