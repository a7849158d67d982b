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

SRC = Path(__file__).parent.parent / "src"

LAYERS = (
    ("address", "background", "errors", "garbage", "host", "memory_limit", "suggest", "version"),
    ("arguments", "wire"),
    ("events", "notices", "patience"),
    ("threads",),
    ("layout", "codec", "policy", "store", "group", "sizes"),
    ("sources",),
    ("rules",),
    ("format",),
    ("checkpoint",),
    ("interop",),
    ("writers",),
    ("state",),
    ("saving",),
    ("roots", "schedule"),
    ("restore",),
    ("compression",),
    ("memory", "delta"),
    ("uploading",),
    ("tuning_store", "tiers"),
    ("frozen_numbers", "late", "survey"),
    ("beginning", "ending", "looking", "once", "restart", "run", "sigterm", "steering"),
    ("checkpointer",),
    ("converting",),
    ("dcp",),
    ("integrations",),
    ("cli", "testing"),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

TORCH_FREE = (
    "holdfast",
    "holdfast.checkpoint.committing",
    "holdfast.checkpoint.tidying",
    "holdfast.checkpoint.opened",
    "holdfast.checkpoint.sharing",
    "holdfast.cli.main",
    "holdfast.codec.stripes",
    "holdfast.converting",
    "holdfast.delta.log",
    "holdfast.delta.writer",
    "holdfast.format.extras",
    "holdfast.interop.dcp",
    "holdfast.interop.deepspeed.opening",
    "holdfast.interop.detect",
    "holdfast.interop.megatron.opening",
    "holdfast.interop.verifying",
    "holdfast.looking",
    "holdfast.memory.node.agent",
    "holdfast.memory.node.client",
    "holdfast.memory.node.inventory",
    "holdfast.policy.survival",
    "holdfast.restore.candidates",
    "holdfast.rules",
    "holdfast.store",
    "holdfast.testing",
)


def unit(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            names = [f"holdfast.{a.name}" for a in node.names] if node.module == "holdfast" else []
            yield from ((name, node.lineno) for name in names or [node.module or ""])
        elif isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)


def modules() -> list[Path]:
    return [p for p in sorted(SRC.rglob("*.py")) if p != SRC / "holdfast" / "__init__.py"]


def test_imports_go_down_a_layer() -> None:
    bad = []
    for path in modules():
        me = unit(".".join(path.relative_to(SRC).with_suffix("").parts))
        assert me in RANK, f"{path}: in no layer"
        for name, line in imports(path):
            them = unit(name) if name.split(".")[0] == "holdfast" else me
            if them != me and (them not in RANK or RANK[them] >= RANK[me]):
                bad.append(f"{path.relative_to(SRC)}:{line}: {me} imports {name}")
    assert not bad, "\n".join(bad)


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


def test_torch_free() -> None:
    """In one fresh interpreter, one after the other."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *TORCH_FREE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_there_is_one_of_each() -> None:
    """One check of bytes against digests, one wait for a future, one way to start a process."""
    texts = {str(p.relative_to(SRC / "holdfast")): p.read_text() for p in modules()}

    def having(text: str) -> list[str]:
        return [path for path, source in texts.items() if text in source]

    assert having(" first_difference(") == ["codec/table.py"]
    assert having("TimeoutError as FutureTimeout") == ["threads.py"]
    assert having("subprocess.Popen(") == ["background.py"]


def test_only_the_observer_knows_torchs_hooks_on_optimizers() -> None:
    known = re.compile("step_(pre|post)_hook|_global_optimizer|profile_hook_step")
    users = [p.relative_to(SRC / "holdfast") for p in modules() if known.search(p.read_text())]
    assert users == [Path("state/observer.py")]


def test_only_one_module_reads_counters_of_writes() -> None:
    """Those of a tensor; `deriving` speaks of modules, which have such a name for their format."""
    users = {
        path.relative_to(SRC / "holdfast")
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "_version"
    }
    assert users == {Path("state/deriving.py"), Path("state/writes.py")}


def test_no_pickle() -> None:
    """But for the one that torch's rendezvous makes and takes in this very process."""
    for path in modules():
        if path.match("run/meeting_state.py"):
            continue
        for name, line in imports(path):
            assert name.split(".")[0] not in ("pickle", "dill", "cloudpickle"), f"{path}:{line}"


BESIDE_THE_CORE = (
    "cli", "compression", "converting", "dcp", "delta", "integrations", "interop", "memory",
    "policy", "rules", "steering", "testing", "tuning_store", "uploading", "writers",
)  # fmt: skip
"""Loaded when they are asked for: tiers, formats of others, the tuner, tools."""

SELDOM = (
    "holdfast.checkpoint.read_assignment",
    "holdfast.checkpoint.sharing",
    "holdfast.checkpoint.verifying",
    "holdfast.group.pulse",
    "holdfast.group.window",
    "holdfast.late",
    "holdfast.layout.view",
    "holdfast.state.carrying",
    "holdfast.state.deepspeed",
    "holdfast.state.deepspeed_parts",
    "holdfast.restore.beside",
    "holdfast.restore.casting",
    "holdfast.restore.former",
    "holdfast.restore.ranks",
    "holdfast.restore.lbfgs",
    "holdfast.state.in_hooks",
    "holdfast.state.made",
    "holdfast.restore.masters",
    "holdfast.state.megatron",
    "holdfast.state.quantised",
    "holdfast.state.shards",
    "holdfast.state.trainable",
    "holdfast.store.memory",
)
"""Parts of the core that one rank of plain torch does not need: loaded with a framework (no object of a
package exists before it is imported), several ranks, or what they are for."""


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
print(*sorted(m for m in sys.modules if m.split(".")[0] == "holdfast" and m.split(".")[1:2]
              and m.split(".")[1] in beside or m in {SELDOM!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "", done.stdout


ONLY_TO_RESTORE = (
    "holdfast.checkpoint.opened",
    "holdfast.checkpoint.peers",
    "holdfast.checkpoint.reading",
    "holdfast.checkpoint.rows",
    "holdfast.codec.table",
    "holdfast.layout.locating",
    "holdfast.restart",
    "holdfast.restore",
    "holdfast.survey",
)
"""The half of the core that the first restore loads."""


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
assert "holdfast.restart" in loaded()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_public_names_are_pinned() -> None:
    import holdfast

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
        "Save",
        "__version__",
        "compression",
        "convert",
        "dcp",
        "errors",
        "events",
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
    ]
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None


LONGEST_FUNCTION = 64
HOMONYMS = {"Reader", "Writer"}
"""Names of several classes: those of a store, and of `holdfast.dcp`, whose names torch has chosen."""
FRAGMENTS = re.compile(r"\s*(Of|By|What|Whether|How|As|Where|Which|Who|That|Those) ")
MOST_FRAGMENTS = 50
"""Docstrings that begin with a part of a sentence."""


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


def test_docstrings_are_sentences() -> None:
    begun = [
        f"{path.relative_to(SRC)}:{one.lineno}"
        for path in modules()
        for node in nodes(path)
        for one in (node.body if isinstance(getattr(node, "body", None), list) else ())
        if isinstance(one, ast.Expr)
        and isinstance(one.value, ast.Constant)
        and isinstance(one.value.value, str)
        and FRAGMENTS.match(one.value.value)
    ]
    assert len(begun) <= MOST_FRAGMENTS, begun
