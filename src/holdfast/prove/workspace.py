"""Folders of runs: each run of the training gets its own copy of what it writes, and shares what it reads.

A run works in a shadow of the working directory: a folder of links to its entries, but for the folders of
state, which are new and empty.  What the training creates besides is its own, too.  A folder that is given
by its absolute path is replaced by its path in the command and in the environment.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.prove.messages import ADDRESS, OWN

_STARTUP = Path(__file__).parent / "inside" / "startup"
_PROGRAMS = ["accelerate", "bash", "deepspeed", "holdfast", "python", "python3", "sh", "torchrun"]
_ROOT = "--root"
"""The option by which a script that uses holdfast takes its root, as examples and docs have it."""


@dataclass(frozen=True)
class Folder:
    """The folder of one run."""

    path: Path
    command: list[str]
    env: dict[str, str]

    @property
    def cwd(self) -> Path:
        return self.path / "cwd"

    @property
    def socket(self) -> str:
        return self.env[ADDRESS]

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files that the run has made, and what the file system says of them."""
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    if not os.path.islink(path):
                        yield path, os.stat(path)
                except FileNotFoundError:
                    continue


class Workspace:
    """Makes the folders of runs, in one folder of its own."""

    def __init__(
        self, command: Sequence[str], state: Sequence[str], env: Mapping[str, str]
    ) -> None:
        """`command`: a program and its arguments, or one line for the shell.

        Raises UsageError for a state that is no folder, or whose place the command does not tell.
        """
        self.home = Path.cwd()
        self.command = list(command) if len(command) != 1 else ["sh", "-c", command[0]]
        check_program(self.command)
        self.env = dict(env)
        self.inside: list[Path] = []
        self.outside: list[str] = []
        words = self.command if len(command) != 1 else words_of(command[0])
        for text in [*state, *_roots(words)]:
            self._add(text)
        place = self.home if os.access(self.home, os.W_OK) else None
        self.path = Path(tempfile.mkdtemp(prefix="holdfast-prove-", dir=place))
        self.temporary = Path(tempfile.mkdtemp(prefix="hp-"))
        self._runs = 0

    def _add(self, text: str) -> None:
        if not text.strip():
            raise UsageError("--state: must be a folder, not empty")
        if "://" in text:
            raise UsageError(
                f"{text} is not a folder: each run needs a copy of its own of what it writes",
                hint="let the training write to a folder while it is proved",
            )
        path = Path(text)
        if not path.is_absolute() or path.is_relative_to(self.home):
            relative = Path(
                os.path.normpath(path.relative_to(self.home) if path.is_absolute() else path)
            )
            if ".." in relative.parts or relative == Path():
                raise UsageError(
                    f"{text} is not inside of {self.home}", hint="give an absolute path"
                )
            self.inside.append(relative)
        if path.is_absolute():
            if not any(text in word for word in (*self.command, *self.env.values())):
                raise UsageError(
                    f"{text} stands neither in the command nor in the environment, so runs cannot get "
                    "one each",
                    hint="let the training take the folder as an argument",
                )
            self.outside.append(text)

    def new(self, command: Sequence[str] | None = None) -> Folder:
        """Make the folder of another run; `command` instead of the training's own."""
        self._runs += 1
        path = self.path / str(self._runs)
        (path / "cwd").mkdir(parents=True)
        self._link(self.home, path / "cwd", self.inside)
        for relative in self.inside:
            (path / "cwd" / relative).parent.mkdir(parents=True, exist_ok=True)
        return self._folder(path, command)

    def copy(self, folder: Folder, command: Sequence[str] | None = None) -> Folder:
        """Make the folder of a run that finds what another one has written."""
        self._runs += 1
        path = self.path / str(self._runs)
        shutil.copytree(folder.path, path, symlinks=True)
        return self._folder(path, command)

    def remove(self) -> None:
        """Delete everything that runs have written, but for sockets and temporary files."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_temporary(self) -> None:
        """Delete sockets and temporary files."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _folder(self, path: Path, command: Sequence[str] | None) -> Folder:
        words = self.command if command is None else command
        words = list(words) if len(words) != 1 else ["sh", "-c", words[0]]
        env = dict(self.env)
        for number, place in enumerate(self.outside):
            own = path / f"state{number}"
            own.mkdir(exist_ok=True)
            words = [w.replace(place, str(own)) for w in words]
            env = {name: value.replace(place, str(own)) for name, value in env.items()}
        temporary = self.temporary / path.name
        temporary.mkdir(exist_ok=True)
        memory = Path("/dev/shm" if os.path.isdir("/dev/shm") else temporary)
        env |= {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_STARTUP), env.get("PYTHONPATH")))),
            ADDRESS: str(temporary / "s"),
            OWN: str(path),
            "TMPDIR": str(temporary),
            "PWD": str(path / "cwd"),
            "HOLDFAST_MEMORY_DIR": str(memory / f"{self.temporary.name}-{path.name}"),
        }
        return Folder(path, words, env)

    def _link(self, real: Path, shadow: Path, without: Sequence[Path]) -> None:
        """Link the entries of a folder; one on the way to any of `without` is made, and filled alike."""
        if not real.is_dir():
            return
        for entry in real.iterdir():
            below = [p for p in without if p.parts[0] == entry.name]
            if any(len(p.parts) == 1 for p in below) or entry.name.startswith("holdfast-prove-"):
                continue
            target = shadow / entry.name
            if below:
                target.mkdir()
                self._link(entry, target, [Path(*p.parts[1:]) for p in below])
            else:
                target.symlink_to(entry)


def _roots(command: Sequence[str]) -> Iterator[str]:
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word == _ROOT and after:
            yield after
        elif word.startswith(f"{_ROOT}="):
            yield word.partition("=")[2]


def words_of(line: str) -> list[str]:
    """Return the words of a line for the shell; UsageError for a quote that is not closed."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r} is no line for the shell: {error}") from None


def check_program(words: Sequence[str]) -> None:
    """UsageError if the first of some words is no program that can be started here."""
    name = words[0] if words else ""
    if shutil.which(name) is not None:
        return
    text, hint = f"there is no program {name!r}", did_you_mean(name, _PROGRAMS)
    if os.path.isfile(name):
        text, hint = f"{name} is not executable", f"python {name} starts a script of Python"
    elif "=" in name:
        hint = "env sets variables: env A=1 python ..."
    raise UsageError(text, hint=hint)
