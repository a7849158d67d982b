"""The private names of others that the code of `src` uses, by `ast`."""

from __future__ import annotations

import ast
import json
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "holdfast"

NAMES_IN_FILES = frozenset({"_extra_state"})
"""Keys of state_dicts, which torch's documentation of `get_extra_state` leaves open and files contain."""
DOCUMENTED = frozenset({"_fields", "_replace"})
"""Of named tuples."""
OURS = {
    "core/format/extras.py": {"_frozen"},
    "extend.py": {"_notices", "_noting", "_restart", "_save_and_stop", "_stop"},
    "live/saving/operation.py": {"_conclude"},
    "live/state/customised.py": {"_own_extra_state"},
    "policy/tuning.py": {"_s"},
    "session/steering.py": {"_load", "_stall"},
}
"""Names that are holdfast's own, used outside of the class that has them, or ends of names in files."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def members(tree: ast.AST) -> set[str]:
    """The names that the classes of a module give to their members."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    found.add(one.name)
                elif isinstance(one, (ast.Assign, ast.AnnAssign)):
                    found |= {n.id for n in ast.walk(one) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
    return found


def own_names(tree: ast.AST) -> set[str]:
    """All names that a module defines."""
    found = members(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def said(tree: ast.AST) -> Iterator[str]:
    """All attributes, imported names and identifiers in texts, with dots as they stand there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.removesuffix(".py")
            if all(part.isidentifier() for part in text.split(".")):
                yield text


def of_others(tree: ast.AST) -> set[str]:
    """The private names in a module that are not its own; of `super()` all are."""
    inside, own, found = members(tree), own_names(tree), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of = node.value
            inherited = isinstance(of, ast.Call) and ast.unparse(of) == "super()"
            if inherited or node.attr not in inside:
                found.add(node.attr)
    texts = {text for text in said(tree) if "." in text or text not in own}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for text in texts - attributes:
        if not text.startswith(("holdfast.", "__future__")):
            found |= set(filter(is_private, text.split(".")))
    return found - NAMES_IN_FILES - DOCUMENTED


def used() -> dict[str, set[str]]:
    """Private names of others by module of `src/holdfast`, but for those that files contain."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        key = path.relative_to(SRC).as_posix()
        if key.startswith("formats/"):
            continue
        names = of_others(parsed(path)) - OURS.get(key, set())
        found[key] = {name for name in names if not name.startswith("_holdfast")}
    return found


def asked_for() -> set[str]:
    """The names that the code asks `need` for, also by way of a constant or a variable."""
    found: set[str] = set()
    for path in SRC.rglob("*.py"):
        tree = parsed(path)
        values: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for name in (
                    n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)
                ):
                    values.setdefault(name, set()).update(texts(node.value))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) in ("need", "_of"):
                for one in node.args[1:]:
                    found |= texts(one)
                    names = (n.id for n in ast.walk(one) if isinstance(n, ast.Name))
                    found.update(*(values.get(name, ()) for name in names))
    return found


def _called(node: ast.Call) -> str:
    """The last name of what is called: `need` of `errors.need(...)`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def overridden() -> set[tuple[str, str]]:
    """The private members that a class of holdfast has from a class of somebody else's, and replaces: its
    module and the name.  Imports all modules whose packages are installed."""
    import holdfast

    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        with suppress(ImportError):
            if not module.name.endswith("__main__"):
                import_module(module.name)
    found = set()
    modules = [module for name, module in sys.modules.items() if name.startswith("holdfast.")]
    mine = {kind for module in modules for kind in vars(module).values() if _is_ours(kind)}
    for kind in mine:
        bases = [*filter(_is_of_a_package, (*kind.__mro__, *_mixed_into(kind)))]
        names = {*filter(is_private, vars(kind))} - {"_abc_impl"}
        file = kind.__module__.removeprefix("holdfast.").replace(".", "/")
        found |= {(file, name) for name in names if any(name in vars(base) for base in bases)}
    return found


def _is_ours(kind: object) -> bool:
    return isinstance(kind, type) and str(kind.__module__).startswith("holdfast.")


def _is_of_a_package(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("holdfast", *sys.stdlib_module_names)


def _mixed_into(kind: type) -> list[type]:
    """The classes before which a class is put when it is used."""
    names = {
        "holdfast.integrations.transformers._Holdfast": ("transformers", "Trainer"),
        "holdfast.integrations.lightning._Saving": ("lightning.pytorch.strategies", "DDPStrategy"),
    }.get(f"{kind.__module__}.{kind.__qualname__}")
    return [] if names is None else list(getattr(import_module(names[0]), names[1]).__mro__)


def texts(node: ast.AST) -> set[str]:
    every = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {one for one in every if isinstance(one, str)}


if __name__ == "__main__":
    print(json.dumps(sorted(overridden())))
