"""Every argument and option of every verb, with values that cannot be meant: exit code 2, no traceback."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import holdfast
from cli.calling import call
from holdfast.cli.options import Option
from holdfast.cli.verbs import VERBS

MANY_DIGITS = "9" * 5000
LONG = "x" * 300
PATHS = ("", "s3://", "fiel://x", "dpc:run", "a\udc00\ud800b")
STEPS = (
    "run@",
    "run@-1",
    "run@1.5",
    "run@²",
    "run@٣",
    f"run@{10**15}",
    f"run@{MANY_DIGITS}",
    f"run@{LONG}",
)
NO_STEPS = ("run@x",)
"""Words that could be labels, and are none."""
INTEGERS = ("", "x", "1.5", MANY_DIGITS)
NUMBERS = ("", "x", "nan")
SIZES = ("x", "-1", "1e9", "nan", "0")

CASES: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "ls": (("URL",), {"URL": PATHS, "--columns": ("", "loss", "tensors,los")}),
    "inspect": (("TARGET",), {"TARGET": (*PATHS, *STEPS), "NAME": ("", "modle.weight", "x*", "[", LONG)}),
    "verify": (("TARGET",), {"TARGET": (*PATHS, *STEPS)}),
    "diff": (("A", "B"), {"A": (*PATHS, *STEPS), "B": (*PATHS, *STEPS), "--only": ("", "modle.*")}),
    "plan": (
        ("TARGET", "--mesh=dp=2"),
        {
            "TARGET": (*PATHS, *STEPS),
            "--mesh": ("", "dp", "dp=0", "dp=-1", "dp=x", "=2", "dp=2,", "dp=2,dp=2", "dp=²",
                       f"dp={10**30}", f"dp={MANY_DIGITS}"),
            "--rules": ("", "nofile", "run"), "--let": ("x=2", "x"), "--rank": (*INTEGERS, "-1", "2"),
            "--nodes": (*INTEGERS, "-1", "0", "3"), "--nodes=2 --redundancy": ("", "partiy", "rs(0)"),
            "--nodes=2 --node-mtbf-hours": (*NUMBERS, "0", "-1", "inf"),
            "--nodes=2 --repair-minutes": (*NUMBERS, "0", "-1", "inf"),
        },
    ),
    "convert": (
        ("TARGET", "DST"),
        {
            "TARGET": (*PATHS, *STEPS), "DST": PATHS, "--to": ("", "hugingface"),
            "--from": ("dpc",), "--to=torch --key": ("", "modle"), "--to=torch --dtype": ("", "bfoat16"),
            "--rules": ("", "nofile", "run"), "--max-file": SIZES, "--memory": (*SIZES, "1"),
        },
    ),
    "copy": (
        ("TARGET", "DST"),
        {
            "TARGET": (*PATHS, *STEPS), "DST": (*PATHS, "run", "torch:x"), "--all": ("x",),
            "--log": ("x",), "--dry-run": ("x",),
        },
    ),
    "prune": (
        ("URL", "--keep-last=1"),
        {
            "URL": PATHS, "--keep-last": (*INTEGERS, "0", "-1", str(10**30)),
            "--keep-every": (*INTEGERS, "0", "-1", str(10**30)),
            "--keep-best": ("", "loss", "loss:0", "loss:x", "loss:1:low", ":1"),
            "--keep-newer": ("", "2", "2w", "-1d", "x", "9" * 400 + "d"),
        },
    ),
    "pin": (
        ("URL", "1", "best"),
        {"URL": PATHS, "1": ("", "1.5", "-1", "9" * 400), "best": ("", " ", "a\nb", "x" * 101)},
    ),
    "log": (("URL",), {"URL": PATHS}),
    "replay": (("URL", "DST", "--to=2"), {"URL": PATHS, "DST": PATHS, "--to": INTEGERS}),
    "simulate": (
        ("8",),
        {
            "8": ("", "x", "0", "1.5", str(10**30)), "--days": (*NUMBERS, "0", "-1", "inf", "1e300"),
            "--device-mtbf-hours": (*NUMBERS, "0", "-1", "inf"), "--node-share": (*NUMBERS, "-1", "2"),
            "--shape": (*NUMBERS, "0", "-1", "99"), "--trace": ("", "nofile", "run"),
            "--overhead": (*NUMBERS, "0", "1", "-1"), "--devices-per-node": (*INTEGERS, "0", "-1"),
            "--step-s": (*NUMBERS, "0", "-1", "inf"), "--state": SIZES, "--record": SIZES[:-1],
            "--node-storage": SIZES, "--storage": SIZES, "--stall-s": (*NUMBERS, "-1", "inf"),
            "--record-stall": (*NUMBERS, "-1", "2"), "--restart-s": (*NUMBERS, "-1", "inf"),
            "--detect-s": (*NUMBERS, "-1", "inf"), "--enter-s": (*NUMBERS, "-1", "inf"),
            "--standby": (*NUMBERS, "-1", "1.5"), "--repair-s": (*NUMBERS, "-1", "inf"),
            "--seed": (*INTEGERS, "-1"),
        },
    ),
    "prove": (
        ("COMMAND",),
        {
            "COMMAND": ("train.py --root=s3://bucket/run",), "--steps": (*INTEGERS, "0", "2"),
            "--kill-at": (*INTEGERS, "0"), "--kill": ("", "two"), "--ranks": (*INTEGERS, "0"),
            "--state": ("", "s3://bucket/run", "/not/in/the/command"), "--seed": (*INTEGERS, "-1"),
            "--tolerance": (*NUMBERS, "-1", "2"), "--patience": (*NUMBERS, "0", "-1"),
        },
    ),
    "completion": (("bash",), {"bash": ("", "bsh")}),
    "agent": (
        ("status",),
        {
            "status": ("", "stauts"), "--job": ("x",), "--host": ("x",), "--budget": (*SIZES, "1GB"),
            "--free": (None,), "--tls": (None,),
        },
    ),
}  # fmt: skip
"""By verb: how it is called, and for each argument values that are refused.  Options before an option's
name go with it."""
FINE = {
    ("agent", "--job"): "of a job that is gone",
    ("prove", "--resume-with"): "any words",
    ("prove", "--then"): "any command",
    ("simulate", "--plot"): "any path, tried by tests of it",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of a run."""
    path = tmp_path_factory.mktemp("cli_arguments")
    for step in (1, 2):
        holdfast.save(path / "run", {"model": nn.Linear(2, 2), "other": torch.ones(2)}, step=step)
    return path


@pytest.mark.parametrize(
    ("verb", "option"),
    [(verb, option) for verb, (_, options) in CASES.items() for option in options],
)
def test_a_value_that_cannot_be_meant_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str, option: str
) -> None:
    monkeypatch.chdir(folder)
    words, options = CASES[verb]
    for value in options[option]:
        code, _, err = call(verb, *_command(words, option, value))
        assert code == 2, f"{verb} {option} {value!r:.60}: exit {code}: {err[:500]}"
        assert "rror: " in err or "required" in err, err
        assert not (folder / "out").exists()


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff", "plan", "convert", "copy"])
def test_a_label_that_does_not_exist_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(folder)
    for value in NO_STEPS:
        words = _command(CASES[verb][0], "A" if verb == "diff" else "TARGET", value)
        code, _, err = call(verb, *words)
        assert code == 1 and f"has the label {value[4:]!r}" in err and "steps there: 1, 2" in err
        assert not (folder / "out").exists()


def _command(words: tuple[str, ...], option: str, value: str | None) -> list[str]:
    before = {"URL": "run", "TARGET": "run", "A": "run@1", "B": "run@2", "DST": "out"}
    *others, name = option.split(" ")
    found = [value if word == name else before.get(word, word) for word in words]
    found = [word for word in found if word is None or not word.startswith(f"{name}=")]
    if name.startswith("--"):
        found += [*others, name if value is None else f"{name}={value}"]
    elif name not in words:
        found.append(value)
    return [word for word in found if word is not None]


def test_every_option_of_every_verb_is_tried() -> None:
    missing = []
    for verb in VERBS:
        run = VERBS[verb].run
        tried = {option.split(" ")[-1] for option in CASES[verb][1]}
        for name, p in inspect.signature(run, eval_str=True).parameters.items():
            kind, declared = get_args(p.annotation)
            option = None
            if isinstance(declared, Option):
                option = declared.name or f"--{name.replace('_', '-')}"
            if kind is bool or (verb, option) in FINE:
                continue
            if option is not None and option not in tried:
                missing.append(f"{verb} {option}")
            if option is None and not any(not o.startswith("--") for o in CASES[verb][1]):
                missing.append(f"{verb} {name}")
    assert not missing
