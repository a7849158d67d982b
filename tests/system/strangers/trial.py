"""Save what a stranger's object has, restore it into another one, train both on, and compare.

A subject is built twice with other seeds.  The first is stepped and saved; the second, once fresh and once
stepped on other data, is restored; then both take two more steps on the same data.  What they compute, and
what their own `state_dict()`s say, is compared bit for bit.

    python -m system.strangers.trial PACKAGE...     one line of JSON for each subject
"""

import json
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import holdfast

EQUAL, REFUSED, WRONG, CRASH, UNTRIED = "equal", "refused", "wrong", "crash", "untried"
MARK = "outcome: "


@dataclass
class Subject:
    state: dict[str, Any]
    """What is handed to holdfast."""
    step: Callable[[int], Any]
    """Take one step of training on the data of this number; what comes back is compared."""


@dataclass
class Outcome:
    verdict: str
    why: str = ""


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def told(subject: Subject) -> dict[str, Any]:
    """What the objects themselves say that they have; nothing of those that cannot say it."""
    return {key: _told(value) for key, value in subject.state.items()}


def _told(value: Any) -> Any:
    if isinstance(value, list):
        return [_told(one) for one in value]
    if type(value) is dict:
        return {key: _told(one) for key, one in value.items()}
    try:
        return value.state_dict() if hasattr(value, "state_dict") else value
    except (NotImplementedError, RuntimeError):
        return None


def differences(a: Any, b: Any, at: str = "") -> Iterator[str]:
    """Paths at which two nested values differ in type, shape or any bit."""
    if isinstance(a, int) and isinstance(b, int):
        if a != b:
            yield f"{at}: {a} and {b}"
    elif type(a) is not type(b) and not {type(a), type(b)} <= {torch.Tensor, torch.nn.Parameter}:
        yield f"{at}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, torch.Tensor):
        yield from _tensors(a, b, at)
    elif isinstance(a, Mapping):
        for key in a.keys() ^ b.keys():
            if a.get(key, b.get(key)) != {}:  # a state that was looked up, and is empty
                yield f"{at}.{key}: is on one side only"
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{at}: {len(a)} and {len(b)} values"
        for i, (x, y) in enumerate(zip(a, b)):
            yield from differences(x, y, f"{at}.{i}")
    elif isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            yield f"{at}: other values"
    elif hasattr(a, "__dict__") and type(a).__eq__ is object.__eq__:
        yield from differences(vars(a), vars(b), at)
    elif callable(a):
        pass  # code is the script's
    elif not (a == b or (a != a and b != b)):
        yield f"{at}: {a!r} and {b!r}"


def _tensors(a: torch.Tensor, b: torch.Tensor, at: str) -> Iterator[str]:
    if a.is_nested and b.is_nested:  # its shape is a symbol, which each has of its own
        if a.layout != b.layout:
            yield f"{at}: {a.layout} and {b.layout}"
        yield from differences(list(a.unbind()), list(b.unbind()), at)
    elif a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        yield f"{at}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    elif hasattr(a, "__tensor_flatten__"):
        names, rest = a.__tensor_flatten__()
        others, other_rest = b.__tensor_flatten__()
        yield from differences(
            {name: getattr(a, name) for name in names},
            {name: getattr(b, name) for name in others},
            at,
        )
        if str(rest) != str(other_rest):
            yield f"{at}: {rest} and {other_rest}"
    elif a.is_quantized:
        if a.q_scale() != b.q_scale() or not torch.equal(a.int_repr(), b.int_repr()):
            yield f"{at}: other quantised values"
    elif a.layout is not torch.strided:
        yield from differences(a.to_dense(), b.to_dense(), at)
    elif _bytes(a) != _bytes(b):
        yield f"{at}: other values"


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def trial(build: Callable[[int], Subject]) -> Outcome:
    """Try a subject; the worst of both ways to restore it counts."""
    for stepped in (False, True):
        outcome = one_trial(build, stepped)
        if outcome.verdict != EQUAL:
            return outcome
    return outcome


def one_trial(build: Callable[[int], Subject], stepped: bool) -> Outcome:
    first = built(build, 0)
    for n in (1, 2):
        taken(first, n)
    second = built(build, 7)
    if stepped:
        taken(second, 3)
    with tempfile.TemporaryDirectory() as root:
        for call in (
            lambda: holdfast.save(root, first.state, step=2),
            lambda: holdfast.load(root, second.state),
        ):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call()
            except holdfast.HoldfastError as error:
                return Outcome(REFUSED, str(error))
            except Exception:
                return Outcome(CRASH, traceback.format_exc())
    if found := list(differences(told(first), told(second))):
        return Outcome(WRONG, f"restored: {found[:5]}")
    for n in (4, 5):
        if found := list(differences(taken(first, n), taken(second, n), "computed")):
            return Outcome(WRONG, f"step {n}: {found[:5]}")
        if found := list(differences(told(first), told(second))):
            return Outcome(WRONG, f"after step {n}: {found[:5]}")
    return Outcome(EQUAL)


def built(build: Callable[[int], Subject], seed: int) -> Subject:
    seed_all(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(seed)


def taken(subject: Subject, n: int) -> Any:
    seed_all(1000 + n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return subject.step(n)


def main(packages: list[str]) -> None:
    from system.strangers.unusual import SUBJECTS

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        store = dist.FileStore(os.path.join(scratch, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for package in packages:
            for name, build in SUBJECTS[package].items():
                try:
                    outcome = trial(build)
                except Exception:  # of the subject itself, without holdfast
                    outcome = Outcome(UNTRIED, traceback.format_exc())
                line = {"package": package, "name": name, **vars(outcome)}
                print("\n" + MARK + json.dumps(line), flush=True)
    os._exit(0)  # what strangers began is not waited for


if __name__ == "__main__":
    main(sys.argv[1:])
