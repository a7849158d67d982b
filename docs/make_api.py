"""Make the reference of the public names: one page for each area, from their docstrings.

python docs/make_site.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
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
            "RunStatus",
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
    (
        "looking",
        "Looking",
        "holdfast",
        ("open", "steps", "wait_newer", "Checkpoint", "TensorInfo", "Box"),
    ),
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
WIDTH = 46
"""Columns of a signature: as many as a phone shows."""
ERRORS = [
    name
    for name, kind in vars(holdfast.errors).items()
    if inspect.isclass(kind) and issubclass(kind, holdfast.HoldfastError)
]
GENERAL = re.compile(rf"(Collective|Blocks|Fails|Raises|{'|'.join(ERRORS)})\b")
"""Beginnings of sentences that are about the whole call, behind what is said of an argument."""


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
    parts = [f"## `{module}.{name}`\n", *called(thing, name)]
    if inspect.isclass(thing) and name not in BRIEF:
        parts += [text for key in vars(thing) for text in member(thing, key)]
    return parts


def called(thing: Any, name: str) -> list[str]:
    """How a class or a function is called, what it does, and its arguments as a table."""
    about, rows = arguments(thing)
    parts = [f"```text\n{signature(thing, name)}\n```\n", about]
    if rows:
        head = "| argument | type | meaning |\n|---|---|---|"
        parts.append("\n".join([head, *(f"| {' | '.join(row)} |" for row in rows), ""]))
    return parts


def member(owner: type, name: str) -> list[str]:
    """One public attribute that has a docstring of its own."""
    value = inspect.getattr_static(owner, name)
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if name in HIDDEN or name.startswith("_") or not inspect.getdoc(value):
        return []
    if isinstance(value, (property, cached_property)):
        return [f"### `.{name}`\n", doc(value)]
    return [f"### `{name}`\n", *called(value, name)] if inspect.isfunction(value) else []


# -- signatures -----------------------------------------------------------------------------------


def signature(thing: Any, name: str) -> str:
    """Name, arguments and result; the types of arguments are in the table below."""
    if is_bare(thing):
        return name
    found = inspect.signature(thing)
    result = "" if inspect.isclass(thing) else f" -> {annotation(found.return_annotation)}"
    text = f"{name}({', '.join(rendered(found))}){result}"
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_long_words=False)


def is_bare(thing: Any) -> bool:
    """Whether a class is not made by users: an error, or a protocol."""
    is_error = inspect.isclass(thing) and issubclass(thing, BaseException)
    return is_error or getattr(thing, "_is_protocol", False)


def rendered(found: inspect.Signature) -> Iterator[str]:
    """Each parameter with its default, and the star before those by keyword only."""
    starred = False
    for p in parameters(found):
        starts = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}
        if p.kind is p.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        text = f"{starts.get(p.kind, '')}{p.name}"
        yield text if p.default is p.empty else f"{text}={p.default!r}"


def parameters(found: inspect.Signature) -> list[inspect.Parameter]:
    return [p for p in found.parameters.values() if p.name not in ("self", "cls")]


def annotation(value: Any) -> str:
    """An annotation as it is written."""
    return value if isinstance(value, str) else getattr(value, "__name__", repr(value))


# -- arguments ------------------------------------------------------------------------------------


def arguments(thing: Any) -> tuple[str, list[tuple[str, str, str]]]:
    """The docstring without what it says of single arguments, and these: name, type, meaning.

    A docstring says it by "`name`: ...", up to the next such name or the end of the paragraph, or in a
    sentence that names the argument, which stays where it is, too.
    """
    text = inspect.getdoc(thing) or ""
    taken = [] if is_bare(thing) else parameters(inspect.signature(thing))
    if not any(p.annotation is not p.empty for p in taken) or not text:
        return doc(thing), []
    names = {p.name for p in taken}
    kept, told = [], {}
    for paragraph in text.split("\n\n"):
        rest, found = of_arguments(paragraph, names)
        told.update(found)
        kept += [rest] if rest else []
    sentences = [s for part in kept if not part.startswith("    ") for s in in_sentences(part)]
    inner = [s for words in told.values() for s in in_sentences(words)]
    rows = []
    for p in taken:
        named = [s for s in [*sentences, *inner] if re.search(rf"`{p.name}[`=(]", s)]
        named = [s for s in named if not GENERAL.match(s)]
        named = [clause for s in named for clause in about_one(p.name, s)]
        words = (told.get(p.name) or " ".join(named)).replace("|", "\\|")
        rows.append((f"`{p.name}`", kind_of(p), words))
    return fenced("\n\n".join(kept) + "\n"), rows


def about_one(name: str, sentence: str) -> list[str]:
    """The clauses of a sentence that are about an argument: `a` is this; `b` that."""
    clauses = re.split(r"; (?=`)", sentence)
    return [c for c in clauses if len(clauses) == 1 or c.startswith(f"`{name}`")] or [sentence]


def of_arguments(paragraph: str, names: set[str]) -> tuple[str, dict[str, str]]:
    """A paragraph without what it says of single arguments, and that by their names."""
    if paragraph.startswith("    "):
        return paragraph, {}
    kept, told, name = [], {}, None
    for sentence in in_sentences(paragraph):
        begins = re.match(r"`(\w+)`(: )?", sentence)
        is_named = begins is not None and begins[1] in names
        if begins and is_named and begins[2]:
            name, words = begins[1], sentence[begins.end() :]
            told[name] = words[:1].upper() + words[1:]
        elif name is None or is_named or GENERAL.match(sentence):
            kept.append(sentence)
        else:
            told[name] += f" {sentence}"
    return (" ".join(kept), told) if told else (paragraph, {})


def in_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph."""
    flat = re.sub(r";\s+(?=`\w+`: )", ".  ", " ".join(paragraph.split()))
    return re.split(r"(?<=[.)]) +(?=[A-Z`])", flat)


def kind_of(p: inspect.Parameter) -> str:
    """The type and the default of a parameter, as they may stand in a table."""
    type_ = "" if p.annotation is p.empty else annotation(p.annotation)
    text = " or ".join(f"`{part}`" for part in top_parts(type_)) if type_ else ""
    needed = p.default is p.empty or p.default is None
    return text if needed else f"{text}; default `{p.default!r}`"


def top_parts(type_: str) -> list[str]:
    """`A | B[C | D]` -> ["A", "B[C or D]"]."""
    parts, depth = [""], 0
    for letter in type_:
        depth += (letter in "[(") - (letter in "])")
        if letter == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += " or " if letter == "|" else letter
    return [" ".join(part.split()) for part in parts]


def doc(thing: Any) -> str:
    """The docstring; an indented example becomes a code block."""
    return fenced((inspect.getdoc(thing) or "") + "\n")


def fenced(text: str) -> str:
    """A text whose indented examples are code blocks."""

    def block(match: re.Match[str]) -> str:
        return f"```text\n{textwrap.dedent(match[0])}```\n"

    return re.sub(r"(?:^ {4}.*\n)+", block, text, flags=re.MULTILINE)


def errors() -> list[str]:
    """The tree and each class's sentence."""
    source = inspect.getdoc(holdfast.errors) or ""
    rows = [
        f"| `{name}` | {' '.join((inspect.getdoc(getattr(holdfast.errors, name)) or '').split())} |"
        for name in ERRORS
    ]
    return [source, "\n| error | meaning |\n|---|---|", *rows, ""]
