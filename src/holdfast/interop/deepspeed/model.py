"""A model file: buffers, frozen and tied parameters, which no optimizer holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from holdfast.errors import FormatError
from holdfast.interop.deepspeed.tensors import cut
from holdfast.interop.deepspeed.trees import Tree
from holdfast.interop.deepspeed.zero import Shape, even_cuts
from holdfast.interop.foreign import Foreign
from holdfast.interop.torchfile import TensorRef

MAX_DIMS = 64


def shapes(tree: Tree) -> list[dict[str, Shape]] | None:
    """Shapes of each optimizer group's parameters, in the order in which they were flattened."""
    groups = tree.maybe("param_shapes", list)
    return None if groups is None else [checked(tree, group) for group in groups]


def checked(tree: Tree, group: Any) -> dict[str, Shape]:
    """Shapes by name, as they were read."""
    if not isinstance(group, dict):
        raise FormatError("malformed param_shapes", key=tree.path)
    for name, shape in group.items():
        sound = isinstance(name, str) and isinstance(shape, tuple) and len(shape) <= MAX_DIMS
        if not sound or not all(type(n) is int and 0 <= n < 1 << 60 for n in shape):
            raise FormatError(f"{name!r} has the shape {shape!r}", key=tree.path)
    return group


def buffers(tree: Tree) -> set[str]:
    """Names of the buffers, which are no parameters."""
    return set(tree.maybe("buffer_names", list) or ())


def parameters(tree: Tree, module: dict[str, Any]) -> dict[str, TensorRef]:
    """The tensors of `module` that are no buffers, in order; of tied ones the first."""
    others = buffers(tree) | tied(tree, module, ()).keys()
    return {
        name: ref
        for name, ref in module.items()
        if isinstance(ref, TensorRef) and name not in others
    }


def tied(tree: Tree, module: dict[str, Any], trained: Iterable[str]) -> dict[str, str]:
    """Return, for each tied name, the other name under which its values are kept."""
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
    """True if a model file is one of many, each of a rank's own."""
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
        found.append(cut(f"model.{name}", shape, even_cuts({name: shape}, len(trees))[name], refs))
    return found


def _fragment(tree: Tree, name: str) -> TensorRef:
    ref = tree.get("frozen_param_fragments", dict).get(name)
    if not isinstance(ref, TensorRef):
        raise FormatError(f"no part of the frozen parameter {name!r}", key=tree.path)
    return ref
