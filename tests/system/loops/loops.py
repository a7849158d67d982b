"""Training loops that are drawn from a seed: what they train, by what means, and when they save.

A loop is a list of parts, each of which is a dataclass that prints as it was drawn.  A part makes its live
objects (`build`), does something at points of an iteration (`act`), and tells what of it is to be saved
(`state`).  An iteration goes through `POINTS`; a save at any of them has a number of its own, so a run that
is resumed goes on with the next point.

    loop = drawn(7)
    print(loop)                       # all of it, one part a line
    loop.build(torch_seed=1)
    loop.run(calls)                   # `calls`: what the loop asks of holdfast, or of its twin
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

OFFSETS = {
    "begin": -6, "forward": -5, "backward": -4, "before_step": -3, "update": -2, "after_step": -1,
    "call": 0, "again": 1, "after_call": 2, "end": 3,
}  # fmt: skip
"""Points of an iteration, by what is added to its number times `STRIDE`; `call` is `Checkpointer.step`."""
POINTS = tuple(point for point in OFFSETS if point != "backward")
"""Those that come one after the other: backward is within forward."""
STRIDE = 16
BETWEEN = ("forward", "backward", "before_step", "update")
"""Points at which gradients are on their way, which no state has: a run cannot go on from there."""
Way = Callable[[torch.Tensor, torch.Tensor], None]


def number_of(i: int, point: str) -> int:
    return i * STRIDE + OFFSETS[point]


def point_of(number: int) -> str:
    i = (number + 6) // STRIDE
    return next(point for point in OFFSETS if number_of(i, point) == number)


# -- ways to write to a tensor ---------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach()
    return (plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain).numpy()


def by_numpy(t: torch.Tensor, new: torch.Tensor) -> None:
    bits(t)[...] = bits(new)


def by_pointer(t: torch.Tensor, new: torch.Tensor) -> None:
    t.data = new.detach().clone()


def by_thread(t: torch.Tensor, new: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: t.data.copy_(new))
    thread.start()
    thread.join()


def by_storage(t: torch.Tensor, new: torch.Tensor) -> None:
    torch.from_dlpack(t.detach()).copy_(new)


WAYS: dict[str, Way] = {
    "copy_": lambda t, new: t.copy_(new),
    "lerp_": lambda t, new: t.lerp_(new, 0.5),
    "+=": lambda t, new: t.add_(new - t),
    "slice": lambda t, new: t.view(-1)[: t.numel() // 2].copy_(new.view(-1)[: t.numel() // 2]),
    "foreach": lambda t, new: torch._foreach_copy_([t], [new]),
    "detach": lambda t, new: t.detach().copy_(new),
    "data.copy_": lambda t, new: t.data.copy_(new),
    "data.lerp_": lambda t, new: t.data.lerp_(new, 0.5),
    "numpy": by_numpy,
    "dlpack": by_storage,
    "thread": by_thread,
    "pointer": by_pointer,
}
COUNTED = ("copy_", "lerp_", "+=", "slice", "foreach", "detach")
"""Those that torch counts: of others to an optimizer's states the docs say that they are not seen."""


def write(way: str, tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for t, new in zip(tensors, values):
            WAYS[way](t, new.detach())


# -- what is trained -------------------------------------------------------------------------------


class Part:
    """Something that a loop has."""

    is_plain = False
    """True if it is of a training in which only optimizers of torch move weights, inside their steps."""

    def build(self, loop: Loop) -> None:
        """Make the live objects; values follow from torch's generator."""

    def act(self, point: str, i: int) -> None:
        """Do what belongs to a point of iteration `i`."""

    def state(self) -> dict[str, Any]:
        return {}


class Net(nn.Module):
    def __init__(self, told: Model) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(told.width, told.width) for _ in range(told.layers))
        if told.tied:
            self.layers[-1].weight = self.layers[0].weight
        self.norm = nn.BatchNorm1d(told.width) if told.norm else None
        self.large = (
            nn.Parameter(torch.randn(int(told.large_mb * 2**18))) if told.large_mb else None
        )
        frozen = torch.randn(max(64, int(told.frozen_mb * 2**18)))
        self.base = nn.Parameter(frozen, requires_grad=False)
        if told.counts:
            self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "seen") and self.training:
            self.seen += 1
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.base[0]
        if self.large is not None:
            x = x * self.large[: x.shape[1]]
        return x if self.norm is None else self.norm(x)


@dataclass
class Model(Part):
    layers: int
    width: int
    dtype: str
    norm: bool
    counts: bool
    tied: bool
    large_mb: float
    frozen_mb: float
    micro_batches: int
    zero_at: str
    is_plain = True

    def build(self, loop: Loop) -> None:
        loop.net = self.net = Net(self).to(getattr(torch, self.dtype))
        loop.model = self

    def act(self, point: str, i: int) -> None:
        if point == self.zero_at:
            for p in self.net.parameters():
                p.grad = None

    def state(self) -> dict[str, Any]:
        return {"model": self.net}

    def compute(self, within: Callable[[str], None]) -> None:
        for batch in range(self.micro_batches):
            x = torch.randn(3, self.width) + random.random() + float(np.random.rand())
            y = self.net(x.to(getattr(torch, self.dtype)))
            if batch == 0:
                within("forward")
                y.register_hook(lambda grad: within("backward"))
            y.square().mean().backward()


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: optim.Adadelta(p),
    "asgd": lambda p: optim.ASGD(p, lr=0.05),
    "subclass": lambda p: Signs(p, {"lr": 0.01}),
}


class Signs(optim.Optimizer):
    """A script's own subclass."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.add_(mean.lerp_(p.grad, 0.1).sign(), alpha=-group["lr"])


class Own:
    """An optimizer that is none of torch's: momentum, and weights written in some way."""

    def __init__(self, params: list[nn.Parameter], way: str) -> None:
        self.weights, self.way = params, way
        self.moments = [torch.zeros_like(p) for p in params]

    def step(self) -> None:
        for p, m in zip(self.weights, self.moments):
            if p.grad is not None:
                write(self.way, [p], [p - 0.05 * m.mul_(0.9).add_(p.grad)])

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, m in zip(self.moments, state["moments"]):
            mine.copy_(m)


class Wrapped:
    """One of torch's behind a class that is none."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])


@dataclass
class Trainer(Part):
    """Moves the `share`-th of `shares` parts of the weights."""

    kind: str
    way: str
    share: int
    shares: int

    @property
    def is_plain(self) -> bool:  # type: ignore[override]
        return self.kind in OPTIMIZERS

    def build(self, loop: Loop) -> None:
        wanted = [p for p in loop.net.parameters() if p.requires_grad]
        self.weights = wanted[self.share :: self.shares]
        self.optim: Any = None
        if self.kind in ("hidden", "wrapped"):
            self.optim = optim.SGD(self.weights, lr=0.1, momentum=0.9 * (self.kind == "wrapped"))
        elif self.kind in OPTIMIZERS:
            self.optim = OPTIMIZERS[self.kind](self.weights)
        elif self.kind == "own":
            self.optim = Own(self.weights, self.way)
        if self.kind == "wrapped":
            self.optim = Wrapped(self.optim)

    def act(self, point: str, i: int) -> None:
        if point != "update":
            return
        if self.optim is not None:
            self.optim.step()
            return
        for p in self.weights:
            if p.grad is not None:
                write(self.way, [p], [p - 0.1 * p.grad])

    def state(self) -> dict[str, Any]:
        in_state = self.optim is not None and self.kind != "hidden"
        return {f"optim{self.share}": self.optim} if in_state else {}


@dataclass
class Schedule(Part):
    kind: str
    moment: str
    is_plain = True

    def build(self, loop: Loop) -> None:
        first = next(t.optim for t in loop.parts if isinstance(t, Trainer) and t.kind in OPTIMIZERS)
        kinds: dict[str, Callable[[Any], Any]] = {
            "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
            "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
            "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
            "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
        }
        self.schedule = kinds[self.kind](first)

    def act(self, point: str, i: int) -> None:
        if point == self.moment:
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        return {"schedule": self.schedule}


# -- what goes beside ------------------------------------------------------------------------------


class Shadow:
    """Averages in an object of the script."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, t in zip(self.tensors, state["tensors"]):
            mine.copy_(t)


@dataclass
class Follower(Part):
    """An average, a target network, a momentum encoder: follows the layers' weights."""

    key: str
    container: str
    way: str
    hard: bool
    moment: str
    each: int
    since: int

    def build(self, loop: Loop) -> None:
        self.net, layers = loop.net, loop.net.layers
        some = [p.detach() * 0.5 for p in layers.parameters()]
        boxes: dict[str, Callable[[], Any]] = {
            "module": lambda: copy.deepcopy(layers).requires_grad_(False),
            "inside": lambda: copy.deepcopy(layers).requires_grad_(False),
            "averaged": lambda: AveragedModel(layers),
            "dict": lambda: {f"w{k}": t for k, t in enumerate(some)},
            "nested": lambda: {"decay": 0.9, "of": {"layers": some}},
            "object": lambda: Shadow(some),
        }
        self.box = boxes[self.container]()
        if self.container == "inside":
            setattr(self.net, self.key, self.box)

    @property
    def tensors(self) -> list[torch.Tensor]:
        if isinstance(self.box, nn.Module):
            return [*self.box.parameters()]
        if isinstance(self.box, Shadow):
            return self.box.tensors
        return self.box["of"]["layers"] if self.container == "nested" else [*self.box.values()]

    def act(self, point: str, i: int) -> None:
        if point != self.moment or i < self.since or i % self.each:
            return
        followed = [*self.net.layers.parameters()]
        if self.container == "averaged":
            self.box.update_parameters(self.net.layers)
        elif self.way == "load_state_dict":
            self.box.load_state_dict(self.net.layers.state_dict())
        else:
            mine = self.tensors
            new = followed if self.hard else [t + 0.1 * (p - t) for t, p in zip(mine, followed)]
            if self.way == "rebind":
                self.box |= {name: t.detach().clone() for name, t in zip(self.box, new)}
            else:
                write(self.way, mine, new)

    def state(self) -> dict[str, Any]:
        return {} if self.container == "inside" else {self.key: self.box}


@dataclass
class Swap(Part):
    """Averages are exchanged for weights, something is asked of holdfast meanwhile, and back."""

    follower: Follower
    way: str
    back: str
    into: str
    out: str
    each: int
    look: str

    def build(self, loop: Loop) -> None:
        self.loop = loop

    def act(self, point: str, i: int) -> None:
        if i % self.each:
            return
        if point == self.into:
            self._exchange(self.way)
            with torch.no_grad():
                self.loop.net.eval()(torch.ones(2, self.loop.model.width).to(self.loop.net.base))
            self.loop.net.train()
            self.loop.calls.look(self.look)
        if point == self.out:
            self._exchange(self.back)

    def _exchange(self, way: str) -> None:
        weights, means = [*self.loop.net.layers.parameters()], self.follower.tensors
        kept = [p.detach().clone() for p in weights]
        write(way, weights, means)
        write(way, means, kept)


@dataclass
class Edit(Part):
    """The loop writes to something that an optimizer, or nobody, moves."""

    what: str
    way: str
    moment: str
    each: int
    since: int

    def build(self, loop: Loop) -> None:
        self.loop = loop

    def act(self, point: str, i: int) -> None:
        if point == self.moment and i >= self.since and not i % self.each:
            for t in self._tensors():
                write(self.way, [t], [t * 0.97])

    def _tensors(self) -> list[torch.Tensor]:
        net = self.loop.net
        if self.what == "moments":
            found = [t.optim for t in self.loop.parts if isinstance(t, Trainer) and t.is_plain]
            moments = [v for o in found for s in o.state.values() for v in s.values()]
            return [v for v in moments if isinstance(v, torch.Tensor) and v.ndim]
        if self.what == "buffers":
            return [b for b in net.buffers() if b.is_floating_point() and b.ndim]
        if self.what == "large":
            return [net.base if net.large is None else net.large]
        return [net.base] if self.what == "frozen" else [*net.layers.parameters()]


class Generators:
    """Generators of the script, in an object that torch and python would hand over so."""

    def __init__(self) -> None:
        self.torch, self.python = torch.Generator(), random.Random(torch.initial_seed())

    def state_dict(self) -> dict[str, Any]:
        return {"torch": self.torch.get_state(), "python": self.python.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.torch.set_state(state["torch"])
        self.python.setstate(state["python"])


@dataclass
class Values(Part):
    """Plain values that are changed in place, at some point."""

    kinds: list[str]
    moment: str
    is_plain = True

    def build(self, loop: Loop) -> None:
        made = {
            "list": [], "deque": deque(maxlen=3), "dict": {"seen": {"losses": [0.0], "at": 0}},
            "numpy": np.zeros(5), "tensor": torch.zeros(4), "big": torch.zeros(30_000),
            "count": 0, "counter": Counter(),
        }  # fmt: skip
        self.values: dict[str, Any] = {kind: made[kind] for kind in self.kinds}
        self.generators = Generators()

    def act(self, point: str, i: int) -> None:
        if point != self.moment:
            return
        drawn = self.generators.python.random()
        noise = torch.randn(4, generator=self.generators.torch)
        for kind, value in self.values.items():
            if kind in ("list", "deque"):
                value.append((i, drawn))
            elif kind == "dict":
                value["seen"]["losses"].append(drawn)
                value["seen"]["at"] = i
            elif kind == "count":
                self.values[kind] += 1
            elif kind == "counter":
                value[f"kind{i % 2}"] += 1
            elif kind == "numpy":
                value += drawn
            else:
                value[:4] += noise

    def state(self) -> dict[str, Any]:
        return {"values": self.values, "generators": self.generators}


# -- the loop --------------------------------------------------------------------------------------


@dataclass
class Options:
    """What a script says to holdfast, and how its process gets on."""

    every: int
    tier: str
    when_busy: str | None
    on_error: str
    slow_s: float
    """What a change of storage takes at least."""
    lag_s: float
    """Pause of a helper thread at each event, at most."""
    switch_s: float
    """Python's switch interval: how long a thread keeps the others out."""
    as_large: bool
    """Whether the state is treated as one that takes long to copy."""
    saves: list[int]
    """Numbers at which `save` is called, beside `step`."""
    looks: dict[int, str]
    """By number, what else is asked."""
    pause_s: float
    """Pause of the training at each point, at most."""
    end: str
    """`close`, `error` or `kill`; after the latter two the script is started again."""
    end_at: int


@dataclass
class Loop:
    seed: int
    iterations: int
    parts: list[Part]
    options: Options
    net: Net = field(init=False, repr=False)
    model: Model = field(init=False, repr=False)
    calls: Any = field(init=False, repr=False)

    def __str__(self) -> str:
        lines = [f"loop {self.seed}: {self.iterations} iterations", *map(repr, self.parts)]
        return "\n  ".join([*lines, repr(self.options)])

    @property
    def is_plain(self) -> bool:
        """True if only optimizers of torch move weights, and no save is made amid a step."""
        amid = any(point_of(n) in BETWEEN for n in self.options.saves)
        return all(part.is_plain for part in self.parts) and not amid

    def build(self, torch_seed: int) -> None:
        torch.manual_seed(torch_seed)
        random.seed(torch_seed)
        np.random.seed(torch_seed)
        for part in self.parts:
            part.build(self)

    def state(self) -> dict[str, Any]:
        return {key: value for part in self.parts for key, value in part.state().items()}

    def run(self, calls: Any, after: int = -STRIDE) -> None:
        """Train to the end, from the point behind that of number `after`; `calls` hears of each."""
        self.calls = calls
        for i in range(1, self.iterations + 1):
            for point in POINTS:
                if number_of(i, point) > after:
                    self._pass(point, i)

    def _pass(self, point: str, i: int) -> None:
        number = number_of(i, point)
        for part in self.parts:
            part.act(point, i)
        if point == "forward":
            self.model.compute(lambda at: self._asked(number_of(i, at)))
            return
        if point == "call":
            self.calls.step(number)
        self._asked(number)

    def _asked(self, number: int) -> None:
        if number in self.options.saves:
            self.calls.save(number)
        if number in self.options.looks:
            self.calls.look(self.options.looks[number])
        self.calls.passing(number)


def drawn(seed: int) -> Loop:
    """The loop of a seed: the same each time, but for how its threads get on."""
    r = random.Random(seed)
    iterations, kinds = r.randint(3, 7), r.random()
    tier = "memory" if (t := r.random()) < 0.015 else "records" if t < 0.03 else "durable"
    large = (0, 0) if tier != "durable" or r.random() < 0.93 else (r.choice([1, 1, 2, 3, 8]), 0)
    large = large[:: r.choice([1, -1])]
    parts: list[Part] = [
        Model(
            layers=r.randint(1, 4), width=r.choice([4, 8, 24]),
            dtype=r.choice(["float32"] * 4 + ["bfloat16", "float64"]),
            norm=r.random() < 0.3, counts=r.random() < 0.3, tied=r.random() < 0.2,
            large_mb=large[0], frozen_mb=large[1], micro_batches=r.choice([1, 1, 1, 2, 3]),
            zero_at=r.choice(["begin", "after_step", "end"]),
        ),
        *drawn_trainers(r, plain=kinds < 0.6),
    ]  # fmt: skip
    if any(t.kind in OPTIMIZERS for t in parts[1:] if isinstance(t, Trainer)) and r.random() < 0.3:
        moment = r.choice(["after_step", "after_call", "end"])
        parts.append(Schedule(r.choice(["step", "cosine", "lambda", "linear"]), moment))
    if r.random() < 0.5:
        every = ["list", "deque", "dict", "numpy", "tensor", "big", "count", "counter"]
        parts.append(Values(r.sample(every, r.randint(1, 4)), drawn_moment(r)))
    if kinds > 0.25:
        parts += drawn_followers(r, iterations)
        if r.random() < 0.2:
            what = r.choice(["weights", "weights", "moments", "buffers", "frozen", "large"])
            way = r.choice(COUNTED if what == "moments" else [*WAYS])
            moment, each, since = drawn_moment(r), r.randint(1, 3), r.randint(1, iterations)
            parts.append(Edit(what, way, moment, each, since))
    return Loop(seed, iterations, parts, drawn_options(r, iterations, tier))


def drawn_moment(r: random.Random) -> str:
    return r.choice(["begin", "forward", "before_step", "after_step", "after_call", "end"])


def drawn_trainers(r: random.Random, *, plain: bool) -> Iterator[Part]:
    shares = r.choice([1, 1, 2])
    for share in range(shares):
        own = ["own", "functional", "hidden", "wrapped"]
        kind = r.choice([*OPTIMIZERS] if plain else [*own, *own, *own, *OPTIMIZERS])
        yield Trainer(kind, r.choice([*WAYS]), share, shares)


def drawn_followers(r: random.Random, iterations: int) -> Iterator[Part]:
    for key in ("target", "ema")[: r.choice([0, 1, 1, 2])]:
        boxes = ["module", "module", "inside", "averaged", "dict", "nested", "object"]
        box, hard = r.choice(boxes), r.random() < 0.4
        ways = [*WAYS, *(["load_state_dict"] * 4 if box in ("module", "inside") else [])]
        ways += ["rebind"] * 4 if box == "dict" else []
        each, since = r.choice([1, 1, 2, 3]), r.choice([1, 1, r.randint(2, iterations)])
        one = Follower(key, box, r.choice(ways), hard, drawn_moment(r), each, since)
        yield one
        if r.random() < 0.3:
            spots = [("after_call", "after_call"), ("after_call", "end"), ("begin", "begin")]
            spots += [("after_step", "after_call"), ("end", "begin")]
            look = r.choice(["none", "done", "wait", "handle", "load"])
            into, out = r.choice(spots)
            each = 1 if (into, out) == ("end", "begin") else r.randint(1, 3)
            ways = ["copy_", "data.copy_", "numpy", "pointer", "foreach", "thread"]
            yield Swap(one, r.choice(ways), r.choice(ways), into, out, each, look)


def drawn_options(r: random.Random, iterations: int, tier: str) -> Options:
    often, numbers = r.choice([0, 0, 0.15, 0.4]), range(1, iterations + 1)
    spots = [
        "begin",
        "forward",
        "backward",
        "before_step",
        "update",
        "after_step",
        "again",
        "end",
        "end",
    ]
    saves = {number_of(i, r.choice(spots)) for i in numbers if r.random() < often}
    looks = {
        number_of(i, r.choice(["after_call", "begin"])): r.choice(["done", "wait", "handle"])
        for i in numbers if r.random() < 0.1
    }  # fmt: skip
    return Options(
        every=r.randint(1, 4) * STRIDE, tier=tier,
        when_busy=r.choice([None, None, None, "queue", "skip"]),
        on_error=r.choice(["warn"] * 9 + ["raise"]),
        slow_s=r.choice([0, 0, 0, 0.0005, 0.005]), lag_s=r.choice([0, 0, 0.001, 0.004]),
        switch_s=r.choice([0.005, 0.005, 0.0001, 0.03]),
        as_large=r.random() < 0.6, saves=sorted(saves), looks=looks,
        pause_s=r.choice([0, 0, 0.0005, 0.003]),
        end=r.choice(["close"] * 6 + ["error"] + ["kill"] * 3),
        end_at=number_of(r.choice(numbers), r.choice([*OFFSETS])),
    )  # fmt: skip
