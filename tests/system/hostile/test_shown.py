"""What names and messages of anybody's checkpoint do to a terminal, a pipe, or who reads JSON: nothing."""

from __future__ import annotations

import json
import re
import sys
import warnings
from io import StringIO
from pathlib import Path

import msgspec
import pytest
import torch

import holdfast
from cli.calling import call
from holdfast.checkpoint import notes
from holdfast.cli.screen import say, table
from holdfast.cli.words import good
from holdfast.core.checkpoint.names import manifest_key, read_manifest
from holdfast.core.format.manifest import decode_manifest, encode_manifest
from holdfast.errors import FormatError, HoldfastError, RankErrors, printable, warn_user
from holdfast.store import LocalStore

EVIL = "w\x1b]0;owned\x07\x1b[2J\x1b[91mx\x9b31m\r\nerror: fake\u202e\u200b"
SEEN = printable(EVIL)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_printable_stays() -> None:
    text = "Gewicht × 3 – 層.0"
    assert printable(text) is text
    assert SEEN == r"w\x1b]0;owned\x07\x1b[2J\x1b[91mx\x9b31m\r\nerror: fake\u202e\u200b"
    assert printable("a\nb\t\udc80", "\n") == "a\nb\\t\\udc80"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_and_tables(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    out = Terminal() if is_terminal else StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "5000")
    say(f"{good('ok')} {EVIL}\ufdd02\ufdd0", "bold")
    table(("name", "state"), [(EVIL, good(EVIL))])
    ours = out.getvalue()
    if is_terminal:
        ours = re.sub(r"\x1b\[(0|1|2|32)m", "", ours)
    assert all(line.isprintable() for line in ours.split("\n"))
    first, second, _, row, _ = ours.split("\n")
    assert first + second.strip() == f"ok {SEEN.replace(chr(92) + 'n', '')}\\ufdd02\\ufdd0"
    assert second.startswith("  error: fake"), "no line but the first begins at the margin"
    assert row.split("  ") == ["", SEEN, SEEN]


@pytest.mark.parametrize("width", ["30", "5000"])
def test_styles_in_names_of_others_are_none(monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", width)
    name = "w" * 40 + "\ufdd032\ufdd1EVIL"
    say(name)
    table(("name", "state"), [(name, "x")])
    assert "EVIL" in out.getvalue() and "\x1b[32m" not in out.getvalue()


def test_folded_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "30")
    table(("name", "state"), [(EVIL, EVIL)])
    assert "\x07" not in out.getvalue() and "\x1b]" not in out.getvalue()


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Another system's checkpoint, whose names are its own affair."""
    values = {EVIL: torch.ones(3), "epoch": 5, f"{EVIL}k": {EVIL: EVIL}}
    torch.save(values, tmp_path / "m.pt")
    return tmp_path / "m.pt"


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "diff"])
def test_verbs(foreign: Path, verb: str) -> None:
    paths = [foreign] * (2 if verb == "diff" else 1)
    for text in call(verb, *paths)[1:]:
        assert all(line.isprintable() for line in text.split("\n"))
    raw = call(verb, *paths, "--json")[1]
    assert all(line.isprintable() for line in raw.split("\n"))
    if verb == "inspect":
        assert EVIL in str(json.loads(raw).values()) or EVIL in {
            t["name"] for t in json.loads(raw)["tensors"]
        }


def test_errors_and_warnings() -> None:
    error = HoldfastError(f"no tensor {EVIL}", key=EVIL, hint=EVIL)
    assert str(error).replace("\n", "").isprintable() and error.key == EVIL
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_user(EVIL, hint=EVIL)
    assert str(found[0].message).replace("\n", "").isprintable()
    _, _, said = call("inspect", f"/no/{EVIL}")
    assert [line for line in said.split("\n") if line.startswith("error:")] == [said.split("\n")[0]]
    assert all(line.isprintable() for line in said.split("\n"))


# ------------------------------------------------------------------ names in our own format

PLACES = {
    "name": lambda m: {"tensors": tuple(msgspec.structs.replace(t, name=EVIL) for t in m.tensors)},
    "state": lambda m: {
        "tensors": tuple(msgspec.structs.replace(t, state="\x9b") for t in m.tensors)
    },
    "alias": lambda m: {"aliases": {"\x7f": m.tensors[0].name}},
    "axis": lambda _: {"mesh": (("a\x00", 1),)},
    "extras": lambda _: {"extras": {EVIL: 1}},
    "per rank": lambda m: {"per_rank": {EVIL: "fresh"}},
    "metric": lambda _: {"metrics": {EVIL: 1.0}},
    "software": lambda _: {"software": {EVIL: "1"}},
    "created": lambda _: {"created": EVIL},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_manifest_whose_names_have_control_characters(tmp_path: Path, place: str) -> None:
    holdfast.save(tmp_path, {"w": torch.ones(3), "n": 5}, step=1)
    store = LocalStore(tmp_path)
    sound = read_manifest(store, 1)
    bad = msgspec.structs.replace(sound, **PLACES[place](sound))
    with pytest.raises(FormatError, match=r"has a control character"):
        decode_manifest(encode_manifest(bad), manifest_key(1))


def test_texts_of_values_may_have_any_character(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"w": torch.ones(3), "n": {EVIL: EVIL}, "層 é": 1}, step=1)
    assert holdfast.open(tmp_path).extras["n"] == {EVIL: EVIL}


@pytest.mark.parametrize("state", [{EVIL: torch.ones(3)}, {"w": torch.ones(3), EVIL: 5}])
def test_what_no_reader_would_take_is_not_saved(tmp_path: Path, state: dict[str, object]) -> None:
    with pytest.raises(RankErrors, match="a name with a control character cannot be saved"):
        holdfast.save(tmp_path, state, step=1)
    assert holdfast.steps(tmp_path) == []


def test_a_foreign_checkpoint_with_such_names_is_not_converted(
    foreign: Path, tmp_path: Path
) -> None:
    code, _, said = call("convert", foreign, tmp_path / "to")
    assert code == 2 and "a name with a control character cannot be saved" in said


def test_notes_with_control_characters(tmp_path: Path) -> None:
    for bad in (
        notes.Notes(labels={EVIL: 1}),
        notes.Notes(metrics={1: notes.Measured(1, {EVIL: 2.0})}),
    ):
        with pytest.raises(FormatError, match="has a control character"):
            notes.decode_notes(notes.encode_notes(bad))


def test_names_with_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    header = rb'{"\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(data)
    for verb in ("inspect", "diff"):
        raw = call(verb, *[tmp_path] * (2 if verb == "diff" else 1), "--json")[1]
        assert verb == "diff" or "model.\\ud800" in {t["name"] for t in json.loads(raw)["tensors"]}
