"""The architecture contract: imports go down, some modules never import torch, few names are public."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import holdfast

SRC = Path(__file__).parents[2] / "src"

ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "base": (
        (
            "address",
            "background",
            "calls",
            "errors",
            "gc_pause",
            "host",
            "memory_address",
            "memory_limit",
            "suggest",
            "text",
            "version",
        ),
        ("arguments", "entry", "torch_version", "wire"),
        ("events", "notices", "sizes", "storage_deadlines"),
        ("threads",),
    ),
    "core": (("layout", "codec", "store", "group"), ("format",), ("checkpoint",)),
    "policy": (),
    "formats": (("rules",), ("read",), ("write", "looking"), ("converting",)),
    "live": (
        ("every", "ragged"),
        ("sources",),
        ("state",),
        ("gradient_compression", "saving"),
        ("roots",),
        ("restore",),
        ("kinds",),
        ("collecting",),
        ("restore_into_state", "training_checks"),
        ("step_loading",),
        ("shelves",),
        ("tier",),
    ),
    "tiers": (("memory", "records"), ("mirror",)),
    "session": (
        ("status",),
        ("tuning_store", "tiers"),
        ("added_state", "restart_candidates"),
        ("beginning", "ending", "restart", "save_and_load", "sigterm", "steering"),
        ("attempts", "checkpointer"),
        ("planned_saves",),
    ),
    "launch": (),
    "extend": (),
    "integrations": (),
    "prove": (
        ("messages",),
        ("inside", "courses", "workspace"),
        ("comparing", "running"),
        ("causes",),
        ("report",),
        ("proving",),
        ("calling",),
    ),
    "testing": (),
    "cli": (),
}
"""The rooms of the house, each of which may use those before it; and the layers within, lowest first.
`extend` is one module, the door."""
PUBLIC = {"holdfast", *(f"holdfast.{name}" for name in holdfast.__all__)}
"""Names that users have, which integrations import as users do: from the root."""
FLOOR = {room: number for number, room in enumerate(ROOMS)}

TORCH_FREE = (
    "holdfast",
    "holdfast.core.checkpoint.committing",
    "holdfast.core.checkpoint.tidying",
    "holdfast.core.checkpoint.opened",
    "holdfast.core.checkpoint.sharing",
    "holdfast.cli.main",
    "holdfast.core.codec.stripes",
    "holdfast.formats.converting",
    "holdfast.tiers.records.log",
    "holdfast.tiers.records.writer",
    "holdfast.core.format.extras",
    "holdfast.formats.read.dcp",
    "holdfast.formats.read.deepspeed.opening",
    "holdfast.formats.read.detect",
    "holdfast.formats.read.megatron.opening",
    "holdfast.formats.read.verifying",
    "holdfast.formats.looking",
    "holdfast.tiers.memory.node.agent",
    "holdfast.tiers.memory.node.client",
    "holdfast.tiers.memory.node.inventory",
    "holdfast.policy.survival",
    "holdfast.live.restore.candidates",
    "holdfast.rules",
    "holdfast.store",
    "holdfast.testing",
)


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{a.name}" for a in node.names]
            if node.module != "holdfast":
                names = [node.module or "", *filter(is_module, names)]
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)


def is_module(name: str) -> bool:
    """Whether a dotted name is that of a module or a package of holdfast."""
    path = SRC.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def modules() -> list[Path]:
    return [p for p in sorted(SRC.rglob("*.py")) if p != SRC / "holdfast" / "__init__.py"]


def place(module: str) -> tuple[int, int]:
    """The floor of a module's room, and its layer there; above all: `__main__`."""
    _, room, *rest = [*module.split("."), ""]
    if room == "__main__":
        return len(ROOMS), 0
    layers = [n for n, names in enumerate(ROOMS[room]) if rest[0] in names]
    assert layers or not ROOMS[room] or rest == [""] or rest[0] == "__init__", (
        f"{module}: in no layer"
    )
    return FLOOR[room], layers[0] if layers else -1


def test_a_module_that_is_imported_out_of_its_package_is_seen(tmp_path: Path) -> None:
    one = tmp_path / "one.py"
    one.write_text(
        "import holdfast.cli.main\nfrom holdfast import open, store\nfrom holdfast.live import kinds\n"
        "from holdfast.core.group import Group, message_auth\nfrom holdfast.base.errors import AgentError\n"
    )
    assert [name for name, _ in imports(one)] == [
        "holdfast.cli.main", "holdfast.open", "holdfast.store", "holdfast.live", "holdfast.live.kinds",
        "holdfast.core.group", "holdfast.core.group.message_auth", "holdfast.base.errors",
    ]  # fmt: skip


def test_imports_go_down() -> None:
    """From room to room, and within a room from layer to layer."""
    bad = []
    for path in modules():
        me = ".".join(path.relative_to(SRC).with_suffix("").parts)
        for name, line in imports(path):
            if not name.startswith("holdfast.") or name.split(".")[1:3] == me.split(".")[1:3]:
                continue
            if name in PUBLIC and me.startswith("holdfast.integrations."):
                continue
            mine, theirs = place(me), place(name)
            if theirs >= mine and not (theirs[0] == mine[0] and not ROOMS[me.split(".")[1]]):
                bad.append(f"{path.relative_to(SRC)}:{line}: imports {name}")
    assert not bad, "\n".join(bad)


def test_integrations_go_through_the_door() -> None:
    """They use names that users have, their own folder, and `holdfast.extend`; of a Checkpointer, what is
    public."""
    bad = []
    for path in (SRC / "holdfast" / "integrations").rglob("*.py"):
        for name, line in imports(path):
            own = f"{name}.".startswith(("holdfast.extend.", "holdfast.integrations."))
            if name.split(".")[0] == "holdfast" and not (own or name in PUBLIC):
                bad.append(f"{path.relative_to(SRC)}:{line}: imports {name}")
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                if ast.unparse(node.value).endswith(("ckpt", "checkpointer")):
                    bad.append(f"{path.relative_to(SRC)}:{node.lineno}: {ast.unparse(node)}")
    assert not bad, "\n".join(bad)


def test_the_door_is_small_and_says_what_it_has() -> None:
    from holdfast import extend

    assert extend.__all__ == sorted(extend.__all__) and len(extend.__all__) <= 40
    (doc,) = (extend.__doc__,)
    listed = re.findall(r"\b(\w+)\b", " ".join(re.findall(r"^ {20}.{16}(.*)$", doc, re.MULTILINE)))
    assert sorted(listed) == extend.__all__
    for name in extend.__all__:
        assert name == "TOP_NAMES" or getattr(extend, name).__doc__, (
            f"{name} says nothing of itself"
        )


def test_the_house_has_few_rooms() -> None:
    found = {p.relative_to(SRC / "holdfast").parts[0] for p in (SRC / "holdfast").rglob("*.py")}
    assert found == {*ROOMS.keys() - {"extend"}, "extend.py", "__init__.py", "__main__.py"}
    for room in ROOMS:
        head = f"{room}.py" if room == "extend" else f"{room}/__init__.py"
        doc = ast.get_docstring(ast.parse((SRC / "holdfast" / head).read_text()))
        assert doc, f"{room} says nothing of itself"


def test_only_group_talks_to_other_ranks() -> None:
    calls = {"all_reduce", "all_gather", "broadcast", "barrier", "new_group", "TCPStore"}
    for path in modules():
        if path.parent.name == "group":
            continue
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in calls:
                assert ast.unparse(node.value) not in ("dist", "torch.distributed"), path


def test_only_wire_decodes_into_classes() -> None:
    """Two threads that have msgspec work out one class at once crash: see `decode_msgpack`."""
    for path in modules():
        if path.name == "wire.py":
            continue
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module and "msgspec" in node.module:
                names = {a.name for a in node.names}
                assert not names & {"json", "msgpack", "convert", "decode", "Decoder"}, path
            elif isinstance(node, ast.Attribute) and node.attr in ("Decoder", "convert"):
                assert "msgspec" not in ast.unparse(node.value), f"{path}:{node.lineno}"
            elif isinstance(node, ast.Call):
                named = [ast.unparse(one) for one in (node.func, *node.args)]  # of a partial, too
                if {"msgspec.json.decode", "msgspec.msgpack.decode"} & {*named}:
                    has_type = any(k.arg == "type" for k in node.keywords)
                    assert not has_type and len(node.args) == 1, f"{path}:{node.lineno}"


NUMPY_FREE = ("holdfast.cli.ls", "holdfast.tiers.records.writer", "holdfast.core.store")
"""Numpy would take half the time in which these begin: `holdfast ls`, and the writer of records."""


@pytest.mark.parametrize(("modules", "package"), [(TORCH_FREE, "torch"), (NUMPY_FREE, "numpy")])
def test_what_is_not_imported(modules: tuple[str, ...], package: str) -> None:
    """In one fresh interpreter, one after the other."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[2:]:\n"
        "    importlib.import_module(name)\n"
        "    assert sys.argv[1] not in sys.modules, name"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, package, *modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_write_needs_no_numpy_either(tmp_path: Path) -> None:
    """Nor does the alignment of its memory, which a direct write asks for."""
    code = (
        "import sys\n"
        "from holdfast.core.store import open_store\n"
        "file = open_store(sys.argv[1]).create('a', 8192)\n"
        "file.write(0, memoryview(b'x' * 8192))\n"
        "file.finish()\n"
        "assert 'numpy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a").read_bytes() == b"x" * 8192


def test_there_is_one_of_each() -> None:
    """One check of bytes against digests, one wait for a future, one way to start a process of ours; the
    command that is proved is its user's."""
    texts = {str(p.relative_to(SRC / "holdfast")): p.read_text() for p in modules()}

    def having(text: str) -> list[str]:
        return [path for path, source in texts.items() if text in source]

    assert having(" first_difference(") == ["core/codec/table.py"]
    assert having("TimeoutError as FutureTimeout") == ["base/calls.py"]
    assert having(r'"digest":"([0-9a-f]') == ["core/codec/digest.py"]
    assert having("subprocess.Popen(") == ["base/background.py", "prove/running.py"]


def test_only_observers_know_torchs_hooks_on_optimizers() -> None:
    """That of a run, and that of a proof, which is in no run."""
    known = re.compile("step_(pre|post)_hook|_global_optimizer|profile_hook_step")
    users = [p.relative_to(SRC / "holdfast") for p in modules() if known.search(p.read_text())]
    assert users == [Path("live/state/observer.py"), Path("prove/inside/observer.py")]


def test_only_one_module_reads_counters_of_writes() -> None:
    """Those of a tensor; `deriving` speaks of modules, which have such a name for their format."""
    users = {
        path.relative_to(SRC / "holdfast")
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "_version"
    }
    assert users == {Path("live/state/own_loading.py"), Path("live/state/writes.py")}


def test_no_pickle() -> None:
    """But for the one that torch's rendezvous makes and takes in this very process."""
    for path in modules():
        if path.match("launch/rendezvous_state.py"):
            continue
        for name, line in imports(path):
            assert name.split(".")[0] not in ("pickle", "dill", "cloudpickle"), f"{path}:{line}"


NEVER_LOOKED_AT = {
    "ast", "dis", "opcode", "getsource", "getsourcelines", "getclosurevars", "get_objects",
    "get_referents", "get_referrers", "__closure__", "cell_contents", "__code__", "co_code",
    "co_consts", "co_freevars", "co_names", "co_varnames", "f_builtins", "gi_frame",
}  # fmt: skip
LOOKED_AT = {
    "__defaults__": {"launch/registries.py"},
    "__globals__": {"live/state/blockwise.py"},
    "_current_frames": {"launch/recovery.py", "launch/liveness.py"},
    "_getframe": {
        "base/errors.py",
        "base/storage_deadlines.py",
        "live/state/observer.py",
        "prove/inside/observer.py",
    },
    "f_globals": {"base/errors.py", "prove/inside/objects.py", "prove/inside/observer.py"},
    "f_locals": {"prove/inside/objects.py"},
}
"""What shows the inside of a function or of a call, and the modules that may look there: decisions 182 and,
for the names that a proof gives to values, 191."""


def test_nobody_guesses_at_scripts() -> None:
    """What a function of the user's does is told by facts, not by what it is made of."""
    users: dict[str, set[str]] = {}
    for path in modules():
        names = {part for name, _ in imports(path) for part in name.split(".")}
        for node in nodes(path):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.alias):
                names.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # of getattr()
        for name in names & (NEVER_LOOKED_AT | LOOKED_AT.keys()):
            users.setdefault(name, set()).add(str(path.relative_to(SRC / "holdfast")))
    assert users == LOOKED_AT


BESIDE_THE_CORE = (
    "holdfast.cli", "holdfast.formats.converting", "holdfast.formats.read", "holdfast.formats.rules",
    "holdfast.formats.write", "holdfast.integrations", "holdfast.live.gradient_compression",
    "holdfast.policy", "holdfast.session.steering", "holdfast.session.tuning_store", "holdfast.testing",
    "holdfast.tiers",
)  # fmt: skip
"""Loaded when they are asked for: tiers, formats of others, the tuner, tools."""

NAMES_OF_TIERS = {"delta", "memory", "mirror", "records", "snapshots", "upload"}
KNOWS_NO_TIER = (
    "added_state",
    "beginning",
    "checkpointer",
    "ending",
    "restart",
    "restart_candidates",
)


def _name_of(node: ast.AnnAssign) -> str:
    return node.target.id if isinstance(node.target, ast.Name) else ""


def test_the_session_knows_no_tier_by_its_name() -> None:
    """But for the table of those that arguments switch on, and the tuner, whose model has these costs."""
    for name in KNOWS_NO_TIER:
        path = SRC / "holdfast" / "session" / f"{name}.py"
        found = nodes(path)
        tables = [n for n in found if isinstance(n, ast.AnnAssign) and _name_of(n) == "NEAR"]
        allowed = [node for table in tables for node in ast.walk(table)]
        for node in found:
            if node in allowed:
                continue
            named = getattr(node, "attr", None) or getattr(node, "value", None)
            assert not isinstance(named, str) or named not in NAMES_OF_TIERS, (
                f"{name}.py:{node.lineno}: {named}"  # type: ignore[attr-defined]
            )
        names = {name for name, _ in imports(path) if name.startswith("holdfast.tiers")}
        assert all(name.endswith(".options") for name in names), names


SELDOM = (
    "holdfast.core.checkpoint.read_assignment",
    "holdfast.core.checkpoint.sharing",
    "holdfast.core.checkpoint.verifying",
    "holdfast.core.group.pulse",
    "holdfast.core.group.shared_memory",
    "holdfast.session.added_state",
    "holdfast.core.layout.view",
    "holdfast.live.state.carrying",
    "holdfast.live.state.deepspeed",
    "holdfast.live.state.deepspeed_parts",
    "holdfast.live.restore.composite_states",
    "holdfast.live.restore.casting",
    "holdfast.live.restore.former_names",
    "holdfast.live.restore.values_per_rank",
    "holdfast.live.state.composite_tensors",
    "holdfast.live.state.own_loading",
    "holdfast.live.state.quantised",
    "holdfast.live.state.in_hooks",
    "holdfast.live.restore.masters",
    "holdfast.live.state.megatron",
    "holdfast.live.state.megatron_shards",
    "holdfast.live.state.trainable",
    "holdfast.core.store.memory",
)
"""Parts of the core that one rank of plain torch does not need: loaded with a framework (no object of a
package exists before it is imported), several ranks, or what they are for."""


@pytest.mark.soak  # and by `make check`
def test_the_core_knows_nothing_of_tiers_and_formats(tmp_path: Path) -> None:
    """A run that saves and restores, with no tier switched on, in a fresh interpreter."""
    script = f"""
import sys
import torch
import holdfast

def state():
    model = torch.nn.Linear(4, 4)
    return {{"model": model, "optim": torch.optim.AdamW(model.parameters()), "progress": {{"n": 1}}}}

live = state()
with holdfast.Checkpointer({str(tmp_path)!r}, live, every=1, keep=holdfast.Keep(last=2)) as ckpt:
    assert not ckpt.restore().found
    for step in (1, 2, 3):
        live["model"](torch.ones(1, 4)).sum().backward()
        live["optim"].step()
        ckpt.step(step)
with holdfast.Checkpointer({str(tmp_path)!r}, state(), sigterm_s=60) as ckpt:
    assert ckpt.restore() == 3
holdfast.save({str(tmp_path / "once")!r}, live, step=1)
assert holdfast.load({str(tmp_path / "once")!r}, state()) == 1
beside = {BESIDE_THE_CORE!r}
print(*sorted(m for m in sys.modules if m in {SELDOM!r}
              or any(f"{{m}}.".startswith(f"{{one}}.") for one in beside)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "", done.stdout


ONLY_TO_RESTORE = (
    "holdfast.core.checkpoint.opened",
    "holdfast.core.checkpoint.peers",
    "holdfast.core.checkpoint.reading",
    "holdfast.core.checkpoint.rows",
    "holdfast.core.codec.table",
    "holdfast.core.layout.locating",
    "holdfast.session.restart",
    "holdfast.live.restore",
    "holdfast.session.restart_candidates",
)
"""The half of the core that the first restore loads."""


@pytest.mark.soak  # and by `make check`
def test_a_run_that_saves_loads_nothing_to_restore_with(tmp_path: Path) -> None:
    """Not when it is made, at saves, or at its end; the first restore does."""
    script = f"""
import sys
import torch
import holdfast

def loaded():
    return [m for m in sys.modules for known in {ONLY_TO_RESTORE!r} if f"{{m}}.".startswith(f"{{known}}.")]

state = {{"model": torch.nn.Linear(4, 4), "progress": {{"n": 1}}}}
with holdfast.Checkpointer({str(tmp_path)!r}, state, every=1, keep=holdfast.Keep(last=1)) as ckpt:
    for step in (1, 2, 3):
        ckpt.step(step)
holdfast.save({str(tmp_path / "once")!r}, state, step=1)
assert not loaded(), loaded()
with holdfast.Checkpointer({str(tmp_path)!r}, state, every=1) as ckpt:
    assert ckpt.restore() == 3
assert "holdfast.session.restart" in loaded()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_public_names_are_pinned() -> None:
    assert holdfast.__all__ == [
        "Auto",
        "Box",
        "Checkpoint",
        "Checkpointer",
        "Converted",
        "Delta",
        "Every",
        "Found",
        "HoldfastError",
        "HoldfastWarning",
        "Keep",
        "Memory",
        "Restored",
        "Rng",
        "RunStatus",
        "Save",
        "__version__",
        "compression",
        "convert",
        "dcp",
        "errors",
        "events",
        "extend",
        "ignore",
        "integrations",
        "kept",
        "load",
        "open",
        "recoverable",
        "save",
        "silence",
        "sources",
        "steps",
        "store",
        "testing",
        "trainable_only",
        "wait_newer",
    ]
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None


def test_public_modules_are_those_of_the_rooms() -> None:
    """Under a short name, or one of before, there is the same module, and below it, too."""
    script = """
import importlib, sys
import holdfast
for name, home in (holdfast._ELSEWHERE | holdfast._FORMER).items():
    assert importlib.import_module(f"holdfast.{name}") is importlib.import_module(home), name
    assert sys.modules[home].__spec__.name == home
from holdfast.store import local
assert local is sys.modules["holdfast.core.store.local"]
try:
    importlib.import_module("holdfast.store.nothing")
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "nothing" in done.stdout, done.stderr


LONGEST_FUNCTION = 64
HOMONYMS = {"Reader", "Writer"}
"""Names of several classes: those of a store, and of `holdfast.dcp`, whose names torch has chosen."""


def test_no_function_is_long() -> None:
    found = {
        f"{path.relative_to(SRC)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in modules()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: lines for name, lines in found.items() if lines > LONGEST_FUNCTION} == {}


def test_the_name_of_a_class_means_one_thing() -> None:
    classes = Counter(
        node.name for path in modules() for node in nodes(path) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in classes.items() if number > 1} == HOMONYMS
