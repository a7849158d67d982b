"""Steps of more than ten digits, as of a training that counts tokens: everywhere in the order of numbers.

In the order of texts 10000000000 comes before 9999999999.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Delta, Every, Keep
from holdfast.core.checkpoint.names import RootKeys, manifest_key, run_of_log, step_prefix
from holdfast.core.checkpoint.recorded import parse_segment
from holdfast.errors import UsageError
from holdfast.integrations.dcp.ids import step_of_id
from holdfast.store import LocalStore, MemoryStore
from holdfast.tiers.records.segment import segment_key
from tiers.memory.agents import agent
from tiers.records.test_exact import check_equal
from tiers.records.test_offline import Plain, call

TOKENS = 4_000_000
LAST = 9_999_999_999
"""The last step of ten digits."""
LONG = [LAST - TOKENS, LAST, LAST + 1, LAST + TOKENS, 10**13]


def saved(root: Path, steps: list[int], **options: Any) -> None:
    state = {"x": {"t": torch.zeros(3)}}
    with holdfast.Checkpointer(root, state, **options) as ckpt:
        ckpt.restore()
        for step in steps:
            state["x"]["t"].fill_(step)
            ckpt.save(step).wait()


def value_of(root: Path | str, step: int | None = None) -> float:
    state = {"x": {"t": torch.zeros(3)}}
    holdfast.load(root, state, step=step)
    return float(state["x"]["t"][0])


@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_newest_stay(tmp_path: Path, last: int) -> None:
    saved(tmp_path, LONG, keep=Keep(last=last))
    assert holdfast.steps(tmp_path) == LONG[-last:]
    assert value_of(tmp_path) == float(torch.tensor(10.0**13))


def test_a_run_goes_on_over_the_last_of_ten_digits(tmp_path: Path) -> None:
    """A restart takes the newest, also where it has a digit more; `find` and the verbs say the same."""
    saved(tmp_path, LONG[:2])
    for more in LONG[2:]:
        saved(tmp_path, [more])
        with holdfast.Checkpointer(tmp_path, {"x": {"t": torch.zeros(3)}}) as ckpt:
            assert ckpt.find().step == more
            assert ckpt.restore() == more
    assert holdfast.steps(tmp_path) == LONG
    rows = json.loads(call("ls", tmp_path, "--json")[1])
    assert [row["step"] for row in rows["steps"]] == LONG
    for step in LONG:
        assert value_of(tmp_path, step) == float(torch.tensor(float(step)))
        assert call("verify", f"{tmp_path}@{step}")[0] == 0
    status, text = call("prune", tmp_path, "--keep-last", 2, "--json")
    assert (status, json.loads(text)["kept"]) == (0, LONG[-2:])
    other = tmp_path.parent / "other"
    assert call("copy", tmp_path, other)[0] == 0
    assert holdfast.steps(other) == LONG[-1:]
    shutil.rmtree(other)


def test_what_is_kept_by_multiples(tmp_path: Path) -> None:
    saved(tmp_path, [10**10, 15 * 10**9, 2 * 10**10, 21 * 10**9], keep=Keep(last=1, every=10**10))
    assert holdfast.steps(tmp_path) == [10**10, 2 * 10**10, 21 * 10**9]


def train(ckpt: holdfast.Checkpointer, run: Plain, steps: range) -> None:
    for step in steps:
        run.step(step)
        ckpt.step(step)
        ckpt.wait()


@pytest.mark.slow
def test_records_and_uploads(tmp_path: Path) -> None:
    """They lead on over the last step of ten digits, in the root and in the home behind it."""
    root, behind = tmp_path / "root", tmp_path / "behind"

    def begin(run: Plain) -> holdfast.Checkpointer:
        more = {"upload": behind, "upload_keep": Keep(last=2)}
        delta = Delta(upload_every_s=0.05)
        every = Every(durable=10, delta=1)
        return holdfast.Checkpointer(
            root, run.state, every=every, delta=delta, keep=Keep(last=2), **more
        )

    first = 10**10 - 20
    run = Plain()
    with begin(run) as ckpt:
        train(ckpt, run, range(first, first + 25))
    twin = Plain()
    for step in range(first, first + 30):
        twin.step(step)
    assert holdfast.steps(root) == [LAST - 9, LAST + 1]
    for lost in (False, True):
        if lost:
            root.rename(tmp_path / "lost")
        run = Plain()
        with begin(run) as ckpt:
            last = ckpt.restore()
            assert last == (first + 29 if lost else first + 24)
            train(ckpt, run, range(int(last) + 1, first + 30))
        check_equal(run.everything(), twin.everything())
    records = json.loads(call("log", behind, "--json")[1])
    steps = [row["first"] for row in records["records"]]
    assert steps and steps == sorted(steps)


def test_keys_have_one_form() -> None:
    """Of one step there is one key: zeros in front of more than ten digits are no step of ours."""
    store = MemoryStore("long-steps")
    sound = [manifest_key(step) for step in (7, LAST, LAST + 1, 10**15 - 1)]
    others = ["steps/00000000007/manifest.json", "steps/1000000000000000/manifest.json"]
    for key in (*sound, *others):
        store.put(key, b"")
    assert sorted(RootKeys(store).manifests) == [7, LAST, LAST + 1, 10**15 - 1]
    key = segment_key(3, LAST, LAST + 1, 0)
    assert (parse_segment(key), run_of_log(key)) == ((3, LAST, LAST + 1, 0), 3)
    assert parse_segment(f"log/0000000003/0{LAST}-0{LAST}/r00000.log") is None
    assert step_of_id("step-10000000000", "runs") == 10**10
    with pytest.raises(UsageError, match="999999999999999"):
        step_prefix(10**15)


def test_what_lies_beside_the_steps_is_left_alone(tmp_path: Path) -> None:
    """Folders of numbers that are no step of ours hinder no listing."""
    saved(tmp_path, [1])
    LocalStore(tmp_path).put("steps/20261128123456789012/a/b", b"")
    assert json.loads(call("ls", tmp_path, "--json")[1])["steps"][0]["step"] == 1


@pytest.mark.slow
def test_snapshots_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    x = torch.zeros(3)
    memory, every = holdfast.Memory(redundancy="none"), Every(memory=1)
    with (
        agent(tmp_path / "node"),
        holdfast.Checkpointer(
            tmp_path / "root", {"x": {"t": x}}, memory=memory, every=every
        ) as ckpt,
    ):
        ckpt.save(LAST - 1).wait()
        for step in (LAST, LAST + 1):
            x.fill_(step - LAST + 5)
            ckpt.step(step)
            ckpt.wait()
        x.zero_()
        assert (ckpt.find().step, ckpt.find().tier) == (LAST + 1, "memory")
        assert ckpt.restore() == LAST + 1
    assert x.tolist() == [6.0] * 3
