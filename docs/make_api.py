"""Make the reference of the public names: one page for each area, from their docstrings.

python docs/make_site.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import holdfast
import holdfast.compression
import holdfast.dcp
import holdfast.extend
import holdfast.store
import holdfast.testing
from holdfast.checkpoint import opened
from holdfast.store import contract

SECTIONS = (
    (
        "saving",
        "Saving and restoring",
        "holdfast",
        (
            "Checkpointer",
            "Every",
            "Auto",
            "Memory",
            "Delta",
            "Keep",
            "Found",
            "Restored",
            "Save",
            "save",
            "load",
            "Rng",
            "ignore",
            "trainable_only",
            "recoverable",
            "kept",
            "HoldfastWarning",
            "silence",
        ),
    ),
    ("compression", "Compressed gradients", "holdfast.compression", ("TopK", "sparse", "rounded")),
    ("converting", "Converting", "holdfast", ("convert", "Converted")),
    ("looking", "Looking", "holdfast", ("open", "steps", "Checkpoint", "TensorInfo", "Box")),
    ("events", "Events", "holdfast.events", ("Event", "subscribe", "listen", "counters")),
    (
        "stores",
        "Stores",
        "holdfast.store",
        ("open_store", "LocalStore", "MemoryStore", "Store", "Bulk", "Entry", "Reader", "Writer"),
    ),
    ("dcp", "DCP", "holdfast.dcp", tuple(holdfast.dcp.__all__)),
    ("frameworks", "Frameworks", "holdfast.sources", tuple(holdfast.sources.__all__)),
    (
        "extending",
        "Extending",
        "holdfast.extend",
        tuple(name for name in holdfast.extend.__all__ if name != "TOP_NAMES"),
    ),
    ("testing", "Testing", "holdfast.testing", tuple(holdfast.testing.__all__)),
    ("errors", "Errors", "holdfast.errors", ()),
)
ELSEWHERE = {
    "TensorInfo": opened.TensorInfo,
    "Store": contract.Store,
    "Entry": contract.Entry,
    "Reader": contract.Reader,
    "Writer": contract.Writer,
}
BRIEF = {"SourceTests", "StoreTests", "LocalStore", "MemoryStore"}
"""Classes whose methods are told elsewhere."""
HIDDEN = {"around", "object_tensors", "file_extras", "index"}
"""Methods that users have no use for."""


def write(folder: Path) -> None:
    """Write a page for each area into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for slug, title, module, names in SECTIONS:
        parts = [part for name in names for part in described(module, name)]
        parts += errors() if slug == "errors" else []
        (folder / f"{slug}.md").write_text("\n".join([f"# {title}\n", *parts]).rstrip() + "\n")


def described(module: str, name: str) -> list[str]:
    """A class with its methods, or a function."""
    thing = ELSEWHERE.get(name) or getattr(import_module(module), name)
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return [f"## `{module}.{name}`\n", "Events and spans by name, since the process began.\n"]
    parts = [f"## `{module}.{name}`\n", f"```text\n{signature(thing, name)}\n```\n", doc(thing)]
    if inspect.isclass(thing) and name not in BRIEF:
        parts += [text for key in vars(thing) for text in member(thing, key)]
    return parts


def member(owner: type, name: str) -> list[str]:
    """One public attribute that has a docstring of its own."""
    value = inspect.getattr_static(owner, name)
    if isinstance(value, staticmethod):
        value = value.__func__
    if name in HIDDEN or name.startswith("_") or not inspect.getdoc(value):
        return []
    if not (inspect.isfunction(value) or isinstance(value, (property, cached_property))):
        return []
    call = signature(value, name) if inspect.isfunction(value) else f".{name}"
    return [f"* `{call}`  \n  {' '.join(doc(value).split())}\n"]


def signature(thing: Any, name: str) -> str:
    """Name and arguments, without `self`, one per line where they are many."""
    is_class = inspect.isclass(thing)
    if is_class and (issubclass(thing, BaseException) or getattr(thing, "_is_protocol", False)):
        return name
    found = inspect.signature(thing)
    arguments = list(rendered(found))
    result = "" if is_class else f" -> {annotation(found.return_annotation)}"
    text = f"{name}({', '.join(arguments)}){result}"
    if len(text) <= 96:
        return text
    return f"{name}(\n" + "".join(f"    {a},\n" for a in arguments) + f"){result}"


def rendered(found: inspect.Signature) -> Iterator[str]:
    """Each parameter as it is written, with the star before those by keyword only."""
    starred = False
    for p in found.parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        text = p.name if p.annotation is p.empty else f"{p.name}: {annotation(p.annotation)}"
        yield text if p.default is p.empty else f"{text} = {p.default!r}"


def annotation(value: Any) -> str:
    """An annotation as it is written."""
    return value if isinstance(value, str) else getattr(value, "__name__", repr(value))


def doc(thing: Any) -> str:
    """The docstring; an indented example becomes a code block."""
    text = (inspect.getdoc(thing) or "") + "\n"

    def fenced(match: re.Match[str]) -> str:
        return f"```text\n{dedent(match[0])}```\n"

    return re.sub(r"(?:^ {4}.*\n)+", fenced, text, flags=re.MULTILINE)


def errors() -> list[str]:
    """The tree and each class's sentence."""
    source = inspect.getdoc(holdfast.errors) or ""
    rows = [
        f"| `{name}` | {' '.join((inspect.getdoc(kind) or '').split())} |"
        for name, kind in vars(holdfast.errors).items()
        if inspect.isclass(kind) and issubclass(kind, holdfast.HoldfastError)
    ]
    return [source, "\n| error | meaning |\n|---|---|", *rows, ""]
