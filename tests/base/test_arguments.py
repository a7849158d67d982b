"""Every argument of every public call, with values that cannot be meant: a UsageError that names it.

`CALLS` has a row for each public call: how it is called with one argument replaced, and which values each
argument is tried with.  A call that has no row must be in `RESULTS` or `ELSEWHERE`, which say why.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast import extend
from holdfast.errors import HoldfastError, StoreError, UsageError
from holdfast.session import checkpointer, save_and_load
from holdfast.store import LocalStore, MemoryStore, Store, open_store, register

Values = tuple[Any, ...]


class Odd:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


OTHERS: Values = (Odd(), [], {}, (1, 2), object, b"x")
"""Of types that no number, word or path is of."""
HUGE_TEXT = "x" * 100_000
STEPS: Values = (*OTHERS, None, True, np.True_, torch.tensor(True), -1, 10**15, 10**5000, 7.0, "7", "",
                 math.nan, math.inf, np.float32(7), torch.tensor(7.0), torch.tensor([7, 8]), np.arange(2),
                 torch.tensor(7, device="meta"))  # fmt: skip
STEPS_OR_NONE = tuple(v for v in STEPS if v is not None)
COUNTS: Values = (*STEPS, 0)
BYTES = tuple(v for v in COUNTS if v is not COUNTS[len(OTHERS) + 5])
COUNTS_OR_NONE = tuple(v for v in COUNTS if v is not None)
LENGTHS: Values = (*OTHERS, None, True, np.True_, "5", "", math.nan, -1, -0.5, 1e30, 10**5000, math.inf,
                   1j, np.array([1.0]), torch.tensor([1.0]), torch.tensor(True), datetime.timedelta(1),
                   np.complex64(1))  # fmt: skip
SECONDS: Values = (*LENGTHS, 0, 0.0)
LENGTHS_OR_NONE = tuple(v for v in LENGTHS if v is not None)
SECONDS_OR_NONE = tuple(v for v in SECONDS if v is not None)
SHARES: Values = (*SECONDS, 1.5, 2)
IDS: Values = (
    "",
    "x",
    "-1",
    "1.5",
    "elsewhere/10",
    "9999999999999999",
    True,
    1.5,
    b"x",
    [],
    object,
)
FLAGS: Values = (*OTHERS, None, "false", "", 0, 1, 2.0, np.array([True]), torch.ones(2) > 0)
WORDS: Values = (Odd(), [], {}, None, True, 3, b"skip", "", "skpi", HUGE_TEXT)
PATHS: Values = (Odd(), [], {}, None, True, 3, 1.5, b"runs", "", "a\0b", "a\ud800b", HUGE_TEXT,
                 object)  # fmt: skip
PATHS_OR_NONE = tuple(v for v in PATHS if v is not None)
BUCKETS: Values = ("s3://", "s3://b?regoin=x", "az://b?unsafe=perhaps")
SIZES: Values = (
    *OTHERS,
    True,
    -1,
    math.nan,
    math.inf,
    1e30,
    "",
    "lots",
    "-1GB",
    "9" * 400 + "GB",
    10**5000,
)
SIZES_BUT_NOTHING: Values = (*SIZES, 0, "0GB")
STATES: Values = (
    Odd(),
    None,
    [],
    {},
    3,
    "model",
    {3: 1},
    {"": 1},
    {"a.b": 1},
    {None: 1},
    nn.Linear(1, 1),
)
STATES_BUT_LATE = tuple(v for v in STATES if v is not None and not (isinstance(v, dict) and not v))
"""Without the two that say that the state comes later."""
RULES: Values = (Odd(), [], 3, "fresh", b"x", {"modl": "fresh"}, {3: "fresh"}, {"model": "frehs"},
                 {"model": None}, {"model": 3})  # fmt: skip
PATTERNS: Values = (Odd(), 3, b"model.*", "", [], (), {}, [3], ["model.*", ""], [None], object)
FILES: Values = (Odd(), 3, "config.json", [], [3], {3: b""}, {"../x": b""}, {"": b""}, {"a": 3},
                 {"a": None}, {"a": lambda x: x}, {"a": b"", "a/b": b""}, {HUGE_TEXT: b""})  # fmt: skip
METRICS: Values = (Odd(), 3, "loss", [], {}, {3: 1.0}, {"": 1.0}, {"loss": "low"}, {"loss": Odd()},
                   {"loss": [1.0]}, {HUGE_TEXT: 1.0})  # fmt: skip
LABELS: Values = (Odd(), None, 3, b"best", [], {}, "", " ", "a\nb", HUGE_TEXT)
FUNCTIONS: Values = (Odd(), 3, "print", [], {})


def print_nothing() -> None:
    """Takes no argument, where one is handed over."""


OBJECTS: Values = (Odd(), 3, "x", [], {}, True)
EVERY: Values = (Odd(), 0, -1, 1.5, "x", "10", [], {}, True, holdfast.Every)
NAMES: Values = (Odd(), None, 3, [], {}, b"model.weight", "", "model.wieght", HUGE_TEXT)
PARAMETERS: Values = (Odd(), None, 3, "x", b"x", [], [3], {}, nn.Linear(1, 1), torch.ones(2), [None],
                      list(nn.Linear(1, 1).named_parameters()))  # fmt: skip
BOXES: Values = (Odd(), 3, "ab", b"ab", [(0, 1)], [(0, 1), "x"], [(0, 1), (0, 1, 2)], [(0, 1.0), None],
                 [(0, 1), (2, 1)], [(0, 1), (-1, 1)], [(0, 1), (0, 99)], [slice("a"), None],
                 [slice(0, 2, 2), None], holdfast.Box((0,), (1,)), holdfast.Box((0, 0), (1,)),
                 holdfast.Box((0.0, 0.0), (1.0, 1.0)), holdfast.Box(0, 1), {})  # type: ignore[arg-type]  # fmt: skip


class Made:
    """What the calls need, made once."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.state: dict[str, Any] = {"model": nn.Linear(2, 2)}
        self.root = str(folder / "run")
        holdfast.save(self.root, self.state, step=7)
        self.save_under_way = holdfast.Save(1)
        self.ckpt = holdfast.Checkpointer(
            folder / "run", self.state, every=holdfast.Every(durable=100), anew=True
        )
        self.opened = holdfast.open(self.root)
        self.store = MemoryStore("arguments")
        self.store.put("k", b"12345")
        self.local = LocalStore(folder / "local")
        self.local.put("k", b"12345")

    def checkpointer(self, **given: Any) -> None:
        holdfast.Checkpointer(**{"path": self.folder / "new", "state": self.state, **given}).close()

    def convert(self, **given: Any) -> None:
        holdfast.convert(**{"source": self.root, "target": self.folder / "converted", **given})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    one = Made(tmp_path_factory.mktemp("arguments"))
    yield one
    one.ckpt.close()


Call = Callable[..., Any]
CALLS: dict[str, tuple[Callable[[Made], Call], dict[str, Values]]] = {
    "save": (
        lambda m: (
            lambda **a: holdfast.save(
                **{"path": m.folder / "new", "state": m.state, "step": 1, **a}
            )
        ),
        {
            "path": (*PATHS, *BUCKETS, "dpc:x"),
            "state": STATES,
            "step": STEPS,
            "replicas": (*WORDS, "verify"),
            "files": FILES,
            "deadline_s": SECONDS,
        },
    ),
    "ignore": (
        lambda m: lambda obj=m.state["model"], patterns="x": holdfast.ignore(obj, patterns),
        {"obj": (Odd(), None, {}, 3, "model", nn.Linear), "patterns": (*OTHERS, None, 3, "")},
    ),
    "silence": (
        lambda m: lambda notices="gradients": holdfast.silence(notices),
        {"notices": (Odd(), None, 3, "", "no-such-notice", ("gradients",))},
    ),
    "trainable_only": (
        lambda m: holdfast.trainable_only,
        {"model": (Odd(), None, {}, 3, "model", nn.Linear, torch.ones(1))},
    ),
    "kept": (
        lambda m: lambda name="x", load=dict: holdfast.kept(name, load),
        {"name": (None, 3, b"x", Odd()), "load": (None, "x", 3, {}, lambda x: x)},
    ),
    "recoverable": (
        lambda m: lambda function=dict: holdfast.recoverable(function),
        {"function": (None, "main", 3, {}, Odd())},
    ),
    "load": (
        lambda m: lambda **a: holdfast.load(**{"path": m.root, "state": m.state, **a}),
        {
            "path": (*PATHS, "dpc:x"),
            "state": STATES,
            "step": STEPS_OR_NONE,
            "only": PATTERNS,
            "cast": FLAGS,
            "strict": FLAGS,
            "on_resize": RULES,
            "verify": FLAGS,
            "deadline_s": SECONDS,
        },
    ),
    "open": (
        lambda m: lambda **a: holdfast.open(**{"path": m.root, **a}),
        {"path": (*PATHS, "dpc:x"), "step": STEPS_OR_NONE, "verify": FLAGS},
    ),
    "steps": (lambda m: holdfast.steps, {"path": (*PATHS, "dpc:x")}),
    "wait_newer": (
        lambda m: lambda **a: holdfast.wait_newer(**{"path": m.root, "timeout": 0, **a}),
        {
            "path": (*PATHS, "dpc:x"),
            "than": STEPS_OR_NONE,
            "timeout": LENGTHS,
            "poll_s": SECONDS,
        },
    ),
    "convert": (
        lambda m: m.convert,
        {
            "source": PATHS,
            "target": (*PATHS, *BUCKETS),
            "to": (*WORDS, "hugingface"),
            "step": STEPS_OR_NONE,
            "key": WORDS[:-2],
            "dtype": (*WORDS[:3], *WORDS[4:], torch.bfloat16),
            "rename": (*FUNCTIONS, lambda: "x", lambda a, b: a),
            "max_file_bytes": BYTES,
            "memory_bytes": (*BYTES, 1),
            "verify": FLAGS,
            "progress": (*FUNCTIONS, lambda: None, lambda done: None, print_nothing),
        },
    ),
    "Checkpointer": (
        lambda m: m.checkpointer,
        {
            "path": (*PATHS, *BUCKETS),
            "upload": (*PATHS_OR_NONE, *BUCKETS),
            "upload_keep": (*OBJECTS, holdfast.Keep),
            "state": STATES_BUT_LATE,
            "every": EVERY,
            "memory": (*OBJECTS, holdfast.Memory),
            "delta": (*OBJECTS, holdfast.Delta),
            "keep": (*OBJECTS, holdfast.Keep),
            "when_busy": tuple(v for v in WORDS if v is not None),
            "on_error": WORDS,
            "on_resize": RULES,
            "replicas": WORDS,
            "files": FILES,
            "mesh": OBJECTS,
            "sigterm_s": SECONDS_OR_NONE,
            "deadline_s": SECONDS,
            "anew": FLAGS,
        },
    ),
    "Checkpointer.step": (
        lambda m: lambda **a: m.ckpt.step(**{"step": 7, **a}),
        {"step": STEPS, "metrics": METRICS},
    ),
    "Checkpointer.find": (lambda m: m.ckpt.find, {"step": STEPS_OR_NONE}),
    "Checkpointer.save": (
        lambda m: lambda **a: m.ckpt.save(**{"step": 7, **a}),
        {"step": STEPS, "metrics": METRICS, "files": FILES},
    ),
    "Checkpointer.on_commit": (lambda m: m.ckpt.on_commit, {"call": (None, *FUNCTIONS)}),
    "Checkpointer.pin": (
        lambda m: lambda **a: m.ckpt.pin(**{"step": 7, "label": "best", **a}),
        {"step": STEPS, "label": LABELS},
    ),
    "Checkpointer.unpin": (lambda m: m.ckpt.unpin, {"label": LABELS}),
    "Checkpointer.metrics": (
        lambda m: lambda step=7, values=0.5: m.ckpt.metrics(step, loss=values),
        {"step": STEPS, "values": (*OTHERS, None, True, "low")},
    ),
    "Save.add_done_callback": (
        lambda m: m.save_under_way.add_done_callback,
        {"call": (None, *FUNCTIONS)},
    ),
    "Checkpointer.restore": (
        lambda m: m.ckpt.restore,
        {
            "step": STEPS_OR_NONE,
            "source": PATHS_OR_NONE,
            "keep_source": FLAGS,
            "only": (*(v for v in PATTERNS if v is not None), "model.*"),
            "strict": FLAGS,
            "cast": FLAGS,
            "verify": FLAGS,
        },
    ),
    "Checkpointer.wait": (lambda m: m.ckpt.wait, {"timeout": LENGTHS_OR_NONE}),
    "Checkpointer.close": (lambda m: m.ckpt.close, {"timeout": LENGTHS_OR_NONE}),
    "Save.wait": (lambda m: m.save_under_way.wait, {"timeout": LENGTHS_OR_NONE}),
    "Every": (
        lambda m: holdfast.Every,
        {"durable": COUNTS_OR_NONE, "memory": COUNTS_OR_NONE, "delta": (*COUNTS_OR_NONE, 2)},
    ),
    "Auto": (
        lambda m: holdfast.Auto,
        {
            "mtbf_hours": (*OTHERS, True, "5", 0, -1, math.nan, math.inf),
            "overhead": (*SHARES, 1),
            "node_share": (*LENGTHS, 1.5),
            "gain": (*SHARES, 1),
            "rarest_hours": (*OTHERS, None, True, "5", 0, -1, math.nan, math.inf),
        },
    ),
    "Keep": (
        lambda m: holdfast.Keep,
        {
            "last": COUNTS_OR_NONE,
            "every": COUNTS_OR_NONE,
            "best": (Odd(), 3, "loss", {}, (), ("loss", 0), ("loss", 1, "mx"), (3, 1)),
            "newer": (*OTHERS, 3, True, "", "2", "2w", "-1d", HUGE_TEXT),
        },
    ),
    "Memory": (
        lambda m: holdfast.Memory,
        {
            "redundancy": (*WORDS, "copy(1)", "rs(0)", "partiy"),
            "budget": SIZES_BUT_NOTHING,
            "bandwidth": SIZES_BUT_NOTHING,
            "carry": SIZES,
            "flush_after_s": SECONDS_OR_NONE,
            "feed": (*WORDS, "gradeint"),
            "prove_every": (*COUNTS, 2),
            "tls": FLAGS,
        },
    ),
    "Delta": (
        lambda m: holdfast.Delta,
        {
            "batch": COUNTS,
            "queue": COUNTS,
            "when_full": WORDS,
            "max_bytes": SIZES_BUT_NOTHING,
            "upload_every_s": SECONDS,
            "device_bytes": SIZES,
        },
    ),
    "Rng.load_state_dict": (
        lambda m: holdfast.Rng().load_state_dict,
        {"state": (*OBJECTS, {"torch": 3})},
    ),
    "Checkpoint.open": (
        lambda m: lambda **a: holdfast.Checkpoint.open(**{"url": m.root, **a}),
        {"url": PATHS, "step": STEPS_OR_NONE, "verify": FLAGS},
    ),
    "Checkpoint.index": (lambda m: m.opened.index, {"name": NAMES}),
    "Checkpoint.info": (lambda m: m.opened.info, {"name": NAMES}),
    "Checkpoint.read": (
        lambda m: lambda **a: m.opened.read(**{"name": "model.weight", **a}),
        {"name": NAMES, "box": BOXES},
    ),
    "Checkpoint.rank_extras": (
        lambda m: m.opened.rank_extras,
        {"rank": (*OTHERS, None, True, -1, 1.0, "0")},
    ),
    "compression.TopK": (
        lambda m: holdfast.compression.TopK,
        {"ratio": SHARES, "error_feedback": FLAGS},
    ),
    "compression.TopK.register": (
        lambda m: holdfast.compression.TopK().register,
        {"model": OBJECTS},
    ),
    "compression.TopK.num_sent": (
        lambda m: holdfast.compression.TopK().num_sent,
        {"parameter": OBJECTS},
    ),
    "compression.sparse": (
        lambda m: (
            lambda **a: holdfast.compression.sparse(
                **{"parameters": [torch.ones(2)], "at_most": 0.5, **a}
            )
        ),
        {"parameters": PARAMETERS, "at_most": SHARES},
    ),
    "compression.rounded": (
        lambda m: (
            lambda **a: holdfast.compression.rounded(
                **{"parameters": [torch.ones(2)], "to": torch.bfloat16, **a}
            )
        ),
        {"parameters": PARAMETERS, "to": (*OBJECTS, None, torch.float32, "bfloat16", np.float16)},
    ),
    "dcp.Reader": (
        lambda m: lambda **a: holdfast.dcp.Reader(**{"root": m.folder, **a}),
        {"root": (*PATHS, *BUCKETS), "verify": FLAGS},
    ),
    "dcp.Reader.reset": (
        lambda m: holdfast.dcp.Reader(m.folder).reset,
        {"checkpoint_id": IDS},
    ),
    "dcp.Writer": (
        lambda m: lambda **a: holdfast.dcp.Writer(**{"root": m.folder, **a}),
        {"root": (*PATHS, *BUCKETS), "keep": OBJECTS},
    ),
    "dcp.Writer.reset": (
        lambda m: holdfast.dcp.Writer(m.folder).reset,
        {"checkpoint_id": IDS},
    ),
    "events.subscribe": (
        lambda m: holdfast.events.subscribe,
        {"sink": (*FUNCTIONS, None, print_nothing)},
    ),
    "events.listen": (
        lambda m: lambda sink: holdfast.events.listen(sink).__enter__(),
        {"sink": (*FUNCTIONS, None, print_nothing)},
    ),
    "sources.register": (
        lambda m: holdfast.sources.register,
        {"framework": (*OBJECTS, None, holdfast.sources.Framework)},
    ),
    "extend.PlannedSaves": (
        lambda m: lambda **a: extend.PlannedSaves(**{"root": m.folder, **a}),
        {"root": PATHS, "keep": (*OBJECTS, holdfast.Keep)},
    ),
    "extend.check_metrics": (
        lambda m: lambda metrics: extend.check_metrics(metrics, "evaluate"),
        {"metrics": METRICS},
    ),
    "extend.check_root": (
        lambda m: lambda **a: extend.check_root(**{"root": m.folder, **a}),
        {"root": PATHS},
    ),
    "extend.give_label": (
        lambda m: lambda **a: extend.give_label(**{"root": m.root, "label": "b", "step": 7, **a}),
        {"root": PATHS, "label": LABELS, "step": STEPS_OR_NONE},
    ),
    "extend.go_on_from": (
        lambda m: lambda step: extend.go_on_from(m.ckpt, step),
        {"step": STEPS},
    ),
    "extend.labels_of": (lambda m: extend.labels_of, {"root": PATHS}),
    "extend.newest_where": (
        lambda m: lambda **a: extend.newest_where(**{"root": m.root, "fits": lambda *_: True, **a}),
        {"root": PATHS, "fits": FUNCTIONS},
    ),
    "extend.run_at_work": (lambda m: extend.run_at_work, {"root": PATHS}),
    "extend.saved_in": (
        lambda m: lambda **a: extend.saved_in(**{"root": m.root, "step": 7, **a}),
        {"root": PATHS, "step": STEPS},
    ),
    "extend.stop_if_told": (
        lambda m: lambda step: extend.stop_if_told(m.ckpt, step),
        {"step": STEPS},
    ),
    "store.open_store": (
        lambda m: open_store,
        {"url": (*PATHS, *BUCKETS, "fiel://x", "file://x")},
    ),
    "store.register": (
        lambda m: lambda **a: register(**{"scheme": "tape", "factory": MemoryStore, **a}),
        {
            "scheme": (*OTHERS, None, 3, "", "s3", "a://b", "S 3"),
            "factory": (*FUNCTIONS, None, print_nothing),
        },
    ),
    "store.LocalStore": (
        lambda m: lambda **a: LocalStore(**{"root": m.folder, **a}),
        {"root": PATHS, "durable": FLAGS},
    ),
    "store.MemoryStore": (lambda m: MemoryStore, {"name": WORDS[:-2]}),
    "testing.Counting": (lambda m: holdfast.testing.Counting, {"inner": OBJECTS}),
    "testing.Faulty": (
        lambda m: (
            lambda **a: holdfast.testing.Faulty(
                **{"inner": m.store, "fail": lambda op, key: None, **a}
            )
        ),
        {"inner": OBJECTS, "fail": (*FUNCTIONS, None, print_nothing)},
    ),
    "testing.Slow": (
        lambda m: lambda **a: holdfast.testing.Slow(**{"inner": m.store, "seconds": 0.1, **a}),
        {"inner": OBJECTS, "seconds": LENGTHS},
    ),
    "testing.StopAfter": (
        lambda m: lambda **a: holdfast.testing.StopAfter(**{"inner": m.store, "n": 1, **a}),
        {"inner": OBJECTS, "n": STEPS_OR_NONE[:-2], "torn": FLAGS},
    ),
}
KEYS: Values = (Odd(), None, 3, [], b"k", "", "../x", "/x", "a//b", "a\0b", "a\ud800", HUGE_TEXT)
PREFIXES: Values = (Odd(), None, 3, [], b"k", "../x", "/x", "a//b", "a\0b", "a\ud800", HUGE_TEXT)
NUMBERS: Values = (*OTHERS, None, -1, 1.5, "1", True, 10**5000)
for _name, _store in (("store", lambda m: m.store), ("local", lambda m: m.local)):
    CALLS |= {
        f"{_name}.put": (
            lambda m, s=_store: lambda **a: s(m).put(**{"key": "new", "data": b"1", **a}),
            {"key": KEYS, "data": (Odd(), None, 3, "text", [], {}), "if_absent": FLAGS},
        ),
        f"{_name}.create": (
            lambda m, s=_store: lambda **a: s(m).create(**{"key": "new", "size": 1, **a}),
            {"key": KEYS, "size": NUMBERS},
        ),
        f"{_name}.get": (lambda m, s=_store: s(m).get, {"key": KEYS}),
        f"{_name}.read": (
            lambda m, s=_store: lambda **a: s(m).read(
                **{"key": "k", "offset": 0, "into": memoryview(bytearray(2)), **a}
            ),
            {
                "key": KEYS, "offset": NUMBERS,
                "into": (Odd(), None, 3, "text", bytearray(2), memoryview(b"ab")),
            },
        ),
        f"{_name}.open": (lambda m, s=_store: s(m).open, {"key": KEYS}),
        f"{_name}.size": (lambda m, s=_store: s(m).size, {"key": KEYS}),
        f"{_name}.list": (lambda m, s=_store: s(m).list, {"prefix": PREFIXES}),
        f"{_name}.entries": (lambda m, s=_store: s(m).entries, {"prefix": PREFIXES}),
        f"{_name}.delete": (lambda m, s=_store: s(m).delete, {"key": KEYS}),
    }  # fmt: skip

CASES = [
    pytest.param(call, argument, id=f"{call}({argument})")
    for call, (_, arguments) in CALLS.items()
    for argument in arguments
]


@pytest.mark.parametrize(("call", "argument"), CASES)
def test_a_value_that_cannot_be_meant_is_refused_by_name(
    made: Made, call: str, argument: str
) -> None:
    make, arguments = CALLS[call]
    for value in arguments[argument]:
        message = refusal(make(made), argument, value)
        words = [value]
        if isinstance(value, str) and "://" in value:  # of which no message shows all
            words += [value.partition("?")[0], value.partition("://")[0]]
        shown = _is_word(value) and any(repr(word)[:60] in message for word in words)
        named = argument in message or shown
        assert named, f"{_text(value)}: {message[:500]}"
        assert len(message) < 1000, "a message is read by people"


def refusal(call: Call, argument: str, value: Any) -> str:
    """What is said of a value."""
    try:
        call(**{argument: value})
    except UsageError as error:
        return str(error)
    except BaseException as error:
        pytest.fail(f"{argument}={_text(value)}: {type(error).__name__}: {str(error)[:500]}")
    pytest.fail(f"{argument}={_text(value)} was taken")


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and len(value) > 1


def _text(value: Any) -> str:
    try:
        return ascii(value)[:60]
    except (RuntimeError, ValueError):
        return type(value).__name__


def test_nothing_was_made_by_a_refused_call(made: Made) -> None:
    """Also not a root for a run that never began; and the run that stepped wrongly goes on."""
    assert not {"new", "converted", "runs"} & set(os.listdir(made.folder))
    assert holdfast.steps(made.root) == [7]
    made.ckpt.step(8)


# -- nothing is forgotten -------------------------------------------------------------------------


RESULTS = {
    "Checkpoint",
    "Converted",
    "Found",
    "RunStatus",
    "Save",
    "compression.rounded_to",
    "events.Event",
    "store.Entry",
    "testing.Operation",
    "testing.Training",
}
"""What the library makes and users read."""
ELSEWHERE = {
    "Box": "where it is used: planning makes them by the hundred thousand",
    "Box.within": "of the library's own boxes",
    "Checkpointer.__exit__": "called by `with`",
    "Checkpoint.__exit__": "called by `with`",
    "Checkpoint.file_extras": "takes an entry of the manifest",
    "Restored": "made by restore",
    "Rng": "takes nothing",
    "testing.prove": "by the tests of `prove`, which has the arguments of the command",
    "compression.TopK.rows_of_rank": "by test_topk_checks_what_it_is_given",
    "compression.TopK.load_state_dict": "by test_topk_checks_what_it_is_given",
    "dcp.Reader.prepare_global_plan": "called by torch.distributed.checkpoint",
    "dcp.Reader.prepare_local_plan": "called by torch.distributed.checkpoint",
    "dcp.Reader.read_data": "called by torch.distributed.checkpoint",
    "dcp.Reader.read_metadata": "called by torch.distributed.checkpoint",
    "dcp.Reader.set_up_storage_reader": "called by torch.distributed.checkpoint",
    "dcp.Writer.finish": "called by torch.distributed.checkpoint",
    "dcp.Writer.prepare": "called by torch.distributed.checkpoint",
    "dcp.Writer.prepare_global_plan": "called by torch.distributed.checkpoint",
    "dcp.Writer.prepare_local_plan": "called by torch.distributed.checkpoint",
    "dcp.Writer.set_up_storage_writer": "called by torch.distributed.checkpoint",
    "dcp.Writer.storage_meta": "called by torch.distributed.checkpoint",
    "dcp.Writer.write_data": "called by torch.distributed.checkpoint",
    "events.count": "called by the library",
    "extend.Part": "made for every tensor of a plan; PlannedSaves.prepare lays them out",
    "extend.check_engine": "takes an engine of DeepSpeed: tests/integrations/trainers",
    "extend.data_of": "takes loaders of data, of any class",
    "extend.decode": "codes what the format says: tests/core/format",
    "extend.decode_torch": "codes what the format says: tests/core/format",
    "extend.encode": "codes what the format says: tests/core/format",
    "extend.engine_counters": "takes an engine of DeepSpeed: tests/integrations/trainers",
    "extend.gradients_text": "takes what the library has made",
    "extend.inline_tensor": "codes what the format says: tests/core/format",
    "extend.notes_of": "takes what the library has made",
    "extend.notices_of": "takes what the library has made",
    "extend.order_of": "takes loaders of data, of any class",
    "extend.path_of": "checks or names a value that a user gave to somebody else's call",
    "extend.PlannedSaves.begin": "called by a planner of saves: tests/integrations/dcp",
    "extend.PlannedSaves.begun": "called by a planner of saves: tests/integrations/dcp",
    "extend.PlannedSaves.commit": "called by a planner of saves: tests/integrations/dcp",
    "extend.PlannedSaves.go_on_from": "called by a planner of saves: tests/integrations/dcp",
    "extend.PlannedSaves.prepare": "called by a planner of saves: tests/integrations/dcp",
    "extend.PreparedPart": "called by a planner of saves: tests/integrations/dcp",
    "extend.PreparedPart.take_note": "called by a planner of saves: tests/integrations/dcp",
    "extend.PreparedPart.write_and_note": "called by a planner of saves: tests/integrations/dcp",
    "extend.put_engine_counters": "takes an engine of DeepSpeed: tests/integrations/trainers",
    "extend.put_order": "takes loaders of data, of any class",
    "extend.read_files": "by Checkpointer(files=)",
    "extend.read_into": "codes what the format says: tests/core/format",
    "extend.referred": "codes what the format says: tests/core/format",
    "extend.samplers_of": "takes loaders of data, of any class",
    "extend.StateDictNames": "called by a planner of saves with torch's own names",
    "extend.StateDictNames.extras": "called by a planner of saves with torch's own names",
    "extend.StateDictNames.inner": "called by a planner of saves with torch's own names",
    "extend.StateDictNames.of": "called by a planner of saves with torch's own names",
    "extend.StateDictNames.path": "called by a planner of saves with torch's own names",
    "extend.step_of": "checks or names a value that a user gave to somebody else's call",
    "extend.tell_other_data": "takes loaders of data, of any class",
    "extend.torch_dtype": "codes what the format says: tests/core/format",
    "extend.unfit": "checks or names a value that a user gave to somebody else's call",
    "extend.unwrap": "takes modules, of any class",
    "extend.values_in": "codes what the format says: tests/core/format",
    "extend.writes_to": "takes modules, of any class",
    "events.emit": "called by the library",
    "events.span": "called by the library",
    "sources.Master": "made for every parameter at every save; told wrong, SourceTests fail",
    "sources.flat_cut": "made for every parameter at every save; told wrong, SourceTests fail",
}
"""Calls whose arguments are checked elsewhere, or which are not for users; why."""
OF_THE_CALLER = {
    "extend.check_metrics(call)",
    "extend.check_root(foreign)",
    "extend.go_on_from(checkpointer)",
    "extend.stop_if_told(checkpointer)",
}
"""Arguments that somebody else's library gives of its own, beside those of its user."""


def public_calls() -> dict[str, Any]:
    """Functions, classes and their public methods, by the name that a user writes after `holdfast.`"""
    found: dict[str, Any] = {}
    for name in holdfast.__all__:
        value = getattr(holdfast, name)
        if name == "integrations":  # modules for trainers, which need not be installed here
            continue
        if inspect.ismodule(value):
            own = getattr(value, "__all__", None) or [
                n
                for n, v in vars(value).items()
                if getattr(v, "__module__", None) == value.__name__ and not n.startswith("_")
            ]
            found |= {f"{name.removeprefix('holdfast.')}.{n}": getattr(value, n) for n in own}
        else:
            found[name] = value
    calls: dict[str, Any] = {}
    for name, value in found.items():
        if name.startswith("errors.") or not callable(value) or _is_protocol(value):
            continue
        if inspect.isclass(value) and issubclass(value, BaseException):
            continue
        calls[name] = value
        if inspect.isclass(value) and not name.startswith(("store.", "testing.")):
            calls |= {
                f"{name}.{n}": getattr(value, n)
                for n, v in vars(value).items()
                if not n.startswith("_") and (inspect.isfunction(v) or isinstance(v, staticmethod))
            }
    return calls


def _is_protocol(value: Any) -> bool:
    return bool(getattr(value, "_is_protocol", False))


def test_every_argument_of_every_public_call_is_tried() -> None:
    """A new argument, or a new call, comes into the table above."""
    calls = public_calls()
    missing = []
    for name, call in calls.items():
        if (
            name in RESULTS
            or name in ELSEWHERE
            or name in ("testing.SourceTests", "testing.StoreTests")
        ):
            continue
        arguments = [p for p in inspect.signature(call).parameters if p != "self"]
        tried = CALLS.get(name, (None, {}))[1]
        missing += [f"{name}({argument})" for argument in arguments if argument not in tried]
    assert not set(missing) - OF_THE_CALLER
    ours = {name for name in CALLS if not name.startswith(("store.", "local."))}
    assert ours <= calls.keys(), "the table is of calls that there are"
    for store in ("store", "local"):
        methods = [n for n, v in vars(Store).items() if inspect.isfunction(v) and n[0] != "_"]
        assert {f"{store}.{n}" for n in methods} <= CALLS.keys()


# -- what is taken --------------------------------------------------------------------------------


SEVENS: Values = (
    7,
    np.int64(7),
    np.uint8(7),
    np.array(7),
    torch.tensor(7),
    torch.tensor(7, dtype=torch.int8),
)
HALVES: Values = (0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), fractions.Fraction(1, 2),
                  decimal.Decimal("0.5"))  # fmt: skip


@pytest.mark.parametrize("seven", SEVENS, ids=repr)
def test_integers_of_other_libraries_are_steps(tmp_path: Path, seven: Any) -> None:
    state = {"model": nn.Linear(2, 2)}
    holdfast.save(tmp_path / "once", state, step=seven)
    assert holdfast.load(tmp_path / "once", state, step=seven) == 7
    assert holdfast.open(tmp_path / "once", step=seven).step == 7
    every = holdfast.Every(durable=seven)
    with holdfast.Checkpointer(tmp_path / "run", state, every=every, on_error="raise") as ckpt:
        ckpt.step(seven)
        assert ckpt.save(seven + 1).step == 8
        ckpt.wait()
        assert ckpt.restore(seven) == 7
    assert holdfast.steps(tmp_path / "run") == [7, 8]
    assert type(every.durable) is int and type(holdfast.Keep(last=seven).last) is int
    assert type(holdfast.Delta(batch=seven, queue=seven).slots) is int
    assert holdfast.Memory(budget=seven).budget_bytes == 7
    assert isinstance(holdfast.Memory(feed="gradient", prove_every=seven).prove_every, int)


@pytest.mark.parametrize("half", HALVES, ids=repr)
def test_numbers_of_other_libraries_are_seconds_and_shares(tmp_path: Path, half: Any) -> None:
    auto = holdfast.Auto(
        mtbf_hours=half, overhead=half, node_share=half, gain=half, rarest_hours=half
    )
    assert auto == holdfast.Auto(0.5, 0.5, 0.5, 0.5, 0.5) and type(auto.overhead) is float
    assert holdfast.Memory(flush_after_s=half).flush_after_s == 0.5
    assert holdfast.compression.TopK(half).ratio == 0.5
    holdfast.compression.sparse([torch.ones(2)], at_most=half)
    state = {"model": nn.Linear(2, 2)}
    with holdfast.Checkpointer(tmp_path, state, deadline_s=half * 120, sigterm_s=half) as ckpt:
        ckpt.wait(half)
        ckpt.close(half * 120)


def test_paths_flags_and_patterns_of_other_types_are_taken(tmp_path: Path) -> None:
    class Anywhere(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(tmp_path)

    state = {"model": nn.Linear(2, 2)}
    holdfast.save(Anywhere(), state, step=1)
    assert holdfast.steps(np.str_(tmp_path)) == holdfast.steps(f"file://{tmp_path}") == [1]
    assert holdfast.load(Anywhere(), state, cast=np.True_, only=(n for n in ["model.weight"])) == 1
    assert holdfast.Checkpoint.open(tmp_path).read(
        "model.weight", np.array([[0, 1], [0, 2]])
    ).shape == (1, 2)
    made = holdfast.convert(
        Anywhere(), tmp_path / "c", max_file_bytes=np.int64(10**9), verify=np.True_
    )
    assert made.step == 1


def test_an_empty_state_is_told_as_empty(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="state is an empty dict"):
        holdfast.save(tmp_path, {}, step=1)


class Key(str, enum.Enum):
    MODEL = "model"


def test_a_key_that_is_written_otherwise_than_it_reads_is_refused(tmp_path: Path) -> None:
    """It would be saved under `Key.MODEL`, and load under no other key."""
    with pytest.raises(UsageError, match=r"Key.MODEL.*must be a plain text") as caught:
        holdfast.save(tmp_path, {Key.MODEL: nn.Linear(1, 1)}, step=1)
    assert caught.value.hint == "give 'model' itself"


def test_sigterm_needs_the_main_thread(tmp_path: Path) -> None:
    def make() -> str:
        return refusal(
            lambda **a: holdfast.Checkpointer(tmp_path, {"model": nn.Linear(1, 1)}, **a),
            "sigterm_s",
            5.0,
        )

    with ThreadPoolExecutor(1) as pool:
        assert "main thread" in pool.submit(make).result()
    assert not os.listdir(tmp_path), "nobody took the root"


def test_ranks_have_not_met_when_an_argument_is_refused(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make a group is what ranks do first together."""

    def met(*_: Any) -> None:
        raise AssertionError("the ranks have met")

    for module in (save_and_load, checkpointer):
        monkeypatch.setattr(module, "Group", met)
    for call in ("save", "load", "Checkpointer"):
        make, arguments = CALLS[call]
        for argument, values in arguments.items():
            for value in values:
                if not isinstance(value, str) or value != "dpc:x":  # rank 0 looks there for all
                    refusal(make(made), argument, value)


def test_near_misses_and_the_way_to_say_it_are_told(tmp_path: Path) -> None:
    for call, wanted in (
        (
            lambda: holdfast.Checkpointer(tmp_path, {"m": nn.Linear(1, 1)}, when_busy="qeue"),
            "'queue'",
        ),
        (lambda: holdfast.load(tmp_path, {"loader": 1}, on_resize={"loadr": "fresh"}), "'loader'"),
        (lambda: holdfast.convert(tmp_path, tmp_path / "x", to="hugingface"), "'huggingface'"),
        (
            lambda: holdfast.convert(tmp_path, tmp_path / "x", to="torch", dtype=torch.bfloat16),
            "'bfloat16'",
        ),
        (lambda: holdfast.save(b"runs", {"m": nn.Linear(1, 1)}, step=1), "os.fsdecode"),
        (
            lambda: holdfast.save(tmp_path, {"m": 1}, step=1, deadline_s=datetime.timedelta(1)),
            "total_seconds",
        ),
        (
            lambda: holdfast.Checkpointer(tmp_path, {"m": 1}, memory=holdfast.Memory),
            "the class Memory itself",
        ),
        (lambda: holdfast.compression.sparse(torch.ones(2), at_most=0.1), "give a list"),
    ):
        with pytest.raises(UsageError, match=wanted):
            call()


def test_a_rename_that_gives_no_name_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": nn.Linear(1, 1)}, step=1)
    with pytest.raises(
        UsageError, match=r"rename\('bias'\) returned None|rename\('weight'\) returned None"
    ):
        holdfast.convert(tmp_path / "run", tmp_path / "x", to="torch", rename=lambda name: None)


def test_a_rename_is_asked_for_the_names_of_weights_alone(tmp_path: Path) -> None:
    """As they are without their key; what it raises is told with the name."""
    state = {"model": nn.Linear(1, 1), "other": nn.Linear(1, 1)}
    holdfast.save(tmp_path / "run", state, step=1)
    names = {"weight": "w", "bias": "b"}
    made = holdfast.convert(tmp_path / "run", tmp_path / "x", to="torch", rename=lambda n: names[n])
    assert set(torch.load(made.path)) == {"w", "b"}
    with pytest.raises(UsageError, match=r"rename\('weight'\) raised KeyError: 'weight'"):
        holdfast.convert(tmp_path / "run", tmp_path / "y", to="torch", rename=lambda n: {}[n])


def test_a_target_among_a_roots_own_files_is_refused(made: Made) -> None:
    for inside in ("steps/x", "claims/x", "log/x/y"):
        with pytest.raises(UsageError, match=f"lies in {inside.split('/')[0]}/ of the root"):
            holdfast.convert(made.root, f"{made.root}/{inside}", to="torch")
    assert not os.path.exists(f"{made.root}/log")


def test_a_target_that_cannot_be_made_is_named(made: Made) -> None:
    with pytest.raises(StoreError, match=r"cannot create '/proc/x\.partial'"):
        holdfast.convert(made.root, "/proc/x", to="torch")


def test_a_path_that_leads_into_a_root_is_told_the_root(made: Made) -> None:
    for inside, more in (
        ("steps", ""),
        ("steps/0000000007/manifest.json", ", and step 7 by itself"),
    ):
        for call in (
            lambda url: holdfast.load(url, made.state),
            lambda url: holdfast.open(url),
        ):
            with pytest.raises(HoldfastError) as caught:
                call(f"{made.root}/{inside}")
            assert caught.value.hint == f"it lies in a root: give {made.root}{more}"
    with pytest.raises(HoldfastError) as caught:
        holdfast.steps(f"{made.root}@7")
    assert "for step 7 of 'run' give the step by itself" in str(caught.value.hint)


def test_topk_checks_what_it_is_given(one_rank: None) -> None:
    topk = holdfast.compression.TopK()
    topk.register(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    for value in COUNTS:
        assert "ranks" in refusal(topk.rows_of_rank, "ranks", value)
    for value in (Odd(), None, 3, [], {}, {"ranks": 1}):
        assert "state" in refusal(topk.load_state_dict, "state", value)
    topk.load_state_dict(topk.state_dict())


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_store_and_testing_are_there_without_an_import_of_their_own() -> None:
    """In a fresh interpreter: here, other tests have imported them."""
    code = """if True:
        import holdfast
        assert {"store", "testing"} <= set(dir(holdfast))
        holdfast.store.open_store, holdfast.testing.StoreTests
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
