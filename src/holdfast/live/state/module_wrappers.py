"""Names of a model's parts without what wraps them, as torch's `get_model_state_dict` gives them.

DDP, torch.compile, activation checkpointing, Lightning Fabric and others put a module around a module,
and so a component into every name below: `gen.module.0.weight`.  A checkpoint must not depend on that:
it is loaded with another number of ranks, or for inference, without the wrapper.

    Sequential                  names with wrappers         names in a checkpoint
      0: DistributedDataParallel
           module: Linear         0.module.weight             0.weight
      module: Linear              module.weight               module.weight

A name's text does not say which component is a wrapper's: the second `module` is the user's own.  So the
tree of modules is walked, and a component is left out where the module above it is a known wrapper and the
one below is what that wraps.  A class of one's own says so by torch's protocol: `_fqn_modifiers()`, whose
values are the children that do not show in its state_dict.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator

from torch import nn

from holdfast.base.errors import UsageError, need

need("torch", nn.Module, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
_ELSEWHERE = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    *((module, "_FabricModule", "_forward_module") for module in _FABRIC),
)
"""Wrappers that exist only where their module was imported: module, class, the child that it wraps."""
SECOND = "_original_module"
"""A further child of Fabric's wrapper: the very module that its first one leads to."""
TAKEN_OUT = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Torch's wrappers' names for what they wrap; earlier versions took these out of names by their text."""
MAX_DEPTH = 1000


class Wrappers:
    """Tells which children of a module are what it wraps.  Asks each class once: make one per walk."""

    def __init__(self) -> None:
        self._kinds: dict[type, str] = {
            nn.parallel.DistributedDataParallel: "module",
            nn.DataParallel: "module",
        }
        for module, name, child in _ELSEWHERE:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None:
                self._kinds[kind] = child
        self._known: dict[type, str | None] = {}

    def inner(self, module: nn.Module) -> Collection[str]:
        """Names of the children that a module wraps: none of a module that is no wrapper."""
        kind = type(module)
        if kind not in self._known:
            found = (child for base, child in self._kinds.items() if issubclass(kind, base))
            self._known[kind] = next(found, None)
        child = self._known[kind]
        if child is not None:
            return (child, SECOND) if child == "_forward_module" else (child,)
        if hasattr(kind, "_fqn_modifiers") or "_fqn_modifiers" in module.__dict__:
            return tuple(module._fqn_modifiers().values())
        return ()

    def wrapped(self, module: nn.Module) -> nn.Module | None:
        """The module inside one that is a wrapper and nothing else; None for any other, and for FSDP1's."""
        children = self.inner(module)
        child = self._known[type(module)]
        if child is None or child == "_fsdp_wrapped_module":
            return None
        more = module._parameters or module._buffers or module._modules.keys() - set(children)
        return None if more else module._modules.get(child)


def has_wrappers(root: nn.Module) -> bool:
    """True if any module of a tree wraps another, or has a name from `TAKEN_OUT`."""
    wrappers = Wrappers()
    stack, seen = [root], {id(root)}
    while stack:
        module = stack.pop()
        below = module._modules
        if below:  # whatever wraps something has it among these
            if wrappers.inner(module) or not TAKEN_OUT.isdisjoint(below.keys()):
                return True
            more = [m for m in below.values() if m is not None and id(m) not in seen]
            seen.update(map(id, more))
            stack += more
    return False


def parts(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a tree with what names of its tensors begin with: `h.0.`, or nothing.

    In the order of `named_modules`; one that is there twice appears under each name.
    """
    for prefix, _, module in paths(root):
        yield prefix, module


def first_names(root: nn.Module, few: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield as `parts` does, but only these modules of a tree, each under its first name."""
    if few <= {root}:
        yield from (("", part) for part in few)
        return
    left = set(few)
    for prefix, part in parts(root):
        if part in left:
            left.remove(part)
            yield prefix, part


def paths(root: nn.Module, *, second: bool = False) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (prefix, path, module): as `parts`, and what names begin with where wrappers are left in them.
    `second`: Fabric's modules by both paths that lead to them."""
    wrappers = Wrappers()
    stack = [("", "", root, 0)]
    while stack:
        prefix, path, module, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise UsageError(f"a module is inside itself: {path[:80]}...")
        yield prefix, path, module
        if not module._modules:
            continue
        inner = wrappers.inner(module)
        below = [
            (prefix if name in inner else f"{prefix}{name}.", f"{path}{name}.", child, depth + 1)
            for name, child in module._modules.items()
            if child is not None and (second or name != SECOND or name not in inner)
        ]
        stack += reversed(below)


class Names:
    """Names of entries that a module gives itself in its state_dict(), without what wrappers in it add.

    Some wrappers show in these names (`torch.compile`, DDP) and some take themselves out of them
    (activation checkpointing, Fabric).  So a name is followed through the tree of modules: a component that
    is no child of a wrapper belongs to what that wraps.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._wrappers = Wrappers()

    def plain(self, entry: str) -> str:
        """The name of an entry as it is in a checkpoint, beginning at the module."""
        parts, module = entry.split("."), self._root
        kept: list[str] = []
        for number, part in enumerate(parts):
            while part not in module._modules and (inside := self._inside(module)) is not None:
                module = inside
            below = module._modules.get(part)
            if below is None:
                return ".".join(kept + parts[number:])
            if part not in self._wrappers.inner(module):
                kept.append(part)
            module = below
        return ".".join(kept)

    def _inside(self, module: nn.Module) -> nn.Module | None:
        """The module in a wrapper; of Fabric's two, the one whose names its state_dict() has."""
        inner = self._wrappers.inner(module)
        if not inner:
            return None
        return module._modules.get(SECOND if SECOND in inner else next(iter(inner)))


def check_names(key: str, root: nn.Module) -> None:
    """UsageError if two tensors or states of a module have one name once wrappers are left out."""
    if not has_wrappers(root):
        return
    owner: dict[str, tuple[str, object]] = {}
    for prefix, path, module in paths(root):
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        own: dict[str, object] = {**module._parameters, **{n: module._buffers[n] for n in kept}}
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            own["_extra_state"] = module
        for name, value in own.items():
            other, known = owner.setdefault(prefix + name, (path + name, value))
            if known is not value and known is not None and value is not None:
                raise UsageError(
                    f"{key}.{other} and {key}.{path}{name} would both be called {key}.{prefix}{name}: "
                    "what wraps a module does not show in names",
                    hint="give one of them another name: what a wrapper itself has must not be called as "
                    "something inside it is",
                )
