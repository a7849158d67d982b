"""What is no tensor: schedulers, scalers, random numbers, loaders, the user's own objects and values."""

from __future__ import annotations

import enum
import io
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

import holdfast
from holdfast.errors import UsageError


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5, momentum=0.5)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lrs.StepLR(o, 3, 0.5),
    "multi-step": lambda o: lrs.MultiStepLR(o, [2, 5, 7], 0.5),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 9),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "one-cycle": lambda o: lrs.OneCycleLR(o, 1.0, total_steps=30),
    "linear": lambda o: lrs.LinearLR(o, 0.1, total_iters=9),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 8)], [4]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.StepLR(o, 2), lrs.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, factor=0.5),
}


def rates(scheduler: Any, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[Any]:
    """The learning rate (and the momentum that OneCycle moves) after each step."""
    found = []
    for step in range(start, stop):
        optimizer.step()
        metric = (1.0 + step % 3,) if isinstance(scheduler, lrs.ReduceLROnPlateau) else ()
        scheduler.step(*metric)
        group = optimizer.param_groups[0]
        found.append((group["lr"], group["momentum"]))
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedulers_go_on(tmp_path: Path, name: str) -> None:
    optimizer = sgd()
    scheduler = SCHEDULERS[name](optimizer)
    rates(scheduler, optimizer, 0, 5)
    holdfast.save(tmp_path, {"optim": optimizer, "sched": scheduler}, step=5)
    expected = rates(scheduler, optimizer, 5, 14)
    assert len(set(expected)) > 1
    other = sgd()
    fresh = SCHEDULERS[name](other)
    holdfast.load(tmp_path, {"optim": other, "sched": fresh})
    assert rates(fresh, other, 5, 14) == expected


def test_grad_scaler(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=7)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 5})
    holdfast.save(tmp_path, {"scaler": scaler}, step=1)
    fresh = torch.amp.GradScaler("cpu")
    holdfast.load(tmp_path, {"scaler": fresh})
    assert fresh.state_dict() == scaler.state_dict()
    assert (fresh.state_dict()["scale"], fresh.state_dict()["_growth_tracker"]) == (32.0, 5)


def draws() -> list[Any]:
    """Numbers from every generator, dropout's mask among them."""
    dropped = nn.functional.dropout(torch.ones(64), 0.5)
    normal = random.gauss(0, 1), float(np.random.standard_normal())
    return [random.random(), *normal, np.random.random(3).tolist(), dropped.tolist()]


@pytest.mark.parametrize("key", ["rng", "mine"])
def test_random_numbers_go_on(tmp_path: Path, key: str) -> None:
    """A Checkpointer includes them; after an odd number of Gaussian draws one is in store."""
    state: dict[str, Any] = {"x": 1}
    if key == "mine":
        state["mine"] = holdfast.Rng()
    draws()
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(3).wait(120)
        expected = draws()
        assert draws() != expected
        assert ckpt.restore() == 3
        assert draws() == expected


# -- objects and values ---------------------------------------------------------------------------


class Sampler:
    """A user's own object: numbers, a large tensor, a small one, an array."""

    def __init__(self, fill: int) -> None:
        self.state = {
            "at": fill,
            "order": torch.full((50_000,), fill),
            "small": torch.full((3,), fill, dtype=torch.bfloat16),
            "array": np.full((2, 2), fill, "i2"),
            "nested": [{"x": (fill, None)}],
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_objects(tmp_path: Path) -> None:
    saved, loaded = Sampler(7), Sampler(1)
    holdfast.save(tmp_path, {"sampler": saved}, step=1)
    holdfast.load(tmp_path, {"sampler": loaded})
    for name in ("order", "small"):
        assert loaded.state[name].dtype == saved.state[name].dtype
        assert torch.equal(loaded.state[name], saved.state[name])
    assert np.array_equal(loaded.state["array"], saved.state["array"])
    assert loaded.state["array"].dtype == np.dtype("i2")
    assert (loaded.state["at"], loaded.state["nested"]) == (7, [{"x": (7, None)}])
    assert "sampler.order" in holdfast.open(str(tmp_path)).names()


VALUES: list[Any] = [
    5,
    -(2**63),
    2**200,
    0.1,
    float("inf"),
    -0.0,
    True,
    None,
    "text \u00e4\U0001f600\0",
    "$dict",
    b"\0\xff",
    3 + 4j,
    (1, (2, [3])),
    [1, [2, {"a": (3,)}]],
    {"a": {1: "int key", (2, 3): "tuple key"}},
    {"$tuple": [1]},
    {1, 2, 3},
    frozenset({1, 2, 3}),
    {frozenset({1}): {(2, frozenset({3}))}},
    deque([1, 2], maxlen=5),
    Counter("aab"),
    OrderedDict(b=1, a=2),
    np.float32(0.1),
    np.arange(6, dtype="u2").reshape(2, 3),
    {},
    [],
]


def test_plain_values_come_back_with_their_types(tmp_path: Path) -> None:
    saved = {"v": list(VALUES), "n": 3, "s": "x", "t": (1, "a")}
    holdfast.save(tmp_path, saved, step=1)
    mine: list[Any] = []
    loaded = {"v": mine, "n": 0, "s": "", "t": ()}
    holdfast.load(tmp_path, loaded)
    assert loaded["v"] is mine, "the user's own list is filled"
    assert (loaded["n"], loaded["s"], loaded["t"]) == (3, "x", (1, "a"))
    assert len(mine) == len(VALUES)
    for a, b in zip(mine, VALUES):
        assert type(a) is type(b), (a, b)
        assert np.array_equal(a, b) if isinstance(b, np.ndarray) else repr(a) == repr(b)


class Point(NamedTuple):
    x: int
    y: int


class Phase(enum.IntEnum):
    WARM = 1


def test_subclasses_come_back_as_what_they_derive_from(tmp_path: Path) -> None:
    """As the guide says."""
    own = defaultdict(list, a=[1])
    saved = [Point(1, 2), defaultdict(int, a=1), Phase.WARM, torch.Size([3]), bytearray(b"x")]
    holdfast.save(tmp_path, {"v": saved, "own": own}, step=1)
    loaded: dict[str, Any] = {"v": [], "own": defaultdict(list)}
    holdfast.load(tmp_path, loaded)
    assert [type(v) for v in loaded["v"]] == [tuple, dict, int, tuple, bytes]
    assert loaded["v"] == [(1, 2), {"a": 1}, 1, (3,), b"x"]
    assert loaded["own"] == own
    assert loaded["own"]["b"] == []


UNSAVED: dict[str, Any] = {
    "MaskedArray": np.ma.masked_array([1, 2], [False, True]),
    "MaskedConstant": np.ma.masked,
    "numpy.void": np.zeros(1, [("x", "i4")])[0],
    "a number of 16610 bits": 10**5000,
}


@pytest.mark.parametrize("what", UNSAVED)
def test_values_of_which_something_would_be_lost_are_refused(tmp_path: Path, what: str) -> None:
    pattern = f"v.x: .*{what}.* cannot be saved"
    with pytest.raises(holdfast.errors.UsageError, match=pattern):
        holdfast.save(tmp_path, {"v": {"x": UNSAVED[what]}}, step=1)


def test_nan_comes_back(tmp_path: Path) -> None:
    state = {"x": float("nan")}
    holdfast.save(tmp_path, state, step=1)
    state["x"] = 0.0
    holdfast.load(tmp_path, state)
    assert state["x"] != state["x"]


def test_tensors_in_nested_containers_are_loaded_in_place(tmp_path: Path) -> None:
    def build(fill: float) -> dict[str, Any]:
        return {"a": [torch.full((3,), fill), {"b": torch.tensor(fill)}], "n": fill}

    saved, loaded = build(2.0), build(0.0)
    tensors = loaded["a"][0], loaded["a"][1]["b"]
    holdfast.save(tmp_path, {"state": saved}, step=1)
    holdfast.load(tmp_path, {"state": loaded})
    assert (tensors[0].tolist(), tensors[1].item(), loaded["n"]) == ([2, 2, 2], 2.0, 2.0)
    assert loaded["a"][0] is tensors[0]
    assert loaded["a"][1]["b"] is tensors[1]


def test_a_checkpointer_saves_and_restores_current_numbers(tmp_path: Path) -> None:
    state: dict[str, Any] = {"tokens": 10, "history": [1]}
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1).wait(120)
        state["tokens"] = 99
        state["history"].append(2)
        assert ckpt.restore() == 1
    assert state == {"tokens": 10, "history": [1]}


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, nn.ReLU, {"x": [open]}],
    ids=["object", "lambda", "class", "built-in"],
)
def test_what_cannot_be_saved_is_refused_with_its_path(tmp_path: Path, value: Any) -> None:
    with pytest.raises(holdfast.errors.UsageError, match=r"thing.*cannot be saved"):
        holdfast.save(tmp_path, {"thing": value}, step=1)
    assert holdfast.steps(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"thing": "caf\udce9"}, "thing: a text"),
        ({"thing": {"files": ["ok", "caf\udce9"]}}, r"thing\.files\[1\]: a text"),
        ({"thing": {"caf\udce9": torch.ones(2)}}, "thing key: a text"),
        ({"thing": nn.ModuleDict({"\udce9": nn.Linear(1, 1)})}, r"thing\.\\udce9\.weight: a text"),
        ({"thing\udce9": 1}, r"thing\\udce9: a text"),
        ({"thing": {Sampler(1)}}, r"thing\.\[0\]: a .*Sampler in a set"),
    ],
)
def test_what_could_not_be_read_again_is_refused_with_its_path(
    tmp_path: Path, state: Any, path: str
) -> None:
    with pytest.raises(holdfast.errors.UsageError, match=path) as caught:
        holdfast.save(tmp_path, state, step=1)
    str(caught.value).encode()
    assert holdfast.steps(str(tmp_path)) == []


def test_extra_state_of_modules(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        amax: Any = None

        def get_extra_state(self) -> Any:
            return {"amax": self.amax, "history": torch.tensor([1.0, 2.0])}

        def set_extra_state(self, state: Any) -> None:
            self.amax = state["amax"]

    saved, loaded = (
        nn.Sequential(Scaled(2, 2), Scaled(2, 2)),
        nn.Sequential(Scaled(2, 2), Scaled(2, 2)),
    )
    saved[0].amax, saved[1].amax = 3.5, "none"
    holdfast.save(tmp_path, {"model": saved}, step=1)
    holdfast.load(tmp_path, {"model": loaded})
    assert [m.amax for m in loaded] == [3.5, "none"]


def test_a_file_in_memory(tmp_path: Path) -> None:
    """Losses in a value, and the state of a module, as Transformer Engine has it."""

    class Scaled(nn.Linear):
        scales = b""

        def get_extra_state(self) -> io.BytesIO:
            file = io.BytesIO()
            file.write(self.scales)
            return file

        def set_extra_state(self, state: io.BytesIO) -> None:
            assert state.tell() == len(state.getvalue())
            self.scales = state.getvalue()

    saved, loaded = Scaled(2, 2), Scaled(2, 2)
    saved.scales = b"0.5"
    log = io.BytesIO(b"0.5 0.25")
    log.seek(4)
    holdfast.save(tmp_path, {"model": saved, "log": log}, step=1)
    state = {"model": loaded, "log": io.BytesIO()}
    holdfast.load(tmp_path, state)
    assert loaded.scales == b"0.5" and state["log"].read() == b"0.25"


# -- torchdata ------------------------------------------------------------------------------------


def test_torchdata_loader_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    data = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        generator = torch.Generator().manual_seed(5)
        return data.StatefulDataLoader(
            list(range(40)), batch_size=4, shuffle=True, generator=generator, num_workers=0
        )

    loader = make()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    holdfast.save(tmp_path, {"loader": loader}, step=4)
    rest = [batch.tolist() for batch in batches]
    assert len(rest) == 6
    fresh = make()
    holdfast.load(tmp_path, {"loader": fresh})
    assert [batch.tolist() for batch in fresh] == rest


def test_tensors_in_a_deque_come_back(tmp_path: Path) -> None:
    """As many as there were, into the deque that is there."""
    recent = deque([torch.ones(2), torch.zeros(3)], maxlen=5)
    holdfast.save(tmp_path, {"recent": recent, "more": {"of": deque([torch.ones(1)])}}, step=1)
    fresh: deque[torch.Tensor] = deque(maxlen=5)
    state = {"recent": fresh, "more": {"of": deque([torch.zeros(1), torch.zeros(1)])}}
    assert holdfast.load(tmp_path, state) == 1
    assert state["recent"] is fresh and fresh.maxlen == 5
    assert [t.tolist() for t in fresh] == [[1, 1], [0, 0, 0]]
    assert [t.tolist() for t in state["more"]["of"]] == [[1]]


def test_what_a_dict_has_besides_stays_where_not_strict(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"ema": {"a": torch.ones(2), "in": {"c": torch.ones(1)}}}, step=1)
    live = {"a": torch.zeros(2), "b": torch.full((2,), 7.0), "in": {"d": torch.full((1,), 5.0)}}
    with pytest.warns(holdfast.HoldfastWarning, match="left as it"):
        holdfast.load(tmp_path, {"ema": live}, strict=False)
    assert live["a"].tolist() == [1, 1] and live["b"].tolist() == [7, 7]
    assert live["in"]["d"].tolist() == [5]


class Counting(nn.Module):
    """A count of its own beside a tensor of a name of its own."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.register_buffer(name, torch.zeros(2))
        self.count = count

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_two_modules_of_a_list_do_not_share_the_name_of_an_extra_state(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"two different modules .* 'nets\._extra_state'"):
        holdfast.save(tmp_path, {"nets": [Counting("a", 1), Counting("b", 2)]}, step=1)
    shared = Counting("a", 3)
    holdfast.save(tmp_path, {"nets": [shared, shared]}, step=2)
    shared.count = 0
    holdfast.load(tmp_path, {"nets": [shared, shared]})
    assert shared.count == 3


def test_what_a_restore_removes_from_a_dict_is_told_once(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"told once": {"epoch": 3, "more": 1}}, step=1)
    progress = {"epoch": 0, "best": None}
    with pytest.warns(
        holdfast.HoldfastWarning, match="told once: step 1 has nothing of 'best', which"
    ):
        holdfast.load(tmp_path, {"told once": progress})
    assert progress == {"epoch": 3, "more": 1}
    progress["later"] = 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", holdfast.HoldfastWarning)
        holdfast.load(tmp_path, {"told once": progress})
    assert progress == {"epoch": 3, "more": 1}


def test_the_first_dict_under_a_key_tells_what_is_removed(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "none", {"late dict": None}, step=1)
    holdfast.load(tmp_path / "none", {"late dict": None})
    holdfast.save(tmp_path / "dict", {"late dict": {"epoch": 3}}, step=2)
    with pytest.warns(holdfast.HoldfastWarning, match="late dict: step 2 has nothing of 'best'"):
        holdfast.load(tmp_path / "dict", {"late dict": {"epoch": 0, "best": None}})
