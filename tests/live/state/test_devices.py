"""Values beside tensors return to the device of what they belong to; here it is one without memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.core.format import extras
from holdfast.live.collecting import collect
from holdfast.live.restore import optimizer_states
from holdfast.live.restore.optimizer_states import put_plain_states
from holdfast.live.state import devices, own_loading
from holdfast.live.state.customised import OwnEntries
from holdfast.live.state.encoding import outline_tensor
from holdfast.live.state.optimizers import LiveOptimizer, ParamNames
from holdfast.sources import Sources


class Sums(nn.Module):
    """Keeps the tensors that it is given, as torchmetrics' metrics do."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.total, self.seen = torch.zeros(2, device=device), list[torch.Tensor]()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}total"], destination[f"{prefix}seen"] = self.total, self.seen

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.total, self.seen = state.pop(f"{prefix}total"), state.pop(f"{prefix}seen")


def restored(device: str, **hyper: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Optimizer state of a parameter, as it was, and put back beside one on `device`."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device=device))
    optimizer, other = (torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in (p, q))
    other.param_groups[0].update(hyper)
    counts = {"step": torch.tensor(2.0), "sum": torch.tensor(3.0)}
    optimizer.state[p] = {"past": [torch.randn(3), counts], "pair": (torch.randn(2, 2), 4), "n": 5}
    tree = collect({"optim": optimizer}).extras["optim"]

    def decode(tree: Any) -> Any:
        return extras.decode(tree, lambda tag, body: outline_tensor(body))

    source = Sources().of(other)
    live = LiveOptimizer(
        "optim", other, source, source.groups(other), ParamNames(), [[("group0.0", q)]]
    )
    put_plain_states(live, tree, decode)
    return optimizer.state[p], other.state[q]


def test_tensors_in_lists_go_to_their_parameters_device() -> None:
    """Those under the name of a count stay, as torch has them, unless a graph is captured."""
    _, there = restored("meta")
    assert there["past"][0].is_meta and there["past"][1]["sum"].is_meta and there["pair"][0].is_meta
    assert there["past"][1]["step"].item() == 2.0
    assert (there["pair"][1], there["n"]) == (4, 5)
    assert restored("meta", capturable=True)[1]["past"][1]["step"].is_meta


def test_on_the_cpu_they_are_what_they_were() -> None:
    here, there = restored("cpu")
    assert here.keys() == there.keys()
    assert torch.equal(here["past"][0], there["past"][0])
    assert here["past"][1] == there["past"][1]
    assert torch.equal(here["pair"][0], there["pair"][0])
    assert (there["pair"][1], there["n"]) == (4, 5)


@pytest.mark.parametrize("hyper", [{}, {"capturable": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam, torch.optim.AdamW])
def test_numbers_go_where_torch_loads_them(
    tmp_path: Path, kind: Any, hyper: dict[str, Any]
) -> None:
    """To their parameter's device, but for `step`; also beside a parameter that is a number itself."""
    model = nn.ParameterDict({"scale": torch.tensor(2.0), "weight": torch.ones(3)})
    optimizer = kind(model.parameters())
    sum(p.sum() for p in model.values()).backward()
    optimizer.step()
    holdfast.save(tmp_path, {"model": model, "optim": optimizer}, step=1)
    groups = [{"params": [0], **hyper}]
    with holdfast.open(tmp_path) as checkpoint:
        for name, p in model.items():
            q = torch.empty_like(p, device="meta")
            for state, value in optimizer.state[p].items():
                by_torch = optimizer._process_value_according_to_param_policy(
                    q, value, 0, groups, state
                )
                full = f"optim.{name}.{state}"
                mine = optimizer_states._new_state(checkpoint, full, q, groups[0], None, None, None)
                assert (mine.device, mine.shape) == (by_torch.device, by_torch.shape), full


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_metrics_keep_their_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a list that was empty, where nothing else of the metric tells it."""
    monkeypatch.setattr(own_loading, "_differing", lambda *_: [])  # there are no values to compare
    for entries in ({"total": torch.ones(2), "seen": [torch.ones(3)]}, {"seen": [torch.ones(3)]}):
        sums = Sums(device)
        own = OwnEntries("", sums, made={name: getattr(sums, name) for name in entries})
        own_loading.put_own("sums", own, entries)
        assert {t.device.type for t in (sums.total, *sums.seen)} == {device}
        assert len(sums.seen) == 1


class SlowLocks:
    """Page-locks of which each waits until it may go on."""

    def __init__(self) -> None:
        self.may_lock, self.was_unlocked = threading.Event(), threading.Event()

    def lock(self, address: int, size: int) -> str:
        self.may_lock.wait()
        return ""

    def unlock(self, address: int) -> None:
        self.was_unlocked.set()


def test_memory_is_unlocked_where_only_the_thread_that_locks_it_still_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner has let go of it before it was locked: a device would go on to write to freed memory."""
    locks = SlowLocks()
    monkeypatch.setitem(devices.page_locks, "cpu", locks)
    locked = devices.lock_pages(memoryview(bytearray(4096)), [torch.device("cpu")])
    assert locked is not None
    del locked
    locks.may_lock.set()
    assert locks.was_unlocked.wait(60)
